"""Buffers: callers' arrays, of any shape and layout, as the 1-D contiguous memory that the algorithms work on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.errors import ConfigError, UnsupportedError

Array = npt.NDArray[Any]
Arrays = Array | Sequence[Array]
"""One array, cut evenly among the ranks, or one array a rank, whose sizes may differ."""


class Buffer:
    """An array as 1-D contiguous memory: itself where it is contiguous, else a copy that ``restore`` writes back."""

    __slots__ = ("_array", "flat")

    def __init__(self, array: Array, name: str, *, output: bool) -> None:
        """Raises UnsupportedError if it is no array, or an ``output`` that cannot be written."""
        if not isinstance(array, np.ndarray):
            raise UnsupportedError(f"{name} is a {type(array).__name__}: a numpy array is needed")
        if output and not array.flags.writeable:
            raise UnsupportedError(f"{name} is read-only: pass a writable array")
        self._array = array
        self.flat: Array = np.ascontiguousarray(array).reshape(-1)

    def restore(self) -> None:
        """Bring the result into the caller's array."""
        if not self._array.flags.c_contiguous:
            np.copyto(self._array, self.flat.reshape(self._array.shape))


class Parts:
    """One part a rank, of one array or of a list of arrays."""

    __slots__ = ("_buffers", "even", "flats")

    def __init__(
        self, arrays: Arrays, world_size: int, name: str, *, output: bool, splits: Sequence[int] | None = None
    ) -> None:
        """``splits``: rows along the first dimension for each rank, only for one array. Raises ConfigError if the parts
        do not fit the group, UnsupportedError as ``Buffer`` does."""
        self.even = splits is None and isinstance(arrays, np.ndarray)
        if isinstance(arrays, np.ndarray):
            buffer = Buffer(arrays, name, output=output)
            self._buffers = [buffer]
            self.flats = _split(buffer.flat, arrays.shape, world_size, name, splits)
            return
        if splits is not None:
            raise ConfigError(f"{name} is a list already: splits are for one array")
        if not isinstance(arrays, list | tuple):
            given = "None" if arrays is None else f"a {type(arrays).__name__}"
            raise ConfigError(
                f"{name} is {given}: one array, or a list of one for each of the {world_size} ranks, is needed"
            )
        if len(arrays) != world_size:
            raise ConfigError(
                f"{name} has {len(arrays)} arrays: one for each of the {world_size} ranks is needed"
            )
        self._buffers = [Buffer(array, f"{name}[{i}]", output=output) for i, array in enumerate(arrays)]
        self.flats = [buffer.flat for buffer in self._buffers]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the parts."""
        return self.flats[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(flat.nbytes for flat in self.flats)

    @property
    def sizes(self) -> list[int]:
        """Elements of each part."""
        return [flat.size for flat in self.flats]

    def check_dtype(self, dtype: np.dtype[Any], name: str) -> None:
        """Raise ConfigError unless all parts are of ``dtype``."""
        for rank, flat in enumerate(self.flats):
            if flat.dtype != dtype:
                raise ConfigError(
                    f"{name} for rank {rank} is {flat.dtype.name}, the other array {dtype.name}: must be equal"
                )

    def restore(self) -> None:
        """Bring the results into the caller's arrays."""
        for buffer in self._buffers:
            buffer.restore()


def _split(
    flat: Array, shape: tuple[int, ...], world_size: int, name: str, splits: Sequence[int] | None
) -> list[Array]:
    if splits is None:
        if flat.size % world_size:
            raise ConfigError(
                f"{name} has {flat.size} elements, which {world_size} ranks cannot share evenly"
            )
        borders = [flat.size // world_size * rank for rank in range(world_size + 1)]
    else:
        rows = shape[0] if shape else 1
        if len(splits) != world_size or min(splits) < 0 or sum(splits) != rows:
            raise ConfigError(
                f"splits of {name} are {list(splits)}: {world_size} counts with a sum of {rows} are needed"
            )
        width = flat.size // rows if rows else 0
        borders = [int(border) * width for border in np.cumsum([0, *splits])]
    return [flat[low:high] for low, high in itertools.pairwise(borders)]


def overlaps(array: Array, others: Sequence[Array]) -> bool:
    """True if one of the 1-D contiguous ``others`` shares memory with ``array``."""
    return any(np.may_share_memory(array, other) for other in others)


def private(source: Array, targets: Sequence[Array]) -> Array:
    """``source``, or a copy of it where one of the arrays that the round writes overlaps it."""
    return source.copy() if overlaps(source, targets) else source
