"""Top-k by parameter, with shares that change from round to round; and ``joint``, whose share a controller decides.

A parameter of which half or more is sent goes whole, in an all-reduce, which costs less than values with indices.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dblp.collectives.compression.base import Job, Part
from dblp.collectives.compression.entries import Indices
from dblp.collectives.compression.selection import largest
from dblp.collectives.compression.sparse import INDICES, RATIO, VALUES, PartlyDense, share_of
from dblp.transport.spec import arg

DENSE_FROM = 0.5
"""Share from which on a parameter goes whole: an index has as many bytes as a value."""


class Shares(PartlyDense):
    """Methods that say a share for each parameter in each round."""

    __slots__ = ()

    @abstractmethod
    def ratio_of(self, job: Job, part: Part) -> float:
        """The share of a parameter in this round; the same on all ranks."""

    def dense(self, job: Job, part: Part) -> bool:
        """Where the share is half or more."""
        return self.ratio_of(job, part) >= DENSE_FROM

    def select(self, job: Job) -> Indices:
        """The largest of each other parameter."""
        found = [np.empty(0, np.int64)]
        for part, low, flat in zip(
            job.bucket.parts, job.bucket.bounds.tolist(), job.bucket.cut(job.values), strict=False
        ):
            if not self.dense(job, part):
                found.append(largest(flat, share_of(part.size, self.ratio_of(job, part))) + low)
        return np.concatenate(found)

    def target(self, job: Job) -> int:
        """The sum of their shares."""
        parts = [part for part in job.bucket.parts if not self.dense(job, part)]
        return sum(share_of(part.size, self.ratio_of(job, part)) for part in parts)


@dataclass(frozen=True, slots=True)
class Joint(Shares):
    """One share for all parameters: that of a ``JointController``, or ``ratio`` without one."""

    name: ClassVar[str] = "joint"
    ratio: float = arg("ratio", RATIO, default=0.01)
    values: str = arg("values", VALUES, default="full")
    indices: str = arg("indices", INDICES, default="plain")

    def ratio_of(self, job: Job, part: Part) -> float:
        """The controller's."""
        return self.ratio if job.ratio is None else job.ratio
