"""Tensors as numpy arrays: views where memory allows it, staged copies where not.

A contiguous tensor in host memory is worked on in place. What is not (strided, lazily conjugated) is copied to a contiguous
host array first and copied back by ``restore``; what is on a GPU is copied beside the caller (``staging``), and the array has
its content once that copy has ended. numpy has no bfloat16: such arrays are uint16 and carry ``dtype="bfloat16"`` beside
them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dblp.collectives.torch import staging
from dblp.collectives.torch.staging import Accelerator, Arrival
from dblp.errors import ConfigError, UnsupportedError

Array = npt.NDArray[Any]

_NUMPY_DTYPES = frozenset(
    {
        torch.float16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
    }
)
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Stand-ins for dtypes that numpy lacks, by bytes an element."""


@dataclass(slots=True)
class Staged:
    """A tensor and the host array that stands for it while a round runs."""

    tensor: torch.Tensor
    """The caller's tensor."""
    array: Array
    """C-contiguous host array of the tensor's shape."""
    dtype: str | None
    """``"bfloat16"`` where ``array`` is uint16 in its stead, else None."""
    copied: bool
    """True if ``array`` is a copy: results must be copied back."""
    accelerator: Accelerator | None = None
    """What copies it, if the tensor is on a device."""
    host: torch.Tensor | None = None
    """The pinned memory of ``array`` then."""

    def restore(self) -> Arrival | None:
        """Copy the array's content into the tensor, where the array is not the tensor's own memory; to a device the copy is only
        queued."""
        if not self.copied:
            return None
        if self.accelerator is not None and self.host is not None:
            return Arrival(self.accelerator, self.accelerator.copy_back(self.tensor.detach(), self.host))
        source = torch.from_numpy(self.array)
        if source.dtype != self.tensor.dtype:
            source = source.view(self.tensor.dtype)
        self.tensor.detach().copy_(source)
        return None


def stage(tensor: torch.Tensor, *, arithmetic: bool = False, private: bool = False) -> Staged:
    """The host array of a tensor.

    ``arithmetic``: the array will be reduced, so its dtype must be one that reductions know. ``private``:
    always copy, for inputs that the caller may not see changed. A copy from a device has only been queued when
    it returns, and noted (``staging.take_departures``). Raises UnsupportedError for sparse, quantised and meta
    tensors, and for dtypes that cannot be reduced.
    """
    _check(tensor, arithmetic)
    if (accelerator := staging.accelerators.of(tensor)) is not None:
        return _stage_device(accelerator, tensor)
    host = tensor.detach()
    if host.device.type != "cpu":
        host = host.to("cpu")
    host = host.resolve_conj().resolve_neg().contiguous()
    copied = host.data_ptr() != tensor.data_ptr() or _lazy(tensor)
    if private and not copied:
        host = host.clone()
        copied = True
    array, dtype = _as_array(host)
    return Staged(tensor, array, dtype, copied)


def stage_all(tensors: Iterable[torch.Tensor], *, arithmetic: bool = False) -> list[Staged]:
    """``stage`` for each."""
    return [stage(tensor, arithmetic=arithmetic) for tensor in tensors]


def restore_all(staged: Iterable[Staged]) -> list[Arrival]:
    """``restore`` for each; of the copies that were only queued the last on each device."""
    arrivals = [item.restore() for item in staged]
    return staging.last_of_each(arrival for arrival in arrivals if arrival is not None)


def _stage_device(accelerator: Accelerator, tensor: torch.Tensor) -> Staged:
    source = tensor.detach().resolve_conj().resolve_neg()
    host = staging.depart(accelerator, source)
    array, dtype = _as_array(host)
    return Staged(tensor, array, dtype, True, accelerator, host)


def is_floating(tensor: torch.Tensor) -> bool:
    """True for real and complex floating-point tensors: what a loss policy may be applied to."""
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _lazy(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_conj() or tensor.is_neg())


def _check(tensor: torch.Tensor, arithmetic: bool) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device.type}"
        raise UnsupportedError(
            f"dblp moves dense tensors only; this one is {kind}: convert it with .to_dense() or the like"
        )
    if arithmetic and tensor.dtype not in _NUMPY_DTYPES and tensor.dtype != torch.bfloat16:
        raise UnsupportedError(
            f"{tensor.dtype} tensors cannot be reduced; reduce them as float32 (tensor.float()) or another "
            "common dtype"
        )


def _as_array(host: torch.Tensor) -> tuple[Array, str | None]:
    if host.dtype in _NUMPY_DTYPES:
        return _view(host, host.dtype), None
    if host.dtype == torch.bfloat16:
        return _view(host, torch.uint16), "bfloat16"
    return _view(host, _SAME_SIZE[host.element_size()]), None


class _Memory:
    """A contiguous host tensor's memory, by numpy's array interface; it keeps the tensor alive."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor, kind: str) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "shape": tensor.shape,
            "typestr": kind,
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _view(host: torch.Tensor, dtype: torch.dtype) -> Array:
    """The tensor's memory as an array of ``dtype``. ``Tensor.numpy`` would fix the size of the tensor's storage for good, and
    FSDP frees and enlarges the storages of its parameters."""
    if not host.numel():
        return np.empty(host.shape, _kind(dtype))
    return np.asarray(_Memory(host, _kind(dtype)))


@functools.cache
def _kind(dtype: torch.dtype) -> str:
    """numpy's string for a dtype that both know."""
    return torch.empty(0, dtype=dtype).numpy().dtype.str


def cut(array: Array, world_size: int, splits: Sequence[int], name: str) -> list[Array]:
    """Views of ``array`` along its first dimension, one a rank: of ``splits`` rows each, or even without
    splits.

    Raises ConfigError if the rows do not fit.
    """
    rows = array.shape[0] if array.ndim else 0
    if not splits:
        if rows % world_size:
            raise ConfigError(
                f"{name} has {rows} rows, which {world_size} ranks cannot share evenly: give split sizes"
            )
        splits = [rows // world_size] * world_size
    if len(splits) != world_size or sum(splits) != rows or min(splits) < 0:
        raise ConfigError(
            f"{name} split sizes {list(splits)} do not fit: {world_size} sizes with a sum of {rows} rows are "
            "needed"
        )
    borders = np.cumsum([0, *splits])
    return [array[low:high] for low, high in pairwise(borders)]
