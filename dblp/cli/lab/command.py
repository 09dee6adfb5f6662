"""``dblp lab``: experiments over network namespaces, their reports, and what keeps the host clean."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dblp.cli.extras import require
from dblp.cli.host import document, write_json
from dblp.cli.options import parse_sizes, parse_time
from dblp.cli.output import check_outputs, picture_form, write_file
from dblp.cli.whole import print_whole
from dblp.errors import ConfigError, LocalError
from dblp.units import parse_bps

if TYPE_CHECKING:
    from rich.console import Console

    from dblp.sim.lab.arms import Arm
    from dblp.sim.lab.experiment import Experiment
    from dblp.sim.lab.run import Run

EXIT_FAILED = 1
"""The run had not the loss that it claims, or a rank failed."""
CAPTURE = "lab capture"

lab = typer.Typer(help="Experiments on network namespaces of this host (root).", no_args_is_help=True)

Json = Annotated[Path | None, typer.Option(help="Write the figures as JSON.")]


class RunFailed(LocalError):
    """An experiment ended without the loss that it claims."""

    code = "lab"
    exit_code = EXIT_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outputs:
    """Where the results go."""

    json: Path | None = None
    report: Path | None = None
    picture: Path | None = None
    capture: Path | None = None
    capture_host: int = 0
    capture_options: tuple[str, str] = ("--capture", "--capture-host")
    """How the command calls them."""

    def check(self) -> None:
        """Now, not when hours of rounds are done; raises LocalError."""
        files = {"--json": self.json, "--report": self.report, self.capture_options[0]: self.capture}
        check_outputs(files, {"--picture": self.picture})


@lab.command("run")
def run(
    experiment: Annotated[str, typer.Argument(help="A shipped experiment, or a TOML file.")],
    arms: Annotated[
        str | None, typer.Option(help="Other arms, with ';' between: 'gloo-cubic; default(leg=0.4)'.")
    ] = None,
    sizes: Annotated[str | None, typer.Option(help="Other sizes of the tensor: 10M,25M.")] = None,
    impair: Annotated[str, typer.Option(help="Another schedule of impairments; 'none' for none.")] = "",
    traffic: Annotated[str, typer.Option(help="Other traffic of the cross hosts.")] = "",
    hosts: Annotated[int | None, typer.Option(help="Another number of hosts, a rank each.")] = None,
    rate: Annotated[str, typer.Option(help="Another rate of each host's link: 100mbit.")] = "",
    rounds: Annotated[int | None, typer.Option(help="Another number of rounds an arm.")] = None,
    block: Annotated[int | None, typer.Option(help="Another number of rounds in a block.")] = None,
    seconds: Annotated[str | None, typer.Option(help="Another limit of a block: 20s, 1min.")] = None,
    data: Annotated[str, typer.Option(help="Data set of a training experiment.")] = "",
    data_dir: Annotated[str, typer.Option(help="Folder of its files.")] = "",
    epochs: Annotated[int | None, typer.Option(help="Epochs of a training experiment.")] = None,
    capture: Annotated[Path | None, typer.Option(help="Capture a host's datagrams meanwhile (pcap).")] = None,
    capture_host: Annotated[int, typer.Option(help="Whose.")] = 0,
    json: Json = None,
    report: Annotated[Path | None, typer.Option(help="Write a report, one HTML file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw a picture of the results.")] = None,
) -> None:
    """Run an experiment: all arms in turn over one network, under the same schedule of impairments."""
    chosen = _changed(_loaded(experiment), arms, sizes, rounds, block, seconds)
    chosen = _placed(chosen, hosts, rate)
    chosen = _impaired(_trained(chosen, data, data_dir, epochs), impair, traffic)
    outputs = _Outputs(json=json, report=report, picture=picture, capture=capture, capture_host=capture_host)
    _run(chosen, outputs, "lab run")


def _loaded(source: str) -> Experiment:
    """An experiment whose training, if it is one, is possible, too."""
    from dblp.cli.lab.needs import check_training
    from dblp.sim.lab.experiment import load_experiment, place_of

    experiment = load_experiment(source)
    check_training(experiment, place_of(source))
    return experiment


def _changed(
    experiment: Experiment,
    arms: str | None,
    sizes: str | None,
    rounds: int | None,
    block: int | None,
    seconds: str | None,
) -> Experiment:
    """The experiment as the options want it; what was not given stays."""
    changes: dict[str, Any] = {
        name: value for name, value in (("rounds", rounds), ("block", block)) if value is not None
    }
    if seconds is not None:
        changes["seconds"] = parse_time("--seconds", seconds)
    if arms is not None:
        changes["arms"] = _arms(arms)
    if sizes is not None:
        changes["sizes"] = tuple(parse_sizes(sizes))
    return experiment.with_(**changes) if changes else experiment


def _placed(experiment: Experiment, hosts: int | None, rate: str) -> Experiment:
    """The same experiment on another network."""
    from dataclasses import replace

    changes: dict[str, Any] = {}
    if hosts is not None:
        changes["hosts"] = hosts
    if rate:
        try:
            changes["rate_bps"] = parse_bps(rate)
        except ConfigError as error:
            raise ConfigError(f"--rate: {error}") from None
    return experiment.with_(topology=replace(experiment.topology, **changes)) if changes else experiment


def _arms(text: str, option: str = "--arms") -> tuple[Arm, ...]:
    from dblp.sim.lab.arms import parse_arm

    try:
        return tuple(parse_arm(arm.strip()) for arm in text.split(";") if arm.strip())
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def _impaired(experiment: Experiment, impair: str, traffic: str) -> Experiment:
    from dblp.sim.lab.traffic import parse_traffic

    changes: dict[str, Any] = {}
    if impair:
        changes["impair"] = "" if impair == "none" else impair
    if traffic:
        changes["traffic"] = parse_traffic(traffic)
    return experiment.with_(**changes) if changes else experiment


def _trained(experiment: Experiment, data: str, data_dir: str, epochs: int | None) -> Experiment:
    from dataclasses import replace

    from dblp.cli.lab.needs import check_training

    changes: dict[str, Any] = {
        name: value for name, value in (("data", data), ("data_dir", data_dir)) if value
    }
    if epochs is not None:
        if epochs < 1:
            raise ConfigError(f"--epochs {epochs}: at least 1 is needed")
        changes["epochs"] = epochs
    if not changes:
        return experiment
    if experiment.train is None:
        raise ConfigError(f"--data, --data-dir and --epochs are for training; {experiment.name} times rounds")
    changed = experiment.with_(train=replace(experiment.train, **changes))
    check_training(changed, "with these options")
    return changed


def _check(experiment: Experiment, outputs: _Outputs) -> None:
    """All that can be known before anything is built."""
    from dblp.cli.lab.needs import check_data, check_memory

    hosts = experiment.topology.hosts
    if outputs.capture is not None and not 0 <= outputs.capture_host < hosts:
        raise ConfigError(
            f"{outputs.capture_options[1]} {outputs.capture_host}: there are hosts 0 to {hosts - 1}"
        )
    outputs.check()
    check_memory(experiment)
    require("torch", "pyroute2", *(["matplotlib"] if outputs.report or outputs.picture else []))
    check_data(experiment)


def _run(experiment: Experiment, outputs: _Outputs, command: str) -> None:
    from rich.console import Console

    from dblp.cli.lab.progress import LabProgress
    from dblp.cli.lab.tables import headline
    from dblp.sim.lab.run import Run, run_experiment

    _check(experiment, outputs)
    capture = (str(outputs.capture), outputs.capture_host) if outputs.capture else None
    console = Console()
    console.print(headline(experiment, command), highlight=False)
    done = Run(experiment=experiment)
    try:
        with LabProgress(experiment, console) as progress:
            run_experiment(experiment, progress, capture=capture, run=done)
    except BaseException:  # Ctrl-C too; what was measured may have taken hours
        if done.measured:
            _say(console, "the run did not come to its end; what was measured until then:")
            _show(done, console, outputs)
        elif outputs.json or outputs.report or outputs.picture:
            _say(console, "nothing was measured, so no file was written")
        raise
    _show(done, console, outputs)
    if done.failed and command == CAPTURE:  # it is there to be looked into, and claims nothing
        _say(console, f"note: as a measurement this would have failed: {done.failed}")
    elif done.failed:
        raise RunFailed(f"the run failed: {done.failed}")


def _show(done: Run, console: Console, outputs: _Outputs) -> None:
    """Tables, and the files that were asked for."""
    from dblp.cli.lab.tables import ratio_table, result_table
    from dblp.sim.lab.results import document_of

    found = document_of(done)
    content = document("lab run", found.pop("records"), **found)  # what it is, whatever command made it
    print_whole(console, result_table(content["records"]))
    if content["ratios"]:
        print_whole(console, ratio_table(content["ratios"]))
    _write(content, console, outputs)
    if outputs.capture is not None:
        _say(console, f"capture: {outputs.capture}; look into it with: dblp pcap {outputs.capture}")


def _write(content: dict[str, Any], console: Console, outputs: _Outputs) -> None:
    if outputs.json is not None:
        write_json(outputs.json, content)
        _say(console, f"figures: {outputs.json}")
    if outputs.report is not None:
        from dblp.sim.lab.report import page

        write_file("--report", outputs.report, page(content).encode())
        _say(console, f"report: {outputs.report}")
    if outputs.picture is not None:
        from dblp.sim.lab.figures import overview

        write_file(
            "--picture", outputs.picture, overview(content, picture_form("--picture", outputs.picture))
        )
        _say(console, f"picture: {outputs.picture}")


def _say(console: Console, text: str) -> None:
    """A line with a path, which must not be broken, nor taken for markup."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


@lab.command("list")
def list_(json: Json = None) -> None:
    """List the experiments that ship."""
    from rich.console import Console

    from dblp.cli.lab.tables import experiment_table
    from dblp.sim.lab.experiment import load_experiment, shipped

    check_outputs({"--json": json})
    experiments = [load_experiment(name) for name in shipped()]
    Console().print(experiment_table(experiments))
    if json is not None:
        write_json(json, document("lab list", [{"name": e.name, **e.record()} for e in experiments]))


@lab.command("report")
def report_(
    file: Annotated[Path, typer.Argument(help="JSON of dblp lab run.")],
    report: Annotated[Path | None, typer.Option(help="Write the report, one HTML file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the picture.")] = None,
) -> None:
    """Make report and picture again from a run's JSON."""
    from rich.console import Console

    from dblp.sim.lab.compare import check_document

    if report is None and picture is None:
        raise ConfigError("dblp lab report: name --report FILE.html, --picture FILE.png, or both")
    outputs = _Outputs(report=report, picture=picture)
    outputs.check()
    require("matplotlib")
    content = read_document(file)
    check_document(content, str(file))
    try:
        _write(content, Console(), outputs)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file}: not as dblp lab run --json wrote it ({error!r})") from None


@lab.command()
def compare(
    before: Annotated[Path, typer.Argument(help="JSON of a run.")],
    after: Annotated[Path, typer.Argument(help="JSON of another.")],
    json: Json = None,
) -> None:
    """Compare two runs, arm by arm; a ratio below 1 says that the second is faster."""
    from rich.console import Console

    from dblp.cli.lab.tables import change_table, too_few
    from dblp.sim.lab.compare import compare as compare_documents
    from dblp.sim.lab.compare import failures, headings

    check_outputs({"--json": json})
    contents, sources = (read_document(before), read_document(after)), (str(before), str(after))
    changes = compare_documents(*contents, sources)
    for line in headings(contents, sources):
        typer.echo(line)
    Console().print(change_table(changes))
    failed = failures(contents, sources)
    for line in failed:
        typer.echo(line)
    if lacking := too_few(changes):
        typer.echo(lacking)
    if json is not None:
        write_json(json, document("lab compare", [change.record() for change in changes], failed=failed))


def read_document(path: Path) -> dict[str, Any]:
    """A command's JSON; raises LocalError that names the file."""
    try:
        content = json_module.loads(path.read_text())
    except OSError as error:
        raise LocalError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LocalError(f"{path}: cannot be read as JSON: it is no text") from None
    except ValueError as error:
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

    check_outputs({"--json": json})
    findings = preflight.preflight()
    Console().print(finding_table(findings))
    if json is not None:
        write_json(json, document("lab check", [asdict(finding) for finding in findings]))
    preflight.require()


@lab.command()
def clean() -> None:
    """Remove what killed runs left behind: namespaces and folders whose owner is gone, with what still runs in them."""
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
    if any(found.preset is None for found in _arms(arm, "--arm")):
        raise ConfigError(f"--arm {arm}: a capture holds dblp's datagrams; gloo's arms send TCP")
    chosen = _changed(_loaded(experiment), arm, sizes, rounds, None, None)
    _run(chosen, _Outputs(capture=file, capture_host=host, capture_options=("FILE", "--host")), CAPTURE)
