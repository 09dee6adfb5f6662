"""What compression does to whole trainings: the test score at the end, and on the way there, against the workers' mean.

    python -m tests.benchmarks.compressed_accuracy --data fashion-mnist --epochs 8 --seeds 3 --json FILE \\
        --methods "none; dgc(0.001,indices=delta,nesterov=true,warmup=4)"
    python -m tests.benchmarks.compressed_accuracy --model transformer --optimizer sgd --epochs 12 --json FILE \\
        --methods "none; dgc(0.001,indices=delta,nesterov=true,warmup=1,schedule=0.25)"
    python -m tests.benchmarks.compressed_accuracy --epochs 16 --seeds 3 --methods "topk(0.01)" --loss 0.1 --budget 0.3

Four workers in one process train for real; their rounds run on a network without protocol (tests/benchmarks/ideal_network.py),
since what a lossless network does has no effect on a score. With ``--loss`` and ``--budget`` they run between real endpoints in
virtual time, bounded, on a network that loses; only the score at the end is told then. An epoch of a warm-up is one of the
data, unless ``--epoch-steps`` says otherwise. With several rates, ``--lr 0.05,0.1``, all are compared with dense training at its
best one. FILE is written after each training, and a training that it has under the same options is not repeated: long runs may
be cut into pieces (``--at-most`` trainings each). "Smaller by" is over the whole training, and in its last step, where no
warm-up counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from dblp.cli.bench.compression_plan import CompressionPlan
from dblp.cli.bench.compression_training import Trainings
from dblp.cli.host import document, write_json
from dblp.cli.options import parse_choice, parse_list, parse_seeds
from dblp.cli.train.data import load
from dblp.cli.train.optimizers import MOMENTUM
from dblp.cli.train.recipes import DATA_NAMES, MODEL_NAMES, OPTIMIZERS, default_data, default_model, recipe_of
from dblp.cli.train.samples import Samples, Score
from dblp.cli.train.standin import StandIn, train
from dblp.collectives.compression.dgc import DGC
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.compression.rounds import Totals
from dblp.units import format_seconds
from tests.benchmarks.compressed_workers import CompressedWorkers, Star, parts_of

WORKERS = 4
DENSE = "none"
METHODS = "none; dgc(0.001,indices=delta,nesterov=true,warmup=4)"
_STAR = Star(rate_bps=1e9, ideal=True)
KEYS = (
    "data",
    "model",
    "optimizer",
    "lr",
    "batch",
    "steps",
    "epoch_steps",
    "method",
    "seed",
    "loss",
    "budget",
)
"""What makes two trainings the same."""
Record = dict[str, Any]


def experiment(wanted: Mapping[str, Any], samples: Samples, tests: int) -> Record:
    """One training, tested ``tests`` times on the way."""
    method, model, seed, steps = (wanted[key] for key in ("method", "model", "seed", "steps"))
    workers = CompressedWorkers(
        method, _STAR, parts_of(samples.build(model, seed=seed)),
        ranks=WORKERS, compute_s=0.0, epoch_steps=wanted["epoch_steps"], seed=seed,
    )  # fmt: skip
    known = parse_compression(method)
    plan = StandIn(
        model=model, optimizer=wanted["optimizer"], lr=wanted["lr"], batch=wanted["batch"], steps=steps, seed=seed,
        workers=WORKERS, momentum=0.0 if isinstance(known, DGC) and known.momentum else MOMENTUM,
    )  # fmt: skip
    course: list[tuple[int, Score]] = []
    every, before = max(steps // tests, 1), [workers.totals]

    def watch(step: int, _: Any, score: Any) -> None:
        if step % every == 0 and step < steps:
            course.append((step, score()))
        if step == steps - 1:
            before.append(workers.totals)

    last = train(plan, samples, workers.all_reduce, watch)
    workers.close()
    course.append((steps, last))
    return dict(wanted) | {
        "test_accuracy": last.accuracy,
        "test_perplexity": last.perplexity,
        "ratio_size": workers.totals.ratio,
        "ratio_last": _ratio_since(before[-1], workers.totals),
        "tested_at": [step for step, _ in course],
        "accuracies": [score.accuracy for _, score in course],
        "perplexities": [score.perplexity for _, score in course],
    }


def _ratio_since(before: Totals, now: Totals) -> float:
    return (now.dense_bytes - before.dense_bytes) / max(now.payload_bytes - before.payload_bytes, 1)


def lossy(wanted: Mapping[str, Any]) -> Record:
    """One training on a network that loses."""
    same = ("data", "model", "optimizer", "lr", "batch", "steps", "epoch_steps", "loss", "budget")
    plan = CompressionPlan(ranks=WORKERS, **{key: wanted[key] for key in same})
    trained = Trainings(plan).run(wanted["method"], wanted["seed"])
    return dict(wanted) | {
        "test_accuracy": trained.accuracy,
        "test_perplexity": trained.perplexity,
        "ratio_size": trained.ratio,
        "missing_share": trained.missing_share,
    }


def table(found: Sequence[Record]) -> Table:
    """One row a method and rate: means over the seeds, and what they differ by from the mean of the dense trainings with these
    seeds, each at its best rate."""
    text = any(record["test_perplexity"] is not None for record in found)
    what = "perplexity" if text else "accuracy (%)"
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    headings = ("method", "rate", "seeds", what, "each", "against none", "smaller by", "in the last step")
    for heading in headings:
        shown.add_column(heading, justify="left" if heading == "method" else "right", overflow="fold")
    best: dict[int, float] = {}
    for record in (r for r in found if r["method"] == DENSE):
        seed, score = record["seed"], _scored(record, text)
        best[seed] = (min if text else max)(best.get(seed, score), score)
    for method, lr, loss in dict.fromkeys((r["method"], r["lr"], r["loss"]) for r in found):
        same = [r for r in found if (r["method"], r["lr"], r["loss"]) == (method, lr, loss)]
        mine = {r["seed"]: _scored(r, text) for r in same}
        dense = [best[seed] for seed in mine if seed in best]
        score = float(np.mean(list(mine.values())))
        ratio = float(np.mean([r["ratio_size"] for r in same]))
        apart = ""
        if len(dense) == len(mine):
            base = float(np.mean(dense))
            apart = f"{score / base - 1.0:+.2%}" if text else f"{score - base:+.2f} points"
        each = ", ".join(f"{value:.2f}" for value in mine.values())
        shown.add_row(
            f"{method}, {loss:.0%} lost" if loss else method,
            f"{lr:g}",
            str(len(mine)),
            f"{score:.2f}",
            each,
            apart,
            f"{ratio:.1f}",
            f"{same[0]['ratio_last']:.1f}" if "ratio_last" in same[0] else "",
        )
    return shown


def _scored(record: Mapping[str, Any], text: bool) -> float:
    return float(record["test_perplexity"]) if text else 100.0 * float(record["test_accuracy"])


def _done(path: Path | None) -> list[Record]:
    if path is None or not path.exists():
        return []
    records: list[Record] = json.loads(path.read_text())["records"]
    return records


def _wanted(options: argparse.Namespace, samples: Samples) -> Iterable[Record]:
    recipe = recipe_of(options.data, options.model)
    optimizer = parse_choice("--optimizer", options.optimizer or recipe.optimizer, OPTIMIZERS)
    batch = options.batch or recipe.batch
    epoch = len(samples) // batch
    rates = parse_list("--lr", options.lr, float, "a rate") if options.lr else [recipe.lr[optimizer]]
    methods = list(filter(None, map(str.strip, options.methods.split(";"))))
    for seed in parse_seeds(options.seeds):
        for method, lr in product(methods, rates):
            yield {
                "data": options.data,
                "model": options.model,
                "optimizer": optimizer,
                "lr": lr,
                "batch": batch,
                "steps": options.steps or round(options.epochs * epoch),
                "epoch_steps": epoch if method == DENSE else options.epoch_steps or epoch,
                "method": method,
                "seed": seed,
                "loss": 0.0 if method == DENSE else options.loss,
                "budget": 0.0 if method == DENSE else options.budget,
            }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default=METHODS, help="with ; between them")
    parser.add_argument("--data")
    parser.add_argument("--model")
    parser.add_argument("--optimizer")
    parser.add_argument("--lr", help="peaks of the learning rate, with commas; the recipe's by default")
    parser.add_argument("--batch", type=int, help="over all workers; the recipe's by default")
    parser.add_argument("--epochs", type=float, default=8)
    parser.add_argument("--steps", type=int, help="instead of --epochs")
    parser.add_argument("--epoch-steps", type=int, help="that a warm-up counts; the data's by default")
    parser.add_argument("--loss", type=float, default=0.0, help="share of datagrams that the network loses")
    parser.add_argument(
        "--budget", type=float, default=0.0, help="loss budget of the rounds on such a network"
    )
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--tests", type=int, default=8, help="in a training")
    parser.add_argument("--at-most", type=int, help="trainings; the rest is left to another call")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.model = parse_choice("--model", options.model or default_model(options.data), MODEL_NAMES)
    options.data = parse_choice("--data", options.data or default_data(options.model), DATA_NAMES)
    return options


def main() -> None:
    """Run what is not there yet."""
    options = _options()
    torch.set_num_threads(1)
    console, samples = Console(width=150), Samples(load(options.data, None))
    found = _done(options.json)
    fresh = 0
    for wanted in _wanted(options, samples):
        if any(all(record[key] == wanted[key] for key in KEYS) for record in found):
            continue
        if fresh == options.at_most:
            console.print("more is left for another call")
            break
        start = time.perf_counter()
        found.append(
            record := lossy(wanted) if wanted["loss"] else experiment(wanted, samples, options.tests)
        )
        fresh += 1
        score = record["test_perplexity"] or record["test_accuracy"]
        took = format_seconds(time.perf_counter() - start)
        console.print(
            f"seed {wanted['seed']}, {wanted['method']}, rate {wanted['lr']:g}, {wanted['steps']} steps: {score:.4f} ({took})",
            highlight=False,
        )
        if options.json is not None:
            write_json(options.json, document("compressed_accuracy", found))
    console.print(table(found))


if __name__ == "__main__":
    main()
