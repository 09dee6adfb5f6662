"""``dblp sim``: run an experiment, list them, make a model's trace. Options, progress, tables."""

from __future__ import annotations

import math
import os
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dblp.cli.extras import require
from dblp.cli.options import parse_seeds
from dblp.cli.output import check_folder, check_outputs, picture_form, write_file
from dblp.cli.sim.palette import axis_names, point_text
from dblp.cli.whole import print_whole
from dblp.errors import ConfigError
from dblp.units import format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from rich.table import Table

    from dblp.sim.fabric.experiment import Case, Experiment
    from dblp.sim.fabric.sweep import CaseResult


sim = typer.Typer(
    help="Experiments in the fabric simulator: switches, paths, transports, up to a thousand hosts.",
    no_args_is_help=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a sweep runs."""

    processes: int
    """So many on this machine."""
    ray: str = ""
    """Address of a Ray cluster that does instead."""


@sim.command("run")
def run_experiment(
    experiment: Annotated[str, typer.Argument(help="A name that `dblp sim list` shows, or a TOML file.")],
    seeds: Annotated[str, typer.Option(help="How many seeds, or the seeds themselves with a comma.")] = "",
    processes: Annotated[int, typer.Option(help="Runs at a time; 0: one a core.")] = 0,
    ray: Annotated[
        str,
        typer.Option(
            help="Run on a Ray cluster instead: HOST:PORT, ray://HOST:PORT, auto (one that runs here) or local (start one).",
            metavar="ADDRESS",
        ),
    ] = "",
    resume: Annotated[
        Path | None, typer.Option(help="Folder of results: what is there is not run again.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw queues, loads, completion and a time line.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a report with tables and picture, one HTML file.")
    ] = None,
) -> None:
    """Run an experiment: all its arms at all its points, and a paper's figures beside ours."""
    from dblp.sim.fabric.experiment import load_experiment

    if processes < 0:
        raise ConfigError(f"--processes {processes}: a number, or 0 for one a core")
    if ray and processes:
        raise ConfigError(f"--processes {processes} and --ray {ray}: one of the two")
    loaded = load_experiment(experiment)
    chosen = parse_seeds(seeds) if seeds else list(range(loaded.seeds))
    check_outputs({"--json": json, "--report": report}, {"--picture": picture})
    check_folder("--resume", resume)
    require("numba", *(["matplotlib"] if picture or report else []), *(["ray"] if ray else []))
    places = Places(processes=processes or len(os.sched_getaffinity(0)), ray=ray)
    _run(loaded, chosen, places, resume, json, picture, report)


@sim.command("list")
def list_experiments() -> None:
    """Show the experiments and the models' traces of the package."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from dblp.sim.fabric.experiment import experiment_names, load_experiment
    from dblp.sim.fabric.traces import load_trace, trace_names

    table = Table("experiment", "arms", "points", "title", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in experiment_names():
        found = load_experiment(name)
        table.add_row(name, str(len(found.arms)), str(len(list(found.points()))), found.title)
    console = Console()
    console.print(table)
    for name in trace_names():
        trace = load_trace(name)
        size = f"{trace.nbytes / 1e6:.1f} MB, {len(trace.layers)} layers"
        console.print(
            f"trace {name}: {size}, {format_seconds(trace.compute_s)} a step ({trace.source})",
            highlight=False,
        )


@sim.command("trace")
def make_model_trace(
    model: Annotated[
        str,
        typer.Argument(help="resnet50, vgg16, gpt2, or MODULE:NAME, a call that gives a torch.nn.Module."),
    ],
    output: Annotated[Path, typer.Option(help="The JSON file to write.")],
    batch: Annotated[int, typer.Option(help="Samples of a step and worker; 0: the model's own.")] = 0,
    rate: Annotated[float, typer.Option(help="FLOP/s of a worker; 0: half of a V100.")] = 0.0,
    sample: Annotated[
        str,
        typer.Option(help="Shape of a sample of MODULE:NAME: 3x224x224, or tokens:1024.", metavar="SHAPE"),
    ] = "",
) -> None:
    """Make the trace of a model's step: its layers' sizes, and times from their FLOPs."""
    from dblp.cli.host import write_json
    from dblp.sim.fabric.models import RATE, make_trace

    if batch < 0 or not 0 <= rate < math.inf:
        raise ConfigError(f"--batch {batch}, --rate {rate:g}: must not be negative, nor without bounds")
    if bool(sample) != (":" in model):
        raise ConfigError(
            f"--sample {sample!r}: goes with a model MODULE:NAME, which {model!r} {'is' if ':' in model else 'is not'}"
        )
    if sample:
        require("torch")
        from dblp.cli.sim.modules import trace_module

        trace = trace_module(model, sample, batch or 1, rate or RATE)
    else:
        trace = make_trace(model, batch, rate or RATE)
    check_outputs({"--output": output})
    write_json(output, trace, "--output")
    size = f"{len(trace['layers'])} layers, {sum(layer['bytes'] for layer in trace['layers']) / 1e6:.1f} MB"
    typer.echo(
        f'trace: {output}; {size}, {format_seconds(trace["step_s"])} a step; as a workload: model = "{output}"'
    )


def _run(
    experiment: Experiment,
    seeds: list[int],
    places: Places,
    folder: Path | None,
    json: Path | None,
    picture: Path | None,
    report: Path | None,
) -> None:
    from rich.console import Console

    from dblp.sim.fabric.sweep import claims, records

    console = Console()
    console.print(f"[bold]dblp sim run {experiment.name}[/]: {experiment.title}", highlight=False)
    results = _results(experiment, seeds, places, folder, console, pictured=bool(picture or report))
    rows = records(experiment, results)
    found = claims(experiment, rows)
    print_whole(console, records_table(rows))
    if said := unfinished(results):
        console.print(said, highlight=False, soft_wrap=True, markup=False)
    if found:
        print_whole(console, claims_table(found))
    for note in filter(None, (experiment.paper and f"paper: {experiment.paper}", experiment.why)):
        console.print(note, highlight=False)
    _write(experiment, rows, found, results, json, picture, report, console)


def _results(
    experiment: Experiment,
    seeds: list[int],
    places: Places,
    folder: Path | None,
    console: Console,
    *,
    pictured: bool,
) -> list[CaseResult]:
    """Run all cases, and show how far they are."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dblp.cli.worker import die_with_parent
    from dblp.sim.fabric.packet import prepare
    from dblp.sim.fabric.sweep import run_cases

    cases = experiment.cases(seeds)
    last = list(experiment.points())[-1]

    def shown(case: Case) -> bool:
        return pictured and case.point == last and case.seed == seeds[0]

    if experiment.engine == "packet" and not places.ray:
        prepare()  # numba may have to compile it, and says so: above the bar, not through it
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    coming = run_cases(
        cases,
        processes=places.processes,
        ray=places.ray,
        folder=folder,
        pictured=shown,
        initializer=die_with_parent,
        initargs=(os.getpid(),),
    )
    with Progress(*columns, console=console, transient=True) as progress, closing(coming):
        task = progress.add_task("runs", total=len(cases))
        for result in coming:
            results.append(result)
            progress.update(task, advance=1, description=f"{result.policy}, seed {result.seed}")
    return results


def _write(
    experiment: Experiment,
    rows: list[dict[str, Any]],
    found: list[dict[str, Any]],
    results: list[CaseResult],
    json: Path | None,
    picture: Path | None,
    report: Path | None,
    console: Console,
) -> None:
    from dblp.cli.host import document, write_json
    from dblp.sim.fabric.sweep import runs

    if json is not None:
        facts = {"title": experiment.title, "paper": experiment.paper, "why": experiment.why, "claims": found}
        write_json(
            json, document("sim run", rows, **facts, **experiment.setting, runs=runs(experiment, results))
        )
    if picture is not None or report is not None:
        from dblp.cli.sim.page import write_page
        from dblp.cli.sim.pictures import draw

        if picture is not None:
            write_file(
                "--picture", picture, draw(experiment, rows, results, picture_form("--picture", picture))
            )
        if report is not None:
            write_page(report, experiment, rows, found, results, draw(experiment, rows, results, "png"))
    for path in (json, picture, report):
        if path is not None:
            console.print(f"written: {path}", highlight=False, soft_wrap=True, markup=False)


def records_table(rows: list[dict[str, Any]]) -> Table:
    """One row for each arm and point."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    axes = axis_names(name for name in rows[0] if "." in name)
    for heading in ("policy", *axes.values(), *headings(rows)):
        table.add_column(
            heading,
            justify="left" if heading == "policy" else "right",
            no_wrap=heading == "policy",
            overflow="fold",
        )
    before = None
    for row in rows:
        point = [row[name] for name in axes]
        if before == row["policy"]:
            table.add_section()
        before = before or row["policy"]
        table.add_row(row["policy"], *map(str, point), *cells(row, headings(rows)))
    return table


def unfinished(results: Sequence[CaseResult]) -> str:
    """How many runs of which arms did not finish, and why; empty if all did."""
    ends = Counter((result.policy, result.ended) for result in results if result.ended != "done")
    arms = ", ".join(f"{policy} ({count} {_WHY[ended]})" for (policy, ended), count in ends.items())
    return f"unfinished: {ends.total()} of {format_count(len(results), 'run')}: {arms}" if ends else ""


_WHY = {
    "until": "stopped at the scenario's `until`",
    "failed": "failed: a flow or a round was given up",
}
"""What an unfinished run came to, by ``Outcome.ended``."""


SPREAD = "over seeds"
"""Heading of the standard deviation of the seeds' means."""


def headings(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of the figures that ``cells`` gives."""
    found = ["hosts", "mean", "p99", "max link load", "missing"]
    if any(row["completion_sd_s"] is not None for row in rows):
        found.insert(2, SPREAD)
    if any(row["unfinished"] for row in rows):
        found.append("unfinished")
    return [*found, "sent", "reacts after"] if "sent_share" in rows[0] else found


def cells(row: dict[str, Any], shown: Sequence[str]) -> list[str]:
    """A record's figures as text, under the headings that are ``shown``."""
    seconds = ["-" if row[name] is None else format_seconds(row[name]) for name in ("completion_s", "p99_s")]
    ratio, missing = row["max_link_load_ratio"], row["missing_share"]
    load = "-" if ratio is None else f"{ratio:.3f}"
    found = [str(row["hosts"]), *seconds, load, "-" if missing is None else f"{missing:.2%}"]
    if SPREAD in shown:
        spread = row["completion_sd_s"]
        found.insert(2, "-" if spread is None else f"± {format_seconds(spread)}")
    if "unfinished" in shown:
        found.append(str(row["unfinished"]))
    if "sent_share" in row:
        late = row["reaction_rounds"]
        share = row["sent_share"]
        found += ["-" if share is None else f"{share:.2%}", "-" if late is None else f"{late:.0f} rounds"]
    return found


def claim_at(claim: Mapping[str, Any]) -> str:
    """Where a claim's figure is taken: at its point, or where ours is best, which is told."""
    if claim["at"] or not claim["best_at"]:
        return str(claim["at"])
    point = (part.partition("=") for part in claim["best_at"].split(", "))
    return f"best: {point_text([(name, value) for name, _, value in point])}"


def claims_table(found: list[dict[str, Any]]) -> Table:
    """The paper's figures beside ours."""
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title="the paper's figures, and ours", title_justify="left"
    )
    for heading in ("policy", "against", "measure", "at", "paper", "ours"):
        table.add_column(heading, justify="right" if heading in ("paper", "ours") else "left")
    for claim in found:
        ours = "-" if claim["ours"] is None else f"{claim['ours']:+.1%}"
        names = [claim[name] for name in ("policy", "against", "measure")]
        table.add_row(*names, claim_at(claim), f"{claim['paper']:+.1%}", ours)
    return table
