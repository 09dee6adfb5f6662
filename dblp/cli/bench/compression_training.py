"""What a method does to training: accuracy, and perplexity of text, against the average itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dblp.cli.bench.compression_net import CompressedRanks
from dblp.cli.bench.compression_plan import CompressionPlan
from dblp.cli.train.data import load
from dblp.cli.train.optimizers import MOMENTUM
from dblp.cli.train.samples import Samples, Score
from dblp.cli.train.standin import StandIn, train
from dblp.collectives.compression.base import Bucket, Part
from dblp.collectives.compression.dgc import DGC
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.report import Report

Floats = npt.NDArray[np.float32]
DENSE = "none"
_UNLIMITED_BPS = 0.0
"""Of the links of a training, whose time is not told: a quicker simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One training."""

    method: str
    seed: int
    accuracy: float
    perplexity: float | None
    ratio: float
    """Gradient size over compressed size, over all steps."""
    missing_share: float
    """Missing chunks over those that were allowed to miss."""


class Trainings:
    """The trainings of one plan, on one data set."""

    def __init__(self, plan: CompressionPlan) -> None:
        self._plan = plan
        self._samples = Samples(load(plan.data, Path(plan.data_dir) if plan.data_dir else None))

    @property
    def epoch_steps(self) -> int:
        """Steps of an epoch, as the plan or the data have them."""
        return self._plan.epoch_steps or max(len(self._samples) // self._plan.batch, 1)

    def run(self, method: str, seed: int) -> Trained:
        """Train with a method; ``none``: with the workers' mean, which is what an exact all-reduce gives."""
        if method == DENSE:
            return self._trained(
                method, seed, train(self._stand_in(method, seed), self._samples, _mean), None, []
            )
        net = self._net(method, seed)
        bucket, reports = self._bucket(seed), []
        steps = 0

        def all_reduce(gradients: Floats) -> Floats:
            nonlocal steps
            if steps % self.epoch_steps == 0:
                net.epoch(steps // self.epoch_steps)
            steps += 1
            reports.extend(net.average(gradients, bucket)[1])
            first: Floats = gradients[0]
            return first

        score = train(self._stand_in(method, seed), self._samples, all_reduce)
        net.close()
        return self._trained(method, seed, score, net, reports)

    def _trained(
        self, method: str, seed: int, score: Score, net: CompressedRanks | None, reports: list[Report]
    ) -> Trained:
        bounded = sum(report.bounded_chunks for report in reports)
        return Trained(
            method=method,
            seed=seed,
            accuracy=score.accuracy,
            perplexity=score.perplexity,
            ratio=1.0 if net is None else net.totals.ratio,
            missing_share=sum(report.missing_chunks for report in reports) / bounded if bounded else 0.0,
        )

    def _net(self, method: str, seed: int) -> CompressedRanks:
        plan = self._plan
        return CompressedRanks(
            method,
            plan.policy,
            ranks=plan.ranks,
            rate_bps=_UNLIMITED_BPS,
            delay_s=plan.delay_s,
            loss=plan.loss,
            seed=seed,
        )

    def _bucket(self, seed: int) -> Bucket:
        module = self._samples.build(self._plan.model, seed=seed)
        return Bucket([Part(name, tuple(p.shape)) for name, p in module.named_parameters()])

    def _stand_in(self, method: str, seed: int) -> StandIn:
        plan, known = self._plan, parse_compression(method)
        return StandIn(
            model=plan.model,
            optimizer=plan.optimizer,
            lr=plan.lr,
            batch=plan.batch,
            steps=plan.steps,
            seed=seed,
            workers=plan.ranks,
            momentum=0.0 if isinstance(known, DGC) and known.momentum else MOMENTUM,
        )


def _mean(gradients: Floats) -> Floats:
    """In rank order."""
    total: Floats = gradients[0].copy()
    for row in gradients[1:]:
        total += row
    return total / np.float32(len(gradients))
