"""What a congestion controller is told and asked."""

from __future__ import annotations

import math
from typing import ClassVar, Protocol


class CongestionControl(Protocol):
    """The congestion control of one path to one peer. Times in seconds, sizes in bytes of UDP payload."""

    ecn: ClassVar[bool]
    """Whether what is sent asks switches for marks (ECT(0)): it must react to them then (RFC 3168, section 5)."""
    window_bytes: float
    """Most bytes in flight."""
    quantum_bytes: float
    """Most bytes that leave at once. Each portion that is cut by it asks for an acknowledgement."""

    def on_acked(
        self,
        acked_bytes: int,
        rtt_s: float,
        *,
        now: float,
        marked_bytes: int = 0,
        inflight_bytes: int = 0,
        waiting: bool = True,
        host_s: float = 0.0,
    ) -> None:
        """Bytes were acknowledged; ``rtt_s`` is the network's share of the round trip (time held at the ends excluded).

        ``marked_bytes``: how many of them came with a congestion mark (ECN's CE); ``inflight_bytes``: what is still in
        flight; ``waiting``: more waits to be sent, so that the network and not the application sets the pace; ``host_s``: how
        long what was acknowledged waited for its acknowledgement beyond ``rtt_s``, in the hosts.
        """

    def on_lost(self, lost_bytes: int, *, now: float) -> None:
        """Bytes were declared lost."""

    def pacing_bps(self) -> float:
        """Bits per second at which bursts should leave; 0: as acknowledgements come."""


def heavy_loss(lost: float, total: float, share: float) -> bool:
    """More datagrams of ``total`` were lost than random loss of ``share`` explains: three standard deviations more."""
    expected = share * total
    return lost > expected + 3.0 * math.sqrt(expected)
