"""Point to point: send and recv beside the collectives of a group, matched by source and tag as MPI does.

Theory of operation. Each ordered pair of ranks has its own sequence of transfers, counted by both. A transfer is two
messages, sent at once: an envelope (tag, dtype, element count) and the data. The receiver posts the next envelope of
each source that a waiting recv may match, and the data when the envelope has met its recv: so a recv from any source needs no
further words on the wire, tags may be met in any order, and ranks that disagree about size or type are named. Data that
comes before its recv is held by the transport up to ``TransportConfig.early_bytes``; more waits at the sender.

Ids. Transfers are no rounds of the group: a collective's number depends on the calls of all ranks, a transfer's only on its
pair. The highest bit of the id's group marks a transfer; the round holds the direction, the pair (exclusive or of the
endpoint's ranks, which together with an end gives the other) and the low bits of the sequence; the step its high bits and
the part. Round keys of transfers therefore have no order among each other, and one comes back after 2^21 transfers of its pair.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.algorithms.grid import chunk_bytes, spec
from dblp.collectives.algorithms.sinks import CopySink
from dblp.collectives.call import Call, Collective, describe
from dblp.collectives.deadline import Deadline, deadline_error
from dblp.collectives.recorder import Entry, FlightRecorder, MessageState, runs
from dblp.collectives.reduction import DType, dtype_name
from dblp.errors import ClosedError, ConfigError, DblpError, MismatchError, UnsupportedError
from dblp.transport.fields import is_whole, whole
from dblp.transport.interface import EndpointLike, Receiving, Sending
from dblp.transport.message import message_id, round_of
from dblp.transport.policy import Exact
from dblp.transport.rounds import ANY_ORDER_BIT, COLLECTIVE_BIT

Array = npt.NDArray[Any]

GROUP_LIMIT = COLLECTIVE_BIT
"""Group ids are below: of the 16 bits the two highest mark transfers and what callbacks call."""
_SEQUENCE_BITS = 21
_PAIR_BITS = 10
MAX_RANKS = 1 << _PAIR_BITS
"""Ranks of an endpoint that transfers can tell apart."""
_ENVELOPE_PART, _DATA_PART = 0, 1
TAGS = (-(1 << 63), (1 << 63) - 1)
"""Least and greatest tag."""
_ENVELOPE = struct.Struct("!qQB7x")
"""Tag (int64), elements (uint64), dtype code: 24 bytes."""
_SIGNATURE = Call(collective=Collective.SEND_RECV).signature()


def transfer_id(group: int, source: int, target: int, sequence: int, part: int) -> int:
    """Message id of one part of a transfer; ``source`` and ``target`` are the endpoint's ranks."""
    low = sequence & (1 << _SEQUENCE_BITS) - 1
    round_ = (int(source < target) << _PAIR_BITS | (source ^ target)) << _SEQUENCE_BITS | low
    return message_id(ANY_ORDER_BIT | group, round_, (sequence >> _SEQUENCE_BITS) << 1 & 0xFFFF | part)


@dataclass(slots=True, eq=False)
class _Envelope:
    """What a peer has sent or is about to send."""

    source: int  # rank in the group
    key: int
    data: int
    tag: int
    count: int
    code: int


class _Transfer:
    """A send or recv in progress on this rank."""

    def __init__(
        self, title: str, peers: Sequence[int], tag: int, target: Array | None, dtype: DType, nbytes: int
    ) -> None:
        self.title = title
        self.peers = peers  # ranks in the group that it may be with
        self.tag = tag
        self.target = target
        self.dtype = dtype
        self.nbytes = nbytes
        self.matched: _Envelope | None = None
        self.chunks = self.got = 0
        self.outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.deadline: Deadline | None = None
        self.entry: Entry | None = None  # in the group's flight recorder
        self.now: Callable[[], float] = asyncio.get_running_loop().time
        self.sending: Sending | None = None  # the data, on its way there or here
        self.receiving: Receiving | None = None
        self.ranks: Sequence[int] = ()  # the endpoint's, of ``peers``

    def finish(self, source: int) -> None:
        if not self.outcome.done():
            self.outcome.set_result(source)

    def fail(self, error: BaseException) -> None:
        if not self.outcome.done():
            if self.entry is not None:
                self.entry.fail(error, self.now())
            self.outcome.set_exception(error)

    def states(self, missing: bool) -> list[MessageState]:
        """For the flight recorder: one line for each rank that it may be with."""
        done, outgoing = self.outcome.done(), self.target is None
        lacking: npt.NDArray[np.integer[Any]] = np.empty(0, np.int64)
        data = self.sending or self.receiving
        if missing and not done and data is not None:
            lacking = data.missing()
        arrived = self.chunks if done else self.chunks - len(lacking) if outgoing else self.got
        sent = 0 if self.sending is None else sum(self.sending.counts)
        return [
            MessageState(self.ranks[peer], outgoing, 0, self.chunks, arrived, sent, done, runs(lacking))
            for peer in self.peers
        ]

    def lacks(self) -> str:
        if self.target is None:
            return f"has not confirmed the {self.chunks} chunks sent to it"
        if self.matched is None:
            return f"has not sent with tag {self.tag}"
        return f"{self.got} of {self.chunks} chunks arrived"


class Mailbox:
    """The transfers of one group on this rank."""

    def __init__(
        self,
        endpoint: EndpointLike,
        ranks: Sequence[int],
        group: int,
        poison: Callable[[BaseException], None],
        recorder: FlightRecorder,
    ) -> None:
        """``poison(error)`` is called with the first failure."""
        self._recorder = recorder
        self._endpoint = endpoint
        self._ranks = ranks
        self._rank = ranks.index(endpoint.rank)
        self._group = group
        self._poison = poison
        self._sent = [0] * len(ranks)  # next sequence number towards each rank
        self._armed: dict[int, int] = {}  # source -> round key of the envelope that is posted
        self._next = [0] * len(ranks)  # next envelope's sequence number from each rank
        self._unexpected: list[_Envelope] = []  # in order of arrival
        self._waiting: list[_Transfer] = []  # recvs without a match, in order of their calls

    def send(self, flat: Array, dtype: DType, target: int, tag: int, timeout_s: float) -> asyncio.Task[int]:
        """Send a 1-D array to rank ``target``; done when the array may be changed. Nothing is queued behind anything."""
        target = self._check_peer(target, "dst")
        tag = whole("tag", tag, *TAGS)
        peer = self._ranks[target]
        sequence, self._sent[target] = self._sent[target], self._sent[target] + 1
        envelope_id, data_id = (self._id(self._endpoint.rank, peer, sequence, part) for part in (0, 1))
        envelope = np.frombuffer(_ENVELOPE.pack(tag, flat.size, dtype.code), np.uint8)
        transfer = _Transfer(f"send to rank {peer}, tag {tag}", [target], tag, None, dtype, flat.nbytes)
        key = round_of(data_id)
        self._endpoint.begin_round(key, _SIGNATURE, describe)
        message = spec(flat.nbytes, self._chunk())
        transfer.chunks = message.chunks
        try:
            sendings = [
                self._endpoint.send(peer, envelope_id, envelope, spec(envelope.nbytes, self._chunk())),
                self._endpoint.send(peer, data_id, flat.view(np.uint8), message),
            ]
        except DblpError:  # the peer has left: nothing has begun
            self._endpoint.end_round(key)
            raise
        transfer.sending = sendings[1]
        for sending in sendings:
            sending.done.add_done_callback(_collect(transfer))
        rest = [sending for sending in sendings if not sending.detach()]
        if not rest:
            transfer.finish(target)
        else:
            rest[-1].done.add_done_callback(lambda done: _settle(transfer, done, target))
        return self._start(transfer, timeout_s, key)

    def receive(
        self, flat: Array, dtype: DType, source: int | None, tag: int, timeout_s: float
    ) -> asyncio.Task[int]:
        """Receive into a 1-D array from rank ``source``, or from any; the task's result is the source."""
        tag = whole("tag", tag, *TAGS)
        if source is not None:
            source = self._check_peer(source, "src")
        elif len(self._ranks) == 1:
            raise UnsupportedError("recv from any rank in a group of one rank: nobody else can send")
        peers = (
            [rank for rank in range(len(self._ranks)) if rank != self._rank] if source is None else [source]
        )
        origin = "any rank" if source is None else f"rank {self._ranks[source]}"
        transfer = _Transfer(f"recv from {origin}, tag {tag}", peers, tag, flat, dtype, flat.nbytes)
        known = next((envelope for envelope in self._unexpected if _fits(transfer, envelope)), None)
        if known is not None:
            self._unexpected.remove(known)
            self._match(transfer, known)
        else:
            self._waiting.append(transfer)
            self._arm()
        return self._start(transfer, timeout_s, None)

    def close(self) -> None:
        """Forget what is posted and what nobody asked for."""
        for key in [*self._armed.values(), *(envelope.key for envelope in self._unexpected)]:
            self._endpoint.end_round(key)
        self._armed.clear()
        self._unexpected.clear()

    # matching

    def _arm(self) -> None:
        """Post the next envelope of every source that a waiting recv may match."""
        for source in sorted({peer for transfer in self._waiting for peer in transfer.peers}):
            if source not in self._armed:
                self._post_envelope(source)

    def _post_envelope(self, source: int) -> None:
        peer = self._ranks[source]
        sequence, self._next[source] = self._next[source], self._next[source] + 1
        envelope_id, data_id = (self._id(peer, self._endpoint.rank, sequence, part) for part in (0, 1))
        key = round_of(envelope_id)
        self._armed[source] = key
        memory = np.zeros(_ENVELOPE.size, np.uint8)
        self._endpoint.begin_round(key, _SIGNATURE, describe)
        receiving = self._endpoint.receive(
            peer, envelope_id, spec(memory.nbytes, self._chunk()), CopySink(memory, self._chunk())
        )

        def arrived(done: asyncio.Future[Any]) -> None:
            error = _error(done)
            if error is not None:
                self._lose(source, error)
            elif self._armed.pop(source, None) is not None:  # None: closed in the meantime
                self._arrived(_Envelope(source, key, data_id, *_ENVELOPE.unpack(memory.tobytes())))

        receiving.done.add_done_callback(arrived)

    def _arrived(self, envelope: _Envelope) -> None:
        transfer = next((waiting for waiting in self._waiting if _fits(waiting, envelope)), None)
        try:
            if transfer is None:
                self._unexpected.append(envelope)
            else:
                self._waiting.remove(transfer)
                self._match(transfer, envelope)
            self._arm()
        except Exception as error:  # of the endpoint, in a callback that has no caller
            self._fail_all(error)

    def _match(self, transfer: _Transfer, envelope: _Envelope) -> None:
        transfer.matched = envelope
        transfer.peers = [envelope.source]
        target, peer = transfer.target, self._ranks[envelope.source]
        assert target is not None
        if (envelope.count, envelope.code) != (target.size, transfer.dtype.code):
            theirs = f"{envelope.count} {dtype_name(envelope.code)} elements"
            ours = f"{target.size} {transfer.dtype.name} elements"
            text = (
                f"tag {transfer.tag}: rank {peer} sends {theirs}, rank {self._endpoint.rank} expects {ours}"
            )
            transfer.fail(MismatchError(f"send and recv disagree, {text}", [peer]))
            return
        message = spec(target.nbytes, self._chunk())
        transfer.chunks = message.chunks

        def placed(_: int, count: int) -> None:
            transfer.got += count

        receiving = self._endpoint.receive(
            peer, envelope.data, message, CopySink(target, self._chunk()), on_chunks=placed
        )
        transfer.receiving = receiving
        receiving.done.add_done_callback(lambda done: _settle(transfer, done, envelope.source))

    def _lose(self, source: int, error: BaseException) -> None:
        """Nothing more comes from a source: recvs that may match another go on without it."""
        key = self._armed.pop(source, None)
        if key is not None:
            self._endpoint.end_round(key)
        for transfer in [waiting for waiting in self._waiting if source in waiting.peers]:
            transfer.peers = [peer for peer in transfer.peers if peer != source]
            if not transfer.peers:
                self._waiting.remove(transfer)
                transfer.fail(error)

    def _fail_all(self, error: BaseException) -> None:
        waiting, self._waiting = self._waiting, []
        for transfer in waiting:
            transfer.fail(error)

    # running

    def _start(self, transfer: _Transfer, timeout_s: float, key: int | None) -> asyncio.Task[int]:
        peers = [self._ranks[peer] for peer in transfer.peers]
        transfer.ranks = self._ranks
        label = "recv" if transfer.target is not None else "send"
        nbytes = transfer.nbytes
        details = {"dtype": transfer.dtype.name, "peer": ", ".join(map(str, peers)), "tag": transfer.tag}
        transfer.entry = self._recorder.begin(-1, label, nbytes, lambda: details, timeout_s, transfer.states)
        transfer.deadline = Deadline(self._endpoint, peers, timeout_s, lambda: self._expire(transfer))
        task = asyncio.get_running_loop().create_task(self._run(transfer, key))
        task.add_done_callback(lambda _: self._abandoned(transfer, key))
        return task

    async def _run(self, transfer: _Transfer, key: int | None) -> int:
        try:
            return await transfer.outcome
        except asyncio.CancelledError:
            self._cancelled(transfer)
            raise
        except Exception as error:
            self._poison(error)
            raise
        finally:
            self._end(transfer, key)

    def _cancelled(self, transfer: _Transfer) -> None:
        """A recv that nothing has met yet can be withdrawn; anything else is a failure that the peer must learn of."""
        if transfer.target is not None and transfer.matched is None:
            return
        self._poison(ClosedError(f"{transfer.title} was cancelled on rank {self._endpoint.rank}"))

    def _abandoned(self, transfer: _Transfer, key: int | None) -> None:
        """Clean up after a task that was cancelled before it ran at all."""
        if transfer.deadline is not None:
            self._cancelled(transfer)
            self._end(transfer, key)

    def _end(self, transfer: _Transfer, key: int | None) -> None:
        if transfer.deadline is not None:
            transfer.deadline.cancel()
        transfer.deadline = None
        if transfer.entry is not None:
            outcome = transfer.outcome
            done = outcome.done() and not outcome.cancelled() and outcome.exception() is None
            transfer.entry.end(self._endpoint.time(), done=done)
        transfer.sending = transfer.receiving = None
        if transfer in self._waiting:
            self._waiting.remove(transfer)
        if transfer.outcome.done() and not transfer.outcome.cancelled():
            transfer.outcome.exception()
        key = transfer.matched.key if transfer.matched is not None else key
        if key is not None:
            self._endpoint.end_round(key)

    def _expire(self, transfer: _Transfer) -> None:
        lacks = {self._ranks[peer]: transfer.lacks() for peer in transfer.peers}
        assert transfer.deadline is not None
        title = f"{transfer.title}, group {self._group},"
        transfer.fail(deadline_error(self._endpoint, title, transfer.deadline.timeout_s, list(lacks), lacks))

    def _id(self, source: int, target: int, sequence: int, part: int) -> int:
        return transfer_id(self._group, source, target, sequence, part)

    def _chunk(self) -> int:
        return chunk_bytes(0, self._endpoint.max_chunk_bytes, Exact())

    def _check_peer(self, peer: int, name: str) -> int:
        if not is_whole(peer):
            raise ConfigError(f"{name}={peer!r}: a rank of the group is needed, not {type(peer).__name__}")
        if not 0 <= peer < len(self._ranks) or peer == self._rank:
            raise UnsupportedError(
                f"{name}={peer}: another rank of the group is needed, 0..{len(self._ranks) - 1} without {self._rank}"
            )
        return int(peer)


def _fits(transfer: _Transfer, envelope: _Envelope) -> bool:
    return envelope.tag == transfer.tag and envelope.source in transfer.peers


def _error(done: asyncio.Future[Any]) -> BaseException | None:
    if done.cancelled():
        return ClosedError("the endpoint was closed during a transfer")
    return done.exception()


def _collect(transfer: _Transfer) -> Callable[[asyncio.Future[Any]], None]:
    """Pass a failure on, and mark it as seen."""

    def done(future: asyncio.Future[Any]) -> None:
        error = _error(future)
        if error is not None:
            transfer.fail(error)

    return done


def _settle(transfer: _Transfer, done: asyncio.Future[Any], source: int) -> None:
    error = _error(done)
    if error is not None:
        transfer.fail(error)
    else:
        transfer.finish(source)
