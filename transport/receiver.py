"""Receiving from one peer, and what it is owed for what came.

Theory of operation. Four parts share the work, and none knows those behind it: an ``Inbox`` holds what has come of the messages,
``OwedFeedback`` what has come on the paths and has to be told, ``Finals`` end the messages and owe the last word on each, and an
``Arrival`` finds the chunks in what comes and hands them to the others. Here control datagrams and timers are handed to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from dblp.transport import wire
from dblp.transport.arrival import Arrival
from dblp.transport.backlog import Backlog
from dblp.transport.config import HEADER_BYTES, TransportConfig
from dblp.transport.drop import Drop
from dblp.transport.feedback import OwedFeedback
from dblp.transport.final import Finals
from dblp.transport.inbox import Inbox
from dblp.transport.message import round_of
from dblp.transport.port import Slab
from dblp.transport.receive_path import ReceivePath


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
        window_bytes: int,
    ) -> None:
        """``on_duplicates(message, chunks)`` is told of chunks that came a second time or too late; ``window_bytes``: the credit
        that the handshake tells the peer."""
        self.heard_at = float("-inf")  # when anything but the handshake came
        self.paths = [ReceivePath(index) for index in range(paths)]
        self.inbox = inbox = Inbox(config=config, drops=drops, on_duplicates=on_duplicates)
        self.feedback = feedback = OwedFeedback(self.paths, backlog, window_bytes)
        self.finals = finals = Finals(inbox, self.paths, feedback)
        arrival = Arrival(inbox, finals, feedback, drops=drops, round_over=round_over)
        self.messages, self.tombstones = inbox.messages, finals.tombstones
        self._drops = drops
        self._round_over = round_over
        # The parts' own methods, so that no call stands between: some are made for each burst.
        self.on_train, self.on_data, self.on_remnants = arrival.on_train, arrival.on_data, arrival.on_remnants
        self.take_feedback = feedback.take
        self.take_early, self.forget = inbox.take_early, inbox.forget
        self.check, self.on_watermark = finals.finish_if_complete, finals.on_watermark
        self.on_timer = finals.on_timer

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
            if self.finals.on_end(message_id, now):
                self.feedback.on_question(header[3], now, header[14])
        elif type_ == wire.Type.PING:
            self.feedback.on_question(header[3], now, header[14])
        self.feedback.mark(slab, at, header, header[10], 1, 1, HEADER_BYTES + len(payload))
        return True

    def _on_open(self, message_id: int, opened: wire.Open, now: float) -> bool:
        if message_id in self.tombstones or self._round_over(round_of(message_id)):
            self._drops[Drop.LATE] += 1
            if message_id in self.tombstones:
                self.finals.late.add(message_id)
            return True
        return self.inbox.open(message_id, opened, now)

    def next_timeout(self) -> float:
        """When ``on_timer`` has something to do."""
        at = self.finals.stop_at
        for path in self.paths:
            if path.due_at < at:
                at = path.due_at
        return at
