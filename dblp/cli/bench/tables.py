"""The tables of ``dblp bench allreduce``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich import box
from rich.table import Table

from dblp.cli.bench.plan import EXACT, GLOO
from dblp.cli.bench.results import SizeResult, Timing
from dblp.units import format_bytes, format_seconds

_LEVELS = (0, 50, 90, 99, 100)


def timing_table() -> Table:
    """An empty table of times; ``timing_rows`` fill it as results come."""
    table = _table(
        "p50 / p99 of the slowest rank. ratio: gloo's p50 over dblp's; paired: median of the rounds' ratios"
    )
    for heading in ("ranks", "size", "rounds", "arm", "gloo", "dblp", "ratio", "paired"):
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
    return table


def timing_rows(result: SizeResult) -> Iterator[list[str]]:
    """The rows of a result in ``timing_table``, one an arm."""
    for arm in result.plan.arms:
        times = [_pair(result.timings[name]) for name in (GLOO, arm)]
        ratios = f"{result.ratio(arm):.2f}", f"{result.paired_ratio(arm):.2f}"
        yield [*_place(result), str(result.rounds), arm, *times, *ratios]


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
        table.add_row(*_place(result), *cells)
    return table


def burst_table(results: Sequence[SizeResult]) -> Table:
    """Rounds in which the network dropped something, beside those in which it did not."""
    table = _table("slowest rank of rounds that were hit (a datagram was lost) and of clean ones")
    for heading in ("ranks", "size", "arm", "rounds"):
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
    for level in _LEVELS:
        table.add_column({0: "min", 100: "max"}.get(level, f"p{level}"), justify="right", no_wrap=True)
    for result in results:
        for cells in _burst_rows(result):
            table.add_row(*_place(result), *cells)
    return table


def memory_table(results: Sequence[SizeResult]) -> Table:
    """Growth of the resident set within a round, of the rank in which it grew most."""
    arms = (GLOO, *results[0].plan.arms)
    table = _table("peak resident set of a rank above what it held before the round")
    for heading in ("ranks", "size", *map(_label, arms)):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        cells = [format_bytes(result.timings[arm].peak_bytes) for arm in arms]
        table.add_row(*_place(result), *cells)
    return table


def _burst_rows(result: SizeResult) -> Iterator[list[str]]:
    for arm in result.plan.arms:
        timing = result.timings[arm]
        for name, rows in (("hit", timing.hit), ("clean", ~timing.hit)):
            seconds = timing.seconds[rows]
            levels = (
                [format_seconds(float(np.percentile(seconds, level))) for level in _LEVELS]
                if len(seconds)
                else []
            )
            yield [f"{arm}, {name}", str(len(seconds)), *levels]


def _place(result: SizeResult) -> tuple[str, str]:
    return str(result.plan.ranks), format_bytes(result.nbytes)


def _table(caption: str) -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, caption=caption, caption_justify="left")


def _label(arm: str) -> str:
    return arm if arm == GLOO else "dblp" if arm == EXACT else f"dblp {arm}"


def _pair(timing: Timing) -> str:
    return f"{format_seconds(timing.percentile(50))} / {format_seconds(timing.percentile(99))}"
