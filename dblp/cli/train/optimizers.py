"""Optimisers by name and the learning rate's course: the same in ``dblp train`` and in experiments."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import SGD as TorchSGD
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from dblp.cli.train.recipes import SGD

MOMENTUM = 0.9
"""Of SGD; AdamW's first moment has the same factor."""
_SECOND_MOMENT = 0.999
_WEIGHT_DECAY = 1e-3
_ADAMW_WEIGHT_DECAY = 1e-2
_WARM_UP_SHARE = 0.2
"""Share of the steps in which the one-cycle rate rises (Smith and Topin, 2018)."""


def optimizer(
    name: str, parameters: Iterable[nn.Parameter], lr: float, *, momentum: float = MOMENTUM
) -> Optimizer:
    """SGD with Nesterov momentum, or AdamW. ``momentum`` 0: none, where the gradients bring it along."""
    if name == SGD:
        # The decay is a part of the gradient: where momentum does not sum it up, it is as large as that sum.
        decay = _WEIGHT_DECAY if momentum else _WEIGHT_DECAY / (1.0 - MOMENTUM)
        return TorchSGD(parameters, lr=lr, momentum=momentum, weight_decay=decay, nesterov=momentum > 0.0)
    return AdamW(parameters, lr=lr, betas=(momentum, _SECOND_MOMENT), weight_decay=_ADAMW_WEIGHT_DECAY)


def one_cycle(optimizer: Optimizer, peak: float, steps: int) -> LRScheduler:
    """A rate that rises to its peak and falls to about zero; momentum stays as it is."""
    return OneCycleLR(optimizer, peak, total_steps=steps, pct_start=_WARM_UP_SHARE, cycle_momentum=False)
