"""Payloads of a bounded all-gather: blocks that stand each for itself, a chunk each, and a head that always arrives.

A payload is ``count`` blocks of ``chunk_bytes`` and then the head, in as many chunks as it needs, the last of which may be short.
A lost chunk costs one block. The head's chunks are critical (class 0).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dblp.transport.message import BOUNDED_CLASS, MessageSpec, most_critical
from dblp.transport.policy import Policy


@dataclass(frozen=True, slots=True)
class Blocks:
    """How one rank's payload lies in chunks; all ranks know it before it moves."""

    count: int
    """Blocks, each of which may be lost."""
    chunk_bytes: int
    """Bytes of a block, a multiple of 16."""
    head_bytes: int
    """Bytes behind the blocks, which must arrive; at least 1."""

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.count * self.chunk_bytes + self.head_bytes

    @property
    def chunks(self) -> int:
        """Chunks of the payload, those of the head included."""
        return -(-self.nbytes // self.chunk_bytes)

    def spec(self, policy: Policy, receivers: int) -> MessageSpec:
        """The message to one of ``receivers`` ranks. What any of them misses counts for none, so each gets its part of the
        budget. Where the head is more than may be critical, nothing may be lost."""
        budget = policy.budget / receivers if self.chunks - self.count <= most_critical(self.chunks) else 0.0
        if not budget:
            return MessageSpec(nbytes=self.nbytes, chunk_bytes=self.chunk_bytes)
        return MessageSpec(
            nbytes=self.nbytes,
            chunk_bytes=self.chunk_bytes,
            budget=budget,
            stop=policy.message_stop,
            stop_after_s=policy.stop_after_s,
        )

    def classes(self) -> npt.NDArray[np.uint8]:
        """The class of each chunk."""
        classes = np.full(self.chunks, BOUNDED_CLASS, np.uint8)
        classes[self.count :] = 0
        return classes
