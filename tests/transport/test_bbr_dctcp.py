"""BBR and DCTCP, told acknowledgements."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dblp.transport.config import TransportConfig
from dblp.transport.congestion.bbr import CYCLE_GAINS, HIGH_GAIN, INITIAL_WINDOW_BYTES, BbrControl, Mode
from dblp.transport.congestion.dctcp import PATIENCE_WINDOWS, DctcpControl

DATAGRAM = TransportConfig().datagram_bytes
RTT_S = 1e-3
RATE_BPS = 1e9


class Pipe:
    """An ideal link for one control: it delivers what was sent at its rate, round trips grow with the queue."""

    def __init__(self, cc: BbrControl, rate_bps: float = RATE_BPS, rtt_s: float = RTT_S) -> None:
        self.cc, self.rate_bps, self.rtt_s = cc, rate_bps, rtt_s
        self.now, self.inflight, self.least_inflight = 0.0, 0.0, float("inf")

    def run(self, seconds: float, *, waiting: bool = True, step_s: float = 1e-4) -> set[Mode]:
        """Acknowledgements each ``step_s``; the modes that were seen."""
        modes, end = set(), self.now + seconds
        while self.now < end:
            self.now += step_s
            pace = self.cc.pacing_bps() or RATE_BPS
            sent = min(max(self.cc.window_bytes - self.inflight, 0.0), pace / 8 * step_s) if waiting else 0.0
            self.inflight += sent
            queue = max(self.inflight - self.rate_bps / 8 * self.rtt_s, 0.0)
            rtt = self.rtt_s + queue * 8 / self.rate_bps
            acked = min(self.inflight * step_s / rtt, self.rate_bps / 8 * step_s)
            self.inflight -= acked
            if acked >= 1:
                self.cc.on_acked(
                    int(acked), rtt, now=self.now, inflight_bytes=int(self.inflight), waiting=waiting
                )
            self.least_inflight = min(self.least_inflight, self.inflight)
            modes.add(self.cc.mode)
        return modes


def bbr() -> BbrControl:
    return BbrControl(TransportConfig(congestion="bbr"))


def test_bbr_finds_bandwidth_and_least_round_trip():
    cc = bbr()
    assert cc.bandwidth_bps == 0.0 and cc.min_rtt_s == float("inf") and cc.pacing_bps() == 0.0
    modes = Pipe(cc).run(0.3)
    assert {Mode.STARTUP, Mode.DRAIN, Mode.PROBE_BW} <= modes
    assert cc.bandwidth_bps == pytest.approx(RATE_BPS, rel=0.1)
    assert cc.min_rtt_s == pytest.approx(RTT_S, rel=0.05)
    product = RATE_BPS / 8 * RTT_S
    assert 2.0 * product < cc.window_bytes < 3.5 * product


def test_bbr_paces_by_the_gains_of_its_cycle():
    cc = bbr()
    pipe = Pipe(cc)
    pipe.run(1e-3)
    assert cc.mode.value == "startup"
    assert cc.pacing_bps() == pytest.approx(HIGH_GAIN * cc.bandwidth_bps)
    pipe.run(0.2)
    gains: set[float] = set()
    for _ in range(300):
        pipe.run(2e-4)
        if cc.mode is Mode.PROBE_BW:
            gains.add(round(cc.pacing_bps() / cc.bandwidth_bps, 2))
    assert gains == set(CYCLE_GAINS)


def test_bbr_ignores_loss():
    cc = bbr()
    pipe = Pipe(cc)
    pipe.run(0.1)
    before = cc.window_bytes, cc.bandwidth_bps
    cc.on_lost(1 << 20, now=pipe.now)
    assert (cc.window_bytes, cc.bandwidth_bps) == before


def test_bbr_follows_a_link_that_becomes_slower_and_faster():
    cc = bbr()
    pipe = Pipe(cc)
    pipe.run(0.2)
    pipe.rate_bps = 2e8
    pipe.run(0.3)
    assert cc.bandwidth_bps == pytest.approx(2e8, rel=0.15)
    pipe.rate_bps = 8e8
    pipe.run(0.5)
    assert cc.bandwidth_bps == pytest.approx(8e8, rel=0.15)


def test_bbr_keeps_its_estimate_when_the_application_has_little_to_send():
    cc = bbr()
    pipe = Pipe(cc)
    pipe.run(0.2)
    for _ in range(200):
        pipe.now += RTT_S
        cc.on_acked(1464, RTT_S, now=pipe.now, waiting=False)
    assert cc.bandwidth_bps == pytest.approx(RATE_BPS, rel=0.1)


def test_a_first_small_message_is_no_estimate():
    cc = bbr()
    cc.on_acked(48, RTT_S, now=1.0, waiting=False)
    assert cc.bandwidth_bps == 0.0 and cc.pacing_bps() == 0.0 and cc.window_bytes >= INITIAL_WINDOW_BYTES


def test_bbr_drains_for_the_least_round_trip_and_gets_its_window_back():
    cc = bbr()
    pipe = Pipe(cc)
    pipe.run(0.04)
    before = cc.window_bytes
    pipe.rtt_s = 2 * RTT_S  # as if others stood in the queue
    modes = pipe.run(0.2)
    assert Mode.PROBE_RTT in modes and cc.mode is Mode.PROBE_BW
    assert pipe.least_inflight <= 8 * DATAGRAM
    assert cc.window_bytes > 0.8 * before and cc.min_rtt_s < 1.1 * RTT_S


# --- DCTCP


def dctcp() -> DctcpControl:
    return DctcpControl(TransportConfig(congestion="dctcp"))


def windows(cc: DctcpControl, count: int, marked_share: float = 0.0) -> None:
    """``count`` windows, acknowledged in quarters."""
    for _ in range(count):
        window = int(cc.window_bytes)
        for quarter in range(4):
            acked = window // 4
            cc.on_acked(
                acked,
                RTT_S,
                now=0.0,
                marked_bytes=int(acked * marked_share),
                inflight_bytes=window if quarter == 3 else window - acked,
            )


def test_without_marks_a_dctcp_window_doubles():
    cc = dctcp()
    before = cc.window_bytes
    windows(cc, 3)
    assert cc.window_bytes == pytest.approx(8 * before, rel=0.01)


def test_alpha_follows_the_marked_share_with_gain_a_sixteenth():
    cc = dctcp()
    windows(cc, 1)
    assert cc.alpha == pytest.approx(15 / 16, rel=0.01)
    for _ in range(200):
        cc.window_bytes = 1e6
        windows(cc, 1, 0.25)
    assert cc.alpha == pytest.approx(0.25, abs=0.02)


def test_a_window_is_cut_once_by_half_of_alpha_and_then_grows_by_a_datagram():
    cc = dctcp()
    cc.window_bytes, cc.alpha, cc._window_end = 1e6, 0.2, 10**6
    cc.on_acked(1000, RTT_S, now=0.0, marked_bytes=1000, inflight_bytes=10**6)
    assert cc.window_bytes == pytest.approx(0.9e6, rel=1e-3)
    cc.on_acked(1000, RTT_S, now=0.0, marked_bytes=1000, inflight_bytes=10**6)
    assert cc.window_bytes == pytest.approx(0.9e6, rel=1e-3), "once a window"
    cc = dctcp()
    cc.window_bytes, cc._slow_start = 1e5, False
    windows(cc, 1)
    assert cc.window_bytes == pytest.approx(1e5 + DATAGRAM, rel=2e-3)


def test_the_first_mark_halves():
    cc = dctcp()
    cc.on_acked(1464, RTT_S, now=0.0, marked_bytes=1464, inflight_bytes=60_000)
    assert cc.window_bytes == pytest.approx(32 * 1024, rel=0.05)


def test_dctcp_takes_little_loss_for_random_and_halves_on_much():
    cc = dctcp()
    cc.window_bytes = cc._window_end = 1_000_000
    cc.on_lost(40_000, now=0.0)
    assert cc.window_bytes == 1_000_000
    cc.on_lost(100_000, now=0.0)
    assert cc.window_bytes == 500_000
    cc.on_lost(200_000, now=0.0)
    assert cc.window_bytes == 500_000, "once a window"


def test_dctcp_does_not_grow_for_an_application_that_has_nothing_to_send():
    cc = dctcp()
    cc._slow_start = False
    before = cc.window_bytes
    cc.on_acked(10_000, RTT_S, now=0.0, waiting=False)
    assert cc.window_bytes == before


def datagrams(cc: DctcpControl, count: int, *, marked: bool = True) -> list[float]:
    """``count`` acknowledgements of a datagram each, the window being full before it; the window after each, in datagrams."""
    seen = []
    for _ in range(count):
        inflight = int(cc.window_bytes) // DATAGRAM * DATAGRAM
        cc.on_acked(
            DATAGRAM,
            RTT_S,
            now=0.0,
            marked_bytes=DATAGRAM * marked,
            inflight_bytes=inflight - DATAGRAM,
        )
        seen.append(cc.window_bytes / DATAGRAM)
    return seen


def crowded() -> DctcpControl:
    """At its floor for as long as it takes, every datagram marked."""
    cc = dctcp()
    datagrams(cc, 100)
    floor = datagrams(cc, 20)
    assert min(floor) < 2.6 and max(floor) < 3.5 and not cc.competing
    datagrams(cc, 5 * PATIENCE_WINDOWS)
    assert cc.competing
    return cc


def test_a_window_at_its_floor_that_stays_marked_competes_by_fifths():
    cc = crowded()
    datagrams(cc, 100)
    seen = datagrams(cc, 100)
    assert min(seen) > 4.0 and max(seen) < 6.0, "a fifth less and a datagram more in each window: about five"
    assert cc.quantum_bytes == DATAGRAM, "none waits for another to leave with it"


def test_it_competes_no_longer_once_fewer_are_marked():
    cc = crowded()
    datagrams(cc, 100)
    datagrams(cc, 12, marked=False)
    assert not cc.competing
    before = cc.window_bytes / DATAGRAM
    after = datagrams(cc, 1)[0]
    assert after < 0.7 * before, "half less, since alpha is near 1, and a part of a datagram more"


def test_it_competes_no_longer_once_much_is_lost():
    cc = crowded()
    datagrams(cc, 100)
    cc._reduced = False
    cc.on_lost(4 * DATAGRAM, now=0.0)
    assert not cc.competing and cc.window_bytes < 3 * DATAGRAM


def test_a_window_that_is_marked_well_above_its_floor_does_not_compete():
    cc = dctcp()
    for _ in range(3 * PATIENCE_WINDOWS):
        cc.window_bytes = 1e5
        windows(cc, 1, 1.0)
    assert not cc.competing


def test_a_window_ends_with_the_first_acknowledgement_of_what_left_after_it_began():
    """RFC 8257, section 3.3, step 2: beyond WindowEnd, which was SND.NXT."""
    cc = dctcp()
    cc._slow_start = False
    cc.window_bytes = 4.0 * DATAGRAM
    alphas = []
    for _ in range(60):
        cc.on_acked(DATAGRAM, RTT_S, now=0.0, inflight_bytes=3 * DATAGRAM, waiting=False)
        alphas.append(cc.alpha)
    changes = [i for i, (a, b) in enumerate(pairwise(alphas)) if a != b]
    assert changes[1:] and all(b - a == 4 for a, b in pairwise(changes))
