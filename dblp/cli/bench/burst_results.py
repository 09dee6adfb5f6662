"""What the cases of a burst benchmark came to: the slowest rank of each round, and ratios to MLT."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dblp.cli.bench.burst_plan import MLT, BurstPlan, Case
from dblp.cli.bench.burst_rounds import Rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstResult:
    """One case."""

    case: Case
    passes: int
    """That the bounds of both legs need (closed form)."""
    burst_s: tuple[float, ...]
    """Time of each burst round, the slowest rank's."""
    clean_s: tuple[float, ...]
    """The same of the rounds between them."""
    missing_share: float
    """Missing chunks over those of all bounded messages, in burst rounds; 1 where the ranks skipped the step."""
    clean_missing_share: float
    """The same in clean rounds."""
    skipped: int
    """Burst rounds that all ranks skipped."""

    @property
    def burst_round_s(self) -> float:
        """Mean time of a burst round."""
        return float(np.mean(self.burst_s))

    @property
    def clean_round_s(self) -> float:
        """Mean time of a clean round."""
        return float(np.mean(self.clean_s))


def combine(case: Case, plan: BurstPlan, ranks: Sequence[Rounds]) -> BurstResult:
    """Put the ranks' rounds of a case together."""
    rounds = [Round(entries) for entries in zip(*ranks, strict=True)]
    burst, clean = ([r for r in rounds if r.burst == kind] for kind in (True, False))
    return BurstResult(
        case=case,
        passes=case.passes(plan.nbytes),
        burst_s=tuple(r.seconds for r in burst),
        clean_s=tuple(r.seconds for r in clean),
        missing_share=float(np.mean([r.missing_share for r in burst])),
        clean_missing_share=float(np.mean([r.missing_share for r in clean])),
        skipped=sum(r.skipped for r in burst),
    )


class Round:
    """One round on all ranks."""

    def __init__(self, entries: Sequence[dict[str, Any]]) -> None:
        self.burst = bool(entries[0]["burst"])
        self.seconds = max(float(entry["seconds"]) for entry in entries)
        self.skipped = any(entry["skipped"] for entry in entries)
        missing, bounded = (sum(entry[name] for entry in entries) for name in ("missing", "bounded"))
        self.missing_share = 1.0 if self.skipped else missing / bounded if bounded else 0.0


class Results:
    """The results so far; each is compared with MLT's of the same mode, q and P_low."""

    def __init__(self, plan: BurstPlan) -> None:
        self._plan = plan
        self._results: dict[tuple[str, float], list[BurstResult]] = defaultdict(list)

    def add(self, result: BurstResult) -> None:
        """Take one more."""
        self._results[result.case.mode, result.case.loss].append(result)

    def records(self) -> list[dict[str, Any]]:
        """Flat records for JSON, one for each mode, q, P_low and arm. Arms without P_low stand in all of them."""
        return [
            self._record(result, low, results)
            for results in self._results.values()
            for low in self._plan.lows
            for result in sorted(results, key=self._place)
            if low == result.case.low or not _phased(result.case)
        ]

    def _place(self, result: BurstResult) -> int:
        return self._plan.arms.index(result.case.arm)

    def _record(self, result: BurstResult, low: float, results: Sequence[BurstResult]) -> dict[str, Any]:
        base = next((r for r in results if r.case.arm == MLT and r.case.low == low), None)
        return {
            "mode": result.case.mode,
            "policy": result.case.arm,
            "q": result.case.loss,
            "p_low": low,
            "burst_round_s": result.burst_round_s,
            "clean_round_s": result.clean_round_s,
            "missing_share": result.missing_share,
            "speedup_over_mlt": base.burst_round_s / result.burst_round_s if base else None,
            "passes": result.passes,
            "passes_speedup": base.passes / result.passes if base else None,
            "clean_missing_share": result.clean_missing_share,
            "skipped_rounds": result.skipped,
            "burst_rounds_s": list(result.burst_s),
        }


def _phased(case: Case) -> bool:
    return case.preset.controller is not None or case.arm == MLT
