"""A barrier of processes on one host that does not go over the network: a file that all map, a counter a rank.

Ranks in different network namespaces share the file system. A barrier over the impaired network would let ranks start a round at
times that differ by a retransmission timeout.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import numpy as np

from dblp.errors import LocalError

_NAP_S = 50e-6
"""Between looks; waking up later than another rank by this much is nothing beside a round of milliseconds."""


class Barrier:
    """Each rank calls ``wait`` the same number of times. Counters only grow, and each is written by its rank alone."""

    def __init__(self, path: Path, rank: int, world_size: int, timeout_s: float) -> None:
        size = 8 * (world_size + 2)
        with path.open("a+b") as file:
            file.truncate(size)  # all ranks write the same length; nothing is lost by the last one
            self._map = mmap.mmap(file.fileno(), size)
        self._counters = np.frombuffer(self._map, np.int64)
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._passed = 0

    def wait(self, decision: bool = True) -> bool:
        """Return when all ranks have called it; all get rank 0's ``decision``.

        Raises LocalError if a rank does not come in time.
        """
        self._passed += 1
        # Two places in turn: rank 0 may be a barrier ahead of who still reads, and never more.
        place = self._world_size + self._passed % 2
        if self._rank == 0:
            self._counters[place] = decision
        self._counters[self._rank] = self._passed
        deadline = time.monotonic() + self._timeout_s
        while int(self._counters[: self._world_size].min()) < self._passed:
            if time.monotonic() > deadline:
                late = np.flatnonzero(self._counters[: self._world_size] < self._passed).tolist()
                raise LocalError(f"rank {', '.join(map(str, late))} did not come to the next round")
            time.sleep(_NAP_S)
        return bool(self._counters[place])
