"""When messages of one peer are over, and the FINAL that is owed for each.

Theory of operation. A message is over when all of it is here, or its bound and its stop rule are met (``Incoming.complete``), at
once or after a time without news that follows from the delays seen lately. What is left of it is a *tombstone*, the FINAL with
the bitmap of what counted: it is said again whenever something comes for the message, until the peer's watermark tells that the
round is over there too.
"""

from __future__ import annotations

from collections.abc import Sequence

from dblp.transport import wire
from dblp.transport.feedback import OwedFeedback
from dblp.transport.inbox import Inbox
from dblp.transport.incoming import Incoming
from dblp.transport.message import ROUND_BITS, STEP_BITS, round_of
from dblp.transport.policy import Stop
from dblp.transport.receive_path import ReceivePath
from dblp.transport.rounds import FORGET_EVERY, following, is_past

UNENDED_S = 1.0
"""Silence without END after which a message whose bound is met ends: a sender that waits for credit is silent too."""
KEEPS_ORDER_BURSTS = 256
"""Bursts in a row without one behind a later one after which a path is taken to keep its order."""
MAX_TOMBSTONES = 8192
"""Ended messages of a peer whose FINAL can be repeated at once when something late comes. FINAL is repeated until it is
acknowledged in any case, so the oldest may go: groups without watermarks (point to point) would keep all of them."""
_GROUP_SHIFT = ROUND_BITS + STEP_BITS


class Finals:
    """Ends the messages of an inbox, and remembers them while their FINAL may be needed."""

    def __init__(self, inbox: Inbox, paths: Sequence[ReceivePath], feedback: OwedFeedback) -> None:
        """``feedback``: knows the delays on ``paths``."""
        self.tombstones: dict[int, list[wire.Final]] = {}
        self.completed: list[Incoming] = []  # messages that are over, and nobody was told yet
        self.late: set[int] = set()  # messages that are over, and something came for them
        self.stop_at = float("inf")  # when a stop rule may be met without anything arriving
        self._messages = inbox.messages
        self._paths = paths
        self._feedback = feedback
        self._of_group: dict[int, set[int]] = {}  # tombstones, so that a watermark need not look at all
        self._watermarks: dict[int, int] = {}
        self._answered: set[int] = set()  # messages over whose first END came after their FINAL had left

    def finish_if_complete(self, message: Incoming, now: float) -> None:
        """Close the message if all of it is here or its stop rule is met; else note when that may be."""
        spec = message.spec
        if message.closed or spec is None or message.sink is None:
            return
        if message.opened is None:
            return
        if message.got < spec.chunks - message.may_miss and spec.stop is not Stop.ABANDON:
            return
        if message.complete(now, self.quiet_s, self.unended_quiet_s):
            self._close(message)
        else:
            self.stop_at = min(self.stop_at, message.stop_check_at(self.quiet_s, self.unended_quiet_s))

    def _close(self, message: Incoming) -> None:
        """The message is over: later chunks are void, FINAL is owed."""
        message.closed = True
        self._messages.pop(message.id, None)
        self.tombstones[message.id] = wire.final_parts(message.have)
        self._of_group.setdefault(message.id >> _GROUP_SHIFT, set()).add(message.id)
        if len(self.tombstones) > MAX_TOMBSTONES:
            self._forget(next(iter(self.tombstones)))
        self.completed.append(message)

    def on_end(self, message_id: int, now: float) -> bool:
        """END of a message; False if its FINAL is the answer, which has just left or is about to."""
        message = self._messages.get(message_id)
        if message is not None:
            if not message.ended:
                message.ended = True
                message.last_useful = now  # what END overtook has the delay estimate's time to come
            self.finish_if_complete(message, now)
            return not message.closed
        if message_id not in self.tombstones:
            return True
        if message_id not in self._answered:
            self._answered.add(message_id)
            return False
        self.late.add(message_id)
        return True

    def on_watermark(self, group: int, watermark: int) -> None:
        """The peer has ended all rounds of the group below ``watermark``: their tombstones may go."""
        before = self._watermarks.get(group, 0)
        if watermark <= before:
            return
        self._watermarks[group] = watermark
        limit = (group << ROUND_BITS | watermark) << STEP_BITS
        for message_id in [m for m in self._of_group.get(group, ()) if m < limit]:
            self._forget(message_id)
        if watermark // FORGET_EVERY > before // FORGET_EVERY:
            followers = self._of_group.get(following(group, 0, 0)[0], ())
            for message_id in [m for m in followers if is_past(round_of(m), group, watermark)]:
                self._forget(message_id)

    def _forget(self, message_id: int) -> None:
        del self.tombstones[message_id]
        self._of_group[message_id >> _GROUP_SHIFT].discard(message_id)
        self._answered.discard(message_id)

    def on_timer(self, now: float) -> None:
        """Stop rules whose time has come."""
        if self.stop_at > now:
            return
        self.stop_at = float("inf")
        for message in list(self._messages.values()):
            if message.may_miss and message.sink is not None:
                self.finish_if_complete(message, now)

    @property
    def quiet_s(self) -> float:
        """Delay estimate of the ``stall`` rule once END has come: twice the spread of one-way delays seen lately, and a
        scheduler's tick; nothing on a single path that has kept its order for long, where END comes last."""
        if len(self._paths) == 1 and self._paths[0].in_order >= KEEPS_ORDER_BURSTS:
            return 0.0
        return self._spread_s

    @property
    def _spread_s(self) -> float:
        return 2.0 * max(self._feedback.owd_high - self._feedback.owd_min, 0.0) + 1e-3

    @property
    def unended_quiet_s(self) -> float:
        """The same without END: END may be lost, but a living sender repeats it after each timeout; it may also be held up."""
        return 2.0 * self._spread_s + UNENDED_S
