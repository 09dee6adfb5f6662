"""The impaired port: what leaves at once, what leaves late, and what happens when the inner port blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from dblp.transport.impair import ImpairedPort, Impairer, gather, parse_impair, sizes_of
from dblp.transport.port import Address, Burst, PortFacts, Slab

HERE = Address("10.0.0.1", 1)
THERE = Address("10.0.0.2", 2)


class Clock:
    """The part of a loop that a port uses: a time, and timers that ``advance`` runs."""

    virtual = True

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when, callback))
        return self.timers[-1]

    def advance(self, until: float) -> None:
        while due := sorted((t for t in self.timers if t.at <= until and not t.over), key=lambda t: t.at):
            due[0].over = True
            self.now = max(self.now, due[0].at)
            due[0].callback()
        self.now = until

    @property
    def pending(self) -> list[float]:
        return [timer.at for timer in self.timers if not timer.over]


class Timer:
    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at = at
        self.callback = callback
        self.over = False

    def cancel(self) -> None:
        self.over = True


class Wire:
    """An inner port that notes what it sends and blocks when told to."""

    addresses = (HERE,)
    facts = PortFacts(receive_buffer_bytes=1 << 20, max_datagram_bytes=1472)

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.sent: list[tuple[float, Burst, bytes]] = []
        self.room = 1 << 30
        self.refusals = 0
        self.closed = False

    def open(self, on_batch: Callable[[Sequence[Slab]], None], on_writable: Callable[[], None]) -> None:
        self.on_batch, self.on_writable = on_batch, on_writable

    def send(self, burst: Burst) -> bool:
        assert 1 <= burst.count <= 64
        assert len(burst.data) <= 65_507
        if not self.room:
            self.refusals += 1
            return False
        self.room -= 1
        self.sent.append((self.clock.now, burst, burst.data.tobytes()))
        return True

    def close(self) -> None:
        self.closed = True

    def free(self, room: int = 1 << 30) -> None:
        self.room = room
        self.on_writable()


class Rig:
    """An impaired port on a wire."""

    def __init__(self, text: str, *, seed: int = 1, backlog_bytes: int = 1 << 20) -> None:
        self.clock = Clock()
        self.wire = Wire(self.clock)
        self.impairer = Impairer(parse_impair(text), np.random.default_rng(seed))
        loop: asyncio.AbstractEventLoop = self.clock  # type: ignore[assignment]
        self.port = ImpairedPort(self.wire, self.impairer, loop, backlog_bytes=backlog_bytes)
        self.writable = 0
        self.port.open(lambda slabs: None, self._on_writable)

    def _on_writable(self) -> None:
        self.writable += 1

    def send(self, count: int, size: int = 100, last: int | None = None, fill: int = 0) -> bool:
        data = np.repeat(np.arange(fill, fill + count, dtype=np.uint8), size)
        burst = Burst(data[: (count - 1) * size + (last or size)], size, 3, 2, THERE)
        taken = self.port.send(burst)
        data[:] = 255  # the core reuses its memory at once
        return taken

    @property
    def times(self) -> list[float]:
        return [at for at, burst, _ in self.wire.sent for _ in range(burst.count)]

    @property
    def fills(self) -> list[int]:
        """First byte of each datagram that left."""
        return [raw[i] for _, burst, raw in self.wire.sent for i in range(0, len(raw), burst.segment)]


def test_facts_addresses_and_received_batches_pass_through():
    rig = Rig("loss(0.5)")
    got: list[Sequence[Slab]] = []
    rig.port.open(got.append, lambda: None)
    batch: list[Slab] = []
    rig.wire.on_batch(batch)
    assert got[0] is batch
    assert rig.port.addresses == (HERE,)
    assert rig.port.facts == replace(rig.wire.facts, whole_bursts=False), "datagrams leave one by one"
    rig.port.close()
    assert rig.wire.closed


def test_an_untouched_burst_is_handed_on_without_a_copy():
    rig = Rig("")
    burst = Burst(np.zeros(1000, np.uint8), 300, 3, 2, THERE)
    assert rig.port.send(burst)
    assert rig.wire.sent[0][1] is burst


def test_what_survives_leaves_as_one_burst_with_the_same_path_class_and_address():
    rig = Rig("loss(0.3)")
    rig.send(40, last=60)
    (burst,) = [burst for _, burst, _ in rig.wire.sent]
    assert burst.count == rig.impairer.counters.delivered < 40
    assert (burst.path, burst.cls, burst.address, burst.segment) == (3, 2, THERE, 100)
    assert rig.fills == sorted(rig.fills)
    assert rig.clock.pending == []


def test_nothing_leaves_if_all_is_lost():
    rig = Rig("loss(1)")
    assert rig.send(10)
    assert rig.wire.sent == []
    assert rig.impairer.counters.network_loss == 1.0


def test_late_datagrams_leave_when_due_on_one_timer():
    rig = Rig("delay(0.5s)")
    rig.send(3, fill=0)
    rig.clock.advance(0.25)
    rig.send(2, last=10, fill=10)
    assert rig.wire.sent == []
    assert len(rig.clock.pending) == 1
    rig.clock.advance(1.0)
    assert rig.fills == [0, 1, 2, 10, 11]
    assert rig.times == [0.5, 0.5, 0.5, 0.75, 0.75]
    assert rig.clock.pending == []


def test_a_rate_spaces_datagrams_of_one_burst():
    rig = Rig("rate(8mbit,queue=1MB)")
    rig.send(4, size=1000)
    rig.clock.advance(0.0025)
    assert rig.fills == [0, 1]
    rig.clock.advance(1.0)
    assert rig.times == [0.001, 0.002, 0.003, 0.004]


def test_a_late_timer_sends_all_that_is_due_together():
    rig = Rig("rate(8mbit,queue=1MB)")
    rig.send(4, size=1000)
    rig.clock.now = 0.0035  # the loop was busy
    rig.clock.timers[0].callback()
    assert [burst.count for _, burst, _ in rig.wire.sent] == [3]


def test_a_timer_that_fires_early_does_not_spin():
    rig = Rig("delay(0.5s)")
    rig.send(3)
    rig.clock.now = 0.4997  # coarse timers do so
    rig.clock.timers[0].callback()
    assert rig.fills == [0, 1, 2]


def test_what_is_due_leaves_before_a_new_burst():
    rig = Rig("reorder(1,by=0.5s)")
    rig.send(2, fill=0)
    rig.clock.now = 0.75  # its timer has not run yet
    rig.send(1, fill=9)
    assert rig.fills == [0, 1]
    rig.clock.advance(2.0)
    assert rig.fills == [0, 1, 9]


def test_held_back_datagrams_are_passed_by_later_ones():
    rig = Rig("reorder(0.5,by=10ms)")
    rig.send(20)
    assert 0 < len(rig.fills) < 20
    rig.clock.advance(1.0)
    assert sorted(rig.fills) == list(range(20))
    assert rig.fills != sorted(rig.fills)
    assert rig.impairer.counters.reordered == rig.times.count(0.01)


def test_duplicates_respect_the_limits_of_a_burst():
    rig = Rig("duplicate(1)")
    rig.send(44, size=1464, last=100)
    assert rig.fills == [n for n in range(44) for _ in range(2)]
    assert rig.wire.sent[-1][1].count == 1
    assert len(rig.wire.sent[-1][2]) == 100


def test_damage_is_delivered_on_request_and_leaves_the_callers_memory_alone():
    rig = Rig("corrupt(1,deliver=true)")
    data = np.zeros(950, np.uint8)
    rig.port.send(Burst(data, 100, 0, 0, THERE))
    assert not data.any()
    got = np.frombuffer(b"".join(raw for *_, raw in rig.wire.sent), np.uint8)
    assert [int(np.unpackbits(got[i : i + 100]).sum()) for i in range(0, 950, 100)] == [1] * 10


def test_a_blocked_inner_port_is_honoured():
    rig = Rig("loss(0.2)")
    rig.wire.room = 1
    assert rig.send(10, fill=0)
    assert rig.send(10, fill=20)  # decided and copied before the inner port refused
    assert not rig.send(10, fill=40)
    assert not rig.send(10, fill=40)
    assert rig.impairer.counters.offered == 20
    assert rig.wire.refusals == 1
    assert rig.writable == 0
    rig.wire.free()
    assert rig.writable == 1
    assert rig.send(10, fill=60)
    assert len(rig.fills) == rig.impairer.counters.delivered
    assert {fill // 20 for fill in rig.fills} == {0, 1, 3}
    rig.wire.free()
    assert rig.writable == 1  # nobody was refused since


def test_late_datagrams_wait_while_the_inner_port_blocks():
    rig = Rig("delay(0.5s)")
    rig.send(2, fill=0)
    rig.send(2, fill=10)
    rig.wire.room = 0
    rig.clock.advance(5.0)
    assert rig.wire.refusals == 1
    assert rig.clock.pending == []  # no timer spins meanwhile
    rig.wire.free(room=1)
    assert rig.fills == [0, 1]
    rig.wire.free()
    assert rig.fills == [0, 1, 10, 11]


def test_late_datagrams_beyond_the_bound_are_lost_and_counted():
    rig = Rig("delay(0.5s)", backlog_bytes=1000)
    assert rig.send(10, fill=0)
    assert rig.send(3, fill=20)
    assert rig.impairer.counters.lost == {"backlog": 3}
    rig.clock.advance(1.0)
    assert rig.fills == list(range(10))
    assert rig.impairer.counters.delivered == 10
    rig.send(10, fill=40)
    rig.clock.advance(2.0)
    assert len(rig.fills) == 20


def test_close_forgets_what_is_late():
    rig = Rig("delay(0.5s)")
    rig.send(2)
    rig.port.close()
    rig.port.close()
    rig.clock.advance(1.0)
    assert rig.wire.sent == []
    assert rig.clock.pending == []


@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(0.0, 0.01)), min_size=1, max_size=20),
    st.lists(st.integers(0, 5), max_size=30),
)
def test_no_datagram_is_lost_or_doubled_however_the_inner_port_blocks(bursts, rooms):
    rig = Rig("rate(100mbit,queue=10MB),delay(1ms),jitter(1ms),reorder(0.2,by=2ms)", backlog_bytes=1 << 30)
    accepted = 0
    free = iter(rooms)
    for count, gap in bursts:
        rig.wire.room = next(free, 5)
        taken = rig.send(count)
        accepted += count * taken
        rig.clock.advance(rig.clock.now + gap)
        if not taken:
            rig.wire.free(3)
    rig.wire.free()
    rig.clock.advance(rig.clock.now + 10.0)
    assert len(rig.fills) == accepted == rig.impairer.counters.delivered


@given(st.integers(1, 44), st.integers(1, 1464), st.data())
def test_gather_gives_the_datagrams_in_order_within_the_limits(count, segment, data):
    last = data.draw(st.integers(1, segment))
    index = data.draw(st.lists(st.integers(0, count - 1), max_size=100))
    burst = Burst(
        np.random.default_rng(count).integers(256, size=(count - 1) * segment + last, dtype=np.uint8),
        segment,
        0,
        0,
        THERE,
    )
    raw = burst.data.tobytes()
    sizes = sizes_of(burst)
    assert sizes.tolist() == [segment] * (count - 1) + [last]
    got = []
    for piece in gather(burst.data, segment, np.array(index, np.int64)):
        out = piece.tobytes()
        got += [out[i : i + segment] for i in range(0, len(out), segment)]
        assert len(out) <= 65_507
        assert -(-len(out) // segment) <= 64
    assert got == [raw[i * segment : i * segment + sizes[i]] for i in index]


def test_the_whole_burst_is_not_copied():
    data = np.zeros(1000, np.uint8)
    assert gather(data, 300, np.arange(4))[0] is data


@pytest.mark.parametrize("text", ["loss(0.3)", "ge(0.02,0.2)", "jitter(1ms)", "rate(1gbit,queue=50KB)"])
def test_a_seed_repeats(text):
    def run() -> list[tuple[float, bytes]]:
        rig = Rig(text)
        for step in range(30):
            rig.send(1 + step)
            rig.clock.advance(step * 1e-4)
        rig.clock.advance(1.0)
        return [(at, raw) for at, _, raw in rig.wire.sent]

    assert run() == run()


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("text", ["delay(3ms)", "rate(50mbit,queue=1MB)", "jitter(2ms),delay(1ms)"])
def test_real_loops_deliver_everything_and_nothing_early(factory, text):
    async def main() -> None:
        loop = asyncio.get_running_loop()
        clock = Clock()
        wire = Wire(clock)
        impairer = Impairer(parse_impair(text), np.random.default_rng(1))
        port = ImpairedPort(wire, impairer, loop)
        port.open(lambda slabs: None, lambda: None)
        began = time.monotonic()
        for _ in range(5):
            port.send(Burst(np.zeros(20 * 1000, np.uint8), 1000, 0, 0, THERE))
            await asyncio.sleep(0.001)
        while sum(burst.count for _, burst, _ in wire.sent) < 100:
            await asyncio.sleep(0.001)
        # 100 datagrams take 16 ms at 50 Mb/s; timers may fire half a millisecond early.
        least = {"delay(3ms)": 0.003, "rate(50mbit,queue=1MB)": 0.016}.get(text, 0.0)
        assert time.monotonic() - began >= least - 0.001
        assert impairer.counters.total_lost == 0
        port.close()

    loop = factory()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
