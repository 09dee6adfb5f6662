"""One method's figures together: records, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.table import Table

from dblp.cli.bench.compression_cost import Codec, Rounds
from dblp.cli.bench.compression_plan import CompressionPlan
from dblp.cli.bench.compression_training import DENSE, Trained
from dblp.units import format_seconds


@dataclass(slots=True, kw_only=True)
class Figures:
    """What was measured of one method."""

    method: str
    codec: Codec
    rounds: list[Rounds]
    trained: list[Trained] = field(default_factory=list)

    def step_s(self, index: int) -> float:
        """The round at a rate with the processor time of both its ends; computing left out."""
        return self.rounds[index].round_s + self.codec.compress_s + self.codec.decompress_s

    @property
    def accuracy(self) -> float | None:
        """Mean over the seeds."""
        return statistics.fmean(run.accuracy for run in self.trained) if self.trained else None

    @property
    def perplexity(self) -> float | None:
        """Mean over the seeds; None for images."""
        known = [run.perplexity for run in self.trained if run.perplexity is not None]
        return statistics.fmean(known) if known else None


def records(figures: Sequence[Figures], plan: CompressionPlan) -> list[dict[str, Any]]:
    """Flat records: one for each method and rate."""
    dense = _dense(figures)
    return [
        {
            "method": each.method,
            "ranks": plan.ranks,
            "rate_bps": at_rate.rate_bps,
            "ratio_wire": dense.rounds[index].wire_bytes / at_rate.wire_bytes,
            "ratio_size": dense.rounds[index].payload_bytes / at_rate.payload_bytes,
            "step_s": each.step_s(index),
            "round_s": at_rate.round_s,
            "compress_s_per_melem": each.codec.compress_s * 1e6 / plan.bucket.size,
            "decompress_s_per_melem": each.codec.decompress_s * 1e6 / plan.bucket.size,
            "test_accuracy": each.accuracy,
            "dense_accuracy": dense.accuracy,
            "test_perplexity": each.perplexity,
            "dense_perplexity": dense.perplexity,
            "training_ratio": statistics.fmean(r.ratio for r in each.trained) if each.trained else None,
            "missing_share": statistics.fmean(r.missing_share for r in each.trained)
            if each.trained
            else None,
            "seeds": len(each.trained),
            "wire_bytes": at_rate.wire_bytes,
            "payload_bytes": at_rate.payload_bytes,
            "budget": plan.budget,
            "loss": plan.loss,
        }
        for each in figures
        for index, at_rate in enumerate(each.rounds)
    ]


def table(figures: Sequence[Figures], references: Mapping[str, float], plan: CompressionPlan) -> Table:
    """A line a method; fits 100 columns."""
    dense = _dense(figures)
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("method", min_width=16, max_width=26, overflow="fold")
    for heading in ("size", "wire", "ms/Melem", *(f"step {_rate(rate)}" for rate in plan.rates_bps)):
        made.add_column(heading, justify="right", no_wrap=True)
    if dense.trained:
        made.add_column(
            "perplexity" if dense.perplexity is not None else "accuracy", justify="right", no_wrap=True
        )
    for each in figures:
        made.add_row(*_cells(each, dense, plan))
    for name, seconds in references.items():
        made.add_row(
            name,
            "",
            "",
            f"{seconds * 1e3:.2f}",
            *[""] * (len(plan.rates_bps) + bool(dense.trained)),
            style="dim",
        )
    return made


def _cells(each: Figures, dense: Figures, plan: CompressionPlan) -> list[str]:
    first, base = each.rounds[0], dense.rounds[0]
    cells = [
        each.method,
        f"{base.payload_bytes / first.payload_bytes:.3g}",
        f"{base.wire_bytes / first.wire_bytes:.3g}",
        f"{each.codec.compress_s * 1e9 / plan.bucket.size:.2f}",
        *(format_seconds(each.step_s(index)) for index in range(len(each.rounds))),
    ]
    if each.perplexity is not None:
        cells.append(f"{each.perplexity:.3f}")
    elif each.accuracy is not None:
        cells.append(f"{each.accuracy:.2%}")
    return cells


def legend(plan: CompressionPlan) -> str:
    """What the table's columns are; lines of at most 100 characters."""
    loss = f", {plan.loss:.0%} lost" if plan.loss else ""
    over = f"bounded rounds, budget {plan.budget:.0%}" if plan.budget else "exact rounds"
    return (
        f"{plan.bucket.size / 1e6:.1f} M elements, {plan.ranks} ranks, {over}{loss}.\n"
        "size, wire: times smaller than none, without and with headers. ms/Melem: to compress, on this CPU.\n"
        "step: a simulated round, and this CPU's time for both its ends."
    )


def _rate(rate_bps: float) -> str:
    return f"{rate_bps / 1e9:g} Gb/s" if rate_bps >= 1e9 else f"{rate_bps / 1e6:g} Mb/s"


def _dense(figures: Sequence[Figures]) -> Figures:
    return next(each for each in figures if each.method == DENSE)
