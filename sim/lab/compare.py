"""Two runs side by side: how much faster or slower each arm became, and whether chance explains it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.errors import ConfigError

_RESAMPLES = 2000
_SEED = 1
_LEVEL = 95.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One arm and size in both runs."""

    arm: str
    bytes: int | None
    before: Mapping[str, Any]
    """The record of the first run."""
    after: Mapping[str, Any]
    p50_ratio: float
    """The second run's median over the first's: below 1 it became faster."""
    low: float
    """Bounds of the ratio's 95 % interval, by bootstrap over the rounds; the ratio itself where rounds are not there."""
    high: float
    p99_ratio: float

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, or ``same`` where the interval holds 1."""
        return "faster" if self.high < 1.0 else "slower" if self.low > 1.0 else "same"

    def record(self) -> dict[str, Any]:
        """Flat, for JSON."""
        return {
            "arm": self.arm,
            "bytes": self.bytes,
            "before_p50_s": self.before["p50_s"],
            "after_p50_s": self.after["p50_s"],
            "p50_ratio": self.p50_ratio,
            "low": self.low,
            "high": self.high,
            "p99_ratio": self.p99_ratio,
            "verdict": self.verdict,
        }


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Arms and sizes that both documents have, in the order of the first. Raises ConfigError if there are none, or if one is no
    document of ``dblp lab run``."""
    old, new = (dict(_entries(document)) for document in (before, after))
    shared = [key for key in old if key in new]
    if not shared:
        raise ConfigError(f"the two runs share no arm and size: {_names(old)} and {_names(new)}")
    return [_change(key, old[key], new[key]) for key in shared]


_Key = tuple[str, int | None]
_Entry = tuple[Mapping[str, Any], Floats]


def _entries(document: Mapping[str, Any]) -> Iterator[tuple[_Key, _Entry]]:
    if document.get("command") != "lab run":
        raise ConfigError(
            f"a file of dblp lab run --json is expected, this one is of {document.get('command')!r}"
        )
    rounds = {(entry["arm"], entry["bytes"]): np.asarray(entry["seconds"]) for entry in document["rounds"]}
    for record in document["records"]:
        key = record["arm"], record["bytes"]
        yield key, (record, rounds.get(key, np.empty(0)))


def _names(entries: Mapping[_Key, Any]) -> str:
    return ", ".join(f"{arm} {size}" for arm, size in entries) or "nothing"


def _change(key: _Key, old: _Entry, new: _Entry) -> Change:
    (before, old_seconds), (after, new_seconds) = old, new
    ratio = after["p50_s"] / before["p50_s"]
    low, high = (
        interval(old_seconds, new_seconds) if len(old_seconds) and len(new_seconds) else (ratio, ratio)
    )
    return Change(
        arm=key[0],
        bytes=key[1],
        before=before,
        after=after,
        p50_ratio=ratio,
        low=low,
        high=high,
        p99_ratio=after["p99_s"] / before["p99_s"],
    )


def interval(before: Floats, after: Floats) -> tuple[float, float]:
    """The 95 % interval of the ratio of medians, by the bootstrap's percentiles (Efron, 1979), seeded."""
    rng = np.random.default_rng(_SEED)
    medians: Sequence[Floats] = [
        np.median(rng.choice(sample, (_RESAMPLES, len(sample))), axis=1) for sample in (before, after)
    ]
    tail = (100 - _LEVEL) / 2
    low, high = np.percentile(medians[1] / medians[0], [tail, 100 - tail])
    return float(low), float(high)
