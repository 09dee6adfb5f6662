"""What a rank holds of a bucket between the rounds of a compression."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.keyed import KeyedStore, Slice
from dblp.errors import ConfigError

Array = npt.NDArray[Any]


class Memory:
    """Residual and velocity of one flat gradient; each is None until a method needs it."""

    __slots__ = ("busy", "dtype", "residual", "size", "velocity")

    def __init__(self, size: int, dtype: npt.DTypeLike = np.float32) -> None:
        """``size``: elements of the bucket; ``dtype``: float32, or float64 for gradients of that type."""
        self.size = size
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.residual: Array | None = None
        """What earlier rounds withheld, (size,); DGC's v."""
        self.velocity: Array | None = None
        """DGC's u, (size,)."""
        self.busy = False
        """A round is under way."""

    def zeros(self) -> Array:
        """A new array of the bucket's size and type."""
        return np.zeros(self.size, self.dtype)

    def take(self, low: int, high: int) -> Slice:
        """A copy of the state of the elements low..high; raises ConfigError while a round is under way."""
        if self.busy:
            raise ConfigError(
                "compression: a round of this bucket is still under way; take the state between iterations"
            )
        layers = [] if self.residual is None else [self.residual[low:high].copy()]
        return Slice(layers, None if self.velocity is None else self.velocity[low:high].copy())

    def put(self, low: int, part: Slice) -> None:
        """Take over the state of the elements from ``low`` on, converted to this memory's type."""
        for layer in part.layers:  # more than one if it comes from a carry that tells ages apart
            if self.residual is None:
                self.residual = self.zeros()
            self.residual[low : low + layer.size] += layer
        if part.velocity is not None:
            if self.velocity is None:
                self.velocity = self.zeros()
            self.velocity[low : low + part.velocity.size] = part.velocity


class MemoryStore(KeyedStore[Memory]):
    """The memories of a model by the names of its parameters."""

    what = "compression"

    def _make(self, size: int, dtype: np.dtype[Any]) -> Memory:
        return Memory(size, dtype)
