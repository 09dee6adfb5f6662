"""DDP's buckets: which parameters' gradients lie where, and how large those gradients are.

DDP hands a hook a flat buffer and the parameters whose gradients it holds, one behind the other. After the first iteration it
makes its buckets anew, in the order in which gradients became ready: the last layers come first. So what a bucket holds is
looked up by its parameters each time, never by its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch._C._distributed_c10d import GradBucket

_KEPT = 1024
"""Layouts that are kept: a model has far fewer buckets."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketLayout:
    """What a bucket's elements belong to. Element i belongs to parameter k where ``bounds[k] <= i < bounds[k + 1]``."""

    names: tuple[str, ...]
    """Names of its parameters, as ``module.named_parameters()`` gives them."""
    sizes: tuple[int, ...]
    """Elements of each in the bucket (``real_numbers``)."""
    bounds: npt.NDArray[np.int64]
    """Where each parameter begins, and the end; shape (parameters + 1,), in elements."""
    layers: npt.NDArray[np.int32]
    """Layer of each parameter, counted from the input side; shape (parameters,)."""
    layer_count: int
    """Layers of the whole model."""

    def layer_of(self, elements: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The layers of elements, given by their indices in the bucket."""
        return self.layers[np.searchsorted(self.bounds, elements, side="right") - 1]


class Layouts:
    """The layouts of one model's buckets. A layer is a module that has parameters of its own; layers count in the order of
    definition, which is that from input to output in all but unusual models."""

    def __init__(self, module: torch.nn.Module) -> None:
        named = list(module.named_parameters())
        places: dict[str, int] = {}
        for name, _ in named:
            places.setdefault(name.rpartition(".")[0], len(places))
        self._names = {id(parameter): name for name, parameter in named}
        self._sizes = {name: real_numbers(parameter) for name, parameter in named}
        self._layers = {name: places[name.rpartition(".")[0]] for name, _ in named}
        self._count = len(places)
        self._known: dict[tuple[int, ...], BucketLayout] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters, from the input side."""
        return tuple(self._sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of each parameter in a bucket (``real_numbers``), by name."""
        return dict(self._sizes)

    def of(self, bucket: GradBucket) -> BucketLayout:
        """The layout of a bucket as it is now."""
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        if (layout := self._known.get(key)) is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            layout = self._known[key] = self._make(parameters)
        return layout

    def made(self, names: Sequence[str], sizes: Sequence[int]) -> BucketLayout:
        """The layout of a flat buffer that holds ``sizes`` elements of the parameters ``names``, in this order."""
        return BucketLayout(
            names=tuple(names),
            sizes=tuple(sizes),
            bounds=np.cumsum([0, *sizes], dtype=np.int64),
            layers=np.array([self._layers[name] for name in names], np.int32),
            layer_count=self._count,
        )

    def _make(self, parameters: Sequence[torch.Tensor]) -> BucketLayout:
        names = [self._names[id(parameter)] for parameter in parameters]
        return self.made(names, [real_numbers(parameter) for parameter in parameters])


def real_numbers(parameter: torch.Tensor) -> int:
    """Elements of a parameter's gradient in a bucket: DDP lays complex gradients out as pairs of real numbers."""
    return 2 * parameter.numel() if parameter.is_complex() else parameter.numel()


def square_norm(tensor: torch.Tensor) -> float:
    """Sum of squares, computed in float32 (float64 for float64): exact to about 1e-3, infinite where that overflows."""
    wide = tensor.dtype is torch.float64 or tensor.is_complex()
    kind = None if wide else torch.float32  # summing float32 in float64 takes twenty times as long
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=kind)) ** 2


def layer_square_norms(tensor: torch.Tensor, layout: BucketLayout) -> dict[str, float]:
    """``square_norm`` of each parameter's gradient in a bucket's flat tensor, by name."""
    parts = torch.split(tensor.detach(), list(layout.sizes))
    return {name: square_norm(part) for name, part in zip(layout.names, parts, strict=True)}
