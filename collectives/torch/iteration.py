"""One backward pass that reduces gradients, and what it measured."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import torch

from dblp.collectives.phases import Needs
from dblp.collectives.report import Report
from dblp.collectives.torch.buckets import BucketLayout, layer_square_norms, square_norm


class Iteration:
    """The gradient rounds of one backward pass, and what they measured."""

    def __init__(self, measures: Needs) -> None:
        self.measures = measures
        self.launched_all = False
        self.settled = False
        self.reports: list[Report] = []
        self._square = 0.0
        self._layer_squares: dict[str, float] = {}
        self._lock = threading.Lock()

    @property
    def norm(self) -> float | None:
        """L2 norm of the averaged gradient of all buckets; None if it was not asked for."""
        return self._square**0.5 if Needs.NORM in self.measures else None

    @property
    def layer_norms(self) -> dict[str, float]:
        """The same of each parameter, by name and in the order of the names."""
        return {name: square**0.5 for name, square in sorted(self._layer_squares.items())}

    def squares(self) -> npt.NDArray[np.float64]:
        """What was measured, as one vector: of all, then of each layer in the order of the names."""
        layers = [square for _, square in sorted(self._layer_squares.items())]
        return np.array([self._square, *layers], np.float64)

    def set_squares(self, squares: npt.NDArray[np.float64]) -> None:
        """Replace what was measured by a vector of the same form."""
        self._square, *layers = squares.tolist()
        self._layer_squares = dict(zip(sorted(self._layer_squares), layers, strict=True))

    def add_square(self, square: float) -> None:
        """A part of the gradient has been measured without its layers."""
        with self._lock:
            self._square += square

    def launch(self, last: bool) -> None:
        """One more round is under way; ``last``: of the iteration."""
        self.launched_all = last

    def measure(self, averaged: torch.Tensor, layout: BucketLayout) -> None:
        """Take the norms of a bucket's averaged gradients; on a completion thread."""
        layers = layer_square_norms(averaged, layout) if Needs.LAYER_NORMS in self.measures else {}
        square = square_norm(averaged) if Needs.NORM in self.measures else 0.0
        with self._lock:
            self._layer_squares |= layers
            self._square += square
