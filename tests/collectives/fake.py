"""A network of endpoints in memory that keeps the contract of ``EndpointLike`` and strains it.

Chunks are delivered in runs of random length and order, from a random message each turn; early data is held up to a bound,
windows are kept, chunks of bounded messages go missing within their budget, FINAL comes late. What was offered is
compared with what is delivered: a caller that changes its memory too early is found out.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dblp.errors import ClosedError, DeadlineError, MismatchError, PeerError
from dblp.transport.config import TransportConfig
from dblp.transport.message import (
    MessageSpec,
    OnChunks,
    OnScattered,
    Received,
    RoundCounters,
    Sent,
    Sink,
    class_counts,
    round_of,
)
from dblp.transport.paths.peer_paths import PathState
from dblp.transport.port import Bytes
from dblp.transport.standing import Stand, Standing, not_called

DETACH_BYTES = 256 * 1024
EARLY_CHUNKS = 8
"""Chunks of a message that are delivered before its receive is posted, at most."""


@dataclass(eq=False)
class Outgoing:
    """A message that was sent: ``Sending``."""

    net: FakeNet
    source: FakeEndpoint
    target: int
    message: int
    data: Bytes
    spec: MessageSpec
    energy: float
    done: asyncio.Future[Sent]
    signature: bytes
    classes: np.ndarray | None = None
    offered: dict[int, bytes] = field(default_factory=dict)
    pending: list[int] = field(default_factory=list)
    delivered: int = 0
    void: set[int] = field(default_factory=set)
    detached: bool = False
    opened: bool = False
    late: int = 0

    def chunk(self, index: int) -> bytes:
        size = self.spec.chunk_bytes
        return self.data[index * size : (index + 1) * size].tobytes()

    def offer(self, first: int, count: int) -> None:
        assert count > 0 and first >= 0 and first + count <= self.spec.chunks
        for index in range(first, first + count):
            assert index not in self.offered, f"chunk {index} was offered twice"
            self.offered[index] = self.chunk(index)
        fresh = [index for index in range(first, first + count) if index not in self.void]
        at = bisect.bisect(self.pending, first)
        self.pending[at:at] = fresh
        self.net.kick()

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.offered), 0

    def missing(self) -> np.ndarray:
        waiting = set(self.pending) | (set(range(self.spec.chunks)) - set(self.offered))
        return np.array(sorted(waiting), np.int64)

    def offer_scattered(self, chunks: np.ndarray) -> None:
        for chunk in chunks.tolist():
            self.offer(chunk, 1)

    def detach(self) -> bool:
        if self.done.done():
            return True
        if len(self.offered) < self.spec.chunks or self.spec.nbytes > DETACH_BYTES:
            return False
        self.data = self.data.copy()
        self.detached = True
        return True


@dataclass(eq=False)
class Incoming:
    """A message that is expected, or that came early: ``Receiving`` once it is posted."""

    done: asyncio.Future[Received]
    spec: MessageSpec | None = None
    sink: Sink | None = None
    on_chunks: OnChunks | None = None
    on_scattered: OnScattered | None = None
    limit: int = 0
    windowed: bool = False
    got: set[int] = field(default_factory=set)
    early: dict[int, bytes] = field(default_factory=dict)
    net: FakeNet | None = None

    def release(self, limit: int) -> None:
        assert self.spec is not None and self.windowed and self.limit <= limit <= self.spec.chunks
        self.limit = limit
        assert self.net is not None
        self.net.kick()

    def missing(self) -> np.ndarray:
        chunks = 0 if self.spec is None else self.spec.chunks
        return np.array(sorted(set(range(chunks)) - self.got), np.int64)

    def take(self, first: int, chunks: list[bytes]) -> None:
        """Place a run of chunks as the real endpoint does: rows, and a short last chunk apart."""
        assert self.spec is not None and self.sink is not None
        self.got.update(range(first, first + len(chunks)))
        full = [chunk for chunk in chunks if len(chunk) == self.spec.chunk_bytes]
        if full:
            self._place(first, full)
        if len(full) < len(chunks):
            self._place(first + len(full), chunks[-1:])
        if self.on_chunks is not None:
            self.on_chunks(first, len(chunks))

    def take_scattered(self, indices: list[int], chunks: list[bytes]) -> None:
        """Place whole chunks with gaps, as a burst or a train of two."""
        assert self.sink is not None and self.spec is not None and self.on_scattered is not None
        self.got.update(indices)
        which = np.array(indices, np.uint32)
        rows = np.frombuffer(bytearray(b"".join(chunks)), self.sink.dtype).reshape(len(chunks), -1)
        sink: Any = self.sink
        if len(chunks) % 2:
            sink.scatter(which, rows)
        else:
            sink.scatter(which.reshape(2, -1), rows.reshape(2, len(chunks) // 2, -1))
        rows.view(np.uint8)[:] = 0xA5
        self.on_scattered(which)

    def _place(self, first: int, chunks: list[bytes]) -> None:
        assert self.sink is not None and self.spec is not None
        # Rows with a gap between them, as payloads in an arena have; scribbled over afterwards, as an arena is.
        width = len(chunks[0])
        arena = np.zeros((len(chunks), width + 48), np.uint8)
        arena[:, 48:] = np.frombuffer(b"".join(chunks), np.uint8).reshape(len(chunks), width)
        rows = arena[:, 48:].view(self.sink.dtype)
        if len(chunks) in (14, 44):  # as a train of bursts
            rows = rows.reshape(2, len(chunks) // 2, -1)
        if len(chunks) == 2 and hasattr(self.sink, "scatter") and width == self.spec.chunk_bytes:
            self.sink.scatter(np.arange(first, first + 2, dtype=np.uint32), np.ascontiguousarray(rows))
        else:
            self.sink.place(first, rows)
        arena[:] = 0xA5


class FakeEndpoint:
    """One rank's ``EndpointLike``."""

    def __init__(self, net: FakeNet, rank: int, config: TransportConfig) -> None:
        self.net = net
        self.rank = rank
        self.world_size = net.world_size
        self.config = config
        self.failed: Exception | None = None
        self.dead = False
        self.pings = 0
        self.outgoing: list[Outgoing] = []
        self.incoming: dict[tuple[int, int], Incoming] = {}
        self.rounds: dict[int, tuple[bytes, Callable[[bytes], str], RoundCounters]] = {}
        self.standings: dict[int, Callable[[], Standing]] = {}
        self.over: set[int] = set()
        self.silence_of: dict[int, float] = {}
        self.missing: dict[tuple[int, int], list[int]] = {}
        """What was kept from this rank: (peer, message id) -> chunks."""

    @property
    def max_chunk_bytes(self) -> int:
        return self.net.chunk_bytes

    def time(self) -> float:
        return asyncio.get_running_loop().time()

    def begin_round(
        self,
        round_key: int,
        signature: bytes,
        describe: Callable[[bytes], str],
        standing: Callable[[], Standing] | None = None,
    ) -> RoundCounters:
        self._check()
        if standing is not None:
            self.standings[round_key] = standing
        assert len(signature) <= 32 and round_key not in self.rounds and round_key not in self.over
        self.rounds[round_key] = (signature, describe, RoundCounters())
        return self.rounds[round_key][2]

    def end_round(self, round_key: int) -> None:
        assert round_key in self.rounds
        del self.rounds[round_key]
        self.standings.pop(round_key, None)
        self.over.add(round_key)
        for out in [out for out in self.outgoing if round_of(out.message) == round_key]:
            settled = out.done.done() or out.detached or self.failed is not None
            assert settled, (
                f"round ended with message {out.message:x} to rank {out.target} in the caller's memory"
            )
        for key in [key for key in self.incoming if round_of(key[1]) == round_key]:
            del self.incoming[key]

    def send(
        self,
        peer: int,
        message: int,
        data: Bytes,
        spec: MessageSpec,
        *,
        offered: bool = True,
        energy: float = 0.0,
        classes: np.ndarray | None = None,
    ) -> Outgoing:
        self._check()
        assert (
            data.dtype == np.uint8
            and data.ndim == 1
            and data.flags.c_contiguous
            and data.nbytes == spec.nbytes
        )
        assert spec.chunk_bytes % 16 == 0 and spec.chunk_bytes <= self.max_chunk_bytes and peer != self.rank
        assert not any(out.target == peer and out.message == message for out in self.outgoing)
        signature = self.rounds[round_of(message)][0]
        future: asyncio.Future[Sent] = asyncio.get_running_loop().create_future()
        if classes is not None and spec.chunks:
            class_counts(spec, classes)
        out = Outgoing(self.net, self, peer, message, data, spec, energy, future, signature, classes)
        self.outgoing.append(out)
        if offered and spec.chunks:
            out.offer(0, spec.chunks)
        self.net.kick()
        return out

    def receive(
        self,
        peer: int,
        message: int,
        spec: MessageSpec,
        sink: Sink,
        *,
        on_chunks: OnChunks | None = None,
        on_scattered: OnScattered | None = None,
        window: int = 0,
    ) -> Incoming:
        self._check()
        assert round_of(message) in self.rounds and peer != self.rank
        assert spec.chunk_bytes % sink.dtype.itemsize == 0 and spec.nbytes % sink.dtype.itemsize == 0
        incoming = self.expect(peer, message)
        assert incoming.sink is None, "posted twice"
        incoming.spec, incoming.sink, incoming.net = spec, sink, self.net
        incoming.on_chunks, incoming.on_scattered = on_chunks, on_scattered
        incoming.windowed = window > 0
        incoming.limit = min(window or spec.chunks, spec.chunks)
        early, incoming.early = incoming.early, {}
        for index, chunk in early.items():
            incoming.take(index, [chunk])
        self.net.kick()
        return incoming

    def silence(self, peer: int) -> float:
        return self.silence_of.get(peer, 0.0)

    def path_states(self, peer: int) -> list[PathState]:
        """There are no paths."""
        return []

    def ping(self, peers: Collection[int]) -> None:
        self.pings += 1
        for peer in peers:
            if not self.net.endpoints[peer].dead:
                self.silence_of[peer] = 0.0

    def ask_standing(self, round_key: int, peers: Collection[int]) -> None:
        """Told at once and in full, so only what the caller makes of it is tested here."""
        mine = self.standing_of(round_key)
        for peer in peers:
            endpoint = self.net.endpoints[peer]
            if not self.dead and not endpoint.dead:
                if round_key in endpoint.rounds:
                    endpoint.rounds[round_key][2].told[self.rank] = mine
                self.rounds[round_key][2].told[peer] = endpoint.standing_of(round_key)

    def standing_of(self, round_key: int) -> Standing:
        if round_key in self.standings:
            return self.standings[round_key]()
        if round_key in self.over:
            return Standing(stand=Stand.OVER)
        return not_called(standing() for standing in self.standings.values())

    def fail(self, error: Exception) -> None:
        if self.failed is None:
            self._poison(error)
            self.net.kick()
            asyncio.get_running_loop().call_later(1e-3, self._tell, error)

    # the network's side

    def expect(self, peer: int, message: int) -> Incoming:
        if (peer, message) not in self.incoming:
            future: asyncio.Future[Received] = asyncio.get_running_loop().create_future()
            self.incoming[peer, message] = Incoming(future)
        return self.incoming[peer, message]

    def _tell(self, error: Exception) -> None:
        ranks = getattr(error, "ranks", (self.rank,))
        kind = DeadlineError if isinstance(error, DeadlineError) else PeerError
        for endpoint in self.net.endpoints:
            if endpoint is not self and not endpoint.dead and endpoint.failed is None:
                endpoint._poison(kind(f"rank {self.rank} failed: {error}", ranks))

    def _poison(self, error: Exception) -> None:
        self.failed = error
        futures: list[asyncio.Future[Any]] = [out.done for out in self.outgoing]
        futures += [incoming.done for incoming in self.incoming.values()]
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()

    def _check(self) -> None:
        if self.failed is not None:
            raise ClosedError(f"the endpoint failed: {self.failed}")


class FakeNet:
    """Endpoints of ``world_size`` ranks and what is under way between them, moved in random turns."""

    def __init__(
        self,
        world_size: int,
        *,
        seed: int = 0,
        chunk_bytes: int = 64,
        loss: float = 0.0,
        config: TransportConfig | None = None,
    ) -> None:
        """``loss``: share of a bounded message's budget that goes missing, in [0, 1]."""
        self.world_size = world_size
        self.chunk_bytes = chunk_bytes
        self.loss = loss
        self.rng = np.random.default_rng(seed)
        self.endpoints = [FakeEndpoint(self, rank, config or TransportConfig()) for rank in range(world_size)]
        self._scheduled = False

    def kill(self, rank: int) -> None:
        """Nothing leaves or reaches the rank any more, and it answers no ping."""
        self.endpoints[rank].dead = True
        for endpoint in self.endpoints:
            endpoint.silence_of[rank] = 1e6

    def kick(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(1e-4, self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        moves = [
            out
            for endpoint in self.endpoints
            if not endpoint.dead
            for out in endpoint.outgoing
            if self._movable(out)
        ]
        self.rng.shuffle(moves)
        for out in moves[: max(1, len(moves) // 2)]:
            self._move(out)
        if moves:
            self.kick()

    def _movable(self, out: Outgoing) -> bool:
        target = self.endpoints[out.target]
        if out.done.done() or target.dead or target.failed is not None:
            return False
        if round_of(out.message) in target.over:
            return True
        return not out.opened or bool(self._deliverable(out)) or self._complete(out)

    def _deliverable(self, out: Outgoing) -> list[int]:
        target = self.endpoints[out.target]
        incoming = target.expect(out.source.rank, out.message)
        if incoming.sink is None:
            return out.pending[: max(0, EARLY_CHUNKS - len(incoming.early))]
        return out.pending[: bisect.bisect_left(out.pending, incoming.limit)]

    def _complete(self, out: Outgoing) -> bool:
        incoming = self.endpoints[out.target].expect(out.source.rank, out.message)
        return incoming.sink is not None and out.delivered + len(out.void) == out.spec.chunks

    def _move(self, out: Outgoing) -> None:
        target = self.endpoints[out.target]
        if out.done.done() or target.failed is not None:
            return
        if round_of(out.message) in target.over:
            self._resolve(out)  # its FINAL was lost, a tombstone answers
            return
        incoming = target.expect(out.source.rank, out.message)
        if not out.opened:
            self._open(out)
        if not self._agree(out, incoming):
            return
        run = self._run(
            self._deliverable(out), scattered=out.classes is not None and incoming.on_scattered is not None
        )
        if run:
            self._deliver(out, incoming, run)
        if self._complete(out):
            self._finish(out, incoming)

    def _open(self, out: Outgoing) -> None:
        out.opened = True
        most = int(out.spec.may_miss * self.loss)
        chunks = self.rng.permutation(out.spec.chunks)
        if out.classes is not None:  # never a critical one
            chunks = chunks[out.classes[chunks] > 0]
        out.void = set(chunks[:most].tolist())
        out.pending = [index for index in out.pending if index not in out.void]

    def _agree(self, out: Outgoing, incoming: Incoming) -> bool:
        target = self.endpoints[out.target]
        mine = target.rounds.get(round_of(out.message))
        if mine is not None and mine[0] != out.signature:
            text = f"rank {target.rank}: {mine[1](mine[0])}; rank {out.source.rank}: {mine[1](out.signature)}"
            target.fail(MismatchError(text, [target.rank, out.source.rank]))
            return False
        if incoming.spec is not None and incoming.spec != out.spec:
            text = (
                f"rank {out.source.rank} sends {out.spec.nbytes} bytes, {incoming.spec.nbytes} are expected"
            )
            target.fail(MismatchError(text, [target.rank, out.source.rank]))
            return False
        return True

    def _run(self, chunks: list[int], *, scattered: bool) -> list[int]:
        """A run of consecutive chunks, from anywhere in what may be delivered; or any, if ``scattered``."""
        if not chunks:
            return []
        if scattered and self.rng.random() < 0.7:
            most = int(self.rng.choice([3, 14, 44]))
            return sorted(self.rng.permutation(chunks)[:most].tolist())
        start = int(self.rng.integers(len(chunks)))
        most = int(self.rng.choice([1, 2, 7, 14, 44]))
        stop = start + 1
        while stop < len(chunks) and stop - start < most and chunks[stop] == chunks[stop - 1] + 1:
            stop += 1
        return chunks[start:stop]

    def _deliver(self, out: Outgoing, incoming: Incoming, run: list[int]) -> None:
        contents = [out.chunk(index) for index in run]
        for index, content in zip(run, contents, strict=True):
            assert content == out.offered[index], (
                f"chunk {index} of message {out.message:x} changed in flight"
            )
        out.delivered += len(run)
        for index in run:
            del out.pending[bisect.bisect_left(out.pending, index)]
        if incoming.sink is None:
            incoming.early.update(zip(run, contents, strict=True))
        elif run[-1] - run[0] == len(run) - 1:
            incoming.take(run[0], contents)
        else:
            short = len(contents[-1]) < out.spec.chunk_bytes  # it comes as a call of its own
            incoming.take_scattered(run[: len(run) - short], contents[: len(run) - short])
            if short:
                incoming.take(run[-1], contents[-1:])

    def _finish(self, out: Outgoing, incoming: Incoming) -> None:
        missing = np.array(sorted(out.void), np.uint32)
        if not incoming.done.done():
            self.endpoints[out.target].missing[out.source.rank, out.message] = sorted(out.void)
            incoming.done.set_result(Received(missing=missing, energy_total=out.energy))
        out.late += 1
        if out.late > int(self.rng.integers(4)):  # FINAL comes a few turns later
            self._resolve(out)

    def _resolve(self, out: Outgoing) -> None:
        out.done.set_result(Sent(missing=np.array(sorted(out.void), np.uint32)))
