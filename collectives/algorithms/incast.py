"""Dynamic incast: how many peers a receiver lets send at once.

Many senders overflow the queue in front of one receiver, each within its rights. A receiver therefore admits ``limit`` peers
at a time, in the order of their ranks, and the next one when a message has ended; peers that wait hold a window of one chunk
(and what a peer may send before it hears of its window, ``TransportConfig.early_bytes``). The limit starts at all peers, halves
after a round in which they had to send more than ``LOSSY`` of their chunks again, and grows by one after every other round:
multiplicative decrease, additive increase, as AIMD congestion control (Chiu and Jain, 1989). Fewer at once overlap less: the
result of a chunk can't leave before all have pushed it. So a limit whose rounds took longer than those of another is left for
that one, and not tried again for ``MEMORY`` rounds.

OptiReduce (NSDI'25, UBT's dynamic incast) has the receiver raise and lower the number from the loss and timeouts that it sees and
announce it in its headers; its rule and thresholds are not published. Differences: the share of repeated chunks, which
the senders tell in a message of 8 bytes, stands for loss, since this transport repairs within the round; the time of the round
stands for timeouts; windows stand for the header's field, so senders need not know of the scheme.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

LOSSY = 0.02
"""Share of repeated chunks above which senders got into each other's way. Random loss of a bad link stays below."""
LEAST_PEERS = 4
"""Receivers of fewer peers let all of them in: a queue that takes one burst takes three."""
OPENING_ROUNDS = 3
"""First rounds, in which congestion windows open."""
SLOWER = 1.05
"""Ratio of times above which a limit counts as slower: rounds differ by some percent of themselves."""
MEMORY = 64
"""Rounds after which the time of a limit is forgotten: networks change."""
WEIGHT = 0.5
"""Weight of the newest round in the time of a limit."""


class Incast:
    """The limit of one receiver, from round to round."""

    __slots__ = ("_rounds", "_times", "limit", "peers")

    def __init__(self, peers: int) -> None:
        """``peers``: how many there are, the limit to start with and the largest."""
        self.peers = max(1, peers)
        self.limit = self.peers
        self._rounds = 0
        self._times: dict[int, tuple[float, int]] = {}  # by limit: seconds a chunk, and the round that told

    def on_round(self, sent: int, resent: int, seconds: float) -> None:
        """A round has ended in which the peers sent so many chunks first and so many again."""
        if not sent:
            return
        self._rounds += 1
        if self._rounds <= OPENING_ROUNDS:
            return  # neither their loss nor their times say much of the next
        self._note(seconds / sent)
        best = min(self._times, key=lambda limit: self._times[limit][0])
        if self._slower(self.limit, best):
            self.limit = best
            return
        wanted = max(1, self.limit // 2) if resent > LOSSY * sent else min(self.peers, self.limit + 1)
        if wanted not in self._times or not self._slower(wanted, self.limit):
            self.limit = wanted

    def _note(self, seconds: float) -> None:
        self._times = {
            limit: (time, told) for limit, (time, told) in self._times.items() if self._rounds - told < MEMORY
        }
        before = self._times.get(self.limit, (seconds, 0))[0]
        self._times[self.limit] = (before + WEIGHT * (seconds - before), self._rounds)

    def _slower(self, limit: int, other: int) -> bool:
        return self._times[limit][0] > SLOWER * self._times[other][0]


class Watch:
    """Adds up what the peers tell in one round, and tells ``Incast`` once all ``events`` have come: what each peer had to
    send, and each result's confirmation."""

    __slots__ = ("_began", "_events", "_incast", "_resent", "_sent", "_time")

    def __init__(self, incast: Incast, events: int, time: Callable[[], float]) -> None:
        """``time``: the clock, in seconds."""
        self._incast = incast
        self._events = events
        self._time = time
        self._began = time()
        self._sent = self._resent = 0

    def event(self, sent: int = 0, resent: int = 0) -> None:
        """One of them has come."""
        self._sent += sent
        self._resent += resent
        self._events -= 1
        if self._events == 0:
            self._incast.on_round(self._sent, self._resent, self._time() - self._began)


class Turns:
    """Whose turn it is in one round."""

    __slots__ = ("_free", "_waiting")

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: deque[Callable[[], None]] = deque()

    def window(self) -> int:
        """The window with which to post the next receive: 0, all, while there is room, else one chunk."""
        if self._free > 0:
            self._free -= 1
            return 0
        return 1

    def wait(self, release: Callable[[], None]) -> None:
        """``release`` a receive that was posted with a window once its turn has come."""
        self._waiting.append(release)

    def next(self) -> None:
        """A message has ended: another peer may send."""
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._free += 1
