"""``dblp bench allreduce``: its options, and what the parent process does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dblp.cli.bench.plan import ALGORITHMS, ARMS, EXACT, HELD_TENSORS, BenchPlan
from dblp.cli.extras import require
from dblp.cli.memory import require_memory
from dblp.cli.options import parse_choice, parse_choices, parse_ranks, parse_sizes
from dblp.cli.output import check_outputs
from dblp.collectives.named import plain_name
from dblp.transport.config import ETHERNET_DATAGRAM_BYTES
from dblp.transport.impair_spec import parse_impair
from dblp.transport.policy import Stop
from dblp.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import Console

    from dblp.cli.bench.results import SizeResult


def allreduce(
    against: Annotated[str, typer.Option(help="What to measure beside dblp: gloo.")] = "gloo",
    ranks: Annotated[str, typer.Option(help="World sizes.")] = "2,4",
    sizes: Annotated[str, typer.Option(help="Sizes of the float32 tensor.")] = "4K,1M,25M,100M",
    arms: Annotated[str, typer.Option(help="Arms of dblp, of: " + ", ".join(ARMS) + ".")] = EXACT,
    policy_budget: Annotated[float, typer.Option(help="Budget of the bounded arm, in [0, 1).")] = 0.0,
    policy_stop: Annotated[str, typer.Option(help="Stop rule of the bounded arm.")] = Stop.STALL.value,
    rounds: Annotated[int, typer.Option(help="Timed rounds of each size; 0: by size.")] = 0,
    impair: Annotated[str, typer.Option(help="Impairment of dblp's datagrams.")] = "",
    datagram: Annotated[
        int, typer.Option(help="Largest datagram, bytes; 8952 is jumbo.")
    ] = ETHERNET_DATAGRAM_BYTES,
    algorithm: Annotated[str, typer.Option(help="Algorithm: " + ", ".join(ALGORITHMS) + ".")] = "auto",
    busy_main: Annotated[
        bool, typer.Option("--busy-main", help="Also with a busy main thread in every rank.")
    ] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Also the peak memory of a round.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Time all-reduce by dblp and by gloo, in turn, in the same processes. gloo's network is never impaired."""
    parse_choice("--against", against, ("gloo",))
    parse_impair(impair)
    plan = BenchPlan(
        ranks=0,
        sizes=tuple(parse_sizes(sizes)),
        arms=tuple(parse_choices("--arms", arms, ARMS, plain_name)),
        rounds=rounds,
        impair=impair,
        datagram_bytes=datagram,
        algorithm=parse_choice("--algorithm", algorithm, ALGORITHMS),
        budget=policy_budget,
        stop=policy_stop,
        busy_main=busy_main,
        memory=memory,
    )
    plans = [replace(plan, ranks=world_size) for world_size in parse_ranks(ranks)]
    check_outputs({"--json": json})
    for plan in plans:
        _check_memory(plan)
    require("torch")
    _bench(plans, json)


def _check_memory(plan: BenchPlan) -> None:
    largest = max(plan.sizes)
    require_memory(
        plan.ranks * HELD_TENSORS * largest,
        f"--sizes, --ranks: {plan.ranks} ranks with {format_bytes(largest)}",
        "take smaller sizes or fewer ranks",
    )


def _bench(plans: list[BenchPlan], json: Path | None) -> None:
    from rich.console import Console

    from dblp.cli.bench.tables import burst_table, busy_table, memory_table
    from dblp.cli.host import document, write_json

    console = Console()
    plan = plans[0]
    console.print(_headline(plan), highlight=False)
    results = run(plans, console)
    if plan.busy_main:
        console.print(busy_table(results))
    if plan.impair:
        console.print(burst_table(results))
    if plan.memory:
        console.print(memory_table(results))
    if json is not None:
        write_json(json, document("bench allreduce", [result.record() for result in results]))
        console.print(f"figures: {json}", highlight=False)


def run(plans: list[BenchPlan], console: Console) -> list[SizeResult]:
    """Run each plan's workers and show a row of the table for each result as it comes. If it ends early, by Ctrl-C or an error,
    the rows that came stay, with their number."""
    from rich.live import Live
    from rich.text import Text

    from dblp.cli.bench.results import Collector
    from dblp.cli.bench.tables import timing_rows, timing_table
    from dblp.cli.launch import run_workers

    results: list[SizeResult] = []
    table = timing_table()
    sizes = sum(len(plan.sizes) for plan in plans)
    wait = Text(f"timing {format_count(sizes, 'size')} ...")
    try:
        with Live(wait, console=console, auto_refresh=False, vertical_overflow="visible") as live:
            for plan in plans:
                collector = Collector(plan)

                def on_event(rank: int, event: dict[str, Any], collector: Collector = collector) -> None:
                    result = collector.add(rank, event)
                    if result is not None:
                        results.append(result)
                        for row in timing_rows(result):
                            table.add_row(*row)
                        live.update(table, refresh=True)

                env = {"DBLP_IMPAIR": plan.impair, "DBLP_DATAGRAM_BYTES": str(plan.datagram_bytes)}
                run_workers("bench-allreduce", plan.to_json(), ranks=plan.ranks, on_event=on_event, env=env)
    finally:
        if not console.is_terminal:
            console.print()  # Live leaves the line open there
        if len(results) < sizes:
            console.print(
                f"ended early: {len(results)} of {format_count(sizes, 'size')} timed", highlight=False
            )
    return results


def _headline(plan: BenchPlan) -> str:
    from dblp.cli.host import host_facts

    facts = host_facts()
    return (
        f"[bold]dblp bench allreduce[/] on {facts['cpu']}, {facts['cores']} cores, Linux {facts['kernel']},"
        f" torch {facts['torch']}\n"
        f"gloo: TCP on loopback, congestion control {facts['tcp_congestion_control']}\n"
        f"dblp: UDP on loopback, datagrams of {plan.datagram_bytes} bytes, algorithm {plan.algorithm},"
        f" {'under ' + plan.impair if plan.impair else 'no impairment'}"
    )
