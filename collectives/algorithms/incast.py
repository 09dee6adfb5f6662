"""Dynamic incast: how many peers a receiver lets send at once.

Many senders overflow the queue in front of one receiver, each within its rights. A receiver therefore admits ``limit`` peers
at a time, in the order of their ranks, and the next one when a message has ended; peers that wait hold a window of one chunk
(and what a peer may send before it hears of its window, ``TransportConfig.early_bytes``). The limit starts at all peers, halves
after a round in which they had to send more than ``LOSSY`` of their chunks again, and grows by one after every other round:
multiplicative decrease, additive increase, as AIMD congestion control (Chiu and Jain, 1989).

OptiReduce (NSDI'25, UBT's dynamic incast) has the receiver raise and lower the number from the loss and timeouts that it sees and
announce it in its headers; its rule and thresholds are not published. Differences: the share of repeated chunks, which
the senders tell in a message of 8 bytes, stands for loss, since this transport repairs within the round; windows stand for the
header's field, so senders need not know of the scheme.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

LOSSY = 0.02
"""Share of repeated chunks above which senders got into each other's way. Random loss of a bad link stays below."""
LEAST_PEERS = 4
"""Receivers of fewer peers let all of them in: a queue that takes one burst takes three."""


class Incast:
    """The limit of one receiver, from round to round."""

    __slots__ = ("limit", "peers")

    def __init__(self, peers: int) -> None:
        """``peers``: how many there are, the limit to start with and the largest."""
        self.peers = peers
        self.limit = max(1, peers)

    def on_round(self, sent: int, resent: int) -> None:
        """A round has ended in which the peers sent so many chunks first and so many again."""
        if resent > LOSSY * sent:
            self.limit = max(1, self.limit // 2)
        else:
            self.limit = min(max(1, self.peers), self.limit + 1)


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
