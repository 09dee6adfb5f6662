"""``dblp bench compression``: its options, and the run, which is one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dblp.cli.bench.compression_plan import METHODS, RATES_MBPS, CompressionPlan
from dblp.cli.extras import require
from dblp.cli.memory import require_memory
from dblp.cli.options import parse_choice, parse_list, parse_seeds
from dblp.cli.output import check_outputs
from dblp.cli.train.recipes import DATA_NAMES, MODEL_NAMES, OPTIMIZERS, default_data, default_model, recipe_of
from dblp.collectives.compression.adaptive import Adaptive
from dblp.collectives.compression.lossy import check_lossy
from dblp.collectives.compression.registry import parse_compression
from dblp.errors import ConfigError
from dblp.transport.policy import Bounded
from dblp.units import format_count, parse_bps

if TYPE_CHECKING:
    from rich.console import Console

    from dblp.cli.bench.compression_results import Figures
    from dblp.cli.bench.compression_training import Trainings

_ELEMENT_BYTES = 3 * 4_000_000
"""Of a million elements: gradient, memory and result, float32."""
_RATES = ",".join(f"{rate:g}" for rate in RATES_MBPS)


def compression(
    methods: Annotated[
        str, typer.Option(help="Methods, separated by ';' (docs/compression.md); none is always measured.")
    ] = "; ".join(METHODS),
    ranks: Annotated[int, typer.Option(help="Simulated ranks.")] = 4,
    rates: Annotated[
        str, typer.Option(help="Rates of each rank's simulated link: Mb/s, or with a unit (1gbit).")
    ] = _RATES,
    melem: Annotated[
        int, typer.Option(help="Million elements, a whole number, of the gradient whose rounds are timed.")
    ] = 1,
    loss: Annotated[float, typer.Option(help="Share of datagrams that the network loses, in [0, 1).")] = 0.0,
    budget: Annotated[
        float, typer.Option(help="Loss budget of the compressed rounds, in [0, 1); 0: exact.")
    ] = 0.0,
    data: Annotated[str | None, typer.Option(help=f"Data set: {', '.join(DATA_NAMES)}.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data set's files.")] = None,
    model: Annotated[str | None, typer.Option(help=f"Model: {', '.join(MODEL_NAMES)}.")] = None,
    optimizer: Annotated[str | None, typer.Option(help=f"Optimiser: {' or '.join(OPTIMIZERS)}.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak of the learning rate.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps of a training; by default the recipe's; 0: none.")
    ] = None,
    epoch_steps: Annotated[
        int, typer.Option(help="Steps that a warm-up counts as an epoch; 0: the data's.")
    ] = 0,
    seeds: Annotated[str, typer.Option(help="How many seeds (3), or the seeds (0,1,5).")] = "1",
    json: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Compare compression methods: bytes, processor time, steps at three rates, and what training makes of them."""
    model = parse_choice("--model", default_model(data) if model is None else model, MODEL_NAMES)
    data = parse_choice("--data", default_data(model) if data is None else data, DATA_NAMES)
    recipe = recipe_of(data, model)
    optimizer = parse_choice("--optimizer", optimizer or recipe.optimizer, OPTIMIZERS)
    plan = CompressionPlan(
        methods=_methods(methods),
        ranks=_at_least("--ranks", ranks, 2),
        rates_bps=tuple(parse_list("--rates", rates, _rate, "a rate above 0: Mb/s, or with a unit (1gbit)")),
        loss=_share("--loss", loss),
        budget=Bounded(budget).budget,
        melem=_at_least("--melem", melem, 1),
        data=data,
        data_dir=str(data_dir) if data_dir else "",
        model=model,
        optimizer=optimizer,
        lr=recipe.lr[optimizer] if lr is None else _learning_rate(lr),
        batch=recipe.batch,
        steps=-1 if steps is None else _at_least("--steps", steps, 0),
        epoch_steps=epoch_steps,
        seeds=tuple(parse_seeds(seeds)),
    )
    for method in plan.methods:
        _check(method, plan)
    check_outputs({"--json": json})
    require_memory(
        plan.ranks * plan.melem * _ELEMENT_BYTES,
        f"--melem, --ranks: {plan.ranks} ranks with {plan.melem} million elements",
        "take fewer of them",
    )
    require("torch")
    _bench(plan, recipe.epochs, json)


def _bench(plan: CompressionPlan, epochs: int, json: Path | None) -> None:
    from dataclasses import asdict, replace

    from rich.console import Console

    from dblp.cli.bench.compression_cost import references
    from dblp.cli.bench.compression_results import legend, records, table
    from dblp.cli.bench.compression_training import Trainings
    from dblp.cli.host import document, write_json

    console = Console()
    trainings = None
    if plan.steps:
        trainings = Trainings(plan)
        if plan.steps < 0:  # the recipe's
            plan = replace(plan, steps=epochs * trainings.epoch_steps)
            trainings = Trainings(plan)
        console.print(
            f"[bold]dblp bench compression[/]: {plan.model} on {plan.data}, {plan.optimizer} at {plan.lr:g}, "
            f"{format_count(plan.steps, 'step')} of {plan.batch}, {format_count(len(plan.seeds), 'seed')}",
            highlight=False,
        )
    figures = run(plan, trainings, console)
    known = references(plan)
    console.print(legend(plan), highlight=False)
    console.print(table(figures, known, plan))
    if json is not None:
        options = {name: value for name, value in asdict(plan).items() if name != "methods"}
        write_json(
            json, document("bench compression", records(figures, plan), options=options, references=known)
        )
        console.print(f"figures: {json}", highlight=False)


def run(plan: CompressionPlan, trainings: Trainings | None, console: Console) -> list[Figures]:
    """Measure ``none`` and each method; a line on the terminal says which is under way."""
    from dblp.cli.bench.compression_cost import codec, rounds
    from dblp.cli.bench.compression_results import Figures
    from dblp.cli.bench.compression_training import DENSE

    figures = []
    for method in (DENSE, *plan.methods):
        with console.status(method):
            figures.append(
                Figures(
                    method=method,
                    codec=codec(method, plan),
                    rounds=[rounds(method, rate, plan) for rate in plan.rates_bps],
                    trained=[trainings.run(method, seed) for seed in plan.seeds] if trainings else [],
                )
            )
    return figures


def _methods(text: str) -> tuple[str, ...]:
    methods = [part.strip() for part in text.split(";") if part.strip()]
    for method in methods:
        parse_compression(method)
    if not methods:
        raise ConfigError(f"--methods {text!r}: names no method; leave it out for all")
    return tuple(method for method in dict.fromkeys(methods) if method != "none")


def _check(text: str, plan: CompressionPlan) -> None:
    """Raise ConfigError for a method that cannot be measured here, before anything is."""
    method = parse_compression(text)
    if isinstance(method, Adaptive) or method.follows_phases:
        benchmark = "netsense" if method.name == "netsense" else "gravac"
        raise ConfigError(
            f"--methods {text}: it decides while it trains, from the iterations before; what is timed here are single rounds. "
            f"'python -m tests.benchmarks.{benchmark}' in the repository measures it, 'dblp train --compression {method.name}' "
            "trains with it"
        )
    method.check(plan.ranks)
    check_lossy(plan.policy, method, plan.ranks)


def _rate(item: str) -> float:
    """Mb/s, or a rate with its unit: ``1gbit``."""
    try:
        value = float(item) * 1e6
    except ValueError:
        value = parse_bps(item)
    if not 0.0 < value < float("inf"):
        raise ValueError(item)
    return value


def _learning_rate(value: float) -> float:
    if not 0.0 < value < float("inf"):
        raise ConfigError(f"--lr {value}: a learning rate above 0 is needed")
    return value


def _at_least(option: str, value: int, least: int) -> int:
    if value < least:
        raise ConfigError(f"{option} {value}: a whole number from {least} is needed")
    return value


def _share(option: str, value: float) -> float:
    if not 0.0 <= value < 1.0:
        raise ConfigError(f"{option} {value}: a share in [0, 1) is needed")
    return value
