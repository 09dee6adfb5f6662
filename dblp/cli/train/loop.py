"""The worker's side of ``dblp train``: DDP over each arm's transport, with the same seeds and batches."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from dblp.cli.train.arms import Arm, TimedDDP, open_arm
from dblp.cli.train.data import load
from dblp.cli.train.optimizers import one_cycle, optimizer
from dblp.cli.train.plan import TrainPlan
from dblp.cli.train.samples import Samples, Score, loss_of
from dblp.cli.worker import Emit, Plan

_PROGRESS_S = 0.2
"""Seconds between progress events: a bar needs no more."""
_TIMEOUT = timedelta(seconds=120)


def work(plan: Plan, emit: Emit) -> None:
    """Train every arm with every seed; emits ``progress`` (rank 0) and a ``result`` for each (every rank)."""
    train_plan = TrainPlan.from_json(plan)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    samples = Samples(load(train_plan.data, train_plan.folder))
    agent = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for seed in train_plan.seeds:
        for name in train_plan.arms:
            store = PrefixStore(f"{name}/{seed}", agent)
            with open_arm(name, train_plan, store, rank, world_size, _TIMEOUT) as arm:
                Run(train_plan, arm, name, seed, samples, emit).train()


class Run:
    """One arm with one seed."""

    def __init__(
        self,
        plan: TrainPlan,
        arm: Arm,
        name: str,
        seed: int,
        samples: Samples,
        emit: Emit,
    ) -> None:
        self._plan, self._arm, self._name, self._seed = plan, arm, name, seed
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._samples, self._emit = samples, emit
        self._model = TimedDDP(samples.build(plan.model, seed=seed))
        self._optimizer = optimizer(plan.optimizer, self._model.parameters(), plan.lr, momentum=arm.momentum)
        arm.attach(self._model, self._optimizer)
        self._steps = len(samples) // plan.batch
        self._schedule = one_cycle(self._optimizer, plan.lr, self._steps * plan.epochs)
        self._losses: list[float] = []
        self._scores: list[Score] = []
        self._last_progress = 0.0

    def train(self) -> None:
        """All epochs, each with a test on every rank (so that none waits for another's), then the result."""
        dist.barrier()
        start = time.perf_counter()
        for epoch in range(self._plan.epochs):
            self._arm.begin_epoch(epoch)
            loss = torch.zeros(())
            for step, (inputs, targets) in enumerate(self._batches(epoch)):
                loss += self._step(inputs, targets)
                self._progress(epoch, step, float(loss) / (step + 1), start)
            self._arm.end_epoch()
            self._losses.append(float(loss) / self._steps)
            self._scores.append(self._samples.score(self._model.module))
        wall_s = time.perf_counter() - start
        self._emit(
            "result",
            arm=self._name,
            seed=self._seed,
            test_accuracy=self._scores[-1].accuracy,
            test_perplexity=self._scores[-1].perplexity,
            wall_s=wall_s,
            losses=self._losses,
            accuracies=[score.accuracy for score in self._scores],
            fingerprint=fingerprint(self._model.module),
            allreduce_s=self._model.durations_s,
            traffic=self._arm.traffic(),
        )

    def _batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of each batch; seed and epoch alone set the order, so all arms see the same."""
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._samples))
        batch, part = self._plan.batch, self._plan.batch // self._world_size
        for step in range(self._steps):
            start = step * batch + self._rank * part
            yield self._samples.batch(order[start : start + part])

    def _step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        loss = loss_of(self._model(inputs), targets)
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
            accuracy=self._scores[-1].accuracy if self._scores else None,
            rounds_per_s=len(self._model.durations_s) / max(now - start, 1e-9),
        )


def fingerprint(module: nn.Module) -> str:
    """A digest of every parameter's bits: equal on two ranks only if their replicas are identical."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()
