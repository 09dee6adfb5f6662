"""The time of a DDP training step on dblp, exact, against gloo, on a clean loopback, and how much of it hides.

    python -m tests.benchmarks.ddp_step [--models cnn,wide] [--ranks 2,4] [--steps 30] [--json FILE]

Models: ``cnn``, that of ``dblp train`` on 28 x 28 images, batch 32; ``wide``, six layers of 2048 x 2048, 25 million parameters,
batch 16. Both arms train in the same processes, step by step in turn, each begun at a barrier; who goes first changes from step
to step. A step is forward, backward and optimiser; the slowest rank counts. Beside it, in turn as well: ``compute``, the same
step without communication (``no_sync``), and ``communicate``, all-reduces of the same bytes, in DDP's buckets, all under way at
once.

ratio: median of gloo's step over dblp's of the same turn, above 1 dblp is faster. hidden: the share of ``communicate`` that a
step does not take in addition to ``compute``. Where ranks outnumber the cores, compute and communication compete for them, so
less can hide. No attachment: every collective is exact. One thread a rank.
"""

# mypy: disable-error-code="attr-defined"
# torch.distributed's stubs miss names that it exports.

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from dblp.cli.host import document, host_facts, write_json
from dblp.cli.options import parse_ranks
from dblp.cli.train.models import build
from dblp.units import format_seconds

ARMS = ("gloo", "dblp")
KINDS = ("step", "compute", "communicate")
WARM_UP = 3
"""Turns that do not count: DDP makes its buckets anew after the first."""
BUCKET_ELEMENTS = 25 * 1024 * 1024 // 4
"""DDP's usual bucket, in float32 elements."""
Times = dict[str, dict[str, list[float]]]
"""Seconds by kind and arm, one a turn."""


def _wide() -> tuple[torch.nn.Module, torch.Tensor]:
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers[:-1]), torch.randn(16, 2048)


def _cnn() -> tuple[torch.nn.Module, torch.Tensor]:
    return build("cnn", (28, 28), 10, seed=1), torch.randn(32, 1, 28, 28)


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, torch.Tensor]]] = {"cnn": _cnn, "wide": _wide}


class Arm:
    """One backend's model in one process."""

    def __init__(self, backend: str, model: str) -> None:
        torch.manual_seed(1)
        module, self._inputs = MODELS[model]()
        self._group = dist.new_group(backend=backend, timeout=timedelta(seconds=120))
        self._model = DistributedDataParallel(module, process_group=self._group)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4)
        self.parameters = sum(parameter.numel() for parameter in module.parameters())
        self._buckets = list(torch.zeros(self.parameters).split(BUCKET_ELEMENTS))

    def run(self, kind: str) -> float:
        """Seconds that one turn took on this rank."""
        dist.barrier()
        began = time.perf_counter()
        {"step": self._step, "compute": self._compute, "communicate": self._communicate}[kind]()
        return time.perf_counter() - began

    def _step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._inputs).square().mean().backward()
        self._optimizer.step()

    def _compute(self) -> None:
        with self._model.no_sync():
            self._step()

    def _communicate(self) -> None:
        works = [dist.all_reduce(bucket, group=self._group, async_op=True) for bucket in self._buckets]
        for work in works:
            work.wait()


def work(model: str, steps: int) -> None:
    """One rank: prints what the slowest rank took for each turn, on rank 0."""
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STEP_STORE"], world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    arms = {backend: Arm(backend, model) for backend in ARMS}
    times: Times = {kind: {backend: [] for backend in ARMS} for kind in KINDS}
    for turn in range(WARM_UP + steps):
        for kind in KINDS:
            for backend in ARMS if turn % 2 else reversed(ARMS):
                taken = arms[backend].run(kind)
                if turn >= WARM_UP:
                    times[kind][backend].append(taken)
    for by_arm in times.values():
        for backend, taken_here in by_arm.items():
            slowest = torch.tensor(taken_here)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            by_arm[backend] = slowest.tolist()
    if rank == 0:
        sys.stdout.write(json.dumps({"parameters": arms["dblp"].parameters, "times": times}) + "\n")
    dist.destroy_process_group()


def measure(model: str, world_size: int, steps: int) -> tuple[int, Times]:
    """Parameters of the model, and the times of the slowest rank. Raises SystemExit if a rank fails."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "tests.benchmarks.ddp_step", "--worker", "--models", model]
        common = {"WORLD_SIZE": str(world_size), "STEP_STORE": f"{folder}/store"}
        ranks = [
            subprocess.Popen(
                [*command, "--steps", str(steps)],
                env=os.environ | common | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        for rank in ranks:
            stack.callback(rank.kill)
        outputs = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"ranks ended with {[rank.returncode for rank in ranks]}")
    told = json.loads(outputs[0])
    return told["parameters"], told["times"]


def record_of(model: str, world_size: int, parameters: int, times: Times) -> dict[str, Any]:
    """Medians, the paired ratio, and what hides behind the computation."""
    medians = {
        kind: {arm: statistics.median(taken) for arm, taken in by_arm.items()}
        for kind, by_arm in times.items()
    }
    pairs = zip(times["step"]["gloo"], times["step"]["dblp"], strict=True)
    ratios = [gloo / dblp for gloo, dblp in pairs]
    hidden = {
        arm: 1.0 - (medians["step"][arm] - medians["compute"][arm]) / medians["communicate"][arm]
        for arm in ARMS
    }
    return {
        "model": model,
        "ranks": world_size,
        "parameters": parameters,
        "steps": len(ratios),
        "medians": medians,
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios,
        "hidden": hidden,
    }


def show(records: list[dict[str, Any]], console: Console) -> None:
    """Print a table."""
    table = Table(title="A DDP step, exact, on loopback: medians of the slowest rank")
    for heading in ("model", "parameters", "ranks", "arm", *KINDS, "hidden", "gloo / dblp (quartiles)"):
        table.add_column(heading, justify="right")
    for record in records:
        for arm in ARMS:
            low, _, high = (record["ratio_quartiles"] * 3)[:3]
            ratio = f"{record['ratio']:.2f} ({low:.2f} .. {high:.2f})" if arm == "dblp" else ""
            medians = [format_seconds(record["medians"][kind][arm]) for kind in KINDS]
            first = (record["model"], f"{record['parameters'] / 1e6:.1f} M", str(record["ranks"]))
            hidden = f"{record['hidden'][arm]:.0%}"
            table.add_row(*(first if arm == "gloo" else ("", "", "")), arm, *medians, hidden, ratio)
    console.print(table)
    facts = host_facts()
    console.print(
        f"{facts['cores']} cores, {facts['cpu']}; TCP congestion control {facts['tcp_congestion_control']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="cnn,wide")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.models.split(",")
    if unknown := set(names) - set(MODELS):
        parser.error(f"--models: {', '.join(sorted(unknown))}: there are {', '.join(MODELS)}")
    if options.worker:
        work(names[0], options.steps)
        return
    records = [
        record_of(name, world_size, *measure(name, world_size, options.steps))
        for name in names
        for world_size in parse_ranks(options.ranks)
    ]
    show(records, Console(width=150))
    if options.json is not None:
        write_json(options.json, document("ddp_step", records, steps=options.steps))


if __name__ == "__main__":
    main()
