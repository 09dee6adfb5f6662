"""Methods that decide in each iteration how much to send, up to everything: their common part."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable
from typing import Any, ClassVar

import numpy as np

from dblp.collectives.compression.base import Array, Job, finite, narrowed, note_lost, widened
from dblp.collectives.compression.entries import to_half
from dblp.collectives.compression.iterations import Iteration, Iterations
from dblp.collectives.compression.link import Link
from dblp.collectives.compression.sparse import Sparse

_LARGEST_BFLOAT16 = 3.3895313892515355e38
"""Rounding would give infinity above it."""
_SPARSE_CROSSINGS = 1
_WHOLE_CROSSINGS = 2
"""An all-reduce is a reduce-scatter, then a gather."""


class Adaptive(Sparse):
    """Entries, or everything in an all-reduce, as the figures of all ranks decide (``iterations.py``).

    Subclasses put into ``job.notes``: ``whole`` (True: everything is sent). They keep what all ranks know in ``job.factors`` and
    what this rank measured in ``Iterations``.
    """

    __slots__ = ()
    op: ClassVar[str]
    """By which the ranks' figures are reduced."""

    @abstractmethod
    async def decide(self, job: Job, link: Link, course: Iterations) -> None:
        """An iteration begins: take what ``heard`` has and decide; the same on all ranks."""

    @abstractmethod
    def tell(self, job: Job, link: Link, course: Iterations) -> Array:
        """This rank's figures of the last iteration, float64, equally many on all ranks."""

    @abstractmethod
    def choose(self, job: Job) -> None:
        """Fill ``job.notes`` for this bucket, as decided."""

    def heard(self, job: Job) -> Array | None:
        """The reduced figures of the iteration before the last one, once: None if there are none."""
        vector = job.factors.pop(f".{self.name} heard", None)
        return None if vector is None or not vector.size else vector

    async def agree(self, job: Job, link: Link) -> None:
        """The first bucket of an iteration decides for all of it."""
        course = Iterations.of(job)
        if await course.enter(job, link.now_s):
            await self.decide(job, link, course)
            job.notes["figures"] = self.tell(job, link, course)
        self.choose(job)

    def compress(self, job: Job) -> Array:
        """Everything as it is, or entries."""
        job.notes["iteration"].spoiled |= job.spoiled
        return self.encode_whole(job) if job.notes["whole"] else Sparse.compress(self, job)

    async def exchange(self, job: Job, sent: Array, link: Link) -> Awaitable[list[Array]]:
        """The data, which may lose something where there is a policy, and beside those of the first bucket of an iteration the
        figures, which may not."""
        began = link.now_s
        figures: Array | None = job.notes.get("figures")
        beside = [] if figures is None or not figures.size else [link.sum(figures, self.op)]
        data: Awaitable[Any]
        if self.summed(job):
            data = link.collect(link.sum(sent, "avg", self.whole_type(job), lost=note_lost(job)))
        else:
            data = await Sparse.exchange(self, job, sent, link)

        async def timed() -> list[Array]:
            received: list[Array] = await data
            self._note_span(job, received, began, link.now_s)
            return received

        async def both() -> list[Array]:
            received, *told = await link.collect(timed(), *beside)
            for vector in told:
                job.factors[f".{self.name} heard"] = vector
            result: list[Array] = received
            return result

        return both()

    def decompress(self, job: Job, received: list[Array]) -> Array:
        """The average, from either."""
        if not self.summed(job):
            return Sparse.decompress(self, job, received)
        out = self.decode_whole(job, received[0])
        if not finite(out):
            job.spoiled = True
            out = np.full(job.bucket.size, np.nan, job.memory.dtype)
        return out

    def own_part(self, job: Job, sent: Array) -> Array:
        """Its own payload, decoded."""
        if not self.summed(job):
            return Sparse.own_part(self, job, sent)
        return job.zeros() if job.spoiled else self.decode_whole(job, sent)

    def uncounted(self, job: Job, sent: Array) -> Array | None:
        """Entries, or lanes of a sum."""
        if not self.summed(job):
            return Sparse.uncounted(self, job, sent)
        lost: Array | None = job.notes.get("lost")
        return None if lost is None or job.spoiled else self.decode_lost(job, lost)

    def decode_lost(self, job: Job, lanes: Array) -> Array:
        """What of a sum was lost, a new (size,): wide already."""
        return lanes.astype(job.memory.dtype)

    def ended(self, job: Job) -> None:
        """The bucket no longer holds up the next iteration."""
        Iterations.of(job).leave(job)

    def summed(self, job: Job) -> bool:
        """What is sent is averaged by an all-reduce as it is."""
        return bool(job.notes["whole"])

    def whole_type(self, job: Job) -> str:
        """Element type of what is sent where everything is: the gradient's own."""
        return job.kind.name

    def encode_whole(self, job: Job) -> Array:
        """All values in the gradient's type; what that rounds away is withheld. NaN where they were not finite."""
        if job.spoiled:
            return narrowed(np.full(job.bucket.size, np.nan, job.memory.dtype), job.kind)
        if job.kind.name == "float16":
            lanes: Array = to_half(job.values)
        else:
            bound = job.values.dtype.type(_LARGEST_BFLOAT16)
            fits = job.values if job.kind.name != "bfloat16" else job.values.clip(-bound, bound)
            lanes = narrowed(fits, job.kind)
            lanes = lanes.copy() if np.shares_memory(lanes, job.values) else lanes
        job.values -= widened(lanes, job.kind, job.memory.dtype)
        return lanes

    def decode_whole(self, job: Job, lanes: Array) -> Array:
        """The average of such lanes."""
        return widened(lanes, job.kind, job.memory.dtype)

    def _note_span(self, job: Job, received: list[Array], began_s: float, now_s: float) -> None:
        iteration: Iteration = job.notes["iteration"]
        whole = self.summed(job)
        sizes = [array.nbytes for array in received]
        others = job.world_size - 1
        if whole:
            iteration.data_bytes += 2 * others / job.world_size * sizes[0]
        else:
            own = sizes[job.rank]
            iteration.data_bytes += max(sum(sizes) - own, others * own)
        iteration.spans.append((began_s, now_s, _WHOLE_CROSSINGS if whole else _SPARSE_CROSSINGS))
