"""How far this host is behind its network: how long datagrams wait in the kernel before they are read.

What is sent several times so that one of them arrives pays on a network that loses much while the hosts idle. A host that is
behind spends its time on the copies that did arrive, and everything, the end of a burst of loss included, is noticed later.
So ranks tell each other how far behind they are (``wire.Feedback.behind_us``), and send fewer copies and questions for it.
"""

from __future__ import annotations

BEHIND_S = 3e-3
"""Wait of datagrams, in both hosts together, up to which they keep up: a tick of their schedulers and a turn of their loops."""
HALF_LIFE_S = 10e-3
"""Time in which an old wait counts half: a few turns of a busy host."""


class Backlog:
    """One endpoint's."""

    __slots__ = ("_at", "behind_s")

    def __init__(self) -> None:
        self.behind_s = 0.0
        """How long datagrams waited lately, seconds."""
        self._at = 0.0

    def note(self, waited_s: float, now: float) -> None:
        """The datagram that is read ``now`` had waited for so long, seconds."""
        faded = self.behind_s * 0.5 ** min((now - self._at) / HALF_LIFE_S, 60.0)
        self.behind_s = max(waited_s, faded)
        self._at = now

    def affordable(self, copies: int, peer_behind_s: float = 0.0) -> int:
        """How many of so many copies are worth it: all while the hosts keep up, one where they are far behind."""
        behind = self.behind_s + peer_behind_s
        return copies if behind <= BEHIND_S else max(1, int(copies * BEHIND_S / behind))
