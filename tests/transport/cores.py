"""Cores joined in memory, told literal times: no event loop, no sockets, no randomness but the seed.

``Cores.run`` jumps from one arrival or timeout to the next. ``tamper`` sees each datagram on its way and returns what arrives of
it, so that a test loses, repeats, holds up or damages exactly what it means to.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dblp.transport import wire
from dblp.transport.burst import Train
from dblp.transport.config import HEADER_BYTES, TransportConfig
from dblp.transport.core import Core
from dblp.transport.message import MessageSpec, Received, Sent, message_id
from dblp.transport.port import Address, Burst, PortFacts, Slab

SESSION = 0x0123456789ABCDEF
DATAGRAM = 1464
CHUNK = 1408
LATENCY_S = 1e-3
MAX_STEPS = 100_000

Tamper = Callable[[wire.Header, bytes, int], Sequence[tuple[float, bytes]]]
"""``tamper(header, datagram, target)``: what arrives instead, as (extra seconds, datagram)."""


def address(rank: int, path: int = 0) -> Address:
    return Address(f"10.0.0.{rank + 1}", 9000 + path)


def slab_of(
    datagrams: Sequence[bytes], *, path: int = 0, at: float = 0.0, source: Address | None = None
) -> Slab:
    """One slab of datagrams that all have one length, but for a shorter last one."""
    size = len(datagrams[0])
    assert all(len(datagram) == size for datagram in datagrams[:-1]) and len(datagrams[-1]) <= size
    arena = np.frombuffer(b"".join(datagrams) + bytes(size - len(datagrams[-1])), np.uint8).copy()
    where = source or address(0)
    return Slab(arena, 0, size, size, len(datagrams), len(datagrams[-1]), path, at, lambda index: where)


def slabs_of(datagrams: Sequence[bytes], **options: Any) -> list[Slab]:
    """Slabs as a kernel with GRO would make them: a shorter datagram ends one."""
    slabs: list[Slab] = []
    run: list[bytes] = []
    for datagram in datagrams:
        if run and (len(datagram) > len(run[0]) or len(run[-1]) < len(run[0])):
            slabs.append(slab_of(run, **options))
            run = []
        run.append(datagram)
    return [*slabs, slab_of(run, **options)] if run else slabs


def in_one_arena(slabs: Sequence[Slab]) -> list[Slab]:
    """The same slabs, laid out in one arena, as one recvmmsg does."""
    arena = np.concatenate([np.resize(slab.arena, -(-len(slab.arena) // 8) * 8) for slab in slabs])
    place = 0
    for slab in slabs:
        slab.offset = place
        place += -(-len(slab.arena) // 8) * 8
        slab.arena = arena
    return list(slabs)


def split(burst: Burst | Train) -> list[bytes]:
    """The datagrams of a burst or train."""
    if isinstance(burst, Train):
        return [datagram for index in range(burst.bursts) for datagram in split(burst.burst(index))]
    data = burst.data.tobytes()
    datagrams = [data[at : at + burst.segment] for at in range(0, len(data), burst.segment)]
    return [record for datagram in datagrams for record in records(datagram)]


def records(datagram: bytes) -> list[bytes]:
    """The records of a bundle; any other datagram as it is."""
    header = wire.decode_header(datagram)
    stop = HEADER_BYTES + header.length
    if header.type == wire.Type.DATA or stop >= len(datagram):
        return [datagram]
    return [datagram[:stop], *records(datagram[stop:])]


def deliver_all(header: wire.Header, datagram: bytes, target: int) -> Sequence[tuple[float, bytes]]:
    return [(0.0, datagram)]


class Cores:
    """``world_size`` cores with ``LATENCY_S`` between them."""

    def __init__(self, world_size: int = 2, *, connect: bool = True, **options: Any) -> None:
        self.now = 0.0
        self.tamper: Tamper = deliver_all
        self.sent: list[tuple[int, wire.Header, bytes]] = []
        """(target, header, datagram) of all that left, before it was tampered with."""
        self.outcomes: dict[str, Any] = {}
        self._arrivals: list[tuple[float, int, int, int, Address, bytes]] = []
        self._order = itertools.count()
        settings: dict[int, dict[str, Any]] = options.pop("each", {})
        self.cores = [
            make_core(rank, world_size, **(options | settings.get(rank, {}))) for rank in range(world_size)
        ]
        if connect:
            self.run(until=1.0)
            assert all(not core.handshake.missing() for core in self.cores)
            self.sent.clear()

    def pump(self) -> None:
        """Let everything leave that may."""
        for core in self.cores:
            for burst in core.bursts_to_send(now=self.now):
                for datagram in split(burst):
                    self._send(core.rank, burst, datagram)

    def _send(self, rank: int, burst: Burst | Train, datagram: bytes) -> None:
        target = int(burst.address.host.rsplit(".", 1)[1]) - 1
        header = wire.decode_header(datagram)
        self.sent.append((target, header, datagram))
        for extra, arriving in self.tamper(header, datagram, target):
            at = self.now + LATENCY_S + extra
            entry = (at, next(self._order), target, burst.path, address(rank, burst.path), arriving)
            heapq.heappush(self._arrivals, entry)

    def run(self, until: float = 10.0, stop: Callable[[], bool] | None = None) -> None:
        """Jump from event to event up to time ``until``, or until ``stop()``."""
        for _ in range(MAX_STEPS):
            self.pump()
            self._collect()
            if stop is not None and stop():
                return
            timeouts = [core.next_timeout() for core in self.cores]
            at = min([*timeouts, self._arrivals[0][0] if self._arrivals else float("inf")])
            if at > until:
                self.now = max(self.now, until)
                return
            self.now = max(self.now, at)
            self._arrive()
            for core in self.cores:
                if core.next_timeout() <= self.now:
                    core.on_timer(now=self.now)
        raise AssertionError(f"still busy after {MAX_STEPS} steps, at {self.now:g} s")

    def _arrive(self) -> None:
        batches: dict[tuple[int, int, Address], list[bytes]] = {}
        while self._arrivals and self._arrivals[0][0] <= self.now:
            _, _, target, path, source, datagram = heapq.heappop(self._arrivals)
            batches.setdefault((target, path, source), []).append(datagram)
        for (target, path, source), datagrams in batches.items():
            slabs = slabs_of(datagrams, path=path, at=self.now, source=source)
            self.cores[target].receive_burst(slabs, now=self.now)

    def inject(self, target: int, datagrams: Sequence[bytes], *, source: Address | None = None) -> None:
        """Hand datagrams to a core now."""
        slabs = slabs_of(datagrams, at=self.now, source=source)
        self.cores[target].receive_burst(slabs, now=self.now)

    def _collect(self) -> None:
        for core in self.cores:
            for event in core.events():
                event.callback(event.outcome)

    # --- messages

    def begin(self, number: int = 0, *ranks: int, signature: bytes = b"same") -> None:
        """Round ``number`` of group 0 begins on these ranks (default: all)."""
        for rank in ranks or range(len(self.cores)):
            self.cores[rank].begin_round(number, signature, lambda text: text.decode())

    def remember_loss(self) -> None:
        """All paths have lost so much that what leaves on them is sent by value."""
        for core in self.cores:
            for sender in core.senders.values():
                for path in sender.paths:
                    path.worst_loss, path.worst_at = 1.0, self.now

    def send(self, source: int, target: int, data: np.ndarray, name: str = "sent", **options: Any) -> Any:
        """Send; the outcome comes to ``outcomes[name]``."""
        spec = options.pop("spec", None) or spec_of(
            data, options.pop("budget", 0.0), options.pop("stop", None)
        )
        message = message_id(0, options.pop("number", 0), options.pop("step", 0))
        out = self.cores[source].send(target, message, data.view(np.uint8), spec, **options)
        out.on_done = lambda outcome: self.outcomes.__setitem__(name, outcome)
        return out

    def receive(
        self, target: int, source: int, like: np.ndarray, name: str = "received", **options: Any
    ) -> RecordingSink:
        """Post a receive of as much as ``like`` holds; the outcome comes to ``outcomes[name]``."""
        spec = options.pop("spec", None) or spec_of(
            like, options.pop("budget", 0.0), options.pop("stop", None)
        )
        sink = (ScatteringSink if options.pop("scatter", False) else RecordingSink)(spec, like.dtype)
        message = message_id(0, options.pop("number", 0), options.pop("step", 0))
        self.cores[target].receive(
            source, message, spec, sink, on_chunks=sink.on_chunks, window=options.pop("window", 0), now=self.now,
            on_scattered=sink.on_scattered if isinstance(sink, ScatteringSink) else None,
            on_done=lambda outcome: self.outcomes.__setitem__(name, outcome),
        )  # fmt: skip
        return sink

    def received(self, name: str = "received") -> Received:
        outcome = self.outcomes[name]
        assert isinstance(outcome, Received), outcome
        return outcome

    def delivered(self, name: str = "sent") -> Sent:
        outcome = self.outcomes[name]
        assert isinstance(outcome, Sent), outcome
        return outcome


def make_core(rank: int, world_size: int, **options: Any) -> Core:
    """A core as an endpoint would make it."""
    config = options.pop("config", TransportConfig())
    peers = options.pop("peers", None) or [
        [address(peer, path) for path in range(config.paths)] for peer in range(world_size)
    ]
    settings: dict[str, Any] = {"session": SESSION, "generation": 0, "datagram_bytes": DATAGRAM, "now": 0.0}
    buffer_bytes = options.pop("receive_buffer_bytes", 1 << 20)
    facts = PortFacts(receive_buffer_bytes=buffer_bytes, max_datagram_bytes=DATAGRAM)
    rng = np.random.default_rng([7, rank])
    settings |= options
    return Core(
        rank=rank, world_size=world_size, config=config, facts=facts, peers=peers, rng=rng, **settings
    )


def spec_of(data: np.ndarray, budget: float = 0.0, stop: Any = None, chunk: int = CHUNK) -> MessageSpec:
    more = {} if stop is None else {"stop": stop}
    return MessageSpec(nbytes=data.nbytes, chunk_bytes=chunk, budget=budget, **more)


def numbers(chunks: float, dtype: Any = np.float32) -> np.ndarray:
    """So many chunks of numbers that all differ."""
    return np.arange(int(chunks * CHUNK / np.dtype(dtype).itemsize)).astype(dtype)


class RecordingSink:
    """Copies chunks to their places and counts how often each came."""

    def __init__(self, spec: MessageSpec, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.array = np.zeros(spec.nbytes // dtype.itemsize, dtype)
        self.times = np.zeros(spec.chunks, np.int64)
        self.calls: list[tuple[int, ...]] = []
        self.told = np.zeros(spec.chunks, np.int64)
        """How often each chunk was told of as placed."""
        self._elements = spec.chunk_bytes // dtype.itemsize

    def place(self, first: int, rows: np.ndarray) -> None:
        chunks = rows.shape[0] if rows.ndim == 2 else rows.shape[0] * rows.shape[1]
        flat = np.ascontiguousarray(rows).reshape(-1)
        at = first * self._elements
        assert at + len(flat) <= len(self.array), "beyond the message"
        self.array[at : at + len(flat)] = flat
        self.times[first : first + chunks] += 1
        self.calls.append(rows.shape)

    def on_chunks(self, first: int, count: int) -> None:
        self.told[first : first + count] += 1
        assert (self.times[first : first + count] > 0).all(), "told of before it was placed"


class ScatteringSink(RecordingSink):
    """The same for chunks with gaps."""

    def scatter(self, chunks: np.ndarray, rows: np.ndarray) -> None:
        assert chunks.shape == rows.shape[:-1] and (np.diff(chunks.reshape(-1).astype(int)) > 0).all()
        full = self.array[: self.array.size // self._elements * self._elements].reshape(-1, self._elements)
        full[chunks] = rows
        self.times[chunks] += 1
        self.calls.append((*rows.shape, -1))

    def on_scattered(self, chunks: np.ndarray) -> None:
        self.told[chunks] += 1
        assert (self.times[chunks] > 0).all(), "told of before it was placed"
