"""The time of a DDP training step on dblp, exact, against gloo, on a clean loopback, and how much of it hides.

    python -m tests.benchmarks.ddp_step [--models cnn,wide] [--ranks 2,4] [--steps 30] [--json FILE]

Models: ``cnn``, that of ``dblp train`` on 28 x 28 images, batch 32; ``wide``, six layers of 2048 x 2048, 25 million parameters,
batch 16. Both arms train in the same processes, step by step in turn, each begun at a barrier; who goes first changes from step
to step. A step is forward, backward and optimiser; the slowest rank counts. Beside it, in turn as well: ``compute``, the same
step without communication (``no_sync``), and ``communicate``, all-reduces of the same bytes, in DDP's buckets, all under way at
once.

ratio: median of gloo's step over dblp's of the same turn, above 1 dblp is faster. processor: processor time of all
ranks' threads for a ``step``, above that for ``compute``. starved: of the time in which a rank's threads beside the
main one (the engine, or gloo's) are to run in a ``step``, the share in which they wait for a processor. hidden: the
share of ``communicate`` that a step does not take in addition to ``compute``. Where ranks outnumber the cores,
compute and communication compete for them, so less can hide.

overlap: of a further step, ``watched``, in which a communication hook notes when each bucket is ready and when its
all-reduce has ended. The time in which some all-reduce is under way is communication; what of it lies before the last
bucket is ready, while gradients are still computed, is behind the backward pass, the rest is waited for. The share of
the former is printed, of the slowest rank in each turn, and the medians of rank 0's instants, from the start of the
backward pass. No attachment: every collective is exact. One thread a rank.
"""

# mypy: disable-error-code="attr-defined"
# torch.distributed's stubs miss names that it exports.

# No ``from __future__ import annotations``: DDP compares a hook's annotations with the types themselves.

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import GradBucket  # the class that DDP compares annotations with
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dblp.cli.host import document, host_facts, write_json
from dblp.cli.options import parse_ranks
from dblp.cli.train.models import build
from dblp.units import format_seconds

ARMS = ("gloo", "dblp")
KINDS = ("step", "compute", "watched", "communicate")
COLUMNS = ("step", "compute", "communicate")
"""Of the table, among the kinds."""
WARM_UP = 3
"""Turns that do not count: DDP makes its buckets anew after the first."""
Times = dict[str, dict[str, list[float]]]
"""Seconds by kind and arm, one a turn."""
Instants = list[tuple[float, float]]
"""Of each bucket, in order: when it was ready, and when its all-reduce had ended; seconds from the start of the backward pass."""


def _wide() -> tuple[torch.nn.Module, torch.Tensor]:
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers[:-1]), torch.randn(16, 2048)


def _cnn() -> tuple[torch.nn.Module, torch.Tensor]:
    return build("cnn", (28, 28), 10, seed=1), torch.randn(32, 1, 28, 28)


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, torch.Tensor]]] = {"cnn": _cnn, "wide": _wide}


class Cost(NamedTuple):
    """What one turn took on one rank, in seconds."""

    taken: float
    """On the clock."""
    processor: float
    """Of all its threads, until all ranks had ended the turn."""
    ran: float
    """Of those but the main one: the engine, or gloo's."""
    waited: float
    """In which those were to run, but had no processor."""


def beside_main() -> tuple[float, float]:
    """Seconds that the threads beside the main one have run and have waited for a processor; 0 where the kernel does not say."""
    ran = waited = 0
    for task in Path("/proc/self/task").iterdir():
        if task.name != str(os.getpid()):
            with contextlib.suppress(OSError):  # a thread that has just ended
                run_ns, wait_ns, _ = (task / "schedstat").read_text().split()
                ran, waited = ran + int(run_ns), waited + int(wait_ns)
    return ran * 1e-9, waited * 1e-9


class Watch:
    """Notes the instants of a backward pass's buckets, from DDP's communication hook."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.sizes: list[int] = []
        """Elements of the last backward pass's buckets."""
        self._ready: list[float] = []
        self._sizes: list[int] = []
        self._ended: dict[int, float] = {}  # by place in the order; completions come on several threads

    def hook(self, _: object, bucket: GradBucket) -> Future[torch.Tensor]:
        """What DDP does by itself: the average of the bucket."""
        place = len(self._ready)
        self._ready.append(time.perf_counter())
        self._sizes.append(bucket.buffer().numel())
        work = dist.all_reduce(bucket.buffer().div_(self._group.size()), group=self._group, async_op=True)

        def ended(future: Future[list[torch.Tensor]]) -> torch.Tensor:
            self._ended[place] = time.perf_counter()
            return future.value()[0]

        chained: Future[torch.Tensor] = work.get_future().then(ended)
        return chained

    def take(self, began: float) -> Instants:
        """The instants since the last call, from ``began`` on; once the backward pass has returned."""
        instants = [(ready - began, self._ended[place] - began) for place, ready in enumerate(self._ready)]
        self.sizes = self._sizes
        self._ready, self._ended, self._sizes = [], {}, []
        return instants


class Trainee:
    """A model under DDP and its optimizer."""

    def __init__(self, model: str, group: dist.ProcessGroup) -> None:
        torch.manual_seed(1)
        module, self._inputs = MODELS[model]()
        self.model = DistributedDataParallel(module, process_group=group)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)

    def step(self) -> float:
        """Train on the batch; returns when the backward pass began."""
        self._optimizer.zero_grad()
        loss = self.model(self._inputs).square().mean()
        began = time.perf_counter()
        loss.backward()
        self._optimizer.step()
        return began


class Arm:
    """One backend's models in one process."""

    def __init__(self, backend: str, model: str) -> None:
        self.group = dist.new_group(backend=backend, timeout=timedelta(seconds=120))
        self._trainee, self._watched_trainee = (Trainee(model, self.group) for _ in range(2))
        self._watch = Watch(self.group)
        self._watched_trainee.model.register_comm_hook(None, self._watch.hook)
        self.parameters = sum(parameter.numel() for parameter in self._trainee.model.parameters())
        self._flat = torch.zeros(self.parameters)
        self.instants: list[Instants] = []
        """Of each ``watched`` so far."""

    def run(self, kind: str) -> Cost:
        """One turn of this rank."""
        dist.barrier()
        ran, waited = beside_main()
        began, began_processor = time.perf_counter(), time.process_time()
        getattr(self, f"_{kind}")()
        taken = time.perf_counter() - began
        ran_then, waited_then = beside_main()
        dist.barrier()  # what is acknowledged after a turn belongs to it
        processor = time.process_time() - began_processor
        return Cost(taken, processor, max(0.0, ran_then - ran), max(0.0, waited_then - waited))

    def _step(self) -> None:
        self._trainee.step()

    def _compute(self) -> None:
        with self._trainee.model.no_sync():
            self._trainee.step()

    def _communicate(self) -> None:
        buckets = self._flat.split(self._watch.sizes)
        works = [dist.all_reduce(bucket, group=self.group, async_op=True) for bucket in buckets]
        for work in works:
            work.wait()

    def _watched(self) -> None:
        began = self._watched_trainee.step()
        self.instants.append(self._watch.take(began))


def overlap(instants: Instants) -> float:
    """The share of the time of communication, during which an all-reduce is under way, that is over when the last bucket is
    ready."""
    last_ready = instants[-1][0]
    communicated = hidden = 0.0
    reached = float("-inf")
    for ready, ended in sorted(instants):
        start = max(ready, reached)
        if ended > start:
            communicated += ended - start
            hidden += max(0.0, min(ended, last_ready) - start)
            reached = ended
    return hidden / communicated


def work(model: str, steps: int) -> None:
    """One rank: rank 0 prints what the slowest rank took for each turn, the processor time of all, and the overlap."""
    rank = join()
    arms = {backend: Arm(backend, model) for backend in ARMS}
    costs: dict[str, dict[str, list[Cost]]] = {kind: {backend: [] for backend in ARMS} for kind in KINDS}
    for turn in range(WARM_UP + steps):
        for kind in KINDS:
            for backend in ARMS if turn % 2 else reversed(ARMS):
                cost = arms[backend].run(kind)
                if turn >= WARM_UP:
                    costs[kind][backend].append(cost)
    instants = {backend: arm.instants[WARM_UP:] for backend, arm in arms.items()}
    told = {
        "parameters": arms["dblp"].parameters,
        "times": _reduced(_part(costs, "taken"), dist.ReduceOp.MAX),
        **{name: _reduced(_part(costs, name), dist.ReduceOp.SUM) for name in ("processor", "ran", "waited")},
        "overlap": _reduced(
            {"": {backend: list(map(overlap, passes)) for backend, passes in instants.items()}},
            dist.ReduceOp.MIN,
        )[""],
        "instants": {
            backend: np.median(np.array(passes), axis=0).tolist() for backend, passes in instants.items()
        },
    }
    if rank == 0:
        sys.stdout.write(json.dumps(told) + "\n")
    dist.destroy_process_group()


def _part(costs: dict[str, dict[str, list[Cost]]], name: str) -> Times:
    return {
        kind: {backend: [getattr(cost, name) for cost in here] for backend, here in by_arm.items()}
        for kind, by_arm in costs.items()
    }


def _reduced(by_kind: Times, op: Any) -> Times:
    """Each turn's number over all ranks."""
    result: Times = {}
    for kind, by_arm in by_kind.items():
        result[kind] = {}
        for backend, here in by_arm.items():
            dist.all_reduce(numbers := torch.tensor(here, dtype=torch.float64), op)
            result[kind][backend] = numbers.tolist()
    return result


def measure(model: str, world_size: int, steps: int) -> dict[str, Any]:
    """What ``work`` told. Raises SystemExit if a rank fails."""
    worker = ["-m", "tests.benchmarks.ddp_step", "--worker", "--models", model, "--steps", str(steps)]
    return launch(worker, world_size)


def launch(worker: Sequence[str], world_size: int) -> dict[str, Any]:
    """Start the ranks, which meet over the file STEP_STORE; what rank 0 printed as JSON. Raises SystemExit if a rank fails."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        common = {"WORLD_SIZE": str(world_size), "STEP_STORE": f"{folder}/store"}
        ranks = [
            subprocess.Popen(
                [sys.executable, *worker],
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
    told: dict[str, Any] = json.loads(outputs[0])
    return told


def join() -> int:
    """In a rank: make the default group, of gloo; returns the rank."""
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STEP_STORE"], world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return rank


def record_of(model: str, world_size: int, told: dict[str, Any]) -> dict[str, Any]:
    """Medians, the paired ratio, and what hides behind the computation."""
    times: Times = told["times"]
    medians = _medians(times)
    pairs = zip(times["step"]["gloo"], times["step"]["dblp"], strict=True)
    ratios = [gloo / dblp for gloo, dblp in pairs]
    hidden = {
        arm: 1.0 - (medians["step"][arm] - medians["compute"][arm]) / medians["communicate"][arm]
        for arm in ARMS
    }
    return {
        "model": model,
        "ranks": world_size,
        "parameters": told["parameters"],
        "steps": len(ratios),
        "medians": medians,
        **{name: _medians(told[name]) for name in ("processor", "ran", "waited")},
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios,
        "hidden": hidden,
        "overlap": {arm: statistics.median(told["overlap"][arm]) for arm in ARMS},
        "instants": told["instants"],
    }


def _medians(by_kind: Times) -> dict[str, dict[str, float]]:
    return {
        kind: {arm: statistics.median(numbers) for arm, numbers in by_arm.items()}
        for kind, by_arm in by_kind.items()
    }


def show(records: list[dict[str, Any]], console: Console) -> None:
    """Print the tables."""
    table = Table(title="A DDP step, exact, on loopback: medians of the slowest rank")
    columns = ("model", "parameters", "ranks", "arm", *COLUMNS, "hidden", "overlap", "processor", "starved")
    for heading in (*columns, "gloo / dblp (quartiles)"):
        table.add_column(heading, justify="right")
    for record in records:
        for arm in ARMS:
            low, _, high = (record["ratio_quartiles"] * 3)[:3]
            ratio = f"{record['ratio']:.2f} ({low:.2f} .. {high:.2f})" if arm == "dblp" else ""
            medians = [format_seconds(record["medians"][kind][arm]) for kind in COLUMNS]
            first = (record["model"], f"{record['parameters'] / 1e6:.1f} M", str(record["ranks"]))
            shares = [f"{record[name][arm]:.0%}" for name in ("hidden", "overlap")]
            processor = format_seconds(record["processor"]["step"][arm] - record["processor"]["compute"][arm])
            ran, waited = (record[name]["step"][arm] for name in ("ran", "waited"))
            starved = f"{waited / (ran + waited):.0%}" if ran else "-"
            cells = (arm, *medians, *shares, processor, starved, ratio)
            table.add_row(*(first if arm == "gloo" else ("", "", "")), *cells)
    console.print(table)
    for record in records:
        for arm in ARMS:
            buckets = ", ".join(
                f"{1e3 * ready:.1f} to {1e3 * ended:.1f}" for ready, ended in record["instants"][arm]
            )
            console.print(
                f"{record['model']}, {record['ranks']} ranks, {arm}: buckets of rank 0, ms of backward: {buckets}"
            )
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
        record_of(name, world_size, measure(name, world_size, options.steps))
        for name in names
        for world_size in parse_ranks(options.ranks)
    ]
    show(records, Console(width=150))
    if options.json is not None:
        write_json(options.json, document("ddp_step", records, steps=options.steps))


if __name__ == "__main__":
    main()
