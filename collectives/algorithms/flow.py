"""Flows: all-reduces of several hops, declared hop by hop and pipelined by runs of chunks.

Theory of operation. An algorithm declares, in the order of its program, what a rank does with ranges of the buffer's chunks:
``send`` what stands there, ``add`` what a peer sends, ``copy`` a peer's result over it. The flow posts all messages at once and
keeps each chunk to that order: a chunk is offered to a send when the stages (adds and copies) declared before are done with
it; rows that come too early for their stage are staged in memory of their own, at most the size of the message, taken when
first needed. So sums have the order of the program, whatever the order of arrival, and every hop is pipelined.

``fold`` is ``add`` for all peers at once, in rank order (the direct exchange).

Under a bound. A hole (a chunk that a hop may miss) is known when its message has ended. In the reduce leg, what stands there
goes on without the peer's partial sum, which its sender keeps (``Keep``): nothing else knows it. In the gather leg a hole is
filled with zeros and goes on as zeros: it can't be mended downstream. Under ``Consistency.AGREED`` every rank at last tells the
chunks that it missed itself, all learn the union (``union``), and fill it alike; the rank that made the result keeps it.

In place. A result overwrites, in the gather leg, the partial sum that was sent away from the same memory. In an exact round
it may: the result exists only after the receiver has placed that sum, and it drops further copies. In a lossy round it waits,
staged, until the send's FINAL has told which of the sums were counted, so that the others can be kept. Where the result comes
from the rank that made it, it need not wait: that rank has placed the contribution, or ended its message without it, before
the result could leave. What may have to be kept is put aside then, which costs less than to stage the result. A hole must wait
there too: that a result is given up says nothing of the contribution, whose sender might repeat the fill in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.algorithms.fold import Fold, Part
from dblp.collectives.algorithms.grid import chunk_bytes
from dblp.collectives.algorithms.hops import Add, Array, Copy, Keep, Node, Outlet, Span, Stage, true_runs
from dblp.collectives.algorithms.incast import Incast, Turns, Watch
from dblp.collectives.algorithms.sinks import CopySink, whole_rows
from dblp.collectives.algorithms.union import Union
from dblp.collectives.priority import Tagger
from dblp.collectives.reduction import Reducer, energy
from dblp.collectives.round import Round
from dblp.transport.config import CHUNK_ALIGN_BYTES
from dblp.transport.message import MessageSpec, Received
from dblp.transport.policy import Bounded, Consistency, Policy, Short, Tags

_FINE = Bounded(0.5)
"""Grids are those of bounded rounds, also in exact ones: where the order of a sum depends on its shard, exact and bounded
rounds have the same bits only if their shards are cut alike."""
_UNION_STEP = 1 << 12
"""First step of the union's messages, behind those of any algorithm."""


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
        tell_step: int = 0,
    ) -> None:
        """``shards``: parts of the buffer that the smallest messages carry; ``reduce_hops``, ``gather_hops``: what the legs'
        budgets are divided by. Under ``AGREED`` the gather budget is divided by the copies that are made of each result,
        world_size - 1, because it holds for the union of their holes. ``tell_step``: a step in which senders of the reduce leg
        tell what they had to repeat, and the receiver lets in as many at once as that suggests (``incast``); 0: none."""
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
        self._tell_step = tell_step
        self._turns = Turns(round_.incast.limit if tell_step and round_.incast else round_.world_size)
        self._last: list[tuple[Span, Node]] = []  # the stage that each chunk has passed last
        self._sends: list[Outlet] = []  # those of the reduce leg
        self._outlets: list[tuple[Outlet, list[Span]]] = []
        self._stages: list[Stage | Part] = []
        self._owned: list[Span] = []
        self._left = 0
        self._union: Union | None = None
        self._missing: dict[int, npt.NDArray[np.uint32]] = {}
        self._weighed, self._weighed_chunks = 0.0, 0  # contributions whose energy is known
        self._short = False  # a message was given up below its bound
        self._aside: Array | None = None  # contributions that results have overwritten, each at its place
        self._saved = np.zeros(self.all.chunks if keep is not None else 0, np.bool_)  # which
        self._tagger = self._make_tagger()

    # --- declaring

    def send(
        self,
        peer: int,
        step: int,
        span: Span,
        *,
        gather: bool = False,
        weigh: bool = False,
        ranks: int = 1,
        whole: bool = False,
    ) -> None:
        """Send what stands in ``span`` after the stages declared so far; ``weigh``: tell its energy, which is known now;
        ``ranks``: how many ranks' contributions are in it; ``whole``: nothing of it before all of it has passed those stages."""
        if not span.chunks:
            return
        spec = self._spec(span, self.gather_budget if gather else self.reduce_budget)
        before = _overlaps(self._last, span)
        outlet = Outlet(
            self, span, peer, step, spec, waits=bool(before), gather=gather, ranks=ranks, whole=whole
        )
        if self._tagger is not None and spec.budget:
            outlet.classes = self._tagger.classes(span.low, span.high)
        if weigh and self.policy.lossy:
            outlet.energy = self._energy(span)
        for common, stage in before:
            stage.followers.append((common.low, common.high, outlet))
        self._outlets.append((outlet, _rest(span, [common for common, _ in before])))
        if not gather:
            self._sends.append(outlet)

    def add(
        self,
        peer: int,
        step: int,
        span: Span,
        *,
        final: bool = False,
        fresh: bool = False,
        weigh: bool = False,
    ) -> None:
        """Add what ``peer`` sends of ``span``; ``final``: the sum is complete then, and this rank owns it; ``fresh``: this rank
        contributes nothing, the peer's part takes the place of what stands there; ``weigh``: the peer tells its energy."""
        if not span.chunks:
            return
        spec = self._spec(span, self.reduce_budget)
        stage = Add(self, span, peer, step, spec, final=final, fresh=fresh)
        stage.weigh = weigh and stage.spec.budget > 0.0
        for common, before in _overlaps(self._last, span):
            stage.wait(common.low, common.high)
            before.followers.append((common.low, common.high, stage))
        self._enter(stage, [stage])
        if final:
            self._owned.append(span)

    def fold(self, step: int, span: Span) -> None:
        """Reduce what all peers send of ``span`` with what stands there, in rank order; the sum is complete then, and this rank
        owns it. Nothing may have been declared for the span before."""
        if not span.chunks:
            return
        node = Fold(self, span)
        self._enter(node, node.receives(step, self._spec(span, self.reduce_budget)))
        self._owned.append(span)

    def copy(self, peer: int, step: int, span: Span, *, made: bool = False) -> None:
        """Take over the result that ``peer`` sends of ``span``; ``made``: it comes from the rank that makes it, to which this
        rank's contribution goes in one hop."""
        if not span.chunks:
            return
        stage = Copy(self, span, peer, step, self._spec(span, self.gather_budget))
        # A receiver that stops early may have closed what was sent from here before it was added up, or a result before its
        # sum: then late rows, or a fill, would meet what does not belong to them.
        early = self.policy.lossy and (self.gather_budget > 0.0 or bool(_overlaps(self._last, span)))
        if early or (self.policy.lossy and self._keep is not None):
            for outlet in self._sends:
                low, high = max(span.low, outlet.span.low), min(span.high, outlet.span.high)
                if low < high:
                    outlet.tells = True
                    outlet.followers.append((low, high, stage))
                    stage.wait(low, high)
        stage.at_once = made and not _overlaps(self._last, span)
        self._enter(stage, [stage])

    def post(self) -> None:
        """Post all messages; the round is done when its receives have ended."""
        self._post_union()
        if self._tell_step:
            self._post_tells()
            for outlet in self._sends:
                outlet.on_counts = self._teller(outlet.peer)
        for outlet, _ in self._outlets:
            outlet.post()
        for outlet, free in self._outlets:
            for span in free if outlet.waits else ():
                outlet.ready(span.low, span.high)
        for stage in self._stages:
            self._receive(stage)
        # Nodes know the flow: without this, cycles would keep the caller's memory for the garbage collector.
        del self._outlets, self._stages, self._sends, self._last

    def _receive(self, stage: Stage | Part) -> None:
        window = self._turns.window() if stage.pushed else 0
        release = self.round.receive(
            stage.peer,
            stage.step,
            stage.spec,
            stage,
            on_chunks=stage.on_chunks,
            on_scattered=stage.on_scattered,
            on_done=stage.on_done,
            window=window,
        )
        if window:
            self._turns.wait(functools.partial(release, stage.span.chunks))

    def _teller(self, peer: int) -> Callable[[int, int], None]:
        """What tells ``peer`` how many chunks were sent to it first and again."""
        counts = np.zeros(2, np.uint32)
        message = MessageSpec(nbytes=counts.nbytes, chunk_bytes=CHUNK_ALIGN_BYTES)
        sending = self.round.send(peer, self._tell_step, counts, message, offered=False)

        def tell(sent: int, resent: int) -> None:
            counts[:] = sent, resent
            sending.offer(0, 1)

        return tell

    def _post_tells(self) -> None:
        """Receive what the peers tell, and watch when the results have arrived."""
        peers = [stage.peer for stage in self._stages if stage.pushed]
        if not peers:
            return
        incast = self.round.incast or Incast(len(peers))
        results = [outlet for outlet, _ in self._outlets if outlet.gather]
        watch = Watch(incast, len(peers) + len(results), self.round.endpoint.time)
        message = MessageSpec(nbytes=8, chunk_bytes=CHUNK_ALIGN_BYTES)
        for peer in peers:
            counts = np.zeros(2, np.uint32)

            def on_done(_: Received, counts: Array = counts) -> None:
                watch.event(int(counts[0]), int(counts[1]))

            sink = CopySink(counts, CHUNK_ALIGN_BYTES)
            self.round.receive(peer, self._tell_step, message, sink, on_done=on_done)
        for outlet in results:
            outlet.on_counts = lambda sent, resent: watch.event()

    def _post_union(self) -> None:
        holes = self.policy.consistency is Consistency.AGREED and int(self.gather_budget * self.all.chunks)
        if holes or self.policy.short is Short.SKIP:
            self._union = Union(self.round, 1 + -(-self.all.chunks // 8), _UNION_STEP, self._fill)

    # --- what nodes need

    def elements(self, span: Span) -> Array:
        """The elements of ``span``, a view."""
        return self.buffer[span.low * self.per_chunk : span.high * self.per_chunk]

    def guard(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call what the endpoint's loop called: its errors are the round's, while there is one."""
        if self.round.error is not None:
            return
        try:
            call(*arguments)
        except Exception as error:
            self.round.fail(error)

    def keep_span(self, span: Span, *, divisor: int = 1, ranks: int) -> None:
        """What stands in ``span`` is in no result (see ``Keep``)."""
        if self._keep is not None:
            self._keep(span.low * self.per_chunk, self.elements(span), divisor=divisor, ranks=ranks)

    def keep_sent(self, span: Span, *, ranks: int) -> None:
        """What was sent from ``span`` was not counted. A result may have overwritten it."""
        saved = self._saved[span.low : span.high]
        if self._keep is None or self._aside is None or not saved.any():
            self.keep_span(span, ranks=ranks)
            return
        for low, high in true_runs(~saved, span.low):
            self.keep_span(Span(low, high), ranks=ranks)
        for low, high in true_runs(saved, span.low):
            self._keep(
                low * self.per_chunk, self._aside[low * self.per_chunk : high * self.per_chunk], ranks=ranks
            )

    def put_aside(self, low: int, high: int) -> None:
        """Results are about to overwrite these chunks, of which it is not known whether they were counted."""
        if self._keep is not None:
            place = slice(low * self.per_chunk, high * self.per_chunk)
            self._take_aside()[place] = self.buffer[place]
            self._saved[low:high] = True

    def put_aside_scattered(self, chunks: npt.NDArray[np.uint32]) -> None:
        """``put_aside`` for whole chunks in any order."""
        if self._keep is not None:
            aside = whole_rows(self._take_aside(), self.per_chunk)
            aside[chunks] = whole_rows(self.buffer, self.per_chunk)[chunks]
            self._saved[chunks] = True

    def _take_aside(self) -> Array:
        if self._aside is None:
            self._aside = self.round.stage(self.buffer.nbytes).view(self.buffer.dtype)
        return self._aside

    def starve(self, missing: npt.NDArray[np.uint32]) -> None:
        """A receiver of these chunks has told that it did not count them."""
        if self._tagger is not None:
            self._tagger.missed(missing)

    def ended(self, stage: Stage | Part, received: Received) -> None:
        """A message has ended."""
        if stage.pushed:
            self._turns.next()
        if len(received.missing) > stage.spec.may_miss:
            self._short = True
        if stage.spec.budget:
            self._note(stage, received)

    def _note(self, stage: Stage | Part, received: Received) -> None:
        """How a bounded message ended. Its holes are reported in the buffer's grid. What a partial sum or a result would have
        weighed is known to nobody in time, so a chunk of one stands for a mean one."""
        before = self._missing.get(stage.peer, _NONE)
        self._missing[stage.peer] = np.sort(
            np.concatenate([before, received.missing + np.uint32(stage.span.low)])
        )
        chunks = stage.span.chunks
        if stage.weigh:
            total, came = stage.energies(received)
            self._weighed += total
            self._weighed_chunks += chunks
        else:
            mean = self._weighed / self._weighed_chunks if self._weighed_chunks else 1.0
            total, came = mean * chunks, mean * (chunks - len(received.missing))
        told = Received(missing=self._missing[stage.peer], energy_total=total)
        self.round.lost(stage.peer, stage.spec, told, came)

    def count(self, chunks: int) -> None:
        """So many more chunks of a stage are settled; with the last of all, this rank knows its holes."""
        self._left -= chunks
        if self._left == 0 and self.policy.consistency is Consistency.RELAXED:
            self.round.filled_chunks += int(self.holes.sum())
        if self._left == 0 and self._union is not None:
            union, self._union = self._union, None
            holes = self.holes if self.policy.consistency is Consistency.AGREED else np.zeros_like(self.holes)
            union.start(np.append(np.uint8(self._short), np.packbits(holes)))

    # --- helpers

    def _make_tagger(self) -> Tagger | None:
        round_, policy = self.round, self.policy
        if policy.tags is Tags.NONE or not policy.lossy:
            return None
        seed = (round_.endpoint.config.seed, round_.number.round, round_.rank)
        return Tagger(self.buffer, self.reducer.dtype, self.per_chunk, policy, round_.priority, seed)

    def _energy(self, span: Span) -> float:
        """Of what stands in ``span`` now: the rank's own contribution."""
        if self._tagger is not None:
            return self._tagger.energy(span.low, span.high)
        return energy(self.elements(span), self.reducer.dtype)

    def _spec(self, span: Span, budget: float) -> MessageSpec:
        nbytes = self.elements(span).nbytes
        if budget == 0.0:
            return MessageSpec(nbytes=nbytes, chunk_bytes=self.chunk)
        return MessageSpec(
            nbytes=nbytes,
            chunk_bytes=self.chunk,
            budget=budget,
            stop=self.policy.message_stop,
            stop_after_s=self.policy.stop_after_s,
        )

    def _enter(self, node: Node, receives: Sequence[Stage | Part]) -> None:
        """From here on, the chunks of the node's span have passed it last."""
        kept = [(part, before) for span, before in self._last for part in _rest(span, [node.span])]
        self._last = [*kept, (node.span, node)]
        self._stages += receives
        self._left += node.span.chunks

    def _fill(self, bits: npt.NDArray[np.uint8]) -> None:
        """The union of all ranks' holes is known, and whether a message was given up on any: all fill it alike."""
        if bits[0]:
            self.round.skipped = True
            missing = np.ones(self.all.chunks, np.bool_)
        else:
            missing = np.unpackbits(bits[1:], count=self.all.chunks).view(np.bool_)
            self.round.filled_chunks += int(missing.sum())
        for low, high in true_runs(missing, 0):
            for own in self._owned:
                part = Span(max(low, own.low), min(high, own.high))
                if part.chunks > 0:
                    self.keep_span(part, divisor=self.reducer.divisor, ranks=self.round.world_size)
            self.elements(Span(low, high))[...] = 0


_NONE = np.empty(0, np.uint32)


def _overlaps(stages: list[tuple[Span, Node]], span: Span) -> list[tuple[Span, Node]]:
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
