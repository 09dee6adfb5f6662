"""No compression: what all methods are measured against, through the same interface."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dblp.collectives.compression.base import Array, Job, Method, narrowed, note_lost, widened
from dblp.collectives.compression.link import Link


@dataclass(frozen=True, slots=True)
class Dense(Method):
    """The gradient itself, averaged in its own type and memory. Nothing is withheld, and what is not finite stays where it is.

    Under a loss policy with a carry it keeps what was lost, as an all-reduce without compression does.
    """

    name: ClassVar[str] = "none"

    @property
    def keeps(self) -> bool:
        """There is nothing to keep."""
        return False

    def begin(self, job: Job, gradient: Array) -> None:
        """Nothing is copied or looked at, unless something can be lost."""
        if self._keeps_lost(job):
            self.absorb_all(job, gradient)
        else:
            job.values = gradient

    def absorb_all(self, job: Job, gradient: Array) -> None:
        """What was lost before goes with the gradient, and what rounding takes away stays."""
        memory = job.memory
        job.values = gradient.copy() if memory.residual is None else memory.residual
        with np.errstate(over="ignore", invalid="ignore"):
            if memory.residual is not None:
                job.values += gradient
            job.gradient[...] = narrowed(job.values, job.kind)
            job.values -= widened(job.gradient, job.kind, memory.dtype)
        job.values[~np.isfinite(job.values)] = 0
        memory.residual = job.values

    def compress(self, job: Job) -> Array:
        """The gradient."""
        if not self._keeps_lost(job):
            job.values = job.zeros()
        return job.gradient

    async def exchange(self, job: Job, sent: Array, link: Link) -> Awaitable[list[Array]]:
        """An all-reduce."""
        return link.collect(link.sum(sent, "avg", job.kind.name, lost=note_lost(job)))

    def decompress(self, job: Job, received: list[Array]) -> Array:
        """What came is the average, in the gradient's own type."""
        return received[0]

    def own_part(self, job: Job, sent: Array) -> Array:
        """All of it."""
        return widened(sent, job.kind, job.memory.dtype)

    def uncounted(self, job: Job, sent: Array) -> Array | None:
        """As it was lost."""
        lost: Array | None = job.notes.get("lost")
        return None if lost is None else lost.astype(job.memory.dtype, copy=False)

    def _keeps_lost(self, job: Job) -> bool:
        """True if something is kept from an earlier round, or may be from this one."""
        return job.memory.residual is not None or (job.lossy is not None and job.lossy.carry is not None)
