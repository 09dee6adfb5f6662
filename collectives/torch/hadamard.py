"""The randomised Hadamard transform: what the network loses is a little of everything, not all of something.

A gradient x is sent as y = H D x, with D a diagonal of random signs, the same on all ranks, and H the orthonormal
Walsh-Hadamard matrix; the result is x' = D H y'. The transform is linear, so the sum of the ranks' y is the transform of the
sum of their x. It keeps norms, and the signs spread the energy of any x evenly over y: so a lost chunk costs its share of
the chunks, wherever the gradient's energy lies (OptiReduce, arXiv 2310.06993; for the signs: Ailon and Chazelle, 2006).

A tensor of n elements is read as a matrix of ``block`` rows, row-major, and each of its n // block columns is transformed.
The elements of a column are spread evenly over the tensor, so a chunk (hundreds of neighbours) takes only a few elements of
each column. What is left over at the end lies in one more block, of the last elements, which overlaps the others: so every
length is transformed in place, without padding, and every element takes part.

Only additions, subtractions and products with one sign and scale are used, element by element: the same bits come out on
every host, whatever its BLAS and number of threads, so equal results of a round stay equal (contract C3). A NaN or an
infinity spreads over the columns that it is in.

Differences from OptiReduce: its released hook transforms the whole tensor with one matrix on the GPU, unnormalised, and
divides by n after the inverse. Here the transform is orthonormal and in blocks, which takes log2(block) passes instead of
log2(n), on the CPU; the signs of a block's rows serve all columns. The seed is the caller's: the same on all ranks, and
another one each round unless something outlives the round in the rotated domain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dblp.errors import ConfigError, UnsupportedError

BLOCK = 4096
"""Elements transformed together: a power of four, so that the scale 1/64 is exact."""
_COLUMNS = 64
"""Columns worked on at a time: with 4096 rows, two buffers of 1 MiB, which stay in cache; fewer make short, slow passes."""
_WORKING_DTYPE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


def rotate_(tensor: Tensor, seed: int, *, block: int = BLOCK) -> Tensor:
    """Transform a contiguous floating-point CPU tensor of any shape in place; returns it.

    ``seed``: at least 0, sets the signs; the same on all ranks and for ``unrotate_``. ``block``: a power of two, the rows of
    the matrix that the tensor is read as; the largest power of two that fits, where that is less. 16-bit tensors are
    computed in float32 and rounded once. Raises UnsupportedError for other tensors, ConfigError for other numbers.
    """
    for part in _parts(_flat(tensor), seed, block):
        _transform(part.matrix, before=part.signs, after=None)
    return tensor


def unrotate_(tensor: Tensor, seed: int, *, block: int = BLOCK) -> Tensor:
    """Undo ``rotate_`` with the same seed and block, in place, up to rounding; returns the tensor. Raises the same errors."""
    for part in reversed(_parts(_flat(tensor), seed, block)):
        _transform(part.matrix, before=None, after=part.signs)
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Columns that are transformed with one diagonal."""

    matrix: Tensor
    """(rows, columns): a view of the tensor; rows is a power of two."""
    signs: Tensor
    """(rows, 1): random signs times 1 / sqrt(rows), in the working dtype."""


def _parts(flat: Tensor, seed: int, block: int) -> list[_Part]:
    """The whole blocks, then what is left over with the elements before it."""
    if block < 1 or block & (block - 1):
        raise ConfigError(f"block={block}: the Hadamard transform needs a power of two, such as {BLOCK}")
    if seed < 0:
        raise ConfigError(f"seed={seed}: a number of at least 0, the same on all ranks")
    if not len(flat):
        return []
    rows = min(block, 1 << (len(flat).bit_length() - 1))
    whole = len(flat) // rows * rows
    matrices = [flat[:whole].view(rows, -1)]
    if whole < len(flat):
        matrices.append(flat[-rows:].view(rows, 1))
    bits = np.random.PCG64(seed)
    return [_Part(matrix=matrix, signs=_signs(bits, rows, _WORKING_DTYPE[flat.dtype])) for matrix in matrices]


def _signs(bits: np.random.PCG64, rows: int, dtype: torch.dtype) -> Tensor:
    """Random signs (rows, 1) times 1 / sqrt(rows), from the raw bits, whose stream numpy never changes."""
    words = bits.random_raw(-(-rows // 64)).astype("<u8")
    ones = np.unpackbits(words.view(np.uint8), count=rows, bitorder="little")
    return torch.from_numpy(1.0 - 2.0 * ones).mul_(rows**-0.5).to(dtype)[:, None]


def _transform(matrix: Tensor, *, before: Tensor | None, after: Tensor | None) -> None:
    """H times each column of the matrix in place, with one diagonal (rows, 1) before or after it that holds the scale, too."""
    rows, columns = matrix.shape
    width = min(_COLUMNS, columns)
    tile = _Tile(rows, width, _WORKING_DTYPE[matrix.dtype])
    for start in range(0, columns, width):
        if columns - start < width:  # the last, narrower tile has its own buffers
            tile = _Tile(rows, columns - start, _WORKING_DTYPE[matrix.dtype])
        part = matrix[:, start : start + width]
        _scaled_copy(part, before, tile.first)
        tile.butterflies()
        _scaled_copy(tile.last, after, part)


def _scaled_copy(source: Tensor, scale: Tensor | None, target: Tensor) -> None:
    if scale is None:
        target.copy_(source)
    else:
        torch.mul(source, scale, out=target)


class _Tile:
    """Two buffers (rows, columns) between which the passes of the fast transform go to and fro; all views are made once."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        buffers = [torch.empty(rows, columns, dtype=dtype) for _ in range(2)]
        self.first = buffers[0]
        """Where the columns go in."""
        self._passes: list[Callable[[], None]] = []
        half = rows // 2
        while half:
            source, target = (buffer.view(-1, 2, half * columns) for buffer in buffers)
            self._passes.append(_butterfly(source, target))
            buffers.reverse()
            half //= 2
        self.last = buffers[0]
        """Where they come out."""

    def butterflies(self) -> None:
        """The unnormalised transform of ``first`` into ``last``."""
        for one_pass in self._passes:
            one_pass()


def _butterfly(source: Tensor, target: Tensor) -> Callable[[], None]:
    """One pass over views (groups, 2, half): sums and differences of the halves."""
    upper, lower, total, difference = source[:, 0], source[:, 1], target[:, 0], target[:, 1]

    def run() -> None:
        torch.add(upper, lower, out=total)
        torch.sub(upper, lower, out=difference)

    return run


def _flat(tensor: Tensor) -> Tensor:
    if tensor.dtype not in _WORKING_DTYPE:
        raise UnsupportedError(
            f"{tensor.dtype}: the Hadamard transform is for float16, bfloat16, float32 and float64"
        )
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"a tensor on {tensor.device}: the Hadamard transform works on CPU tensors; move it first"
        )
    if not tensor.is_contiguous():
        raise UnsupportedError(
            "a tensor that is not contiguous: the Hadamard transform works in place; call .contiguous() first"
        )
    return tensor.detach().view(-1)
