"""Lanes: the chunks of a tagged message that wait to leave for the first time, one lane for each class.

Chunks leave class by class, and within a class in the order in which they were offered; the message's short last chunk is the
last of its class, since it ends its burst. Where the path loses next to nothing, the order would only cost: all that is not
critical leaves as one class then, in the gradient's own order, until ``rank`` is called. Everything here works on whole arrays of
chunks, never on one.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from dblp.transport.port import CLASSES

Chunks = npt.NDArray[np.uint32]
"""Chunk indices, 1-D."""
UNRANKED_CLASS = 2
"""Class of all that is not critical in a message that is not ranked: the middle one, for a switch may look at it."""
_NONE = np.empty(0, np.uint32)


class Lanes:
    """What of one message waits to leave, by class."""

    __slots__ = (
        "_held",
        "_lanes",
        "_last",
        "_limit",
        "_ranked",
        "_tail",
        "_whole",
        "classes",
        "next",
        "waiting",
    )

    def __init__(self, classes: npt.NDArray[np.uint8], whole: int, *, ranked: bool = True) -> None:
        """``classes``: the class of each chunk, kept; ``whole``: chunks of full size, all of them or all but the last;
        ``ranked``: they leave in order of their classes."""
        self.classes = classes
        self._ranked = ranked
        self.next = -1
        """The class that leaves next; -1: nothing may leave now."""
        self.waiting = 0
        """Chunks that were offered and have not left, those beyond the limit included."""
        self._lanes: list[deque[Chunks]] = [deque() for _ in range(CLASSES)]
        self._whole = [0] * CLASSES  # full chunks in each lane
        self._held = _NONE  # offered, but at or beyond the limit
        self._limit = 0
        self._last = whole if whole < len(classes) else -1  # the short chunk
        self._tail = -1  # its class, while it waits

    @property
    def last_class(self) -> int:
        """The last class to leave for the first time."""
        return int(self._of(self.classes).max())

    @property
    def limited(self) -> bool:
        """Some of what was offered waits for the limit to rise."""
        return len(self._held) > 0

    @property
    def blocked(self) -> bool:
        """Chunks wait, and none of them may leave before the limit rises."""
        return self.next < 0 and len(self._held) > 0

    def offer(self, chunks: Chunks) -> None:
        """These chunks, ascending, may leave."""
        self.waiting += len(chunks)
        fitting = int(np.searchsorted(chunks, self._limit))
        if fitting < len(chunks):
            self._held = np.concatenate([self._held, chunks[fitting:]])
        self._enter(chunks[:fitting])

    def raise_limit(self, limit: int) -> None:
        """Chunks below ``limit`` may leave."""
        if limit <= self._limit:
            return
        self._limit = limit
        if len(self._held):
            fits = self._held < limit
            freed, self._held = np.sort(self._held[fits]), self._held[~fits]
            self._enter(freed)

    def rank(self) -> None:
        """What still waits leaves in order of its classes."""
        if self._ranked:
            return
        self._ranked = True
        parts = list(self._lanes[UNRANKED_CLASS])
        self._lanes[UNRANKED_CLASS].clear()
        self._whole[UNRANKED_CLASS] = 0
        if self._tail == UNRANKED_CLASS:
            self._tail = -1
            parts.append(np.array([self._last], np.uint32))
        self._enter(np.sort(np.concatenate(parts)) if parts else _NONE)

    def whole(self, cls: int) -> int:
        """Full chunks of a class that may leave now."""
        return self._whole[cls]

    def ready(self, cls: int) -> int:
        """Chunks of a class that may leave now."""
        return self._whole[cls] + (self._tail == cls)

    def take(self, cls: int, most: int) -> Chunks:
        """The next chunks of a class, at most ``most``, ascending."""
        lane, parts, left = self._lanes[cls], [], min(most, self._whole[cls])
        self._whole[cls] -= left
        room = most - left
        while left:
            part = lane.popleft()
            if len(part) > left:
                lane.appendleft(part[left:])
                part = part[:left]
            parts.append(part)
            left -= len(part)
        taken = parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts)) if parts else _NONE
        if room and self._tail == cls:
            self._tail = -1
            taken = np.append(taken, np.uint32(self._last))
        self.waiting -= len(taken)
        self._turn()
        return taken

    def clear(self) -> None:
        """Nothing waits any more."""
        for lane in self._lanes:
            lane.clear()
        self._whole = [0] * CLASSES
        self._held = _NONE
        self._tail = self.next = -1
        self.waiting = 0

    def _enter(self, chunks: Chunks) -> None:
        if len(chunks) and int(chunks[-1]) == self._last:
            self._tail = int(self._of(self.classes[self._last :])[0])
            chunks = chunks[:-1]
        if len(chunks):
            classes = self._of(self.classes[chunks])
            ordered, at = chunks[np.argsort(classes, kind="stable")], 0
            for cls, count in enumerate(np.bincount(classes, minlength=CLASSES).tolist()):
                if count:
                    self._lanes[cls].append(ordered[at : at + count])
                    self._whole[cls] += count
                    at += count
        self._turn()

    def _of(self, classes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """The lanes of chunks of these classes."""
        return classes if self._ranked else np.where(classes > 0, np.uint8(UNRANKED_CLASS), np.uint8(0))

    def _turn(self) -> None:
        self.next = next((cls for cls in range(CLASSES) if self._whole[cls] or self._tail == cls), -1)
