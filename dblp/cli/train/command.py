"""``dblp train``: its options, and what the parent process does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dblp.cli.extras import require
from dblp.cli.options import parse_choice, parse_choices, parse_seeds
from dblp.cli.output import check_outputs
from dblp.cli.train.plan import DEFAULT_IMPAIR, TrainPlan
from dblp.cli.train.policies import (
    ARMS,
    BOUNDED,
    EXACT,
    GLOO,
    POLICIES,
    arm_of,
    check_arm,
    is_bounded,
    known_arms,
    parse_compressions,
)
from dblp.cli.train.recipes import DATA_NAMES, MODEL_NAMES, OPTIMIZERS, default_data, default_model, recipe_of
from dblp.collectives.named import plain_name
from dblp.errors import ConfigError
from dblp.transport.impair_spec import parse_impair
from dblp.units import format_count

if TYPE_CHECKING:
    from dblp.cli.train.outcome import Outcome


def train(
    arms: Annotated[
        str | None, typer.Option(help=f"Transports to compare; by default {', '.join(ARMS)}.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help=f"Compare {GLOO}, {EXACT} and policies by name: {', '.join(POLICIES)}.")
    ] = "",
    compression: Annotated[
        str,
        typer.Option(
            help="Compare also these compression methods: 'topk(ratio=0.01); dgc over bounded; gloo:dgc' (docs/compression.md)."
        ),
    ] = "",
    ranks: Annotated[int, typer.Option(help="Local workers.")] = 4,
    data: Annotated[
        str | None, typer.Option(help=f"Data set: {', '.join(DATA_NAMES)}; by default what the model reads.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data set's files.")] = None,
    model: Annotated[
        str | None, typer.Option(help=f"Model: {', '.join(MODEL_NAMES)}; by default what suits the data.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs; by default what suits model and data.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples a step, over all ranks.")] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help=f"Optimiser: {' or '.join(OPTIMIZERS)}; by default what suits the model."),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak of the learning rate.")] = None,
    seeds: Annotated[str, typer.Option(help="How many seeds (3), or the seeds (0,1,5).")] = "1",
    impair: Annotated[str, typer.Option(help="Impairment of the dblp arms; '' for none.")] = DEFAULT_IMPAIR,
    budget: Annotated[
        float, typer.Option(help=f"Share of a peer's chunks that {BOUNDED} may miss, in [0, 1).")
    ] = 0.1,
    policy_stop: Annotated[
        str, typer.Option(help="When a receiver stops waiting: stall or eager.")
    ] = "stall",
    json: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
    picture: Annotated[Path, typer.Option(help="Where to draw the picture.")] = Path("runs/train.png"),
) -> None:
    """Train on real data over gloo and over lossy UDP, with the same seeds, and compare."""
    data, model = _data_and_model(data, model)
    recipe = recipe_of(data, model)
    optimizer = parse_choice("--optimizer", optimizer or recipe.optimizer, OPTIMIZERS)
    parse_impair(impair)
    plan = TrainPlan(
        arms=_arms(arms, policy, compression),
        seeds=tuple(parse_seeds(seeds)),
        ranks=ranks,
        data=data,
        data_dir=str(data_dir) if data_dir else "",
        model=model,
        epochs=recipe.epochs if epochs is None else epochs,
        batch=recipe.batch if batch is None else batch,
        optimizer=optimizer,
        lr=recipe.lr[optimizer] if lr is None else lr,
        impair=impair,
        budget=budget,
        stop=policy_stop,
    )
    for arm in plan.arms:
        check_arm(arm, plan.budget, plan.stop, plan.ranks, plan.optimizer)
    check_outputs({"--json": json}, {"--picture": picture})
    require("torch", "matplotlib")
    _train(plan, picture, json)


def _data_and_model(data: str | None, model: str | None) -> tuple[str, str]:
    """Both by name; what was not named is what goes with the other."""
    if data is not None:
        parse_choice("--data", data, DATA_NAMES)
    model = parse_choice("--model", default_model(data) if model is None else model, MODEL_NAMES)
    return default_data(model) if data is None else data, model


def _arms(arms: str | None, policy: str, compression: str) -> tuple[str, ...]:
    """The arms of ``--arms``, then those of ``--policy`` and of ``--compression``, each once."""
    compressed = parse_compressions(compression)
    if arms is None:
        arms = ",".join((GLOO, EXACT) if policy or compressed else ARMS)
    policies = parse_choices("--policy", policy, tuple(POLICIES), plain_name) if policy else []
    return tuple(
        dict.fromkeys(
            [*parse_choices("--arms", arms, known_arms(), arm_of), *map(arm_of, policies), *compressed]
        )
    )


def _train(plan: TrainPlan, picture: Path, json: Path | None) -> None:
    from rich.console import Console

    from dblp.cli.host import document, write_json
    from dblp.cli.train.data import load
    from dblp.cli.train.figures import draw
    from dblp.cli.train.table import perplexities, sizes, summary_table, verdict
    from dblp.cli.whole import print_whole

    console = Console()
    samples = len(load(plan.data, plan.folder).train_targets)
    if samples < plan.batch:
        raise ConfigError(f"--batch {plan.batch}: {plan.data} has only {samples} training samples")
    console.print(_headline(plan, samples), highlight=False, soft_wrap=True)
    outcomes = run(plan, console)
    print_whole(console, summary_table(outcomes))
    for line in (perplexities(outcomes), sizes(outcomes), verdict(outcomes)):
        if line is not None:
            console.print(line, highlight=False)
    console.print(f"replicas identical on all {plan.ranks} ranks in every run", highlight=False)
    draw(outcomes, picture, subtitle=_caption(plan))
    console.print(f"picture: {picture}", highlight=False)
    if json is not None:
        options = {name: value for name, value in plan.to_json().items() if name not in ("arms", "seeds")}
        write_json(json, document("train", [outcome.record() for outcome in outcomes], options=options))
        console.print(f"figures: {json}", highlight=False)


def run(plan: TrainPlan, console: Any) -> list[Outcome]:
    """Run a plan's workers and show their progress on a rich Console; returns the outcomes in order."""
    from dblp.cli.launch import run_workers
    from dblp.cli.train.outcome import Collector
    from dblp.cli.train.progress import TrainProgress

    collector = Collector(plan.ranks)
    with TrainProgress(plan, console) as progress:

        def on_event(rank: int, event: dict[str, Any]) -> None:
            if event["kind"] == "progress":
                progress.advance(event)
                return
            outcome = collector.add(rank, event)
            if outcome is not None:
                progress.finish(outcome)

        run_workers("train", plan.to_json(), ranks=plan.ranks, on_event=on_event)
    return collector.outcomes


def _headline(plan: TrainPlan, samples: int) -> str:
    return (
        f"[bold]dblp train[/]: {plan.model} on {plan.data} ({samples} samples), {plan.ranks} ranks,"
        f" {format_count(plan.epochs, 'epoch')}, batch {plan.batch}, {plan.optimizer} at {plan.lr:g}\n"
        f"dblp arms under {plan.impair or 'no impairment'}"
        + (
            f"\n{BOUNDED}: budget {plan.budget:.0%}, stop rule {plan.stop}"
            if any(map(is_bounded, plan.arms))
            else ""
        )
    )


def _caption(plan: TrainPlan) -> str:
    seeds = format_count(len(plan.seeds), "seed")
    budget = f", budget {plan.budget:.0%}" if any(map(is_bounded, plan.arms)) else ""
    return (
        f"{plan.model} on {plan.data}, {plan.ranks} ranks, {seeds}."
        f" dblp arms under {plan.impair or 'no impairment'}{budget};"
        " gloo on a clean loopback."
    )
