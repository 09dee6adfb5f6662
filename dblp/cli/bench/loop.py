"""The worker's side of ``dblp bench allreduce``: gloo and dblp alternate, round by round, in the same processes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from dblp.cli.bench.plan import BOUNDED, GLOO, WARM_UP_ROUNDS, BenchPlan, Variant
from dblp.cli.network import datagram_count
from dblp.cli.worker import Emit, Plan
from dblp.collectives.torch.work import DblpWork
from dblp.errors import LocalError
from dblp.transport.policy import Bounded, Exact, Policy

_TIMEOUT = timedelta(seconds=300)
_PATTERN = 1021
"""Contributions are whole numbers below this times the rank + 1: sums of 64 ranks stay exact in float32."""
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""proc(5): resets the peak resident set size to the present one."""

Start = Callable[[torch.Tensor], Any]
"""Begins an all-reduce in place and returns its Work."""


def work(plan: Plan, emit: Emit) -> None:
    """Time all sizes; emits one ``size`` event for each (every rank)."""
    bench_plan = BenchPlan.from_json(plan)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = PrefixStore("bench", agent)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    try:
        group = dist.new_group(backend="dblp", timeout=_TIMEOUT)
        for nbytes in bench_plan.sizes:
            _SizeBench(bench_plan, nbytes, group, rank, world_size).run(emit)
    finally:
        dist.destroy_process_group()


class _SizeBench:
    """All variants of one size."""

    def __init__(self, plan: BenchPlan, nbytes: int, group: Any, rank: int, world_size: int) -> None:
        self._plan, self._nbytes, self._group = plan, nbytes, group
        self._factor, total = rank + 1, world_size * (world_size + 1) // 2
        self._pattern = (torch.arange(nbytes // 4) % _PATTERN).float()
        self._expected = self._pattern * total
        self._buffer = torch.empty_like(self._pattern)
        self._starts: dict[str, Start] = {arm: self._start(arm) for arm in (GLOO, *plan.arms)}
        names = [variant.name for variant in plan.variants]
        self._seconds: dict[str, list[float]] = {name: [] for name in names}
        self._lost: dict[str, list[int]] = {name: [] for name in names}
        self._peaks: dict[str, list[int]] = {name: [] for name in names}

    def run(self, emit: Emit) -> None:
        """Warm up, time, report. The order of the variants turns round each time, so that none has the better place."""
        variants = self._plan.variants
        for _ in range(WARM_UP_ROUNDS):
            for variant in variants:
                self._round(variant, timed=False)
        for number in range(self._plan.rounds_of(self._nbytes)):
            for variant in variants if number % 2 == 0 else reversed(variants):
                self._round(variant, timed=True)
        emit("size", bytes=self._nbytes, seconds=self._seconds, lost=self._lost, peaks=self._peaks)

    def _round(self, variant: Variant, *, timed: bool) -> None:
        torch.mul(self._pattern, self._factor, out=self._buffer)
        before = datagram_count(self._group)
        baseline = _reset_peak() if self._plan.memory else 0
        dist.barrier()
        start = time.perf_counter()
        job = self._starts[variant.arm](self._buffer)
        if variant.busy:
            _spin(job)
        job.wait()
        seconds = time.perf_counter() - start
        peak = _status_bytes("VmHWM") - baseline if self._plan.memory else 0
        self._check(variant)
        if timed:
            self._seconds[variant.name].append(seconds)
            self._lost[variant.name].append((datagram_count(self._group) - before).lost)
            self._peaks[variant.name].append(peak)

    def _start(self, arm: str) -> Start:
        if arm == GLOO:
            return lambda tensor: dist.all_reduce(tensor, async_op=True)
        policy = Bounded(self._plan.budget, stop=self._plan.stop) if arm == BOUNDED else Exact()
        if self._plan.algorithm == "auto":
            return lambda tensor: self._group.allreduce_lossy(tensor, policy, "sum")
        return lambda tensor: _all_reduce_by(self._plan.algorithm, self._group, tensor, policy)

    def _check(self, variant: Variant) -> None:
        """Exact rounds give the sum, bounded ones the same bits on every rank and no more than the sum."""
        if variant.arm != BOUNDED:
            right = torch.equal(self._buffer, self._expected)
        else:
            right = (
                bool(((self._buffer >= 0) & (self._buffer <= self._expected)).all())
                and self._same_everywhere()
            )
        if not right:
            raise LocalError(f"{variant.name}: wrong sum of {self._nbytes} bytes on rank {self._factor - 1}")

    def _same_everywhere(self) -> bool:
        checksum = self._buffer.view(torch.int32).sum(dtype=torch.int64)
        ends = torch.stack((checksum, -checksum))
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        return bool(ends[0] == -ends[1])


def _all_reduce_by(algorithm: str, group: Any, tensor: torch.Tensor, policy: Policy) -> DblpWork:
    """torch's interface has no place for an algorithm's name: go to the group behind it."""
    timeout_s = _TIMEOUT.total_seconds()
    job = DblpWork("all_reduce", timeout_s, [tensor], None)
    array = tensor.numpy()
    group.session.submit(
        "all_reduce",
        timeout_s,
        lambda inner: inner.all_reduce(array, "sum", policy=policy, algorithm=algorithm, timeout_s=timeout_s),
        job.finish,
    )
    return job


def _spin(job: Any) -> None:
    """Pure Python that never lets go of the GIL by itself, until the round is done."""
    turns = 0
    while not job.is_completed():
        turns += 1


def _reset_peak() -> int:
    """Reset the peak resident set size; returns the present size in bytes."""
    _CLEAR_REFS.write_text(_RESET_PEAK)
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
