"""``dblp train``: its options, and what the parent process does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dblp.cli.extras import require
from dblp.cli.options import parse_choice, parse_choices, parse_seeds
from dblp.cli.train.plan import ARMS, BOUNDED, DATA_NAMES, DEFAULT_IMPAIR, MODEL_NAMES, RECIPES, TrainPlan
from dblp.errors import ConfigError
from dblp.transport.impair_spec import parse_impair

if TYPE_CHECKING:
    from dblp.cli.train.outcome import Outcome


def train(
    arms: Annotated[str, typer.Option(help="Transports to compare, of: " + ", ".join(ARMS) + ".")] = ",".join(
        ARMS
    ),
    ranks: Annotated[int, typer.Option(help="Local workers.")] = 4,
    data: Annotated[str, typer.Option(help="Data set: " + " or ".join(DATA_NAMES) + ".")] = "digits",
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data set's IDX files.")] = None,
    model: Annotated[str, typer.Option(help="Model: " + " or ".join(MODEL_NAMES) + ".")] = "cnn",
    epochs: Annotated[int | None, typer.Option(help="Epochs; by default what suits the data set.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples a step, over all ranks.")] = None,
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
    figure: Annotated[Path, typer.Option(help="Where to draw the picture.")] = Path("runs/train.png"),
) -> None:
    """Train on real data over gloo and over lossy UDP, with the same seeds, and compare."""
    recipe = RECIPES[parse_choice("--data", data, DATA_NAMES)]
    parse_impair(impair)
    plan = TrainPlan(
        arms=tuple(parse_choices("--arms", arms, ARMS)),
        seeds=tuple(parse_seeds(seeds)),
        ranks=ranks,
        data=data,
        data_dir=str(data_dir) if data_dir else "",
        model=parse_choice("--model", model, MODEL_NAMES),
        epochs=recipe.epochs if epochs is None else epochs,
        batch=recipe.batch if batch is None else batch,
        lr=recipe.lr if lr is None else lr,
        impair=impair,
        budget=budget,
        stop=policy_stop,
    )
    require("torch", "matplotlib")
    _train(plan, figure, json)


def _train(plan: TrainPlan, figure: Path, json: Path | None) -> None:
    from rich.console import Console

    from dblp.cli.host import document, write_json
    from dblp.cli.train.data import load
    from dblp.cli.train.figures import draw
    from dblp.cli.train.table import summary_table, verdict

    console = Console()
    samples = len(load(plan.data, plan.folder).train_labels)
    if samples < plan.batch:
        raise ConfigError(f"--batch {plan.batch}: {plan.data} has only {samples} training samples")
    console.print(_headline(plan, samples), highlight=False)
    outcomes = run(plan, console)
    console.print(summary_table(outcomes))
    difference = verdict(outcomes)
    if difference is not None:
        console.print(difference, highlight=False)
    console.print(f"replicas identical on all {plan.ranks} ranks in every run", highlight=False)
    draw(outcomes, figure, subtitle=_caption(plan))
    console.print(f"picture: {figure}", highlight=False)
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
        f" {plan.epochs} epochs, batch {plan.batch}\ndblp arms under {plan.impair or 'no impairment'}\n"
        f"{BOUNDED}: budget {plan.budget:.0%}, stop rule {plan.stop}"
    )


def _caption(plan: TrainPlan) -> str:
    seeds = f"{len(plan.seeds)} seed" + "s" * (len(plan.seeds) > 1)
    return (
        f"{plan.model} on {plan.data}, {plan.ranks} ranks, {seeds}."
        f" dblp arms under {plan.impair or 'no impairment'}, budget {plan.budget:.0%};"
        " gloo on a clean loopback."
    )
