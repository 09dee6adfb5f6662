"""A message on its way out: what was offered, sent, acknowledged and lost of it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dblp.transport import wire
from dblp.transport.burst import ChunkSource
from dblp.transport.lanes import Lanes
from dblp.transport.message import BOUNDED_CLASS, EXACT_CLASS, MessageSpec, Sent
from dblp.transport.port import Bytes

if TYPE_CHECKING:
    from dblp.transport.flight import Control

LIKELY = 2.0
"""Standard deviations by which repairs of a bounded message exceed what its bound needs: in 49 of 50 passes enough arrive. One
pass more costs a round trip or two; the repairs cost a few percent of the message."""
FEW = 0.05
"""Chunks that may be missing behind a pass of copies where all must arrive: one pass more in twenty."""
PORTIONS = 4
"""Parts in which a message leaves at most while a hop works on it, if none of them is a whole burst."""
DETACH_BYTES = 256 * 1024
"""Most that ``detach`` copies, a tenth of a millisecond's work; larger rests are cheaper to wait for."""


class Outgoing:
    """State of one outgoing message. Chunks leave as runs from ``queue``, or class by class from ``lanes`` if the message is
    tagged; what was lost goes before them, from ``lost``."""

    __slots__ = (
        "acked",
        "again",
        "again_loss",
        "chunks_resent",
        "chunks_sent",
        "cls",
        "copies",
        "critical_lost",
        "detached",
        "done",
        "end_cls",
        "end_due",
        "end_heard",
        "final",
        "granted",
        "head",
        "id",
        "inline",
        "lanes",
        "limit",
        "loss_share",
        "lost",
        "may_miss",
        "missed",
        "on_done",
        "open_control",
        "opened",
        "passes",
        "paths",
        "per_burst",
        "portion",
        "queue",
        "row",
        "source",
        "spec",
        "unoffered",
        "wakes",
    )  # fmt: skip

    def __init__(
        self,
        message: int,
        spec: MessageSpec,
        data: Bytes,
        head: bytearray,
        per_burst: int,
        classes: npt.NDArray[np.uint8] | None = None,
        *,
        passes: bool = False,
        ranked: bool = True,
    ) -> None:
        """``classes``: the class of each chunk, where they differ; ``passes``: ``TransportConfig.repair`` in passes; ``ranked``:
        see ``Lanes``."""
        self.id = message
        self.spec = spec
        self.source = ChunkSource(data, spec.chunk_bytes)
        self.head = head  # one header's bytes, patched for each burst; ``row`` is the same memory as words
        self.row: npt.NDArray[np.uint64] = np.frombuffer(head, np.uint64)
        self.per_burst = per_burst
        # Chunks that leave together at least, while more are to come; see ``hurry``.
        self.portion = min(per_burst, max(spec.chunks // PORTIONS, 1))
        self.cls = BOUNDED_CLASS if spec.budget > 0.0 else EXACT_CLASS  # of what leaves next, see ``aim``
        self.lanes: Lanes | None = None
        if classes is not None:
            self.lanes = Lanes(classes, self.source.full, ranked=ranked)
            self.cls = self.lanes.last_class
        self.end_cls = self.cls  # the last class to leave: its END tells of all
        self.may_miss = spec.may_miss
        self.passes = passes and spec.budget > 0.0
        self.missed: npt.NDArray[np.uint32] = np.empty(0, np.uint32)  # lost in the pass that is on its way
        self.queue: deque[list[int]] = deque()
        self.unoffered = spec.chunks
        self.limit = 0
        self.granted = False
        self.opened = False
        self.inline: bytes | None = None  # OPEN's payload, while the only chunk is awaited that goes with it
        self.open_control: Control | None = None
        self.acked = np.zeros(spec.chunks, np.bool_)
        self.lost: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        self.again: npt.NDArray[np.uint32] = np.empty(0, np.uint32)  # repairs that may be in flight
        self.again_loss = 0.0  # share of the repairs in flight that will be lost, all their copies
        self.copies: deque[tuple[int, npt.NDArray[np.uint32], int]] = (
            deque()
        )  # class, chunks, times still to leave
        self.critical_lost = 0  # of them, those of class 0
        self.loss_share = 0.0  # of the path, as its sender sees it
        self.chunks_sent = 0
        self.chunks_resent = 0
        self.paths: set[int] = set()
        self.end_due: deque[int] = deque()
        self.end_heard = False  # an END is known to have arrived
        self.final: dict[int, bytes] = {}
        self.done = False
        self.detached = False
        self.on_done: Callable[[Sent | Exception], None] | None = None
        self.wakes: Callable[[Outgoing], None] | None = None

    # --- the collective's side (interface.Sending)

    def offer(self, first: int, count: int) -> None:
        """Chunks first.. hold their final content and may leave."""
        if self.done or count <= 0:
            return
        if self.lanes is not None:
            self.offer_scattered(np.arange(first, first + count, dtype=np.uint32))
            return
        if self.inline is not None:
            self.unoffered, self.chunks_sent = 0, 1
            if self.wakes is not None:
                self.wakes(self)
            return
        tail = self.queue[-1] if self.queue else None
        if tail is not None and tail[0] + tail[1] == first:
            tail[1] += count
        else:
            self.queue.append([first, count])
        self.unoffered -= count
        if self.wakes is not None:
            self.wakes(self)

    def offer_scattered(self, chunks: npt.NDArray[np.uint32]) -> None:
        """The same for chunks with gaps, ascending."""
        if self.done or not len(chunks):
            return
        if self.lanes is None:
            starts = [0, *(np.flatnonzero(chunks[1:] - chunks[:-1] != 1) + 1).tolist(), len(chunks)]
            for start, stop in itertools.pairwise(starts):
                self.offer(int(chunks[start]), stop - start)
            return
        self.lanes.offer(chunks)
        self.unoffered -= len(chunks)
        if self.wakes is not None:
            self.wakes(self)

    def detach(self) -> bool:
        """Copy what is not acknowledged and let go of the caller's memory; see ``interface.Sending``."""
        if self.done:
            return True
        if self.unoffered or self.spec.nbytes > DETACH_BYTES:
            return False
        self.source = ChunkSource(self.source.data.copy(), self.spec.chunk_bytes)
        self.detached = True
        return True

    # --- the sender's side

    @property
    def repairable(self) -> int:
        """Lost chunks that must be sent again: all critical ones. While more of the others would be missing than the receiver
        may miss, were all repairs in flight to meet the path's own loss, as many more as make it likely that enough arrive (see
        ``_enough``): sending just the excess would approach the bound in ever smaller steps."""
        if self.passes:
            return len(self.lost)
        others = len(self.lost) - self.critical_lost
        if not self.may_miss:
            return self.critical_lost + others
        if others <= 0 or others + len(self.again) <= self.may_miss:
            return self.critical_lost
        excess = others + self._repairs_lost() - self.may_miss
        return self.critical_lost + min(others, _enough(excess, self.loss_share))

    def _repairs_lost(self) -> int:
        """How many of the repairs in flight will be lost, most likely."""
        if len(self.again):
            self.again = self.again[~self.acked[self.again]]
        flying = len(self.again)
        spread = LIKELY * (flying * self.again_loss * (1.0 - self.again_loss)) ** 0.5
        return min(flying, int(flying * self.again_loss + spread))

    @property
    def all_sent(self) -> bool:
        """Every chunk has left once, and the copies of those that had to have any."""
        if self.queue or self.copies or self.unoffered:
            return False
        return self.lanes is None or not self.lanes.waiting

    @property
    def fresh(self) -> bool:
        """First transmissions wait that may leave, and are worth it."""
        if self.lanes is not None:
            return self.lanes.next >= 0 and not self._crumbs(not self.lanes.limited)
        if not self.queue:
            return False
        first = self.queue[0][0]
        return first < self.limit and not self._crumbs(self.limit >= first + self.portion)

    def _crumbs(self, granted: bool) -> bool:
        """Less than a portion waits, more is to be offered, and the limit has room for it: as results get done chunk by chunk,
        each would cost a system call at both ends. Nothing waits for ever: what a hop waits for was all offered at the hop before
        it, or will be, and all of the first hop's is offered at once."""
        if not self.unoffered or not granted:
            return False
        return self.spec.chunks - self.unoffered - self.chunks_sent < self.portion

    @property
    def sendable_run(self) -> int:
        """First transmissions that are next and could leave together, the limit aside."""
        return self.queue[0][1] if self.lanes is None else self.lanes.ready(self.cls)

    def raise_limit(self, limit: int) -> None:
        """Chunks below ``limit`` may leave."""
        if limit > self.limit:
            self.limit = limit
            if self.lanes is not None:
                self.lanes.raise_limit(limit)

    def aim(self) -> None:
        """Turn ``cls`` to the class of what leaves next, if the chunks have classes: repairs before first transmissions, of
        either the most valuable, and copies behind them."""
        lanes = self.lanes
        if lanes is None:
            return
        if self.critical_lost:
            self.cls = 0
        elif self.repairable:
            self.cls = int(lanes.classes[self.lost].min())
        elif lanes.next >= 0:
            self.cls = lanes.next
        elif self.copies:
            self.cls = self.copies[0][0]

    def times_first(self, most: int) -> int:
        """How often a first transmission leaves on a path that loses ``loss_share``, at most ``most`` times, see ``_times``."""
        chunks = self.spec.chunks
        return _times(chunks, 0 if self._all_critical else self.may_miss, self.loss_share, most)

    def times_again(self, most: int) -> int:
        """The same of the repairs that leave next."""
        if self._all_critical:
            return _times(self.critical_lost, 0, self.loss_share, most)
        others = len(self.lost) - self.critical_lost
        flying = int(
            len(self.again) * self.again_loss
        )  # of the repairs in flight, the mean number that will be lost
        return _times(others, max(self.may_miss - flying, 0), self.loss_share, most)

    @property
    def _all_critical(self) -> bool:
        """What leaves next is critical."""
        return self.lanes is not None and not self.cls

    def repeat(self, chunks: npt.NDArray[np.uint32], times: int, *, again: bool) -> None:
        """These chunks of class ``cls`` have just left, as repairs if ``again``; let them leave so many times in all. The last
        time decides whether they are lost."""
        if times > 1:
            self.copies.append((self.cls, chunks, times - 1))
        if again:
            self.again_loss = self.loss_share**times

    def hurry(self) -> None:
        """The path loses much: whatever is offered leaves at once, the most valuable first. Each burst is evidence of what became
        of those before it."""
        self.portion = 1
        if self.lanes is not None:
            self.lanes.rank()
            self.end_cls = self.lanes.last_class

    def sendable(self) -> bool:
        """Something could leave now, credit permitting."""
        if self.done:
            return False
        return not self.opened or bool(self.end_due or self.copies) or self.repairable > 0 or self.fresh

    def blocked(self) -> bool:
        """Chunks wait for a grant."""
        if self.lanes is not None:
            return not self.done and self.lanes.blocked
        return not self.done and bool(self.queue) and self.queue[0][0] >= self.limit

    def take_run(self, most: int) -> tuple[int, int]:
        """Next run of first transmissions, at most ``most`` chunks: (first, count)."""
        head = self.queue[0]
        first = head[0]
        count = min(head[1], most, self.per_burst, self.limit - first)
        if count == head[1]:
            self.queue.popleft()
        else:
            head[0] += count
            head[1] -= count
        self.chunks_sent += count
        return first, count

    def take_runs(self, most: int) -> npt.NDArray[np.uint32] | None:
        """Next first transmissions of several runs, ascending, at most ``most`` chunks; None where the next run is the only one,
        or makes half a burst by itself: bursts without gaps are cheaper. Results that waited for a repair come behind others, one
        by one: together they cost one burst."""
        room = min(most, self.per_burst)
        if len(self.queue) < 2 or 2 * self.queue[0][1] >= room or self.queue[1][0] >= self.limit:
            return None
        parts = []
        while room and self.queue and self.queue[0][0] < self.limit:
            first, count = self.take_run(room)
            parts.append(np.arange(first, first + count, dtype=np.uint32))
            room -= count
        return np.sort(np.concatenate(parts))

    def whole_bursts(self, most: int) -> int:
        """How many full bursts of whole chunks, at most ``most``, the next run holds."""
        if self.lanes is not None:
            return min(most, self.lanes.whole(self.cls) // self.per_burst)
        if not self.queue:
            return 0
        first, count = self.queue[0]
        return min(most, (min(count, self.limit - first, self.source.full - first)) // self.per_burst)

    def take_bursts(self, bursts: int) -> int:
        """Take that many full bursts of first transmissions; returns the first chunk."""
        head = self.queue[0]
        first, count = head[0], bursts * self.per_burst
        if count == head[1]:
            self.queue.popleft()
        else:
            head[0] += count
            head[1] -= count
        self.chunks_sent += count
        return first

    def take_tagged(self, most: int) -> npt.NDArray[np.uint32]:
        """Next first transmissions of class ``cls``, ascending, at most ``most`` chunks."""
        assert self.lanes is not None
        chunks = self.lanes.take(self.cls, most)
        self.chunks_sent += len(chunks)
        return chunks

    def take_lost(self, most: int) -> npt.NDArray[np.uint32]:
        """Next lost chunks to repair, of class ``cls``, ascending, at most ``most``; may be empty."""
        self._set_lost(self.lost[~self.acked[self.lost]])
        most = min(self.repairable, most, self.per_burst)
        if self.lanes is None:
            taken, self.lost = self.lost[:most], self.lost[most:]
        else:
            places = np.flatnonzero(self.lanes.classes[self.lost] == self.cls)[:most]
            taken = self.lost[places]
            self._set_lost(np.delete(self.lost, places))
        self.chunks_resent += len(taken)
        if self.may_miss and not self.passes:
            self.again = np.concatenate((self.again, taken))
        return taken

    def take_copy(self, most: int) -> tuple[npt.NDArray[np.uint32], bool]:
        """Chunks that leave once more, of class ``cls``, ascending, at most ``most``, and whether for the last time; may be none.
        All leave once before any leaves the next time: the longer between two copies, the less one loss takes both."""
        cls, _, times = self.copies[0]
        chunks = np.empty(0, np.uint32)
        while len(chunks) < most and self.copies and (self.copies[0][0], self.copies[0][2]) == (cls, times):
            more = self.copies.popleft()[1]
            chunks = np.concatenate((chunks, more[~self.acked[more]]))
        chunks = np.unique(chunks)
        if len(chunks) > most:
            self.copies.appendleft((cls, chunks[most:], times))
            chunks = chunks[:most]
        if times > 1 and len(chunks):
            self.copies.append((cls, chunks, times - 1))
        self.chunks_resent += len(chunks)
        return chunks, times == 1

    def _set_lost(self, lost: npt.NDArray[np.uint32]) -> None:
        self.lost = lost
        if self.lanes is not None:
            self.critical_lost = int(np.count_nonzero(self.lanes.classes[lost] == 0))

    def add_lost(self, chunks: npt.NDArray[np.uint32]) -> None:
        """These chunks were declared lost."""
        fresh = chunks[~self.acked[chunks]]
        if len(fresh):
            if self.passes:
                self.missed = np.union1d(self.missed, fresh).astype(np.uint32, copy=False)
                self.turn_pass()
                return
            if len(self.again):
                self.again = np.setdiff1d(self.again, fresh, assume_unique=True)
            self._set_lost(np.union1d(self.lost, fresh).astype(np.uint32, copy=False))

    def turn_pass(self) -> bool:
        """Begin the next pass, if repairs go in passes and all that has left is known to have arrived or not: what is missing
        goes again, if more is than may be, and critical chunks in any case. True if something waits to leave now."""
        if not len(self.missed) or len(self.lost) or self.fresh:
            return False
        self.missed = self.missed[~self.acked[self.missed]]
        if np.count_nonzero(self.acked) + len(self.missed) < self.chunks_sent:
            return False
        critical = np.zeros(len(self.missed), np.bool_)
        if self.lanes is not None:
            critical = self.lanes.classes[self.missed] == 0
        goes = critical if np.count_nonzero(~critical) <= self.may_miss else np.ones_like(critical)
        self._set_lost(self.missed[goes])
        self.missed = self.missed[~goes]
        return bool(len(self.lost))

    def add_final(self, final: wire.Final) -> Sent | None:
        """A part of the receiver's last word; the outcome once all parts are here."""
        self.final[final.part] = final.bits
        if len(self.final) < final.parts:
            return None
        bits = b"".join(self.final[part] for part in range(final.parts))
        missing = wire.missing_from_bits(bits, self.spec.chunks)
        return Sent(missing=missing, chunks_sent=self.chunks_sent, chunks_resent=self.chunks_resent)

    def finish(self, outcome: Sent | Exception) -> None:
        """Over, once; tells the owner."""
        if self.done:
            return
        self.done = True
        self.queue.clear()
        self.copies.clear()
        if self.lanes is not None:
            self.lanes.clear()
        self.source = _NOTHING
        if self.on_done is not None:
            callback: Any = self.on_done
            self.on_done = None
            callback(outcome)


def _enough(excess: int, loss_share: float) -> int:
    """How many to send so that ``excess`` of them arrive: their mean number less ``LIKELY`` standard deviations."""
    if excess <= 0:
        return 0
    spread = LIKELY * (excess * loss_share) ** 0.5
    return int((excess + spread) / (1.0 - loss_share)) + 1


def _times(chunks: int, may_miss: int, loss_share: float, most: int) -> int:
    """How often each of ``chunks`` leaves so that behind that pass no more than ``may_miss`` are missing, most likely; where
    none may be, ``FEW``. Different chunks gain more than copies do, so each leaves once if that is enough."""
    for times in range(1, most):
        share = loss_share**times
        if chunks * share <= FEW or (may_miss and _enough(chunks - may_miss, share) <= chunks):
            return times
    return max(most, 1)


_NOTHING = ChunkSource(np.empty(0, np.uint8), 16)
