"""How much is lost where there is no queue: what no window can help.

Loss that comes with a queue may be a buffer that was overrun, or a line that loses some of everything. What is lost while no
round trip is raised tells the second: loss is a sign of congestion only where it is clearly more than that. Without this, a line
that loses as much as the share from which on loss counts shrinks windows by mere chance, in each of a thousand looks once, and
the smaller the window the more looks there are: a simulated link that loses a tenth was filled to a third.
"""

from __future__ import annotations

HALF_LIFE_DATAGRAMS = 4096.0
"""Datagrams of which half are forgotten: 5 % show as 4.4 to 5.6."""
PRIOR_DATAGRAMS = 128.0
"""Datagrams that are taken to have arrived before any did: a few losses make no lossy line."""
MARGIN = 1.5
"""Loss is more than random from this multiple of it on."""
MOST_SHARE = 0.2
"""Random loss is never taken for more: a burst of interference says nothing of what comes after it."""


class RandomLoss:
    """The share lost while there was no queue."""

    __slots__ = ("_lost", "_seen")

    def __init__(self) -> None:
        self._seen = PRIOR_DATAGRAMS
        self._lost = 0.0

    def note(self, lost: float, seen: float) -> None:
        """So many of ``seen`` datagrams were lost while there was no queue."""
        keep = 0.5 ** (seen / HALF_LIFE_DATAGRAMS)
        self._seen = keep * self._seen + seen
        self._lost = keep * self._lost + lost

    @property
    def explains(self) -> float:
        """The share of a window that may be lost without a buffer that was overrun."""
        return min(MARGIN * self._lost / self._seen, MOST_SHARE)
