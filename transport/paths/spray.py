"""``spray`` and ``random``: each burst, down to each chunk, takes another path."""

from __future__ import annotations

import numpy as np

from dblp.transport.outgoing import Outgoing
from dblp.transport.paths.base import PathChoice, Usable


class SprayChoice(PathChoice):
    """Paths in turn; those without room or credit are passed over.

    Packet spraying (Dixit et al., INFOCOM 2013) is by the packet: ``most_chunks=1``. The default is by the burst or train, which
    costs one system call for many chunks.
    """

    def __init__(self, paths: int, most_chunks: int = 0, first: int = 0) -> None:
        """``first``: the path to begin with."""
        super().__init__(paths, most_chunks)
        self._turn = first % paths

    def pick(self, message: Outgoing, usable: Usable, now: float) -> tuple[int, int] | None:
        """The next path in turn that is usable."""
        count = len(self.paths)
        for step in range(count):
            path = (self._turn + step) % count
            if usable(path):
                self._turn = path + 1
                return path, self.most_chunks
        return None


class RandomChoice(PathChoice):
    """A path at random among those that are usable: oblivious spraying, as Ultra Ethernet's pseudo-random entropies."""

    def __init__(self, paths: int, rng: np.random.Generator, most_chunks: int = 0) -> None:
        super().__init__(paths, most_chunks)
        self._rng = rng

    def pick(self, message: Outgoing, usable: Usable, now: float) -> tuple[int, int] | None:
        """A usable path at random."""
        path = draw(self.paths, usable, self._rng)
        return None if path is None else (path, self.most_chunks)


def draw(paths: tuple[int, ...], usable: Usable, rng: np.random.Generator) -> int | None:
    """One of the usable paths, each as likely; None if none is."""
    ready = [path for path in paths if usable(path)]
    return ready[int(rng.integers(len(ready)))] if ready else None
