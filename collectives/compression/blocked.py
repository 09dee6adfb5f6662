"""Sparse gradients in blocks: entries that travel together, so that a lost block costs its own entries and no others.

Each block is a chunk of a payload (``collectives/blocks.py``): a header (``HEADER``), the values of its entries, their indices.
Plain indices have four bytes each (eight from 2^31 elements on). Coded ones begin anew in every block, after Elias (1974) and
Fano (1971): of each index less the block's first one, b low bits as they are and the rest in unary, one bit for each entry and
one for each step of 2^b. b is the block's own, floor(log2(range / entries)), so that no clustering makes a block longer than
entries * (b + 2) bits. All blocks of a payload but the last have equally many entries, and all lie alike; coded blocks are as
long as the longest of them needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.compression.entries import WIDE_SIZE, Indices
from dblp.collectives.compression.link import Bytes
from dblp.errors import MismatchError
from dblp.transport.config import CHUNK_ALIGN_BYTES

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.uint8]
"""Blocks, one a row: (blocks, bytes a block)."""

HEADER = np.dtype(
    [
        ("first", "<u8"),  # 0: index of the block's first entry, where they are coded
        ("count", "<u4"),  # 8: entries
        ("low_bits", "<u4"),  # 12: b, of coded ones
    ]
)
"""Of a block: 16 bytes."""
FORM = np.dtype(
    [
        ("each", "<u4"),  # 0: entries of every block but the last
        ("index_bytes", "u1"),  # 4: 4 or 8; 0 for coded ones
        ("value_bytes", "u1"),  # 5: 2, 4 or 8: float16, float32 or float64
        ("free", "<u2"),  # 6: 0
    ]
)
"""How all blocks of a payload lie, in its head: 8 bytes."""
_SHRINK = 0.97
"""Factor on the entries of a block where the longest does not fit."""


@dataclass(frozen=True, slots=True)
class Form:
    """How the blocks of a payload lie."""

    each: int
    """Entries of every block but the last."""
    index_bytes: int
    """4 or 8; 0 for coded indices."""
    value_bytes: int
    """2, 4 or 8."""

    def to_bytes(self) -> Bytes:
        """``FORM``."""
        return np.array([(self.each, self.index_bytes, self.value_bytes, 0)], FORM).view(np.uint8)

    @classmethod
    def from_bytes(cls, data: Bytes) -> Form:
        """Back from ``FORM``, checked by ``decode``."""
        form = np.ascontiguousarray(data[: FORM.itemsize]).view(FORM)[0]
        return cls(int(form["each"]), int(form["index_bytes"]), int(form["value_bytes"]))


def plain_form(size: int, value_bytes: int, chunk_bytes: int) -> Form:
    """Of blocks of ``chunk_bytes`` with plain indices, of a gradient of ``size`` elements."""
    width = 4 if size < WIDE_SIZE else 8
    return Form(max((chunk_bytes - HEADER.itemsize) // (width + value_bytes), 1), width, value_bytes)


def encode_plain(indices: Indices, values: Array, size: int, chunk_bytes: int) -> tuple[Rows, Form]:
    """Blocks of ``chunk_bytes`` of ``values`` (float16, float32 or float64) at ascending ``indices``."""
    form = plain_form(size, values.itemsize, chunk_bytes)
    rows = _blocks(indices, values, form.each, chunk_bytes)
    at = HEADER.itemsize + form.each * values.itemsize
    plain = _rows_of(indices.astype(f"<u{form.index_bytes}"), form.each)
    rows[:, at : at + plain.shape[1]] = plain
    return rows, form


def encode_coded(indices: Indices, values: Array, chunk_bytes: int) -> tuple[Rows, Form]:
    """Blocks of at most ``chunk_bytes`` (a multiple of 16) with coded indices."""
    each, length = _fit(indices, values.itemsize, chunk_bytes)
    spans, counts = _spans(indices, each)
    low_bits = _low_bits(spans, counts)
    rows = _blocks(indices, values, each, length, low_bits)
    if indices.size:
        at = HEADER.itemsize + each * values.itemsize
        offsets = indices - np.repeat(indices[::each], counts)
        rows[:, at:] = _coded(offsets, counts, low_bits, length - at)
    return rows, Form(each, 0, values.itemsize)


def decode(rows: Rows, form: Form, size: int, rank: int) -> tuple[Indices, Array]:
    """Indices, ascending, and values of blocks (some of a payload's, in its order). Raises MismatchError that names ``rank`` if
    they are none of a gradient of ``size`` elements."""
    try:
        if not len(rows):
            return np.empty(0, np.int64), np.empty(0, np.float32)
        if form.index_bytes not in (0, 4, 8) or form.value_bytes not in (2, 4, 8) or not form.each:
            raise ValueError("their form makes no sense")
        at = HEADER.itemsize + form.each * form.value_bytes
        if at + form.each * form.index_bytes > rows.shape[1]:
            raise ValueError("they have more entries than room")
        header = np.ascontiguousarray(rows[:, : HEADER.itemsize]).view(HEADER)[:, 0]
        counts = header["count"].astype(np.int64)
        if not counts.all() or counts.max() > form.each:
            raise ValueError("a block has no entries, or more than its form says")
        here = np.arange(form.each) < counts[:, None]
        values = _typed(rows, HEADER.itemsize, form.each, f"<f{form.value_bytes}")[here]
        if form.index_bytes:
            indices = _typed(rows, at, form.each, f"<u{form.index_bytes}")[here].astype(np.int64)
        else:
            low_bits = header["low_bits"].astype(np.int64)
            indices = _decoded(rows[:, at:], counts, low_bits)
            indices += np.repeat(header["first"].astype(np.int64), counts)
        if indices[0] < 0 or indices[-1] >= size or not (np.diff(indices) > 0).all():
            raise ValueError("their indices are not ascending, or beyond the gradient")
    except (ValueError, IndexError) as error:
        raise MismatchError(
            f"rank {rank} sent what are no blocks of a sparse gradient of {size} elements: {error}; use one method, with the "
            "same options, on all ranks",
            [rank],
        ) from None
    return indices, values


# --- laying out


def _blocks(indices: Indices, values: Array, each: int, length: int, low_bits: Array | int = 0) -> Rows:
    """Blocks with headers and values."""
    rows = np.zeros((-(-indices.size // each), length), np.uint8)
    header = np.zeros(len(rows), HEADER)
    header["first"] = indices[::each]
    header["count"] = _counts(indices, each)
    header["low_bits"] = low_bits
    rows[:, : HEADER.itemsize] = header.view(np.uint8).reshape(-1, HEADER.itemsize)
    laid = _rows_of(values.astype(values.dtype.newbyteorder("<")), each)
    rows[:, HEADER.itemsize : HEADER.itemsize + laid.shape[1]] = laid
    return rows


def _counts(indices: Indices, each: int) -> npt.NDArray[np.int64]:
    """Entries of each block."""
    starts = np.arange(0, indices.size, each)
    return np.minimum(indices.size - starts, each)


def _rows_of(flat: Array, each: int) -> Rows:
    """The bytes of ``each`` elements a row, the last row padded."""
    padded = np.zeros(-(-flat.size // each) * each, flat.dtype)
    padded[: flat.size] = flat
    return padded.view(np.uint8).reshape(-1, each * flat.itemsize)


def _typed(rows: Rows, at: int, each: int, dtype: str) -> Array:
    """``each`` numbers of every row, from byte ``at`` on: (blocks, each)."""
    wide = np.dtype(dtype)
    return np.ascontiguousarray(rows[:, at : at + each * wide.itemsize]).view(wide)


# --- coding


def _fit(indices: Indices, value_bytes: int, chunk_bytes: int) -> tuple[int, int]:
    """(entries a block, bytes of the longest one): about as many as fit ``chunk_bytes``. Where the longest is too long, fewer are
    tried; sixty-six bits an index always fit."""
    room = 8 * (chunk_bytes - HEADER.itemsize)
    least = max(room // (8 * value_bytes + 66), 1)
    most = max(indices.size, 1)
    mean_gap = max((int(indices[-1]) - int(indices[0])) // indices.size, 1) if indices.size else 1
    each = max(min(int(room / (8 * value_bytes + 1 + mean_gap.bit_length())), most), least)
    while True:
        longest = HEADER.itemsize + each * value_bytes + _longest(indices, each)
        if longest <= chunk_bytes or each == least:
            return each, -(-longest // CHUNK_ALIGN_BYTES) * CHUNK_ALIGN_BYTES
        each = max(int(each * _SHRINK), least)


def _longest(indices: Indices, each: int) -> int:
    """Bytes that the coded indices of the longest block take."""
    spans, counts = _spans(indices, each)
    low_bits = _low_bits(spans, counts)
    return int((-(-(counts * (low_bits + 1) + (spans >> low_bits)) // 8)).max(initial=0))


def _spans(indices: Indices, each: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each block: its last index less its first, and its entries."""
    counts = _counts(indices, each)
    firsts = indices[::each]
    lasts = indices[np.cumsum(counts) - 1] if indices.size else firsts
    return lasts - firsts, counts


def _low_bits(spans: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """b of each block: floor(log2(range / entries)), by the float's exponent."""
    ratios = np.maximum(spans // np.maximum(counts, 1), 1).astype(np.float64)
    exponents: npt.NDArray[np.int32] = np.frexp(ratios)[1]
    return np.maximum(exponents - 1, 0).astype(np.int64)


def _coded(
    offsets: Indices, counts: npt.NDArray[np.int64], low_bits: npt.NDArray[np.int64], nbytes: int
) -> Rows:
    """The coded offsets (from each block's first index) of blocks, (blocks, nbytes): low bits, then unary."""
    bits = np.zeros((len(counts), 8 * nbytes), np.uint8)
    block, place = _places(counts)
    low = np.repeat(low_bits, counts)
    for bit in range(int(low_bits.max())):
        has = low > bit
        bits[block[has], place[has] * low[has] + bit] = (offsets[has] >> bit) & 1
    bits[block, np.repeat(counts * low_bits, counts) + (offsets >> low) + place] = 1
    return np.packbits(bits, axis=1, bitorder="little")


def _decoded(
    coded: Rows, counts: npt.NDArray[np.int64], low_bits: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Offsets of the entries of all blocks, one behind the other. Raises ValueError if there are not so many."""
    bits = np.unpackbits(np.ascontiguousarray(coded), axis=1, bitorder="little")
    starts = counts * low_bits
    if low_bits.max() > 62 or (starts + counts > bits.shape[1]).any():
        raise ValueError("its gaps have too many low bits")
    block, place = _places(counts)
    low, offsets = np.repeat(low_bits, counts), np.zeros(len(block), np.int64)
    for bit in range(int(low_bits.max())):
        has = low > bit
        offsets[has] |= bits[block[has], place[has] * low[has] + bit].astype(np.int64) << bit
    rows, ends = np.nonzero(bits)
    unary = ends >= starts[rows]
    rows, ends = rows[unary], ends[unary]
    if len(rows) != len(block) or (rows != block).any():
        raise ValueError("a block is no code of so many entries")
    return offsets + ((ends - starts[rows] - place) << low)


def _places(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each entry: its block, and its place there."""
    block = np.repeat(np.arange(len(counts)), counts)
    return block, np.arange(len(block)) - np.repeat(np.cumsum(counts) - counts, counts)
