"""``dblp lab``: experiments over network namespaces, their reports, and what keeps the host clean."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dblp.cli.extras import require
from dblp.cli.host import document, write_json
from dblp.cli.options import parse_sizes
from dblp.errors import ConfigError, LocalError

if TYPE_CHECKING:
    from rich.console import Console

    from dblp.sim.lab.experiment import Experiment
    from dblp.sim.lab.run import Run

EXIT_FAILED = 1
"""The run had not the loss that it claims, or a rank failed."""

lab = typer.Typer(help="Experiments on network namespaces of this host (root).", no_args_is_help=True)

Json = Annotated[Path | None, typer.Option(help="Write the figures as JSON.")]


class RunFailed(LocalError):
    """An experiment ended without the loss that it claims."""

    code = "lab"
    exit_code = EXIT_FAILED


@lab.command("run")
def run(
    experiment: Annotated[str, typer.Argument(help="A shipped experiment, or a TOML file.")],
    arms: Annotated[
        str | None, typer.Option(help="Other arms, with ';' between: 'gloo-cubic; default(leg=0.4)'.")
    ] = None,
    sizes: Annotated[str | None, typer.Option(help="Other sizes of the tensor: 10M,25M.")] = None,
    impair: Annotated[str, typer.Option(help="Another schedule of impairments; 'none' for none.")] = "",
    traffic: Annotated[str, typer.Option(help="Other traffic of the cross hosts.")] = "",
    hosts: Annotated[int, typer.Option(help="Another number of hosts, a rank each.")] = 0,
    rounds: Annotated[int, typer.Option(help="Another number of rounds an arm.")] = 0,
    block: Annotated[int, typer.Option(help="Another number of rounds in a block.")] = 0,
    seconds: Annotated[float, typer.Option(help="Another limit of a block, seconds.")] = 0.0,
    data: Annotated[str, typer.Option(help="Data set of a training experiment.")] = "",
    data_dir: Annotated[str, typer.Option(help="Folder of its files.")] = "",
    epochs: Annotated[int, typer.Option(help="Epochs of a training experiment.")] = 0,
    capture: Annotated[Path | None, typer.Option(help="Capture a host's datagrams meanwhile (pcap).")] = None,
    capture_host: Annotated[int, typer.Option(help="Whose.")] = 0,
    json: Json = None,
    report: Annotated[Path | None, typer.Option(help="Write a report, one HTML file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture of the results.")] = None,
) -> None:
    """Run an experiment: all arms in turn over one network, under the same schedule of impairments."""
    from dblp.sim.lab.experiment import load_experiment

    chosen = _changed(load_experiment(experiment), arms, sizes, hosts, rounds, block, seconds)
    chosen = _impaired(_trained(chosen, data, data_dir, epochs), impair, traffic)
    if capture is not None and not 0 <= capture_host < chosen.topology.hosts:
        raise ConfigError(f"--capture-host {capture_host}: there are hosts 0 to {chosen.topology.hosts - 1}")
    require("torch", "pyroute2", *(["matplotlib"] if report or png else []))
    _run(chosen, (str(capture), capture_host) if capture else None, json, report, png)


def _changed(
    experiment: Experiment,
    arms: str | None,
    sizes: str | None,
    hosts: int,
    rounds: int,
    block: int,
    seconds: float,
) -> Experiment:
    """The experiment as the options want it; what was not given stays."""
    from dataclasses import replace

    from dblp.sim.lab.arms import parse_arm

    changes: dict[str, Any] = {
        name: value for name, value in (("rounds", rounds), ("block", block), ("seconds", seconds)) if value
    }
    if arms is not None:
        changes["arms"] = tuple(parse_arm(arm.strip()) for arm in arms.split(";") if arm.strip())
    if sizes is not None:
        changes["sizes"] = tuple(parse_sizes(sizes))
    if hosts:
        changes["topology"] = replace(experiment.topology, hosts=hosts)
    return experiment.with_(**changes) if changes else experiment


def _impaired(experiment: Experiment, impair: str, traffic: str) -> Experiment:
    from dblp.sim.lab.traffic import parse_traffic

    changes: dict[str, Any] = {}
    if impair:
        changes["impair"] = "" if impair == "none" else impair
    if traffic:
        changes["traffic"] = parse_traffic(traffic)
    return experiment.with_(**changes) if changes else experiment


def _trained(experiment: Experiment, data: str, data_dir: str, epochs: int) -> Experiment:
    from dataclasses import replace

    changes: dict[str, Any] = {
        name: value for name, value in (("data", data), ("data_dir", data_dir), ("epochs", epochs)) if value
    }
    if not changes:
        return experiment
    if experiment.train is None:
        raise ConfigError(f"--data, --data-dir and --epochs are for training; {experiment.name} times rounds")
    return experiment.with_(train=replace(experiment.train, **changes))


def _run(
    experiment: Experiment,
    capture: tuple[str, int] | None,
    json: Path | None,
    report: Path | None,
    png: Path | None,
) -> None:
    from rich.console import Console

    from dblp.cli.lab.progress import LabProgress
    from dblp.cli.lab.tables import headline, ratio_table, result_table
    from dblp.sim.lab.results import document_of
    from dblp.sim.lab.run import run_experiment

    for option, path in (("--json", json), ("--report", report), ("--png", png)):
        if path is not None and path.is_dir():  # now, not when hours of rounds are done
            raise LocalError(f"{option} {path}: is a folder; name a file")
    console = Console()
    console.print(headline(experiment), highlight=False)
    with LabProgress(experiment, console) as progress:
        done: Run = run_experiment(experiment, progress, capture=capture)
    found = document_of(done)
    content = document("lab run", found.pop("records"), **found)
    console.print(result_table(content["records"]))
    if content["ratios"]:
        console.print(ratio_table(content["ratios"]))
    _write(content, console, json, report, png)
    if capture is not None:
        console.print(f"capture: {capture[0]}; look into it with: dblp pcap {capture[0]}", highlight=False)
    if done.failed:
        raise RunFailed(f"the run failed: {done.failed}")


def _write(
    content: dict[str, Any], console: Console, json: Path | None, report: Path | None, png: Path | None
) -> None:
    if json is not None:
        write_json(json, content)
        console.print(f"figures: {json}", highlight=False)
    if report is not None:
        from dblp.sim.lab.report import page

        _write_bytes("--report", report, page(content).encode())
        console.print(f"report: {report}", highlight=False)
    if png is not None:
        from dblp.sim.lab.figures import overview

        _write_bytes("--png", png, overview(content))
        console.print(f"picture: {png}", highlight=False)


def _write_bytes(option: str, path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise LocalError(f"{option} {path}: cannot be written: {error.strerror}") from None


@lab.command("list")
def list_(json: Json = None) -> None:
    """List the experiments that ship."""
    from rich.console import Console

    from dblp.cli.lab.tables import experiment_table
    from dblp.sim.lab.experiment import load_experiment, shipped

    experiments = [load_experiment(name) for name in shipped()]
    Console().print(experiment_table(experiments))
    if json is not None:
        write_json(json, document("lab list", [{"name": e.name, **e.record()} for e in experiments]))


@lab.command("report")
def report_(
    file: Annotated[Path, typer.Argument(help="JSON of dblp lab run.")],
    report: Annotated[Path | None, typer.Option(help="Write the report, one HTML file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the picture.")] = None,
) -> None:
    """Make report and picture again from a run's JSON."""
    from rich.console import Console

    if report is None and png is None:
        raise ConfigError("dblp lab report: name --report FILE.html, --png FILE.png, or both")
    require("matplotlib")
    content = read_document(file)
    if content.get("command") != "lab run":
        raise ConfigError(
            f"{file}: a file of dblp lab run --json is expected, this one is of {content.get('command')!r}"
        )
    _write(content, Console(), None, report, png)


@lab.command()
def compare(
    before: Annotated[Path, typer.Argument(help="JSON of a run.")],
    after: Annotated[Path, typer.Argument(help="JSON of another.")],
    json: Json = None,
) -> None:
    """Compare two runs, arm by arm; a ratio below 1 says that the second is faster."""
    from rich.console import Console

    from dblp.cli.lab.tables import change_table
    from dblp.sim.lab.compare import compare as compare_documents

    changes = compare_documents(read_document(before), read_document(after))
    Console().print(change_table(changes))
    if json is not None:
        write_json(json, document("lab compare", [change.record() for change in changes]))


def read_document(path: Path) -> dict[str, Any]:
    """A command's JSON; raises LocalError that names the file."""
    try:
        content = json_module.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LocalError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise LocalError(f"{path}: not the JSON of a dblp command")
    return content


@lab.command()
def check(json: Json = None) -> None:
    """Say whether this host can hold a laboratory, and how loss, rate and delay will be done.

    Exit code 0 if it can, 77 without root, 69 if something essential is missing.
    """
    from dataclasses import asdict

    from rich.console import Console

    from dblp.cli.lab.tables import finding_table
    from dblp.sim.lab import preflight

    findings = preflight.preflight()
    Console().print(finding_table(findings))
    if json is not None:
        write_json(json, document("lab check", [asdict(finding) for finding in findings]))
    preflight.require()


@lab.command()
def clean() -> None:
    """Remove what killed runs left behind: namespaces whose owner is gone, with what still runs in them."""
    from dblp.sim.lab import preflight
    from dblp.sim.lab.leftovers import remove_leftovers

    preflight.require()
    names = remove_leftovers()
    typer.echo("\n".join(f"removed {name}" for name in names) or "nothing was left behind")


@lab.command()
def capture(
    experiment: Annotated[str, typer.Argument(help="A shipped experiment, or a TOML file.")],
    file: Annotated[Path, typer.Argument(help="Where the pcap goes.")],
    arm: Annotated[str, typer.Option(help="The arm to capture.")] = "default",
    host: Annotated[int, typer.Option(help="The host whose datagrams are captured.")] = 0,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 5,
    sizes: Annotated[str, typer.Option(help="Size of the tensor.")] = "1M",
) -> None:
    """Capture some rounds of one arm of an experiment, for dblp pcap or Wireshark."""
    from dblp.sim.lab.arms import parse_arm

    if parse_arm(arm).preset is None:
        raise ConfigError(f"--arm {arm}: a capture holds dblp's datagrams; gloo's arms send TCP")
    run(experiment, arms=arm, sizes=sizes, rounds=rounds, capture=file, capture_host=host)
