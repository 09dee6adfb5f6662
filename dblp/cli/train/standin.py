"""Training of several workers in one process, with an all-reduce that is a function: for experiments on what a loss does to
training, where a network would only take time.

Where an all-reduce gives one average, as dblp's does, all replicas hold the same parameters after every step, and there is one
model. Where each worker gets an average of its own, each steps with it, and replicas drift apart. Each worker's gradient is that
of its own part of the batch; the parts, their order and the learning rate are those of ``dblp train``.
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
"""The workers' gradients (workers, n), to be kept or changed, to what every worker steps with: (n,), or with
``StandIn.replicas`` (workers, n)."""
Watch = Callable[[int, Gradients, Callable[[], Score]], None]
"""``watch(step, parameters, score)``, after each step, from 1: the replicas' parameters (1 or workers, n), which may be
changed, and what tests the first of them."""


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
    replicas: bool = False
    """Each worker has parameters of its own, since the all-reduce gives each another average."""


def train(plan: StandIn, samples: Samples, all_reduce: AllReduce, watch: Watch | None = None) -> Score:
    """Run all steps and test the model, the first worker's if there are several."""
    module = samples.build(plan.model, seed=plan.seed)
    flat = _Flat(module, plan.workers, plan.workers if plan.replicas else 1)
    steppers = [_Stepper(plan, vector) for vector in flat.replicas]

    def score() -> Score:
        flat.point_at(0)
        return samples.score(module)

    for step, parts in enumerate(_batches(plan, len(samples)), 1):
        for worker, rows in enumerate(parts):
            flat.point_at(worker)
            flat.gradients[worker].zero_()
            inputs, targets = samples.batch(rows)
            loss_of(module(inputs), targets).backward()  # type: ignore[no-untyped-call]
        averages = np.atleast_2d(all_reduce(flat.gradients.numpy()))
        for stepper, average in zip(steppers, averages, strict=True):
            stepper.step(average)
        if watch is not None:
            watch(step, flat.parameters.numpy(), score)
    return score()


class _Stepper:
    """Optimiser and learning rate of one replica."""

    def __init__(self, plan: StandIn, vector: nn.Parameter) -> None:
        self._vector = vector
        self._optimizer = optimizer(plan.optimizer, [vector], plan.lr, momentum=plan.momentum)
        self._schedule = None if plan.constant else one_cycle(self._optimizer, plan.lr, plan.steps)

    def step(self, average: Gradients) -> None:
        """Step with an averaged gradient (n,)."""
        self._vector.grad = torch.from_numpy(average)
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()


class _Flat:
    """A module's parameters as views of one vector for each replica, and a row of gradients for each worker."""

    def __init__(self, module: nn.Module, workers: int, replicas: int) -> None:
        self._views = list(module.parameters())
        vector = torch.cat([parameter.detach().reshape(-1) for parameter in self._views])
        self.parameters = vector.repeat(replicas, 1)
        """(replicas, n)."""
        self.replicas = [nn.Parameter(row) for row in self.parameters]
        """The same, row by row: one vector costs an optimiser one call a step."""
        self.gradients = torch.zeros(workers, len(vector), dtype=vector.dtype)
        """(workers, n)."""

    def point_at(self, worker: int) -> None:
        """Let the module read this worker's parameters and write its row of gradients."""
        replica = self.parameters[worker % len(self.parameters)]
        places = zip(self._views, self._cut(replica), self._cut(self.gradients[worker]), strict=True)
        for parameter, values, gradient in places:
            parameter.data, parameter.grad = values, gradient

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
