"""Threshold: all elements whose magnitude reaches a fixed value (Strom, 2015)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dblp.collectives.compression.base import Job
from dblp.collectives.compression.entries import Indices
from dblp.collectives.compression.selection import above
from dblp.collectives.compression.sparse import INDICES, VALUES, Sparse
from dblp.transport.spec import Kind, arg

MAGNITUDE = Kind(
    "a number above 0",
    float,
    lambda value: isinstance(value, (int, float)) and 0.0 < value < float("inf"),
    lambda value: repr(float(value)),
)


@dataclass(frozen=True, slots=True)
class Threshold(Sparse):
    """Difference from the paper: the values themselves are sent, not the threshold with a sign."""

    name: ClassVar[str] = "threshold"
    least: float = arg("least", MAGNITUDE)
    """Least magnitude that is sent, in the gradient's unit."""
    values: str = arg("values", VALUES, default="full")
    indices: str = arg("indices", INDICES, default="plain")

    def target(self, job: Job) -> None:
        """Not known before: counts differ from rank to rank."""

    def select(self, job: Job) -> Indices:
        """All that reach it."""
        return above(job.values, self.least)
