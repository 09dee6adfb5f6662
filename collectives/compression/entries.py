"""Sparse gradients as bytes: which elements, and their values.

A body is a header (``HEADER``), the indices, and the values. Indices are ascending. Plain, they take four bytes each (eight where
the gradient has 2^31 elements or more). ``delta`` codes the gaps between them after Rice (R. F. Rice, 1979; a Golomb code whose
parameter is a power of two): of each gap less one the low b bits as they are, the rest in unary. Elements that are picked
evenly with a chance p make geometric gaps, for which this is within 0.1 bits of the entropy, about log2(1/p) + 1.44 bits: 11.5
bits instead of 32 at 0.1 %.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.compression.link import Bytes
from dblp.errors import MismatchError

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]

HEADER = np.dtype(
    [
        ("count", "<u8"),  # 0: entries
        ("index_bytes", "u1"),  # 8: 4 or 8; 0 for coded gaps
        ("low_bits", "u1"),  # 9: b, of coded gaps
        ("value_bytes", "u1"),  # 10: 2, 4 or 8: float16, float32 or float64
        ("free", "u1", 5),  # 11: 0
    ]
)
"""Of a sparse body: 16 bytes."""
WIDE_SIZE = 2**31
"""Elements from which on plain indices have eight bytes: torch and numpy count with signed ones."""
_MOST_LOW_BITS = 31
_LARGEST_HALF = 65504.0
"""Largest finite float16."""


def most_bytes(size: int, count: int) -> int:
    """Bytes that a body of ``count`` entries of a gradient of ``size`` elements can have, in any coding."""
    return HEADER.itemsize + 17 * count + size // 8 + 32


def plain_bytes(size: int, count: int, value_bytes: int) -> int:
    """Bytes of a body of ``count`` entries with plain indices."""
    return HEADER.itemsize + count * (_index_bytes(size) + value_bytes)


def encode(indices: Indices, values: Array, size: int, *, delta: bool) -> Bytes:
    """The body of ``values`` (float16, float32 or float64) at ascending ``indices`` of a gradient of ``size`` elements."""
    header = np.zeros(1, HEADER)
    header["count"], header["value_bytes"] = indices.size, values.dtype.itemsize
    if delta:
        low_bits, coded = encode_gaps(indices, size)
        header["low_bits"] = low_bits
    else:
        header["index_bytes"] = _index_bytes(size)
        coded = indices.astype(f"<u{_index_bytes(size)}").view(np.uint8)
    return np.concatenate(
        [header.view(np.uint8), coded, values.astype(values.dtype.newbyteorder("<")).view(np.uint8)]
    )


def decode(body: Bytes, size: int, rank: int) -> tuple[Indices, Array]:
    """Indices and values of a body, which may be longer than it needs. Raises MismatchError that names ``rank`` if it is none of
    a gradient of ``size`` elements."""
    try:
        header = body[: HEADER.itemsize].view(HEADER)[0]
        count, index_bytes = int(header["count"]), int(header["index_bytes"])
        value_bytes = int(header["value_bytes"])
        if count > size or index_bytes not in (0, 4, 8) or value_bytes not in (2, 4, 8):
            raise ValueError("its header makes no sense")
        rest = body[HEADER.itemsize :]
        if index_bytes:
            used = count * index_bytes
            indices = rest[:used].view(f"<u{index_bytes}").astype(np.int64)
        else:
            indices, used = decode_gaps(rest, count, int(header["low_bits"]))
        values = rest[used : used + count * value_bytes].view(f"<f{value_bytes}")
        if indices.size != count or values.size != count:
            raise ValueError("it is too short")
        if count and not (indices[0] >= 0 and indices[-1] < size and (np.diff(indices) > 0).all()):
            raise ValueError("its indices are not ascending, or beyond the gradient")
    except (ValueError, IndexError) as error:
        raise MismatchError(
            f"rank {rank} sent what is no sparse gradient of {size} elements: {error}; use one method, with the same options, "
            "on all ranks",
            [rank],
        ) from None
    return indices, values


def to_half(values: Array) -> npt.NDArray[np.float16]:
    """float16, the nearest finite one: what is cut off stays with the sender."""
    return np.clip(values, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16)


def encode_gaps(indices: Indices, size: int) -> tuple[int, Bytes]:
    """(b, bytes) of ascending indices below ``size``."""
    if not indices.size:
        return 0, np.empty(0, np.uint8)
    gaps = np.diff(indices, prepend=-1) - 1
    low_bits = _best_low_bits(indices.size / size)
    low = (gaps & ((1 << low_bits) - 1)).astype("<u4")
    lows = np.unpackbits(low.view(np.uint8).reshape(-1, 4), axis=1, count=low_bits, bitorder="little")
    ends = np.cumsum((gaps >> low_bits) + 1)
    unary = np.zeros(int(ends[-1]), np.uint8)
    unary[ends - 1] = 1
    return low_bits, np.concatenate(
        [np.packbits(lows, bitorder="little"), np.packbits(unary, bitorder="little")]
    )


def decode_gaps(coded: Bytes, count: int, low_bits: int) -> tuple[Indices, int]:
    """The indices that ``encode_gaps`` coded, and how many bytes they took. Raises ValueError if there are fewer."""
    if low_bits > _MOST_LOW_BITS:
        raise ValueError("its gaps have too many low bits")
    if not count:
        return np.empty(0, np.int64), 0
    low_bytes = -(-count * low_bits // 8)
    if coded.size < low_bytes:
        raise ValueError("it is too short")
    lows = np.unpackbits(coded[:low_bytes], count=count * low_bits, bitorder="little").reshape(
        count, low_bits
    )
    padded = np.zeros((count, 32), np.uint8)
    padded[:, :low_bits] = lows
    low = np.packbits(padded, axis=1, bitorder="little").view("<u4").reshape(-1).astype(np.int64)
    ends = np.flatnonzero(np.unpackbits(coded[low_bytes:], bitorder="little"))[:count]
    if ends.size < count:
        raise ValueError("it is too short")
    quotients = np.diff(ends, prepend=-1) - 1
    return np.cumsum((quotients << low_bits) + low + 1) - 1, low_bytes + -(-(int(ends[-1]) + 1) // 8)


def _best_low_bits(share: float) -> int:
    """Of gaps between elements that are picked with chance ``share``: a gap takes b + 1 / (1 - (1 - share)^(2^b)) bits."""
    low_bits = np.arange(_MOST_LOW_BITS + 1)
    with np.errstate(divide="ignore"):
        unary = -1 / np.expm1(np.exp2(low_bits) * np.log1p(-share))
    return int(np.argmin(low_bits + unary))


def _index_bytes(size: int) -> int:
    return 4 if size < WIDE_SIZE else 8
