"""Methods that send some elements and withhold the rest: their common part."""

from __future__ import annotations

from abc import abstractmethod
from math import ceil

import numpy as np

from dblp.collectives.compression import entries
from dblp.collectives.compression.base import Array, Gathered, Job
from dblp.collectives.compression.entries import Indices
from dblp.collectives.compression.link import Bytes
from dblp.transport.spec import Kind, choice

RATIO = Kind(
    "a share in (0, 1] of the elements",
    float,
    lambda value: isinstance(value, (int, float)) and 0.0 < value <= 1.0,
    lambda value: repr(float(value)),
)
VALUES = choice("full", "fp16")
"""``full``: float32, float64 for gradients of that type. ``fp16``: what rounding takes away stays with the sender."""
INDICES = choice("plain", "delta")
"""``delta``: coded gaps (``entries.py``); their length is told first, in a round of its own."""


def share_of(size: int, ratio: float) -> int:
    """Elements to send of ``size``: at least one, unless there is none."""
    return min(max(ceil(size * ratio), 1), size)


class Sparse(Gathered):
    """Entries, an index and a value each, in an all-gather. Subclasses have the fields ``values`` and ``indices``."""

    __slots__ = ()
    values: str
    indices: str

    @abstractmethod
    def select(self, job: Job) -> Indices:
        """Indices, ascending, of what is sent of ``job.values``."""

    @abstractmethod
    def target(self, job: Job) -> int | None:
        """At most so many are selected; None: that is not known before."""

    def sent(self, job: Job, indices: Indices) -> None:
        """Called when the entries at ``indices`` have been taken out of ``job.values``."""

    def room(self, job: Job) -> int | None:
        """Known with plain indices where the count is."""
        count = self.target(job)
        if count is None or self.indices == "delta":
            return None
        return entries.plain_bytes(
            job.bucket.size, count, 2 if self.values == "fp16" else job.memory.dtype.itemsize
        )

    def most(self, job: Job) -> int:
        """As with all elements."""
        return entries.most_bytes(job.bucket.size, job.bucket.size)

    def encode(self, job: Job) -> Bytes:
        """The selected entries; what remains of a rounded value stays."""
        indices = self.select(job)
        picked = job.values[indices]
        values = entries.to_half(picked) if self.values == "fp16" else picked
        job.values[indices] = picked - values.astype(picked.dtype)
        self.sent(job, indices)
        return entries.encode(indices, values, job.bucket.size, delta=self.indices == "delta")

    def decode(self, job: Job, body: Bytes, rank: int, out: Array) -> None:
        """Add the entries; no index stands twice in one body."""
        indices, values = entries.decode(body, job.bucket.size, rank)
        with np.errstate(over="ignore"):
            out[indices] += values.astype(out.dtype)
