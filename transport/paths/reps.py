"""``reps``: paths whose bursts were acknowledged cleanly are used again (recycled entropy packet spraying).

Bonato et al., REPS, arXiv 2407.21625 (EuroSys'26). A small circular buffer holds the entropies that came back lately; the next
burst takes the oldest that is fresh, or a random one where none is. After a timeout that is judged a failure the buffer is
frozen: its entropies are used again and again, fresh or not, and none at random, until ``FREEZE_S`` has passed.

Differences from the paper:
- An entropy is one of the at most 64 local ports, not any value of 16 bits, so it is known which of them failed: it is taken out
  of the buffer, and is not drawn at random until it answers a probe.
- For the same reason the paths that lose most are known. By the packet, four of five acknowledgements of a path that loses 20 %
  recommend it, and it is drawn as often as any other. Here neither: see ``lossy``.
- One feedback acknowledges many datagrams of a path at once, which would fill the buffer with that path alone and in the end
  leave only a few in use. So a feedback caches its path as often as an even share of the buffer holds it, once for eight
  paths and more, if bursts of chunks arrived whole and no congestion mark came.
- Each path has its own congestion window, so a fresh entropy whose path is full is passed over and stays fresh.
- The first window, and the one after freezing, is ``EXPLORE_TURNS`` random bursts a path instead of a bandwidth-delay product of
  packets.
"""

from __future__ import annotations

import statistics

import numpy as np

from dblp.transport.outgoing import Outgoing
from dblp.transport.paths.base import PathChoice, Usable
from dblp.transport.paths.spray import draw

SLOTS = 8
"""Entropies in the buffer (the paper's)."""
FREEZE_S = 10e-3
"""Least time in freezing mode (the artifact's 10 ms)."""
EXPLORE_TURNS = 2
"""Random bursts a path before the first entropy is recycled."""
LOSSY = 0.05
"""Share of lost datagrams above which a path may be lossy."""
TRIAL_EVERY = 64
"""After so many bursts one may take a lossy path, so that it can show that it has become better."""


class RepsChoice(PathChoice):
    """Recycled paths for one peer."""

    def __init__(self, paths: int, rng: np.random.Generator, most_chunks: int = 0) -> None:
        super().__init__(paths, most_chunks)
        self._rng = rng
        self._slots: list[int] = []  # the paths, oldest first from ``_head`` on once the buffer is full
        self._fresh: list[bool] = []
        self._head = 0  # where the next one is written
        self._replay = 0
        self._explore = EXPLORE_TURNS * paths
        self._until_trial = TRIAL_EVERY
        self._times = max(1, SLOTS // paths)
        self._frozen_until: float | None = None
        self._left: set[int] = set()

    @property
    def frozen(self) -> bool:
        """In freezing mode."""
        return self._frozen_until is not None

    def pick(self, message: Outgoing, usable: Usable, now: float) -> tuple[int, int] | None:
        """A recycled path, or a random one."""
        if self._frozen_until is not None and now >= self._frozen_until:
            self._thaw()
        path = None
        if self.frozen:
            path = self._replayed(usable)
        elif self._explore <= 0:
            path = self._recycled(usable)
        if path is None:
            path = self._random(usable)
        if path is None:
            return None
        self._until_trial -= 1
        return path, self.most_chunks

    def lossy(self) -> set[int]:
        """Living paths that lose more than ``LOSSY``, and twice as much as half of all do: where all lose alike, none is."""
        shares = {path: self.loss_share(path) for path in self.paths if path not in self._left}
        if not shares:
            return set()
        limit = max(LOSSY, 2.0 * statistics.median_low(shares.values()))
        return {path for path, share in shares.items() if share > limit}

    def on_acked(self, path: int, datagrams: int, *, marked: bool, now: float) -> None:
        """Cache the path if something came whole and unmarked."""
        if marked or not datagrams or path in self.lossy():
            return
        for _ in range(self._times):
            self._cache(path)

    def on_left(self, path: int, *, now: float) -> None:
        """Freeze: go on with what is known to be good."""
        self._left.add(path)
        kept = [(slot, fresh) for slot, fresh in self._oldest_first() if slot != path]
        self._slots, self._fresh = [slot for slot, _ in kept], [fresh for _, fresh in kept]
        self._head = self._replay = 0
        if self._slots:
            self._frozen_until = now + FREEZE_S

    def on_back(self, path: int, *, now: float) -> None:
        """See ``PathChoice``."""
        self._left.discard(path)

    def _cache(self, path: int) -> None:
        if len(self._slots) < SLOTS:
            self._slots.append(path)
            self._fresh.append(True)
        else:
            self._slots[self._head], self._fresh[self._head] = path, True
            self._head = (self._head + 1) % SLOTS

    def _oldest_first(self) -> list[tuple[int, bool]]:
        both = list(zip(self._slots, self._fresh, strict=True))
        return both[self._head :] + both[: self._head]

    def _recycled(self, usable: Usable) -> int | None:
        """The oldest fresh path that is usable; it is not fresh any more."""
        count = len(self._slots)
        for step in range(count):
            index = (self._head + step) % count
            if self._fresh[index] and usable(self._slots[index]):
                self._fresh[index] = False
                return self._slots[index]
        return None

    def _replayed(self, usable: Usable) -> int | None:
        """The next path of the frozen buffer."""
        count = len(self._slots)
        for step in range(count):
            index = (self._replay + step) % count
            if usable(self._slots[index]):
                self._replay = (index + 1) % count
                return self._slots[index]
        return None

    def _random(self, usable: Usable) -> int | None:
        """A path at random that is usable and not lossy; if those are full, it is worth to wait for them."""
        lossy = self.lossy()
        if self._until_trial <= 0:
            self._until_trial = TRIAL_EVERY
            lossy = set()
        path = draw(tuple(path for path in self.paths if path not in lossy), usable, self._rng)
        if path is not None:
            self._explore -= 1
        return path

    def _thaw(self) -> None:
        self._frozen_until = None
        self._fresh = [False] * len(self._slots)
        self._explore = EXPLORE_TURNS * len(self.paths)
