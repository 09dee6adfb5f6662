"""Delay-based congestion control, of the TIMELY/Swift kind.

Sources: Mittal et al., "TIMELY: RTT-based Congestion Control for the Datacenter", SIGCOMM 2015; Kumar et al., "Swift: Delay is
Simple and Effective for Congestion Control in the Datacenter", SIGCOMM 2020 (a target delay that is larger for small windows,
additive increase, decrease in proportion to the excess at most once a round trip). MLT and DLCP use the same kind, "minimal,
only to avoid collapse". Differences from Swift:

- No hop scaling of the target: nothing tells hops here. Round trips up to ``TARGET_S`` are alike to it, as in Swift, so that who
  came when the queue was full gets no more; longer ones have a target above the least round trip, which is probed for.
- Slow start; a window is never less than two datagrams, and is paced only where round trips are long.
- Swift keeps a window for the network and one for the hosts; here the target grows by what the hosts take (``host_time``).
- Plain loss is not congestion (the protocol tolerates it), loss while most round trips are raised is.
- Flows that fill every queue (TCP's) push one that heeds delay to its floor. If the queue stays long however small the
  window is, the control competes as Reno does until the queue is gone or the next probe (the idea is that of Copa's
  competitive mode: Arun and Balakrishnan, NSDI 2018).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import ClassVar

from dblp.transport.config import TransportConfig
from dblp.transport.congestion.base import heavy_loss
from dblp.transport.congestion.host_time import HostTime
from dblp.transport.congestion.own_loss import DECREASE, OwnLoss
from dblp.transport.congestion.random_loss import RandomLoss
from dblp.transport.congestion.round_trip import LeastRoundTrip

INITIAL_WINDOW_BYTES = 64 * 1024
"""One burst: what a 1 Gb/s port with 256 KiB of buffer takes from four senders at once."""
MAX_WINDOW_BYTES = 64 * 1024 * 1024
TARGET_S = 1.2e-3
"""Round trip that is tolerated whatever the least one is: 125 KB at 1 Gb/s, two bursts, behind 0.2 ms of wire."""
LEAST_QUEUE_S = 0.5e-3
"""Queueing that is tolerated above the least round trip, where that is longer: Swift's base target is as small."""
FLOW_TARGET_S = 4e-3
"""Swift's flow scaling: this much more over the square root of the window in datagrams, less what it is at ``FLOW_DATAGRAMS``."""
MOST_FLOW_TARGET_S = 0.4e-3
"""Swift's fs_range: most of it, so that the windows of many still fit a small switch's buffer."""
FLOW_DATAGRAMS = 100.0
"""Swift's fs_max_cwnd: windows from here on have the plain target."""
MAX_DECREASE = 0.5
"""Swift's max_mdf: the window at most halves at once."""
BETA = 0.8
"""Swift's beta: share of the excess delay by which the window shrinks."""
LOSS_SHARE = 0.05
"""Loss below this share is taken for random even when the queue is not empty."""
LOSS_DELAY_S = 2.5e-4
"""Loss is taken for congestion only while most delays are raised by at least this: half of what a full 64 KiB queue takes to
drain at 1 Gb/s."""
FILTER_SAMPLES = 8
"""The delay is the least of this many samples: a sender or receiver that lost its processor for a moment is no congestion,
a queue delays them all."""
PACED_RTT_S = 2e-3
"""Round trip from which bursts are paced: shorter ones are not worth a timer."""
OVERRUN_S = 10.0
"""How long a buffer that was overrun is remembered."""
SMALL_WINDOW_BYTES = 256 * 1024
"""Windows below this, and paced ones, leave in portions: a whole window at once, its answers at once, would be a queue that
comes and goes."""
PACING_GAIN = 1.25
"""A paced window leaves in four fifths of a round trip, in slow start in half of one: as fast as it comes back, it would never be
full; faster, it is a burst again."""
PORTIONS = 4
"""The least number of them."""
PATIENCE_ROUND_TRIPS = 32.0
"""Round trips at the floor after which the queue must be somebody else's."""


class DelayControl:
    """See the module's docstring."""

    ecn: ClassVar[bool] = False

    def __init__(self, config: TransportConfig) -> None:
        self.window_bytes: float = INITIAL_WINDOW_BYTES
        self.quantum_bytes: float = INITIAL_WINDOW_BYTES
        self.competing = False
        """The queue is somebody else's: delay is ignored for the time being."""
        self._floor = 2.0 * config.datagram_bytes
        self._datagram = config.datagram_bytes
        self._least = LeastRoundTrip()
        self._known = float("inf")  # the least round trip that the next two go by
        self._target = TARGET_S
        self._near_s = 0.0  # queueing that counts as next to none
        self._rtt = 0.0
        self._samples: deque[float] = deque(maxlen=FILTER_SAMPLES)
        self._host = HostTime()
        self._slow_start = True
        self._decreased_at = -1.0
        self._low_since = float(
            "inf"
        )  # since when the queue has been too long although the window is at its floor
        self._before_probe = 0.0  # the window, before a probe for the least round trip; 0: there is none
        self._overran = False  # a buffer, of late
        self._overran_at = float("-inf")
        self._own_loss = OwnLoss()
        self._random_loss = RandomLoss()
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
        host_s: float = 0.0,
    ) -> None:
        """Additive increase below the target (exponential in slow start), proportional decrease above it."""
        self._samples.append(rtt_s)
        self._host.update(host_s)
        rtt_s = self._rtt = min(self._samples)
        host_s = self._host.value_s
        # Here, and not in ``on_lost``: what one feedback tells is arrivals first, then losses, and a share needs both.
        self._judge_loss(now)
        self._overran = now - self._overran_at < OVERRUN_S
        self._acked += acked_bytes
        if self._probe(rtt_s, now):
            return
        target = self._target + host_s
        if self.window_bytes < FLOW_DATAGRAMS * self._datagram:
            scaled = FLOW_TARGET_S * ((self._datagram / self.window_bytes) ** 0.5 - FLOW_DATAGRAMS**-0.5)
            target += min(scaled, MOST_FLOW_TARGET_S)
        if rtt_s > target and not self.competing:
            self._slow_start = False
            self._decrease(max(1.0 - BETA * (rtt_s - target) / rtt_s, MAX_DECREASE), now)
        elif self._slow_start:
            self._set_window(self.window_bytes + acked_bytes)
        else:
            self._increase(acked_bytes, rtt_s < self._known + self._near_s + host_s)

    def on_lost(self, lost_bytes: int, *, now: float) -> None:
        """When competing, shrink on any loss; else see ``_judge_loss``."""
        self._lost += lost_bytes
        if self.competing:
            self._decrease(DECREASE, now)

    def _judge_loss(self, now: float) -> None:
        """Shrink only if much is lost while the queue is seldom empty, and not if that has been seen not to help."""
        total = self._lost + self._acked
        if self.competing or total < self.window_bytes / 2:
            return
        settled_at = self._decreased_at + max(self._samples) + self._host.value_s
        if self._before_probe or (now < settled_at and self._own_loss.tries(self.window_bytes)):
            self._lost = self._acked = 0  # what is told now left before the last decrease
            return
        lost, seen = self._lost / self._datagram, total / self._datagram
        self._lost = self._acked = 0
        raised_s = self._known + max(LOSS_DELAY_S, self._near_s)
        if max(self._samples) <= raised_s:
            self._random_loss.note(lost, seen)
        if not heavy_loss(lost, seen, max(LOSS_SHARE, self._random_loss.explains)):
            return
        # Not the least: what leaves in bursts meets the queue at all lengths.
        queued = statistics.median(self._samples) > raised_s
        if queued:
            self._slow_start = False
        wanted = self._own_loss.window_for(
            self.window_bytes, lost / seen, queued=queued, now=now, rtt_s=self._rtt
        )
        if wanted < self.window_bytes:
            self._overran_at = now
            self._decrease(wanted / self.window_bytes, now)
        elif wanted > self.window_bytes:  # it was another's all the time
            self._overran_at = float("-inf")
            self._set_window(wanted)

    def pacing_bps(self) -> float:
        """A little more than a window a round trip, where round trips are long enough to be worth a timer."""
        if self._paced_rtt() < PACED_RTT_S:
            return 0.0
        gain = 2.0 if self._slow_start else PACING_GAIN
        return 8.0 * gain * self.window_bytes / (self._rtt + self._host.value_s)

    def _paced_rtt(self) -> float:
        """The round trip over which a window leaves: the network's, and what busy hosts make of it where their bursts have
        overrun a buffer. Elsewhere each portion would only cost them a turn more."""
        return self._rtt + (self._host.value_s if self._overran else 0.0)

    def _probe(self, rtt_s: float, now: float) -> bool:
        """Follow the least round trip; True while it is probed for, with the window at its floor."""
        least = self._least
        ended = least.update(rtt_s, now, near_s=self._near_s)
        if least.value_s != self._known:
            self._known = least.value_s
            self._target = max(TARGET_S, self._known + max(LEAST_QUEUE_S, 0.5 * self._known))
            self._near_s = 0.25 * (self._target - self._known)
        if ended:
            if self.competing:  # perhaps what it competed with is gone
                self.competing = False
                self._low_since = float("inf")
            self._set_window(self._before_probe)
            self._before_probe = 0.0
        elif least.probing and not self._before_probe:
            self._before_probe = self.window_bytes
            self._set_window(self._floor)
        return least.probing

    def _increase(self, acked_bytes: int, nearly_empty: bool) -> None:
        """A datagram more for each window acknowledged, four times that while the queue is nearly empty."""
        if nearly_empty:
            self.competing = False
        if not self.competing:
            self._low_since = float("inf")
        gain = 4.0 if nearly_empty else 1.0
        self._set_window(self.window_bytes + gain * self._datagram * acked_bytes / self.window_bytes)

    def _decrease(self, factor: float, now: float) -> None:
        if now - self._decreased_at < self._rtt:
            return
        self._decreased_at = now
        if self.window_bytes > 2.0 * self._floor:
            self._low_since = float("inf")
        elif self._low_since == float("inf"):
            self._low_since = now
        elif now - self._low_since > PATIENCE_ROUND_TRIPS * self._rtt:
            self.competing = True
        self._set_window(self.window_bytes * factor)

    def _set_window(self, window_bytes: float) -> None:
        self.window_bytes = min(max(window_bytes, self._floor), MAX_WINDOW_BYTES)
        apart = self.window_bytes < SMALL_WINDOW_BYTES or self._paced_rtt() >= PACED_RTT_S
        self.quantum_bytes = self.window_bytes / PORTIONS if apart else math.inf
