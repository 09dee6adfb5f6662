"""What has come on the paths from one peer, and the feedback that is owed for it: when, of what, in how many copies.

Theory of operation. Each path notes which datagrams of each burst were accepted (``receive_path``). Feedback waits until much is
unreported or ``FEEDBACK_DELAY_S`` is over, but a gap, holes in a whole message and a sender that asks make it due at once. A
question (END, PING, the last burst of a message) is answered in copies where answers are lost, and its own copies only once more.
Feedback tells what came; what counted is told by FINAL (``final``).
"""

from __future__ import annotations

from collections.abc import Sequence

from dblp.transport import wire
from dblp.transport.backlog import Backlog
from dblp.transport.port import Slab
from dblp.transport.receive_path import ReceivePath

FEEDBACK_EVERY_BYTES = 4 * 1024 * 1024
"""Unacknowledged bytes after which feedback is due at once, where credit allows more than three times that; a sender whose
window is smaller asks for it (``wire.ASK``)."""
WINDOW_PARTS = 3
"""Feedback is due after such a part of the credit at the latest: a sender that is held back by nothing else need not ask."""
FEEDBACK_DELAY_S = 4e-3
"""Longest that feedback waits otherwise: half of the least retransmission timeout."""
ASK_WAIT_S = 1e-3
"""Longest that the answer to ASK waits for the last datagram of its burst: what arrives one by one is answered once."""
TOLD_AGAIN = 8
"""Bursts of a class without news that feedback on a less urgent class tells of again."""
TOLD_AGAIN_S = 1.0
"""Behind a loss reports have their whole window for so long: those that told of it before may have been lost with it."""
LOSSY_S = 50e-3
"""A path is lossy for this long after a gap: answers go out twice."""
ANSWER_GAP_S = 1e-3
"""A question this soon after an answer, with nothing between, is a copy of the one that was answered, and less than the least
distance of a sender's own repetitions: what its copies acknowledge is told once, in the end."""
MAX_ANSWERS = 8
"""Most copies of a feedback that answers a repeated question (see ``send_path.PROBE_COPIES``)."""


class OwedFeedback:
    """The feedback that one peer is owed, on all paths."""

    def __init__(self, paths: Sequence[ReceivePath], backlog: Backlog, window_bytes: int) -> None:
        """``window_bytes``: the credit that the peer knows of so far."""
        self.every_bytes = _every(window_bytes)
        """Unreported bytes after which feedback is due, by the credit that was told last."""
        self.data_at = -1.0  # when a chunk last came
        # One-way delays in seconds, by clocks that may differ: the least ever, and the greatest of late, which fades.
        self.owd_min = float("inf")
        self.owd_high = 0.0
        self._paths = paths
        self._backlog = backlog

    def mark(
        self,
        slab: Slab,
        start: int,
        header: tuple[int, ...],
        seq: int,
        bursts: int,
        mask: int,
        nbytes: int,
    ) -> None:
        """Note the same datagrams of consecutive bursts."""
        path = self._paths[header[3]]
        space = path.spaces[header[2] & wire.CLASS_MASK]
        full = space.widen(seq)
        gap = full > space.highest + 1
        path.in_order = path.in_order + bursts if full >= space.highest else 0
        space.mark(full, bursts, mask)
        if slab.marked:
            path.marked += bursts * mask.bit_count()
        # A gap is told at once, and so are holes in what is a whole message, and what a sender asks for, when all of the burst
        # has come that will.
        at_once = gap or space.full
        holes = mask.bit_count() < header[4] and space.has_holes(full)
        if holes and header[9] <= header[4] and mask.bit_length() == header[4]:
            at_once = True
        if header[2] & wire.ASK:
            at_once = at_once or mask.bit_length() == header[4]
            path.due_at = min(path.due_at, slab.received_at + ASK_WAIT_S)
        path.unreported_bytes += FEEDBACK_EVERY_BYTES if at_once else nbytes
        if gap or holes:
            path.gap_at = slab.received_at
        if header[1] == wire.Type.DATA:
            path.heard_bytes += nbytes
            self.data_at = slab.received_at
        self._note_arrival(path, slab, start, header[11])

    def _note_arrival(self, path: ReceivePath, slab: Slab, start: int, sent_at: int) -> None:
        """What a round trip is measured by: when a datagram was sent and when that very one arrived. With the arrival of another,
        of the first of a slab that waited to be read, round trips come out too short, and the least of them counts for long."""
        if path.due_at == float("inf"):
            path.due_at = slab.received_at + FEEDBACK_DELAY_S
        arrived_at = slab.arrival(start)
        path.echo, path.echo_at = sent_at, arrived_at
        owd = wire.since_us(sent_at, wire.clock_us(arrived_at))
        if owd < self.owd_min:
            self.owd_min = owd
        high = self.owd_high
        self.owd_high = owd if owd > high else high - (high - owd) / 64

    def on_question(self, path_id: int, now: float, copies: int = 0) -> None:
        """END or PING: an answer is due at once, in as many copies as the question came, and in more if nothing but questions
        came since the last one. To the question's own copies no set of copies is due, but soon one feedback."""
        path = self._paths[path_id]
        if not path.asked:
            if not path.heard_bytes and now < path.answered_at + ANSWER_GAP_S:
                path.due_at = min(path.due_at, path.answered_at + ANSWER_GAP_S)
                return
            lossy = path.echo_at - path.gap_at < LOSSY_S
            path.copies = 1 + lossy if path.heard_bytes else path.copies + 1
            path.heard_bytes = 0
        path.copies = min(max(path.copies, copies), self._backlog.affordable(MAX_ANSWERS))
        path.asked = True

    def take(
        self,
        path: ReceivePath,
        window_bytes: int,
        grants: tuple[tuple[int, int], ...],
        most_bytes: int,
        now: float,
    ) -> tuple[list[bytes], list[bytes]]:
        """The feedback of a path, in payloads of at most ``most_bytes``, and copies to follow it, of what is new only; what was
        owed is settled."""
        self.every_bytes = _every(window_bytes)
        held = max(0, int((now - path.echo_at) * 1e6))
        behind_us = int(self._backlog.behind_s * 1e6)
        payloads, copies = [], []
        for spaces, new in self._fitting(
            path, most_bytes - wire.FEEDBACK_BYTES - wire.GRANT_BYTES * len(grants)
        ):
            feedback = wire.Feedback(
                path.echo, held, window_bytes, path.asked, grants, spaces, path.marked, path.index, behind_us
            )
            payloads.append(wire.encode_feedback(feedback))
            if path.asked and new:
                copies += payloads[-1:] * (path.copies - 1)
        if path.asked:
            path.answered_at = now
        path.unreported_bytes = 0
        path.due_at = float("inf")
        path.asked = False
        return payloads, copies

    def _fitting(self, path: ReceivePath, room: int) -> list[tuple[tuple[wire.Space, ...], bool]]:
        """Reports of the classes that have news, and of all for a question, in groups that fit into ``room`` bytes; one group at
        least. Each with whether there is news in it. With them goes the end of what came of more urgent classes: to the sender,
        an arrival of a less urgent class is evidence against what it sent before of those, and the feedback that told of it may
        have been lost."""
        groups: list[list[wire.Space]] = [[]]
        left = room
        news = [space.changed for space in path.spaces]
        for cls, space in enumerate(path.spaces):
            if space.highest < 0 or not (path.asked or any(news[cls:])):
                continue
            space.changed = False
            whole = news[cls] or path.asked
            most = (room - wire.SPACE_BYTES) // 8 if whole else TOLD_AGAIN
            report = space.report(cls, most, again=path.asked or path.echo_at - path.gap_at < TOLD_AGAIN_S)
            size = wire.SPACE_BYTES + 8 * report.count
            if size > left and groups[-1]:
                groups.append([])
                left = room
            groups[-1].append(report)
            left -= size
        return [(tuple(group), any(news[report.cls] for report in group)) for group in groups]


def _every(window_bytes: int) -> int:
    return min(FEEDBACK_EVERY_BYTES, window_bytes // WINDOW_PARTS)
