"""The worker's side of ``dblp train``: DDP over each arm's transport, with the same seeds and batches."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.functional import cross_entropy

from dblp.cli.train.arms import Arm, TimedDDP, open_arm
from dblp.cli.train.data import Dataset, load
from dblp.cli.train.models import build
from dblp.cli.train.plan import TrainPlan
from dblp.cli.worker import Emit, Plan

_MOMENTUM = 0.9
_WEIGHT_DECAY = 1e-3
_WARM_UP_SHARE = 0.2
"""Share of the steps in which the one-cycle rate rises (Smith and Topin, 2018)."""
_PROGRESS_S = 0.2
"""Seconds between progress events: a bar needs no more."""
_TIMEOUT = timedelta(seconds=120)


def work(plan: Plan, emit: Emit) -> None:
    """Train every arm with every seed; emits ``progress`` (rank 0) and a ``result`` for each (every rank)."""
    train_plan = TrainPlan.from_json(plan)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    samples = _Samples(load(train_plan.data, train_plan.folder))
    agent = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for seed in train_plan.seeds:
        for name in train_plan.arms:
            store = PrefixStore(f"{name}/{seed}", agent)
            with open_arm(name, train_plan, store, rank, world_size, _TIMEOUT) as arm:
                _Run(train_plan, arm, name, seed, samples, emit).train()


class _Samples:
    """A data set as tensors, centred: images (n, 1, height, width) in [-1, 1]."""

    def __init__(self, dataset: Dataset) -> None:
        self.train_images = _images(dataset.train_images)
        self.train_labels = torch.from_numpy(dataset.train_labels)
        self.test_images = _images(dataset.test_images)
        self.test_labels = torch.from_numpy(dataset.test_labels)


class _Run:
    """One arm with one seed."""

    def __init__(
        self,
        plan: TrainPlan,
        arm: Arm,
        name: str,
        seed: int,
        samples: _Samples,
        emit: Emit,
    ) -> None:
        self._plan, self._arm, self._name, self._seed = plan, arm, name, seed
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._samples, self._emit = samples, emit
        height, width = samples.train_images.shape[-2:]
        module = build(plan.model, height, width, seed=seed)
        self._model = TimedDDP(module)
        arm.attach(self._model)
        self._steps = len(samples.train_images) // plan.batch
        self._optimizer = torch.optim.SGD(
            self._model.parameters(),
            lr=plan.lr,
            momentum=_MOMENTUM,
            weight_decay=_WEIGHT_DECAY,
            nesterov=True,
        )
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer,
            plan.lr,
            total_steps=self._steps * plan.epochs,
            pct_start=_WARM_UP_SHARE,
            cycle_momentum=False,
        )
        self._losses: list[float] = []
        self._accuracies: list[float] = []
        self._last_progress = 0.0

    def train(self) -> None:
        """All epochs, each with a test on every rank (so that none waits for another's), then the result."""
        dist.barrier()
        start = time.perf_counter()
        for epoch in range(self._plan.epochs):
            loss = torch.zeros(())
            for step, (images, labels) in enumerate(self._batches(epoch)):
                loss += self._step(images, labels)
                self._progress(epoch, step, float(loss) / (step + 1), start)
            self._losses.append(float(loss) / self._steps)
            self._accuracies.append(_accuracy(self._model.module, self._samples))
        wall_s = time.perf_counter() - start
        self._emit(
            "result",
            arm=self._name,
            seed=self._seed,
            test_accuracy=self._accuracies[-1],
            wall_s=wall_s,
            losses=self._losses,
            accuracies=self._accuracies,
            fingerprint=fingerprint(self._model.module),
            allreduce_s=self._model.durations_s,
            traffic=self._arm.traffic(),
        )

    def _batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of each batch; seed and epoch alone set the order, so all arms see the same."""
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._samples.train_images))
        batch, part = self._plan.batch, self._plan.batch // self._world_size
        for step in range(self._steps):
            start = step * batch + self._rank * part
            rows = torch.from_numpy(order[start : start + part])
            yield self._samples.train_images[rows], self._samples.train_labels[rows]

    def _step(self, images: Tensor, labels: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        loss = cross_entropy(self._model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._schedule.step()
        return loss.detach()

    def _progress(self, epoch: int, step: int, loss: float, start: float) -> None:
        now = time.perf_counter()
        last = epoch == self._plan.epochs - 1 and step == self._steps - 1
        if self._rank or (now - self._last_progress < _PROGRESS_S and not last):
            return
        self._last_progress = now
        done = epoch * self._steps + step + 1
        self._emit(
            "progress",
            arm=self._name,
            seed=self._seed,
            epoch=epoch + 1,
            share=done / (self._steps * self._plan.epochs),
            loss=loss,
            accuracy=self._accuracies[-1] if self._accuracies else None,
            rounds_per_s=len(self._model.durations_s) / max(now - start, 1e-9),
        )


def fingerprint(module: nn.Module) -> str:
    """A digest of every parameter's bits: equal on two ranks only if their replicas are identical."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def _images(images: np.ndarray[Any, np.dtype[np.float32]]) -> Tensor:
    return torch.from_numpy(images)[:, None] * 2 - 1


@torch.no_grad()
def _accuracy(model: nn.Module, samples: _Samples) -> float:
    """Share of the test set that is classified rightly."""
    predicted = torch.cat([model(images).argmax(1) for images in torch.split(samples.test_images, 500)])
    return float((predicted == samples.test_labels).float().mean())
