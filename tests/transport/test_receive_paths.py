"""The receiver's fast paths against the slow one: whatever slabs a stream of datagrams comes in, the outcome is that of handing
over each datagram alone, in the same order."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from dblp.transport import wire
from dblp.transport.burst import burst_chunks
from dblp.transport.config import HEADER_BYTES
from dblp.transport.drop import Drop
from dblp.transport.message import class_counts, most_critical
from dblp.transport.port import Slab
from dblp.transport.wire import Type
from tests.transport.cores import (
    CHUNK,
    SESSION,
    Cores,
    RecordingSink,
    address,
    in_one_arena,
    numbers,
    slab_of,
    slabs_of,
    spec_of,
)

PER_BURST = burst_chunks(CHUNK)


def tagged_stream(data: np.ndarray, classes: np.ndarray, *, burst: int = 0) -> list[bytes]:
    """The same of a tagged message: class by class, as ``PeerSender`` sends it."""
    raw, datagrams = data.tobytes(), []
    for cls in range(4):
        chunks = np.flatnonzero(classes == cls)
        for at, chunk in enumerate(chunks.tolist()):
            number, position = divmod(at, PER_BURST)
            count = min(PER_BURST, len(chunks) - number * PER_BURST)
            piece = raw[chunk * CHUNK : (chunk + 1) * CHUNK]
            header = wire.Header(
                wire.VERSION, Type.DATA, cls, 0, count, position, 0, SESSION, 0, len(classes),
                (burst + number) & 0xFFFFFFFF, 1000, 0, chunk, 1, len(piece),
            )  # fmt: skip
            datagrams.append(wire.encode_header(header) + piece)
    return datagrams


def stream(data: np.ndarray, *, burst: int = 0, cls: int = 1, **fields: int) -> list[bytes]:
    """All of a message as rank 0 would send it: full bursts, chunk after chunk."""
    raw = data.tobytes()
    pieces = [raw[at : at + CHUNK] for at in range(0, len(raw), CHUNK)]
    datagrams = []
    for chunk, piece in enumerate(pieces):
        number, position = divmod(chunk, PER_BURST)
        count = min(PER_BURST, len(pieces) - number * PER_BURST)
        header = wire.Header(
            wire.VERSION, Type.DATA, cls, 0, count, position, 0, SESSION, 0, len(pieces),
            (burst + number) & 0xFFFFFFFF, 1000, 0, chunk, 1, len(piece),
        )._replace(**fields)  # fmt: skip
        datagrams.append(wire.encode_header(header) + piece)
    return datagrams


class World:
    """Rank 1, which awaits a message of rank 0."""

    def __init__(
        self, data: np.ndarray, *, posted: bool = True, classes: np.ndarray | None = None, **options: Any
    ) -> None:
        self.cores = Cores()
        self.core = self.cores.cores[1]
        self.receiver = self.core.receivers[0]
        self.cores.begin()
        self.data = data
        self.sink: RecordingSink | None = None
        self._options = options
        if classes is not None:
            self._open(classes)
        if posted:
            self.post()

    def post(self) -> None:
        self.sink = self.cores.receive(1, 0, self.data, **self._options)

    def _open(self, classes: np.ndarray) -> None:
        spec = spec_of(self.data)
        payload = wire.encode_open(wire.Open(spec, b"same", 0.0, class_counts(spec, classes)))
        header = wire.Header(
            wire.VERSION, Type.OPEN, 0, 0, 1, 0, 0, SESSION, 0, spec.chunks, 0, 1000, 0, 0, 0, len(payload)
        )
        self.cores.inject(1, [wire.encode_header(header) + payload])

    def hand_over(self, slabs: list[Slab]) -> None:
        self.core.receive_burst(slabs, now=self.cores.now)

    def state(self) -> dict[str, Any]:
        """All that a slow and a fast path must agree on."""
        message = self.receiver.messages.get(0)
        spaces = self.receiver.paths[0].spaces
        assert self.sink is not None
        return {
            "array": self.sink.array.tobytes(),
            "times": self.sink.times.tolist(),
            "told": self.sink.told.tolist(),
            "critical": message.critical if message is not None else None,
            "have": message.have.tolist() if message is not None else None,
            "masks": [(space.highest, space.report(cls, 128)) for cls, space in enumerate(spaces)],
            "drops": Counter(self.core.drops),
            "received": self.receiver.inbox.chunks_received,
            "duplicates": self.core.rounds.active[0].counters.chunks_duplicate,
            "early": self.receiver.inbox.early_bytes,
        }


def cut_at(datagrams: list[bytes], rng: np.random.Generator | None) -> list[Slab]:
    """Slabs, cut at random places, at each burst, or at each datagram, wherever sizes allow."""
    if rng is None:
        return [slab_of([datagram]) for datagram in datagrams]
    borders = np.flatnonzero(rng.random(len(datagrams)) < rng.choice([0.0, 0.02, 0.3])) + 1
    edges = [0, *borders.tolist(), len(datagrams)]
    slabs = [slab for a, b in itertools.pairwise(edges) if b > a for slab in slabs_of(datagrams[a:b])]
    return in_one_arena(slabs) if rng.random() < 0.7 else slabs


def bursts_of(datagrams: list[bytes]) -> list[Slab]:
    """Bursts of one shape as a stack, as a train arrives."""
    bursts = [list(group) for _, group in itertools.groupby(datagrams, _burst_of)]
    slabs = []
    for _, run in itertools.groupby(bursts, lambda burst: [len(datagram) for datagram in burst]):
        stack = list(run)
        slab = slab_of(stack[0])
        if len(stack) > 1:
            slab.arena = np.frombuffer(b"".join(itertools.chain.from_iterable(stack)), np.uint8).copy()
            slab.supers, slab.spacing = len(stack), sum(map(len, stack[0]))
        slabs.append(slab)
    return slabs


def _burst_of(datagram: bytes) -> tuple[int, int]:
    header = wire.decode_header(datagram)
    return header.cls & wire.CLASS_MASK, header.burst


def agree(
    data: np.ndarray, datagrams: list[bytes], slabs: list[Slab], *, posted: bool = True, **options: Any
) -> World:
    fast, slow = World(data, posted=posted, **options), World(data, posted=posted, **options)
    fast.hand_over(slabs)
    for slab in cut_at(datagrams, None):
        slow.hand_over([slab])
    for world in (fast, slow):
        if not posted:
            world.post()
    assert fast.state() == slow.state()
    assert fast.sink is not None and fast.sink.times.max(initial=0) <= 1, "no chunk is placed twice"
    return fast


@pytest.mark.parametrize("chunks", [1, 44, 44.5, 88, 200, 440, 440.25])
def test_a_whole_train_is_what_its_rows_are(chunks):
    data = numbers(chunks)
    datagrams = stream(data)
    world = agree(data, datagrams, bursts_of(datagrams))
    assert world.sink is not None and (world.sink.array == data).all()
    if chunks >= 88:
        assert any(len(call) == 3 and call[0] > 1 for call in world.sink.calls), "trains are placed as trains"


@pytest.mark.parametrize("seed", range(150))
def test_any_stream_of_good_and_bad_datagrams(seed):
    """Holes, repeats, swaps, wrong lengths and counts, other messages between them, in slabs of any cut."""
    rng = np.random.default_rng(seed)
    data = numbers(float(rng.choice([3.0, 100.0, 180.5])))
    datagrams = stream(data, burst=int(rng.choice([0, 5, (1 << 32) - 2])))
    for _ in range(int(rng.integers(1, 6))):
        datagrams = CHANGES[int(rng.integers(len(CHANGES)))](datagrams, rng)
    agree(data, datagrams, cut_at(datagrams, rng), posted=bool(rng.random() < 0.7))


def random_classes(chunks: int, rng: np.random.Generator) -> np.ndarray:
    classes: np.ndarray = rng.integers(1, 4, chunks).astype(np.uint8)
    classes[rng.permutation(chunks)[: most_critical(chunks)]] = 0
    return classes


@pytest.mark.parametrize("scatter", [True, False])
@pytest.mark.parametrize("chunks", [1, 30, 440, 1000.5])
def test_a_tagged_message_is_what_its_rows_are(chunks, scatter):
    data = numbers(chunks)
    classes = random_classes(int(np.ceil(chunks)), np.random.default_rng(3))
    datagrams = tagged_stream(data, classes)
    world = agree(data, datagrams, bursts_of(datagrams), classes=classes, scatter=scatter)
    assert world.sink is not None and (world.sink.array == data).all()
    if chunks >= 440 and scatter:
        scattered = [call for call in world.sink.calls if len(call) == 4]
        assert scattered and max(call[0] for call in scattered) > 1, "trains are placed as trains"


def test_a_tagged_train_of_consecutive_chunks_is_placed_as_a_run():
    data, classes = numbers(440), np.repeat(np.array([3, 1, 2], np.uint8), [176, 176, 88])
    datagrams = tagged_stream(data, classes)
    world = agree(data, datagrams, bursts_of(datagrams), classes=classes, scatter=True)
    assert world.sink is not None and [call[:2] for call in world.sink.calls] == [(4, 44), (2, 44), (4, 44)]
    assert all(len(call) == 3 for call in world.sink.calls)


@pytest.mark.parametrize("seed", range(60))
def test_any_tagged_stream_of_good_and_bad_datagrams(seed):
    rng = np.random.default_rng([seed, 1])
    data = numbers(float(rng.choice([3.0, 100.0, 300.5])))
    classes = random_classes(-(-data.nbytes // CHUNK), rng)
    datagrams = tagged_stream(data, classes, burst=int(rng.choice([0, 5, (1 << 32) - 2])))
    changes = int(rng.integers(0, 4))
    for _ in range(changes):
        datagrams = CHANGES[int(rng.integers(len(CHANGES)))](datagrams, rng)
    slabs = cut_at(datagrams, rng) if changes else bursts_of(datagrams)
    agree(data, datagrams, slabs, posted=bool(rng.random() < 0.7), classes=classes, scatter=True)


def _lose(datagrams, rng):
    keep = rng.random(len(datagrams)) > 0.1
    return [d for d, kept in zip(datagrams, keep, strict=True) if kept] or datagrams[:1]


def _lose_burst(datagrams, rng):
    at = int(rng.integers(len(datagrams)))
    return datagrams[:at] + datagrams[at + PER_BURST :] or datagrams[:1]


def _repeat(datagrams, rng):
    at = int(rng.integers(len(datagrams)))
    return datagrams[: at + 30] + datagrams[at:]


def _swap(datagrams, rng):
    order = np.argsort(np.arange(len(datagrams)) + rng.normal(0, 4, len(datagrams)))
    return [datagrams[at] for at in order]


def _relabel(datagrams, rng, **fields):
    at = int(rng.integers(len(datagrams)))
    changed = list(datagrams)
    for index in range(at, min(at + int(rng.integers(1, 5)), len(changed))):
        header = wire.decode_header(changed[index])._replace(**fields)
        changed[index] = wire.encode_header(header) + changed[index][HEADER_BYTES:]
    return changed


def _wrong_index(datagrams, rng):
    return _relabel(datagrams, rng, chunk=int(rng.choice([0, 7, 1 << 20, (1 << 32) - 1])))


def _wrong_count(datagrams, rng):
    return _relabel(datagrams, rng, chunks=int(rng.choice([0, 1, 1 << 31])))


def _wrong_length(datagrams, rng):
    return _relabel(datagrams, rng, length=int(rng.choice([0, 16, 65_535])))


def _wrong_class(datagrams, rng):
    return _relabel(datagrams, rng, cls=int(rng.choice([0, 2, 3, 0x81])))


def _wrong_position(datagrams, rng):
    return _relabel(datagrams, rng, position=int(rng.choice([0, 63, 64, 255])))


def _other_message(datagrams, rng):
    return _relabel(datagrams, rng, message=1 << 20)


def _short(datagrams, rng):
    """A datagram whose payload is cut, and whose header says so."""
    at = int(rng.integers(len(datagrams)))
    header = wire.decode_header(datagrams[at])
    size = min(header.length, int(rng.choice([0, 16, 1392])))
    changed = list(datagrams)
    changed[at] = (
        wire.encode_header(header._replace(length=size)) + changed[at][HEADER_BYTES : HEADER_BYTES + size]
    )
    return changed


CHANGES = [
    _lose, _lose_burst, _repeat, _swap, _wrong_index, _wrong_count, _wrong_length, _wrong_class, _wrong_position,
    _other_message, _short,
]  # fmt: skip


def test_a_repeated_train_changes_nothing_and_is_counted():
    data = numbers(440)
    world = World(data)
    datagrams = stream(data)[: 4 * PER_BURST]
    for _ in range(2):
        world.hand_over(bursts_of(datagrams))
    assert world.sink is not None and world.sink.times.tolist() == [1] * 176 + [0] * 264
    assert world.core.drops == {Drop.DUPLICATE: 176}
    assert world.core.rounds.active[0].counters.chunks_duplicate == 176


def test_duplicates_of_early_chunks_are_counted_and_not_held():
    data = numbers(20)
    world = World(data, posted=False)
    world.hand_over(bursts_of(stream(data)[:10]))
    world.hand_over(bursts_of(stream(data)[:10]))
    assert 10 * CHUNK < world.receiver.inbox.early_bytes < 11 * CHUNK
    world.post()
    assert world.receiver.inbox.early_bytes == 0
    assert world.core.rounds.active[0].counters.chunks_duplicate == 10
    assert world.receiver.inbox.chunks_received == 10


def test_a_train_with_a_broken_burst_gives_its_prefix():
    data = numbers(440)
    datagrams = stream(data)
    header = wire.decode_header(datagrams[3 * PER_BURST + 5])._replace(chunk=9)
    datagrams[3 * PER_BURST + 5] = wire.encode_header(header) + datagrams[3 * PER_BURST + 5][HEADER_BYTES:]
    world = agree(data, datagrams, bursts_of(datagrams))
    assert world.sink is not None and world.sink.calls[0][0] == 3


def test_a_slab_of_more_datagrams_than_a_burst_can_have_does_no_harm():
    """Headers that claim 100 datagrams a burst: no mask has so many bits."""
    data = numbers(200)
    datagrams = [
        wire.encode_header(wire.decode_header(d)._replace(count=100, position=at % 64, burst=0)) + d[HEADER_BYTES:]
        for at, d in enumerate(stream(data))
    ]  # fmt: skip
    world = agree(data, datagrams, slabs_of(datagrams))
    assert world.sink is not None and (world.sink.array == data).all()


def test_other_chunk_sizes_than_announced_are_dropped():
    data = numbers(10)
    world = World(data)
    short = [
        wire.encode_header(wire.decode_header(d)._replace(length=704)) + d[HEADER_BYTES : HEADER_BYTES + 704]
        for d in stream(data)
    ]
    world.hand_over(slabs_of(short))
    assert world.sink is not None and world.sink.times.sum() == 0
    assert world.core.drops == {Drop.LENGTH: 10}
    assert world.receiver.paths[0].spaces[1].highest == -1, "what was not taken is not acknowledged"


def test_early_data_of_a_longer_message_is_a_mismatch_and_not_a_crash():
    """The peer believes in another size, and its OPEN comes last."""
    world = World(numbers(10), posted=False)
    world.hand_over(bursts_of(stream(numbers(40))))
    world.post()
    assert world.core.drops == {Drop.CHUNK: 40}
    assert world.receiver.inbox.early_bytes == 0


def test_source_addresses_are_not_decoded_on_the_fast_path():
    data = numbers(88)
    world = World(data)
    slabs = bursts_of(stream(data))
    for slab in slabs:
        slab.source = lambda index: pytest.fail("asked for an address")
    world.hand_over(slabs)
    assert world.receiver.inbox.chunks_received == 88
    assert address(0).port == 9000


def test_holding_times_are_those_of_the_datagram_that_is_echoed():
    """Datagrams that waited to be read together came at different times."""
    data = numbers(40)
    world = World(data)
    world.cores.now = 5.0
    path = world.receiver.paths[0]
    rows = []
    for at, row in enumerate(stream(data)[:20]):
        header = wire.decode_header(row)
        rows.append(
            wire.encode_header(header._replace(sent_at=1000 * at, burst=at // 10)) + row[HEADER_BYTES:]
        )
    slab = slab_of(rows, at=1.0)
    slab.arrived = [1.0 + 0.1 * at for at in range(20)].__getitem__
    world.hand_over([slab])
    assert path.echo_at == pytest.approx(1.0 + 1e-4 * path.echo)
    assert path.echo >= 10_000
