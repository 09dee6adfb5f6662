"""Training of several workers in one process, with an all-reduce that is a function: for experiments on what a loss does to
training, where a network would only take time.

All replicas hold the same parameters after every step, as they do under dblp, so there is one model. Each worker's gradient
is that of its own part of the batch; the parts, their order and the learning rate are those of ``dblp train``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dblp.cli.train.optimizers import MOMENTUM, one_cycle, optimizer
from dblp.cli.train.samples import Samples, Score, loss_of

Gradients = npt.NDArray[np.float32]
AllReduce = Callable[[Gradients], Gradients]
"""The workers' gradients (workers, n), to be kept or changed, to what every worker steps with (n,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """One training."""

    model: str
    optimizer: str
    lr: float
    """Peak of the learning rate, or the rate itself if it is constant."""
    batch: int
    """Samples a step, over all workers; a multiple of their number."""
    steps: int
    seed: int
    """Of the parameters and of the batches."""
    workers: int = 4
    constant: bool = False
    """Keep the learning rate instead of letting it rise and fall once."""
    momentum: float = MOMENTUM
    """The optimiser's; 0 where the all-reduce gives velocities."""


def train(plan: StandIn, samples: Samples, all_reduce: AllReduce) -> Score:
    """Run all steps and test the model."""
    module = samples.build(plan.model, seed=plan.seed)
    flat = _Flat(module, plan.workers)
    chosen = optimizer(plan.optimizer, [flat.parameters], plan.lr, momentum=plan.momentum)
    schedule = None if plan.constant else one_cycle(chosen, plan.lr, plan.steps)
    for parts in _batches(plan, len(samples)):
        for worker, rows in enumerate(parts):
            flat.point_gradients_at(worker)
            inputs, targets = samples.batch(rows)
            loss_of(module(inputs), targets).backward()  # type: ignore[no-untyped-call]
        flat.parameters.grad = torch.from_numpy(all_reduce(flat.gradients.numpy()))
        chosen.step()
        if schedule is not None:
            schedule.step()
    return samples.score(module)


class _Flat:
    """A module's parameters as views of one vector, and a row of gradients for each worker."""

    def __init__(self, module: nn.Module, workers: int) -> None:
        self._views = list(module.parameters())
        vector = torch.cat([parameter.detach().reshape(-1) for parameter in self._views])
        self.parameters = nn.Parameter(vector)
        """(n,): one vector costs an optimiser one call a step."""
        self.gradients = torch.zeros(workers, len(vector))
        """(workers, n)."""
        for parameter, view in zip(self._views, self._cut(vector), strict=True):
            parameter.data = view

    def point_gradients_at(self, worker: int) -> None:
        """Let the next backward pass write this worker's row."""
        row = self.gradients[worker]
        row.zero_()
        for parameter, view in zip(self._views, self._cut(row), strict=True):
            parameter.grad = view

    def _cut(self, vector: torch.Tensor) -> Iterator[torch.Tensor]:
        start = 0
        for parameter in self._views:
            yield vector[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()


def _batches(plan: StandIn, samples: int) -> Iterator[npt.NDArray[np.int64]]:
    """Each step's rows (workers, batch / workers), in the order of ``dblp train``."""
    step, epoch, whole = 0, 0, samples // plan.batch
    while step < plan.steps:
        order = np.random.default_rng((plan.seed, epoch)).permutation(samples)
        for index in range(min(whole, plan.steps - step)):
            yield order[index * plan.batch : (index + 1) * plan.batch].reshape(plan.workers, -1)
        step, epoch = step + whole, epoch + 1
