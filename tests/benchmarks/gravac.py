"""Training time to equal accuracy: GraVAC against static compression factors and Accordion.

    python -m tests.benchmarks.gravac [--models resnet,cnn,mlp] [--seeds 3] [--epochs 32] [--json FILE]
    python -m tests.benchmarks.gravac --arms "topk(0.01);gravac;gravac(theta_max=1000,gain=residual)"
    python -m tests.benchmarks.gravac --models mlp --data fashion-mnist --label-noise 0 --seeds 1 --epochs 8 --epoch-steps 58 \\
        --gravac theta_max=1000,epsilon=0.5 --arms "gravac;none"

Four workers train for real on digits (the transformer on text), or on ``--data``. Every method's rounds run between four ranks on
a network without protocol in virtual time (tests/benchmarks/ideal_network.py), on which a model's own gradient takes
``--transfer`` to cross one link; computing takes ``--compute`` of that. Time does not depend on this machine. Of images, a share
of the training labels is drawn at random, since digits are learned by heart within some epochs. An arm is a method; ``gravac``
alone has the options of ``--gravac``. FILE is written after each training; one that it has is not repeated, so that long runs may
be cut into pieces.

The accuracy to reach is what the arm with the worst best test reaches; the time to it is interpolated between tests. "Best
static" is the static factor that is quickest to it, "worst static" the slowest. The paper (arXiv 2305.12201) has 4.32, 1.95 and
6.67 times against a static factor that it does not name, and 1.94 to 5.63 against other adaptive schemes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from dblp.cli.host import document, write_json
from dblp.cli.options import parse_choices, parse_seeds
from dblp.cli.train.recipes import DATA_NAMES, MODEL_NAMES, default_data, recipe_of
from dblp.cli.train.samples import Samples, Score
from dblp.cli.train.standin import StandIn, train
from dblp.errors import ConfigError
from dblp.units import format_seconds
from tests.benchmarks.compressed_workers import CompressedWorkers, Star, parts_of
from tests.benchmarks.time_to_accuracy import _data

WORKERS = 4
STATIC = ("topk(0.1)", "topk(0.01)", "topk(0.001)")
GRAVAC, ACCORDION, DENSE = "gravac", "accordion", "none"
SAME = ("data", "epochs", "epoch_steps", "gravac", "transfer", "compute", "delay", "label_noise")
"""Options that trainings in one file have in common."""
PAPER = "the paper: 4.32x, 1.95x, 6.67x against a static factor, 1.94x to 5.63x against adaptive schemes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training."""

    arm: str
    model: str
    seed: int
    seconds: npt.NDArray[np.float64]
    """Virtual time at each test."""
    accuracies: npt.NDArray[np.float64]
    perplexity: float | None
    steps: int
    figures: Mapping[str, float]
    thetas: tuple[float, ...]
    """Of GraVAC, step by step."""
    ratio: float
    """Gradient size over what was sent, over the whole training."""

    @property
    def best(self) -> float:
        """Best test."""
        return float(self.accuracies.max())

    def time_to(self, accuracy: float) -> float:
        """When the best test so far reaches it, straight between tests; NaN if never."""
        best = np.concatenate([[0.0], np.maximum.accumulate(self.accuracies)])
        times = np.concatenate([[0.0], self.seconds])
        there = int(np.argmax(best >= accuracy))
        if best[there] < accuracy:
            return float("nan")
        share = (accuracy - best[there - 1]) / (best[there] - best[there - 1])
        return float(times[there - 1] + share * (times[there] - times[there - 1]))


def experiment(options: argparse.Namespace, samples: Samples, arm: str, model: str, seed: int) -> Run:
    """Train one arm."""
    recipe = recipe_of(options.data or default_data(model), model)
    parts, epoch_steps = parts_of(samples.build(model, seed=seed)), options.epoch_steps
    star = Star(rate_bps=8.0 * 4 * parts.size / options.transfer, delay_s=options.delay / 4, ideal=True)
    method = f"{GRAVAC}({options.gravac})" if arm == GRAVAC else arm
    workers = CompressedWorkers(
        method, star, parts, ranks=WORKERS, compute_s=options.compute * options.transfer,
        epoch_steps=epoch_steps, seed=seed,
    )  # fmt: skip
    plan = StandIn(
        model=model, optimizer=recipe.optimizer, lr=recipe.lr[recipe.optimizer],
        batch=recipe.batch, steps=options.epochs * epoch_steps, seed=seed, workers=WORKERS,
    )  # fmt: skip
    tests: list[tuple[float, Score]] = []

    def watch(step: int, parameters: npt.NDArray[np.float32], score: Any) -> None:
        if step % epoch_steps == 0:
            tests.append((workers.seconds, score()))

    train(plan, samples, workers.all_reduce, watch)
    workers.close()
    return Run(
        arm=arm,
        model=model,
        seed=seed,
        seconds=np.array([seconds for seconds, _ in tests]),
        accuracies=np.array([score.accuracy for _, score in tests]),
        perplexity=tests[-1][1].perplexity,
        steps=plan.steps,
        figures=workers.figures[-1],
        thetas=tuple(found.get("theta", 0.0) for found in workers.figures) if _is_gravac(arm) else (),
        ratio=workers.totals.ratio,
    )


def _is_gravac(arm: str) -> bool:
    return arm.startswith(GRAVAC)


def records(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Flat records, one for each run; runs of a model and seed belong together."""
    found = []
    for run in runs:
        same = [other for other in runs if (other.model, other.seed) == (run.model, run.seed)]
        target = min(other.best for other in same)
        found.append(
            {
                "model": run.model,
                "method": run.arm,
                "seed": run.seed,
                "steps": run.steps,
                "test_accuracy": float(run.accuracies[-1]),
                "best_accuracy": run.best,
                "test_perplexity": run.perplexity,
                "target_accuracy": target,
                "to_target_s": run.time_to(target),
                "total_s": float(run.seconds[-1]),
                "ratio": run.ratio,
                "search_share": run.figures.get("search_steps", 0.0) / run.steps,
                "theta": run.figures.get("theta"),
                "figures": dict(run.figures),
                "thetas": list(run.thetas),
                "seconds": run.seconds.tolist(),
                "accuracies": run.accuracies.tolist(),
            }
        )
    return found


def restored(record: Mapping[str, Any]) -> Run:
    """The run that a record tells of."""
    return Run(
        arm=record["method"],
        model=record["model"],
        seed=record["seed"],
        seconds=np.array(record["seconds"]),
        accuracies=np.array(record["accuracies"]),
        perplexity=record["test_perplexity"],
        steps=record["steps"],
        figures=record["figures"],
        thetas=tuple(record["thetas"]),
        ratio=record["ratio"],
    )


def speed_ups(found: Sequence[Mapping[str, Any]], model: str, gravac: str = GRAVAC) -> dict[str, float]:
    """How many times quicker GraVAC is to the target, by what it is compared with: ratios of means over the seeds. What was not
    trained is left out. Static factors are all arms that neither adapt nor send all."""
    times: dict[str, list[float]] = {}
    for record in found:
        if record["model"] == model:
            times.setdefault(record["method"], []).append(record["to_target_s"])
    means = {arm: float(np.mean(each)) for arm, each in times.items()}
    ours = means[gravac]
    static = [
        mean
        for arm, mean in means.items()
        if not (_is_gravac(arm) or arm.startswith(ACCORDION) or arm == DENSE)
    ]
    compared = {"best static": min(static), "worst static": max(static)} if static else {}
    compared |= {what: means[arm] for what, arm in ((ACCORDION, ACCORDION), ("dense", DENSE)) if arm in means}
    return {what: mean / ours for what, mean in compared.items()}


def table(found: Sequence[Mapping[str, Any]], model: str) -> Table:
    """One row an arm, means over the seeds."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    shown.add_column(model, no_wrap=True)
    for heading in (
        "accuracy (%)",
        "smaller by",
        "all steps",
        "to accuracy",
        "searching",
        "theta at the end",
    ):
        shown.add_column(heading, justify="right", no_wrap=True)
    for arm in dict.fromkeys(record["method"] for record in found):
        mine = [record for record in found if (record["model"], record["method"]) == (model, arm)]
        if not mine:
            continue
        mean = {
            name: float(np.mean([record[name] for record in mine]))
            for name in ("test_accuracy", "ratio", "total_s", "to_target_s", "search_share")
        }
        thetas = ", ".join(f"{record['theta']:g}" for record in mine) if _is_gravac(arm) else ""
        shown.add_row(
            arm, f"{100 * mean['test_accuracy']:.2f}", f"{mean['ratio']:.1f}", format_seconds(mean["total_s"]),
            format_seconds(mean["to_target_s"]), f"{mean['search_share']:.1%}" if _is_gravac(arm) else "", thetas,
        )  # fmt: skip
    return shown


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="resnet,cnn,mlp")
    parser.add_argument("--data", choices=DATA_NAMES, help="digits, or text for the transformer, by default")
    parser.add_argument(
        "--arms", default=";".join((*STATIC, ACCORDION, GRAVAC, DENSE)), help="with ; between them"
    )
    parser.add_argument("--seeds", default="3")
    parser.add_argument("--epochs", type=int, default=32)
    parser.add_argument("--epoch-steps", type=int, default=21)
    parser.add_argument("--gravac", default="theta_max=1000,window=5,epsilon=0.5", help="GraVAC's options")
    parser.add_argument("--transfer", type=float, default=0.05, help="seconds of a gradient over one link")
    parser.add_argument("--compute", type=float, default=0.1, help="computing of a step, in transfers")
    parser.add_argument("--delay", type=float, default=1e-3, help="round trip, seconds")
    parser.add_argument("--label-noise", type=float, default=0.2, help="share of images with a random label")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Train all arms of each model and seed that are not there yet, then the tables."""
    options = _options()
    torch.set_num_threads(1)
    console = Console(width=130)
    models = parse_choices("--models", options.models, MODEL_NAMES)
    samples = {model: Samples(_data(model, options.label_noise, options.data)) for model in models}
    chosen = {key: str(value) for key, value in vars(options).items() if key in SAME}
    runs = _done(options.json, chosen)
    for model in models:
        for seed in parse_seeds(options.seeds):
            for arm in options.arms.split(";"):
                if any((run.model, run.seed, run.arm) == (model, seed, arm) for run in runs):
                    continue
                start = time.perf_counter()
                runs.append(run := experiment(options, samples[model], arm, model, seed))
                took = format_seconds(time.perf_counter() - start)
                console.print(
                    f"{model} {arm}, seed {seed}: {run.accuracies[-1]:.2%}, best {run.best:.2%}, "
                    f"{run.seconds[-1]:.2f} s, {dict(run.figures)} ({took})",
                    highlight=False,
                )
                if options.json is not None:
                    write_json(options.json, document("gravac", records(runs), options=chosen))
    found = records(runs)
    for model in models:
        _show(console, found, model)


def _done(path: Path | None, chosen: Mapping[str, str]) -> list[Run]:
    """Trainings of an earlier call; raises ConfigError if their options are others."""
    if path is None or not path.exists():
        return []
    told = json.loads(path.read_text())
    if told["options"] != chosen:
        raise ConfigError(f"--json {path}: it holds trainings with {told['options']}; name another file")
    return [restored(record) for record in told["records"]]


def _show(console: Console, found: Sequence[Mapping[str, Any]], model: str) -> None:
    console.print(table(found, model))
    for arm in dict.fromkeys(record["method"] for record in found if record["model"] == model):
        if _is_gravac(arm):
            ratios = speed_ups(found, model, arm).items()
            told = ", ".join(f"{ratio:.2f}x against {what}" for what, ratio in ratios)
            told = f"to equal accuracy {told}; {PAPER}" if told else "no arm to compare it with"
            console.print(f"{model}, {arm}: {told}", highlight=False)


if __name__ == "__main__":
    main()
