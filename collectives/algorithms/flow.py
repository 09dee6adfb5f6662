"""Flows: all-reduces of several hops, declared hop by hop and pipelined by runs of chunks.

Theory of operation. An algorithm declares, in the order of its program, what a rank does with ranges of the buffer's chunks:
``send`` what stands there, ``add`` what a peer sends, ``copy`` a peer's result over it. The flow posts all messages at once and
keeps each chunk to that order: a chunk is offered to a send when the stages (adds and copies) declared before are done with
it; rows that come too early for their stage are staged in memory of their own, at most the size of the message, taken when
first needed. So sums have the order of the program, whatever the order of arrival, and every hop is pipelined.

Under a bound. A hole (a chunk that a hop may miss) is known when its message has ended. In the reduce leg, what stands there
goes on without the peer's partial sum, which its sender keeps (``Keep``): nothing else knows it. In the gather leg a hole is
filled with zeros and goes on as zeros: it can't be mended downstream. Under ``Consistency.AGREED`` every rank at last tells the
chunks that it missed itself, all learn the union (``union``), and fill it alike; the rank that made the result keeps it.

In place. A result overwrites, in the gather leg, the partial sum that was sent away from the same memory. In an exact round
it may: the result exists only after the receiver has placed that sum, and it drops further copies. In a lossy round it waits,
staged, until the send's FINAL has told which of the sums were counted, so that the others can be kept.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dblp.collectives.algorithms.grid import chunk_bytes, runs
from dblp.collectives.algorithms.sinks import whole_rows, words
from dblp.collectives.algorithms.union import Union
from dblp.collectives.reduction import Reducer
from dblp.collectives.round import Round
from dblp.transport.interface import Sending
from dblp.transport.message import MessageSpec, Received, Sent
from dblp.transport.policy import Bounded, Consistency, Policy

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

_FINE = Bounded(0.5)
"""Grids are those of bounded rounds, also in exact ones: where the order of a sum depends on its shard, exact and bounded
rounds have the same bits only if their shards are cut alike."""
_UNION_STEP = 1 << 12
"""First step of the union's messages, behind those of any algorithm."""


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

    def __call__(self, first: int, values: Array, *, divided: bool) -> None:
        """``values`` (1-D, valid during the call) of the elements from ``first`` on are not in the result; ``divided``: they are
        an average already."""


class _Follower(Protocol):
    def ready(self, low: int, high: int) -> None: ...


class _Node:
    """Something that gets done with its chunks, and tells those that wait for it."""

    def __init__(self, flow: Flow, span: Span) -> None:
        self.flow = flow
        self.span = span
        self.followers: list[tuple[int, int, _Follower]] = []

    def done(self, low: int, high: int) -> None:
        for first, end, follower in self.followers:
            first, end = max(first, low), min(end, high)
            if first < end:
                follower.ready(first, end)


class _Outlet(_Node):
    """A send. In the reduce leg of a lossy round it is done with a chunk when that was offered and FINAL has come."""

    def __init__(self, flow: Flow, span: Span, peer: int, step: int, spec: MessageSpec, waits: bool) -> None:
        super().__init__(flow, span)
        self.peer = peer
        self.step = step
        self.spec = spec
        self.waits = waits
        self.tells = False
        self._offered: Bools | None = None
        self._missing: Bools | None = None
        self._final = False
        self._sending: Sending | None = None

    def post(self) -> None:
        flow = self.flow
        data = flow.elements(self.span)
        self._sending = flow.round.send(
            self.peer, self.step, data, self.spec, offered=not self.waits, confirmed=self.tells
        )
        if self.tells:
            self._offered = np.full(self.span.chunks, not self.waits)
            self._sending.done.add_done_callback(self._on_final)

    def ready(self, low: int, high: int) -> None:
        assert self._sending is not None
        self._sending.offer(low - self.span.low, high - low)
        if self._offered is not None:
            self._offered[low - self.span.low : high - self.span.low] = True
            if self._final:
                self._settle(low, high)

    def _on_final(self, done: asyncio.Future[Sent]) -> None:
        if done.cancelled() or done.exception() is not None or self.flow.round.ended:
            return
        self.flow.guard(self._finalise, done.result())

    def _finalise(self, sent: Sent) -> None:
        assert self._offered is not None
        self._final = True
        if len(sent.missing):
            self._missing = np.zeros(self.span.chunks, np.bool_)
            self._missing[sent.missing] = True
        for low, high in _true_runs(self._offered, self.span.low):
            self._settle(low, high)

    def _settle(self, low: int, high: int) -> None:
        if self._missing is not None:
            base = self.span.low
            for first, end in _true_runs(self._missing[low - base : high - base], low):
                self.flow.keep_span(Span(first, end), divided=False)
        self.done(low, high)


class _Stage(_Node):
    """A receive: ``_Add`` or ``_Copy``. It is its message's sink."""

    def __init__(self, flow: Flow, span: Span, peer: int, step: int, spec: MessageSpec) -> None:
        super().__init__(flow, span)
        self.peer = peer
        self.step = step
        self.spec = spec
        self.target = flow.elements(span)
        self.dtype: np.dtype[Any] = self.target.dtype
        self.waiting = 0  # chunks whose turn has not come
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
        if self.waiting and not self._ready[first : first + count].all():  # type: ignore[index]
            stage, staged = self._take_stage()
            start = first * self.per_chunk
            stage[start : start + rows.size].reshape(rows.shape)[...] = rows
            staged[first : first + count] = True
        else:
            start = first * self.per_chunk
            self.apply(self.target[start : start + rows.size].reshape(rows.shape), rows)

    def scatter(self, chunks: npt.NDArray[np.uint32], rows: Array) -> None:
        """``place`` for whole chunks in any order."""
        if self.waiting and not self._ready[chunks].all():  # type: ignore[index]
            stage, staged = self._take_stage()
            whole_rows(stage, self.per_chunk)[chunks] = rows
            staged[chunks] = True
        else:
            whole = whole_rows(self.target, self.per_chunk)
            target = whole[chunks]
            self.apply(target, rows)
            whole[chunks] = target

    def on_chunks(self, first: int, count: int) -> None:
        if self._staged is None:
            self._done(first, first + count)
            return
        for low, high in _true_runs(~self._staged[first : first + count], first):
            self._done(low, high)
        self._settle(first, first + count)

    def on_done(self, received: Received) -> None:
        if self.spec.budget:
            self.flow.note(self, received)
        if len(received.missing):
            _, staged = self._take_stage()
            self._holes = np.zeros(self.span.chunks, np.bool_)
            self._holes[received.missing] = True
            staged[received.missing] = True
            for first, count in runs(received.missing):
                self._settle(first, first + count)

    def ready(self, low: int, high: int) -> None:
        assert self._ready is not None
        low, high = low - self.span.low, high - self.span.low
        self._ready[low:high] = True
        self.waiting -= high - low
        if self._staged is not None:
            self._settle(low, high)

    def _settle(self, low: int, high: int) -> None:
        """Apply what is both staged and ready of these chunks."""
        assert self._staged is not None and self._stage is not None
        due = self._staged[low:high]
        if self.waiting:
            assert self._ready is not None
            due = due & self._ready[low:high]
        for first, end in _true_runs(due, low):
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
        for first, end in _true_runs(~holes[low:high], low):
            self._apply_staged(first, end)
        for first, end in _true_runs(holes[low:high], low):
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

    def skip(self, low: int, high: int) -> None:
        """These chunks are holes."""
        raise NotImplementedError


class _Add(_Stage):
    """Adds what a peer sends. ``final``: nothing more is added, so averages are divided here. ``fresh``: the first
    contribution, which replaces what stands there."""

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


class _Copy(_Stage):
    """Takes over a peer's result."""

    def lay_out(self, chunk: int) -> None:
        self.target = words(self.target, self.target.nbytes)
        self.dtype = self.target.dtype
        super().lay_out(chunk)

    def apply(self, target: Array, rows: Array) -> None:
        target[...] = rows

    def skip(self, low: int, high: int) -> None:
        self._part(self.target, low, high)[...] = 0
        self.flow.holes[low + self.span.low : high + self.span.low] = True


class Flow:
    """One rank's part in an all-reduce of the 1-D ``buffer``, in place."""

    def __init__(
        self,
        round_: Round,
        buffer: Array,
        reducer: Reducer,
        policy: Policy,
        *,
        shards: int,
        reduce_hops: int,
        gather_hops: int,
        keep: Keep | None = None,
    ) -> None:
        """``shards``: parts of the buffer that the smallest messages carry; ``reduce_hops``, ``gather_hops``: what the legs'
        budgets are divided by. Under ``AGREED`` the gather budget is divided by the copies that are made of each result,
        world_size - 1, because it holds for the union of their holes."""
        self.round = round_
        self.buffer = buffer
        self.reducer = reducer
        self.policy = policy
        self.chunk = chunk_bytes(-(-buffer.nbytes // shards), round_.endpoint.max_chunk_bytes, _FINE)
        self.per_chunk = self.chunk // buffer.itemsize
        self.all = Span(0, -(-buffer.size // self.per_chunk))
        self.reduce_budget = policy.reduce_leg_budget / reduce_hops
        copies = round_.world_size - 1 if policy.consistency is Consistency.AGREED else gather_hops
        self.gather_budget = policy.gather_leg_budget / copies
        self.holes = np.zeros(self.all.chunks, np.bool_)
        self._keep = keep
        self._last: list[tuple[Span, _Stage]] = []  # the stage that each chunk has passed last
        self._sends: list[_Outlet] = []  # those of the reduce leg
        self._outlets: list[tuple[_Outlet, list[Span]]] = []
        self._stages: list[_Stage] = []
        self._owned: list[Span] = []
        self._left = 0
        self._union: Union | None = None
        self._missing: dict[int, npt.NDArray[np.uint32]] = {}

    # --- declaring

    def send(self, peer: int, step: int, span: Span, *, gather: bool = False) -> None:
        """Send what stands in ``span`` after the stages declared so far."""
        if not span.chunks:
            return
        spec = self._spec(span, self.gather_budget if gather else self.reduce_budget)
        before = _overlaps(self._last, span)
        outlet = _Outlet(self, span, peer, step, spec, waits=bool(before))
        for common, stage in before:
            stage.followers.append((common.low, common.high, outlet))
        self._outlets.append((outlet, _rest(span, [common for common, _ in before])))
        if not gather:
            self._sends.append(outlet)

    def add(self, peer: int, step: int, span: Span, *, final: bool = False, fresh: bool = False) -> None:
        """Add what ``peer`` sends of ``span``; ``final``: the sum is complete then, and this rank owns it; ``fresh``: this rank
        contributes nothing, the peer's part takes the place of what stands there."""
        if not span.chunks:
            return
        spec = self._spec(span, self.reduce_budget)
        stage = _Add(self, span, peer, step, spec, final=final, fresh=fresh)
        for common, before in _overlaps(self._last, span):
            stage.wait(common.low, common.high)
            before.followers.append((common.low, common.high, stage))
        self._enter(stage)
        if final:
            self._owned.append(span)

    def copy(self, peer: int, step: int, span: Span) -> None:
        """Take over the result that ``peer`` sends of ``span``."""
        if not span.chunks:
            return
        stage = _Copy(self, span, peer, step, self._spec(span, self.gather_budget))
        if self.policy.lossy:
            for outlet in self._sends:
                low, high = max(span.low, outlet.span.low), min(span.high, outlet.span.high)
                if low < high:
                    outlet.tells = True
                    outlet.followers.append((low, high, stage))
                    stage.wait(low, high)
        self._enter(stage)

    def post(self) -> None:
        """Post all messages; the round is done when its receives have ended."""
        self._post_union()
        for outlet, _ in self._outlets:
            outlet.post()
        for outlet, free in self._outlets:
            for span in free if outlet.waits else ():
                outlet.ready(span.low, span.high)
        for stage in self._stages:
            self._receive(stage)
        # Nodes know the flow: without this, cycles would keep the caller's memory for the garbage collector.
        del self._outlets, self._stages, self._sends, self._last

    def _receive(self, stage: _Stage) -> None:
        self.round.receive(
            stage.peer, stage.step, stage.spec, stage, on_chunks=stage.on_chunks, on_done=stage.on_done
        )

    def _post_union(self) -> None:
        if self.policy.consistency is Consistency.AGREED and int(self.gather_budget * self.all.chunks):
            self._union = Union(self.round, -(-self.all.chunks // 8), _UNION_STEP, self._fill)

    # --- what nodes need

    def elements(self, span: Span) -> Array:
        """The elements of ``span``, a view."""
        return self.buffer[span.low * self.per_chunk : span.high * self.per_chunk]

    def guard(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call what the endpoint's loop called: its errors are the round's."""
        try:
            call(*arguments)
        except Exception as error:
            self.round.fail(error)

    def keep_span(self, span: Span, *, divided: bool) -> None:
        """What stands in ``span`` is in no result."""
        if self._keep is not None:
            self._keep(span.low * self.per_chunk, self.elements(span), divided=divided)

    def note(self, stage: _Stage, received: Received) -> None:
        """How a bounded message ended. Its holes are reported in the buffer's grid, once a leg; what a partial sum would have weighed is
        known to nobody in time, so the share of its chunks stands for that of its energy."""
        before = self._missing.get(stage.peer, _NONE)
        holes = received.missing + np.uint32(stage.span.low)
        self._missing[stage.peer] = np.sort(np.concatenate([before, holes]))
        chunks = float(stage.span.chunks)
        told = Received(missing=self._missing[stage.peer], energy_total=chunks)
        self.round.lost(stage.peer, stage.spec, told, chunks - len(holes))

    def count(self, chunks: int) -> None:
        """So many more chunks of a stage are settled; with the last of all, this rank knows its holes."""
        self._left -= chunks
        if self._left == 0 and self._union is not None:
            union, self._union = self._union, None
            union.start(np.packbits(self.holes))

    # --- helpers

    def _spec(self, span: Span, budget: float) -> MessageSpec:
        nbytes = self.elements(span).nbytes
        if budget == 0.0:
            return MessageSpec(nbytes=nbytes, chunk_bytes=self.chunk)
        return MessageSpec(
            nbytes=nbytes,
            chunk_bytes=self.chunk,
            budget=budget,
            stop=self.policy.stop,
            stop_after_s=self.policy.stop_after_s,
        )

    def _enter(self, stage: _Stage) -> None:
        """From here on, the chunks of the stage have passed it last."""
        kept = [(part, before) for span, before in self._last for part in _rest(span, [stage.span])]
        self._last = [*kept, (stage.span, stage)]
        self._stages.append(stage)
        self._left += stage.span.chunks

    def _fill(self, bits: npt.NDArray[np.uint8]) -> None:
        """The union of all ranks' holes is known: all fill it alike."""
        missing = np.unpackbits(bits, count=self.all.chunks).view(np.bool_)
        for low, high in _true_runs(missing, 0):
            for own in self._owned:
                part = Span(max(low, own.low), min(high, own.high))
                if part.chunks > 0:
                    self.keep_span(part, divided=self.reducer.divisor != 1)
            self.elements(Span(low, high))[...] = 0


_NONE = np.empty(0, np.uint32)


def _overlaps(stages: list[tuple[Span, _Stage]], span: Span) -> list[tuple[Span, _Stage]]:
    common = [(Span(max(part.low, span.low), min(part.high, span.high)), stage) for part, stage in stages]
    return [(part, stage) for part, stage in common if part.chunks > 0]


def _rest(span: Span, parts: list[Span]) -> list[Span]:
    """What of ``span`` lies in none of the ``parts``."""
    rest, low = [], span.low
    for part in sorted(parts):
        if low < part.low:
            rest.append(Span(low, min(part.low, span.high)))
        low = max(low, part.high)
    return [*rest, Span(low, span.high)] if low < span.high else rest


def _true_runs(flags: Bools, base: int) -> list[tuple[int, int]]:
    """Runs of true flags as (low, high), counted from ``base``."""
    return [
        (base + first, base + first + count) for first, count in runs(np.flatnonzero(flags).astype(np.uint32))
    ]
