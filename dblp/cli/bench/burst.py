"""``dblp bench burst``: DBLP's experiment, with every preset as an arm. Its options, and what the parent process does."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dblp.cli.bench.burst_plan import ARMS, RANKS, SOCKETS, VIRTUAL, BurstPlan, Case
from dblp.cli.extras import require
from dblp.cli.memory import require_memory
from dblp.cli.options import parse_choices, parse_list, parse_size, parse_time
from dblp.cli.output import check_outputs
from dblp.collectives.named import plain_name
from dblp.errors import ConfigError
from dblp.units import format_bytes, format_count, format_seconds, parse_bps

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dblp.cli.bench.burst_results import Results

Done = Callable[[Case], None]
"""Told of each case that has ended."""
MODES = {VIRTUAL: (VIRTUAL,), SOCKETS: (SOCKETS,), "both": (VIRTUAL, SOCKETS)}


def burst(
    mode: Annotated[str, typer.Option(help="virtual, sockets or both.")] = VIRTUAL,
    arms: Annotated[str, typer.Option(help="Presets, of: " + ", ".join(ARMS) + ".")] = ",".join(ARMS),
    losses: Annotated[
        str, typer.Option(help="Shares lost while a burst round lasts (q).")
    ] = "0.6,0.7,0.8,0.9",
    lows: Annotated[str, typer.Option(help="P_low of each leg; P_high is 40 points more.")] = "0.008,0.024",
    size: Annotated[str, typer.Option(help="Size of the float32 gradient.")] = "256K",
    bursts: Annotated[int, typer.Option(help="Burst rounds of each case.")] = 3,
    link: Annotated[str, typer.Option(help="Rate of each link of the star.")] = "1gbit",
    delay: Annotated[
        str, typer.Option(help="Delay of each link; a datagram crosses two of them one way.")
    ] = "1ms",
    base_loss: Annotated[float, typer.Option(help="Share lost in clean rounds, too.")] = 0.0,
    control_too: Annotated[
        bool,
        typer.Option("--control-too", help="Bursts lose control datagrams, too; in DBLP they go over TCP."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the losses.")] = 1,
    jobs: Annotated[int, typer.Option(help="Virtual cases at a time; 0: one a core.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Rounds in a burst of loss: three workers and a server, as in DBLP, or four workers; every preset as an arm.

    A burst lasts for all passes of its round. dblp's arm is in its tolerant phase.
    """
    if mode not in MODES:
        raise ConfigError(f"--mode {mode!r}: known are {', '.join(MODES)}")
    if jobs < 0:
        raise ConfigError(f"--jobs {jobs}: a number of processes, or 0 for one a core")
    nbytes = parse_size("--size", size)
    try:
        rate_bps = parse_bps(link)
    except ValueError as error:
        raise ConfigError(f"--link {link!r}: {error}") from None
    plan = BurstPlan(
        modes=MODES[mode],
        arms=tuple(parse_choices("--arms", arms, ARMS, plain_name)),
        losses=tuple(parse_list("--losses", losses, float, "a share, such as 0.6")),
        lows=tuple(parse_list("--lows", lows, float, "a share, such as 0.008")),
        nbytes=nbytes,
        bursts=bursts,
        rate_bps=rate_bps,
        delay_s=parse_time("--delay", delay),
        loss=base_loss,
        control_too=control_too,
        seed=seed,
    )
    check_outputs({"--json": json})
    jobs = jobs or len(os.sched_getaffinity(0))
    require_memory(
        jobs * RANKS * 2 * nbytes,  # a contribution and its result
        f"--size, --jobs: {jobs} times {RANKS} ranks with {format_bytes(nbytes)}",
        "take a smaller size or fewer jobs",
    )
    if SOCKETS in plan.modes:
        require("torch")
    _bench(plan, jobs, json)


def _bench(plan: BurstPlan, jobs: int, json: Path | None) -> None:
    from rich.console import Console

    from dblp.cli.host import document, write_json

    console = Console()
    console.print(_headline(plan), highlight=False)
    records = run(plan, console, jobs).records()
    for mode in plan.modes:
        console.print(table([record for record in records if record["mode"] == mode], mode))
    if json is not None:
        options = {name: value for name, value in plan.to_json().items() if name != "modes"}
        write_json(json, document("bench burst", records, options=options))
        console.print(f"figures: {json}", highlight=False, soft_wrap=True)


def run(plan: BurstPlan, console: Console, jobs: int = 1) -> Results:
    """Run all cases, ``jobs`` virtual ones at a time, and show how far they are."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dblp.cli.bench.burst_results import Results

    results = Results(plan)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for mode in plan.modes:
            cases = list(plan.cases(mode))
            task = progress.add_task(mode, total=len(cases))

            def done(case: Case, task: Any = task) -> None:
                progress.update(task, advance=1, description=f"{case.mode}: {case.arm}, q {case.loss:g}")

            if mode == VIRTUAL:
                _run_virtual(plan, cases, results, done, jobs)
            else:
                _run_sockets(plan, cases, results, done)
    return results


def _run_virtual(plan: BurstPlan, cases: list[Case], results: Results, done: Done, jobs: int) -> None:
    from dblp.cli.bench.burst_pool import virtual_results

    for result in virtual_results(plan, cases, min(jobs, len(cases))):
        results.add(result)
        done(result.case)


def _run_sockets(plan: BurstPlan, cases: list[Case], results: Results, done: Done) -> None:
    from dblp.cli.bench.burst_results import combine
    from dblp.cli.launch import run_workers

    ranks: dict[int, dict[int, Any]] = defaultdict(dict)

    def on_event(rank: int, event: dict[str, Any]) -> None:
        number = event["number"]
        ranks[number][rank] = event["rounds"]
        if len(ranks[number]) == RANKS:
            of_case = ranks.pop(number)
            results.add(combine(cases[number], plan, [of_case[rank] for rank in range(RANKS)]))
            done(cases[number])

    run_workers("bench-burst", plan.to_json(), ranks=RANKS, on_event=on_event)


def table(records: list[dict[str, Any]], mode: str) -> Table:
    """One row for each case: times, what is missing, and the ratio to MLT beside that of the closed form's passes."""
    from rich import box
    from rich.table import Table

    caption = (
        "Means of each round's slowest rank; missing: in burst / clean rounds.\n"
        "Passes: ceil(ln P / ln q) of both legs; in brackets, mlt's over it."
    )
    shown = Table(
        title=f"{mode}: rounds in a burst of loss",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption=caption,
        caption_justify="left",
    )
    for heading in ("P_low", "q", "policy", "burst", "clean", "missing", "over mlt", "passes"):
        shown.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    before = None
    for record in sorted(records, key=lambda record: (record["p_low"], record["q"])):
        place = record["p_low"], record["q"]
        if before not in (None, place):
            shown.add_section()
        before = place
        shown.add_row(f"{record['p_low']:.1%}", f"{record['q']:.0%}", *_cells(record))
    return shown


def _cells(record: dict[str, Any]) -> list[str]:
    ratio, closed = record["speedup_over_mlt"], record["passes_speedup"]
    missing = f"{record['missing_share']:.1%} / {record['clean_missing_share']:.2%}"
    if record["skipped_rounds"]:
        missing = f"{record['skipped_rounds']} skipped / {record['clean_missing_share']:.2%}"
    return [
        record["policy"],
        format_seconds(record["burst_round_s"]),
        format_seconds(record["clean_round_s"]),
        missing,
        "-" if ratio is None else f"{ratio:.2f}",
        f"{record['passes']}" + ("" if closed is None else f" ({closed:.2f})"),
    ]


def _headline(plan: BurstPlan) -> str:
    from dblp.cli.host import host_facts

    facts = host_facts()
    lost = f", {plan.loss:.2%} of datagrams lost" if plan.loss else ""
    return (
        f"[bold]dblp bench burst[/] on {facts['cpu']}, {facts['cores']} cores, Linux {facts['kernel']}\n"
        f"{format_bytes(plan.nbytes)} of float32 on {RANKS} ranks: a server and 3 workers, or 4 workers\n"
        f"links of {plan.rate_bps / 1e9:g} Gb/s and {format_seconds(plan.delay_s)}{lost};"
        f" {format_count(plan.bursts, 'burst')} a case, of {'all datagrams' if plan.control_too else 'data only'}"
    )
