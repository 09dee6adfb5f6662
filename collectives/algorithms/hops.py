"""Hops of a flow: sends, and the receives that add or copy; each keeps its chunks to the order of the program (see ``flow``)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from dblp.collectives.algorithms.grid import runs, segment_chunks
from dblp.collectives.algorithms.sinks import whole_rows, words
from dblp.collectives.reduction import energy
from dblp.transport.interface import Sending
from dblp.transport.message import MessageSpec, Received, Sent
from dblp.transport.policy import Fill

if TYPE_CHECKING:
    from dblp.collectives.algorithms.flow import Flow

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
Chunks = npt.NDArray[np.uint32]
"""Indices of chunks with gaps, ascending."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A range of chunks of the buffer's grid."""

    low: int
    high: int

    @property
    def chunks(self) -> int:
        """How many."""
        return self.high - self.low

    def cut(self, parts: int) -> list[Span]:
        """``parts`` spans whose sizes differ by at most one chunk; the last ones are empty where there are too few."""
        each, more = divmod(self.chunks, parts)
        borders = [self.low + index * each + min(index, more) for index in range(parts + 1)]
        return [Span(low, high) for low, high in itertools.pairwise(borders)]


class Keep(Protocol):
    """Told what this rank holds and no other rank has counted."""

    def __call__(self, first: int, values: Array, *, divisor: int = 1, ranks: int = 1) -> None:
        """``values`` (1-D, valid during the call) of the elements from ``first`` on are not in the result; ``divisor``: they are
        an average over so many ranks; ``ranks``: how many ranks' contributions are in them, if none was lost."""


class Follower(Protocol):
    def ready(self, low: int, high: int) -> None: ...

    def ready_scattered(self, chunks: Chunks) -> None: ...


class Node:
    """Something that gets done with its chunks, and tells those that wait for it."""

    def __init__(self, flow: Flow, span: Span) -> None:
        self.flow = flow
        self.span = span
        self.followers: list[tuple[int, int, Follower]] = []

    def done(self, low: int, high: int) -> None:
        for first, end, follower in self.followers:
            first, end = max(first, low), min(end, high)
            if first < end:
                follower.ready(first, end)

    def done_scattered(self, chunks: Chunks) -> None:
        """``done`` with chunks that have gaps."""
        for first, end, follower in self.followers:
            start, stop = np.searchsorted(chunks, (first, end))
            if start < stop:
                follower.ready_scattered(chunks[start:stop])


class Outlet(Node):
    """A send. ``waits``: for stages before it; ``whole``: for all of them, so that nothing leaves before the last chunk may.
    ``tells``: it is done with a chunk when that was offered and FINAL has come, as the reduce leg's sends of a lossy round are.
    ``on_counts`` is told how many chunks were sent first and again."""

    def __init__(
        self,
        flow: Flow,
        span: Span,
        peer: int,
        step: int,
        spec: MessageSpec,
        *,
        waits: bool,
        gather: bool,
        ranks: int,
        whole: bool = False,
    ) -> None:
        super().__init__(flow, span)
        self.ranks = ranks
        self.peer = peer
        self.step = step
        self.spec = spec
        self.waits = waits
        self.tells = False
        self.gather = gather
        self.energy = 0.0
        self.classes: npt.NDArray[np.uint8] | None = None
        self.on_counts: Callable[[int, int], None] | None = None
        self._offered: Bools | None = None
        self._missing: Bools | None = None
        self._final = False
        self._awaited = span.chunks if whole and waits else 0  # chunks without which nothing leaves
        self._segments = (
            Segments(span.chunks, segment_chunks(spec.chunk_bytes)) if waits and not spec.budget else None
        )
        self._sending: Sending | None = None

    def post(self) -> None:
        flow = self.flow
        data = flow.elements(self.span)
        self._sending = flow.round.send(
            self.peer,
            self.step,
            data,
            self.spec,
            offered=not self.waits,
            energy=self.energy,
            classes=self.classes,
            confirmed=self.tells or (self.on_counts is not None and not self.gather),
        )
        if self.tells:
            self._offered = np.full(self.span.chunks, not self.waits)
        if self.tells or self.on_counts is not None or self.classes is not None:
            self._sending.done.add_done_callback(self._on_final)

    def ready(self, low: int, high: int) -> None:
        assert self._sending is not None
        if self._awaited:
            self._awaited -= high - low
            if self._awaited:
                return
            low, high = self.span.low, self.span.high
        self._offer(low - self.span.low, high - self.span.low)
        if self._offered is not None:
            self._offered[low - self.span.low : high - self.span.low] = True
            if self._final:
                self._settle(low, high)

    def ready_scattered(self, chunks: Chunks) -> None:
        assert self._sending is not None
        if self._awaited:
            self._awaited -= len(chunks) - 1  # the last of them is left for ``ready``
            self.ready(int(chunks[-1]), int(chunks[-1]) + 1)
            return
        which = chunks - np.uint32(self.span.low)
        if self._segments is None:
            self._sending.offer_scattered(which)
        else:
            for first, count in runs(which):
                self._offer(first, first + count)
        if self._offered is not None:
            self._offered[which] = True
            if self._final:
                for first, count in runs(chunks):
                    self._settle(first, first + count)

    def _offer(self, low: int, high: int) -> None:
        """These chunks of the message, or what of it they complete, may leave."""
        assert self._sending is not None
        spans = [(low, high - low)] if self._segments is None else self._segments.ready(low, high)
        for first, count in spans:
            self._sending.offer(first, count)

    def _on_final(self, done: asyncio.Future[Sent]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        if self.classes is not None:
            self.flow.starve(done.result().missing + np.uint32(self.span.low))
        if self.on_counts is not None and self._sending is not None:
            self.flow.guard(self.on_counts, *self._sending.counts)
        if self.tells:
            self.flow.guard(self._finalise, done.result())

    def _finalise(self, sent: Sent) -> None:
        assert self._offered is not None
        self._final = True
        if len(sent.missing):
            self._missing = np.zeros(self.span.chunks, np.bool_)
            self._missing[sent.missing] = True
        for low, high in true_runs(self._offered, self.span.low):
            self._settle(low, high)

    def _settle(self, low: int, high: int) -> None:
        if self._missing is not None:
            base = self.span.low
            for first, end in true_runs(self._missing[low - base : high - base], low):
                self.flow.keep_sent(Span(first, end), ranks=self.ranks)
        self.done(low, high)


class Segments:
    """Which segments of a message, a burst of chunks each, are complete. What leaves segment by segment leaves as whole bursts,
    without gaps where a chunk waits for its repair: gaps cost both ends a multiple, and grow from hop to hop."""

    __slots__ = ("_chunks", "_left", "_segment")

    def __init__(self, chunks: int, segment: int) -> None:
        self._chunks = chunks
        self._segment = segment
        self._left: dict[int, int] = {}  # what segments lack of which some chunks are there

    def ready(self, low: int, high: int) -> list[tuple[int, int]]:
        """These chunks are there: runs of chunks (first, count) whose segments are complete now."""
        segment = self._segment
        first, stop = -(-low // segment) * segment, high // segment * segment
        if high == self._chunks:
            stop = high
        if stop <= first:  # no segment comes whole
            index = low // segment
            border = (index + 1) * segment
            if high <= border:
                return self._run(index, index + 1) if self._completes(index, high - low) else []
            begins, ends = self._completes(index, border - low), self._completes(index + 1, high - border)
            return self._run(index + (not begins), index + 1 + ends) if begins or ends else []
        low_index, high_index = first // segment, -(-stop // segment)
        if low < first and self._completes(low_index - 1, first - low):
            low_index -= 1
        if stop < high and self._completes(high_index, high - stop):
            high_index += 1
        return self._run(low_index, high_index)

    def _completes(self, index: int, count: int) -> bool:
        """``count`` more chunks of this segment are there, and no more are missing."""
        size = min(self._segment, self._chunks - index * self._segment)
        left = self._left.pop(index, size) - count
        if left:
            self._left[index] = left
        return not left

    def _run(self, low: int, high: int) -> list[tuple[int, int]]:
        """Segments low..high as a run of chunks."""
        first = low * self._segment
        return [(first, min(high * self._segment, self._chunks) - first)]


class Stage(Node):
    """A receive: ``Add`` or ``Copy``. It is its message's sink."""

    pushed = False
    """It takes contributions, of which ``incast`` may let in a few peers at a time."""

    def __init__(self, flow: Flow, span: Span, peer: int, step: int, spec: MessageSpec) -> None:
        super().__init__(flow, span)
        self.peer = peer
        self.step = step
        self.spec = spec
        self.target = flow.elements(span)
        self.dtype: np.dtype[Any] = self.target.dtype
        self.waiting = 0  # chunks whose turn has not come
        self.weigh = False
        self.at_once = False  # only holes wait for their turn; what rows overwrite may still have to be kept
        self._came = 0.0  # energy
        self._ready: Bools | None = None
        self._staged: Bools | None = None
        self._holes: Bools | None = None
        self._stage: Array | None = None
        self.lay_out(flow.chunk)

    def lay_out(self, chunk: int) -> None:
        self.per_chunk = chunk // self.dtype.itemsize

    def wait(self, low: int, high: int) -> None:
        """Chunks low..high must not be touched before ``ready`` of them."""
        if self._ready is None:
            self._ready = np.ones(self.span.chunks, np.bool_)
        self._ready[low - self.span.low : high - self.span.low] = False
        self.waiting += high - low

    # --- the sink: chunk indices here are those of the message

    def place(self, first: int, rows: Array) -> None:
        count = rows.shape[0] if rows.ndim == 2 else rows.shape[0] * rows.shape[1]
        if self.weigh:
            self._came += energy(rows, self.flow.reducer.dtype)
        if self.waiting and not self._ready[first : first + count].all() and not self._go_ahead(first, count):  # type: ignore[index]
            stage, staged = self._take_stage()
            start = first * self.per_chunk
            stage[start : start + rows.size].reshape(rows.shape)[...] = rows
            staged[first : first + count] = True
        else:
            start = first * self.per_chunk
            self.apply(self.target[start : start + rows.size].reshape(rows.shape), rows)

    def scatter(self, chunks: npt.NDArray[np.uint32], rows: Array) -> None:
        """``place`` for whole chunks in any order."""
        if self.weigh:
            self._came += energy(rows, self.flow.reducer.dtype)
        if self.waiting and not self._ready[chunks].all() and not self._go_ahead_scattered(chunks):  # type: ignore[index]
            stage, staged = self._take_stage()
            whole_rows(stage, self.per_chunk)[chunks] = rows
            staged[chunks] = True
        else:
            self.apply_scattered(whole_rows(self.target, self.per_chunk), chunks, rows)

    def _go_ahead(self, first: int, count: int) -> bool:
        """Rows may come to these chunks before their turn; what stands there has been put aside if it may have to be kept."""
        if self.at_once:
            low = self.span.low + first
            self.flow.put_aside(low, low + count)
        return self.at_once

    def _go_ahead_scattered(self, chunks: Chunks) -> bool:
        """``_go_ahead`` for whole chunks in any order."""
        if self.at_once:
            self.flow.put_aside_scattered(chunks + np.uint32(self.span.low))
        return self.at_once

    def on_chunks(self, first: int, count: int) -> None:
        if self._staged is None:
            self._done(first, first + count)
            return
        for low, high in true_runs(~self._staged[first : first + count], first):
            self._done(low, high)
        self._settle(first, first + count)

    def on_scattered(self, chunks: Chunks) -> None:
        """``on_chunks`` for chunks with gaps."""
        if self._staged is None:
            self._done_scattered(chunks)
            return
        staged = self._staged[chunks]
        self._done_scattered(chunks[~staged])
        self._settle_scattered(chunks[staged])

    def on_done(self, received: Received) -> None:
        self.flow.ended(self, received)
        if len(received.missing):
            _, staged = self._take_stage()
            self._holes = np.zeros(self.span.chunks, np.bool_)
            self._holes[received.missing] = True
            staged[received.missing] = True
            self._settle_scattered(received.missing)

    def energies(self, received: Received) -> tuple[float, float]:
        """Sum of squares of the whole message, as its sender told it, and of what came of it; only if ``weigh`` is set."""
        return received.energy_total, self._came

    def ready(self, low: int, high: int) -> None:
        assert self._ready is not None
        low, high = low - self.span.low, high - self.span.low
        self._ready[low:high] = True
        self.waiting -= high - low
        if self._staged is not None:
            self._settle(low, high)

    def ready_scattered(self, chunks: Chunks) -> None:
        assert self._ready is not None
        which = chunks - np.uint32(self.span.low)
        self._ready[which] = True
        self.waiting -= len(which)
        if self._staged is not None:
            self._settle_scattered(which)

    def _settle_scattered(self, chunks: Chunks) -> None:
        """``_settle`` for chunks with gaps."""
        assert self._staged is not None
        due = self._staged[chunks]
        if self.waiting:
            assert self._ready is not None
            due = due & self._ready[chunks]
        chunks = chunks[due]
        self._staged[chunks] = False
        if self._holes is None:
            self._apply_scattered(chunks)
        else:
            holes = self._holes[chunks]
            self._apply_scattered(chunks[~holes])
            for first, count in runs(chunks[holes]):
                self.skip(first, first + count)
        self._done_scattered(chunks)

    def _apply_scattered(self, chunks: Chunks) -> None:
        assert self._stage is not None
        whole, staged = whole_rows(self.target, self.per_chunk), whole_rows(self._stage, self.per_chunk)
        if len(chunks) and int(chunks[-1]) >= len(whole):  # the short last one
            self._apply_staged(len(whole), len(whole) + 1)
            chunks = chunks[:-1]
        if len(chunks):
            self.apply_scattered(whole, chunks, staged[chunks])

    def _done_scattered(self, chunks: Chunks) -> None:
        if len(chunks):
            self.done_scattered(chunks + np.uint32(self.span.low))
            self.flow.count(len(chunks))

    def _settle(self, low: int, high: int) -> None:
        """Apply what is both staged and ready of these chunks."""
        assert self._staged is not None and self._stage is not None
        due = self._staged[low:high]
        if self.waiting:
            assert self._ready is not None
            due = due & self._ready[low:high]
        if not due.all():
            self._settle_scattered(np.flatnonzero(due).astype(np.uint32) + np.uint32(low))
            return
        for first, end in true_runs(due, low):
            self._staged[first:end] = False
            if self._holes is None:
                self._apply_staged(first, end)
            else:
                self._apply_with_holes(first, end, self._holes)
            self._done(first, end)

    def _done(self, low: int, high: int) -> None:
        self.done(low + self.span.low, high + self.span.low)
        self.flow.count(high - low)

    def _apply_with_holes(self, low: int, high: int, holes: Bools) -> None:
        for first, end in true_runs(~holes[low:high], low):
            self._apply_staged(first, end)
        for first, end in true_runs(holes[low:high], low):
            self.skip(first, end)

    def _apply_staged(self, low: int, high: int) -> None:
        assert self._stage is not None
        self.apply(self._part(self.target, low, high), self._part(self._stage, low, high))

    def _part(self, array: Array, low: int, high: int) -> Array:
        return array[low * self.per_chunk : high * self.per_chunk]

    def _take_stage(self) -> tuple[Array, Bools]:
        if self._stage is None or self._staged is None:
            self._stage = self.flow.round.stage(self.target.nbytes).view(self.dtype)
            self._staged = np.zeros(self.span.chunks, np.bool_)
        return self._stage, self._staged

    def apply(self, target: Array, rows: Array) -> None:
        """Bring rows to their place; equal shapes."""
        raise NotImplementedError

    def apply_scattered(self, whole: Array, chunks: Chunks, rows: Array) -> None:
        """Bring rows to the chunks of ``whole`` (all whole chunks, elements a chunk) that they belong to."""
        target = whole[chunks]
        self.apply(target, rows)
        whole[chunks] = target

    def skip(self, low: int, high: int) -> None:
        """These chunks are holes."""
        raise NotImplementedError


class Add(Stage):
    """Adds what a peer sends. ``final``: nothing more is added, so averages are divided here. ``fresh``: the first
    contribution, which replaces what stands there."""

    pushed = True

    def __init__(self, *place: Any, final: bool, fresh: bool) -> None:
        super().__init__(*place)
        self.final = final
        self._fresh = fresh

    def apply(self, target: Array, rows: Array) -> None:
        if self._fresh:
            target[...] = rows
            if self.final:
                self.flow.reducer.finish(target)
        else:
            self.flow.reducer.accumulate(target, rows, final=self.final)

    def skip(self, low: int, high: int) -> None:
        target = self._part(self.target, low, high)
        if self._fresh:
            target[...] = 0
        elif self.final:
            self.flow.reducer.finish(target)


class Copy(Stage):
    """Takes over a peer's result."""

    def lay_out(self, chunk: int) -> None:
        self.target = words(self.target, self.target.nbytes)
        self.dtype = self.target.dtype
        super().lay_out(chunk)

    def apply(self, target: Array, rows: Array) -> None:
        target[...] = rows

    def apply_scattered(self, whole: Array, chunks: Chunks, rows: Array) -> None:
        whole[chunks] = rows

    def skip(self, low: int, high: int) -> None:
        if self.flow.policy.fill is not Fill.PREVIOUS:
            self._part(self.target, low, high)[...] = 0
        self.flow.holes[low + self.span.low : high + self.span.low] = True


def true_runs(flags: Bools, base: int) -> list[tuple[int, int]]:
    """Runs of true flags as (low, high), counted from ``base``."""
    if flags.all():
        return [(base, base + len(flags))] if len(flags) else []
    return [
        (base + first, base + first + count) for first, count in runs(np.flatnonzero(flags).astype(np.uint32))
    ]
