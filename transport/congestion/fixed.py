"""A fixed rate: for links whose rate is known, and for experiments."""

from __future__ import annotations

import math
from typing import ClassVar

from dblp.transport.config import TransportConfig


class FixedControl:
    """No reaction: ``config.rate_bps`` paces what a rank sends, 0 leaves the receivers' credit as the only limit."""

    ecn: ClassVar[bool] = False

    def __init__(self, config: TransportConfig) -> None:
        self.window_bytes: float = math.inf
        self.quantum_bytes: float = math.inf
        self._rate_bps = config.rate_bps

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
        """No reaction."""

    def on_lost(self, lost_bytes: int, *, now: float) -> None:
        """No reaction."""

    def pacing_bps(self) -> float:
        """The configured rate; it is shared by all peers of the rank."""
        return self._rate_bps
