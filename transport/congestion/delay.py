"""Delay-based congestion control, of the TIMELY/Swift kind.

Sources: Mittal et al., "TIMELY: RTT-based Congestion Control for the Datacenter", SIGCOMM 2015; Kumar et al., "Swift: Delay is
Simple and Effective for Congestion Control in the Datacenter", SIGCOMM 2020 (target delay, additive increase,
decrease in proportion to the excess at most once a round trip). MLT and DLCP use the same kind, "minimal, only to avoid
collapse". Differences from Swift: no flow or hop scaling of the target; slow start; plain loss is not congestion (the
protocol tolerates it), loss beside a raised delay is.
"""

from __future__ import annotations

import math
from collections import deque
from typing import ClassVar

from dblp.transport.config import TransportConfig

INITIAL_WINDOW_BYTES = 64 * 1024
"""One burst: what a 1 Gb/s port with 256 KiB of buffer takes from four senders at once."""
MAX_WINDOW_BYTES = 64 * 1024 * 1024
BASE_TARGET_S = 1e-3
"""Queueing that is tolerated above the least round trip: 125 KB at 1 Gb/s, about two bursts."""
MAX_DECREASE = 0.5
"""Swift's max_mdf: the window at most halves at once."""
BETA = 0.8
"""Swift's beta: share of the excess delay by which the window shrinks."""
LOSS_SHARE = 0.05
"""Loss below this share is taken for random even when the queue is not empty."""
LOSS_DELAY_S = 2.5e-4
"""Loss is taken for congestion only while the delay is raised by at least this: half of what a full 64 KiB queue takes to
drain at 1 Gb/s."""
FILTER_SAMPLES = 8
"""The delay is the least of this many samples: a sender or receiver that lost its processor for a moment is no congestion,
a queue delays them all."""
MIN_RTT_LIFE_S = 10.0
"""BBR's window for the least round trip: routes change."""


class DelayControl:
    """See the module's docstring."""

    ecn: ClassVar[bool] = False

    def __init__(self, config: TransportConfig) -> None:
        self.window_bytes: float = INITIAL_WINDOW_BYTES
        self.quantum_bytes: float = math.inf
        self._floor = 2.0 * config.datagram_bytes
        self._datagram = config.datagram_bytes
        self._min_rtt = float("inf")
        self._min_rtt_at = 0.0
        self._rtt = 0.0
        self._samples: deque[float] = deque(maxlen=FILTER_SAMPLES)
        self._slow_start = True
        self._decreased_at = -1.0
        self._acked = 0
        self._lost = 0

    def on_acked(
        self,
        acked_bytes: int,
        rtt_s: float,
        *,
        now: float,
        marked_bytes: int = 0,
        inflight_bytes: int = 0,
        waiting: bool = True,
    ) -> None:
        """Additive increase below the target (exponential in slow start), proportional decrease above it."""
        self._samples.append(rtt_s)
        rtt_s = self._rtt = min(self._samples)
        if rtt_s <= self._min_rtt or now - self._min_rtt_at > MIN_RTT_LIFE_S:
            self._min_rtt, self._min_rtt_at = rtt_s, now
        self._acked += acked_bytes
        target = self._min_rtt + max(BASE_TARGET_S, 0.5 * self._min_rtt)
        if rtt_s > target:
            self._slow_start = False
            self._decrease(max(1.0 - BETA * (rtt_s - target) / rtt_s, MAX_DECREASE), now)
        elif self._slow_start:
            self.window_bytes = min(self.window_bytes + acked_bytes, MAX_WINDOW_BYTES)
        else:
            # A datagram more for each window acknowledged, four times that while the queue is nearly empty.
            gain = 4.0 if rtt_s < self._min_rtt + 0.25 * (target - self._min_rtt) else 1.0
            step = gain * self._datagram * acked_bytes / self.window_bytes
            self.window_bytes = min(self.window_bytes + step, MAX_WINDOW_BYTES)

    def on_lost(self, lost_bytes: int, *, now: float) -> None:
        """Shrink only if much is lost while the queue is not empty."""
        self._lost += lost_bytes
        if self._lost + self._acked < self.window_bytes / 2:
            return
        share = self._lost / (self._lost + self._acked)
        raised = self._rtt > self._min_rtt + LOSS_DELAY_S
        self._lost = self._acked = 0
        if raised and share > LOSS_SHARE:
            self._slow_start = False
            self._decrease(0.7, now)

    def pacing_bps(self) -> float:
        """Twice the window a round trip, where round trips are long enough to be worth a timer."""
        if self._rtt < 2 * BASE_TARGET_S:
            return 0.0
        return 16.0 * self.window_bytes / self._rtt

    def _decrease(self, factor: float, now: float) -> None:
        if now - self._decreased_at < self._rtt:
            return
        self._decreased_at = now
        self.window_bytes = max(self.window_bytes * factor, self._floor)
