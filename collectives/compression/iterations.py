"""Iterations as a method sees them that decides once in each: what it measured in the last one, on this rank.

Theory of operation. Decisions must be the same on all ranks, so they rest on figures that all ranks have: a short vector that
is reduced beside the rounds of the first bucket of each iteration, at no cost in time. It tells of the iteration before, and its
sum is used when the next one begins: a decision rests on what happened two iterations ago. All rounds of an iteration have ended
before the next one's first bucket decides: it waits for them, which costs nothing where a backward pass does so anyway.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.compression.base import Job

Array = npt.NDArray[Any]

_KEY = "iterations"


@dataclass(slots=True)
class Iteration:
    """What one iteration's rounds did, on this rank."""

    began_s: float
    """When its first bucket came, on the clock of the loop."""
    elements: int = 0
    """Of all its buckets."""
    data_bytes: float = 0.0
    """What this rank moved in them, the larger of sent and received."""
    spans: list[tuple[float, float, int]] = field(default_factory=list)
    """Of each round: when it was posted, when it had come, and how often its data crosses the network one after the other."""
    norms: Array | None = None
    """What a method adds up over the buckets."""
    spoiled: bool = False
    """A bucket was not finite: the norms are not whole."""
    length_s: float = 0.0
    """Until the next one began; 0: it has not."""

    def add_norms(self, norms: Array) -> None:
        """Add those of a bucket."""
        self.norms = norms if self.norms is None else self.norms + norms

    def busy(self) -> tuple[float, int]:
        """Seconds in which rounds were under way, and how many crossings of the network are in them: those of rounds that
        overlap count once."""
        seconds, crossings, end, deepest = 0.0, 0, float("-inf"), 0
        for begin, until, legs in sorted(self.spans):
            if begin > end:
                crossings += deepest
                deepest = 0
            deepest = max(deepest, legs)
            seconds += max(until - max(begin, end), 0.0)
            end = max(end, until)
        return seconds, crossings + deepest


class Iterations:
    """The course of a model's iterations on this rank."""

    def __init__(self) -> None:
        self.now: Iteration | None = None
        """The running one."""
        self.last: Iteration | None = None
        """The one before; None at first."""
        self.count = 0
        """How many have begun here."""
        self.probed_s = 0.0
        """Delay of the network, as a round of one number told it; 0: none did."""
        self._number = -1
        self._seen: set[tuple[tuple[str, int], ...]] = set()
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @staticmethod
    def of(job: Job) -> Iterations:
        """Those of the job's model."""
        found = job.measured.setdefault(_KEY, Iterations())
        assert isinstance(found, Iterations)
        return found

    async def enter(self, job: Job, now_s: float) -> bool:
        """A bucket comes. True if it is the first of an iteration: its number is another one, or the bucket has come before. All
        rounds of the one before have ended then."""
        first = job.iteration != self._number or job.bucket.layout in self._seen
        if first:
            await self._idle.wait()
            self._begin(job.iteration, now_s)
        assert self.now is not None
        self._seen.add(job.bucket.layout)
        self.now.elements += job.bucket.size
        self._open += 1
        self._idle.clear()
        job.notes["iteration"] = self.now
        return first

    def leave(self, job: Job) -> None:
        """A bucket's rounds have ended, well or badly."""
        if "iteration" in job.notes:
            self._open -= 1
            if not self._open:
                self._idle.set()

    def _begin(self, number: int, now_s: float) -> None:
        if self.now is not None:
            self.now.length_s = max(now_s - self.now.began_s, 0.0)
        self.last, self.now = self.now, Iteration(now_s)
        self._number, self.count = number, self.count + 1
        self._seen.clear()


def stored(job: Job, key: str, size: int) -> Array:
    """The vector that a method keeps of the whole model under a name, (size,), zeros at first; the same on all ranks. Its key has
    a dot in front, as no parameter's name has."""
    vector = job.factors.get(f".{key}")
    if vector is None or vector.shape != (size,):
        vector = job.factors[f".{key}"] = np.zeros(size)
    return vector
