"""Congestion control from bandwidth and delay estimates, of the BBR kind.

Source: Cardwell, Cheng, Gunn, Yeganeh, Jacobson, "BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016, and
draft-cardwell-iccrg-bbr-congestion-control-00 (version 1): the largest delivery rate of the last ten round trips and the
least round trip of the last ten seconds make the bandwidth-delay product; STARTUP doubles the rate each round trip until
it grows no more, DRAIN empties the queue that this built, PROBE_BW cycles the pacing gain, PROBE_RTT looks for the least
round trip. Loss does not count, which is why LTP (arXiv 2305.04279) takes a control of this kind.

Differences from the paper:
- No state a datagram: the delivery rate is what was acknowledged since the instant that lies one round trip back, over that
  time. One round trip of acknowledgements is also what the paper's per-packet samples span.
- An application that has nothing to send makes its samples count only where they exceed the estimate, as there; collectives
  pause between rounds, so round trips are counted only while data flows, and the estimate survives a pause.
- The window leaves room for two portions (``quantum_bytes``) beside the bandwidth-delay product: one leaves a network card
  while the acknowledgement of another is on its way. The paper adds three of at most 64 KiB. It also leaves room for four
  datagrams: what all flows get alike, however small their estimates, lets them find equal shares of a full queue.
- PROBE_RTT comes more often where round trips are short (``round_trip.LeastRoundTrip``): a flow that began beside others
  learns the least round trip from it.
- A phase of PROBE_BW lasts as long as a round trip does now, not the least one: with a queue of several, the effect of
  a gain is not seen before.
- PROBE_BW begins at a phase that the microseconds of the clock choose, where the paper draws one at random: runs replay.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import ClassVar

from dblp.transport.config import TransportConfig
from dblp.transport.congestion.host_time import HostTime
from dblp.transport.congestion.round_trip import LeastRoundTrip

HIGH_GAIN = 2.885
"""2 / ln 2: the least gain that doubles the delivery rate each round trip (BBR, section "Startup")."""
CYCLE_GAINS = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
"""Pacing gains of PROBE_BW, one a least round trip: a quarter more, the queue of it drained, six to cruise."""
WINDOW_GAIN = 2.0
"""Window over the bandwidth-delay product in PROBE_BW: delayed and joined acknowledgements do not stall it."""
BANDWIDTH_ROUNDS = 10
"""Round trips that the largest delivery rate is kept for."""
PROBE_RTT_DATAGRAMS = 4
"""The paper's least window, and PROBE_RTT's."""
FULL_GROWTH = 1.25
"""STARTUP is over when the estimate grew by less than this for ``FULL_ROUNDS`` round trips."""
FULL_ROUNDS = 3
INITIAL_WINDOW_BYTES = 64 * 1024
"""One burst, as in ``delay``: there is no estimate yet."""
QUANTUM_S = 2.5e-4
"""Time that one portion takes at the estimated rate: 31 KB at 1 Gb/s. Less makes more system calls, more makes queues."""
PORTIONS = 32
"""Most portions of a window: feedback covers 128 bursts (``wire.MASK_WINDOW``), which must span the window and its repairs."""
MAX_QUANTUM_BYTES = 1 << 20
"""One train (``burst.TRAIN_BURSTS``)."""


class Mode(enum.Enum):
    """The four states of the paper's figure 3."""

    STARTUP = "startup"
    DRAIN = "drain"
    PROBE_BW = "probe_bw"
    PROBE_RTT = "probe_rtt"


class BbrControl:
    """See the module's docstring. ``bandwidth_bps`` and ``min_rtt_s`` are for others to read, too."""

    ecn: ClassVar[bool] = False

    def __init__(self, config: TransportConfig) -> None:
        self._datagram = config.datagram_bytes
        self._floor = float(PROBE_RTT_DATAGRAMS * config.datagram_bytes)
        self.window_bytes: float = INITIAL_WINDOW_BYTES
        self.quantum_bytes: float = INITIAL_WINDOW_BYTES
        self.bandwidth_bps = 0.0
        """Estimate of the path's bandwidth, bits of UDP payload per second; 0 before the first sample."""
        self._least = LeastRoundTrip()
        self._window_before = 0.0  # PROBE_RTT
        self._host = HostTime()
        self.mode = Mode.STARTUP
        self._pacing_gain = HIGH_GAIN
        self._window_gain = HIGH_GAIN
        self._delivered = 0
        self._history: deque[tuple[float, int, bool]] = deque()  # (now, delivered, application limited)
        self._limited_until = -1  # delivered bytes up to which samples are the application's pace
        self._rounds = 0
        self._round_end = 0
        self._best: deque[tuple[int, float]] = deque()  # (round, bits per second), falling: maximum first
        self._full_bps = 0.0
        self._full_rounds = 0
        self._phase = 0
        self._phase_at = 0.0

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
        """A sample of the delivery rate and of the round trip, and the state that follows from them."""
        self._delivered += acked_bytes
        self._host.update(host_s)
        if not waiting:
            self._limited_until = self._delivered + inflight_bytes
        round_began = self._sample(rtt_s, now)
        if self.mode is Mode.STARTUP and round_began:
            self._check_full()
        if self.mode is Mode.DRAIN and inflight_bytes <= self._product():
            self._enter_probe_bw(now)
        elif self.mode is Mode.PROBE_BW:
            self._turn_phase(inflight_bytes, rtt_s, now)
        self._probe_rtt(self._least.update(rtt_s, now), now)
        self._set_window(acked_bytes)

    def on_lost(self, lost_bytes: int, *, now: float) -> None:
        """Loss is no sign of congestion here: the rate that is delivered says what the path takes."""

    def pacing_bps(self) -> float:
        """The estimated bandwidth times the state's gain; 0 before the first estimate."""
        return self._pacing_gain * self.bandwidth_bps

    # --- estimates

    @property
    def _limited(self) -> bool:
        """What leaves now, leaves at the application's pace."""
        return self._delivered <= self._limited_until

    @property
    def min_rtt_s(self) -> float:
        """Estimate of the path's least round trip, seconds; infinite before the first sample."""
        return self._least.value_s

    def _sample(self, rtt_s: float, now: float) -> bool:
        """Take a sample of the delivery rate; True if a round trip's worth of data was acknowledged since the last time."""
        history, sent_at = self._history, now - rtt_s
        while len(history) > 1 and history[1][0] <= sent_at:
            history.popleft()
        history_at, delivered, limited = history[0] if history else (sent_at, 0, self._limited)
        began = delivered >= self._round_end
        if began:
            self._round_end = self._delivered
            self._rounds += 1
        # What was acknowledged before a pause says nothing of it: the span is a round trip at most where that is older.
        span = min(max(now - history_at, rtt_s), max(2.0 * rtt_s, 1e-6)) if history else rtt_s
        self._note_bandwidth(8.0 * (self._delivered - delivered) / max(span, 1e-6), limited)
        history.append((now, self._delivered, self._limited))
        return began

    def _note_bandwidth(self, bps: float, limited: bool) -> None:
        """Windowed maximum over the last round trips (a falling queue of candidates)."""
        if limited and (bps < self.bandwidth_bps or self._delivered < INITIAL_WINDOW_BYTES):
            return
        best = self._best
        while best and best[-1][1] <= bps:
            best.pop()
        best.append((self._rounds, bps))
        while best[0][0] <= self._rounds - BANDWIDTH_ROUNDS:
            best.popleft()
        self.bandwidth_bps = best[0][1]

    def _product(self, gain: float = 1.0) -> float:
        """``gain`` times the bandwidth-delay product, bytes; what the hosts take of a round trip keeps the window as full as the
        network does."""
        return gain * self.bandwidth_bps * (self.min_rtt_s + self._host.value_s) / 8.0

    # --- states

    def _check_full(self) -> None:
        if self.bandwidth_bps >= FULL_GROWTH * self._full_bps:
            self._full_bps, self._full_rounds = self.bandwidth_bps, 0
            return
        self._full_rounds += 1
        if self._full_rounds >= FULL_ROUNDS:
            self.mode = Mode.DRAIN
            self._pacing_gain, self._window_gain = 1.0 / HIGH_GAIN, HIGH_GAIN

    def _enter_probe_bw(self, now: float) -> None:
        self.mode = Mode.PROBE_BW
        self._window_gain = WINDOW_GAIN
        self._phase_at = now
        self._phase = 2 + int(now * 1e6) % (len(CYCLE_GAINS) - 2)
        self._pacing_gain = CYCLE_GAINS[self._phase]

    def _turn_phase(self, inflight_bytes: int, rtt_s: float, now: float) -> None:
        """The next gain after a least round trip: after 1.25 only once that much is in flight, after 0.75 already when the queue
        is gone."""
        lasts = max(rtt_s, 2.0 * QUANTUM_S)
        elapsed = now - self._phase_at > lasts
        gain = self._pacing_gain
        if gain > 1.0:
            over = elapsed and inflight_bytes >= self._product(gain)
            over = over or now - self._phase_at > 2.0 * lasts
        elif gain < 1.0:
            over = elapsed or inflight_bytes <= self._product()
        else:
            over = elapsed
        if over:
            self._phase = (self._phase + 1) % len(CYCLE_GAINS)
            self._phase_at = now
            self._pacing_gain = CYCLE_GAINS[self._phase]

    def _probe_rtt(self, ended: bool, now: float) -> None:
        """Enter and leave PROBE_RTT; the window is what it was afterwards."""
        if self._least.probing:
            if self.mode is not Mode.PROBE_RTT:
                self._window_before = self.window_bytes
            self.mode = Mode.PROBE_RTT
            self._pacing_gain = 1.0
            return
        if not ended:
            return
        self.window_bytes = max(self.window_bytes, self._window_before)
        if self._full_rounds >= FULL_ROUNDS:
            self._enter_probe_bw(now)
        else:
            self.mode = Mode.STARTUP
            self._pacing_gain = self._window_gain = HIGH_GAIN

    def _set_window(self, acked_bytes: int) -> None:
        if self.mode is Mode.PROBE_RTT:
            self.window_bytes = self._floor
            return
        least = max(2.0 * self._datagram, self.window_bytes / PORTIONS)
        quantum = self.bandwidth_bps / 8.0 * QUANTUM_S
        self.quantum_bytes = min(max(quantum, least), MAX_QUANTUM_BYTES)
        target = self._product(self._window_gain) + 2.0 * quantum + self._floor
        if self._full_rounds >= FULL_ROUNDS:
            self.window_bytes = max(min(self.window_bytes + acked_bytes, target), self._floor)
        elif self.window_bytes < target or self._delivered < INITIAL_WINDOW_BYTES:
            self.window_bytes += acked_bytes
