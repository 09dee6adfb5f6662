"""What broken bursts leave behind is taken together: at the cost of bursts, with the outcome of a datagram at a time."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from dblp.transport import remnants, wire
from dblp.transport.config import HEADER_BYTES
from dblp.transport.port import Slab
from dblp.transport.remnants import Remnants
from dblp.transport.wire import Type
from tests.transport.cores import SESSION, Cores, in_one_arena, numbers, slab_of, slabs_of
from tests.transport.test_calls_per_burst import CallCounter
from tests.transport.test_receive_paths import PER_BURST, World, agree, stream, tagged_stream


def kept(datagrams: list[bytes], share: float, seed: int = 0) -> list[list[bytes]]:
    """What comes of them where a share is lost: runs without a gap, as the kernel coalesces them."""
    keep = np.random.default_rng(seed).random(len(datagrams)) >= share
    runs: list[list[bytes]] = [[]]
    for at, (datagram, is_kept) in enumerate(zip(datagrams, keep, strict=True)):
        if at % PER_BURST == 0 or not is_kept:
            runs.append([])
        if is_kept:
            runs[-1].append(datagram)
    return [run for run in runs if run]


def arena_of(runs: list[list[bytes]]) -> list[Slab]:
    return in_one_arena([slab for run in runs for slab in slabs_of(run)])


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.8])
@pytest.mark.parametrize("tagged", [False, True])
def test_what_a_lossy_network_leaves_is_what_its_datagrams_are(share, tagged):
    data = numbers(20 * PER_BURST)
    classes = np.tile(np.array([1, 2, 3, 1, 2], np.uint8), 4 * PER_BURST) if tagged else None
    datagrams = stream(data) if classes is None else tagged_stream(data, classes)
    runs = kept(datagrams, share)
    agree(data, [d for run in runs for d in run], arena_of(runs), classes=classes, scatter=True)


def test_the_remnants_of_a_batch_are_placed_together():
    data = numbers(30 * PER_BURST)
    runs = kept(stream(data), 0.1)
    world = World(data, scatter=True)
    world.hand_over(arena_of(runs))
    assert world.sink is not None
    assert len(runs) > 100
    assert len(world.sink.calls) == 1


def calls_of(runs: list[list[bytes]], data: np.ndarray) -> int:
    world, counter = World(data, scatter=True), CallCounter()
    slabs = arena_of(runs)
    sys.setprofile(counter)
    try:
        world.hand_over(slabs)
    finally:
        sys.setprofile(None)
    return counter.calls


def test_calls_grow_with_bursts_and_not_with_remnants():
    """Each lost datagram cuts a burst; a remnant at a time would take ten calls and more for each."""
    data = numbers(30 * PER_BURST)
    few, many = kept(stream(data), 0.02), kept(stream(data), 0.3)
    assert len(many) > 4 * len(few)
    assert calls_of(many, data) < calls_of(few, data) + 4 * (len(many) - len(few))
    assert calls_of(many, data) < 15 * 30 + 4 * len(many)


def test_remnants_of_several_peers_and_feedback_between_them():
    """Rank 2 awaits one message of each of two; their remnants come in turn, with answers to what it sent between."""
    cores, data = Cores(3), {rank: numbers(6 * PER_BURST) + rank for rank in range(2)}
    cores.begin()
    sinks = {rank: cores.receive(2, rank, data[rank], scatter=True) for rank in data}
    slabs: list[Slab] = []
    mine = {rank: kept(stream(data[rank], rank=rank), 0.2, seed=rank) for rank in data}
    for pair in zip(*mine.values(), strict=False):
        for run in pair:
            slabs += slabs_of(run)
        payload = wire.encode_feedback(wire.Feedback(0, 0, 1 << 20, False, (), (), 0, 0, 0))
        header = wire.Header(
            wire.VERSION, Type.FEEDBACK, 0, 0, 1, 0, 0, SESSION, 0, 0, len(slabs), 1000, 0, 0, 0, len(payload)
        )
        slabs.append(slab_of([wire.encode_header(header) + payload]))
    cores.cores[2].receive_burst(in_one_arena(slabs), now=cores.now)
    for rank, sink in sinks.items():
        came = sum(len(run) for run in mine[rank][: min(map(len, mine.values()))])
        assert int((sink.times == 1).sum()) == came
        assert len(sink.calls) == 1, "as if no other came between"
        rows = sink.array.reshape(6 * PER_BURST, -1)
        there = sink.times == 1
        assert (rows[there] == data[rank].reshape(rows.shape)[there]).all()


def test_one_wrong_datagram_costs_the_others_nothing():
    data = numbers(10 * PER_BURST)
    runs = kept(stream(data), 0.2)
    for field, value in (("chunk", 1 << 30), ("position", 64), ("session", 5), ("rank", 9), ("message", 77)):
        broken = [list(run) for run in runs]
        header = wire.decode_header(broken[4][0])._replace(**{field: value})
        broken[4][0] = wire.encode_header(header) + broken[4][0][HEADER_BYTES:]
        world = agree(data, [d for run in broken for d in run], arena_of(broken))
        assert world.sink is not None
        assert int(world.sink.times.sum()) == sum(map(len, runs)) - 1


def test_a_message_that_is_not_posted_holds_its_remnants_early():
    data = numbers(4 * PER_BURST)
    runs = kept(stream(data), 0.1)
    agree(data, [d for run in runs for d in run], arena_of(runs), posted=False)


def test_round_trips_are_measured_by_the_last_remnant():
    """What is echoed is a datagram's own time of sending beside its own arrival."""
    data = numbers(8 * PER_BURST)
    world = World(data)
    world.cores.now = 5.0
    slabs = []
    for number in range(8):
        burst = stream(data)[number * PER_BURST : (number + 1) * PER_BURST]
        sent = [
            wire.encode_header(wire.decode_header(d)._replace(sent_at=1000 * number)) + d[HEADER_BYTES:]
            for d in burst
        ]
        slabs += [slab_of(sent[:20], at=1.0 + number * 1e-3), slab_of(sent[21:], at=1.5 + number * 1e-3)]
    world.hand_over(in_one_arena(slabs))
    path = world.receiver.paths[0]
    assert path.echo == 7000
    assert path.echo_at == pytest.approx(1.507)


def test_singles_in_slots_are_remnants_too():
    """A burst of loss leaves datagrams that nothing was coalesced with: one slab, each in a slot of its own."""
    data = numbers(30 * PER_BURST)
    alone = [run[0] for run in kept(stream(data), 0.8)]
    slot = 2048
    arena = np.zeros(slot * len(alone), np.uint8)
    for at, datagram in enumerate(alone):
        arena[at * slot : at * slot + len(datagram)] = np.frombuffer(datagram, np.uint8)
    size, cut = len(alone[0]), len(alone) // 3
    slabs = []
    for first in range(0, len(alone), cut):
        count = min(cut, len(alone) - first)
        slab = slab_of(alone[:1])
        slab.arena, slab.offset, slab.stride, slab.size, slab.count, slab.last = (
            arena, first * slot, slot, size, count, size,
        )  # fmt: skip
        slabs.append(slab)
    agree(data, alone, slabs)
    world = World(data, scatter=True)
    world.hand_over(slabs)
    assert world.sink is not None
    assert len(world.sink.calls) == 1
    assert not remnants.few(slabs[:1])
    assert remnants.worth(slabs[:1])


def test_whole_bursts_are_taken_as_they_are():
    data = numbers(5 * PER_BURST)
    assert not remnants.worth(arena_of(kept(stream(data), 0.0)))
    assert remnants.few([slab_of(stream(data)[:PER_BURST])] * 2)


def test_sizes_that_are_no_words_are_taken_one_by_one():
    odd = slab_of([bytes(HEADER_BYTES + 13)] * 3)
    assert not remnants.may_be_remnant(odd)
    assert remnants.may_be_remnant(slab_of([bytes(HEADER_BYTES + 16)] * 3))
    assert not remnants.may_be_remnant(slab_of([bytes(HEADER_BYTES + 16)] * 3 + [bytes(HEADER_BYTES)]))


def test_the_rows_of_a_stack_are_those_of_its_super_packets():
    data = numbers(5 * PER_BURST)
    datagrams = stream(data)
    stack = slab_of(datagrams[:PER_BURST])
    stack.arena = np.frombuffer(b"".join(datagrams[: 2 * PER_BURST]), np.uint8).copy()
    stack.supers, stack.spacing = 2, PER_BURST * len(datagrams[0])
    stack.arrived = [1.0, 2.0].__getitem__
    run = in_one_arena(
        [stack, slab_of(datagrams[2 * PER_BURST : 3 * PER_BURST]), slab_of(datagrams[150:200])]
    )
    found = Remnants(run)
    (rows,) = found.groups()
    assert found.chunks(rows).tolist() == [*range(3 * PER_BURST), *range(150, 200)]
    slab, at = found.place_of(PER_BURST + 3)
    assert (slab, at) == (stack, 1)
    assert slab.arrival(at) == 2.0
    assert [(first, last) for _, first, last in found.slabs_of(rows)] == [(0, 43), (0, 43), (0, 43), (0, 49)]
