"""What a congestion controller is told and asked."""

from __future__ import annotations

from typing import Protocol


class CongestionControl(Protocol):
    """The congestion control of one path to one peer. Times in seconds, sizes in bytes of UDP payload."""

    window_bytes: float
    """Most bytes in flight."""

    def on_acked(self, acked_bytes: int, rtt_s: float, *, now: float) -> None:
        """Bytes were acknowledged; ``rtt_s`` is the network's share of the round trip (time held at the ends excluded)."""

    def on_lost(self, lost_bytes: int, *, now: float) -> None:
        """Bytes were declared lost."""

    def pacing_bps(self) -> float:
        """Bits per second at which bursts should leave; 0: as acknowledgements come."""
