"""Sinks: where received chunks go. Each call costs a few numpy operations for a whole run of chunks.

Rows come as (chunks, elements a chunk), or as (bursts, chunks a burst, elements a chunk).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.reduction import Reducer, energy

_WORDS = [np.dtype(f"uint{bits}") for bits in (64, 32, 16, 8)]


def words(array: npt.NDArray[Any], nbytes: int) -> npt.NDArray[Any]:
    """The 1-D contiguous ``array`` as the widest unsigned integers that its address and a message's length allow: they
    copy faster."""
    address = array.__array_interface__["data"][0]
    dtype = next(dtype for dtype in _WORDS if (nbytes | array.nbytes | address) % dtype.itemsize == 0)
    return array.view(dtype)


class CopySink:
    """Puts chunk i at its place in a 1-D array."""

    __slots__ = ("_elements", "_full", "_target", "dtype")

    def __init__(self, target: npt.NDArray[Any], chunk: int) -> None:
        self._target = words(target, target.nbytes)
        self.dtype: np.dtype[Any] = self._target.dtype
        self._elements = chunk // self.dtype.itemsize
        self._full = whole_rows(self._target, self._elements)

    def place(self, first: int, rows: npt.NDArray[Any]) -> None:
        start = first * self._elements
        self._target[start : start + rows.size].reshape(rows.shape)[...] = rows

    def scatter(self, chunks: npt.NDArray[np.uint32], rows: npt.NDArray[Any]) -> None:
        """``place`` for whole chunks in any order."""
        self._full[chunks] = rows


class RingSink:
    """Puts chunk i at row ``i % window`` of a staging array of ``window`` rows."""

    __slots__ = ("_stage", "_window", "dtype")

    def __init__(self, stage: npt.NDArray[Any], window: int, nbytes: int) -> None:
        """``stage``: 1-D, ``window`` chunks long; ``nbytes``: length of the message."""
        flat = words(stage, nbytes)
        self.dtype: np.dtype[Any] = flat.dtype
        self._stage = flat.reshape(window, -1)
        self._window = window

    def place(self, first: int, rows: npt.NDArray[Any]) -> None:
        slot = first % self._window
        count = len(rows) if rows.ndim == 2 else rows.shape[0] * rows.shape[1]
        if slot + count <= self._window and rows.shape[-1] == self._stage.shape[1]:
            self._stage[slot : slot + count].reshape(rows.shape)[...] = rows
        elif rows.ndim == 3:
            for index, burst in enumerate(rows):
                self.place(first + index * rows.shape[1], burst)
        else:
            self._place_split(slot, rows)

    def _place_split(self, slot: int, rows: npt.NDArray[Any]) -> None:
        """Rows that go round the end of the staging array, or a short last chunk."""
        width, fitting = rows.shape[1], min(len(rows), self._window - slot)
        self._stage[slot : slot + fitting, :width] = rows[:fitting]
        self._stage[: len(rows) - fitting, :width] = rows[fitting:]

    def scatter(self, chunks: npt.NDArray[np.uint32], rows: npt.NDArray[Any]) -> None:
        """``place`` for whole chunks in any order."""
        self._stage[chunks % self._window] = rows


class AddSink:
    """Reduces chunk i into its place in a 1-D array that holds this rank's contribution.

    ``energy`` is the sum of squares of what came, if ``weigh`` asked for it.
    """

    __slots__ = ("_elements", "_final", "_full", "_reducer", "_target", "_weigh", "dtype", "energy")

    def __init__(
        self, target: npt.NDArray[Any], chunk: int, reducer: Reducer, *, final: bool, weigh: bool = False
    ) -> None:
        self._target = target
        self._reducer = reducer
        self._final = final
        self._weigh = weigh
        self._elements = chunk // target.itemsize
        self._full = whole_rows(target, self._elements)
        self.dtype: np.dtype[Any] = target.dtype
        self.energy = 0.0

    def place(self, first: int, rows: npt.NDArray[Any]) -> None:
        start = first * self._elements
        target = self._target[start : start + rows.size].reshape(rows.shape)
        if self._weigh:
            self.energy += energy(rows, self._reducer.dtype)
        self._reducer.accumulate(target, rows, final=self._final)

    def scatter(self, chunks: npt.NDArray[np.uint32], rows: npt.NDArray[Any]) -> None:
        """``place`` for whole chunks in any order."""
        if self._weigh:
            self.energy += energy(rows, self._reducer.dtype)
        target = self._full[chunks]
        self._reducer.accumulate(target, rows, final=self._final)
        self._full[chunks] = target


def whole_rows(array: npt.NDArray[Any], elements: int) -> npt.NDArray[Any]:
    """A (chunks, elements) view of all chunks of a 1-D array but a short last one."""
    return array[: array.size // elements * elements].reshape(-1, elements)
