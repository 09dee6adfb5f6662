"""A rank's training runs in an experiment: those of ``dblp train``, over the laboratory's network."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from dblp.cli.train.arms import open_policy
from dblp.cli.train.data import load
from dblp.cli.train.loop import Run
from dblp.cli.train.plan import TrainPlan
from dblp.cli.train.recipes import recipe_of
from dblp.cli.train.samples import Samples
from dblp.cli.worker import Emit
from dblp.sim.lab.arms import parse_arm

_BUDGET, _STOP = 0.1, "stall"
"""Of dblp train's own bounded arm, which is none of the laboratory's."""


def train(command: dict[str, Any], store: Any, rank: int, world_size: int, emit: Emit) -> None:
    """Train one arm with one seed; emits what ``dblp train`` does."""
    plan = plan_of(command, world_size)
    arm = parse_arm(command["arm"])
    samples = Samples(load(plan.data, plan.folder))
    timeout = timedelta(seconds=command["timeout_s"])
    prefixed = PrefixStore(f"train/{arm.name}/{command['seed']}", store)
    with open_policy(arm.preset, None, "", prefixed, rank, world_size, timeout) as opened:
        Run(plan, opened, arm.name, command["seed"], samples, emit).train()


def plan_of(command: dict[str, Any], world_size: int) -> TrainPlan:
    """The options of ``dblp train`` for a run of the laboratory; what the experiment leaves open is the recipe's."""
    recipe = recipe_of(command["data"], command["model"])
    return TrainPlan(
        arms=(command["arm"],),
        seeds=(command["seed"],),
        ranks=world_size,
        data=command["data"],
        data_dir=command["data_dir"],
        model=command["model"],
        epochs=command["epochs"] or recipe.epochs,
        batch=command["batch"] or recipe.batch,
        optimizer=recipe.optimizer,
        lr=recipe.lr[recipe.optimizer],
        impair="",
        budget=_BUDGET,
        stop=_STOP,
    )
