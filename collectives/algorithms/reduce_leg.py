"""The reduce leg: every rank sends its part of a shard to the shard's owner, which reduces it.

Theory of operation. With one peer, received rows are added straight into the owner's own shard: two terms commute, so the
order of arrival does not show. With more, contributions are staged, and a segment (one burst of chunks) is reduced in
rank order as soon as all of it has come: ((r0 + r1) + r2) ..., the same bits whatever the order of arrival. ``on_final`` tells
which chunks of the shard are final, so that the next leg starts with them.

An exact leg stages a window of chunks a peer and releases more as segments are reduced: its memory is
``TransportConfig.window_bytes`` however large the array is. A bounded leg stages whole shards: whether a chunk is a hole is only
known when its message has ended, so a window would stop all peers at the first hole. Holes are zeros.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.algorithms.grid import runs, segment_chunks, spec
from dblp.collectives.algorithms.sinks import AddSink, RingSink
from dblp.collectives.priority import Classes, Priority, Tagger
from dblp.collectives.reduction import Reducer, energy
from dblp.collectives.round import Round
from dblp.transport.message import MessageSpec, OnChunks, Received, Sent
from dblp.transport.policy import Policy, Tags

Array = npt.NDArray[Any]

OnLost = Callable[[int, int, Array], None]
"""``on_lost(peer, first, values)``: these elements of the peer's part, from ``first`` on, did not reach it."""
REDUCE_STEP = 0
"""Step of the messages of this leg."""


def post_reduce_leg(
    round_: Round,
    own: Array,
    contributions: Mapping[int, Array],
    reducer: Reducer,
    policy: Policy,
    chunk: int,
    on_final: OnChunks,
    keep: OnLost | None = None,
    priorities: Mapping[int, Priority] | None = None,
) -> None:
    """Post one reduce leg. ``own``: the shard that this rank owns, 1-D, filled with its contribution, reduced in place;
    ``contributions``: for each peer, this rank's part of that peer's shard. Empty shards exchange nothing. ``keep`` is told of
    what did not reach a peer; the contributions must stay as they are until the round is over. ``priorities``: what is known of
    the chunks of each peer's part."""
    if own.size:
        message = spec(own.nbytes, chunk, policy)
        if round_.world_size == 2:
            _post_pair(round_, own, reducer, message, on_final)
        else:
            _StagedLeg(round_, own, reducer, message, on_final).post()
    for peer in round_.peers():
        part = contributions.get(peer)
        if part is not None and part.size:
            message = spec(part.nbytes, chunk, policy)
            known = None if priorities is None else priorities[peer]
            tagger = _tagger(round_, peer, part, reducer, policy, chunk, known)
            weight, classes = _weigh(part, reducer, policy, tagger, message.chunks)
            sending = round_.send(peer, REDUCE_STEP, part, message, energy=weight, classes=classes)
            if message.budget and (keep is not None or tagger is not None):
                done = functools.partial(_tell_lost, round_, keep, tagger, peer, part, chunk)
                sending.done.add_done_callback(done)


def _tell_lost(
    round_: Round,
    keep: OnLost | None,
    tagger: Tagger | None,
    peer: int,
    part: Array,
    chunk: int,
    done: asyncio.Future[Sent],
) -> None:
    if done.cancelled() or done.exception() is not None or round_.error is not None:
        return
    per_chunk = chunk // part.itemsize
    try:
        missing = done.result().missing
        if tagger is not None:
            tagger.missed(missing)
        if keep is None:
            return
        for first, count in runs(missing):
            keep(peer, first * per_chunk, part[first * per_chunk : (first + count) * per_chunk])
    except Exception as error:  # the loop must not see it: the round reports it to its caller
        round_.fail(error)


def _tagger(
    round_: Round,
    peer: int,
    part: Array,
    reducer: Reducer,
    policy: Policy,
    chunk: int,
    priority: Priority | None,
) -> Tagger | None:
    """What tags the chunks of a contribution; None if the policy does not."""
    if not policy.lossy or policy.tags is Tags.NONE:
        return None
    seed = (round_.endpoint.config.seed, round_.number.round, round_.rank, peer)
    return Tagger(part, reducer.dtype, chunk // part.itemsize, policy, priority, seed=seed)


def _weigh(
    part: Array, reducer: Reducer, policy: Policy, tagger: Tagger | None, chunks: int
) -> tuple[float, Classes | None]:
    """Energy of a contribution, and the classes of its chunks."""
    if not policy.lossy:
        return 0.0, None
    if tagger is None:
        return energy(part, reducer.dtype), None
    return tagger.energy(0, chunks), tagger.classes(0, chunks)


def _post_pair(round_: Round, own: Array, reducer: Reducer, message: MessageSpec, on_final: OnChunks) -> None:
    lossy = message.budget > 0
    peer = 1 - round_.rank
    sink = AddSink(own, message.chunk_bytes, reducer, final=True, weigh=lossy)
    elements = message.chunk_bytes // own.itemsize

    def on_done(received: Received) -> None:
        for first, count in runs(received.missing):  # the own contribution stands alone there
            reducer.finish(own[first * elements : (first + count) * elements])
            on_final(first, count)
        if lossy:
            round_.lost(peer, message, received, sink.energy)

    round_.receive(peer, REDUCE_STEP, message, sink, on_chunks=on_final, on_done=on_done)


class _StagedLeg:
    """The owner's side with two peers or more."""

    def __init__(
        self, round_: Round, own: Array, reducer: Reducer, message: MessageSpec, on_final: OnChunks
    ) -> None:
        self._round = round_
        self._own = own
        self._reducer = reducer
        self._message = message
        self._on_final = on_final
        self._lossy = message.budget > 0
        self._peers = round_.peers()
        self._elements = message.chunk_bytes // own.itemsize
        self._segment = segment_chunks(message.chunk_bytes)
        self._window = self._window_chunks(round_.endpoint.config.window_bytes)
        self._stages = self._allocate()
        self._scratch = np.empty(self._segment * self._elements, own.dtype)
        chunks = message.chunks
        self._left = [
            min(self._segment, chunks - low) * len(self._peers) for low in range(0, chunks, self._segment)
        ]
        self._low = 0  # segments below are reduced
        self._releases: list[Callable[[int], None]] = []

    def post(self) -> None:
        """Post the receives of all peers."""
        windowed = self._window < self._message.chunks
        for peer in self._peers:
            release = self._round.receive(
                peer,
                REDUCE_STEP,
                self._message,
                RingSink(self._stages[peer], self._window, self._message.nbytes),
                on_chunks=self._on_chunks,
                on_done=lambda received, peer=peer: self._on_done(peer, received),  # type: ignore[misc]
                window=self._window if windowed else 0,
            )
            if windowed:
                self._releases.append(release)
        if self._low:  # early data has moved the window while the receives were being posted
            self._release()

    def _window_chunks(self, window_bytes: int) -> int:
        """Chunks staged a peer, a multiple of the segment: what may come early at least, the whole shard at most."""
        segment = self._segment
        whole = -(-self._message.chunks // segment) * segment
        if self._lossy:
            return whole
        share = window_bytes // (len(self._peers) * self._message.chunk_bytes * segment) * segment
        # A peer may send this much before it hears of the window, and a burst more if that is the rest of the message: rows must
        # not be overwritten.
        early = self._round.endpoint.config.early_bytes // self._message.chunk_bytes
        least = (max(1, -(-early // segment)) + 1) * segment
        return min(max(share, least), whole)

    def _allocate(self) -> dict[int, Array]:
        nbytes = self._window * self._message.chunk_bytes
        memory = self._round.stage(nbytes * len(self._peers))
        return {
            peer: memory[index * nbytes : (index + 1) * nbytes].view(self._own.dtype)
            for index, peer in enumerate(self._peers)
        }

    def _on_chunks(self, first: int, count: int) -> None:
        end = first + count
        for segment in range(first // self._segment, (end - 1) // self._segment + 1):
            low = segment * self._segment
            self._arrived(segment, min(end, low + self._segment) - max(first, low))
        self._advance()

    def _on_done(self, peer: int, received: Received) -> None:
        if not self._lossy:
            return
        received_energy = received.energy_total
        if len(received.missing):
            stage = self._stages[peer]
            stage.reshape(self._window, -1)[received.missing] = 0
            received_energy = energy(stage[: self._own.size], self._reducer.dtype)
            holes = np.bincount(received.missing // self._segment, minlength=len(self._left))
            for segment in np.flatnonzero(holes).tolist():
                self._arrived(segment, int(holes[segment]))
            self._advance()
        self._round.lost(peer, self._message, received, received_energy)

    def _arrived(self, segment: int, chunks: int) -> None:
        self._left[segment] -= chunks
        if self._left[segment] == 0:
            self._reduce(segment)

    def _reduce(self, segment: int) -> None:
        first = segment * self._segment
        low = first * self._elements
        high = min(self._own.size, low + self._segment * self._elements)
        slot = first % self._window * self._elements
        out = self._own[low:high]
        parts = [
            out if rank == self._round.rank else self._stages[rank][slot : slot + high - low]
            for rank in range(self._round.world_size)
        ]
        self._reducer.fold(parts, out, self._scratch[: high - low])
        self._on_final(first, min(self._segment, self._message.chunks - first))

    def _advance(self) -> None:
        before = self._low
        while self._low < len(self._left) and self._left[self._low] == 0:
            self._low += 1
        if self._low != before:
            self._release()

    def _release(self) -> None:
        # Chunk c shares its row with c + window: it may come once c's segment has been reduced.
        limit = min(self._low * self._segment + self._window, self._message.chunks)
        for release in self._releases:
            release(limit)
