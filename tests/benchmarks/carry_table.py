"""What becomes of accuracy when the reduce leg loses chunks at every step: fills and carries, by optimiser and loss rate.

    python -m tests.benchmarks.carry_table --model cnn --data digits --optimizers sgd,adamw --loss 0.4,0.8 --seeds 5 [--json FILE]
    python -m tests.benchmarks.carry_table --model transformer --steps 1200
    python -m tests.benchmarks.carry_table --response
    python -m tests.benchmarks.carry_table --data fashion-mnist --data-dir FOLDER --constant --lr 0.05 --steps 1500

Workers train in one process, with the same batches and parameters as in ``dblp train``; every chunk of a contribution is lost
with the same chance, at every step, but for a worker's own part of its own shard. Arms of one seed see the same losses. Each
cell is the mean over the seeds and their standard deviation; ``exact`` loses nothing. ``default`` is the preset: what starves is
critical, and what exceeds its budget is repaired by value; in the other arms what is lost stays lost. Records are written after
each cell, so that a run may be cut short.

``--response`` trains nothing: it tells what of a worker's gradient reaches the optimiser, on average over the rounds, and that
mean over the root of the mean square, as AdamW steps. Once for gradients that agree from round to round, once for such as are
nearly all noise; both are 1 where nothing is lost.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from dblp.cli.host import document, write_json
from dblp.cli.options import parse_choices, parse_list, parse_seeds
from dblp.cli.train.data import load
from dblp.cli.train.optimizers import MOMENTUM
from dblp.cli.train.recipes import OPTIMIZERS, SGD, default_data, default_model, recipe_of
from dblp.cli.train.samples import Samples, Score
from dblp.cli.train.standin import StandIn, train
from dblp.collectives.presets import preset
from dblp.transport.policy import MAX_CRITICAL_SHARE, Carry, CarryBound, Fill, Policy
from tests.benchmarks.lossy_all_reduce import CHUNK, NO_REPAIR, Floats, LossyAllReduce


def _bare(**fields: Any) -> Policy:
    """What is lost stays lost: no tags, no repair."""
    return Policy(budget=NO_REPAIR, gather_budget=0.0, **fields)


def _carry(bound: CarryBound, limit: float = 1.0, **more: Any) -> Policy:
    return _bare(carry=Carry(bound=bound, limit=limit, **more))


def _default(**changes: Any) -> Policy:
    """The preset's reduce leg; the gather leg is exact here."""
    policy = preset("default").policy
    return replace(policy, budget=policy.reduce_leg_budget, gather_budget=0.0, **changes)


ARMS: Mapping[str, Policy] = {
    "zero": _bare(),
    "rescale": _bare(fill=Fill.RESCALE),
    "default": _default(),
    "default, 10 % critical": _default(critical_share=MAX_CRITICAL_SHARE),
    "carry": _carry(CarryBound.NONE),
    "age 1": _carry(CarryBound.AGE, 1),
    "age 2": _carry(CarryBound.AGE, 2),
    "norm 0.5": _carry(CarryBound.NORM, 0.5),
    "norm 1": _carry(CarryBound.NORM, 1.0),
    "norm 2": _carry(CarryBound.NORM, 2.0),
    "decay": _carry(CarryBound.DECAY),
    "zero, 10 % critical": _default(critical_share=MAX_CRITICAL_SHARE, carry=None),
    "norm 1, momentum": _carry(CarryBound.NORM, 1.0, momentum=MOMENTUM),
    "norm 1, momentum, masked": _carry(CarryBound.NORM, 1.0, momentum=MOMENTUM, masking=True),
    "carry, momentum": _carry(CarryBound.NONE, momentum=MOMENTUM),
    "carry, momentum, masked": _carry(CarryBound.NONE, momentum=MOMENTUM, masking=True),
}
"""Carries of velocities stand for SGD only: AdamW divides by their norm, so its rates would have to be found anew."""
EXACT = "exact"
RESPONSE_CHUNKS, RESPONSE_STEPS, RESPONSE_WARM_UP = 400, 120, 40
"""Enough for two digits."""


def experiment(
    options: argparse.Namespace, samples: Samples, optimizer: str, arm: str, loss: float, seed: int
) -> dict[str, Any]:
    """One training as a record."""
    recipe = recipe_of(options.data, options.model)
    policy = ARMS.get(arm, Policy())
    batch = options.batch or recipe.batch
    steps = options.steps or recipe.epochs * (len(samples) // batch)
    plan = StandIn(
        model=options.model,
        optimizer=optimizer,
        lr=options.lr or options.rate * recipe.lr[optimizer],
        batch=batch,
        steps=steps,
        seed=seed,
        workers=options.workers,
        constant=options.constant,
        momentum=_momentum(policy),
    )
    start = time.perf_counter()
    missing = []
    all_reduce = LossyAllReduce(loss, seed, policy, every=options.every)

    def counted(gradients: Floats) -> Floats:
        average = all_reduce(gradients)
        missing.append(all_reduce.missing_share)
        return average

    with np.errstate(over="ignore", invalid="ignore"):  # an arm may diverge: that is a result
        score: Score = train(plan, samples, counted)
    return {
        "optimizer": optimizer,
        "arm": arm,
        "loss": loss,
        "seed": seed,
        "steps": steps,
        "test_accuracy": score.accuracy,
        "test_perplexity": score.perplexity,
        "missing_share": float(np.mean(missing)),
        "seconds": time.perf_counter() - start,
    }


def _momentum(policy: Policy) -> float:
    """What is left to the optimiser: none where the carry is of velocities (DGC, section 3.2)."""
    return 0.0 if policy.carry is not None and policy.carry.momentum else MOMENTUM


def table(records: Sequence[Mapping[str, Any]], optimizer: str, losses: Sequence[float]) -> Table:
    """Accuracy in percent by arm and loss rate, and how far it lies from the exact arm's."""
    shown = Table("arm", *(f"loss {loss:.0%}" for loss in losses), title=f"{optimizer}: test accuracy (%)")
    exact = _of(records, optimizer, EXACT, 0.0)
    shown.add_row(EXACT, f"{exact.mean():.2f} ± {exact.std():.2f}", *[""] * (len(losses) - 1))
    for arm in dict.fromkeys(record["arm"] for record in records if record["arm"] != EXACT):
        cells = []
        for loss in losses:
            values = _of(records, optimizer, arm, loss)
            cells.append(
                f"{values.mean():.2f} ± {values.std():.2f} ({values.mean() - exact.mean():+.2f})"
                if len(values)
                else "-"
            )
        shown.add_row(arm, *cells)
    return shown


def _of(records: Sequence[Mapping[str, Any]], optimizer: str, arm: str, loss: float) -> np.ndarray:
    keys = (optimizer, arm, loss)
    return np.array(
        [
            100 * record["test_accuracy"]
            for record in records
            if (record["optimizer"], record["arm"], record["loss"]) == keys
        ]
    )


def response(policy: Policy, loss: float, seed: int = 0) -> tuple[float, float, float]:
    """Of one worker's chunks in the other's shard: the mean that arrives of a gradient of 1 in every round, that mean over
    the root mean square, and the same where the gradient is a small mean in noise."""
    ones = np.ones((2, RESPONSE_CHUNKS * CHUNK), np.float32)
    steady = LossyAllReduce(loss, seed, policy)
    noisy = LossyAllReduce(loss, seed, policy)
    rng = np.random.default_rng(seed)
    arrived, squares = [], []
    for step in range(RESPONSE_STEPS):
        noise = rng.standard_normal((2, RESPONSE_CHUNKS), np.float32).repeat(CHUNK, axis=1)
        owns = np.array([noise[0, : noise.shape[1] // 2], noise[1, noise.shape[1] // 2 :]])
        both = [2 * steady(ones) - 1, 2 * noisy(noise) - owns.reshape(-1)]
        if step >= RESPONSE_WARM_UP:
            arrived.append(both[0][::CHUNK])
            squares.append(np.square(both[1][::CHUNK], dtype=np.float64).mean())
    mean, square = np.mean(arrived), np.mean(np.square(arrived))
    return float(mean), float(mean / np.sqrt(square)), float(mean / np.sqrt(np.mean(squares)))


def response_table(arms: Sequence[str], losses: Sequence[float]) -> Table:
    """``response`` of each arm at each loss rate."""
    heads = [f"{head} at {loss:.0%}" for loss in losses for head in ("mean", "agreeing", "noisy")]
    shown = Table("arm", *heads, title="what arrives, and AdamW's step")
    for arm in arms:
        shown.add_row(arm, *(f"{value:.2f}" for loss in losses for value in response(ARMS[arm], loss)))
    return shown


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--arms", default=";".join(ARMS), help="names with ; between them")
    parser.add_argument("--loss", default="0.4,0.8")
    parser.add_argument("--seeds", default="5")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, help="by default the recipe's epochs")
    parser.add_argument("--batch", type=int, help="by default the recipe's")
    parser.add_argument("--lr", type=float, help="by default the recipe's")
    parser.add_argument("--rate", type=float, default=1.0, help="times the recipe's learning rate")
    parser.add_argument("--every", type=int, default=1, help="one step in so many loses, the others nothing")
    parser.add_argument("--constant", action="store_true", help="keep the learning rate constant")
    parser.add_argument("--response", action="store_true", help="train nothing")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.model = options.model or default_model(options.data)
    options.data = options.data or default_data(options.model)
    return options


def main() -> None:
    """Run all trainings and print a table for each optimiser."""
    options = _options()
    torch.set_num_threads(1)
    losses = parse_list("--loss", options.loss, float, "a share of the chunks")
    arms = [arm for arm in ARMS if arm in options.arms.split(";")]
    console = Console()
    if options.response:
        plain = [arm for arm in arms if _momentum(ARMS[arm]) and ARMS[arm].fill is Fill.ZERO]
        console.print(response_table(plain, losses))
        return
    seeds = parse_seeds(options.seeds)
    samples = Samples(load(options.data, options.data_dir))
    records: list[dict[str, Any]] = []
    for optimizer in parse_choices("--optimizers", options.optimizers, OPTIMIZERS):
        cells = [(EXACT, 0.0)]
        cells += [(arm, loss) for arm in arms for loss in losses if optimizer == SGD or _momentum(ARMS[arm])]
        for arm, loss in cells:
            records += [experiment(options, samples, optimizer, arm, loss, seed) for seed in seeds]
            values = _of(records, optimizer, arm, loss)
            console.print(f"{optimizer} {arm} {loss:.0%}: {values.mean():.2f}", highlight=False)
            _write(options, records)
        console.print(table(records, optimizer, losses))


def _write(options: argparse.Namespace, records: Sequence[Mapping[str, Any]]) -> None:
    if options.json is not None:
        chosen = {name: str(value) for name, value in vars(options).items()}
        write_json(options.json, document("carry_table", records, options=chosen))


if __name__ == "__main__":
    main()
