"""What a size's rounds came to: the slowest rank of each round, its percentiles, and the ratio to gloo."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.cli.bench.plan import BOUNDED, EXACT, GLOO, BenchPlan, Variant

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One variant's rounds of one size."""

    seconds: Floats
    """Time of the slowest rank in each round (rounds,)."""
    hit: npt.NDArray[np.bool_]
    """Rounds in which the impairment dropped a datagram of any rank (rounds,)."""
    peak_bytes: int
    """Largest growth of a rank's resident set within a round; 0 unless it was measured."""

    def percentile(self, level: float) -> float:
        """A percentile of the slowest rank's times, seconds."""
        return float(np.percentile(self.seconds, level))


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeResult:
    """All variants of one size at one world size."""

    plan: BenchPlan
    nbytes: int
    timings: dict[str, Timing]

    @property
    def rounds(self) -> int:
        """Timed rounds of each variant."""
        return len(self.timings[GLOO].seconds)

    def ratio(self, arm: str) -> float:
        """gloo's median time over the arm's: above 1, the arm is faster."""
        return self.timings[GLOO].percentile(50) / self.timings[arm].percentile(50)

    def paired_ratio(self, arm: str) -> float:
        """Median over the rounds of gloo's time over the arm's in the same round: less open to a drift of the host."""
        return float(np.median(self.timings[GLOO].seconds / self.timings[arm].seconds))

    def busy_loss(self, arm: str) -> float:
        """Share of the arm's throughput that a busy main thread costs."""
        busy = self.timings[Variant(arm, busy=True).name]
        return 1.0 - self.timings[arm].percentile(50) / busy.percentile(50)

    def record(self) -> dict[str, Any]:
        """The flat record for JSON. ``dblp_`` is the exact arm, or the bounded one if it ran alone."""
        arm = EXACT if EXACT in self.timings else BOUNDED
        record = {
            "ranks": self.plan.ranks,
            "bytes": self.nbytes,
            "impair": self.plan.impair,
            **_columns(GLOO, self.timings[GLOO]),
            **_columns("dblp", self.timings[arm]),
            "ratio_p50": self.ratio(arm),
            "ratio_paired": self.paired_ratio(arm),
            "rounds": self.rounds,
            "datagram_bytes": self.plan.datagram_bytes,
            "algorithm": self.plan.algorithm,
            "dblp_arm": arm,
        }
        if BOUNDED in self.timings and arm != BOUNDED:
            record |= _columns(BOUNDED, self.timings[BOUNDED]) | {"budget": self.plan.budget}
        for name in self._busy_names():
            record |= _columns(name, self.timings[name])
        return {name.replace("+", "_"): value for name, value in record.items()}

    def _busy_names(self) -> list[str]:
        return [variant.name for variant in self.plan.variants if variant.busy]


class Collector:
    """Takes the ranks' ``size`` events and gives a SizeResult when all ranks' are there."""

    def __init__(self, plan: BenchPlan) -> None:
        self._plan = plan
        self._events: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)

    def add(self, rank: int, event: dict[str, Any]) -> SizeResult | None:
        """Take a rank's event; returns the SizeResult that it completes."""
        events = self._events[event["bytes"]]
        events[rank] = event
        if len(events) < self._plan.ranks:
            return None
        return combine(self._plan, list(events.values()))


def combine(plan: BenchPlan, events: Sequence[dict[str, Any]]) -> SizeResult:
    """Put the ranks' times of one size together."""
    timings = {}
    for variant in plan.variants:
        name = variant.name
        lost = np.array([event["lost"][name] for event in events])
        timings[name] = Timing(
            seconds=np.array([event["seconds"][name] for event in events], np.float64).max(axis=0),
            hit=np.logical_and((lost > 0).any(axis=0), variant.arm != GLOO),
            peak_bytes=int(max(max(event["peaks"][name]) for event in events)),
        )
    return SizeResult(plan=plan, nbytes=events[0]["bytes"], timings=timings)


def _columns(prefix: str, timing: Timing) -> dict[str, Any]:
    columns: dict[str, Any] = {
        f"{prefix}_p50_s": timing.percentile(50),
        f"{prefix}_p99_s": timing.percentile(99),
        f"{prefix}_max_s": timing.percentile(100),
    }
    if timing.peak_bytes:
        columns[f"{prefix}_peak_bytes"] = timing.peak_bytes
    for name, rows in (("hit", timing.hit), ("clean", ~timing.hit)):
        if timing.hit.any():
            columns[f"{prefix}_{name}_rounds"] = int(rows.sum())
            columns[f"{prefix}_{name}_p50_s"] = (
                float(np.percentile(timing.seconds[rows], 50)) if rows.any() else None
            )
            columns[f"{prefix}_{name}_max_s"] = float(timing.seconds[rows].max()) if rows.any() else None
    return columns
