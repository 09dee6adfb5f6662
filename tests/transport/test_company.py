"""What a datagram less costs: FINAL waits for company where nobody waits for it, and reports tell what is new."""

from __future__ import annotations

import pytest

from dblp.transport import wire
from dblp.transport.config import TransportConfig
from dblp.transport.outbox import HELD_S
from dblp.transport.receive_path import TOLD_TIMES, ReceiveSpace
from dblp.transport.wire import Type
from tests.transport.cores import LATENCY_S, Cores, deliver_all, numbers


class Timed(Cores):
    """Notes when each datagram leaves, and to whom."""

    def __init__(self, **options):
        super().__init__(**options)
        self.left: list[tuple[float, int, int]] = []
        self.tamper = self._note

    def _note(self, header, datagram, target):
        self.left.append((self.now, target, header.type))
        return deliver_all(header, datagram, target)

    def times(self, type_, target):
        return [at for at, to, what in self.left if (to, what) == (target, type_)]

    def exchange(self, number, chunks=0.5, **options):
        """Both ranks give the other as much as they take."""
        self.begin(number)
        data = numbers(chunks)
        for rank in (0, 1):
            self.send(rank, 1 - rank, data, f"sent {rank}", number=number, **options)
            self.receive(rank, 1 - rank, data, f"received {rank}", number=number, **options)


@pytest.mark.parametrize("chunks", [0.5, 3])
def test_final_leaves_with_the_next_round(chunks):
    cores = Timed(
        config=TransportConfig(congestion="fixed")
    )  # a window so wide that no burst asks for feedback
    cores.exchange(0, chunks)
    cores.run(until=5.0, stop=lambda: "received 0" in cores.outcomes and "received 1" in cores.outcomes)
    arrived = cores.now
    cores.run(until=arrived + HELD_S / 2)
    assert not cores.times(Type.FINAL, 0) and not cores.times(Type.FINAL, 1)
    cores.exchange(1, chunks)
    cores.run(until=5.0)
    for rank in (0, 1):
        first, *_ = cores.times(Type.FINAL, rank)
        assert first == pytest.approx(arrived + HELD_S / 2)
        assert first in cores.times(Type.OPEN, rank)
    assert all(core.idle() for core in cores.cores)


def test_final_leaves_alone_if_nothing_else_does():
    cores = Timed()
    cores.exchange(0)
    assert not cores.cores[0].idle()
    cores.run(until=5.0)
    for rank in (0, 1):
        received_at = cores.times(Type.OPEN, rank)[0] + LATENCY_S
        assert cores.times(Type.FINAL, rank) == [pytest.approx(received_at + HELD_S)]
        assert cores.delivered(f"sent {rank}").chunks_resent == 0
    assert all(core.idle() for core in cores.cores)


@pytest.mark.parametrize("case", ["one way", "bounded", "large"])
def test_final_leaves_at_once_where_somebody_may_wait_for_it(case):
    cores = Timed()
    if case == "one way":
        cores.begin()
        cores.send(0, 1, numbers(0.5))
        cores.receive(1, 0, numbers(0.5))
        name = "received"
    else:
        options = {"budget": 0.4} if case == "bounded" else {}
        cores.exchange(0, 3 if case == "bounded" else 100, **options)
        name = "received 1"
    cores.run(until=5.0, stop=lambda: name in cores.outcomes)
    arrived = cores.now
    cores.run(until=5.0)
    assert cores.times(Type.FINAL, 0)[0] == arrived


def test_what_was_held_is_said_before_a_rank_leaves():
    """``idle`` is what an endpoint waits for that closes: its peer must not ask a rank that has gone."""
    cores = Timed()
    cores.exchange(0)
    cores.run(until=5.0, stop=lambda: "received 0" in cores.outcomes)
    assert cores.cores[0].owing() == [1]
    cores.run(until=cores.now + HELD_S + 20 * LATENCY_S)
    assert cores.cores[0].owing() == []


def test_a_report_tells_what_is_newer_than_a_few_reports():
    space = ReceiveSpace()
    told = []
    for number in range(10):
        space.mark(2 * number, 2, 1)
        report = space.report(1, 500, again=False)
        told.append((report.base, report.count))
    assert told[-1] == (2 * 10 - 2 * TOLD_TIMES, 2 * TOLD_TIMES)
    assert space.report(1, 500).count == 20, "the whole window to whoever asks"


def test_a_report_tells_of_what_came_late():
    space = ReceiveSpace()
    for number in (*range(5), *range(6, 40)):
        space.mark(number, 1, 1)
        space.report(1, 500, again=False)
    space.mark(5, 1, 1)
    for _ in range(TOLD_TIMES):
        report = space.report(1, 500, again=False)
        assert report.base <= 5
        assert report.masks >> ((5 - report.base) * wire.BURST_DATAGRAMS) & 1
    assert space.report(1, 500, again=False).base > 5


def test_nothing_is_repaired_where_reports_are_lost():
    """All but every third feedback is lost, and nothing else: what came is known to have come."""
    cores = Cores()
    cores.begin()
    seen = 0

    def lose(header, datagram, target):
        nonlocal seen
        seen += header.type == Type.FEEDBACK
        return [] if header.type == Type.FEEDBACK and seen % TOLD_TIMES else [(0.0, datagram)]

    cores.tamper = lose
    data = numbers(2000)
    cores.send(0, 1, data)
    sink = cores.receive(1, 0, data)
    cores.run(until=30.0)
    assert (sink.array == data).all()
    assert seen > 3 * TOLD_TIMES
    assert cores.delivered().chunks_resent == 0
