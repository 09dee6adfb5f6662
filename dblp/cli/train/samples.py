"""A data set as tensors, and how well a model does on it: the same for images and for text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dblp.cli.train.data import Dataset
from dblp.cli.train.models import build

_TEST_BATCH = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a model does on the test set."""

    accuracy: float
    """Share of the targets (labels, or next characters) that get the highest logit."""
    perplexity: float | None
    """exp of the mean cross-entropy of a next character; None for images."""


class Samples:
    """A data set's tensors: images (n, 1, height, width) in [-1, 1] with labels (n,), or windows of characters (n, context)
    with the next characters (n, context)."""

    def __init__(self, dataset: Dataset) -> None:
        self.classes = dataset.classes
        self.is_text = dataset.train_inputs.dtype == np.uint8
        self._train = _tensor(dataset.train_inputs), _tensor(dataset.train_targets)
        self._test = _tensor(dataset.test_inputs), _tensor(dataset.test_targets)

    def __len__(self) -> int:
        """Training samples."""
        return len(self._train[0])

    def batch(self, rows: npt.NDArray[Any]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these training samples, as a model and ``loss_of`` take them."""
        index = torch.from_numpy(rows)
        inputs, targets = self._train
        return self._inputs(inputs[index]), targets[index].long()

    def build(self, model: str, *, seed: int) -> nn.Module:
        """A model that fits these samples, with parameters drawn from the seed."""
        return build(model, tuple(self._train[0].shape[1:]), self.classes, seed=seed)

    @torch.no_grad()
    def score(self, model: nn.Module) -> Score:
        """Test a model, in evaluation mode; it is in training mode afterwards."""
        model.eval()
        right, loss, count = 0, 0.0, 0
        for inputs, targets in zip(*(torch.split(part, _TEST_BATCH) for part in self._test), strict=True):
            logits = model(self._inputs(inputs))
            right += int((logits.argmax(-1) == targets).sum())
            loss += float(loss_of(logits, targets.long())) * targets.numel()
            count += targets.numel()
        model.train()
        return Score(accuracy=right / count, perplexity=_perplexity(loss / count) if self.is_text else None)

    def _inputs(self, inputs: Tensor) -> Tensor:
        return inputs.long() if self.is_text else inputs[:, None] * 2 - 1


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy: logits (..., classes), targets (...)."""
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def _perplexity(loss: float) -> float:
    """exp, without an overflow where training has diverged."""
    return math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.exp(700.0)


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
