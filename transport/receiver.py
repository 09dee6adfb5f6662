"""Receiving from one peer: masks of what came, messages that grow, feedback that is due.

Theory of operation. Datagrams come as slabs, runs of equal length: trains of super-packets to ``on_train``, all others to
``on_data``. A slab that is one intact burst with consecutive chunks, which is what loss-free networks deliver, is checked and
placed with a fixed number of vectorised operations; anything else is split into groups of equal (message, class, burst) and takes
the general path. A burst is acknowledged only if its chunks were accepted: placed, known already, void (the message is over), or
held early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.transport import wire
from dblp.transport.backlog import Backlog
from dblp.transport.config import HEADER_BYTES, TransportConfig
from dblp.transport.drop import Drop
from dblp.transport.expectation import Expectation
from dblp.transport.feedback import OwedFeedback
from dblp.transport.incoming import Incoming
from dblp.transport.message import EXACT_CLASS, round_of
from dblp.transport.policy import Stop
from dblp.transport.port import Slab
from dblp.transport.receive_path import ReceivePath

TRAIN_SUPERS = 32
"""Most super-packets that are checked and placed together."""
MAX_EXPECTATIONS = 4
"""Messages of a peer whose trains may alternate without their headers being laid out anew: two legs, with and without ASK."""
UNENDED_S = 1.0
"""Silence without END after which a message whose bound is met ends: a sender that waits for credit is silent too."""
KEEPS_ORDER_BURSTS = 256
"""Bursts in a row without one behind a later one after which a path is taken to keep its order."""
MAX_TOMBSTONES = 8192
"""Ended messages of a peer whose FINAL can be repeated at once when something late comes. FINAL is repeated until it is
acknowledged in any case, so the oldest may go: groups without watermarks (point to point) would keep all of them."""
EARLY_SLACK_BYTES = 160 * 1024
"""What a peer may send early beyond ``early_bytes``: a burst, so that a message that fits but for its end needs no grant."""
EARLY_CHUNK_BYTES = 64
"""Memory that a chunk which is held early is charged with beside its bytes, for its index and its row."""
MAX_MESSAGES = 4096
"""Unposted messages held for a peer: OPENs cost little, but no peer may make us hold any number."""


class PeerReceiver:
    """Everything that comes from one peer."""

    def __init__(
        self,
        *,
        paths: int,
        config: TransportConfig,
        drops: Counter[Drop],
        round_over: Callable[[int], bool],
        on_duplicates: Callable[[int, int], None],
        backlog: Backlog,
    ) -> None:
        """``on_duplicates(message, chunks)`` is told of chunks that came a second time or too late."""
        self.config = config
        self.paths = [ReceivePath(index) for index in range(paths)]
        self.feedback = OwedFeedback(self.paths, backlog)
        self.messages: dict[int, Incoming] = {}
        self.tombstones: dict[int, list[wire.Final]] = {}
        self.completed: list[Incoming] = []
        self.late: set[int] = set()
        self.early_bytes = 0
        self.heard_at = 0.0
        self.chunks_received = 0
        self.chunks_duplicate = 0
        self._drops = drops
        self._round_over = round_over
        self._on_duplicates = on_duplicates
        self._watermarks: dict[int, int] = {}
        self._expectations: dict[tuple[tuple[int, ...], int], Expectation] = {}
        self._expected = np.zeros((wire.BURST_DATAGRAMS, 6), np.uint64)
        self._expected_bytes = self._expected.view(np.uint8)
        self._expected_words = self._expected.view(np.uint32)
        self._stop_at = float("inf")
        self._answered: set[int] = set()  # messages over whose first END came after their FINAL had left

    # --- data

    def on_train(self, slab: Slab, done: int, header: tuple[int, ...], now: float) -> int:
        """Super-packets of a stack from ``done`` on, of which the first starts with ``header``. As many of them as are whole
        consecutive bursts of a message that is awaited, with gaps between chunks or not, are placed at once; returns how many."""
        count, payload = slab.count, slab.size - HEADER_BYTES
        message_id, seq, first = header[8], header[10], header[13]
        message = self.messages.get(message_id)
        if message is None or message.sink is None or header[4] != count or header[5]:
            return 0
        spec = message.spec
        assert spec is not None
        if spec.chunk_bytes != payload or count > wire.BURST_DATAGRAMS or header[9] != len(message.have):
            return 0
        spacing, offset = slab.spacing, slab.offset + done * slab.spacing
        bursts = min(slab.supers - done, TRAIN_SUPERS)
        if message.tagged:
            bursts = self._take_gapped(message, slab, offset, bursts, header)
        else:
            whole = min(bursts, (spec.nbytes // payload - first) // count)
            if whole < 1:
                return 0
            rows = np.ndarray((whole, count, 6), np.uint64, slab.arena, offset, (spacing, slab.size, 8))
            intact = self._expectation(rows, header).intact(rows, whole, first, seq)
            if not intact:  # results that waited for a repair leave together
                bursts = self._take_gapped(message, slab, offset, bursts, header)
            elif message.is_new(first, intact * count):
                bursts = intact
                payloads = self._payloads(message, slab, offset, bursts)
                message.accept_train(first, payloads, header[2] & wire.CLASS_MASK)
            else:
                return 0
        if not bursts:
            return 0
        message.last_useful = now
        self.chunks_received += bursts * count
        self._finish_if_complete(message, now)
        if bursts > 1:
            header = wire.decode_header_from(
                slab.arena.data, offset + (bursts - 1) * spacing
            )  # it was stamped last
        nbytes = bursts * count * slab.size
        self.feedback.mark(slab, done + bursts - 1, header, seq, bursts, (1 << count) - 1, nbytes)
        if header[2] & wire.LAST:
            self._on_last(message_id, header, now)
        return bursts

    def _take_gapped(
        self, message: Incoming, slab: Slab, offset: int, bursts: int, header: tuple[int, ...]
    ) -> int:
        """A train whose chunks may have gaps, as those of tagged messages do. Returns how many bursts were placed."""
        spec, count, cls = message.spec, slab.count, header[2] & wire.CLASS_MASK
        assert spec is not None
        shape, strides = (bursts, count, 6), (slab.spacing, slab.size, 8)
        rows = np.ndarray(shape, np.uint64, slab.arena, offset, strides)
        bursts, chunks = self._expectation(rows, header).alike(rows, bursts, header[10])
        if not bursts:
            return 0
        first, last = int(chunks[0, 0]), int(chunks.max())
        if last >= spec.nbytes // spec.chunk_bytes:
            return 0
        payloads = self._payloads(message, slab, offset, bursts)
        flat = chunks.reshape(-1)
        if last - first == bursts * count - 1 and (flat[1:] - flat[:-1] == 1).all():
            if not message.is_new(first, bursts * count):
                return 0
            message.accept_train(first, payloads, cls)
        elif not message.accept_scattered(chunks, payloads, cls):
            return 0
        return bursts

    @staticmethod
    def _payloads(message: Incoming, slab: Slab, offset: int, bursts: int) -> npt.NDArray[Any]:
        """Payloads of a train (bursts, chunks a burst, elements a chunk), a view."""
        assert message.sink is not None
        shape, strides = (bursts, slab.count, message.per_chunk), (slab.spacing, slab.size, message.width)
        return np.ndarray(shape, message.sink.dtype, slab.arena, offset + HEADER_BYTES, strides)

    def _expectation(self, rows: npt.NDArray[np.uint64], header: tuple[int, ...]) -> Expectation:
        """What the headers (bursts, count, 6) should be.

        Headers are copied together and compared with an expectation that stands from the last train of the same message:
        operations over whole columns, not over rows of six words, which numpy walks one by one.
        """
        bursts: int = rows.shape[0]
        count: int = rows.shape[1]
        key = header[:9], count
        expectation = self._expectations.get(key)
        if expectation is None or expectation.bursts < bursts:
            if len(self._expectations) >= MAX_EXPECTATIONS:
                del self._expectations[next(iter(self._expectations))]
            expectation = self._expectations[key] = Expectation(rows[0, 0], bursts, count)
        return expectation

    def on_data(self, slab: Slab, start: int, count: int, header: tuple[int, ...], now: float) -> int:
        """Datagrams start.. of a slab, all DATA of this peer as far as the first header tells. Returns how many were used as
        one group; the caller goes on with the rest."""
        if header[13] >= header[9]:
            self._drops[Drop.CHUNK] += 1
            return 1
        last_whole = start + count == slab.count
        size = slab.size
        tail = slab.last if last_whole else size
        if tail != size and count > 1:
            count -= 1
            tail = size
        if count > 1:
            count = self._uniform(slab, start, count, header)
        if count == 0:
            return self._scattered(slab, start, header, now)
        self._group(slab, start, count, tail if count == 1 else size, header, now)
        return count

    def _uniform(self, slab: Slab, start: int, count: int, header: tuple[int, ...]) -> int:
        """How many datagrams from ``start`` are consecutive chunks of one burst; 0 if not even two are."""
        chunk, position = header[13], header[5]
        count = min(count, wire.BURST_DATAGRAMS - position, header[9] - chunk)
        rows = slab.rows(start, count, 0, 6, _U64)
        expected = self._expected[:count]
        expected[:] = rows[0]
        self._expected_bytes[:count, 5] = wire.POSITIONS[position : position + count]
        self._expected_words[:count, 10] = wire.wire_indices(chunk, chunk + count)
        same = rows == expected
        if same.all():
            return count
        whole = same.all(axis=1)
        run = int(whole.argmin())
        return run if run > 1 else 0

    def _group(
        self, slab: Slab, start: int, count: int, size: int, header: tuple[int, ...], now: float
    ) -> None:
        """Consecutive chunks of one burst."""
        message_id, seq, first = header[8], header[10], header[13]
        mask = ((1 << count) - 1) << header[5]
        payload = size - HEADER_BYTES
        message = self.messages.get(message_id)
        if (
            message is not None
            and message.sink is not None
            and message.fits(first, count, payload)
            and message.is_new(first, count)
        ):
            width, cls = payload // message.width, header[2] & wire.CLASS_MASK
            message.accept_run(first, slab.rows(start, count, HEADER_BYTES, width, message.sink.dtype), cls)
            message.last_useful = now
            self.chunks_received += count
            self._finish_if_complete(message, now)
            accepted = True
        else:
            chunks = np.arange(first, first + count, dtype=np.uint32)
            rows = slab.rows(start, count, HEADER_BYTES, payload, _U8)
            accepted = self._accept(message_id, chunks, rows, header[2] & wire.CLASS_MASK, now)
        if accepted:
            self.feedback.mark(slab, start, header, seq, 1, mask, count * size)
            if header[2] & _FLAGS:
                self._on_flags(message_id, header, mask, now)

    def _scattered(self, slab: Slab, start: int, header: tuple[int, ...], now: float) -> int:
        """Datagrams of one burst that are not consecutive; returns how many were taken."""
        rows = slab.rows(start, slab.count - start, 0, 6, _U64)
        if slab.last != slab.size:
            rows = rows[:-1]
        words = rows.view(np.uint8)
        first = words[0].copy()
        differs = words != first
        differs[:, 5] = False  # position
        differs[:, 40:44] = False  # chunk
        differs[:, 44:46] = False  # contributions
        chunks = np.ascontiguousarray(words[:, 40:44]).view(">u4")[:, 0].astype(np.uint32)
        alike = ~differs.any(axis=1) & (chunks < header[9]) & (words[:, 5] < wire.BURST_DATAGRAMS)
        count = len(alike) if alike.all() else max(1, int(alike.argmin()))
        words, chunks = words[:count], chunks[:count]
        positions = words[:, 5].astype(np.uint64)
        mask = int(np.bitwise_or.reduce(np.left_shift(np.uint64(1), positions)))
        payload = slab.size - HEADER_BYTES
        payloads = slab.rows(start, count, HEADER_BYTES, payload, _U8)
        if self._accept(header[8], chunks, payloads, header[2] & wire.CLASS_MASK, now):
            self.feedback.mark(slab, start, header, header[10], 1, mask, count * slab.size)
            if header[2] & _FLAGS:
                self._on_flags(header[8], header, mask, now)
        return count

    def _on_flags(self, message_id: int, header: tuple[int, ...], mask: int, now: float) -> None:
        """LAST counts once the burst's last datagram is here; ASK of a message that is not posted is answered when it is."""
        if header[2] & wire.ASK:
            message = self.messages.get(message_id)
            if message is not None and message.sink is None:
                message.asked = True
        if header[2] & wire.LAST and mask.bit_length() == header[4]:
            self._on_last(message_id, header, now)

    def _on_last(self, message_id: int, header: tuple[int, ...], now: float) -> None:
        """First transmissions are out: as END."""
        if self._on_end(message_id, now):
            self.feedback.on_question(header[3], now)

    def _accept(
        self,
        message_id: int,
        chunks: npt.NDArray[np.uint32],
        rows: npt.NDArray[np.uint8],
        cls: int,
        now: float,
    ) -> bool:
        """General path of a group of chunks; True if they may be acknowledged."""
        if message_id in self.tombstones or self._round_over(round_of(message_id)):
            self._note_duplicates(message_id, len(chunks), Drop.LATE)
            if message_id in self.tombstones:
                self.late.add(message_id)
            return True
        message = self.messages.get(message_id)
        if message is None:
            message = self._new_message(message_id, now, len(chunks))
            if message is None:
                return False
        if message.sink is None:
            return self._hold_early(message, chunks, rows, cls)
        if not self._place(message, chunks, rows, cls, now):
            return False
        self._finish_if_complete(message, now)
        return True

    def _place(
        self,
        message: Incoming,
        chunks: npt.NDArray[np.uint32],
        rows: npt.NDArray[np.uint8],
        cls: int,
        now: float,
    ) -> bool:
        """Place what is new of these chunks, if they can belong to the message."""
        spec = message.spec
        assert spec is not None
        last = int(chunks.max())
        if last >= spec.chunks:
            self._drops[Drop.CHUNK] += len(chunks)
            return False
        tail = spec.nbytes - (spec.chunks - 1) * spec.chunk_bytes
        # A short last chunk comes alone: it is shorter than what would stand beside it.
        short = last == spec.chunks - 1 and tail != spec.chunk_bytes
        if rows.shape[1] != (tail if short else spec.chunk_bytes) or (short and len(chunks) > 1):
            self._drops[Drop.LENGTH] += len(chunks)
            return False
        fresh = message.accept(chunks, rows, cls)
        self.chunks_received += fresh
        if fresh < len(chunks):
            self._note_duplicates(message.id, len(chunks) - fresh, Drop.DUPLICATE)
        if fresh:
            message.last_useful = now
        return True

    def _note_duplicates(self, message_id: int, chunks: int, reason: Drop) -> None:
        self._drops[reason] += chunks
        self.chunks_duplicate += chunks
        self._on_duplicates(message_id, chunks)

    def take_early(self, message: Incoming, now: float) -> None:
        """Place what had come before the receive was posted, and give its memory back."""
        for chunks, rows, cls in self._let_go_early(message):
            self._place(message, chunks, rows, cls, now)

    def _let_go_early(
        self, message: Incoming
    ) -> list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8], int]]:
        early, message.early = message.early, []
        message.early_chunks.clear()
        self.early_bytes -= message.early_bytes
        message.early_bytes = 0
        return early

    def _new_message(self, message_id: int, now: float, datagrams: int) -> Incoming | None:
        if len(self.messages) >= MAX_MESSAGES:
            self._drops[Drop.EARLY_FULL] += datagrams
            return None
        message = self.messages[message_id] = Incoming(message_id, now)
        return message

    def _hold_early(
        self,
        message: Incoming,
        chunks: npt.NDArray[np.uint32],
        rows: npt.NDArray[np.uint8],
        cls: int,
    ) -> bool:
        fresh = set(chunks.tolist()) - message.early_chunks
        if len(fresh) < len(
            chunks
        ):  # copies, or repeats of what is held: they would fill the pool, and what lacks be refused
            self._note_duplicates(message.id, len(chunks) - len(fresh), Drop.DUPLICATE)
            if not fresh:
                return True
            chunks, rows = _only(chunks, rows, fresh)
        cost = int(rows.size) + EARLY_CHUNK_BYTES * len(chunks)
        # An eighth above the pool's nominal size, for what is charged beside the chunks' bytes.
        if self.early_bytes + cost > self.config.early_bytes * 1.125 + EARLY_SLACK_BYTES:
            self._drops[Drop.EARLY_FULL] += len(chunks)
            return False
        message.early.append((chunks, rows.copy(), cls))
        message.early_chunks |= fresh
        message.early_bytes += cost
        self.early_bytes += cost
        return True

    # --- control

    def on_control(self, slab: Slab, at: int, header: tuple[int, ...], payload: bytes, now: float) -> bool:
        """OPEN, END and PING; FINAL and the like only leave their mark. False if the payload makes no sense."""
        type_, message_id = header[1], header[8]
        if type_ == wire.Type.OPEN:
            opened = wire.decode_open(payload)
            if opened is None:
                self._drops[Drop.PAYLOAD] += 1
                return False
            if not self._on_open(message_id, opened, now):
                return False
        elif type_ == wire.Type.END:
            if self._on_end(message_id, now):
                self.feedback.on_question(header[3], now, header[14])
        elif type_ == wire.Type.PING:
            self.feedback.on_question(header[3], now, header[14])
        self.feedback.mark(slab, at, header, header[10], 1, 1, HEADER_BYTES + len(payload))
        return True

    def _on_open(self, message_id: int, opened: wire.Open, now: float) -> bool:
        if message_id in self.tombstones or self._round_over(round_of(message_id)):
            self._drops[Drop.LATE] += 1
            if message_id in self.tombstones:
                self.late.add(message_id)
            return True
        message = self.messages.get(message_id) or self._new_message(message_id, now, 1)
        if message is None:
            return False
        if message.opened is None:
            if opened.data and not self._take_inline(message, opened.data, now):
                return False
            message.opened = opened
            message.opened_at = now
        return True

    def _take_inline(self, message: Incoming, data: bytes, now: float) -> bool:
        """The only chunk of a message, which came with its OPEN; False if there is no memory to hold it early."""
        chunks, rows = np.zeros(1, np.uint32), np.frombuffer(data, np.uint8).reshape(1, -1)
        if message.sink is None:
            return self._hold_early(message, chunks, rows, EXACT_CLASS)
        self._place(
            message, chunks, rows, EXACT_CLASS, now
        )  # where it does not fit, the specs don't: told by the core
        return True

    def _on_end(self, message_id: int, now: float) -> bool:
        """END of a message; False if its FINAL is the answer, which has just left or is about to."""
        message = self.messages.get(message_id)
        if message is not None:
            if not message.ended:
                message.ended = True
                message.last_useful = now  # what END overtook has the delay estimate's time to come
            self._finish_if_complete(message, now)
            return not message.closed
        if message_id not in self.tombstones:
            return True
        if message_id not in self._answered:
            self._answered.add(message_id)
            return False
        self.late.add(message_id)
        return True

    # --- completion

    @property
    def quiet_s(self) -> float:
        """Delay estimate of the ``stall`` rule once END has come: twice the spread of one-way delays seen lately, and a
        scheduler's tick; nothing on a single path that has kept its order for long, where END comes last."""
        if len(self.paths) == 1 and self.paths[0].in_order >= KEEPS_ORDER_BURSTS:
            return 0.0
        return self._spread_s

    @property
    def _spread_s(self) -> float:
        return 2.0 * max(self.feedback.owd_high - self.feedback.owd_min, 0.0) + 1e-3

    @property
    def unended_quiet_s(self) -> float:
        """The same without END: END may be lost, but a living sender repeats it after each timeout; it may also be held up."""
        return 2.0 * self._spread_s + UNENDED_S

    def _finish_if_complete(self, message: Incoming, now: float) -> None:
        spec = message.spec
        if message.closed or spec is None or message.sink is None:
            return
        if message.opened is None:
            return
        if message.got < spec.chunks - message.may_miss and spec.stop is not Stop.ABANDON:
            return
        if message.complete(now, self.quiet_s, self.unended_quiet_s):
            self.close_message(message)
        else:
            self._stop_at = min(self._stop_at, message.stop_check_at(self.quiet_s, self.unended_quiet_s))

    def check(self, message: Incoming, now: float) -> None:
        """Close the message if it is complete (after its receive was posted)."""
        self._finish_if_complete(message, now)

    def close_message(self, message: Incoming) -> None:
        """The message is over: later chunks are void, FINAL is owed."""
        message.closed = True
        self.messages.pop(message.id, None)
        self.tombstones[message.id] = wire.final_parts(message.have)
        if len(self.tombstones) > MAX_TOMBSTONES:
            oldest = next(iter(self.tombstones))
            del self.tombstones[oldest]
            self._answered.discard(oldest)
        self.completed.append(message)

    def forget(self, message: Incoming) -> None:
        """Drop an incoming message without a word (its round failed or ended)."""
        self.messages.pop(message.id, None)
        self._let_go_early(message)
        message.closed = True

    def on_watermark(self, group: int, watermark: int) -> None:
        """The peer has ended all rounds of the group below ``watermark``: their tombstones may go."""
        if watermark <= self._watermarks.get(group, 0):
            return
        self._watermarks[group] = watermark
        limit = (group << 32 | watermark) << 16
        floor = group << 48
        for message_id in [m for m in self.tombstones if floor <= m < limit]:
            del self.tombstones[message_id]
            self._answered.discard(message_id)

    # --- timers

    def next_timeout(self) -> float:
        """When ``on_timer`` has something to do."""
        at = self._stop_at
        for path in self.paths:
            if path.due_at < at:
                at = path.due_at
        return at

    def on_timer(self, now: float) -> None:
        """Stop rules whose time has come."""
        if self._stop_at > now:
            return
        self._stop_at = float("inf")
        for message in list(self.messages.values()):
            if message.may_miss and message.sink is not None:
                self._finish_if_complete(message, now)


def _only(
    chunks: npt.NDArray[np.uint32], rows: npt.NDArray[np.uint8], wanted: set[int]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    """Of chunks and their rows those that are wanted, ascending, each once."""
    chunks, places = np.unique(chunks, return_index=True)
    keep = np.isin(chunks, np.fromiter(wanted, np.uint32, len(wanted)))
    return chunks[keep], rows[places[keep]]


_U64 = np.dtype(np.uint64)
_U8 = np.dtype(np.uint8)
_FLAGS = wire.ASK | wire.LAST
