"""No compression: what all methods are measured against, through the same interface."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import ClassVar

from dblp.collectives.compression.base import Array, Job, Method, widened
from dblp.collectives.compression.link import Link


@dataclass(frozen=True, slots=True)
class Dense(Method):
    """The gradient itself, averaged in its own type and memory. Nothing is withheld, and what is not finite stays where it is."""

    name: ClassVar[str] = "none"

    @property
    def keeps(self) -> bool:
        """There is nothing to keep."""
        return False

    def begin(self, job: Job, gradient: Array) -> None:
        """Nothing is copied or looked at."""
        job.values = gradient

    def compress(self, job: Job) -> Array:
        """The gradient."""
        job.values = job.zeros()
        return job.gradient

    async def exchange(self, job: Job, sent: Array, link: Link) -> Awaitable[list[Array]]:
        """An all-reduce."""
        return link.collect(link.sum(sent, "avg", job.kind.name))

    def decompress(self, job: Job, received: list[Array]) -> Array:
        """What came is the average, in the gradient's own type."""
        return received[0]

    def own_part(self, job: Job, sent: Array) -> Array:
        """All of it."""
        return widened(sent, job.kind, job.memory.dtype)
