"""A DDP step on dblp with the engine's thread run one way and another, step by step in turn in the same processes.

    python -m tests.benchmarks.ddp_engine [--models cnn,wide] [--ranks 2] [--pairs 30] [--json FILE]

Ways, each against the engine as it is:

- ``anywhere``: not bound to this rank's share of the processors (``DBLP_ENGINE_CPUS=all``);
- ``short slices``: the engine asks Linux for slices of 0.1 ms (``sched_setattr``; kernels before 6.12 ignore it), so that it
  is let in sooner when it wakes up beside the threads of the backward pass;
- ``long interval``: Python's usual switch interval, 5 ms, for the whole process.

ratio: the step as it is over that of the same turn with the way, above 1 the way is faster; its median and quartiles. The slowest
rank counts. Models and steps are those of ``ddp_step``.
"""

# mypy: disable-error-code="attr-defined"
# torch.distributed's stubs miss names that it exports.

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from dblp.cli.host import document, host_facts, write_json
from dblp.cli.options import parse_ranks
from dblp.collectives.engine import Engine
from tests.benchmarks.ddp_step import MODELS, Arm, join, launch

WARM_UP = 3
"""Steps that do not count."""
SLICE_NS = 100_000
"""The shortest that Linux takes."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Number of the system call, which the C library does not have."""
_INTERVAL_S = 5e-3


class Ways:
    """Puts the engine on another way, and back."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._bound = self._on_engine(lambda: os.sched_getaffinity(0))
        self._interval_s = round(
            sys.getswitchinterval(), 6
        )  # Python cuts to whole microseconds, and tells a little less

    def put(self, way: str, other: bool) -> None:
        """On the way (``other``), or as it was."""
        {"anywhere": self._place, "short slices": self._slice, "long interval": self._switch}[way](other)

    def _place(self, anywhere: bool) -> None:
        processors = os.sched_getaffinity(os.getpid()) if anywhere else self._bound
        self._on_engine(lambda: os.sched_setaffinity(0, processors))

    def _slice(self, short: bool) -> None:
        self._on_engine(lambda: set_slice(SLICE_NS if short else 0))

    def _switch(self, long: bool) -> None:
        sys.setswitchinterval(_INTERVAL_S if long else self._interval_s)

    def _on_engine(self, call: Callable[[], Any]) -> Any:
        async def called() -> Any:
            return call()

        return self._engine.run(called)


WAYS = ("anywhere", "short slices", "long interval")


def set_slice(nanoseconds: int) -> None:
    """The calling thread's slice, 0 for the usual one. Raises OSError where the kernel has no such thing."""
    nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    attributes = ctypes.create_string_buffer(struct.pack("IIQiIQQQ", 48, 0, 0, nice, 0, nanoseconds, 0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SCHED_SETATTR[os.uname().machine], 0, attributes, 0):
        raise OSError(ctypes.get_errno(), "sched_setattr")


def work(model: str, pairs: int) -> None:
    """One rank: rank 0 prints the seconds of the slowest rank by way, as it is and with the way."""
    rank = join()
    arm = Arm("dblp", model)
    ways = Ways(arm.group.session.engine)
    for _ in range(WARM_UP):
        arm.run("step")
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for turn in range(pairs):
        for way in WAYS:
            taken = [0.0, 0.0]
            for other in (False, True) if turn % 2 else (True, False):
                ways.put(way, other)
                slowest = torch.tensor([arm.run("step").taken], dtype=torch.float64)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                taken[other] = slowest.item()
            ways.put(way, False)
            times[way].append((taken[0], taken[1]))
    if rank == 0:
        sys.stdout.write(json.dumps(times) + "\n")
    dist.destroy_process_group()


def records_of(model: str, world_size: int, told: dict[str, Any]) -> list[dict[str, Any]]:
    """The ratios of each way."""
    records = []
    for way, pairs in told.items():
        ratios = [as_it_is / other for as_it_is, other in pairs]
        quartiles = statistics.quantiles(ratios, n=4)
        records.append(
            {
                "model": model,
                "ranks": world_size,
                "way": way,
                "pairs": len(ratios),
                "ratio_quartiles": quartiles,
            }
        )
    return records


def show(records: list[dict[str, Any]], console: Console) -> None:
    """Print a table."""
    table = Table(title="A DDP step on dblp: as it is / with the engine run another way")
    for heading in ("model", "ranks", "way", "pairs", "ratio (quartiles)"):
        table.add_column(heading)
    for record in records:
        low, middle, high = record["ratio_quartiles"]
        cells = [str(record[name]) for name in ("model", "ranks", "way", "pairs")]
        table.add_row(*cells, f"{middle:.2f} ({low:.2f} .. {high:.2f})")
    console.print(table)
    facts = host_facts()
    console.print(f"{facts['cores']} cores, {facts['cpu']}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="cnn,wide")
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.models.split(",")
    if unknown := set(names) - set(MODELS):
        parser.error(f"--models: {', '.join(sorted(unknown))}: there are {', '.join(MODELS)}")
    if options.pairs < 2:
        parser.error("--pairs: quartiles need two")
    if options.worker:
        work(names[0], options.pairs)
        return
    records = []
    for name in names:
        worker = [
            "-m",
            "tests.benchmarks.ddp_engine",
            "--worker",
            "--models",
            name,
            "--pairs",
            str(options.pairs),
        ]
        for world_size in parse_ranks(options.ranks):
            records += records_of(name, world_size, launch(worker, world_size))
    show(records, Console(width=110))
    if options.json is not None:
        write_json(options.json, document("ddp_engine", records, pairs=options.pairs))


if __name__ == "__main__":
    main()
