"""Training time to equal accuracy, communication-bound, with bursts as in DBLP: every arm in virtual time.

    python -m tests.benchmarks.time_to_accuracy [--models resnet,transformer,cnn,mlp] [--seeds 1] [--json FILE]
    python -m tests.benchmarks.time_to_accuracy --read FILE FILE ...

Four workers train for real: each step's gradients are reduced by real groups over a simulated star, whose rounds take virtual
time (tests/benchmarks/virtual_workers.py); computing takes a constant. Every model's links are as fast as its own gradient
takes ``--transfer`` to cross one, since the models are small. Bursts of loss last for a whole round each, in the first
steps of epochs, as in DBLP (iterations 372 and 837 of 930 are those of 10 epochs). Time does not depend on this machine.

The time to accuracy is that at which an arm's best test so far reaches what the slowest arm's best reaches, straight between
tests. Arms of one model and seed start from the same parameters and see the same batches. ``--read`` trains nothing: it prints
the tables of earlier runs' JSON, since all models and seeds take hours.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from dblp.cli.train.data import Dataset, load
from dblp.cli.train.recipes import MODEL_NAMES, TEXT_MODELS, default_data, recipe_of
from dblp.cli.train.samples import Samples, Score
from dblp.cli.train.standin import StandIn, train
from dblp.collectives.presets import end_to_end, preset
from dblp.errors import ConfigError
from dblp.transport.policy import Stop
from dblp.units import format_seconds
from tests.benchmarks.tags import layout
from tests.benchmarks.virtual_workers import Arm, Star, Step, VirtualWorkers

Floats = npt.NDArray[np.float64]

WORKERS = 4
BURST_EPOCHS = (0.4, 0.9)
"""Where in the run the epochs begin whose first step a burst hits (DBLP: iterations 372 and 837 of 930)."""
BURST_SHARE = 2 / 930
"""Share of the rounds that bursts hit, in DBLP."""
LOSSES = {"resnet": 0.7, "transformer": 0.9, "cnn": 0.9, "mlp": 0.9}
"""q of each model; DBLP: 90 % for EfficientNetB0, 70 % for ResNet50, not told of the others."""
LOWS = {"resnet": 0.024}
"""P_low of each leg where it is not 0.8 %, as in DBLP."""
IMAGES_BATCH = 96
"""Of the digits: an epoch of 14 steps."""
READS = 50
"""Reads of a receiver in the time that a gradient takes over a link."""
TESTS_PER_EPOCH = 2
COMPUTE_SHARES = (0.0, 0.25, 1.0)
"""Computing, as shares of MLT's mean round without a burst, for which savings are told."""
WHAT = {"total": "all steps", "rare": "all steps, bursts as rare as in DBLP", "to_target": "to accuracy"}
"""What is compared."""
MLT, DBLP, DEFAULT, EAGER, EXACT = "mlt", "dblp", "default", "default eager", "exact"
ARMS = (MLT, DBLP, DEFAULT, EAGER, EXACT)


def arm(name: str, low: float, algorithm: str = "") -> Arm:
    """An arm by name. ``default eager``: DBLP's phases, budgets and stop rule in the default policy, which sends by value,
    carries and keeps replicas equal. ``algorithm``: for all arms alike, instead of the presets' own."""
    if name == EAGER:
        base = preset("default").policy
        policy = replace(base, budget=end_to_end(low), gather_budget=low, stop=Stop.EAGER)
        made = Arm(policy=policy, controller=preset("dblp", low=low).controller)
    else:
        chosen = preset(name, low=low) if name in (MLT, DBLP) else preset(name)
        made = Arm(policy=chosen.policy, controller=chosen.controller, transport=chosen.transport)
    return replace(made, policy=replace(made.policy, algorithm=algorithm)) if algorithm else made


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training."""

    arm: str
    model: str
    seed: int
    tested_at: npt.NDArray[np.int64]
    """Steps after which it was tested (tests,)."""
    seconds: Floats
    """Virtual time then, with computing (tests,)."""
    accuracies: Floats
    """Test accuracy (tests,)."""
    perplexity: float | None
    steps: tuple[Step, ...]
    compute_s: float

    @property
    def communication_s(self) -> Floats:
        """Virtual time without computing (tests,)."""
        return self.seconds - self.compute_s * self.tested_at

    def clean_round_s(self) -> float:
        """Mean round without a burst."""
        return float(np.mean([step.seconds for step in self.steps if not step.burst]))

    def burst_round_s(self) -> float:
        """Mean round in a burst."""
        return float(np.mean([step.seconds for step in self.steps if step.burst]))

    def time_to(self, accuracy: float, compute_s: float) -> float:
        """When the best test so far reaches ``accuracy``, straight between tests; NaN if it never does."""
        best = np.concatenate([[0.0], np.maximum.accumulate(self.accuracies)])
        times = np.concatenate([[0.0], self.communication_s + compute_s * self.tested_at])
        there = int(np.argmax(best >= accuracy))
        if best[there] < accuracy:
            return float("nan")
        share = (accuracy - best[there - 1]) / (best[there] - best[there - 1])
        return float(times[there - 1] + share * (times[there] - times[there - 1]))

    def total(self, compute_s: float) -> float:
        """Time of all steps."""
        return float(self.communication_s[-1] + compute_s * self.tested_at[-1])

    def total_of_rare_bursts(self, compute_s: float) -> float:
        """Time of as many steps, were bursts as rare as in DBLP's experiments."""
        mean = (1.0 - BURST_SHARE) * self.clean_round_s() + BURST_SHARE * self.burst_round_s()
        return len(self.steps) * (mean + compute_s)


def experiment(options: argparse.Namespace, samples: Samples, name: str, model: str, seed: int) -> Run:
    """Train one arm."""
    recipe, epoch_steps = recipe_of(default_data(model), model), options.epoch_steps
    layers = layout(samples.build(model, seed=seed))
    elements = int(layers.bounds[-1])
    star = Star(
        rate_bps=8.0 * 4 * elements / options.transfer, delay_s=options.delay, read_s=options.transfer / READS
    )
    compute_s = options.compute * options.transfer
    bursts = frozenset(int(share * options.epochs) * epoch_steps for share in BURST_EPOCHS)
    chosen = arm(name, LOWS.get(model, 0.008), options.algorithm)
    workers = VirtualWorkers(
        chosen, star, ranks=WORKERS, elements=elements, layers=layers, epoch_steps=epoch_steps,
        compute_s=compute_s, loss=LOSSES[model], bursts=bursts, seed=seed,
    )  # fmt: skip
    plan = StandIn(
        model=model, optimizer=recipe.optimizer, lr=recipe.lr[recipe.optimizer],
        batch=recipe.batch if samples.is_text else IMAGES_BATCH,
        steps=options.epochs * epoch_steps, seed=seed, workers=WORKERS, replicas=chosen.drifts,
    )  # fmt: skip
    tests: list[tuple[int, float, Score]] = []

    def watch(step: int, parameters: npt.NDArray[np.float32], score: Any) -> None:
        workers.resynchronise(parameters)
        if step % (epoch_steps // TESTS_PER_EPOCH) == 0:
            tests.append((step, workers.seconds, score()))

    train(plan, samples, workers.all_reduce, watch)
    workers.close()
    return Run(
        arm=name,
        model=model,
        seed=seed,
        tested_at=np.array([step for step, _, _ in tests]),
        seconds=np.array([seconds for _, seconds, _ in tests]),
        accuracies=np.array([score.accuracy for _, _, score in tests]),
        perplexity=tests[-1][2].perplexity,
        steps=tuple(workers.steps),
        compute_s=compute_s,
    )


def _data(model: str, noise: float, name: str | None = None) -> Dataset:
    """``name``, or the model's own data; of images, ``noise`` of the training labels are drawn at random. Digits are learned by
    heart within some epochs, and where no gradient is left its norm is chance; real tasks keep some."""
    data = load(name or default_data(model), None)
    if model in TEXT_MODELS:
        return data
    rng = np.random.default_rng(0)
    drawn = rng.random(len(data.train_targets)) < noise
    labels = np.where(drawn, rng.integers(0, data.classes, len(drawn)), data.train_targets)
    return replace(data, train_targets=labels)


def records(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Flat records, one for each run, with its savings."""
    return [_described(run) | saved for run, saved in zip(runs, savings(runs), strict=True)]


def _described(run: Run) -> dict[str, Any]:
    clean = [step for step in run.steps if not step.burst]
    return {
        "model": run.model,
        "policy": run.arm,
        "seed": run.seed,
        "steps": len(run.steps),
        "test_accuracy": float(run.accuracies[-1]),
        "test_perplexity": run.perplexity,
        "clean_round_s": run.clean_round_s(),
        "burst_round_s": run.burst_round_s(),
        "clean_missing_share": float(np.mean([step.missing_share for step in clean])),
        "clean_energy_lost": float(np.mean([step.energy_lost for step in clean])),
        "tolerant_share": float(np.mean([step.tolerant for step in run.steps])),
        "rounds_s": [step.seconds for step in run.steps],
        "burst_steps": [number for number, step in enumerate(run.steps) if step.burst],
        "compute_s": run.compute_s,
        "tested_at": run.tested_at.tolist(),
        "accuracies": run.accuracies.tolist(),
        "communication_s": run.communication_s.tolist(),
    }


def run_of(record: Mapping[str, Any]) -> Run:
    """The run of which a record tells; of its steps, only their times and bursts."""
    tested_at, compute_s = np.array(record["tested_at"]), record["compute_s"]
    return Run(
        arm=record["policy"],
        model=record["model"],
        seed=record["seed"],
        tested_at=tested_at,
        seconds=np.array(record["communication_s"]) + compute_s * tested_at,
        accuracies=np.array(record["accuracies"]),
        perplexity=record["test_perplexity"],
        steps=tuple(
            Step(
                seconds=seconds,
                burst=number in record["burst_steps"],
                tolerant=False,
                missing_share=0.0,
                energy_lost=0.0,
            )
            for number, seconds in enumerate(record["rounds_s"])
        ),
        compute_s=compute_s,
    )


def savings(runs: Sequence[Run]) -> list[dict[str, float]]:
    """For each run, times and what they save of MLT's, for each share of computing. Runs of a model and seed belong together."""
    found = []
    for run in runs:
        same = [other for other in runs if (other.model, other.seed) == (run.model, run.seed)]
        base = next((other for other in same if other.arm == MLT), run)
        target = min(float(other.accuracies.max()) for other in same)
        saved = {"target_accuracy": target}
        for share in COMPUTE_SHARES:
            compute_s = share * base.clean_round_s()
            for what, ours, theirs in [
                ("total", run.total(compute_s), base.total(compute_s)),
                ("rare", run.total_of_rare_bursts(compute_s), base.total_of_rare_bursts(compute_s)),
                ("to_target", run.time_to(target, compute_s), base.time_to(target, compute_s)),
            ]:
                saved[f"{what}_s_compute_{share:g}"] = ours
                saved[f"{what}_saving_compute_{share:g}"] = 1.0 - ours / theirs
        found.append(saved)
    return found


def table(found: Sequence[Mapping[str, Any]], model: str, share: float) -> Table:
    """One row an arm; means over the seeds, and the accuracy's spread."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    shown.add_column(f"\n{model}", no_wrap=True)
    headings = (
        "test\naccuracy (%)", "clean\nround", "burst\nround", "missing,\nclean", "energy lost,\nclean", "tolerant\nsteps",
        "all steps:\ntime", "\nless than mlt", "to accuracy:\ntime", "\nless than mlt",
    )  # fmt: skip
    for heading in headings:
        shown.add_column(heading, justify="right", no_wrap=True)
    for name in dict.fromkeys(record["policy"] for record in found):
        mine = [record for record in found if (record["model"], record["policy"]) == (model, name)]
        if mine:
            shown.add_row(name, *_cells(mine, share))
    return shown


def _cells(mine: Sequence[Mapping[str, Any]], share: float) -> list[str]:
    def mean(name: str) -> float:
        return float(np.mean([record[name] for record in mine]))

    accuracies = 100 * np.array([record["test_accuracy"] for record in mine])
    spread = f" ± {accuracies.std():.2f}" if len(mine) > 1 else ""
    cells = [f"{accuracies.mean():.2f}{spread}"]
    cells += [format_seconds(mean(name)) for name in ("clean_round_s", "burst_round_s")]
    cells += [f"{mean(name):.1%}" for name in ("clean_missing_share", "clean_energy_lost", "tolerant_share")]
    for what in ("total", "to_target"):
        cells.append(format_seconds(mean(f"{what}_s_compute_{share:g}")))
        cells.append(f"{mean(f'{what}_saving_compute_{share:g}'):.1%}")
    return cells


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(LOSSES))
    parser.add_argument("--arms", default=";".join(ARMS), help="names with ; between them")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--epochs", type=int, default=5, help="how many")
    parser.add_argument("--epoch-steps", type=int, default=14, help="steps of one: what phases follow")
    parser.add_argument(
        "--transfer", type=float, default=0.005, help="seconds that a gradient takes over one link"
    )
    parser.add_argument(
        "--delay",
        type=float,
        default=31e-6,
        help="seconds of each link; a datagram crosses two of them one way",
    )
    parser.add_argument("--compute", type=float, default=2.0, help="computing of a step, in transfers")
    parser.add_argument(
        "--label-noise", type=float, default=0.2, help="share of the images whose label is drawn at random"
    )
    parser.add_argument("--algorithm", default="", help="of all arms, instead of the presets' own")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--read", type=Path, nargs="+", help="JSON of earlier runs: print their tables, train nothing"
    )
    return parser.parse_args()


def main() -> None:
    """Train all arms of each model and seed, or read what earlier runs have written; print tables and savings."""
    options = _options()
    console = Console(width=150)
    found = _read(options.read, console) if options.read else _train(options, console)
    for share in COMPUTE_SHARES:
        for what in WHAT:
            _print_savings(console, found, what, share)


def _records_of(file: Path) -> list[dict[str, Any]]:
    try:
        records = json.loads(file.read_text())["records"]
        if not all("tested_at" in record for record in records):
            raise KeyError("tested_at")
    except OSError as error:
        raise ConfigError(f"--read {file}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"--read {file}: this is not what --json of this benchmark wrote") from None
    return list(records)


def _read(files: Sequence[Path], console: Console) -> list[dict[str, Any]]:
    """The records of earlier runs, compared anew, since the arms of a model may be in several files; a table for each model."""
    found = [record for file in files for record in _records_of(file)]
    for record, saved in zip(found, savings([run_of(record) for record in found]), strict=True):
        record.update(saved)
    for model in dict.fromkeys(record["model"] for record in found):
        console.print(table(found, model, COMPUTE_SHARES[1]))
    return found


def _train(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """All trainings; the tables so far after each model, since it takes long."""
    torch.set_num_threads(1)
    models = parse_choices("--models", options.models, MODEL_NAMES)
    arms = [name for name in ARMS if name in options.arms.split(";")]
    samples = {model: Samples(_data(model, options.label_noise)) for model in models}
    runs: list[Run] = []
    found: list[dict[str, Any]] = []
    for seed in parse_seeds(options.seeds):
        for model in models:
            for name in arms:
                start = time.perf_counter()
                runs.append(experiment(options, samples[model], name, model, seed))
                took = format_seconds(time.perf_counter() - start)
                last = runs[-1]
                console.print(
                    f"{model} {name}, seed {seed}: {last.accuracies[-1]:.2%}, {last.seconds[-1]:.2f} s ({took})",
                    highlight=False,
                )
            found = records(runs)
            console.print(table(found, model, COMPUTE_SHARES[1]))
            if options.json is not None:
                chosen = {key: str(value) for key, value in vars(options).items()}
                write_json(options.json, document("time_to_accuracy", found, options=chosen))
    return found


def _print_savings(console: Console, found: Sequence[Mapping[str, Any]], what: str, share: float) -> None:
    """What each arm saves over MLT: the mean of the models' means, and the best model's."""
    words = []
    for name in dict.fromkeys(record["policy"] for record in found if record["policy"] != MLT):
        by_model = [
            float(
                np.mean(
                    [
                        record[f"{what}_saving_compute_{share:g}"]
                        for record in found
                        if record["policy"] == name and record["model"] == model
                    ]
                )
            )
            for model in dict.fromkeys(record["model"] for record in found)
        ]
        counted = np.mean([1.0 / (1.0 - saving) for saving in by_model])
        words.append(
            f"{name} {np.mean(by_model):.1%} (mlt takes {counted:.3f} times as long), at best {max(by_model):.1%}"
            f" ({1.0 / (1.0 - max(by_model)):.3f})"
        )
    console.print(
        f"less time than mlt, {WHAT[what]}, computing {share:g} of its round: {'; '.join(words)}",
        highlight=False,
    )


if __name__ == "__main__":
    main()
