"""What came on one path from one peer: a mask for each burst, and what feedback is owed (the other side of ``send_path``)."""

from __future__ import annotations

from array import array
from collections import deque

from dblp.transport import wire

TELL_BURSTS = wire.MASK_WINDOW // 2
"""Bursts of a class after which feedback is due at once: what a window of masks has left behind untold counts as lost. One such
feedback may be lost itself."""
TOLD_TIMES = 3
"""Reports in which each burst is told of while nothing is known to be lost: so many must be lost in a row for the sender to
take for lost what came."""


class ReceiveSpace:
    """Which bursts of one class came on one path: a mask a burst, over a sliding window."""

    __slots__ = ("changed", "highest", "lowest", "masks", "origin", "told", "told_from")
    _CAPACITY = 4096

    def __init__(self) -> None:
        self.masks = array("Q", bytes(8 * self._CAPACITY))
        self.origin = 0
        self.highest = -1
        self.told = -1  # ``highest`` at the last report
        self.lowest = 1 << 63  # of the bursts that were marked since
        self.told_from: deque[int] = deque(maxlen=TOLD_TIMES)  # ``lowest`` at the last reports
        self.changed = False

    def widen(self, seq: int) -> int:
        """Full sequence number of the low 32 bits ``seq`` (nearest to the highest seen)."""
        near = self.highest if self.highest >= 0 else 0
        delta = (seq - near) & 0xFFFFFFFF
        return near + (delta - (1 << 32) if delta >= 1 << 31 else delta)

    def mark(self, seq: int, bursts: int, mask: int) -> None:
        """Note the datagrams of ``mask`` for each of the bursts from ``seq`` on."""
        stop = seq + bursts
        if stop - self.origin > self._CAPACITY:
            self._slide(stop - 1)
        if seq < self.origin or seq + wire.MASK_WINDOW <= self.highest:
            return
        masks, index = self.masks, seq - self.origin
        for at in range(index, index + bursts):
            masks[at] |= mask
        self.changed = True
        if seq < self.lowest:
            self.lowest = seq
        if stop > self.highest:
            self.highest = stop - 1

    def has_holes(self, seq: int) -> bool:
        """A datagram of the burst has come, and one before it in the burst has not."""
        at = seq - self.origin
        if not 0 <= at < self._CAPACITY:
            return False
        mask = self.masks[at]
        return bool(mask & (mask + 1))

    @property
    def full(self) -> bool:
        """So much is untold that a report is due at once."""
        return self.highest - self.told >= TELL_BURSTS

    def _slide(self, seq: int) -> None:
        keep = wire.MASK_WINDOW
        if seq - self.highest >= self._CAPACITY - keep:
            kept = array("Q", bytes(8 * keep))
            start = seq - keep + 1
        else:
            start = self.highest - keep + 1
            kept = self.masks[start - self.origin : self.highest - self.origin + 1]
        self.masks = kept + array("Q", bytes(8 * (self._CAPACITY - len(kept))))
        self.origin = start

    def report(self, cls: int, most: int, *, again: bool = True) -> wire.Space:
        """The window of masks up to the highest burst, at most ``most`` of them; unless ``again`` only what is newer than
        ``TOLD_TIMES`` reports."""
        base = max(self.origin, self.highest - min(most, wire.MASK_WINDOW) + 1, 0)
        self.told_from.append(self.lowest)
        self.lowest = 1 << 63
        if not again:
            base = min(max(base, min(self.told_from)), self.highest)
        masks = self.masks[base - self.origin : self.highest - self.origin + 1]
        self.told = self.highest
        return wire.Space(cls, base & 0xFFFFFFFF, len(masks), int.from_bytes(masks.tobytes(), "little"))


class ReceivePath:
    """What came on one path and what feedback is owed for it."""

    __slots__ = (
        "answered_at",
        "asked",
        "copies",
        "due_at",
        "echo",
        "echo_at",
        "gap_at",
        "heard_bytes",
        "in_order",
        "index",
        "marked",
        "spaces",
        "unreported_bytes",
    )

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.spaces = [ReceiveSpace() for _ in range(4)]
        self.in_order = 0  # bursts since one arrived behind a later one
        self.unreported_bytes = 0
        self.marked = 0  # datagrams with a congestion mark
        self.echo = 0
        self.echo_at = -1.0  # nothing has come yet
        self.due_at = float("inf")
        self.asked = False
        self.answered_at = float("-inf")  # when a question was last answered
        self.copies = 1  # of the next answer
        self.heard_bytes = 0  # since the last answer
        self.gap_at = float("-inf")  # when a burst was last found missing or incomplete
