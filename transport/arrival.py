"""Finding the chunks in what comes from one peer.

Theory of operation. Datagrams come as slabs, runs of equal length: trains of super-packets to ``on_train``, what is left of
broken bursts to ``on_remnants``, all others to ``on_data``. A slab that is one intact burst with consecutive chunks, which is
what loss-free networks deliver, is checked and placed with a fixed number of vectorised operations; anything else is split into
groups of equal (message, class, burst) and takes the general path. A burst is acknowledged only if its chunks were accepted:
placed, known already, void (the message is over), or held early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.transport import wire
from dblp.transport.config import HEADER_BYTES
from dblp.transport.drop import Drop
from dblp.transport.expectation import Expectation
from dblp.transport.feedback import OwedFeedback
from dblp.transport.final import Finals
from dblp.transport.inbox import Inbox
from dblp.transport.incoming import Incoming
from dblp.transport.message import round_of
from dblp.transport.port import Slab
from dblp.transport.remnants import Remnants, Rows

TRAIN_SUPERS = 32
"""Most super-packets that are checked and placed together."""
MAX_EXPECTATIONS = 4
"""Messages of a peer whose trains may alternate without their headers being laid out anew: two legs, with and without ASK."""
_U64 = np.dtype(np.uint64)
_U8 = np.dtype(np.uint8)
_FLAGS = wire.ASK | wire.LAST


class Arrival:
    """Hands the chunks of bursts and trains to their messages."""

    def __init__(
        self,
        inbox: Inbox,
        finals: Finals,
        feedback: OwedFeedback,
        *,
        drops: Counter[Drop],
        round_over: Callable[[int], bool],
    ) -> None:
        self._inbox = inbox
        self._finals = finals
        self._feedback = feedback
        self._messages = inbox.messages
        self._drops = drops
        self._round_over = round_over
        self._expectations: dict[tuple[tuple[int, ...], int], Expectation] = {}
        self._expected = np.zeros((wire.BURST_DATAGRAMS, 6), np.uint64)
        self._expected_bytes = self._expected.view(np.uint8)
        self._expected_words = self._expected.view(np.uint32)

    def on_train(self, slab: Slab, done: int, header: tuple[int, ...], now: float) -> int:
        """Super-packets of a stack from ``done`` on, of which the first starts with ``header``. As many of them as are whole
        consecutive bursts of a message that is awaited, with gaps between chunks or not, are placed at once; returns how many."""
        count, payload = slab.count, slab.size - HEADER_BYTES
        message_id, seq, first = header[8], header[10], header[13]
        message = self._messages.get(message_id)
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
            rows = np.ndarray((whole, count), wire.HEADER_ITEM, slab.arena, offset, (spacing, slab.size))
            intact = self._expectation(rows, header).intact(rows, whole, first, seq)
            if not intact:  # results that waited for a repair leave together
                bursts = self._take_gapped(message, slab, offset, bursts, header)
            elif message.is_new(first, intact * count):
                bursts = intact
                payloads = self._payloads(message, slab, offset, bursts)
                message.accept_run(first, intact * count, payloads, header[2] & wire.CLASS_MASK)
            else:
                return 0
        if not bursts:
            return 0
        message.last_useful = now
        self._inbox.chunks_received += bursts * count
        self._finals.finish_if_complete(message, now)
        if bursts > 1:
            # The last burst was stamped last.
            header = wire.decode_header_from(slab.arena.data, offset + (bursts - 1) * spacing)
        nbytes = bursts * count * slab.size
        self._feedback.mark(slab, done + bursts - 1, header, seq, bursts, (1 << count) - 1, nbytes)
        if header[2] & wire.LAST:
            self._on_last(message_id, header, now)
        return bursts

    def _take_gapped(
        self, message: Incoming, slab: Slab, offset: int, bursts: int, header: tuple[int, ...]
    ) -> int:
        """A train whose chunks may have gaps, as those of tagged messages do. Returns how many bursts were placed."""
        spec, count, cls = message.spec, slab.count, header[2] & wire.CLASS_MASK
        assert spec is not None
        rows = np.ndarray((bursts, count), wire.HEADER_ITEM, slab.arena, offset, (slab.spacing, slab.size))
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
            message.accept_run(first, bursts * count, payloads, cls)
        elif not message.accept_scattered(chunks, payloads, cls):
            return 0
        return bursts

    @staticmethod
    def _payloads(message: Incoming, slab: Slab, offset: int, bursts: int) -> npt.NDArray[Any]:
        """Payloads of a train (bursts, chunks a burst, elements a chunk), a view."""
        assert message.sink is not None
        shape, strides = (bursts, slab.count, message.per_chunk), (slab.spacing, slab.size, message.width)
        return np.ndarray(shape, message.sink.dtype, slab.arena, offset + HEADER_BYTES, strides)

    def _expectation(self, rows: npt.NDArray[np.void], header: tuple[int, ...]) -> Expectation:
        """What the headers (bursts, count) should be.

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
            expectation = self._expectations[key] = Expectation(rows[0, :1], bursts, count)
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

    def on_remnants(self, remnants: Remnants, rows: Rows, header: tuple[int, ...], now: float) -> bool:
        """Rows of one message and class, all DATA of this peer, of which the first has ``header``. False with nothing done if its
        receive is not posted, or something is wrong with one of them."""
        message = self._messages.get(header[8])
        if message is None or message.sink is None:
            return False
        spec = message.spec
        assert spec is not None
        chunks, positions = remnants.chunks(rows), remnants.positions(rows)
        if (
            spec.chunk_bytes != remnants.size - HEADER_BYTES
            or header[9] != len(message.have)
            or int(chunks.max()) >= spec.nbytes // spec.chunk_bytes
            or int(positions.max()) >= wire.BURST_DATAGRAMS
        ):
            return False
        self._inbox.place(message, chunks, remnants.payloads(rows), header[2] & wire.CLASS_MASK, now)
        self._finals.finish_if_complete(message, now)
        for row, count, mask in remnants.bursts(rows, positions):
            slab, at = remnants.place_of(row)
            header = remnants.header(row)
            self._feedback.mark(slab, at, header, header[10], 1, mask, count * remnants.size)
            if header[2] & _FLAGS:
                self._on_flags(header[8], header, mask, now)
        return True

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
        message = self._messages.get(message_id)
        if (
            message is not None
            and message.sink is not None
            and message.fits(first, count, payload)
            and message.is_new(first, count)
        ):
            width, cls = payload // message.width, header[2] & wire.CLASS_MASK
            rows = slab.rows(start, count, HEADER_BYTES, width, message.sink.dtype)
            message.accept_run(first, count, rows, cls)
            message.last_useful = now
            self._inbox.chunks_received += count
            self._finals.finish_if_complete(message, now)
            accepted = True
        else:
            chunks = np.arange(first, first + count, dtype=np.uint32)
            rows = slab.rows(start, count, HEADER_BYTES, payload, _U8)
            accepted = self._accept(message_id, chunks, rows, header[2] & wire.CLASS_MASK, now)
        if accepted:
            self._feedback.mark(slab, start, header, seq, 1, mask, count * size)
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
            self._feedback.mark(slab, start, header, header[10], 1, mask, count * slab.size)
            if header[2] & _FLAGS:
                self._on_flags(header[8], header, mask, now)
        return count

    def _on_flags(self, message_id: int, header: tuple[int, ...], mask: int, now: float) -> None:
        """LAST counts once the burst's last datagram is here; ASK of a message that is not posted is answered when it is."""
        if header[2] & wire.ASK:
            message = self._messages.get(message_id)
            if message is not None and message.sink is None:
                message.asked = True
        if header[2] & wire.LAST and mask.bit_length() == header[4]:
            self._on_last(message_id, header, now)

    def _on_last(self, message_id: int, header: tuple[int, ...], now: float) -> None:
        """First transmissions are out: as END."""
        if self._finals.on_end(message_id, now):
            self._feedback.on_question(header[3], now)

    def _accept(
        self,
        message_id: int,
        chunks: npt.NDArray[np.uint32],
        rows: npt.NDArray[np.uint8],
        cls: int,
        now: float,
    ) -> bool:
        """General path of a group of chunks; True if they may be acknowledged."""
        if message_id in self._finals.tombstones or self._round_over(round_of(message_id)):
            self._inbox.note_duplicates(message_id, len(chunks), Drop.LATE)
            if message_id in self._finals.tombstones:
                self._finals.late.add(message_id)
            return True
        message = self._messages.get(message_id)
        if message is None:
            message = self._inbox.new_message(message_id, now, len(chunks))
            if message is None:
                return False
        if message.sink is None:
            return self._inbox.hold_early(message, chunks, rows, cls)
        if not self._inbox.place(message, chunks, rows, cls, now):
            return False
        self._finals.finish_if_complete(message, now)
        return True
