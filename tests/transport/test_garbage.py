"""C7: garbage, replays, strangers, cut and flipped datagrams change nothing, leave nothing, and are counted with a reason."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.transport import wire
from dblp.transport.config import HEADER_BYTES
from dblp.transport.drop import Drop
from dblp.transport.inbox import EARLY_SLACK_BYTES, MAX_MESSAGES
from dblp.transport.message import MessageSpec
from dblp.transport.wire import Type
from tests.transport.cores import SESSION, Cores, address, numbers, slab_of, split

BASE = wire.Header(wire.VERSION, Type.DATA, 1, 0, 1, 0, 0, SESSION, 0, 100, 500, 0, 0, 50, 1, 16)


def datagram(payload: bytes | None = None, **fields: Any) -> bytes:
    header = BASE._replace(**fields)
    body = bytes(header.length) if payload is None else payload
    return wire.encode_header(header) + body


class Victim:
    """Rank 1 of two, in the middle of a round: one message awaited, half of it there."""

    def __init__(self) -> None:
        self.cores = Cores()
        self.cores.begin()
        self.data = numbers(100)
        self.core = self.cores.cores[1]
        sending = self.cores.send(0, 1, self.data, "done", offered=False)
        sending.portion = 1  # what is offered leaves, however little it is
        sending.offer(0, 50)
        self.sink = self.cores.receive(1, 0, self.data)
        self.cores.run(until=1.5)
        assert self.sink.times.sum() == 50 and not self.core.drops
        self.traffic = [(target, raw) for target, _, raw in self.cores.sent]

    def state(self, *but: str) -> dict[str, Any]:
        """All that nobody else may change; without what stands in ``but``."""
        receiver, sender = self.core.receivers[0], self.core.senders[0]
        state = {
            "array": self.sink.array.tobytes(),
            "times": self.sink.times.tolist(),
            "messages": sorted(receiver.messages),
            "tombstones": sorted(receiver.tombstones),
            "early": receiver.inbox.early_bytes,
            "heard_at": receiver.heard_at,
            "highest": [space.highest for space in receiver.paths[0].spaces],
            "sending": sorted(sender.messages),
            "window": sender.paths[0].window_bytes,
            "address": sender.paths[0].address,
            "proved": sorted(self.core.handshake.proved),
            "failed": self.core.failed,
            "handshake": self.core.handshake.error,
        }
        return {name: value for name, value in state.items() if name not in but}

    def finishes(self) -> None:
        """All goes on as if nothing had been."""
        message = self.cores.cores[0].senders[1].messages[0]
        message.offer(50, 50)
        self.cores.run(until=self.cores.now + 5.0)
        assert (self.sink.array == self.data).all() and (self.sink.times == 1).all()
        assert self.core.failed is None


STRANGE = {
    Drop.SHORT: b"x" * 47,
    Drop.SESSION: datagram(session=SESSION + 1),
    Drop.VERSION: datagram(version=2),
    Drop.RANK: datagram(rank=1),
    Drop.TYPE: datagram(type=77),
    Drop.NOT_CONNECTED: datagram(path=3),
    Drop.LENGTH: datagram(length=64, payload=bytes(16)),
    Drop.CHUNK: datagram(chunk=100),
    Drop.PAYLOAD: datagram(type=Type.OPEN, cls=0),
    Drop.HANDSHAKE: datagram(type=Type.WELCOME, cls=0),
}


@pytest.mark.parametrize("reason", STRANGE)
def test_each_kind_of_garbage_is_counted_with_its_reason(reason):
    victim = Victim()
    # What proves to be the peer's own is a sign of life; another version of our session is noted for the handshake.
    but = {Drop.CHUNK: ["heard_at"], Drop.PAYLOAD: ["heard_at"], Drop.VERSION: ["handshake"]}.get(reason, [])
    before = victim.state(*but)
    victim.cores.inject(1, [STRANGE[reason]], source=address(9))
    assert victim.core.drops == {reason: 1}
    assert victim.state(*but) == before
    victim.finishes()


@pytest.mark.parametrize(
    "raw",
    [
        datagram(rank=65_535),
        datagram(type=0),
        datagram(position=64),
        datagram(cls=0x40),
        datagram(chunk=(1 << 32) - 1, chunks=(1 << 32) - 1),
        datagram(chunk=(1 << 32) - 2, chunks=(1 << 32) - 1, length=1408),
        datagram(length=1392, chunk=60),
        datagram(length=0),
        datagram(type=Type.FINAL, cls=0, length=3),
        datagram(type=Type.FEEDBACK, cls=0, length=3),
        datagram(message=(1 << 64) - 1, chunk=3),
    ],
    ids=repr,
)
def test_impossible_fields_do_no_harm(raw):
    victim = Victim()
    victim.cores.inject(1, [raw], source=address(9))
    victim.finishes()
    assert len(victim.core.receivers[0].messages) <= 1


def test_a_slab_of_empty_chunks_does_no_harm():
    victim = Victim()
    header = BASE._replace(length=0, count=8, chunk=50)
    slab = slab_of([wire.encode_header(header._replace(position=at, chunk=50 + at)) for at in range(8)])
    victim.core.receive_burst([slab], now=victim.cores.now)
    assert victim.core.drops == {Drop.LENGTH: 8}
    victim.finishes()


def test_a_chunk_index_of_2_to_the_32_allocates_no_table():
    victim = Victim()
    top = (1 << 32) - 1
    rows = [datagram(chunk=top - 40 + at, chunks=top, position=at, count=30, length=16) for at in range(30)]
    tracemalloc.start()
    victim.core.receive_burst([slab_of(rows)], now=victim.cores.now)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert victim.core.drops == {Drop.CHUNK: 30}


def test_replays_of_a_whole_round_change_nothing():
    victim = Victim()
    victim.finishes()
    for core in victim.cores.cores:
        core.end_round(0)
    victim.cores.run(until=victim.cores.now + 1.0)
    before = victim.state("heard_at")
    everything = [raw for target, _, raw in victim.cores.sent if target == 1]
    for _ in range(3):
        for raw in everything:
            victim.cores.inject(1, [raw])
    assert victim.state("heard_at") == before
    assert victim.core.drops[Drop.LATE] >= 3 * 100
    assert victim.core.events() == []


def test_replayed_feedback_acknowledges_and_grants_nothing_new():
    victim = Victim()
    victim.cores.run(until=2.0)
    peer = victim.cores.cores[0]
    path = peer.senders[1].paths[0]
    before = (path.window_bytes, path.srtt, path.inflight_bytes, path.congestion.window_bytes, path.reorder_s)
    old = [raw for target, header, raw in victim.cores.sent if target == 0 and header.type == Type.FEEDBACK]
    for raw in old * 5:
        victim.cores.inject(0, [raw], source=address(1))
    after = (path.window_bytes, path.srtt, path.inflight_bytes, path.congestion.window_bytes, path.reorder_s)
    assert after == before
    victim.finishes()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_no_garbage_raises_whether_or_not_it_knows_the_session(noise, knows):
    core = SHARED.core
    raw = noise
    if knows and len(noise) > HEADER_BYTES:
        raw = bytes([wire.VERSION]) + noise[1:6] + b"\x00\x00" + SESSION.to_bytes(8, "big") + noise[16:46]
        raw += len(noise[HEADER_BYTES:]).to_bytes(2, "big") + noise[HEADER_BYTES:]
    before = sum(core.drops.values())
    if raw:
        SHARED.cores.inject(1, [raw], source=address(9))
        assert knows or sum(core.drops.values()) == before + 1


SHARED = Victim()


@pytest.mark.parametrize("seed", range(12))
def test_flipped_bits_never_raise_and_never_write_past_a_message(seed):
    """Of what a network without checksums might deliver: every kind of datagram of a round, one bit of each turned over."""
    victim = Victim()
    rng = np.random.default_rng(seed)
    for target, raw in victim.traffic:
        flipped = bytearray(raw)
        bit = int(rng.integers(8 * min(len(raw), 120)))
        flipped[bit // 8] ^= 1 << bit % 8
        victim.cores.inject(target, [bytes(flipped)], source=address(1 - target))
        for core in victim.cores.cores:
            core.events()
            for burst in core.bursts_to_send(now=victim.cores.now):
                split(burst)


@pytest.mark.parametrize("seed", range(12))
def test_cut_datagrams_are_dropped_and_counted(seed):
    victim = Victim()
    before = victim.state()
    rng = np.random.default_rng(seed)
    cut = [raw[: int(rng.integers(1, len(raw)))] for target, raw in victim.traffic if target == 1]
    for raw in cut:
        victim.cores.inject(1, [raw], source=address(9))
    assert victim.state() == before
    assert victim.core.drops.keys() <= {Drop.SHORT, Drop.LENGTH}
    assert sum(victim.core.drops.values()) == len(cut)
    victim.finishes()


# --- memory


def test_a_peer_can_hold_no_more_than_its_early_pool():
    victim = Victim()
    receiver = victim.core.receivers[0]
    pool = victim.core.config.early_bytes
    for number in range(3000):
        victim.cores.inject(
            1, [datagram(message=(1 << 32) + (number << 16), chunk=1, length=1408, burst=number)]
        )
    assert receiver.inbox.early_bytes <= pool * 1.125 + EARLY_SLACK_BYTES
    assert victim.core.drops[Drop.EARLY_FULL] > 1000
    victim.finishes()


def test_opens_without_end_are_bounded():
    victim = Victim()
    spec = wire.encode_open(wire.Open(MessageSpec(nbytes=16, chunk_bytes=16), b"same", 0.0))
    for number in range(MAX_MESSAGES + 500):
        raw = datagram(
            payload=spec,
            type=Type.OPEN,
            cls=0,
            message=(7 << 48) + (number << 16),
            length=len(spec),
            burst=number,
        )
        victim.cores.inject(1, [raw])
    assert len(victim.core.receivers[0].messages) == MAX_MESSAGES
    assert len(victim.core._early_opens) <= MAX_MESSAGES
    assert victim.core.drops[Drop.EARLY_FULL] >= 500


def test_strangers_leave_no_memory_behind():
    victim = Victim()
    rng = np.random.default_rng(0)
    noise = [
        datagram(
            session=int(rng.integers(1 << 60)),
            message=int(rng.integers(1 << 60)),
            rank=int(rng.integers(1 << 16)),
        )
        for _ in range(2000)
    ]
    victim.cores.inject(1, noise[:200])
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for at in range(0, 2000, 50):
        victim.cores.inject(1, noise[at : at + 50])
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 20_000
    assert victim.core.drops == {Drop.SESSION: 2200}
    victim.finishes()
