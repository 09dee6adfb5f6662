"""Switch ports: what is served when, what is dropped and what is marked."""

from __future__ import annotations

import numpy as np
import pytest

from dblp.errors import ConfigError
from dblp.sim.queues import Parcel, SwitchPort, SwitchQueue
from dblp.transport.port import Ecn

RATE_BPS = 8e6
"""A byte a microsecond."""
SIZE = 1000


def queue(**settings) -> SwitchQueue[str]:
    settings = {"rate_bps": RATE_BPS, "queue_bytes": 10 * SIZE, **settings}
    return SwitchQueue(SwitchPort(**settings), np.random.default_rng(0), portion_s=2e-3)


def parcel(what: str, count: int, cls: int = 0, *, last: int = SIZE, ecn: Ecn = Ecn.NOT_ECT) -> Parcel[str]:
    return Parcel(what, 0, count, SIZE, last, cls, ecn)


def drain(port: SwitchQueue[str]) -> list[tuple[float, str, int, int, Ecn]]:
    """(when, what, first, count, mark) of all that leaves, in order."""
    out = []
    while port.next_at < float("inf"):
        at = port.next_at
        left = port.leave(at)
        out.append((round(at, 9), left.what, left.first, left.count, left.ecn))
    return out


def test_a_run_leaves_in_portions_at_the_rate():
    port = queue()
    port.offer(parcel("a", 5, last=500), 1.0)
    assert drain(port) == [
        (1.002, "a", 0, 2, Ecn.NOT_ECT),
        (1.004, "a", 2, 2, Ecn.NOT_ECT),
        (1.0045, "a", 4, 1, Ecn.NOT_ECT),
    ]
    assert port.backlog(2.0) == 0.0


def test_a_datagram_longer_than_a_portion_leaves_whole():
    port = queue()
    port.offer(Parcel("big", 0, 1, 5000, 5000, 0, Ecn.NOT_ECT), 0.0)
    assert drain(port) == [(0.005, "big", 0, 1, Ecn.NOT_ECT)]


def test_the_tail_is_dropped_when_the_buffer_is_full_and_room_comes_back_as_bytes_leave():
    port = queue()
    port.offer(parcel("a", 8), 0.0)
    port.offer(parcel("b", 8, 3), 0.0)
    assert port.dropped == {3: 6} and port.backlog(0.0) == 10 * SIZE
    port.offer(parcel("c", 2, 1), 1e-3)
    assert port.dropped == {3: 6, 1: 1}, "one datagram's bytes have left"
    assert [what for _, what, *_ in drain(port)] == ["a"] * 4 + ["b", "c"]


def test_strict_priority_serves_the_lowest_class_first_but_interrupts_nothing():
    port = queue(order="priority")
    for what, cls in (("bulk", 3), ("middle", 2), ("urgent", 0)):
        port.offer(parcel(what, 3, cls), 0.0)
    order = [(what, count) for _, what, _, count, _ in drain(port)]
    assert order == [("bulk", 2), ("urgent", 2), ("urgent", 1), ("middle", 2), ("middle", 1), ("bulk", 1)]


def test_first_in_first_out_ignores_classes():
    port = queue()
    for what, cls in (("bulk", 3), ("middle", 2), ("urgent", 0)):
        port.offer(parcel(what, 1, cls), 0.0)
    assert [what for _, what, *_ in drain(port)] == ["bulk", "middle", "urgent"]


def test_push_out_drops_what_is_lost_first_and_newest_first():
    port = queue(push_out=True)
    port.offer(parcel("old", 4, 3), 0.0)
    port.offer(parcel("middle", 3, 2), 0.0)
    port.offer(parcel("new", 3, 3), 0.0)
    port.offer(parcel("urgent", 4, 0), 0.0)
    assert port.dropped == {3: 4}
    assert port.backlog(0.0) == 10 * SIZE
    left = [(what, first, count) for _, what, first, count, _ in drain(port)]
    assert left == [
        ("old", 0, 2),
        ("old", 2, 1),
        ("middle", 0, 2),
        ("middle", 2, 1),
        ("urgent", 0, 2),
        ("urgent", 2, 2),
    ]


def test_push_out_takes_nothing_of_an_equal_or_more_critical_class_nor_what_is_in_service():
    port = queue(push_out=True)
    port.offer(parcel("critical", 8, 0), 0.0)
    port.offer(parcel("bulk", 2, 3), 0.0)
    port.offer(parcel("more", 3, 3), 0.0)
    port.offer(parcel("middle", 4, 1), 0.0)
    assert port.dropped == {3: 5, 1: 2}
    assert sum(count for _, what, _, count, _ in drain(port) if what == "critical") == 8


def test_thresholds_by_class_leave_the_rest_of_the_buffer_to_more_critical_ones():
    port = queue(class_shares=(1.0, 1.0, 0.5, 0.2))
    port.offer(parcel("bulk", 9, 3), 0.0)
    port.offer(parcel("middle", 9, 2), 0.0)
    port.offer(parcel("urgent", 9, 0), 0.0)
    assert port.dropped == {3: 7, 2: 6, 0: 4}


def test_a_step_marks_what_arrives_above_the_threshold_and_asked_for_it():
    port = queue(mark_bytes=2 * SIZE + 1)
    port.offer(parcel("a", 6, ecn=Ecn.ECT), 0.0)
    port.offer(parcel("b", 2), 0.0)
    marks = {(what, first): ecn for _, what, first, _, ecn in drain(port)}
    assert port.marked == 3
    assert marks == {
        ("a", 0): Ecn.ECT,
        ("a", 2): Ecn.ECT,
        ("a", 3): Ecn.CE,
        ("a", 5): Ecn.CE,
        ("b", 0): Ecn.NOT_ECT,
    }


def test_a_ramp_marks_a_share_that_rises_with_the_backlog():
    shares = []
    for backlog in (2, 4, 6, 9):
        port = queue(queue_bytes=10**9, mark_bytes=3000, mark_full_bytes=7000)
        port.offer(parcel("first", backlog), 0.0)
        for _ in range(2000):  # each is offered to the same backlog, as the clock stands still
            waiting = port._waiting
            port.offer(parcel("probe", 1, ecn=Ecn.ECT), 0.0)
            port._queues[0].pop()
            port._waiting = waiting
        shares.append(port.marked / 2000)
    assert shares[0] == 0.0 and shares[3] == 1.0
    assert shares[1] == pytest.approx(0.25, abs=0.05) and shares[2] == pytest.approx(0.75, abs=0.05)


def test_the_integral_of_the_backlog_gives_its_mean():
    port = queue()
    port.offer(parcel("a", 4), 0.0)
    drain(port)
    port.offer(parcel("b", 1), 1.0)
    assert port.byte_seconds == pytest.approx(4000 * 4e-3 / 2)
    assert port.peak_bytes == 4000


@pytest.mark.parametrize(
    "settings",
    [
        {"rate_bps": 0.0},
        {"queue_bytes": 0},
        {"mark_bytes": -1},
        {"mark_full_bytes": 100},
        {"order": "random"},
        {"class_shares": (1.0, 1.0)},
        {"class_shares": (1.0, 1.0, 1.0, 1.5)},
    ],
)
def test_wrong_settings_are_named(settings):
    with pytest.raises(ConfigError, match="|".join(settings)):
        SwitchPort(**{"rate_bps": RATE_BPS, **settings})
