"""NetSenseML against fixed compression and none, on networks of 200 Mb/s to 1 Gb/s, with and without background traffic.

    python -m tests.benchmarks.netsense --throughput [--rates 200,500,1000] [--json FILE]
    python -m tests.benchmarks.netsense --accuracy [--seeds 3] [--json FILE]
    python -m tests.benchmarks.netsense --changes [--figure FILE]

``--throughput``: samples per second of virtual time, of four workers that train the MLP (301,066 parameters) on digits over real
endpoints on a simulated star (tests/benchmarks/compressed_workers.py), from step 10 on, when NetSenseML has found the network.
Background: other traffic to each host, half of the link's rate, on and off for 100 ms on average. Computing takes ``--compute``.
``--accuracy``: of the whole training, on the network without protocol (tests/benchmarks/ideal_network.py), at the same rates.
``--changes``: NetSenseML's ratio while the rate changes, over real endpoints, and a picture of it.

The paper (arXiv 2506.16235) has 1.55 to 9.84 times the throughput of other systems with compression, where bandwidth is scarce.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from dblp.cli.host import document, write_json
from dblp.cli.options import parse_list, parse_seeds
from dblp.cli.train.data import load
from dblp.cli.train.optimizers import MOMENTUM
from dblp.cli.train.recipes import recipe_of
from dblp.cli.train.samples import Samples
from dblp.cli.train.standin import StandIn, train
from dblp.units import format_seconds
from tests.benchmarks.compressed_workers import CompressedWorkers, Star, parts_of

WORKERS = 4
NETSENSE = "netsense"
METHODS = ("none", "topk(0.1)", "dgc(0.001,nesterov=true)", "dgc(0.1,nesterov=true)", NETSENSE)
"""What it is compared with: the all-reduce, the fixed ratio of the authors' own comparison, and DGC at its paper's and at that
ratio."""
SKIPPED = 10
"""Steps that are not counted, and as many for each setting in which the network is found."""
CHANGES_MBPS = (1000, 200, 500, 50, 1000)
CHANGE_STEPS = 40
_MEGA = 1e6


def run(
    method: str,
    star: Star,
    samples: Samples,
    *,
    steps: int,
    compute_s: float,
    seed: int,
    rates: Sequence[float] = (),
) -> tuple[CompressedWorkers, float]:
    """Train; returns the workers and the test accuracy. ``rates``: of each step, if they change (bits per second)."""
    recipe = recipe_of("digits", "mlp")
    parts = parts_of(samples.build("mlp", seed=seed))
    epoch_steps = len(samples) // recipe.batch
    workers = CompressedWorkers(
        method, star, parts, ranks=WORKERS, compute_s=compute_s, epoch_steps=epoch_steps, seed=seed
    )
    plan = StandIn(
        model="mlp", optimizer=recipe.optimizer, lr=recipe.lr[recipe.optimizer], batch=recipe.batch, steps=steps,
        seed=seed, workers=WORKERS, momentum=0.0 if method.startswith("dgc") else MOMENTUM,
    )  # fmt: skip

    def watch(step: int, *_: Any) -> None:
        if rates and step < len(rates) and rates[step] != rates[step - 1]:
            workers.set_star(Star(rate_bps=rates[step], read_s=star.read_s))

    score = train(plan, samples, workers.all_reduce, watch)
    workers.close()
    return workers, score.accuracy


def throughput(options: argparse.Namespace, samples: Samples, console: Console) -> list[dict[str, Any]]:
    """Every method at every rate, with and without background."""
    found = []
    for rate in parse_list("--rates", options.rates, float, "a rate in Mb/s"):
        for background in (0.0, 0.5):
            star = Star(rate_bps=rate * _MEGA, background=background, read_s=options.read)
            for method in METHODS:
                start = time.perf_counter()
                # The fixed ones need few steps: all of theirs are alike but for the background's turns.
                many = method == NETSENSE or background or method.startswith("dgc(0.001")
                steps, skipped = (options.steps, SKIPPED) if many else (options.steps // 5, SKIPPED // 5)
                workers, _ = run(
                    method, star, samples, steps=skipped + steps, compute_s=options.compute, seed=0
                )
                spent = workers.ended_s[-1] - workers.ended_s[skipped - 1]
                found.append(
                    {
                        "method": method,
                        "rate_mbps": rate,
                        "background": background,
                        "samples_per_s": recipe_of("digits", "mlp").batch * steps / spent,
                        "step_s": spent / steps,
                        "ratio": _mean_ratio(workers.figures[skipped:]),
                        "wire_bytes": workers.totals.wire_bytes / workers.totals.rounds,
                    }
                )
                took = format_seconds(time.perf_counter() - start)
                console.print(
                    f"{rate:g} Mb/s, background {background:g}, {method}: {spent / steps:.4f} s a step ({took})"
                )
    return found


def _mean_ratio(figures: Sequence[Mapping[str, float]]) -> float | None:
    """Of what was sent; None of a method that decides nothing."""
    found = [each["ratio"] for each in figures if "ratio" in each]
    return float(np.mean(found)) if found else None


def throughput_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """One row a setting: samples a second, and NetSenseML's as multiples of the others'."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    short = [name.replace(",nesterov=true", "") for name in METHODS]
    for heading in ("Mb/s", "background", *short, *(f"x {name}" for name in short[:-1])):
        shown.add_column(heading, justify="right")
    for rate, background in dict.fromkeys((r["rate_mbps"], r["background"]) for r in found):
        mine = {r["method"]: r for r in found if (r["rate_mbps"], r["background"]) == (rate, background)}
        each = [mine[name]["samples_per_s"] for name in METHODS]
        shown.add_row(
            f"{rate:g}", f"{background:.0%}", *(f"{value:.0f}" for value in each),
            *(f"{each[-1] / value:.2f}" for value in each[:-1]),
        )  # fmt: skip
    return shown


def accuracy(options: argparse.Namespace, samples: Samples, console: Console) -> list[dict[str, Any]]:
    """Whole trainings; what does not look at the network is trained once a seed."""
    found = []
    steps = recipe_of("digits", "mlp").epochs * (len(samples) // recipe_of("digits", "mlp").batch)
    rates = parse_list("--rates", options.rates, float, "a rate in Mb/s")
    arms = [(method, rates[0]) for method in METHODS[:-1]] + [(NETSENSE, rate) for rate in rates]
    for seed in parse_seeds(options.seeds):
        for method, rate in arms:
            star = Star(rate_bps=rate * _MEGA, ideal=True)
            workers, score = run(method, star, samples, steps=steps, compute_s=options.compute, seed=seed)
            found.append(
                {
                    "method": method if method != NETSENSE else f"{method} at {rate:g} Mb/s",
                    "seed": seed,
                    "test_accuracy": score,
                    "ratio_size": workers.totals.ratio,
                }
            )
            console.print(
                f"seed {seed}, {found[-1]['method']}: {score:.2%}, smaller by {workers.totals.ratio:.1f}"
            )
    return found


def accuracy_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """Means over the seeds, and what they differ by from no compression."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for heading in ("method", "accuracy (%)", "against none (points)", "smaller by"):
        shown.add_column(heading, justify="right")

    def mean(method: str, name: str) -> float:
        return float(np.mean([record[name] for record in found if record["method"] == method]))

    for method in dict.fromkeys(record["method"] for record in found):
        score, base = 100 * mean(method, "test_accuracy"), 100 * mean("none", "test_accuracy")
        shown.add_row(method, f"{score:.2f}", f"{score - base:+.2f}", f"{mean(method, 'ratio_size'):.1f}")
    return shown


def changes(options: argparse.Namespace, samples: Samples, console: Console) -> None:
    """The ratio as the rate changes; how many rounds each change took to show."""
    rates = [rate * _MEGA for rate in CHANGES_MBPS for _ in range(CHANGE_STEPS)]
    star = Star(rate_bps=rates[0], read_s=options.read)
    workers, _ = run(
        NETSENSE, star, samples, steps=len(rates), compute_s=options.compute, seed=0, rates=rates
    )
    ratios = np.array([figures["ratio"] for figures in workers.figures])
    for index in range(1, len(CHANGES_MBPS)):
        at = index * CHANGE_STEPS
        before, up = ratios[at - 10 : at].mean(), CHANGES_MBPS[index] > CHANGES_MBPS[index - 1]
        shows = ratios[at:] > 1.5 * before if up else ratios[at:] < before / 1.5
        console.print(
            f"{CHANGES_MBPS[index - 1]} to {CHANGES_MBPS[index]} Mb/s: ratio {before:.2%} before, "
            f"half as much again (or as little) after {int(np.argmax(shows)) + 1} rounds, "
            f"{ratios[at + 10 : at + CHANGE_STEPS].mean():.2%} later"
        )
    _draw(np.array(workers.ended_s), ratios, np.array(rates), options.figure)
    console.print(f"picture: {options.figure}")


def _draw(seconds: Any, ratios: Any, rates: Any, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 5))
    upper.step(seconds, rates / _MEGA, where="post")
    upper.set_yscale("log")
    upper.set_ylabel("rate of the links (Mb/s)")
    lower.plot(seconds, 100 * ratios)
    lower.set_yscale("log")
    lower.set_ylabel("elements sent (%)")
    lower.set_xlabel("virtual time (s)")
    figure.suptitle("NetSenseML's ratio as the rate changes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--changes", action="store_true")
    parser.add_argument("--rates", default="200,500,1000", help="Mb/s")
    parser.add_argument("--seeds", default="3")
    parser.add_argument("--steps", type=int, default=30, help="that are counted")
    parser.add_argument("--compute", type=float, default=2e-3, help="seconds of a step")
    parser.add_argument("--read", type=float, default=5e-4, help="datagrams of so long are read together")
    parser.add_argument("--figure", type=Path, default=Path("runs/netsense.png"))
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Run what was asked for."""
    options = _options()
    torch.set_num_threads(1)
    console, samples = Console(width=170), Samples(load("digits", None))
    found: dict[str, list[dict[str, Any]]] = {}
    if options.throughput:
        found["throughput"] = throughput(options, samples, console)
        console.print(throughput_table(found["throughput"]))
    if options.accuracy:
        found["accuracy"] = accuracy(options, samples, console)
        console.print(accuracy_table(found["accuracy"]))
    if options.changes:
        changes(options, samples, console)
    if options.json is not None:
        chosen = {key: str(value) for key, value in vars(options).items()}
        records = [{"part": part, **record} for part, of in found.items() for record in of]
        write_json(options.json, document("netsense", records, options=chosen))


if __name__ == "__main__":
    main()
