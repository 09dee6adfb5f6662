"""Scratch memory of a group's rounds, kept from round to round: fresh pages cost as much as the sums made in them."""

from __future__ import annotations

import numpy as np

from dblp.transport.port import Bytes

_KEEP = 2
"""Buffers kept: two rounds in flight, as DDP has them, find theirs."""


class StagePool:
    """A few buffers for reuse. Memory held: at most two buffers, each as large as a round asked for."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []

    def take(self, nbytes: int) -> Bytes:
        """A buffer of at least ``nbytes`` (uint8, 1-D), its content undefined: the smallest free one that is large enough."""
        fitting = [index for index, buffer in enumerate(self._free) if len(buffer) >= nbytes]
        if not fitting:
            return np.empty(nbytes, np.uint8)
        return self._free.pop(min(fitting, key=lambda index: len(self._free[index])))

    def give(self, buffer: Bytes) -> None:
        """Return a buffer; the largest ones are kept."""
        self._free.append(buffer)
        self._free.sort(key=len, reverse=True)
        del self._free[_KEEP:]
