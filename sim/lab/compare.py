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
LEAST_ROUNDS = 6
"""Of each run. The least and the largest of n rounds have the median between them with a chance of 1 - 2**(1 - n), which is 95 %
from 6 on; with fewer, no interval is one of 95 %."""
TOO_FEW = "too few rounds"
FAILED = "failed run"
COMMAND = "lab run"

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
    before_rounds: int
    """Rounds whose times the first file has; a training run's has none."""
    after_rounds: int
    failed: bool = False
    """Whether one of the runs ended as failed: its figures prove nothing."""

    @property
    def enough(self) -> bool:
        """Whether the rounds can tell a change from chance."""
        return min(self.before_rounds, self.after_rounds) >= LEAST_ROUNDS

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, ``same`` where the interval holds 1, ``too few rounds``, or ``failed run``."""
        if self.failed:
            return FAILED
        if not self.enough:
            return TOO_FEW
        return "faster" if self.high < 1.0 else "slower" if self.low > 1.0 else "same"

    @property
    def trained(self) -> bool:
        """Whether it is of training runs, which have a wall time and an accuracy."""
        return self.bytes is None

    @property
    def wall_ratio(self) -> float | None:
        """Of training runs: the second's mean time to the end over the first's."""
        return self.after["wall_s"] / self.before["wall_s"] if self.trained else None

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
            "wall_ratio": self.wall_ratio,
            "before_test_accuracy": self.before["test_accuracy"] if self.trained else None,
            "after_test_accuracy": self.after["test_accuracy"] if self.trained else None,
            "before_rounds": self.before_rounds,
            "after_rounds": self.after_rounds,
            "verdict": self.verdict,
        }


def compare(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    sources: tuple[str, str] = ("the first", "the second"),
) -> list[Change]:
    """Arms and sizes that both documents have, in the order of the first. Raises ConfigError, with the name out of ``sources``,
    if there are none, or if one is no document of ``dblp lab run``."""
    documents = zip((before, after), sources, strict=True)
    old, new = (dict(_entries(document, source)) for document, source in documents)
    shared = [key for key in old if key in new]
    if not shared:
        raise ConfigError(
            f"the two runs share no arm and size: {sources[0]} has {_names(old)}; {sources[1]} has {_names(new)}"
        )
    failed = bool(failures((before, after), sources))
    return [_change(key, old[key], new[key], failed) for key in shared]


def headings(documents: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> list[str]:
    """A line for each run, with what it is of, and one with what else differs between their experiments."""
    experiments = [document["experiment"] for document in documents]
    lines = [
        f"{source}: {experiment['name']}, {experiment['title']}"
        for experiment, source in zip(experiments, sources, strict=True)
    ]
    first, second = (dict(_leaves(experiment)) for experiment in experiments)
    differ = [
        f"{name} ({first.get(name)} and {second.get(name)})"
        for name in sorted({*first, *second})
        if first.get(name) != second.get(name)
    ]
    return [*lines, f"they differ in {', '.join(differ)}"] if differ else lines


_TOLD = ("name", "title", "about", "arms")
"""Fields of an experiment that the comparison tells by itself, or that change nothing."""


def _leaves(experiment: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Fields by name, those of tables with the table's before it."""
    for name, value in experiment.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{within}{name}.")
        elif within or name not in _TOLD:
            yield within + name, value


def failures(documents: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> list[str]:
    """A line for each run that ended as failed, with its reason."""
    return [
        f"{source} is of a run that failed, and proves nothing: {document['failed']}"
        for document, source in zip(documents, sources, strict=True)
        if document.get("failed")
    ]


_Key = tuple[str, int | None]
_Entry = tuple[Mapping[str, Any], Floats]


def check_document(document: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError, with the source's name, unless a document is one of ``dblp lab run --json``."""
    command = document.get("command")
    if command != COMMAND:
        found = f"this one is of {command!r}" if command else "this one names no command"
        raise ConfigError(f"{source}: a file of dblp {COMMAND} --json is expected, {found}")
    lacking = [name for name in ("experiment", "records", "rounds") if name not in document]
    if lacking:
        raise ConfigError(
            f"{source}: lacks {', '.join(lacking)}: a file of dblp {COMMAND} --json is expected"
        )


def _entries(document: Mapping[str, Any], source: str) -> Iterator[tuple[_Key, _Entry]]:
    check_document(document, source)
    try:
        rounds = {(e["arm"], e["bytes"]): np.asarray(e["seconds"], np.float64) for e in document["rounds"]}
        for record in document["records"]:
            key = record["arm"], record["bytes"]
            float(record["p50_s"]), float(record["p99_s"])
            if record["bytes"] is None:
                float(record["wall_s"]), float(record["test_accuracy"])
            yield key, (record, rounds.get(key, np.empty(0)))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{source}: its records are not those of dblp {COMMAND} --json ({error!r})"
        ) from None


def _names(entries: Mapping[_Key, Any]) -> str:
    return ", ".join(f"{arm} {size}" for arm, size in entries) or "nothing"


def _change(key: _Key, old: _Entry, new: _Entry, failed: bool) -> Change:
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
        before_rounds=len(old_seconds),
        after_rounds=len(new_seconds),
        failed=failed,
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
