"""The transports that are compared, and how their rounds are measured: one definition for all of them.

The time of a round is taken on each rank from the call of DDP's comm hook to the completion of the future
that it returned. It holds the wait for ranks that come later, in every arm alike.
"""
# No "from __future__ import annotations" here: DDP compares a hook's annotations with the types themselves.

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket, Store
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dblp.cli.environment import environment
from dblp.cli.network import DatagramCount, datagram_count
from dblp.cli.train.optimizers import MOMENTUM
from dblp.cli.train.plan import TrainPlan
from dblp.cli.train.policies import method_of, policy_of
from dblp.collectives.compression.base import Method
from dblp.collectives.compression.dgc import DGC
from dblp.collectives.compression.rounds import Totals
from dblp.collectives.presets import Preset
from dblp.collectives.torch.borrowed import BorrowedCompression, compress_ddp
from dblp.collectives.torch.hook import Attachment, attach
from dblp.transport.policy import Consistency


class TimedDDP(DistributedDataParallel):
    """DDP whose comm hook runs with a clock around it, whoever registers it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.durations_s: list[float] = []
        """Seconds that each round took on this rank, in the order of completion."""

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register the hook, timed."""

        def timed(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
            start = time.perf_counter()

            def done(future: Future[torch.Tensor]) -> torch.Tensor:
                self.durations_s.append(time.perf_counter() - start)
                return future.value()

            return hook(state, bucket).then(done)  # type: ignore[no-any-return]

        super().register_comm_hook(state, timed)


class Arm:
    """One arm in this process: attaches to a model and counts its traffic."""

    momentum: float = MOMENTUM
    """What is left to the optimiser."""

    def attach(self, model: TimedDDP, optimizer: torch.optim.Optimizer) -> None:
        """Register the arm's hook on a model; the optimiser is that of its parameters."""
        raise NotImplementedError

    def begin_epoch(self, number: int) -> None:
        """An epoch begins, on all ranks."""

    def end_epoch(self) -> None:
        """It ends, before the model is tested."""

    def traffic(self) -> dict[str, int] | None:
        """Counts of this rank over all its rounds; None where the transport does not tell."""
        raise NotImplementedError


class GlooArm(Arm):
    """torch's own all-reduce hook over gloo, or compression over it."""

    def __init__(self, compression: Method | None) -> None:
        self._method = compression
        self.momentum = _momentum_beside(compression)
        self._compression: BorrowedCompression | None = None

    def attach(self, model: TimedDDP, optimizer: torch.optim.Optimizer) -> None:
        """Register torch's hook, or compression's."""
        if self._method is None:
            model.register_comm_hook(None, allreduce_hook)
        else:
            self._compression = compress_ddp(model, self._method, optimizer=optimizer)

    def begin_epoch(self, number: int) -> None:
        """Tell a compression that has a warm-up."""
        if self._compression is not None:
            self._compression.epoch(number)

    def traffic(self) -> dict[str, int] | None:
        """Sizes of the gradients, where they are compressed: the kernel's TCP keeps no count for one process."""
        return None if self._compression is None else _sizes(self._compression.totals)


class DblpArm(Arm):
    """dblp's hook under a policy, or with compression."""

    def __init__(self, policy: Preset, compression: Method | None) -> None:
        self._policy = policy
        self._compression = compression
        self.momentum = _momentum_beside(compression)
        self._attachment: Attachment | None = None
        self._before = DatagramCount()

    def attach(self, model: TimedDDP, optimizer: torch.optim.Optimizer) -> None:
        """Register dblp's hook. The optimiser is for DGC's check alone: controllers would heed its learning rate, too."""
        checked = optimizer if isinstance(self._compression, DGC) else None
        self._attachment = attach(model, self._policy, compression=self._compression, optimizer=checked)
        self._before = datagram_count(dist.group.WORLD)

    def begin_epoch(self, number: int) -> None:
        """Tell the controller, if the policy has one."""
        assert self._attachment is not None
        self._attachment.epoch(number)

    def end_epoch(self) -> None:
        """Replicas that may have drifted are made equal before they are tested."""
        assert self._attachment is not None
        if self._policy.policy.consistency is Consistency.RELAXED:
            self._attachment.resynchronise()

    def traffic(self) -> dict[str, int]:
        """Chunks of the gradient rounds, and what the impairment did to all datagrams since ``attach``."""
        assert self._attachment is not None
        summary = self._attachment.summary
        datagrams = datagram_count(dist.group.WORLD) - self._before
        compression = self._attachment.compression
        sizes = {} if compression is None else _sizes(compression.totals)
        return {
            **sizes,
            "datagrams_offered": datagrams.offered,
            "datagrams_lost": datagrams.lost,
            "chunks_sent": summary.chunks_sent + summary.chunks_resent,
            "chunks_resent": summary.chunks_resent,
            "chunks_missing": summary.missing_chunks,
            "chunks_expected": summary.bounded_chunks,
        }


def _momentum_beside(compression: Method | None) -> float:
    """What is left to the optimiser beside a method."""
    return 0.0 if isinstance(compression, DGC) and compression.momentum else MOMENTUM


def _sizes(totals: Totals) -> dict[str, int]:
    return {"gradient_bytes": totals.dense_bytes, "payload_bytes": totals.payload_bytes}


@contextmanager
def open_arm(
    name: str, plan: TrainPlan, store: Store, rank: int, world_size: int, timeout: timedelta
) -> Iterator[Arm]:
    """Make an arm's transport the default process group; it ends with the block."""
    policy = policy_of(name, plan.budget, plan.stop)
    with open_policy(policy, method_of(name), plan.impair, store, rank, world_size, timeout) as arm:
        yield arm


@contextmanager
def open_policy(
    policy: Preset | None,
    method: Method | None,
    impair: str,
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
) -> Iterator[Arm]:
    """dblp under a policy, or gloo for None, as the default process group until the block ends."""
    transport = {
        f"DBLP_{key.upper()}": str(value) for key, value in (policy.transport if policy else {}).items()
    }
    with environment({"DBLP_IMPAIR": impair, **transport}):  # read when the backend opens its port
        backend = "gloo" if policy is None else "dblp"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield GlooArm(method) if policy is None else DblpArm(policy, method)
    finally:
        dist.destroy_process_group()
