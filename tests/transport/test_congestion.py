"""Delay-based congestion control, told round trips."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dblp.errors import ConfigError
from dblp.transport.config import TransportConfig
from dblp.transport.congestion import REGISTRY, make_congestion_control
from dblp.transport.congestion.bbr import BbrControl
from dblp.transport.congestion.dctcp import DctcpControl
from dblp.transport.congestion.delay import INITIAL_WINDOW_BYTES, MAX_WINDOW_BYTES, DelayControl
from dblp.transport.congestion.fixed import FixedControl
from dblp.transport.congestion.host_time import HOST_SAMPLES, MOST_HOST_S, HostTime
from dblp.transport.congestion.random_loss import HALF_LIFE_DATAGRAMS, MARGIN, MOST_SHARE, RandomLoss

RTT_S = 1e-3
RAISED_S = 1.4e-3
"""A round trip above it, by more than takes loss for congestion, and below the target."""
QUEUED_S = 10e-3
"""A round trip far above the target."""
BURST = 64_000
FLOOR = 2 * TransportConfig().datagram_bytes


def control() -> DelayControl:
    return DelayControl(TransportConfig())


def feed(cc: DelayControl, rtt_s: float, times: int, *, now: float = 0.0, step: float = RTT_S) -> float:
    for _ in range(times):
        now += step
        cc.on_acked(BURST, rtt_s, now=now)
    return now


def test_slow_start_grows_by_what_is_acknowledged():
    cc = control()
    assert cc.window_bytes == INITIAL_WINDOW_BYTES
    feed(cc, RTT_S, 5)
    assert cc.window_bytes == INITIAL_WINDOW_BYTES + 5 * BURST


def test_the_window_has_a_ceiling_and_a_floor():
    cc = control()
    feed(cc, RTT_S, 3000)
    assert cc.window_bytes == MAX_WINDOW_BYTES
    low = control()
    now = feed(low, RTT_S, 1)
    for _ in range(30):
        now = feed(low, QUEUED_S, 1, now=now, step=1.1 * QUEUED_S)
    assert low.window_bytes == FLOOR


def test_a_queue_ends_slow_start_and_shrinks_the_window_once_a_round_trip():
    cc = control()
    now = feed(cc, RTT_S, 20)
    top = cc.window_bytes
    now = feed(cc, QUEUED_S, 7, now=now, step=1e-4)
    assert cc.window_bytes > top, "one sample without a queue among eight: a processor was lost, not the path"
    top = cc.window_bytes
    now = feed(cc, QUEUED_S, 1, now=now, step=1e-4)
    after = cc.window_bytes
    assert 0.5 * top <= after < 0.6 * top
    feed(cc, QUEUED_S, 20, now=now, step=QUEUED_S / 100)
    assert cc.window_bytes == after, "within the same round trip"
    feed(cc, QUEUED_S, 1, now=now + 1.1 * QUEUED_S)
    assert cc.window_bytes < after


def test_a_queue_that_drains_while_hosts_are_busy_is_none():
    cc = control()
    now = feed(cc, RTT_S, 10)
    top, late_s = cc.window_bytes, 0.9 * QUEUED_S
    for _ in range(20):
        now += QUEUED_S
        cc.on_acked(BURST, QUEUED_S, now=now, host_s=late_s)
    assert cc.window_bytes > top
    cc.on_acked(BURST, QUEUED_S, now=now + QUEUED_S, host_s=0.0)
    assert cc.window_bytes < 2.0 * top, "the hosts keep up again"


def test_one_host_that_lost_its_processor_is_not_busy():
    host = HostTime()
    for sample in (0.0, *[5e-3] * (HOST_SAMPLES - 1)):
        host.update(sample)
    assert host.value_s == 0.0
    host.update(4e-3)
    assert host.value_s == 4e-3
    for _ in range(HOST_SAMPLES):
        host.update(3600.0)
    assert host.value_s == MOST_HOST_S, "a host that has stopped"


def test_loss_counts_where_most_round_trips_are_raised():
    """A window that leaves in bursts meets the queue at all lengths: a short one now and then does not excuse the loss."""
    cc = control()
    now = feed(cc, RTT_S, 10)
    for rtt_s in [RTT_S, *[RAISED_S] * 5, RTT_S, RAISED_S]:
        now += RTT_S
        cc.on_acked(BURST, rtt_s, now=now)
    before = cc.window_bytes
    cc.on_lost(int(before), now=now + RTT_S)
    cc.on_acked(BURST, RAISED_S, now=now + 2 * RTT_S)  # by then all is told of what left together
    assert cc.window_bytes < 0.8 * before


def test_after_a_queue_growth_is_additive():
    cc = control()
    now = feed(cc, RTT_S, 10)
    now = feed(cc, QUEUED_S, 9, now=now)
    before = cc.window_bytes
    feed(cc, RTT_S, 8, now=now)
    gained = cc.window_bytes - before
    assert 0 < gained <= 8 * 4 * TransportConfig().datagram_bytes * BURST / before


def test_the_decrease_follows_the_excess():
    gentle, hard = control(), control()
    for cc, rtt in ((gentle, 2.2e-3), (hard, QUEUED_S)):
        now = feed(cc, RTT_S, 10)
        feed(cc, rtt, 8, now=now, step=1e-4)
    assert gentle.window_bytes > hard.window_bytes


@pytest.mark.parametrize("share", [0.01, 0.3, 0.8])
def test_plain_loss_is_ignored(share):
    """However much is lost: the delay says that there is no queue."""
    cc = control()
    now = feed(cc, RTT_S, 10)
    before = cc.window_bytes
    for _ in range(100):
        cc.on_lost(int(share * BURST), now=now)
        now = feed(cc, RTT_S, 1, now=now)
    assert cc.window_bytes >= before


def test_heavy_loss_beside_a_raised_delay_is_congestion():
    cc = control()
    now = feed(cc, RTT_S, 10)
    now = feed(cc, RAISED_S, 8, now=now)
    windows = [cc.window_bytes]
    for _ in range(20):  # a fifth of all, until half a window is told of
        cc.on_lost(BURST // 4, now=now)
        now = feed(cc, RAISED_S, 1, now=now)
        windows.append(cc.window_bytes)
    assert min(after / before for before, after in itertools.pairwise(windows)) == pytest.approx(
        0.7, rel=0.01
    )


def test_little_loss_beside_a_raised_delay_is_random():
    cc = control()
    now = feed(cc, RTT_S, 10)
    now = feed(cc, RAISED_S, 8, now=now)
    before = cc.window_bytes
    for _ in range(25):
        cc.on_lost(1464, now=now)
        now = feed(cc, RAISED_S, 1, now=now)
    assert cc.window_bytes >= before


def lose_at_random(cc: DelayControl, share: float, looks: int, *, calm: bool, now: float) -> float:
    """Windows of which a share is lost, with the queue of a busy host's scheduler: most round trips are raised, or few."""
    rng = np.random.default_rng(5)
    for _ in range(looks):
        datagrams = round(cc.window_bytes / 2 / cc._datagram) + 1
        lost = rng.binomial(datagrams, share)
        now += RTT_S
        rtt_s = RTT_S if calm or rng.random() < 0.02 else RAISED_S
        cc.on_acked(int(datagrams - lost) * cc._datagram, rtt_s, now=now)
        cc.on_lost(int(lost) * cc._datagram, now=now)
    return now


@pytest.mark.parametrize("share", [0.08, 0.12])
def test_as_much_as_is_lost_without_a_queue_is_no_congestion_beside_one(share):
    cc, ignorant = control(), control()
    for each, taught in ((cc, 40), (ignorant, 0)):
        now = feed(each, RTT_S, 10)
        now = lose_at_random(each, share, taught, calm=True, now=now)
        before = each.window_bytes
        lose_at_random(each, share, 400, calm=False, now=now)
        assert (each.window_bytes >= before) is (taught > 0)


def test_more_than_is_lost_without_a_queue_is_congestion():
    cc = control()
    now = lose_at_random(cc, 0.05, 60, calm=True, now=feed(cc, RTT_S, 10))
    before = cc.window_bytes
    lose_at_random(cc, 0.2, 40, calm=False, now=now)
    assert cc.window_bytes < 0.5 * before


def test_random_loss_is_learnt_forgotten_and_bounded():
    random = RandomLoss()
    random.note(3, 30)
    assert random.explains < 0.05, "a few losses make no lossy line"
    for _ in range(40):
        random.note(50, 1000)
    assert random.explains == pytest.approx(MARGIN * 0.05, rel=0.01)
    random.note(0, 10 * HALF_LIFE_DATAGRAMS)
    assert random.explains < 0.001
    random.note(9000, 10_000)
    assert random.explains == MOST_SHARE


def test_a_small_window_leaves_in_portions_and_a_large_one_whole():
    cc = control()
    assert cc.quantum_bytes == INITIAL_WINDOW_BYTES
    feed(cc, RTT_S, 1)
    assert cc.quantum_bytes == cc.window_bytes / 4
    feed(cc, RTT_S, 10)
    assert cc.window_bytes > 256 * 1024 and cc.quantum_bytes == math.inf


def test_a_small_window_has_a_larger_target():
    """Swift's flow scaling: of two flows that see one queue, only the larger shrinks."""
    small, large = control(), control()
    large_now = feed(large, RTT_S, 100)
    small_now = feed(small, RTT_S, 1)
    before = small.window_bytes, large.window_bytes
    feed(small, 1.7e-3, 8, now=small_now)
    feed(large, 1.7e-3, 8, now=large_now)
    assert small.window_bytes > before[0] and large.window_bytes < before[1]


def test_a_queue_that_stays_while_the_window_is_at_its_floor_is_somebody_elses():
    cc = control()
    now = feed(cc, 0.2e-3, 1)
    for _ in range(12):
        now = feed(cc, QUEUED_S, 1, now=now, step=1.1 * QUEUED_S)
    assert cc.window_bytes == FLOOR and not cc.competing
    for _ in range(40):
        if cc.competing:
            break
        now = feed(cc, QUEUED_S, 1, now=now, step=1.1 * QUEUED_S)
    assert cc.competing
    feed(cc, QUEUED_S, 1, now=now)
    grown = cc.window_bytes
    assert grown > FLOOR
    cc.on_lost(1464, now=now + QUEUED_S + 1.0)
    assert cc.window_bytes == max(0.7 * grown, FLOOR), "any loss, as Reno"
    feed(cc, 0.2e-3, 1, now=now)
    assert not cc.competing, "the queue is gone"


def test_pacing_starts_where_round_trips_are_long():
    short, long = control(), control()
    feed(short, RTT_S, 1)
    feed(long, 20e-3, 1)
    assert short.pacing_bps() == 0.0
    assert long.pacing_bps() == pytest.approx(2 * 8 * long.window_bytes / 20e-3)


def test_fixed_never_reacts():
    cc = FixedControl(TransportConfig(congestion="fixed", rate_bps=1e9))
    cc.on_acked(1, 5.0, now=0.0)
    cc.on_lost(1 << 30, now=0.0)
    assert cc.window_bytes == math.inf
    assert cc.pacing_bps() == 1e9


def test_controllers_are_chosen_by_name():
    kinds = {"delay": DelayControl, "bbr": BbrControl, "dctcp": DctcpControl, "fixed": FixedControl}
    for name, kind in kinds.items():
        assert isinstance(make_congestion_control(TransportConfig(congestion=name)), kind)
    assert kinds == REGISTRY
    with pytest.raises(ConfigError, match="known are 'delay', 'bbr', 'dctcp', 'fixed'"):
        TransportConfig(congestion="cubic")


def test_only_a_control_that_reacts_to_marks_asks_for_them():
    assert [name for name, kind in REGISTRY.items() if kind.ecn] == ["dctcp"]
