"""Methods that send some elements and withhold the rest: their common part."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Iterator
from math import ceil

import numpy as np

from dblp.collectives.compression import entries
from dblp.collectives.compression.base import Array, Gathered, Job, Part, finite
from dblp.collectives.compression.entries import Indices
from dblp.collectives.compression.link import Bytes, Link
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

    def halves(self, job: Job) -> bool:
        """Values are sent in half precision; the same on all ranks."""
        return self.values == "fp16"

    def room(self, job: Job) -> int | None:
        """Known with plain indices where the count is."""
        count = self.target(job)
        if count is None or self.indices == "delta":
            return None
        return entries.plain_bytes(
            job.bucket.size, count, 2 if self.halves(job) else job.memory.dtype.itemsize
        )

    def most(self, job: Job) -> int:
        """As with all elements."""
        return entries.most_bytes(job.bucket.size, job.bucket.size)

    def encode(self, job: Job) -> Bytes:
        """The selected entries; what remains of a rounded value stays."""
        indices = self.select(job)
        picked = job.values[indices]
        values = entries.to_half(picked) if self.halves(job) else picked
        job.values[indices] = picked - values.astype(picked.dtype)
        self.sent(job, indices)
        return entries.encode(indices, values, job.bucket.size, delta=self.indices == "delta")

    def decode(self, job: Job, body: Bytes, rank: int, out: Array) -> None:
        """Add the entries; no index stands twice in one body."""
        indices, values = entries.decode(body, job.bucket.size, rank)
        with np.errstate(over="ignore"):
            out[indices] += values.astype(out.dtype)


class PartlyDense(Sparse):
    """Some parameters go as they are, in an all-reduce beside the entries. Subclasses put them into ``job.notes["dense"]``."""

    __slots__ = ()

    @abstractmethod
    def dense(self, job: Job, part: Part) -> bool:
        """True if a parameter goes as it is; the same on all ranks."""

    def put_dense(self, job: Job, mean: Array, out: Array) -> None:
        """The dense parameters' averages have come: put what they give into ``out``, (size,)."""
        self.set_dense(job, out, mean)

    async def exchange(self, job: Job, sent: Array, link: Link) -> Awaitable[list[Array]]:
        """The all-reduce first, then the entries."""
        dense: Array = job.notes["dense"]
        if job.spoiled:
            dense.fill(np.nan)
        total = [link.sum(dense, "avg")] if dense.size else []
        gathered = await Sparse.exchange(self, job, sent, link)

        async def both() -> list[Array]:
            results = await link.collect(*total, gathered)
            job.notes["means"] = results[:-1]
            payloads: list[Array] = results[-1]
            return payloads

        return both()

    def decompress(self, job: Job, received: list[Array]) -> Array:
        """The mean of the entries, and the dense parameters; all NaN if one of these is."""
        out = Sparse.decompress(self, job, received)
        for mean in job.notes["means"]:
            if not finite(mean):
                job.spoiled = True
                out.fill(np.nan)
            if not job.spoiled:
                self.put_dense(job, mean, out)
        return out

    def dense_of(self, job: Job, flat: Array) -> Array:
        """A copy of the dense parameters' elements of a flat array."""
        pieces = [piece for part, piece in self._pieces(job, flat) if self.dense(job, part)]
        return np.concatenate([np.empty(0, flat.dtype), *pieces])

    def set_dense(self, job: Job, flat: Array, values: Array) -> None:
        """Overwrite them in a flat array."""
        low = 0
        for part, piece in self._pieces(job, flat):
            if self.dense(job, part):
                piece[...] = values[low : low + piece.size]
                low += piece.size

    def _pieces(self, job: Job, flat: Array) -> Iterator[tuple[Part, Array]]:
        return zip(job.bucket.parts, job.bucket.cut(flat), strict=True)
