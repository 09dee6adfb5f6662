"""The transports that are compared, and how their rounds are measured: one definition for all of them.

The time of a round is taken on each rank from the call of DDP's comm hook to the completion of the future
that it returned. It holds the wait for ranks that come later, in every arm alike.
"""
# No "from __future__ import annotations" here: DDP compares a hook's annotations with the types themselves.

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket, Store
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dblp.cli.train.plan import BOUNDED, EXACT, GLOO, TrainPlan
from dblp.transport.policy import Bounded, Exact, Policy

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class Meter:
    """Attaches an arm's comm hook to a model and measures its rounds."""

    def __init__(self) -> None:
        self.durations_s: list[float] = []
        """Seconds that each round took on this rank, in the order of completion."""

    def attach(self, model: DistributedDataParallel) -> None:
        """Register the hook."""
        raise NotImplementedError

    def traffic(self) -> dict[str, float] | None:
        """Counts of this rank over all its rounds; None where the transport does not tell."""
        raise NotImplementedError

    def timed(self, hook: Hook) -> Hook:
        """The hook with a clock around it."""

        def timed_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            start = time.perf_counter()

            def done(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
                self.durations_s.append(time.perf_counter() - start)
                return future.value()

            return hook(state, bucket).then(done)

        return timed_hook


class GlooMeter(Meter):
    """torch's own all-reduce hook over gloo."""

    def attach(self, model: DistributedDataParallel) -> None:
        """Register torch's all-reduce hook, timed."""
        model.register_comm_hook(None, self.timed(allreduce_hook))

    def traffic(self) -> None:
        """The kernel's TCP does not count for one process."""


class DblpMeter(Meter):
    """dblp's hook under a policy."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy


@contextmanager
def open_arm(
    arm: str, plan: TrainPlan, store: Store, rank: int, world_size: int, timeout: timedelta
) -> Iterator[Meter]:
    """The default process group over an arm's transport, and its meter; the group ends with the block."""
    os.environ["DBLP_IMPAIR"] = plan.impair  # read when the backend opens its port
    backend = "gloo" if arm == GLOO else "dblp"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield _meter(arm, plan)
    finally:
        dist.destroy_process_group()


def _meter(arm: str, plan: TrainPlan) -> Meter:
    policies = {EXACT: Exact(), BOUNDED: Bounded(plan.budget, stop=plan.stop)}
    return DblpMeter(policies[arm]) if arm in policies else GlooMeter()
