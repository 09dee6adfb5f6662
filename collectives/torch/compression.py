"""Compression of a DDP model's buckets: what ``collectives/compression`` does for numpy arrays, between DDP and checkpoints.

The rounds run on a group of their own, so that they cannot get between what DDP itself sends. Heavy steps run on threads, since
numpy lets go of the interpreter, and the engine's thread serves the network.
"""

from __future__ import annotations

import asyncio
import logging
import os
import zlib
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from dblp.collectives.budget import BudgetController
from dblp.collectives.compression.accordion import Accordion
from dblp.collectives.compression.base import Bucket, Method, Part
from dblp.collectives.compression.dgc import DGC
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.compression.rounds import Compression, Totals
from dblp.collectives.compression.shares import Joint
from dblp.collectives.joint import JointController
from dblp.collectives.phases import Phases
from dblp.collectives.report import Report
from dblp.collectives.torch.backend import DblpProcessGroup
from dblp.collectives.torch.buckets import BucketLayout
from dblp.collectives.torch.keyed import load_compression, save_compression
from dblp.collectives.torch.work import DblpWork
from dblp.errors import ConfigError, MismatchError, UnsupportedError
from dblp.transport.policy import Policy

_log = logging.getLogger("dblp")
_TOLD_BYTES = 512
"""Of a method's string, in the error of ranks that have different ones; longer ones are cut."""

_THREADS = 2
"""Buckets that are compressed at a time, in a process."""


class _Threads:
    """The process's threads for heavy steps; a forked child starts its own."""

    def __init__(self) -> None:
        self.pool: ThreadPoolExecutor | None = None

    async def run(self, step: Callable[[], Any]) -> Any:
        """Run a step on one of them."""
        if self.pool is None:
            self.pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="dblp-compression")
        return await asyncio.get_running_loop().run_in_executor(self.pool, step)

    def forget(self) -> None:
        """In a forked child: the parent's threads are not there."""
        self.pool = None


threads = _Threads()
os.register_at_fork(after_in_child=threads.forget)


class CompressedModel:
    """The compression of one model's gradients, whoever carries them."""

    def __init__(self, method: Method) -> None:
        self._compression = Compression(method, offload=threads.run)
        self._sizes: Mapping[str, int] = {}
        """Elements of each parameter by name."""

    @property
    def method(self) -> Method:
        """What compresses."""
        return self._compression.method

    @property
    def totals(self) -> Totals:
        """What its rounds cost so far, on this rank; over another backend the bytes on the wire are not known (0)."""
        return self._compression.totals

    @property
    def figures(self) -> dict[str, float]:
        """What an adaptive method has decided and found, by name (docs/compression.md); empty for the others."""
        return self._compression.figures

    def epoch(self, number: int | None = None) -> None:
        """An epoch begins; without a number the next one."""
        self._compression.epoch(number)

    def state_dict(self) -> dict[str, Any]:
        """All that the next rounds depend on, in tensors and plain values; take it between iterations."""
        return save_compression(self._compression)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` gave; raises ConfigError if it is not usable, or of another model or method."""
        load_compression(self._compression, state, self._sizes)


class ModelCompression(CompressedModel):
    """The same over dblp's own rounds."""

    def __init__(self, group: DblpProcessGroup, method: Method, module: torch.nn.Module) -> None:
        """All ranks make theirs in the same order; blocks until all have. Raises UnsupportedError if a gradient will not be real
        and floating-point, MismatchError if another rank has another method."""
        check_real(module)
        check_alike(method, group.rank(), group.size(), group.agree)
        super().__init__(method)
        self._pg = group
        self._sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
        self._group = group.session.new_group("compression")
        self._parts = BucketParts()

    def start(
        self,
        bucket: GradBucket,
        layout: BucketLayout,
        iteration: int,
        phases: Phases | None,
        policy: Policy,
        ratio: float | None = None,
    ) -> DblpWork:
        """Start the round of a bucket under ``policy``; it is averaged in place. ``ratio``: of a controller that decides it,
        which is told the gradient's energies."""
        parts = self._parts.of(bucket, layout)

        def reduce(array: npt.NDArray[Any], dtype: str | None, timeout_s: float) -> Awaitable[Report]:
            return self._compression.all_reduce(
                self._group,
                array,
                parts,
                timeout_s=timeout_s,
                iteration=iteration,
                phases=phases,
                dtype=dtype,
                policy=policy,
                ratio=ratio,
                weigh=ratio is not None,
            )

        return self._pg.allreduce_compressed(bucket.buffer(), reduce)


class BucketParts:
    """What compression knows of DDP's buckets, by the names of their parameters."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], Bucket] = {}

    def of(self, bucket: GradBucket, layout: BucketLayout) -> Bucket:
        """Of a bucket as it is now."""
        if layout.names not in self._known:
            shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
            named = zip(layout.names, shapes, strict=True)
            self._known[layout.names] = Bucket([Part(name, shape) for name, shape in named])
        return self._known[layout.names]


def method_of(compression: str | Method) -> Method:
    """A method, or what its string says; raises ConfigError."""
    if isinstance(compression, str):
        return parse_compression(compression)
    if not isinstance(compression, Method):
        raise ConfigError(
            f"compression={compression!r}: a string such as 'topk(ratio=0.01)' or a dblp.collectives.compression method is needed"
        )
    return compression


def controller_of(
    method: Method, budget: BudgetController | None, optimizer: torch.optim.Optimizer | None, policy: Policy
) -> BudgetController | None:
    """The controller of a method's phases and of its rounds' budgets: ``budget``, or the method's own under ``policy``. Raises
    ConfigError for a controller that it does not follow."""
    if budget is None and isinstance(method, Accordion):
        return method.controller(learning_rate=optimizer is not None, budget=policy.budget)
    if isinstance(budget, JointController) and not isinstance(method, Joint):
        raise ConfigError(
            f"a JointController with compression {method.name!r}: it decides the ratio of 'joint'"
        )
    return budget


def check_real(module: torch.nn.Module) -> None:
    """Raise UnsupportedError if a gradient will not be real and floating-point."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise UnsupportedError(
                f"parameter {name!r} is {parameter.dtype}: only real floating-point gradients are compressed"
            )


def check_alike(
    method: Method, rank: int, world_size: int, agree: Callable[[npt.NDArray[np.float64]], None]
) -> None:
    """Raise MismatchError unless all ranks have this method with these options. ``agree``: reduces a vector by MAX."""
    text = str(method).encode()
    code = float(zlib.crc32(text))
    most = np.array([code, -code])
    agree(most)
    if most[0] == -most[1]:
        return
    # Of the ranks that differ two are told, each with its own.
    extremes = (most[0], -most[1])
    places = np.array([world_size - rank if code == extreme else 0.0 for extreme in extremes])
    agree(places)
    told = np.zeros((2, _TOLD_BYTES))
    for row, extreme in zip(told, extremes, strict=True):
        if code == extreme:
            row[: len(text)] = np.frombuffer(text, np.uint8)[:_TOLD_BYTES]
    agree(told.reshape(-1))
    ranks = [world_size - int(place) for place in places]
    texts = [bytes(row[row > 0].astype(np.uint8)).decode(errors="replace") for row in told]
    named = " and ".join(f"rank {rank} {text}" for rank, text in sorted(zip(ranks, texts, strict=True)))
    raise MismatchError(
        f"ranks have different compression methods, {named}: give all ranks the same string",
        range(world_size),
    )


def check_optimizer(method: Method, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise ConfigError if momentum would be applied twice, or moments taken of DGC's velocities; warn without an optimiser."""
    if not isinstance(method, DGC) or not method.momentum:
        return
    if optimizer is None:
        if dist.get_rank() == 0:
            _log.warning(
                "compression %s brings the momentum (%g): the optimiser must have none; optimizer=... has that checked",
                method, method.momentum,
            )  # fmt: skip
        return
    inner = getattr(optimizer, "optim", optimizer)  # of a ZeroRedundancyOptimizer
    of_torch = type(inner).__module__.startswith("torch.optim") and not isinstance(inner, torch.optim.SGD)
    if of_torch or any("betas" in group for group in optimizer.param_groups):
        raise ConfigError(
            f"dgc with {type(inner).__name__}: DGC hands over velocities, not gradients, which is defined for SGD alone; "
            "use SGD with momentum=0, or another compression"
        )
    if not isinstance(inner, torch.optim.SGD) and dist.get_rank() == 0:
        _log.warning(
            "dgc with %s: DGC hands over velocities, not gradients, which is defined for SGD alone; an optimiser that takes "
            "moments of gradients does not go with it", type(inner).__name__,
        )  # fmt: skip
    for group in optimizer.param_groups:
        if group.get("momentum"):
            raise ConfigError(
                f"dgc(momentum={method.momentum:g}) with an optimiser that has momentum={group['momentum']:g}: DGC brings the "
                "momentum, give the optimiser momentum=0"
            )
