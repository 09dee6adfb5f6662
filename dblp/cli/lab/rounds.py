"""What a rank of an experiment does: join, connect each arm's group, blocks of timed rounds, training runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from dblp.cli.environment import environment
from dblp.cli.lab.barrier import Barrier
from dblp.cli.worker import Emit
from dblp.collectives.algorithms import contributes
from dblp.collectives.carry import Residual
from dblp.collectives.report import Report
from dblp.errors import LocalError
from dblp.sim.lab.arms import Arm, parse_arm
from dblp.transport.policy import Consistency, Policy

Command = dict[str, Any]

_PATTERN = 1021
"""Contributions are whole numbers below this times the rank + 1: sums of 64 ranks stay exact in float32."""
_SETTLE_ROUNDS = 1
"""Untimed rounds at the beginning of a block, in which windows and the processor's caches come back."""
_WARM_UP_ROUNDS = 3
"""Untimed rounds on the clean network after connecting."""
_BARRIER_S = 600.0
_TELL_S = 0.5
"""Between two words of progress within a block; they are said between rounds, which are not timed then."""
_SNMP = Path("/proc/self/net/snmp")


class Rank:
    """This process. Its methods are the parent's commands; each emits ``done`` when all is done."""

    def __init__(self, folder: Path) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._barrier = Barrier(folder / "barrier", self.rank, self.world_size, _BARRIER_S)
        self._store: Any = None
        self._arms: dict[str, _Connected] = {}

    def join(self, command: Command, emit: Emit) -> None:
        """Meet at the master's store."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = TCPStore(address, port, self.world_size, is_master=self.rank == 0)
        emit("done")

    def connect(self, command: Command, emit: Emit) -> None:
        """Make an arm's group and warm it up with each size."""
        arm = parse_arm(command["arm"])
        timeout = timedelta(seconds=command["timeout_s"])
        if not dist.is_initialized():
            store = PrefixStore("world", self._store)
            dist.init_process_group(
                "gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=timeout
            )
        transport = arm.preset.transport if arm.preset is not None else {}
        with environment({f"DBLP_{name.upper()}": str(value) for name, value in transport.items()}):
            group = dist.new_group(backend="dblp" if arm.preset is not None else "gloo", timeout=timeout)
        connected = _Connected(arm, group, command["algorithm"], self.rank, self.world_size)
        self._arms[arm.name] = connected
        for nbytes in command["sizes"]:
            self._untimed(connected, nbytes, _WARM_UP_ROUNDS)
        emit("done")

    def _untimed(self, connected: _Connected, nbytes: int, rounds: int) -> None:
        for _ in range(rounds):
            connected.prepare(nbytes)
            self._barrier.wait()
            connected.reduce()
            connected.check()

    def block(self, command: Command, emit: Emit) -> None:
        """Timed rounds of one arm, until there are enough or the time is over, which rank 0 decides."""
        connected, nbytes = self._arms[command["arm"]], command["bytes"]
        late_s = command["slow_s"] if command["slow_rank"] == self.rank else 0.0
        self._untimed(connected, nbytes, _SETTLE_ROUNDS)
        block, before = _Block(), _segments()
        stop, told = time.monotonic() + command["seconds"], time.monotonic()
        while True:
            connected.prepare(nbytes)
            number = len(block.starts)
            more = number == 0 or (number < command["rounds"] and time.monotonic() < stop)
            if not self._barrier.wait(more):
                break
            block.time(lambda: connected.reduce(late_s))
            block.checksums.append(connected.check())
            if self.rank == 0 and time.monotonic() - told > _TELL_S:
                told = time.monotonic()
                emit("rounds", done=len(block.starts))
        emit("done", **block.facts(before if connected.arm.congestion else None))

    def train(self, command: Command, emit: Emit) -> None:
        """A whole training run of one arm with one seed."""
        from dblp.cli.lab.training import train

        train(command, self._store, self.rank, self.world_size, emit)
        self._barrier.wait()
        emit("done")


class _Block:
    """Stamps and counts of a block's rounds."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.reports: list[Report | None] = []
        self.checksums: list[int] = []
        self.cpu_s = 0.0

    def time(self, round_: Callable[[], Report | None]) -> None:
        """Run one round."""
        cpu = time.process_time()
        self.starts.append(time.monotonic())
        report = round_()
        self.ends.append(time.monotonic())
        self.cpu_s += time.process_time() - cpu
        self.reports.append(report)

    def facts(self, before: tuple[int, int] | None) -> dict[str, Any]:
        """For the parent; ``before``: TCP's counters at the beginning, where it carries the arm."""
        reports = [report for report in self.reports if report is not None]
        sent, resent = (sum(r.chunks_sent for r in reports), sum(r.chunks_resent for r in reports))
        if before is not None:
            sent, resent = (now - then for now, then in zip(_segments(), before, strict=True))
        return {
            "starts": self.starts,
            "ends": self.ends,
            "cpu_s": self.cpu_s,
            "sent": sent,
            "resent": resent,
            "missing": sum(report.missing_chunks for report in reports),
            "bounded": sum(report.bounded_chunks for report in reports),
            "checksums": self.checksums,
        }


class _Connected:
    """An arm's group in this rank, with a tensor of each size."""

    def __init__(self, arm: Arm, group: Any, algorithm: str, rank: int, world_size: int) -> None:
        self.arm = arm
        self._group = group
        self._policy = arm.policy(algorithm)
        self._rank, self._factor = rank, rank + 1
        self._total = sum(peer + 1 for peer in range(world_size) if self._contributes(peer))
        self._tensors: dict[int, _Tensor] = {}

    def _contributes(self, rank: int) -> bool:
        """A server that only serves has no part in the sum."""
        algorithm = self._policy.algorithm if self._policy is not None else "auto"
        return algorithm == "auto" or contributes(algorithm, rank)

    def prepare(self, nbytes: int) -> None:
        """Fresh gradients of a size."""
        if nbytes not in self._tensors:
            self._tensors[nbytes] = _Tensor(nbytes, self._policy)
        self._now = self._tensors[nbytes]
        torch.mul(self._now.pattern, self._factor, out=self._now.buffer)

    def reduce(self, late_s: float = 0.0) -> Report | None:
        """One all-reduce, waited for; its report, if the transport gives one. ``late_s``: this rank comes late."""
        if late_s:
            time.sleep(late_s)
        if self._policy is None:
            dist.all_reduce(self._now.buffer, group=self._group)
            return None
        work = self._group.allreduce_lossy(self._now.buffer, self._policy, "sum", carry=self._now.residual)
        work.wait()
        report: Report | None = work.report
        return report

    def check(self) -> int:
        """Exact results must be right. Returns a checksum of the result where all ranks must hold the same, else 0."""
        lossy = self._policy is not None and self._policy.lossy
        if not lossy and not torch.equal(self._now.buffer, self._now.pattern * self._total):
            raise LocalError(f"{self.arm.name}: a wrong sum on rank {self._rank}")
        if lossy and self._policy is not None and self._policy.consistency is Consistency.RELAXED:
            return 0
        return int(self._now.buffer.view(torch.int32).sum(dtype=torch.int64))


class _Tensor:
    """Gradients of one size."""

    def __init__(self, nbytes: int, policy: Policy | None) -> None:
        self.pattern = (torch.arange(nbytes // 4) % _PATTERN).float()
        self.buffer = torch.empty_like(self.pattern)
        carries = policy is not None and policy.carry is not None
        self.residual = Residual(nbytes // 4) if carries else None


def _segments() -> tuple[int, int]:
    """TCP segments that left this host, repeats not counted (RFC 4022, tcpOutSegs), and the repeats."""
    names, values = (line.split() for line in _SNMP.read_text().splitlines() if line.startswith("Tcp:"))
    counters = dict(zip(names, values, strict=True))
    return int(counters["OutSegs"]), int(counters["RetransSegs"])
