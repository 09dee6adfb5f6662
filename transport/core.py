"""The sans-IO core of an endpoint: peers, rounds and messages, told the time, never reading a clock or a socket.

Four verbs: ``receive_burst(batch, now=)``, ``bursts_to_send(now=)``, ``next_timeout()`` with ``on_timer(now=)``, ``events()``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.errors import ClosedError
from dblp.transport import wire
from dblp.transport.abort import (
    call_mismatch,
    decode_abort,
    encode_abort,
    left_before,
    left_in_round,
    size_mismatch,
)
from dblp.transport.backlog import Backlog
from dblp.transport.burst import BurstBuffer, Train
from dblp.transport.config import CHUNK_ALIGN_BYTES, HEADER_BYTES, TransportConfig
from dblp.transport.drop import Drop
from dblp.transport.flight import Control
from dblp.transport.handshake import Handshake, Identity, Reply
from dblp.transport.incoming import Incoming
from dblp.transport.intake import Intake
from dblp.transport.message import (
    STEP_BITS,
    MessageSpec,
    OnChunks,
    OnScattered,
    Received,
    RoundCounters,
    Sent,
    Sink,
    round_of,
)
from dblp.transport.outgoing import Outgoing
from dblp.transport.paths import PathChoices, PathState
from dblp.transport.port import Address, Burst, Bytes, PortFacts, Slab
from dblp.transport.receiver import PeerReceiver
from dblp.transport.rounds import Round, RoundBook, is_collective
from dblp.transport.sender import PeerSender
from dblp.transport.standing import Standing, decode_state, encode_state
from dblp.transport.wire import Type

CREDIT_SHARE = 0.8
"""Share of the kernel's receive buffer that is granted: the rest takes control, retransmissions and what was granted before the
number of senders rose."""
SMALL_BYTES = 4096
"""Bursts up to this size don't count against a turn."""
SMALL_EXCHANGE_BYTES = 64 * 1024
"""Of messages up to this size that go both ways, FINAL may wait for company: a datagram less of about four in small rounds that
follow each other."""
ACTIVE_S = 50e-3
"""A peer that has sent chunks counts for this long when the receive buffer is divided: longer than the gap between two
rounds that follow each other."""


@dataclass(frozen=True, slots=True)
class Completed:
    """A message ended: call ``callback(outcome)``."""

    callback: Callable[[Any], None]
    outcome: Sent | Received | Exception


class Core:
    """All of one rank's protocol state. Not thread-safe; one event loop owns it."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        session: int,
        generation: int,
        config: TransportConfig,
        facts: PortFacts,
        datagram_bytes: int,
        peers: Sequence[Sequence[Address]],
        rng: np.random.Generator,
        now: float,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.session = session
        self.config = config
        self.max_chunk_bytes = (datagram_bytes - HEADER_BYTES) // CHUNK_ALIGN_BYTES * CHUNK_ALIGN_BYTES
        self.drops: Counter[Drop] = Counter()
        self.rounds = RoundBook()
        self.failed: Exception | None = None
        self._told = False  # peers were told why
        self.gone: set[int] = set()
        self.closing: set[int] = set()  # peers that post no more receives
        self.greeted_at: dict[int, float] = {}  # when a peer last said HELLO
        self._credit_bytes = max(int(facts.receive_buffer_bytes * CREDIT_SHARE), 4096)
        self._events: list[Completed] = []
        self._early_opens: dict[int, list[tuple[int, wire.Open]]] = {}
        self._posted: dict[int, list[tuple[int, Incoming]]] = {}
        self._given: dict[int, set[tuple[int, int]]] = {}  # (peer, message) of what was sent, by round
        self._replies: list[Reply] = []
        self._buffer = BurstBuffer()
        self._backlog = Backlog()
        self._turn = 0
        window = max(self._credit_bytes // max(1, world_size - 1), 4096)
        self._feedback_at = 0.0  # before it none is due, unless something comes
        identity = Identity(
            rank=rank, world_size=world_size, generation=generation, paths=config.paths, datagram_bytes=datagram_bytes,
            window_bytes=window,
        )  # fmt: skip
        nonces = [rng.bytes(8) for _ in range(rank * config.paths)]
        self.handshake = Handshake(identity, peers, secret=rng.bytes(32), nonces=nonces, now=now)
        whole_to = {address.host for address in peers[rank]} if facts.whole_bursts else ()
        choices = PathChoices(config, rank, rng)
        self.senders: dict[int, PeerSender] = {}
        self.receivers: dict[int, PeerReceiver] = {}
        for peer in range(world_size):
            if peer != rank:
                self.senders[peer] = PeerSender(
                    rank=rank, session=session, addresses=peers[peer][: config.paths], window_bytes=window, config=config,
                    buffer=self._buffer, backlog=self._backlog, watermark=self.rounds.watermark,
                    datagram_bytes=datagram_bytes, whole_to=whole_to, choice=choices.to(peer),
                )  # fmt: skip
                self.senders[peer].await_proof()
                self.receivers[peer] = PeerReceiver(
                    paths=config.paths,
                    config=config,
                    drops=self.drops,
                    round_over=self.rounds.over,
                    on_duplicates=self._on_duplicates,
                    backlog=self._backlog,
                    window_bytes=window,
                )
        self._intake = Intake(
            self.receivers, session=session, proved=self.handshake.proved, drops=self.drops, on_control=self._on_control,
            on_handshake=self._on_handshake, on_other_version=self._on_other_version,
        )  # fmt: skip
        self._order = list(self.senders.values())
        self._pairs = [(peer, self.senders[peer], self.receivers[peer]) for peer in self.senders]

    # --- what the collectives ask for

    def begin_round(
        self,
        key: int,
        signature: bytes,
        describe: Callable[[bytes], str],
        standing: Callable[[], Standing] | None = None,
    ) -> RoundCounters:
        """See ``interface.EndpointLike.begin_round``."""
        self._check_alive()
        if self._order and not any(sender.active for sender in self._order):
            self._turn = self.rank % len(self._order)  # else all ranks might turn to the same peer first
        round_ = self.rounds.begin(key, signature, describe, standing)
        self._posted[key], self._given[key] = [], set()
        for peer, opened in self._early_opens.pop(key, ()):
            self._compare(round_, peer, opened)
        if self.failed is not None:  # a peer that is ahead has told that it called something else
            self.end_round(key)
            raise self.failed
        return round_.counters

    def end_round(self, key: int) -> None:
        """See ``interface.EndpointLike.end_round``."""
        self.rounds.end(key)
        self._early_opens.pop(key, None)
        self._given.pop(key, None)
        for peer, message in self._posted.pop(key, ()):
            if not message.closed:
                message.on_done = None
                self.receivers[peer].forget(message)
        for receiver in self.receivers.values():
            for message in [m for m in receiver.messages.values() if round_of(m.id) == key]:
                receiver.forget(message)
        for sender in self.senders.values():
            if sender.messages:
                sender.drop_round(key)

    def send(
        self,
        peer: int,
        message: int,
        data: Bytes,
        spec: MessageSpec,
        *,
        offered: bool = True,
        energy: float = 0.0,
        classes: npt.NDArray[np.uint8] | None = None,
    ) -> Outgoing:
        """See ``interface.EndpointLike.send``; the outcome comes through ``Outgoing.on_done``."""
        self._check_alive()
        if peer in self.gone:
            raise left_before(peer, self.rank, message)
        key = round_of(message)
        round_ = self.rounds.active[key]
        self._given[key].add((peer, message))
        return self.senders[peer].send(
            message, spec, data, round_.signature, energy, offered=offered, classes=classes
        )

    def receive(
        self,
        peer: int,
        message_id: int,
        spec: MessageSpec,
        sink: Sink,
        *,
        on_chunks: OnChunks | None,
        window: int,
        now: float,
        on_done: Callable[[Any], None],
        on_scattered: OnScattered | None = None,
    ) -> Incoming:
        """See ``interface.EndpointLike.receive``; the outcome comes through ``Incoming.on_done``, as an event."""
        self._check_alive()
        receiver = self.receivers[peer]
        message = receiver.messages.get(message_id)
        if message is None:
            message = receiver.messages[message_id] = Incoming(message_id, now)
        message.on_done = on_done
        limit = min(window, spec.chunks) if window else spec.chunks
        message.post(spec, sink, on_chunks, limit, on_scattered)
        message.last_useful = now
        self._posted[round_of(message_id)].append((peer, message))
        if message.opened is not None:
            self._compare_spec(peer, message)
        if message.early:
            receiver.take_early(message, now)
        if not message.closed:
            receiver.check(message, now)
        if receiver.finals.completed:
            self._after_receive(now)
        if not message.closed and peer in self.gone:  # it had not all come when the peer left
            receiver.forget(message)
            self._finish(message, left_before(peer, self.rank, message.id))
        elif not message.closed and (message.asked or spec.nbytes > self.config.early_bytes // 2):
            self._grant(peer, now)
        return message

    def release(self, peer: int, message: Incoming, limit: int, now: float) -> None:
        """Raise a windowed receive's limit; told to the peer when half a window has opened."""
        assert message.spec is not None
        limit = min(limit, message.spec.chunks)
        if message.closed or limit <= message.grant_limit:
            return
        message.grant_limit = limit
        self._grant(peer, now)

    def ping(self, peers: Sequence[int]) -> None:
        """Ask for signs of life."""
        for peer in peers:
            if peer in self.senders:
                self.senders[peer].queue_control(Control(Type.PING, 0))

    def ask_standing(self, key: int, peers: Collection[int]) -> None:
        """See ``interface.EndpointLike.ask_standing``."""
        if key in self.rounds.active:
            payload = encode_state(self.rounds.standing(key), asks=True)
            for peer in peers:
                self.senders[peer].queue_question(Control(Type.STATE, key << STEP_BITS, payload))

    def fail(self, error: Exception, *, tell: bool) -> None:
        """Poison: every pending message ends with ``error``; peers are told if ``tell``."""
        if self.failed is not None:
            return
        self.failed = error
        for sender in self.senders.values():
            sender.fail(error)
        if tell:
            self._tell(error)
        for receiver in self.receivers.values():
            for message in list(receiver.messages.values()):
                receiver.forget(message)
                self._finish(message, error)

    def _tell(self, error: Exception) -> None:
        self._told = True
        for peer, sender in self.senders.items():
            if peer not in self.gone:
                sender.queue_control(Control(Type.ABORT, 0, encode_abort(error)))

    def ask_to_acknowledge(self, peers: Sequence[int]) -> None:
        """Tell peers that we are closing, and ask for signs of life."""
        for peer in peers:
            self.senders[peer].queue_control(Control(Type.CLOSING, 0))
        self.ping(peers)

    def welcome_again(self, peers: Sequence[int]) -> None:
        """Repeat the last word of the handshake, and ask for signs of life."""
        self._replies += self.handshake.welcomes(peers)
        self.ask_to_acknowledge(peers)

    def say_goodbye(self) -> None:
        """Queue CLOSE for all peers that have not acknowledged it. A rank that leaves because a peer gave up says so first: the
        peer's own word may still be on its way to others, who would take the leaving for the cause."""
        if self.failed is not None and not self._told:
            self._tell(self.failed)
        for peer in self.unaware():
            self.senders[peer].queue_control(Control(Type.CLOSE, 0))

    def unaware(self) -> list[int]:
        """Peers that are not known to know that this rank leaves, and have not left themselves."""
        return [
            peer
            for peer, sender in self.senders.items()
            if peer not in self.gone and not sender.outbox.goodbye_heard
        ]

    def _check_alive(self) -> None:
        if self.failed is not None:
            raise ClosedError(f"this group failed before and cannot be used: {self.failed}") from self.failed

    # --- verbs

    def receive_burst(self, batch: Sequence[Slab], *, now: float) -> None:
        """Take received datagrams."""
        self._feedback_at = 0.0
        if batch:
            self._backlog.note(now - min(slab.received_at for slab in batch), now)
        self._intake.take(batch, now)
        self._after_receive(now)

    def bursts_to_send(self, *, now: float, most: int = 64) -> Iterator[Burst | Train]:
        """What may leave now: control and feedback, and up to ``most`` trains or bursts of some size, peers in turn. Each is
        valid until the next is asked for, and counts as sent."""
        if self._replies:
            for reply in self._take_replies():
                yield self._reply_burst(reply, now)
        if now >= self._feedback_at:
            self._queue_feedback(now)
        order, peers, idle = self._order, len(self._order), 0
        while most > 0 and idle < peers:
            turn = self._turn
            self._turn = turn + 1 if turn + 1 < peers else 0
            sender = order[turn]
            burst = sender.next_burst(now) if sender.control or sender.active else None
            if burst is None:
                sender.arm_if_blocked(now)
                idle += 1
                continue
            idle = 0
            if isinstance(burst, Train) or len(burst.data) > SMALL_BYTES:
                most -= 1
            yield burst

    def next_timeout(self) -> float:
        """When ``on_timer`` has something to do."""
        at = self.handshake.next_timeout()
        for _, sender, receiver in self._pairs:
            if (due := sender.next_timeout()) < at:
                at = due
            if (due := receiver.next_timeout()) < at:
                at = due
        return at

    def on_timer(self, *, now: float) -> None:
        """Timeouts, stop rules, retransmissions and feedback that are due."""
        self._replies += self.handshake.on_timer(now)
        for _, sender, receiver in self._pairs:
            sender.on_timer(now)
            receiver.on_timer(now)
        self._after_receive(now)

    def path_states(self, peer: int) -> list[PathState]:
        """What is known of each path to a peer."""
        return self.senders[peer].path_states()

    def events(self) -> list[Completed]:
        """What has completed since the last call."""
        events, self._events = self._events, []
        return events

    def owing(self) -> list[int]:
        """Peers that have not acknowledged all that must arrive, and have not left."""
        return [peer for peer, sender in self.senders.items() if peer not in self.gone and not sender.idle()]

    def unheard(self) -> list[int]:
        """Peers that may lack this rank's last word in the handshake: they began it, and nothing but that has come of them."""
        receivers = self.receivers.items()
        return [
            peer
            for peer, each in receivers
            if peer > self.rank and each.heard_at == float("-inf") and peer not in self.gone
        ]

    def idle(self) -> bool:
        """Everything that must arrive has been acknowledged."""
        return not self._replies and not self.owing()

    # --- receiving

    def _on_other_version(self, header: tuple[int, ...], source: Address, size: int) -> None:
        self._replies += self.handshake.on_other_version(
            header[0], header[1], header[6], header[3], source, size
        )

    def _on_handshake(self, slab: Slab, at: int, now: float) -> None:
        datagram = slab.datagram(at)
        header = wire.decode_header(datagram)
        cookies, ignored = self.handshake.bad_cookies, self.handshake.ignored
        if header.type == Type.HELLO:
            self.greeted_at[header.rank] = now
        self._replies += self.handshake.on_datagram(header, datagram[HEADER_BYTES:], slab.source(at), now)
        for reason, count in (
            (Drop.COOKIE, self.handshake.bad_cookies - cookies),
            (Drop.HANDSHAKE, self.handshake.ignored - ignored),
        ):
            if count:
                self.drops[reason] += count
        key = (header.rank, header.path)
        if key in self.handshake.addresses:
            path = self.senders[header.rank].paths[header.path]
            path.address = self.handshake.addresses.pop(key)
            path.window_bytes = self.handshake.windows[header.rank]
            self.senders[header.rank].on_proved(header.path, now)

    def _on_control(
        self, receiver: PeerReceiver, slab: Slab, at: int, size: int, header: tuple[int, ...], now: float
    ) -> None:
        start = slab.offset + at * slab.stride + HEADER_BYTES
        payload = slab.arena[start : start + size - HEADER_BYTES].tobytes()
        peer, type_ = header[6], header[1]
        if type_ == Type.FEEDBACK:
            feedback = wire.decode_feedback(payload)
            if feedback is None or feedback.path >= self.config.paths:
                self.drops[Drop.PAYLOAD] += 1
            else:
                self.senders[peer].on_feedback(feedback.path, header[10], feedback, slab.arrival(at), now)
            return
        if not receiver.on_control(slab, at, header, payload, now):
            return
        if type_ == Type.OPEN:
            self._on_open(peer, receiver, header[8], now)
        elif type_ == Type.FINAL:
            final = wire.decode_final(payload)
            if final is None:
                self.drops[Drop.PAYLOAD] += 1
            else:
                self.senders[peer].on_final(header[8], final, now)
        elif type_ == Type.LEFT:
            left = wire.decode_left(payload)
            if left is None:
                self.drops[Drop.PAYLOAD] += 1
            else:
                self.senders[peer].on_left(left, now)
        elif type_ == Type.ABORT:
            self._on_abort(peer, payload)
        elif type_ == Type.CLOSE:
            self._on_close(peer)
        elif type_ == Type.CLOSING:
            self.closing.add(peer)
        elif type_ == Type.STATE:
            self._on_state(peer, header[8], payload)

    def _on_open(self, peer: int, receiver: PeerReceiver, message_id: int, now: float) -> None:
        message = receiver.messages.get(message_id)
        opened = message.opened if message is not None else None
        if opened is None:
            return
        key = round_of(message_id)
        round_ = self.rounds.active.get(key)
        if round_ is None:
            if not any(known_peer == peer for known_peer, _ in self._early_opens.setdefault(key, [])):
                self._early_opens[key].append((peer, opened))
            return
        self._compare(round_, peer, opened)
        if message is not None and message.posted and not message.closed:
            self._compare_spec(peer, message)
        if message is not None and self.failed is None:
            receiver.check(message, now)

    def _on_state(self, peer: int, message_id: int, payload: bytes) -> None:
        decoded = decode_state(payload)
        if decoded is None:
            self.drops[Drop.PAYLOAD] += 1
            return
        standing, asks = decoded
        round_ = self.rounds.active.get(round_of(message_id))
        if round_ is not None:
            round_.counters.told[peer] = standing
        if asks:
            answer = encode_state(self.rounds.standing(round_of(message_id)), asks=False)
            self.senders[peer].queue_question(Control(Type.STATE, message_id, answer))

    def _on_abort(self, peer: int, payload: bytes) -> None:
        self.gone.add(peer)
        self.fail(decode_abort(peer, payload), tell=False)

    def _on_close(self, peer: int) -> None:
        """The peer leaves: what we wait for from it will not come; what we still repeat to it is pointless. A receive of a
        transfer ends alone: only who posted it knows whether somebody waits for it, as a recv from any rank goes on without."""
        self.gone.add(peer)
        sender, receiver = self.senders[peer], self.receivers[peer]
        sender.forget_control()
        waiting = [message for message in receiver.messages.values() if message.posted]
        collectives = [message.id for message in waiting if is_collective(round_of(message.id))]
        if sender.messages or collectives:
            self.fail(left_in_round(peer, self.rank, min(collectives or sender.messages)), tell=True)
            return
        for message in waiting:
            receiver.forget(message)
            self._finish(message, left_before(peer, self.rank, message.id))

    def _on_duplicates(self, message_id: int, chunks: int) -> None:
        round_ = self.rounds.active.get(round_of(message_id))
        if round_ is not None:
            round_.counters.chunks_duplicate += chunks

    # --- mismatches

    def _compare(self, round_: Round, peer: int, opened: wire.Open) -> None:
        if opened.signature != round_.signature:
            self.fail(call_mismatch(round_, opened, self.rank, peer), tell=True)

    def _compare_spec(self, peer: int, message: Incoming) -> None:
        assert message.opened is not None and message.spec is not None
        if message.opened.spec != message.spec:
            error = size_mismatch(message.opened.spec, message.spec, self.rank, peer)
            self.fail(error, tell=True)

    # --- completion and feedback

    def _after_receive(self, now: float) -> None:
        for peer, receiver in self.receivers.items():
            finals = receiver.finals
            if finals.completed:
                completed, finals.completed = finals.completed, []
                for message in completed:
                    hold = self._both_ways(peer, message)
                    self._send_final(peer, receiver, message.id, now if hold else None)
                    self._finish(message, message.outcome())
            if finals.late:
                late, finals.late = finals.late, set()
                for message_id in late:
                    self._repeat_final(peer, receiver, message_id)

    def _finish(self, message: Incoming, outcome: Received | Exception) -> None:
        if message.on_done is not None:
            self._events.append(Completed(message.on_done, outcome))
            message.on_done = None

    def _both_ways(self, peer: int, message: Incoming) -> bool:
        """A small message of an exact round, in which this rank gives the peer as much as it takes: the peer waits for ours, and
        not for our word on its own (``Outgoing.detach``)."""
        spec = message.spec
        if spec is None or spec.budget > 0.0 or spec.nbytes > SMALL_EXCHANGE_BYTES:
            return False
        key = round_of(message.id)
        return is_collective(key) and (peer, message.id) in self._given.get(key, ())

    def _send_final(
        self, peer: int, receiver: PeerReceiver, message_id: int, hold_from: float | None = None
    ) -> None:
        """At once, or from ``hold_from`` on with what leaves next."""
        if peer in self.gone:
            return
        sender = self.senders[peer]
        finals = [
            Control(Type.FINAL, message_id, wire.encode_final(part))
            for part in receiver.tombstones.get(message_id, ())
        ]
        for control in finals:
            if hold_from is None:
                sender.queue_control(control)
            else:
                sender.hold(control, hold_from)

    def _repeat_final(self, peer: int, receiver: PeerReceiver, message_id: int) -> None:
        """Something came for a message that is over: the peer may not have had our FINAL."""
        if message_id in receiver.tombstones and not self.senders[peer].final_pending(message_id):
            self._send_final(peer, receiver, message_id)

    def _window_bytes(self, now: float) -> int:
        """Credit of one peer: the buffer's share among the peers that are sending or are awaited, or have just sent: at the end
        of a round all of them will start the next at once. While none is, as when paths are asked for their round trip before the
        first round, all will."""
        since = now - ACTIVE_S
        active = sum(
            1
            for receiver in self.receivers.values()
            if receiver.messages or receiver.feedback.data_at > since
        )
        return max(self._credit_bytes // (active or max(1, self.world_size - 1)), 4096)

    def _queue_feedback(self, now: float) -> None:
        next_at = float("inf")
        for _, sender, receiver in self._pairs:
            for index, path in enumerate(receiver.paths):
                if path.unreported_bytes >= receiver.feedback.every_bytes or path.asked or path.due_at <= now:
                    grants, window = self._grants(receiver), self._window_bytes(now)
                    asked = path.asked
                    told, copies = receiver.take_feedback(path, window, grants, self.max_chunk_bytes, now)
                    for again, payloads in ((False, told), (True, copies)):
                        for way in sender.feedback_ways(index, asked=asked, again=again) if payloads else ():
                            for payload in payloads:
                                sender.queue_control(
                                    Control(Type.FEEDBACK, 0, payload, path=way, about=index)
                                )
                elif path.due_at < next_at:
                    next_at = path.due_at
        self._feedback_at = next_at

    def _grants(self, receiver: PeerReceiver) -> tuple[tuple[int, int], ...]:
        grants = [(m.id, m.grant_limit) for m in receiver.messages.values() if m.posted]
        return tuple(grants[: wire.MAX_GRANTS])

    def _grant(self, peer: int, now: float) -> None:
        """Tell the peer at once that a receive was posted, or has room for more."""
        path = self.receivers[peer].paths[0]
        path.due_at = self._feedback_at = min(path.due_at, now)

    # --- handshake datagrams

    def _take_replies(self) -> list[Reply]:
        replies, self._replies = self._replies, []
        return replies

    def _reply_burst(self, reply: Reply, now: float) -> Burst:
        header = wire.Header(
            wire.VERSION, reply.type, 0, reply.path, 1, 0, self.rank, self.session, 0, 0, 0, wire.clock_us(now), 0, 0, 0,
            len(reply.payload),
        )  # fmt: skip
        buffer = self._buffer
        nbytes = buffer.fill_control(wire.encode_header(header), reply.payload)
        return Burst(buffer.control[:nbytes], nbytes, reply.path, 0, reply.address, buffer.control_pointer)
