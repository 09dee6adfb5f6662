"""What can be known of an experiment before anything is built: whether its tensors fit, and whether its training can begin."""

from __future__ import annotations

from pathlib import Path

from dblp.cli.memory import require_memory
from dblp.cli.train.recipes import DATA_NAMES, MODEL_NAMES, RECIPES
from dblp.errors import ConfigError, did_you_mean
from dblp.sim.lab.arms import Arm
from dblp.sim.lab.experiment import Experiment
from dblp.units import format_bytes, format_count


def check_memory(experiment: Experiment) -> None:
    """Raise LocalError, with both figures, if the ranks' tensors are more than this host's memory."""
    if experiment.train is not None:
        return
    hosts, arms = experiment.topology.hosts, len(experiment.arms)
    sizes = ", ".join(map(format_bytes, experiment.sizes))
    require_memory(
        held_bytes(experiment),
        f"sizes: {format_count(hosts, 'rank')} with {format_count(arms, 'arm')} and {sizes}",
        "take smaller sizes, fewer arms or fewer hosts",
    )


def held_bytes(experiment: Experiment) -> int:
    """Bytes that all ranks hold at once: each arm's tensors of each size (``dblp.cli.lab.rounds``), and what making the largest
    takes for a while (two arrays of int64)."""
    held = sum(sum(map(_tensors, experiment.arms)) * nbytes for nbytes in experiment.sizes)
    return experiment.topology.hosts * (held + 2 * max(experiment.sizes))


def _tensors(arm: Arm) -> int:
    """Of one size: the pattern, the buffer, and what is carried."""
    return 2 + (arm.preset is not None and arm.preset.policy.carry is not None)


def check_training(experiment: Experiment, where: str) -> None:
    """Raise ConfigError that begins with ``where`` if the ``[train]`` table names what is not there, or cannot be split."""
    training, ranks = experiment.train, experiment.topology.hosts
    if training is None:
        return
    for field, value, known in (("model", training.model, MODEL_NAMES), ("data", training.data, DATA_NAMES)):
        if value not in known:
            raise ConfigError(
                f"{where}: train: {field}={value!r}: known are {', '.join(known)}{did_you_mean(value, known)}"
            )
    recipe = RECIPES.get((training.data, training.model))
    if recipe is None:
        fitting = ", ".join(model for data, model in RECIPES if data == training.data)
        raise ConfigError(
            f"{where}: train: model={training.model!r} cannot read data={training.data!r}; its models: {fitting}"
        )
    if training.epochs < 0:
        raise ConfigError(f"{where}: train: epochs={training.epochs}: 1 or more, or 0 for the recipe's")
    batch = training.batch or recipe.batch
    if batch < ranks or batch % ranks:
        raise ConfigError(
            f"{where}: train: batch={batch}: samples a step over all ranks, a multiple of hosts={ranks}"
        )
    if not training.seeds:
        raise ConfigError(f"{where}: train: seeds=[]: one or more are needed")


def check_data(experiment: Experiment) -> None:
    """Load the data set once; raises LocalError with the remedy now, not on all ranks at once."""
    from dblp.cli.train.data import load

    if experiment.train is not None:
        folder = experiment.train.data_dir
        load(experiment.train.data, Path(folder) if folder else None)
