"""What is left of bursts that lost datagrams, or came one by one: the headers of many slabs, found together.

Theory of operation. The kernel coalesces what follows without a gap, so each datagram that is lost cuts its burst in two, and a
burst of loss leaves single datagrams; a slab at a time, each remnant would cost what a whole train does. Here all datagrams of
neighbouring slabs of one size are taken as rows, whatever slab they lie in: their headers are gathered by their offsets in the
arena, and rows whose headers agree in what makes a message (peer, path, class, message) become one group, in order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dblp.transport import wire
from dblp.transport.config import HEADER_BYTES
from dblp.transport.port import Slab

LEAST_REMNANTS = 3
"""Fewer are taken one by one."""
MOST_SUPERS = 3
"""A stack of more is a train."""
MOST_MEAN = 32
"""Slabs of more datagrams on average are hardly broken: to take one costs as much as to copy so many rows once more."""
_WORD = 8

Rows = npt.NDArray[np.intp]


def _mask(free: dict[int, int]) -> npt.NDArray[np.uint64]:
    """The header's words with all bits set but those of ``free``, by byte."""
    same = np.full(HEADER_BYTES, 0xFF, np.uint8)
    for at, bits in free.items():
        same[at] &= ~bits & 0xFF
    return same.view(np.uint64)


_ANY = 0xFF
_CLASS, _COUNT, _POSITION = 2, 4, 5
_GROUP = _mask(
    {_CLASS: wire.ASK | wire.LAST, _COUNT: _ANY, _POSITION: _ANY} | dict.fromkeys(range(28, 46), _ANY)
)
"""What makes a group: all but flags, datagrams of the burst, position, burst, times, watermark, chunk and contributions."""
_BURST = ~_mask({_CLASS: wire.ASK | wire.LAST, _COUNT: _ANY, **dict.fromkeys(range(28, 32), _ANY)})
"""What changes from burst to burst of a group."""


def may_be_remnant(slab: Slab) -> bool:
    """A slab that a run of remnants may hold."""
    return (
        slab.supers <= MOST_SUPERS
        and slab.last == slab.size > HEADER_BYTES
        and not (slab.size | slab.offset | slab.stride | slab.spacing) % _WORD
    )


def joins(first: Slab, slab: Slab) -> bool:
    """Two slabs may be of one run: datagrams of one size in one arena that came on one path."""
    return (
        slab.size == first.size
        and slab.arena is first.arena
        and slab.path == first.path
        and slab.marked == first.marked
    )


def few(batch: Sequence[Slab]) -> bool:
    """A batch that cannot hold enough remnants: few slabs, and none of them of single datagrams in slots."""
    if len(batch) >= LEAST_REMNANTS:
        return False
    return not any(slab.count >= LEAST_REMNANTS and slab.stride > slab.size for slab in batch)


def worth(run: Sequence[Slab]) -> bool:
    """The remnants are so many, and so small, that their rows are cheaper found together; a single datagram in a slot is one."""
    many = sum([slab.supers if slab.stride == slab.size else slab.count for slab in run])
    return many >= LEAST_REMNANTS and sum([slab.count * slab.supers for slab in run]) <= MOST_MEAN * many


class Remnants:
    """The datagrams of a run of slabs, as rows."""

    def __init__(self, run: Sequence[Slab]) -> None:
        self.arena, self.size = run[0].arena, run[0].size
        self._parts = [(slab, number) for slab in run for number in range(slab.supers)]
        counts = np.array([slab.count for slab, _ in self._parts])
        bases = np.array([slab.offset + number * slab.spacing for slab, number in self._parts])
        strides = np.array([slab.stride for slab, _ in self._parts])
        self._part_of: Rows = np.repeat(np.arange(len(counts)), counts)
        self._firsts: Rows = np.cumsum(counts) - counts
        self._within: Rows = np.arange(len(self._part_of)) - self._firsts[self._part_of]
        self._offsets = bases[self._part_of] + self._within * strides[self._part_of]
        self.headers = self._gathered(self._offsets, HEADER_BYTES)
        """Of all rows (rows, words)."""

    def groups(self) -> Iterator[Rows]:
        """The rows of each (peer, path, class, message), ascending; the groups by their first rows."""
        borders = _borders(_differ(self.headers, _GROUP))
        if len(borders) == 2:
            yield np.arange(len(self.headers))
            return
        groups: dict[bytes, list[Rows]] = {}
        for start, stop in pairwise(borders):
            key = (self.headers[start] & _GROUP).tobytes()
            groups.setdefault(key, []).append(np.arange(start, stop))
        for rows in groups.values():
            yield np.concatenate(rows)

    def header(self, row: int) -> tuple[int, ...]:
        """The header of one row, decoded."""
        return wire.decode_header_from(self.arena.data, int(self._offsets[row]))

    def payloads(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """Copies of the rows' payloads (n, bytes)."""
        return self._gathered(self._offsets[rows] + HEADER_BYTES, self.size - HEADER_BYTES).view(np.uint8)

    def _gathered(self, offsets: Rows, nbytes: int) -> npt.NDArray[np.uint64]:
        """Copies of ``nbytes`` bytes from each of ``offsets`` on (n, words)."""
        places = (len(self.arena) - nbytes) // _WORD + 1
        words = np.ndarray((places, nbytes // _WORD), np.uint64, self.arena.data, 0, (_WORD, _WORD))
        gathered: npt.NDArray[np.uint64] = words[offsets // _WORD]
        return gathered

    def chunks(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """Their chunk indices."""
        return self.headers[rows].view(np.uint32)[:, 10].byteswap()

    def positions(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """Their positions in their bursts."""
        positions: npt.NDArray[np.uint8] = self.headers[rows].view(np.uint8)[:, _POSITION]
        return positions

    def bursts(self, rows: Rows, positions: npt.NDArray[np.uint8]) -> Iterator[tuple[int, int, int]]:
        """What of each burst follows on each other in ``rows`` of one group: the first row of its last remnant, how many rows,
        the mask of their positions."""
        headers = self.headers[rows]
        borders = _borders(_differ(headers, _BURST))
        bits = np.left_shift(np.uint64(1), positions, dtype=np.uint64)
        masks = np.bitwise_or.reduceat(bits, borders[:-1]).tolist()
        lasts = self._firsts[self._part_of[rows[np.array(borders[1:]) - 1]]]
        places = np.maximum(np.searchsorted(rows, lasts), borders[:-1])
        for row, (start, stop), mask in zip(rows[places].tolist(), pairwise(borders), masks, strict=True):
            yield row, stop - start, mask

    def place_of(self, row: int) -> tuple[Slab, int]:
        """A row's slab, and which of its messages it came with (``Slab.arrival``)."""
        slab, number = self._parts[self._part_of[row]]
        return slab, number if slab.supers > 1 else int(self._within[row])

    def slabs_of(self, rows: Rows) -> Iterator[tuple[Slab, int, int]]:
        """The slabs, super-packets apart, that the rows lie in: each with its first and last of them, which are all between."""
        parts = self._part_of[rows]
        apart = (np.diff(parts) != 0) | (np.diff(rows) != 1)
        for start, stop in pairwise(_borders(apart)):
            slab, number = self._parts[parts[start]]
            part = slab if slab.supers == 1 else slab.part(number)
            yield part, int(self._within[rows[start]]), int(self._within[rows[stop - 1]])


def _differ(headers: npt.NDArray[np.uint64], bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which headers are followed by one that has others of these bits (rows - 1)."""
    return np.asarray(((headers[1:] ^ headers[:-1]) & bits).any(axis=1))


def _borders(changes: npt.NDArray[np.bool_]) -> list[int]:
    """Where the runs begin that changes between neighbours end, and where the last one ends."""
    return [0, *(np.flatnonzero(changes) + 1).tolist(), len(changes) + 1]
