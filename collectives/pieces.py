"""Flat arrays of which few pieces are other than zero: what a carry is made of.

A piece is ``PIECE`` elements from a multiple of ``PIECE`` on. Memory and time are in proportion to the pieces that are held. The
last piece of an array may be short; its row has zeros behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Index = npt.NDArray[np.intp]

PIECE = 352
"""Elements that are dropped together: the float32 payload of a datagram of 1464 bytes, less six for the alignment."""


def piece_count(size: int) -> int:
    """Pieces of ``size`` elements."""
    return -(-size // PIECE)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a flat array of ``size`` elements that may be other than zero."""

    size: int
    index: Index
    """Numbers of the pieces, ascending."""
    rows: Array
    """Their elements (len(index), PIECE)."""

    @property
    def whole(self) -> bool:
        """All pieces are held."""
        return len(self.index) == piece_count(self.size)

    @property
    def dense(self) -> Array:
        """The whole array (size,), a new one."""
        whole = np.zeros((piece_count(self.size), PIECE), self.rows.dtype)
        whole[self.index] = self.rows
        return whole.reshape(-1)[: self.size]

    @property
    def energies(self) -> npt.NDArray[np.float64]:
        """Sum of squares of each piece that is held."""
        held, rest = self.rows.reshape(-1), self.size % PIECE
        if rest and len(self.index) and self.index[-1] == self.size // PIECE:
            held = held[: rest - PIECE]  # zeros behind it would change the order of the last sum
        return piece_energies(held)

    def spread(self, values: Array) -> Array:
        """``values``, one for each piece that is held, among zeros for all others."""
        if self.whole:
            return values
        spread = np.zeros(piece_count(self.size), values.dtype)
        spread[self.index] = values
        return spread

    def with_rows(self, rows: Array) -> Pieces:
        """The same pieces of another array."""
        return Pieces(self.size, self.index, rows)

    def only(self, mask: npt.NDArray[np.bool_]) -> Pieces:
        """Those of the pieces that are held for which ``mask`` is True; a copy."""
        return Pieces(self.size, self.index[mask], self.rows[mask])

    def trimmed(self) -> Pieces:
        """Without pieces of nothing but zeros."""
        filled: npt.NDArray[np.bool_] = np.any(self.rows, axis=1)
        return self if filled.all() else self.only(filled)

    def among(self, index: Index) -> Pieces:
        """Those of the pieces ``index`` (ascending) that are held."""
        if np.array_equal(index, self.index):
            return self
        common, place, _ = np.intersect1d(self.index, index, assume_unique=True, return_indices=True)
        return Pieces(self.size, common, self.rows[place])

    def places(self, index: Index) -> Index | slice:
        """Where the pieces that are held stand among ``index`` (ascending), which has all of them."""
        return slice(None) if len(index) == len(self.index) else np.searchsorted(index, self.index)

    def add_to(self, array: Array) -> None:
        """Add them to ``array`` (1-D), in place."""
        if self.whole:
            array += self.rows.reshape(-1)[: self.size]
            return
        rows = gather(array, self.index)
        rows += self.rows
        scatter(array, self.index, rows)

    def part(self, low: int, high: int) -> Array:
        """The elements low..high; a copy."""
        first, stop = low // PIECE, piece_count(high)
        begin, end = np.searchsorted(self.index, (first, stop)).tolist()
        rows = np.zeros((stop - first, PIECE), self.rows.dtype)
        rows[self.index[begin:end] - first] = self.rows[begin:end]
        return rows.reshape(-1)[low - first * PIECE : high - first * PIECE].copy()


def pack(array: Array) -> Pieces:
    """Those pieces of ``array`` (1-D) that are not all zeros."""
    whole = array.size // PIECE * PIECE
    filled = np.empty(piece_count(array.size), np.bool_)
    filled[: whole // PIECE] = array[:whole].reshape(-1, PIECE).any(axis=1)
    filled[whole // PIECE :] = array[whole:].any()
    index = np.flatnonzero(filled)
    return Pieces(array.size, index, gather(array, index))


def union(indices: Sequence[Index]) -> Index:
    """The pieces that are in any of ``indices`` (each ascending, at least one), ascending."""
    return indices[0] if len(indices) == 1 else np.unique(np.concatenate(indices))


def piece_energies(values: Array) -> npt.NDArray[np.float64]:
    """Sum of squares of each piece of ``values`` (1-D), the last one perhaps short."""
    whole = values.size // PIECE * PIECE
    energies = np.empty(piece_count(values.size), np.float64)
    if whole:
        rows = values[:whole].reshape(-1, PIECE)
        energies[: len(rows)] = np.einsum("ij,ij->i", rows, rows)
    if whole < values.size:
        energies[-1] = np.einsum("i,i->", values[whole:], values[whole:])
    return energies


def gather(array: Array, index: Index) -> Array:
    """The rows of the pieces ``index`` (ascending) of ``array`` (1-D); a copy."""
    rows = np.empty((len(index), PIECE), array.dtype)
    whole, rest = divmod(array.size, PIECE)
    count = len(index)
    if rest and count and index[-1] == whole:
        count -= 1
        rows[-1, :rest] = array[whole * PIECE :]
        rows[-1, rest:] = 0
    pieces = array[: whole * PIECE].reshape(-1, PIECE)
    if count == whole:
        rows[:count] = pieces
    else:
        np.take(pieces, index[:count], axis=0, out=rows[:count], mode="clip")
    return rows


def scatter(array: Array, index: Index, rows: Array) -> None:
    """Write the rows of the pieces ``index`` (ascending) into ``array`` (1-D)."""
    whole, rest = divmod(array.size, PIECE)
    count = len(index)
    if rest and count and index[-1] == whole:
        count -= 1
        array[whole * PIECE :] = rows[-1, :rest]
    array[: whole * PIECE].reshape(-1, PIECE)[slice(None) if count == whole else index[:count]] = rows[:count]
