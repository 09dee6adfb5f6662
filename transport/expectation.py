"""What the headers of a train should be: a whole train is checked against it by a few vectorised comparisons."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dblp.transport import wire


class Expectation:
    """The headers that a train of one message should have, laid out once; what changes from train to train is written in."""

    __slots__ = ("_count", "_expected", "_items", "_seen", "_words", "bursts")

    def __init__(self, row: npt.NDArray[np.void], bursts: int, count: int) -> None:
        """For trains of at most ``bursts`` of ``count`` datagrams that start like ``row`` (1,), a ``HEADER_ITEM``."""
        self.bursts = bursts
        self._count = count
        self._expected = np.empty((bursts, count, 6), np.uint64)
        self._expected.view(wire.HEADER_ITEM)[..., 0] = row
        self._expected.view(np.uint8)[..., 5] = wire.POSITIONS[:count]
        self._words = self._expected.view(np.uint32)
        self._seen = np.empty_like(self._expected)
        self._items = self._seen.view(wire.HEADER_ITEM)[..., 0]

    def intact(self, rows: npt.NDArray[np.void], bursts: int, first: int, seq: int) -> int:
        """How many of the headers ``rows`` (bursts, count), ``HEADER_ITEM``s, are those of consecutive bursts from ``seq`` on, of
        consecutive chunks from ``first`` on."""
        expected, words, seen = self._expected[:bursts], self._words[:bursts], self._seen[:bursts]
        self._items[:bursts] = rows[:bursts]
        expected[..., 4] = seen[..., 4]  # send time and watermark may differ from train to train
        if bursts == 1:
            words[0, :, 7] = wire.wire_index(seq)
        else:
            words[..., 7] = wire.wire_sequence(seq, bursts)[:, None]
        stop = first + bursts * self._count
        words[..., 10] = wire.wire_indices(first, stop).reshape(bursts, self._count)
        same = seen == expected
        if same.all():
            return bursts
        return int(same.all(axis=(1, 2)).argmin())

    def alike(self, rows: npt.NDArray[np.void], bursts: int, seq: int) -> tuple[int, npt.NDArray[np.uint32]]:
        """How many of the headers ``rows`` are those of consecutive bursts from ``seq`` on, of any chunks, and which (bursts,
        count)."""
        expected, words, seen = self._expected[:bursts], self._words[:bursts], self._seen[:bursts]
        self._items[:bursts] = rows[:bursts]
        expected[..., 4] = seen[..., 4]
        words[..., 7] = wire.wire_sequence(seq, bursts)[:, None]
        indices = seen.view(np.uint32)[..., 10]
        words[..., 10] = indices
        same = seen == expected
        if not same.all():
            bursts = int(same.all(axis=(1, 2)).argmin())
        return bursts, indices[:bursts].byteswap()
