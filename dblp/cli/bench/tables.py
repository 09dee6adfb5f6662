"""The tables of ``dblp bench allreduce``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich import box
from rich.table import Table

from dblp.cli.bench.plan import EXACT, GLOO, BenchPlan
from dblp.cli.bench.results import SizeResult, Timing
from dblp.units import format_bytes, format_seconds

_DECILES = (0, 10, 50, 90, 99, 100)


def timing_table(plan: BenchPlan) -> Table:
    """An empty table of times; ``timing_row`` fills it as results come."""
    table = _table(
        "p50 / p99 of the slowest rank; ratio: gloo's median time over dblp's, and the median of pairs"
    )
    for heading in ("ranks", "size", "rounds", "gloo", *(_label(arm) for arm in plan.arms)):
        table.add_column(heading, justify="right", no_wrap=True)
    for _ in plan.arms:
        table.add_column("ratio", justify="right", no_wrap=True)
    return table


def timing_row(result: SizeResult) -> list[str]:
    """The row of a result in ``timing_table``."""
    arms = result.plan.arms
    times = [_pair(result.timings[arm]) for arm in (GLOO, *arms)]
    ratios = [f"{result.ratio(arm):.2f} ({result.paired_ratio(arm):.2f})" for arm in arms]
    return [str(result.plan.ranks), format_bytes(result.nbytes), str(result.rounds), *times, *ratios]


def busy_table(results: Sequence[SizeResult]) -> Table:
    """What a pure-Python loop in every rank's main thread costs."""
    arms = (GLOO, *results[0].plan.arms)
    table = _table("p50 with a busy pure-Python main thread in every rank, and the throughput that it costs")
    for heading in ("ranks", "size", *map(_label, arms)):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        cells = [
            f"{format_seconds(result.timings[f'{arm}+busy'].percentile(50))} ({result.busy_loss(arm):+.0%})"
            for arm in arms
        ]
        table.add_row(str(result.plan.ranks), format_bytes(result.nbytes), *cells)
    return table


def burst_table(results: Sequence[SizeResult]) -> Table:
    """Rounds in which the network dropped something, beside those in which it did not."""
    table = _table("time of the slowest rank in rounds that lost datagrams and in rounds that did not")
    for heading in ("ranks", "size", "arm", "rounds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for level in _DECILES:
        table.add_column({0: "min", 100: "max"}.get(level, f"p{level}"), justify="right", no_wrap=True)
    for result in results:
        for cells in _burst_rows(result):
            table.add_row(str(result.plan.ranks), format_bytes(result.nbytes), *cells)
    return table


def memory_table(results: Sequence[SizeResult]) -> Table:
    """Growth of the resident set within a round, of the rank in which it grew most."""
    arms = (GLOO, *results[0].plan.arms)
    table = _table("peak resident set of a rank above what it held before the round")
    for heading in ("ranks", "size", *map(_label, arms)):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        cells = [format_bytes(result.timings[arm].peak_bytes) for arm in arms]
        table.add_row(str(result.plan.ranks), format_bytes(result.nbytes), *cells)
    return table


def _burst_rows(result: SizeResult) -> Iterator[list[str]]:
    for arm in result.plan.arms:
        timing = result.timings[arm]
        for name, rows in (("hit", timing.hit), ("clean", ~timing.hit)):
            seconds = timing.seconds[rows]
            levels = (
                [format_seconds(float(np.percentile(seconds, level))) for level in _DECILES]
                if len(seconds)
                else []
            )
            yield [f"{_label(arm)}, {name}", str(len(seconds)), *levels]


def _table(caption: str) -> Table:
    return Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")


def _label(arm: str) -> str:
    return arm if arm == GLOO else "dblp" if arm == EXACT else f"dblp {arm}"


def _pair(timing: Timing) -> str:
    return f"{format_seconds(timing.percentile(50))} / {format_seconds(timing.percentile(99))}"
