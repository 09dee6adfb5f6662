"""Which burst leaves next for one peer, and on which path.

Theory of operation. Control leaves before chunks, several records in one datagram. Chunks leave message by message, as trains
of full bursts where nothing was lost lately; repairs go before first transmissions, and copies behind them. Each (path, class)
numbers its bursts; a ``Flight`` remembers what each carried until it is acknowledged or declared lost (``fate``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dblp.transport import wire
from dblp.transport.burst import TRAIN_BURSTS, BurstBuffer, Train
from dblp.transport.config import HEADER_BYTES, MAX_COPIES, TransportConfig
from dblp.transport.flight import Control, Flight, SendSpace
from dblp.transport.outbox import CLEAN_LOSS, Outbox
from dblp.transport.outgoing import Outgoing
from dblp.transport.paths.base import ANY_CHUNKS
from dblp.transport.port import Burst
from dblp.transport.send_path import ASK_GAP_S, SendPath
from dblp.transport.wire import Type

TICK_S = 1e-3
"""How late a timer may be: what is paced makes up for no more than that."""
CATCH_UP_BYTES = 64 * 1024
"""What is paced leaves at once, where it is late, up to this or half a portion: more overruns small buffers."""
CHEAP_BYTES = 32 * 1024
"""What copies of a few chunks may take together, whatever their number: half a burst."""


class Departure:
    """Makes bursts, trains and control datagrams of what waits in an outbox."""

    def __init__(
        self,
        outbox: Outbox,
        *,
        rank: int,
        session: int,
        config: TransportConfig,
        buffer: BurstBuffer,
        datagram_bytes: int,
    ) -> None:
        """``rank``: our own."""
        self.tried_at = 0.0
        self.datagrams_sent = 0
        self._outbox = outbox
        self._rank = rank
        self._session = session
        self._copies = config.copies
        self._buffer = buffer
        self._datagram_bytes = datagram_bytes

    def next_burst(self, now: float) -> Burst | Train | None:
        """The next burst or train that may leave now, or None. It counts as sent."""
        outbox = self._outbox
        self.tried_at = now
        waiting = 0
        if outbox.held and (outbox.control or any(message.sendable() for message in outbox.active)):
            outbox.release_held()
        if outbox.control and (bundle := self._bundle(now)) is not None:
            return bundle
        while outbox.active:
            message = outbox.active[0]
            if message.end_due:
                end = Control(Type.END, message.id, chunks=message.spec.chunks, cls=message.end_cls)
                end.path = message.end_due.popleft()
                end.copies = message.end_due.count(end.path)
                outbox.control.append(end)
                return self._bundle(now)
            if not message.sendable():
                outbox.active.popleft()
                outbox.active_ids.discard(message.id)
                continue
            message.aim()
            several, most = outbox.several, ANY_CHUNKS
            if several is None:
                path = outbox.paths[0]
                if not self._has_room(message, path, now, most):
                    return None
            else:
                picked = several.pick(message, now, self._has_room)
                if picked is None:
                    waiting += 1
                    if not several.choice.pinned or waiting >= len(outbox.active):
                        return None
                    outbox.active.rotate(-1)
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
                full = room - bursts * burst_cost < min(bursts * burst_cost, path.window() // 2)
                return self._train(message, path, space, bursts, full, now)
        most = min(most, message.per_burst if room >= burst_cost else max(1, room // path.charge(stride, 1)))
        chunks: npt.NDArray[np.uint32] | None = None
        first, decides = 0, times == 1
        if copy:
            chunks, decides = message.take_copy(most)
            count = len(chunks)
        elif again or message.lanes is not None:
            chunks = message.take_lost(most) if again else message.take_tagged(most)
            count = len(chunks)
        elif (chunks := message.take_runs(most)) is not None:
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
        full = room - path.charge(count * stride, count) < min(burst_cost, path.window() // 2)
        ask = full and self._asks(message, path)
        self._stamp(message, path, count, space.next_seq, ask and decides, now)  # the last copy asks for all
        if chunks is None:
            nbytes = self._buffer.fill_run(
                message.row, message.source, message.spec.chunk_bytes, first, count
            )
        else:
            nbytes = self._buffer.fill_scattered(
                message.row, message.source, message.spec.chunk_bytes, chunks
            )
        cost = path.charge(nbytes, count)
        self._launch(path, space, now, count, nbytes, cost, message, first, chunks, decides=decides)
        self._note_sent(message, path, not again and not copy)
        if ask and path.ask_at <= now and path.room() < path.charge(stride, 1) and path.loses_much(now):
            self._ask(path, message.cls, now)
        return Burst(
            self._buffer.data[:nbytes], stride, path.path, message.cls, path.address, self._buffer.pointer
        )

    def _train(
        self, message: Outgoing, path: SendPath, space: SendSpace, bursts: int, full: bool, now: float
    ) -> Train:
        """Several full bursts that leave together, after which the window is ``full``."""
        seq, chunk_bytes, source = space.next_seq, message.spec.chunk_bytes, message.source
        first, chunks = 0, None
        if message.lanes is None:
            first = message.take_bursts(bursts)
        else:
            chunks = message.take_tagged(bursts * message.per_burst)
        self._stamp(message, path, message.per_burst, seq, full and self._asks(message, path), now)
        route = (path.path, message.cls, path.address)
        if chunks is None:
            train = self._buffer.train(message.row, source, chunk_bytes, first, bursts, seq, route)
        else:
            train = self._buffer.train_scattered(message.row, source, chunk_bytes, chunks, seq, route)
        nbytes = bursts * message.per_burst * train.segment
        cost = path.charge(nbytes, bursts * message.per_burst, bursts)
        self._launch(path, space, now, message.per_burst, nbytes, cost, message, first, chunks, bursts=bursts)
        self._note_sent(message, path, True)
        return train

    def _launch(
        self,
        path: SendPath,
        space: SendSpace,
        now: float,
        count: int,
        nbytes: int,
        cost: int,
        message: Outgoing | None = None,
        first: int = 0,
        chunks: npt.NDArray[np.uint32] | None = None,
        *,
        control: Control | None = None,
        bursts: int = 1,
        decides: bool = True,
    ) -> None:
        """``count`` datagrams, or ``bursts`` times as many, leave as the space's next; the arguments are ``Flight``'s."""
        flight = Flight(
            space.next_seq, count, nbytes, now, message, first, chunks, control, cost, bursts,
            decides=decides, order=path.flown,
        )  # fmt: skip
        path.flown += 1
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
            late_s = min(TICK_S, 8.0 * max(CATCH_UP_BYTES, path.congestion.quantum_bytes / 2) / pace)
            path.next_send_at = max(path.next_send_at, now - late_s) + 8.0 * flight.nbytes / pace

    def _times(self, message: Outgoing, path: SendPath, again: bool, now: float) -> int:
        """How often what leaves next is to leave: once, but on a path that has just lost much. There it leaves in copies for
        which the window has room, to fill the round trip in which nothing else would leave. Where all of them together are less
        than a burst, their number is no object."""
        if self._copies == 1 or not path.loses_much(now):
            return 1
        nbytes = len(message.lost) * message.spec.chunk_bytes if again else message.spec.nbytes
        most = path.affordable(max(self._copies, min(CHEAP_BYTES // nbytes, MAX_COPIES)))
        most = min(most, int(path.window() / (path.scale * nbytes)))
        message.loss_share = path.heavy_share
        return message.times_again(most) if again else message.times_first(most)

    def _ask(self, path: SendPath, cls: int, now: float) -> None:
        """The window is full, and of the bursts that ask for feedback most are lost: ask aloud, once a round trip."""
        path.ask_at = now + max(ASK_GAP_S, path.net_rtt)
        copies = path.question_copies()
        question = Control(Type.PING, 0, cls=cls, path=path.path)
        question.copies = copies
        self._outbox.control.extend([question] * copies)

    def _asks(self, message: Outgoing, path: SendPath) -> bool:
        """What has been taken off the message asks for an answer, since the window has no room for more. Where nothing has been
        lost lately, not if no more waits for it: FINAL answers then; nor if the peer tells as soon by itself: on one host, each
        answer costs both what a burst costs."""
        if path.lost_lately >= CLEAN_LOSS or message.may_miss or message.repairable:
            return True
        return not path.told_unasked and not (message.all_sent and len(self._outbox.active) <= 1)

    def _stamp(self, message: Outgoing, path: SendPath, count: int, seq: int, ask: bool, now: float) -> None:
        cls = message.cls | wire.ASK if ask or message.blocked() else message.cls
        if (
            message.all_sent
            and not message.repairable
            and self._ends(message)
            and self._says_last(message, path)
        ):
            cls |= wire.LAST
        wire.stamp(message.head, cls, path.path, count, seq, now, self._outbox.watermark(message.id >> 48))

    def _note_sent(self, message: Outgoing, path: SendPath, first_time: bool) -> None:
        """After the last of what can leave, END asks at once what came: of large or bounded messages, and of repairs. Where
        nothing has been lost lately, the last burst has said so itself (``wire.LAST``); of a bounded message END says it too: its
        receiver waits for that once its bound is met, and a burst of loss that begins with this message would cost a timeout."""
        message.paths.add(path.path)
        if not first_time:
            if message.all_sent and not message.repairable:
                ways = sorted(message.paths) if message.passes else [path.path]
                message.end_due.extend(ways * path.question_copies())
        elif (
            message.all_sent
            and self._ends(message)
            and (message.may_miss or not self._says_last(message, path))
        ):
            message.end_due.extend(sorted(message.paths))

    @staticmethod
    def _ends(message: Outgoing) -> bool:
        """Worth an END: a message of one burst is answered by FINAL as soon."""
        return message.passes or message.spec.chunks > message.per_burst or message.may_miss > 0

    @staticmethod
    def _says_last(message: Outgoing, path: SendPath) -> bool:
        """The burst that has just been taken off the message is its last, and may say so: if it is lost, only a timeout tells. A
        pass of repairs ends with a question of its own, which is no chunk (MLT and DBLP send it over TCP)."""
        return not message.passes and path.lost_lately < CLEAN_LOSS and message.paths <= {path.path}

    def _bundle(self, now: float) -> Burst | None:
        """What waits in ``control`` for one path and class, as the records of one datagram. Copies of one thing never share a
        datagram: they are there because datagrams are being lost."""
        path: SendPath | None = None
        cls, at = 0, 0
        queue = self._outbox.control
        seen: set[tuple[int, int, int, bytes]] = set()
        while queue:
            control = queue[0]
            if control.dropped:
                queue.popleft()
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
            queue.popleft()
            seen.add(key)
            at = self._put_control(control, path, at, now)
        if path is None:
            return None
        self.datagrams_sent += 1
        buffer = self._buffer
        return Burst(buffer.control[:at], at, path.path, cls, path.address, buffer.control_pointer)

    def _put_control(self, control: Control, path: SendPath, at: int, now: float) -> int:
        """Write a record of a bundle at ``at``; returns where it ends."""
        space = path.spaces[control.cls]
        acknowledged = control.type is not Type.FEEDBACK
        if acknowledged:
            seq = space.next_seq
        else:  # counted by the path that it speaks of
            about = self._outbox.paths[control.about]
            about.feedback_seq += 1
            seq = about.feedback_seq
        head = wire.encode_fields(
            wire.VERSION, control.type, control.cls, path.path, 1, 0, self._rank, self._session, control.message,
            control.chunks, seq & 0xFFFFFFFF, wire.clock_us(now), self._outbox.watermark(control.message >> 48), 0,
            control.copies, len(control.payload),
        )  # fmt: skip
        stop = self._buffer.fill_control(head, control.payload, at)
        nbytes = stop - at
        if acknowledged:
            cost = nbytes if at else path.charge(nbytes, 1)
            self._launch(path, space, now, 1, nbytes, cost, control=control)
        else:
            path.bytes_sent += nbytes
        return stop

    def _control_path(self, control: Control) -> SendPath:
        """The path that it names, unless that is left (only probes and answers to them take it then); else the next in turn."""
        several = self._outbox.several
        if several is None:
            return self._outbox.paths[0]
        if control.path is None:
            return several.next_control()
        path = self._outbox.paths[control.path]
        return path if path.alive or control.type in (Type.PING, Type.FEEDBACK) else several.main

    @staticmethod
    def _goes_by(control: Control, path: SendPath) -> bool:
        """Whether a control datagram may share one that leaves on a path: with probes of a dead one it would be lost."""
        if control.path is None:
            return path.alive
        return control.path == path.path and (path.alive or control.type in (Type.PING, Type.FEEDBACK))
