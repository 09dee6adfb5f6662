"""Sending to one peer: which burst leaves next, on which path, and what the peer's feedback says of those that left.

Theory of operation. Each (path, class) numbers its bursts; a ``Flight`` remembers what each carried until it is
acknowledged or declared lost. Loss needs evidence: a later datagram of the same path and class has arrived, or of a less urgent
class (a network with priorities lets it wait, never pass), and the flight is older than a round trip and the reordering seen so
far (RFC 9002, section 6.1.2, without its packet threshold: spraying and jitter reorder by design). Silence is no loss: after a
retransmission timeout an END or PING asks for feedback, and is itself the later arrival that gives evidence. Timeouts do not
back off for the first ``STEADY_PROBES`` tries, so that the end of a burst of loss is noticed within one timeout. Where there are
several paths, silence of one while others answer is a verdict on the path (``paths.peer_paths``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from dblp.transport import wire
from dblp.transport.burst import TRAIN_BURSTS, BurstBuffer, Train, burst_chunks
from dblp.transport.config import HEADER_BYTES, MAX_COPIES, TransportConfig
from dblp.transport.flight import Control, Flight, SendSpace, full_mask
from dblp.transport.message import UNTAGGED, MessageSpec, Sent, class_counts
from dblp.transport.outgoing import Outgoing
from dblp.transport.paths.base import ANY_CHUNKS, PathChoice
from dblp.transport.paths.peer_paths import PROBES_A_TIMEOUT, PathState, PeerPaths
from dblp.transport.paths.spray import SprayChoice
from dblp.transport.port import Address, Burst, Bytes
from dblp.transport.send_path import ASK_GAP_S, SendPath
from dblp.transport.wire import Type

CLEAN_LOSS = 0.5
"""Datagrams lost lately (a decaying count) below which a path is clean: the last burst says itself that it is the last."""
CHEAP_BYTES = 32 * 1024
"""What copies of a few chunks may take together, whatever their number: half a burst."""
LEAST_COPIES = 4
"""Copies of a question that was asked several times in vain, whatever the path is known to lose."""
INLINE_QUEUE = 32
"""Control that waits to leave, above which messages of one chunk wait for their turn as others do."""
KEPT_QUESTIONS = 8
"""Questions of a silent class that are remembered."""


def _bursts_ahead(seq: int, base: int) -> int:
    """How far burst ``seq`` lies beyond the one whose low 32 bits are ``base``; negative before it."""
    return ((seq - base + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


class PeerSender:
    """Everything that leaves for one peer."""

    def __init__(
        self,
        *,
        rank: int,
        session: int,
        addresses: Sequence[Address],
        window_bytes: int,
        config: TransportConfig,
        buffer: BurstBuffer,
        watermark: Callable[[int], int],
        datagram_bytes: int,
        whole_to: Collection[str] = (),
        choice: PathChoice | None = None,
    ) -> None:
        """``whole_to``: hosts to which bursts stay whole (``port.PortFacts.whole_bursts``); ``choice``: which of several paths
        a burst takes, default: in turn."""
        self.rank = rank
        self.session = session
        self.config = config
        self.paths = [
            SendPath(path, address, window_bytes, config, whole_bursts=address.host in whole_to)
            for path, address in enumerate(addresses)
        ]
        self.messages: dict[int, Outgoing] = {}
        self.control: deque[Control] = deque()
        self.active: deque[Outgoing] = deque()  # messages that may have something to send
        self._active_ids: set[int] = set()
        self._buffer = buffer
        self._ended_below = watermark
        self._several: PeerPaths | None = None
        if len(self.paths) > 1:
            self._several = PeerPaths(self.paths, choice or SprayChoice(len(self.paths), config.path_chunks))
        self._tried_at = 0.0
        self._early_bytes = config.early_bytes
        self._datagram_bytes = datagram_bytes
        self.datagrams_sent = 0
        self._whole = 0  # datagrams of chunks in bursts and trains that a feedback acknowledged to the last

    # --- messages

    def send(
        self,
        message: int,
        spec: MessageSpec,
        data: Bytes,
        signature: bytes,
        energy: float,
        *,
        offered: bool,
        classes: npt.NDArray[np.uint8] | None = None,
    ) -> Outgoing:
        """Start a message; ``classes`` as in ``interface.EndpointLike.send``."""
        counts = UNTAGGED if classes is None or not spec.chunks else class_counts(spec, classes)
        if counts == UNTAGGED:
            classes = None
        header = wire.Header(
            wire.VERSION,
            Type.DATA,
            0,
            0,
            0,
            0,
            self.rank,
            self.session,
            message,
            spec.chunks,
            0,
            0,
            0,
            0,
            1,
            spec.chunk_bytes,
        )
        out = Outgoing(
            message,
            spec,
            data,
            bytearray(wire.encode_header(header)),
            burst_chunks(spec.chunk_bytes),
            classes,
        )
        out.wakes = self._wake
        if any(path.lost_lately >= CLEAN_LOSS for path in self.paths):
            out.hurry()
        allowed = min(max(self._early_bytes, 0) // spec.chunk_bytes, spec.chunks)
        if allowed and spec.chunks - allowed <= out.per_burst:
            allowed = (
                spec.chunks
            )  # up to a burst more than the pool: the receiver has room for it (EARLY_SLACK_BYTES)
        out.raise_limit(allowed)
        self._early_bytes -= allowed * spec.chunk_bytes
        out.granted = spec.chunks == 0
        self.messages[message] = out
        if self._several is not None:
            self._several.choice.on_started(out)
        opened = wire.encode_open(wire.Open(spec, signature, energy, counts))
        if allowed == 1 == spec.chunks and self._goes_inline(len(opened) + spec.nbytes):
            out.inline = opened
        else:
            self._open(out, opened)
        out.opened = True
        if offered:
            out.offer(0, spec.chunks)
        return out

    def _goes_inline(self, payload_bytes: int) -> bool:
        """A message of one chunk may leave with its OPEN: there is room for it in a datagram, and on the path, which counts
        control but does not hold it back."""
        path = self.paths[0] if self._several is None else self._several.main
        datagram = HEADER_BYTES + payload_bytes
        return (
            datagram <= self._datagram_bytes
            and len(self.control) < INLINE_QUEUE
            and path.room() >= path.charge(datagram, 1)
        )

    def _open(self, out: Outgoing, payload: bytes) -> None:
        out.open_control = Control(Type.OPEN, out.id, payload, chunks=out.spec.chunks)
        self.queue_control(out.open_control)

    def drop_round(self, round_key: int) -> None:
        """Forget the round's messages that still use the caller's memory: the round ended without them."""
        for message in [m for m in self.messages.values() if m.id >> 16 == round_key and not m.detached]:
            self._forget(message)
            message.finish(Sent(missing=np.empty(0, np.uint32)))

    def fail(self, error: Exception) -> None:
        """Every message ends with ``error``."""
        for message in list(self.messages.values()):
            self._forget(message)
            message.finish(error)
        self.active.clear()
        self._active_ids.clear()

    def idle(self) -> bool:
        """Nothing waits to leave and nothing that must arrive is unacknowledged."""
        if self.messages or self.control:
            return False
        return not any(
            flight.control is not None and flight.control.reliable and not flight.control.dropped
            for path in self.paths
            for space in path.spaces
            for flight in space.flights
        )

    def _wake(self, message: Outgoing) -> None:
        if message.inline is not None:
            if not message.unoffered:
                payload, message.inline = message.inline, None
                self._open(message, payload + message.source.data.tobytes())
            return
        if message.id not in self._active_ids and message.sendable():
            self._active_ids.add(message.id)
            self.active.append(message)

    def _forget(self, message: Outgoing) -> None:
        """Take the message's flights back: its credit is free again."""
        self.messages.pop(message.id, None)
        if message.open_control is not None:
            message.open_control.dropped = True  # whoever has told the end of it knows what it was
        if self._several is not None:
            self._several.choice.on_ended(message)
        if not message.granted:
            self._grant(message, message.limit)
        for path in self.paths:
            for space in [path.spaces[message.cls]] if message.lanes is None else path.spaces:
                if any(flight.message is message for flight in space.flights):
                    for flight in space.flights:
                        if flight.message is message:
                            path.inflight_bytes -= flight.nbytes
                            path.inflight_cost -= flight.cost
                    space.flights = deque(flight for flight in space.flights if flight.message is not message)

    def _grant(self, message: Outgoing, limit: int) -> None:
        if not message.granted:
            message.granted = True
            self._early_bytes += message.limit * message.spec.chunk_bytes
        message.raise_limit(limit)
        self._wake(message)

    # --- what leaves

    def _watermark(self, group: int) -> int:
        """Rounds of the group below this have ended here and nothing of them is on its way to this peer any more."""
        watermark = self._ended_below(group)
        for message_id in self.messages:  # in order of their rounds: the first of the group decides
            if message_id >> 48 == group:
                return min(watermark, (message_id >> 16) & 0xFFFFFFFF)
        return watermark

    def queue_control(self, control: Control) -> None:
        """Let a control datagram leave with the next bursts; in copies what is repeated until it arrives, where much is lost."""
        self.control.append(control)
        if control.reliable:
            path = self.paths[0] if self._several is None else self._several.main
            self.control.extend(control.copy() for _ in range(path.question_copies() - 1))

    def final_pending(self, message_id: int) -> bool:
        """A FINAL of this message waits to leave or to be acknowledged."""
        queued = any(c.type is Type.FINAL and c.message == message_id for c in self.control)
        return queued or any(
            f.control is not None and f.control.type is Type.FINAL and f.control.message == message_id
            for path in self.paths
            for f in path.spaces[0].flights
        )

    def arm_if_blocked(self, now: float) -> None:
        """Probe in time if chunks wait for a grant while nothing is in flight that would be answered."""
        path = self.paths[0] if self._several is None else self._several.main
        if (
            self.messages
            and path.probe_at == float("inf")
            and any(m.blocked() for m in self.messages.values())
        ):
            path.arm_probe(now)

    def next_burst(self, now: float) -> Burst | Train | None:
        """The next burst or train that may leave now, or None. It counts as sent."""
        self._tried_at = now
        waiting = 0
        if self.control and (bundle := self._bundle(now)) is not None:
            return bundle
        while self.active:
            message = self.active[0]
            if message.end_due:
                end = Control(Type.END, message.id, chunks=message.spec.chunks, cls=message.end_cls)
                end.path = message.end_due.popleft()
                end.copies = message.end_due.count(end.path)
                self.control.append(end)
                return self._bundle(now)
            if not message.sendable():
                self.active.popleft()
                self._active_ids.discard(message.id)
                continue
            message.aim()
            several, most = self._several, ANY_CHUNKS
            if several is None:
                path = self.paths[0]
                if not self._has_room(message, path, now, most):
                    return None
            else:
                picked = several.pick(message, now, self._has_room)
                if picked is None:
                    waiting += 1
                    if not several.choice.pinned or waiting >= len(self.active):
                        return None
                    self.active.rotate(-1)
                    continue
                path, most = picked
            burst = self._data_burst(message, path, most, now)
            if burst is not None:
                return burst
        return None

    def _has_room(self, message: Outgoing, path: SendPath, now: float, most: int) -> bool:
        """The path has its pacing time behind it, and room and credit for which it is worth to send (any has if nothing is in
        flight) at most ``most`` chunks."""
        if path.next_send_at > now:
            return False
        if path.inflight_cost and path.room() < self._worth_sending(message, path, most):
            return False
        return path.spaces[message.cls].free_bursts() > 0

    @staticmethod
    def _worth_sending(message: Outgoing, path: SendPath, most: int) -> int:
        """Room (bytes, at the kernel's charge) for which it is worth to send behind what is in flight: a datagram for a repair,
        else a whole train, what is left of the message, half a window or a portion, whichever is least. Sending less, as
        acknowledgements trickle in, would cost a system call and an answer for each bit (RFC 9293, section 3.8.6.2.1)."""
        stride = message.spec.chunk_bytes + HEADER_BYTES
        datagram = path.charge(stride, 1)
        if message.repairable or (message.copies and not message.fresh):
            return datagram
        chunks = min(TRAIN_BURSTS * message.per_burst, message.sendable_run, most)
        train = path.charge(chunks * stride, chunks, -(-chunks // message.per_burst))
        return max(datagram, min(train, path.window() // 2, path.quantum()))

    def _data_burst(self, message: Outgoing, path: SendPath, most: int, now: float) -> Burst | Train | None:
        """The next burst or train of the message, of at most ``most`` chunks."""
        room = path.portion()
        space = path.spaces[message.cls]
        stride = message.spec.chunk_bytes + HEADER_BYTES
        burst_cost = path.charge(message.per_burst * stride, message.per_burst)
        again = message.repairable > 0
        copy = not again and bool(message.copies) and not message.fresh
        times = 1 if copy else self._times(message, path, again, now)
        if not (again or copy) and times == 1 and room >= 2 * burst_cost:
            free = min(room // burst_cost, space.free_bursts(), most // message.per_burst)
            bursts = message.whole_bursts(min(TRAIN_BURSTS, free))
            if bursts >= 2:
                ask = room - bursts * burst_cost < min(bursts * burst_cost, path.window() // 2)
                return self._train(message, path, space, bursts, ask, now)
        most = min(most, message.per_burst if room >= burst_cost else max(1, room // path.charge(stride, 1)))
        chunks: npt.NDArray[np.uint32] | None = None
        first, decides = 0, times == 1
        if copy:
            chunks, decides = message.take_copy(most)
            count = len(chunks)
        elif again or message.lanes is not None:
            chunks = message.take_lost(most) if again else message.take_tagged(most)
            count = len(chunks)
        else:
            first, count = message.take_run(most)
        if not count:
            if copy:
                self._note_sent(message, path, False)
            return None
        if again or times > 1:
            taken = np.arange(first, first + count, dtype=np.uint32) if chunks is None else chunks
            message.repeat(taken, times, again=again)
        ask = room - path.charge(count * stride, count) < min(burst_cost, path.window() // 2)
        self._stamp(message, path, count, space.next_seq, ask and decides, now)  # the last copy asks for all
        if chunks is None:
            nbytes = self._buffer.fill_run(
                message.row, message.source, message.spec.chunk_bytes, first, count
            )
        else:
            nbytes = self._buffer.fill_scattered(
                message.row, message.source, message.spec.chunk_bytes, chunks
            )
        self._launch(
            Flight(
                space.next_seq,
                count,
                nbytes,
                now,
                message,
                first,
                chunks,
                None,
                path.charge(nbytes, count),
                decides=decides,
            ),
            path,
            space,
            now,
        )
        self._note_sent(message, path, not again and not copy)
        if ask and path.ask_at <= now and path.room() < path.charge(stride, 1) and path.loses_much(now):
            self._ask(path, message.cls, now)
        return Burst(
            self._buffer.data[:nbytes], stride, path.path, message.cls, path.address, self._buffer.pointer
        )

    def _times(self, message: Outgoing, path: SendPath, again: bool, now: float) -> int:
        """How often what leaves next is to leave: once, but on a path that has just lost much. There it leaves in copies for
        which the window has room, to fill the round trip in which nothing else would leave. Where all of them together are less
        than a burst, their number is no object."""
        if self.config.copies == 1 or not path.loses_much(now):
            return 1
        nbytes = len(message.lost) * message.spec.chunk_bytes if again else message.spec.nbytes
        most = max(self.config.copies, min(CHEAP_BYTES // nbytes, MAX_COPIES))
        most = min(most, int(path.window() / (path.scale * nbytes)))
        message.loss_share = path.heavy_share
        return message.times_again(most) if again else message.times_first(most)

    def _ask(self, path: SendPath, cls: int, now: float) -> None:
        """The window is full, and of the bursts that ask for feedback most are lost: ask aloud, once a round trip."""
        path.ask_at = now + max(ASK_GAP_S, path.net_rtt)
        copies = path.question_copies()
        question = Control(Type.PING, 0, cls=cls, path=path.path)
        question.copies = copies
        self.control.extend([question] * copies)

    def _train(
        self, message: Outgoing, path: SendPath, space: SendSpace, bursts: int, ask: bool, now: float
    ) -> Train:
        """Several full bursts that leave together."""
        seq, chunk_bytes, source = space.next_seq, message.spec.chunk_bytes, message.source
        first, chunks = 0, None
        if message.lanes is None:
            first = message.take_bursts(bursts)
        else:
            chunks = message.take_tagged(bursts * message.per_burst)
        self._stamp(message, path, message.per_burst, seq, ask, now)
        route = (path.path, message.cls, path.address)
        if chunks is None:
            train = self._buffer.train(message.row, source, chunk_bytes, first, bursts, seq, route)
        else:
            train = self._buffer.train_scattered(message.row, source, chunk_bytes, chunks, seq, route)
        nbytes = bursts * message.per_burst * train.segment
        self._launch(
            Flight(
                seq,
                message.per_burst,
                nbytes,
                now,
                message,
                first,
                chunks,
                None,
                path.charge(nbytes, bursts * message.per_burst, bursts),
                bursts,
            ),
            path,
            space,
            now,
        )
        self._note_sent(message, path, True)
        return train

    def _note_sent(self, message: Outgoing, path: SendPath, first_time: bool) -> None:
        """After the last of what can leave, END asks at once what came: of large or bounded messages, and of repairs. Where
        nothing has been lost lately, the last burst has said so itself (``wire.LAST``)."""
        message.paths.add(path.path)
        if not first_time:
            if message.all_sent and not message.repairable:
                message.end_due.extend([path.path] * path.question_copies())
        elif message.all_sent and self._ends(message) and not self._says_last(message, path):
            message.end_due.extend(sorted(message.paths))

    @staticmethod
    def _ends(message: Outgoing) -> bool:
        """Worth an END: a message of one burst is answered by FINAL as soon."""
        return message.spec.chunks > message.per_burst or message.may_miss > 0

    @staticmethod
    def _says_last(message: Outgoing, path: SendPath) -> bool:
        """The burst that has just been taken off the message is its last, and may say so: if it is lost, only a timeout tells."""
        return path.lost_lately < CLEAN_LOSS and message.paths <= {path.path}

    def _stamp(self, message: Outgoing, path: SendPath, count: int, seq: int, ask: bool, now: float) -> None:
        cls = message.cls | wire.ASK if ask or message.blocked() else message.cls
        if (
            message.all_sent
            and not message.repairable
            and self._ends(message)
            and self._says_last(message, path)
        ):
            cls |= wire.LAST
        wire.stamp(message.head, cls, path.path, count, seq, now, self._watermark(message.id >> 48))

    def _bundle(self, now: float) -> Burst | None:
        """What waits in ``control`` for one path and class, as the records of one datagram. Copies of one thing never share a
        datagram: they are there because datagrams are being lost."""
        path: SendPath | None = None
        cls, at = 0, 0
        seen: set[tuple[int, int, int, bytes]] = set()
        while self.control:
            control = self.control[0]
            if control.dropped:
                self.control.popleft()
                continue
            key = (
                control.type,
                control.message,
                control.cls,
                control.payload if control.type is Type.FINAL else b"",
            )
            if path is None:
                path, cls = self._control_path(control), control.cls
            elif (
                key in seen
                or control.cls != cls
                or not self._goes_by(control, path)
                or at + HEADER_BYTES + len(control.payload) > self._datagram_bytes
            ):
                break
            self.control.popleft()
            seen.add(key)
            at = self._put_control(control, path, at, now)
        if path is None:
            return None
        self.datagrams_sent += 1
        buffer = self._buffer
        return Burst(buffer.control[:at], at, path.path, cls, path.address, buffer.control_pointer)

    def _control_path(self, control: Control) -> SendPath:
        """The path that it names, unless that is left (only probes and answers to them take it then); else the next in turn."""
        several = self._several
        if several is None:
            return self.paths[0]
        if control.path is None:
            return several.next_control()
        path = self.paths[control.path]
        return path if path.alive or control.type in (Type.PING, Type.FEEDBACK) else several.main

    @staticmethod
    def _goes_by(control: Control, path: SendPath) -> bool:
        """Whether a control datagram may share one that leaves on a path: with probes of a dead one it would be lost."""
        if control.path is None:
            return path.alive
        return control.path == path.path and (path.alive or control.type in (Type.PING, Type.FEEDBACK))

    def _put_control(self, control: Control, path: SendPath, at: int, now: float) -> int:
        """Write a record of a bundle at ``at``; returns where it ends."""
        space = path.spaces[control.cls]
        acknowledged = control.type is not Type.FEEDBACK
        if acknowledged:
            seq = space.next_seq
        else:  # counted by the path that it speaks of
            about = self.paths[control.about]
            about.feedback_seq += 1
            seq = about.feedback_seq
        head = wire.encode_fields(
            wire.VERSION, control.type, control.cls, path.path, 1, 0, self.rank, self.session, control.message,
            control.chunks, seq & 0xFFFFFFFF, wire.clock_us(now), self._watermark(control.message >> 48), 0,
            control.copies, len(control.payload),
        )  # fmt: skip
        stop = self._buffer.fill_control(head, control.payload, at)
        nbytes = stop - at
        if acknowledged:
            cost = nbytes if at else path.charge(nbytes, 1)
            self._launch(Flight(seq, 1, nbytes, now, None, 0, None, control, cost), path, space, now)
        else:
            path.bytes_sent += nbytes
        return stop

    def _launch(self, flight: Flight, path: SendPath, space: SendSpace, now: float) -> None:
        space.next_seq += flight.bursts
        space.flights.append(flight)
        path.inflight_bytes += flight.nbytes
        path.inflight_cost += flight.cost
        path.bytes_sent += flight.nbytes
        if flight.control is None:
            self.datagrams_sent += flight.count * flight.bursts
        if path.probe_at == float("inf"):
            path.arm_probe(now)
        pace = path.congestion.pacing_bps()
        if pace and flight.message is not None:
            path.next_send_at = max(path.next_send_at, now - 1e-3) + 8.0 * flight.nbytes / pace

    # --- what the peer says

    def on_feedback(
        self, path_id: int, number: int, feedback: wire.Feedback, received_at: float, now: float
    ) -> None:
        """Masks, credit, grants and a round trip sample. Of an older feedback than the last (``number`` counts them on each
        path), overtaken or replayed, only the masks and grants hold still: they never take anything back."""
        path, several = self.paths[path_id], self._several
        newer = _bursts_ahead(number, path.feedback_seen & 0xFFFFFFFF) > 0
        if newer:
            path.feedback_seen = number
            path.window_bytes = feedback.window_bytes
        for message_id, limit in feedback.grants:
            message = self.messages.get(message_id)
            if message is not None:
                self._grant(message, limit)
        before = path.inflight_bytes
        self._whole = 0
        before_news = path.acked_lately
        news = {
            space.cls & 3
            for space in feedback.spaces
            if self._on_masks(path, path.spaces[space.cls & 3], space, now)
        }
        arrived = path.acked_lately - before_news
        if news:
            path.forget_loss(arrived)
        if self._whole:
            path.settle(self._whole, 0)
        if several is not None:
            path.note_fate(arrived, 0)
            self._hear(several, path, feedback, bool(news), now)
        if news and newer:
            # From the datagram that arrived last: older flights in the same report may have waited long for a feedback that
            # got through. Without news (a grant, a repeated answer) the last arrival may be old.
            path.on_rtt(max(wire.since_us(feedback.echo, wire.clock_us(now)), 1e-6))
        acked = before - path.inflight_bytes
        if acked > 0:
            held = feedback.held_us * 1e-6
            rtt = wire.since_us(feedback.echo, wire.clock_us(received_at)) - held
            if rtt > 0.0:  # else the peer's clock or its holding time makes no sense
                path.net_rtt = rtt
            marked = path.newly_marked(feedback.marked) if newer else 0
            if several is not None:
                several.choice.on_acked(path.path, self._whole, marked=marked > 0, now=now)
            if path.net_rtt:
                path.on_acked(acked, now, marked * self.config.datagram_bytes, waiting=bool(self.active))
        if acked > 0 or (feedback.asked and newer):
            if all(not space.unanswered() or cls in news for cls, space in enumerate(path.spaces)):
                path.probes = 0  # else the question for a class of which the answer knows nothing goes on, in as many copies
            path.arm_probe(path.answered(news, now))
        self._detect_loss(path, now)
        if not any(space.flights for space in path.spaces):
            path.probe_at = float("inf")
            for message in self.messages.values():
                self._end_again(message, path)

    def _on_masks(self, path: SendPath, space: SendSpace, report: wire.Space, now: float) -> bool:
        """Acknowledge what the report names; True if there was anything new."""
        masks, base = report.masks, report.base
        kept: deque[Flight] = deque()
        flights = space.flights
        newest = -1
        while flights:
            flight = flights[0]
            ahead = _bursts_ahead(flight.seq, base)
            if ahead >= report.count:
                break
            flights.popleft()
            if ahead >= 0:
                got = (masks >> (ahead * wire.BURST_DATAGRAMS)) & flight.unacked
            else:  # a train of which the report has the end, or what it does not speak of any more
                got = (
                    masks << (-ahead * wire.BURST_DATAGRAMS) & flight.unacked if -ahead < flight.bursts else 0
                )
            if got:
                newest = flight.seq * wire.BURST_DATAGRAMS + got.bit_length() - 1
                space.acked_sent_at = max(space.acked_sent_at, flight.sent_at)
                arrived = got.bit_count()
                path.acked_lately += arrived
                if got != flight.unacked:
                    path.release_part(flight, arrived)
                self._on_acked(flight, got)
            if flight.unacked:
                kept.append(flight)
                if got and not flights:
                    self._ask_behind(flight, path)
            else:
                path.inflight_bytes -= flight.nbytes
                path.inflight_cost -= flight.cost
                if flight.control is None:
                    self._whole += flight.count * flight.bursts
                else:
                    path.note_question(0)
                    if flight.control.type is Type.END and flight.control.message in self.messages:
                        self.messages[flight.control.message].end_heard = True
        if kept:
            kept.extend(flights)
            space.flights = kept
        if newest > space.largest_acked:
            space.largest_acked = newest
        if space.lost:
            self._notice_late(path, space, report, now)
        return newest >= 0

    def _ask_behind(self, flight: Flight, path: SendPath) -> None:
        """A part of the last burst in flight has come: the rest is late or lost, and nothing behind it will tell which."""
        message = flight.message
        if message is not None and not message.done and message.all_sent and not message.end_due:
            message.end_due.append(path.path)
            self._wake(message)

    def _on_acked(self, flight: Flight, got: int) -> None:
        flight.unacked ^= got
        message = flight.message
        if message is None or message.done:
            return
        if flight.chunks is None:
            # Nearly always whole bursts: all of the flight's, or those of a train that had come so far.
            skipped = ((got & -got).bit_length() - 1) // wire.BURST_DATAGRAMS
            bursts = -(-got.bit_length() // wire.BURST_DATAGRAMS) - skipped
            if got >> (skipped * wire.BURST_DATAGRAMS) == full_mask(bursts, flight.count):
                first = flight.first + skipped * flight.count
                message.acked[first : first + bursts * flight.count] = True
                return
        message.acked[flight.chunks_at(got)] = True

    def _notice_late(self, path: SendPath, space: SendSpace, report: wire.Space, now: float) -> None:
        """Flights declared lost that came after all: the path reorders more than was believed."""
        for flight in space.lost:
            ahead = _bursts_ahead(flight.seq, report.base)
            if not 0 <= ahead < report.count:
                continue
            got = (report.masks >> (ahead * wire.BURST_DATAGRAMS)) & flight.unacked
            if got:
                self._on_acked(flight, got)
                late = now - flight.sent_at - path.srtt
                path.reorder_s = min(max(path.reorder_s, 1.25 * late), 0.5)

    def _detect_loss(self, path: SendPath, now: float) -> None:
        """Declare lost what was overtaken and is old enough; arm the timer for what is not old enough yet."""
        path.loss_at = float("inf")
        delay = path.loss_delay()
        passed = float("-inf")  # what was sent before is overtaken by a less urgent class
        for space in reversed(path.spaces):
            flights, below = space.flights, passed
            passed = max(passed, space.acked_sent_at)
            if not flights or (
                flights[0].seq * wire.BURST_DATAGRAMS >= space.largest_acked and flights[0].sent_at >= below
            ):
                continue
            kept: deque[Flight] = deque()
            for flight in flights:
                if flight.last_unacked > space.largest_acked and flight.sent_at >= below:
                    kept.append(flight)
                elif flight.sent_at + delay <= now:
                    self._on_lost(path, space, flight, now)
                else:
                    path.loss_at = min(path.loss_at, flight.sent_at + delay)
                    kept.append(flight)
            space.flights = kept

    def _on_lost(self, path: SendPath, space: SendSpace, flight: Flight, now: float) -> None:
        path.inflight_bytes -= flight.nbytes
        path.inflight_cost -= flight.cost
        lost = flight.unacked.bit_count()
        path.lost_lately += lost
        path.lost_at = now
        for waiting in self.messages.values():
            if waiting.portion > 1:
                waiting.hurry()
                self._wake(waiting)
        if self._several is not None:
            path.note_fate(0, lost)
        path.congestion.on_lost(flight.nbytes, now=now)
        if flight.control is not None:
            path.note_question(1)
            if flight.control.reliable and not flight.control.dropped:
                self.queue_control(flight.control)
            elif flight.control.type is Type.END:
                self._end_again(self.messages.get(flight.control.message), path)
            return
        path.settle(flight.count * flight.bursts, lost)
        space.lost.append(flight)
        message = flight.message
        if message is not None and not message.done:
            if flight.decides:
                message.loss_share = path.heavy_share
                message.add_lost(flight.chunks_at(flight.unacked))
            self._end_again(message, path)
            self._wake(message)

    def _end_again(self, message: Outgoing | None, path: SendPath) -> None:
        """END, or the burst that said LAST, may be among what was lost: a receiver whose bound is met waits for it, and where
        nothing is repaired or in flight, nothing else says it again."""
        if message is None or message.done or not message.may_miss or message.end_due or message.end_heard:
            return
        if message.all_sent and not message.repairable:
            message.end_due.append(path.path)
            self._wake(message)

    def on_final(self, message_id: int, final: wire.Final, now: float) -> None:
        """The receiver's last word on a message."""
        message = self.messages.get(message_id)
        if message is None:
            return
        outcome = message.add_final(final)
        if outcome is None:
            return
        before = [path.inflight_bytes for path in self.paths]
        self._forget(message)
        for path, inflight in zip(self.paths, before, strict=True):
            if (
                path.net_rtt and inflight > path.inflight_bytes
            ):  # small messages are rarely acknowledged otherwise
                path.on_acked(inflight - path.inflight_bytes, now, waiting=bool(self.active))
        message.finish(outcome)

    # --- timers

    def next_timeout(self) -> float:
        """Seconds (on the core's clock) at which ``on_timer`` has something to do; infinity if nothing has."""
        at = float("inf")
        for path in self.paths:
            if path.probe_at < at:
                at = path.probe_at
            if path.loss_at < at:
                at = path.loss_at
            if self.active and self._tried_at < path.next_send_at < at:
                at = path.next_send_at
        return at

    def on_timer(self, now: float) -> None:
        """Loss timers and retransmission timeouts that are due."""
        for path in self.paths:
            if path.loss_at <= now:
                self._detect_loss(path, now)
            if path.probe_at <= now:
                self._probe(path, now)

    def _probe(self, path: SendPath, now: float) -> None:
        """Ask for feedback in every class with something in flight that nothing overtook, and for grants that may have been lost.

        Repeated probes go out as several copies: in a loss burst of 80 % a single question and its single answer both arrive once
        in 25 times, eight copies of each two times in three.
        """
        if self._several is not None and self._judge(self._several, path, now):
            return
        path.probes += 1
        path.probe_at = float("inf")
        probes = self._questions(path)
        if probes:
            copies = max(path.question_copies(), min(path.probes + 1, LEAST_COPIES))
            if self._several is not None:
                copies = max(1, min(copies, PROBES_A_TIMEOUT // max(len(self._several.living), 1)))
            for probe in probes:
                probe.copies = copies
            self.control.extend(probes * copies)
            path.arm_probe(now)
            if self._several is not None:
                self._suspect(self._several, path, now)

    # --- several paths

    @property
    def bytes_sent(self) -> int:
        """Payload and headers of all that left, on all paths."""
        return sum(path.bytes_sent for path in self.paths)

    def path_states(self) -> list[PathState]:
        """What is known of each path."""
        return [
            PathState(
                path=path.path,
                address=path.address,
                proved=path.proved,
                alive=path.alive,
                rtt_s=path.srtt,
                loss_share=path.loss_share,
                bytes_sent=path.bytes_sent,
                times_left=path.times_left,
            )
            for path in self.paths
        ]

    def await_proof(self) -> None:
        """Several paths are used only once the handshake has proved them."""
        if self._several is not None:
            self._several.await_proof()

    def on_proved(self, path_id: int, now: float) -> None:
        """The handshake has proved a path. A question tells its round trip while nothing else is on its way: congestion control
        would take the queue of a busy beginning for a part of it."""
        if not self.paths[path_id].net_rtt:
            self.control.append(Control(Type.PING, 0, path=path_id))
        if self._several is not None:
            self._several.on_proved(self.paths[path_id], now)

    def on_left(self, mask: int, now: float) -> None:
        """The peer gets no answer on the paths whose bits are set: most likely they fail in both directions."""
        for path in self.paths:
            if self._several is not None and mask >> path.path & 1 and self._several.may_leave(path):
                self._leave(self._several, path, now)

    def feedback_ways(self, path_id: int, *, asked: bool, again: bool) -> tuple[int | None, ...]:
        """The paths for feedback that speaks of one; None: any that lives. It goes back on that path, but a copy, which is there
        because answers were lost, anywhere. Of a path that we have left, the answer to a question goes both ways: the
        peer may have left all the others."""
        if again or (self._several is not None and not self._several.uses(path_id)):
            return (None,)
        if self.paths[path_id].alive:
            return (path_id,)
        return (None, path_id) if asked else (None,)

    def _hear(
        self, several: PeerPaths, path: SendPath, feedback: wire.Feedback, news: bool, now: float
    ) -> None:
        """Feedback came about a path: it lives if there is news, and it may bear witness against silent ones."""
        if not news:
            return
        age = max(wire.since_us(feedback.echo, wire.clock_us(now)), 0.0)
        if several.on_answer(path, now - age, now):  # with nothing but probes in flight: of no interest now
            for space in path.spaces:
                while space.flights:
                    self._take_off(path, space.flights.popleft())
        for suspect in [*several.suspects]:
            if several.is_dead(suspect, now):
                self._condemn(several, suspect, now)

    def _judge(self, several: PeerPaths, path: SendPath, now: float) -> bool:
        """The timeout of a path: True if it is dead, was so, or its time has not come; then no other question is needed."""
        if not path.alive:
            path.probes += 1
            self._ask_again(path, now)
            return True
        if several.is_dead(path, now):
            self._condemn(several, path, now)
            return True
        return False

    def _suspect(self, several: PeerPaths, path: SendPath, now: float) -> None:
        """A path is silent: have others say whether it is the path or the peer."""
        verdict_at = path.silent_at()
        if verdict_at > now:  # it answered, but in another class
            path.probe_at = min(path.probe_at, verdict_at)
            return
        several.suspects.add(path)
        self.control.extend(Control(Type.PING, 0, path=other.path) for other in several.witnesses(path, now))

    def _condemn(self, several: PeerPaths, path: SendPath, now: float) -> None:
        """Our own verdict: leave the path, and tell the peer."""
        self._leave(several, path, now)
        self.control.append(Control(Type.LEFT, 0, wire.encode_left(1 << path.path)))

    def _leave(self, several: PeerPaths, path: SendPath, now: float) -> None:
        """Give up what is in flight on a path: it goes out again on the others."""
        several.leave(path, now)
        messages = set()
        for space in path.spaces:
            flights, space.flights = space.flights, deque()
            for flight in flights:
                self._on_lost(path, space, flight, now)
                messages.add(flight.control.message if flight.control is not None else _id_of(flight))
            space.lost.clear()  # what the path brought before it died is no sign of reordering when it tells of it at last
        path.forget_fates()
        for message in filter(None, map(self.messages.get, messages)):
            message.loss_share = several.main.loss_share
            message.paths.discard(path.path)
            if message.all_sent and not message.repairable and not message.end_due:
                message.end_due.append(several.main.path)
            self._wake(message)
        self._ask_again(path, now)

    def _ask_again(self, path: SendPath, now: float) -> None:
        """Probe a path that was left."""
        for space in path.spaces:
            self._trim_probes(path, space)
        self.control.append(Control(Type.PING, 0, path=path.path))
        path.arm_probe(now)

    def _questions(self, path: SendPath) -> list[Control]:
        probes = []
        for cls, space in enumerate(path.spaces):
            if not space.unanswered():
                continue
            self._trim_probes(path, space)
            ended = self._ended(space)
            for owner in ended:
                probes.append(Control(Type.END, owner.id, chunks=owner.spec.chunks, cls=cls, path=path.path))
            if not ended:
                probes.append(Control(Type.PING, 0, cls=cls, path=path.path))
        if not probes and any(m.blocked() for m in self.messages.values()):
            probes.append(Control(Type.PING, 0, path=path.path))
        return probes

    def _ended(self, space: SendSpace) -> list[Outgoing]:
        """Messages with something in flight of which all has left, the last few: their receivers may wait to hear that."""
        found: dict[int, Outgoing] = {}
        for flight in space.flights:
            message = flight.message
            if message is None and flight.control is not None and flight.control.type is Type.END:
                message = self.messages.get(flight.control.message)
            if message is not None and not message.done and message.all_sent:
                found[message.id] = message
        return list(found.values())[-(KEPT_QUESTIONS // 2) :]

    @staticmethod
    def _take_off(path: SendPath, flight: Flight) -> None:
        """It is not in flight any more."""
        path.inflight_bytes -= flight.nbytes
        path.inflight_cost -= flight.cost

    def _trim_probes(self, path: SendPath, space: SendSpace) -> None:
        """Keep only the last probes of a silent peer, so that they do not fill the mask window."""
        probes = [f for f in space.flights if f.control is not None and not f.control.reliable]
        for flight in probes[:-KEPT_QUESTIONS]:
            space.flights.remove(flight)
            if flight.control is not None and flight.control.type is Type.END:
                self._end_again(self.messages.get(flight.control.message), path)
            path.inflight_bytes -= flight.nbytes
            path.inflight_cost -= flight.cost


def _id_of(flight: Flight) -> int:
    return flight.message.id if flight.message is not None else 0
