"""The messages of one peer on their way in: chunks that are placed, or held until their receive is posted.

Theory of operation. A message is known from the first sign of it (posted receive, OPEN or chunk) until it is over (``final``).
What comes before its receive is posted is held in a pool that all messages of the peer share, at all that it costs, and is not
acknowledged once that is full. When the receive is posted, what was held is placed as if it had just come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dblp.transport import wire
from dblp.transport.config import TransportConfig
from dblp.transport.drop import Drop
from dblp.transport.incoming import Incoming
from dblp.transport.message import EXACT_CLASS

MAX_MESSAGES = 4096
"""Unposted messages held for a peer: OPENs cost little, but no peer may make us hold any number."""
EARLY_SLACK_BYTES = 160 * 1024
"""What a peer may send early beyond ``early_bytes``: a burst, so that a message that fits but for its end needs no grant."""
EARLY_CHUNK_BYTES = 64
"""Memory that a chunk which is held early is charged with beside its bytes, for its index and its row."""


class Inbox:
    """The messages of one peer that are not over."""

    def __init__(
        self, *, config: TransportConfig, drops: Counter[Drop], on_duplicates: Callable[[int, int], None]
    ) -> None:
        """``on_duplicates(message, chunks)`` is told of chunks that came a second time or too late."""
        self.messages: dict[int, Incoming] = {}
        self.early_bytes = 0  # held for receives that are not posted, at what it is charged
        self.chunks_received = 0
        # An eighth above the pool's nominal size, for what is charged beside the chunks' bytes.
        self._most_early_bytes = config.early_bytes * 1.125 + EARLY_SLACK_BYTES
        self._drops = drops
        self._on_duplicates = on_duplicates

    def new_message(self, message_id: int, now: float, datagrams: int) -> Incoming | None:
        """The first sign of a message, of so many datagrams; None if too many are known already."""
        if len(self.messages) >= MAX_MESSAGES:
            self._drops[Drop.EARLY_FULL] += datagrams
            return None
        message = self.messages[message_id] = Incoming(message_id, now)
        return message

    def open(self, message_id: int, opened: wire.Open, now: float) -> bool:
        """OPEN of a message that is not over; False if there is no memory for what comes with it."""
        message = self.messages.get(message_id) or self.new_message(message_id, now, 1)
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
            return self.hold_early(message, chunks, rows, EXACT_CLASS)
        # Where it does not fit, the specs don't: told by the core.
        self.place(message, chunks, rows, EXACT_CLASS, now)
        return True

    def place(
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
            self.note_duplicates(message.id, len(chunks) - fresh, Drop.DUPLICATE)
        if fresh:
            message.last_useful = now
        return True

    def note_duplicates(self, message_id: int, chunks: int, reason: Drop) -> None:
        """So many chunks came a second time or too late."""
        self._drops[reason] += chunks
        self._on_duplicates(message_id, chunks)

    def hold_early(
        self,
        message: Incoming,
        chunks: npt.NDArray[np.uint32],
        rows: npt.NDArray[np.uint8],
        cls: int,
    ) -> bool:
        """Keep chunks of a message that is not posted; False if there is no memory for them."""
        fresh = set(chunks.tolist()) - message.early_chunks
        # Copies, or repeats of what is held, would fill the pool, and what lacks be refused.
        if len(fresh) < len(chunks):
            self.note_duplicates(message.id, len(chunks) - len(fresh), Drop.DUPLICATE)
            if not fresh:
                return True
            chunks, rows = _only(chunks, rows, fresh)
        cost = int(rows.size) + EARLY_CHUNK_BYTES * len(chunks)
        if self.early_bytes + cost > self._most_early_bytes:
            self._drops[Drop.EARLY_FULL] += len(chunks)
            return False
        message.early.append((chunks, rows.copy(), cls))
        message.early_chunks |= fresh
        message.early_bytes += cost
        self.early_bytes += cost
        return True

    def take_early(self, message: Incoming, now: float) -> None:
        """Place what had come before the receive was posted, and give its memory back."""
        for chunks, rows, cls in self._let_go_early(message):
            self.place(message, chunks, rows, cls, now)

    def _let_go_early(
        self, message: Incoming
    ) -> list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8], int]]:
        early, message.early = message.early, []
        message.early_chunks.clear()
        self.early_bytes -= message.early_bytes
        message.early_bytes = 0
        return early

    def forget(self, message: Incoming) -> None:
        """Drop an incoming message without a word (its round failed or ended)."""
        self.messages.pop(message.id, None)
        self._let_go_early(message)
        message.closed = True


def _only(
    chunks: npt.NDArray[np.uint32], rows: npt.NDArray[np.uint8], wanted: set[int]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    """Of chunks and their rows those that are wanted, ascending, each once."""
    chunks, places = np.unique(chunks, return_index=True)
    keep = np.isin(chunks, np.fromiter(wanted, np.uint32, len(wanted)))
    return chunks[keep], rows[places[keep]]
