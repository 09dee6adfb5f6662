"""Rounds: one collective call on this rank, from its announcement to its report.

An algorithm posts all receives and sends of its round in one go; from then on everything happens in the callbacks of received
chunks (``on_chunks``) and ended receives (``on_done``). The round only counts what is still out, watches the
deadline, and holds the first error. Ranks here are ranks in the group; the endpoint's ranks appear in errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.call import Call, describe
from dblp.collectives.carry import NOTHING
from dblp.collectives.deadline import Deadline, deadline_error, silent_peers
from dblp.collectives.numbering import RoundNumber
from dblp.collectives.recorder import Entry, MessageState, runs
from dblp.collectives.report import Report, energy_lost_share
from dblp.collectives.staging import StagePool
from dblp.errors import ClosedError
from dblp.transport.config import HEADER_BYTES
from dblp.transport.interface import EndpointLike, Sending
from dblp.transport.message import (
    MessageSpec,
    OnChunks,
    OnScattered,
    Received,
    RoundCounters,
    Sent,
    Sink,
    message_id,
    round_of,
)
from dblp.transport.port import Bytes
from dblp.transport.standing import Stand, Standing

if TYPE_CHECKING:
    from dblp.collectives.algorithms.incast import Incast
    from dblp.collectives.priority import Priority

OnDone = Callable[[Received], None]
"""``on_done(received)``: a receive has ended well; its holes are known."""


_NONE: npt.NDArray[np.integer[Any]] = np.empty(0, np.int64)


class _Leg:
    """One message of the round, and how far it is: what a deadline error tells about it."""

    __slots__ = (
        "chunks",
        "confirmed",
        "done",
        "got",
        "missing",
        "on_chunks",
        "on_done",
        "on_scattered",
        "peer",
        "sending",
        "spec",
        "step",
    )

    def __init__(self, peer: int, step: int, spec: MessageSpec, sending: Sending | None = None) -> None:
        self.peer = peer
        self.step = step
        self.spec = spec
        self.chunks = spec.chunks
        self.got = 0
        self.done = False
        self.sending = sending
        self.missing: Callable[[], npt.NDArray[np.integer[Any]]] | None = None  # of the handle of either kind
        self.confirmed = (
            spec.budget > 0.0
        )  # what was not counted of a bounded message is known from its confirmation
        self.on_chunks: OnChunks | None = None
        self.on_scattered: OnScattered | None = None
        self.on_done: OnDone | None = None

    def lacks(self) -> str:
        if self.sending is not None:
            return f"has not confirmed {self.chunks} chunks from here"
        return f"{self.got} of {self.chunks} chunks arrived"

    def state(self, peer: int, missing: bool) -> MessageState:
        """For the flight recorder; ``peer``: the endpoint's rank."""
        lacking = self.missing() if missing and not self.done and self.missing is not None else _NONE
        sent, arrived = 0, self.got
        if self.sending is not None:
            sent, arrived = sum(self.sending.counts), self.chunks - len(lacking)
        return MessageState(
            peer, self.sending is not None, self.step, self.chunks, arrived, sent, self.done, runs(lacking)
        )

    def sent(self) -> tuple[int, int, int]:
        """Chunks sent first, chunks sent again, and the bytes of both with their headers."""
        if self.sending is None:
            return 0, 0, 0
        first, again = self.sending.counts
        payload = min(first * self.spec.chunk_bytes, self.spec.nbytes) + again * self.spec.chunk_bytes
        return first, again, payload + (first + again) * HEADER_BYTES


class Round:
    """One round of a group on this rank. Posting methods raise ClosedError once the endpoint is closed or poisoned."""

    def __init__(
        self,
        endpoint: EndpointLike,
        ranks: Sequence[int],
        group: int,
        number: RoundNumber,
        call: Call,
        timeout_s: float,
        pool: StagePool,
        incast: Incast | None = None,
        priority: Priority | None = None,
    ) -> None:
        """``incast``: the group's memory of how many peers may send to this rank at once; ``priority``: the caller's of the
        gradient's chunks."""
        self.endpoint = endpoint
        self.call = call
        self.number = number
        self.pool = pool
        self.incast = incast
        self.priority = priority
        self.rank = ranks.index(endpoint.rank)
        self.world_size = len(ranks)
        self.title = f"{call.label}, round {number} of group {group}"
        self.error: BaseException | None = None
        self.entry: Entry | None = None  # in the group's flight recorder
        self.ended = False
        self.energy_sent = 0.0  # sum of squares of the bounded messages whose energy was told
        self.carries = False  # what is lost is kept by who has it
        self.carried = self.discarded = NOTHING
        self.filled_chunks = 0  # of the result, because the gather leg missed them
        self.skipped = (
            False  # a message was given up below its bound, on this rank or another: the result is zeros
        )
        self.uncounted: dict[
            int, npt.NDArray[np.int64]
        ] = {}  # chunks of a rank's payload that no rank counts
        self._ranks = ranks
        self._start = endpoint.time()
        self._key = round_of(message_id(number.group, number.round, 0))
        self._legs: list[_Leg] = []
        self._receives_left = 0
        self._sends_left = 0
        self._gate: asyncio.Future[None] | None = None
        self._stages: list[Bytes] = []
        self._missing: dict[int, npt.NDArray[np.uint32]] = {}
        self._energies: list[tuple[float, float]] = []
        self._bounded_chunks = 0
        peers = [rank for rank in ranks if rank != endpoint.rank]
        self._peers = peers
        self._timeout_s = timeout_s
        self._counters: RoundCounters = endpoint.begin_round(
            self._key, call.signature(), describe, self._standing
        )
        self._deadline = Deadline(endpoint, peers, timeout_s, self._expire, self._ask)

    def peers(self) -> list[int]:
        """The other ranks, starting behind this one, so that not all ranks turn to the same peer first."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    # posting

    def send(
        self,
        peer: int,
        step: int,
        data: npt.NDArray[Any],
        spec: MessageSpec,
        *,
        offered: bool = True,
        energy: float = 0.0,
        classes: npt.NDArray[np.uint8] | None = None,
        confirmed: bool = False,
    ) -> Sending:
        """Send the 1-D contiguous array ``data`` to ``peer``; see EndpointLike.send. ``confirmed``: the round waits for the
        receiver's confirmation even where it need not."""
        message = message_id(self.number.group, self.number.round, step)
        sending = self.endpoint.send(
            self._ranks[peer],
            message,
            data.view(np.uint8),
            spec,
            offered=offered,
            energy=energy,
            classes=classes,
        )
        self.energy_sent += energy
        leg = _Leg(peer, step, spec, sending)
        leg.confirmed |= confirmed
        leg.missing = sending.missing
        self._legs.append(leg)
        self._sends_left += 1
        sending.done.add_done_callback(lambda done: self._sent(leg, done))
        return sending

    def receive(
        self,
        peer: int,
        step: int,
        spec: MessageSpec,
        sink: Sink,
        *,
        on_chunks: OnChunks | None = None,
        on_scattered: OnScattered | None = None,
        on_done: OnDone | None = None,
        window: int = 0,
    ) -> Callable[[int], None]:
        """Post a receive from ``peer``; returns what releases more chunks of a windowed one."""
        leg = _Leg(peer, step, spec)
        leg.on_chunks, leg.on_scattered, leg.on_done = on_chunks, on_scattered, on_done

        def placed(first: int, count: int) -> None:
            leg.got += count
            if leg.on_chunks is not None and self.error is None:
                try:
                    leg.on_chunks(first, count)
                except Exception as error:  # the endpoint must not see it: the round reports it to its caller
                    self.fail(error)

        def placed_scattered(chunks: npt.NDArray[np.uint32]) -> None:
            leg.got += len(chunks)
            if leg.on_scattered is not None and self.error is None:
                try:
                    leg.on_scattered(chunks)
                except Exception as error:
                    self.fail(error)

        message = message_id(self.number.group, self.number.round, step)
        receiving = self.endpoint.receive(
            self._ranks[peer],
            message,
            spec,
            sink,
            on_chunks=placed,
            on_scattered=placed_scattered if on_scattered is not None or on_chunks is None else None,
            window=window,
        )
        leg.missing = receiving.missing
        self._legs.append(leg)
        self._receives_left += 1
        receiving.done.add_done_callback(lambda done: self._received(leg, done))
        return receiving.release

    def stage(self, nbytes: int) -> Bytes:
        """Scratch memory that lives as long as the round."""
        memory = self.pool.take(nbytes)
        self._stages.append(memory)
        return memory[:nbytes]

    def lost(self, peer: int, spec: MessageSpec, received: Received, energy_received: float) -> None:
        """Note how the bounded message of a peer ended."""
        self._bounded_chunks += spec.chunks
        self._energies.append((received.energy_total, energy_received))
        if len(received.missing):
            self._missing[peer] = received.missing

    # waiting

    async def received(self) -> None:
        """Wait until all receives have ended; raises what failed first."""
        while self.error is None and self._receives_left:
            await self._wait()
        self._raise()

    async def sent(self) -> None:
        """Wait until the caller's memory is free: each send is confirmed, or its small rest detached.

        A rank that only sends waits for the confirmations: they are all that tells it that its peers made the same call.
        """
        one_way = all(leg.sending is not None for leg in self._legs)
        for leg in self._legs:
            if leg.sending is None or leg.done or one_way or leg.confirmed:
                continue
            if leg.sending.detach():
                leg.done = True
                self._sends_left -= 1
        while self.error is None and self._sends_left:
            await self._wait()
        self._raise()

    def end(self) -> None:
        """The round is over here, well or badly; idempotent."""
        if self.ended:
            return
        self.ended = True
        if self.entry is not None:
            self.entry.end(self.endpoint.time(), done=not (self._receives_left or self._sends_left))
        self._deadline.cancel()
        self.endpoint.end_round(self._key)
        for memory in self._stages:
            self.pool.give(memory)
        self._stages.clear()
        # The algorithm's callbacks refer to the round and to the caller's memory: without this, large arrays
        # would wait for the garbage collector.
        for leg in self._legs:
            leg.on_chunks = leg.on_scattered = leg.on_done = leg.missing = None
        self._legs.clear()

    def states(self, missing: bool) -> list[MessageState]:
        """The messages of the round, for the flight recorder; ``missing``: with the chunks that lack."""
        return [leg.state(self._ranks[leg.peer], missing) for leg in tuple(self._legs)]

    def report(self, nbytes: int) -> Report:
        """What the round did so far."""
        call = self.call
        first, again, nbytes_sent = (
            sum(column) for column in zip((0, 0, 0), *(leg.sent() for leg in self._legs), strict=True)
        )
        missing = sum(len(chunks) for chunks in self._missing.values())
        return Report(
            round=self.number.number,
            collective=call.label,
            algorithm=call.algorithm,
            reason=call.reason,
            nbytes=nbytes,
            world_size=self.world_size,
            duration_s=self.endpoint.time() - self._start,
            chunks_sent=first,
            chunks_resent=again,
            chunks_received=sum(leg.got for leg in self._legs),
            chunks_duplicate=self._counters.chunks_duplicate,
            bytes_sent=nbytes_sent,
            missing=self._missing,
            bounded_chunks=self._bounded_chunks,
            energy_lost=energy_lost_share(self._energies, missing / self._bounded_chunks if missing else 0.0),
            budget=call.policy.budget,
            stop=call.policy.stop.value,
            filled_chunks=self.filled_chunks,
            carries=self.carries,
            bound=call.policy.carry.bound.value if self.carries and call.policy.carry is not None else "",
            carried=self.carried,
            discarded=self.discarded,
            skipped=self.skipped,
            uncounted=self.uncounted,
        )

    # callbacks

    def _received(self, leg: _Leg, done: asyncio.Future[Received]) -> None:
        error = self._outcome(leg, done)
        self._receives_left -= 1
        if error is None and leg.on_done is not None and self.error is None:
            try:
                leg.on_done(done.result())
            except Exception as caught:  # as in ``placed``
                error = caught
        if error is not None:
            self.fail(error)
        elif self._receives_left == 0:
            self._open_gate()

    def _sent(self, leg: _Leg, done: asyncio.Future[Sent]) -> None:
        detached = leg.done
        error = self._outcome(leg, done)
        if detached:
            return  # the round no longer depends on it
        self._sends_left -= 1
        if error is not None:
            self.fail(error)
        elif self._sends_left == 0:
            self._open_gate()

    def _outcome(self, leg: _Leg, done: asyncio.Future[Any]) -> BaseException | None:
        leg.done = not done.cancelled() and done.exception() is None
        if done.cancelled():
            return ClosedError(
                f"{self.title}: the endpoint of rank {self.endpoint.rank} was closed during the round"
            )
        return done.exception()

    def _owed(self) -> list[_Leg]:
        """What the round waits for: messages that come, and once all have, confirmations."""
        sending = self._receives_left == 0
        return [leg for leg in self._legs if not leg.done and (leg.sending is not None) == sending]

    def _standing(self) -> Standing:
        """How this rank stands with the round, for peers that ask."""
        waits_for = sorted({self._ranks[leg.peer] for leg in self._owed()})
        waited_s = self.endpoint.time() - self._start
        silent = silent_peers(self.endpoint, self._peers, self._timeout_s, waited_s)
        return Standing(stand=Stand.WAITING, waits_for=tuple(waits_for), silent=silent)

    def _ask(self) -> None:
        self.endpoint.ask_standing(self._key, self._peers)

    def _expire(self) -> None:
        owed = self._owed()
        if not owed:  # all has come, and the caller is told in this turn of the loop
            return
        lacks: dict[int, str] = {}
        for leg in owed:
            lacks.setdefault(self._ranks[leg.peer], leg.lacks())
        # A later step waits for an earlier one of other ranks: who owes the earliest is to blame.
        first = min((leg.step for leg in owed), default=0)
        culprits = {self._ranks[leg.peer] for leg in owed if leg.step == first}
        told = self._counters.told
        self.fail(
            deadline_error(self.endpoint, self.title, self._timeout_s, self._peers, lacks, culprits, told)
        )

    def fail(self, error: BaseException) -> None:
        """End the round with ``error``, unless something failed before."""
        if self.error is None:
            self.error = error
            if self.entry is not None:
                self.entry.fail(error, self.endpoint.time())
        self._open_gate()

    def _open_gate(self) -> None:
        if self._gate is not None and not self._gate.done():
            self._gate.set_result(None)

    async def _wait(self) -> None:
        self._gate = asyncio.get_running_loop().create_future()
        await self._gate

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error
