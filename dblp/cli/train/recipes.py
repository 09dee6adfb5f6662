"""Names of data sets, models and optimisers, which go together, and what trains each pair well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dblp.errors import ConfigError

SGD, ADAMW = "sgd", "adamw"
OPTIMIZERS = (SGD, ADAMW)
DATA_NAMES = ("digits", "fashion-mnist", "text")
IMAGE_MODELS = ("mlp", "cnn", "resnet")
TEXT_MODELS = ("transformer",)
MODEL_NAMES = IMAGE_MODELS + TEXT_MODELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Defaults that train a model on a data set well, under a one-cycle learning rate."""

    epochs: int
    batch: int
    """Samples a step, over all ranks."""
    lr: Mapping[str, float]
    """Peak of the learning rate for each optimiser."""
    optimizer: str = SGD
    """Which of them is the default."""


_IMAGE_RATES = {SGD: 0.1, ADAMW: 3e-3}
_LARGE_IMAGE_RATES = {SGD: 0.08, ADAMW: 2e-3}
RECIPES = {
    ("digits", "mlp"): Recipe(epochs=16, batch=64, lr=_IMAGE_RATES),
    ("digits", "cnn"): Recipe(epochs=16, batch=64, lr=_IMAGE_RATES),
    ("digits", "resnet"): Recipe(epochs=12, batch=64, lr={SGD: 0.1, ADAMW: 3e-3}),
    ("fashion-mnist", "mlp"): Recipe(epochs=2, batch=128, lr=_LARGE_IMAGE_RATES),
    ("fashion-mnist", "cnn"): Recipe(epochs=2, batch=128, lr=_LARGE_IMAGE_RATES),
    ("fashion-mnist", "resnet"): Recipe(epochs=2, batch=128, lr={SGD: 0.1, ADAMW: 5e-3}),
    ("text", "transformer"): Recipe(epochs=2, batch=32, lr={SGD: 0.2, ADAMW: 6e-3}, optimizer=ADAMW),
}
"""Rates were compared with twice to three times as much and as little, by test accuracy without loss."""


def default_data(model: str) -> str:
    """The data set that a model is trained on where none is named."""
    return "text" if model in TEXT_MODELS else "digits"


def default_model(data: str | None) -> str:
    """The model that is trained on a data set where none is named."""
    return "transformer" if data == "text" else "cnn"


def recipe_of(data: str, model: str) -> Recipe:
    """The recipe of a pair; raises ConfigError if the model cannot read the data."""
    try:
        return RECIPES[data, model]
    except KeyError:
        fitting = ", ".join(name for name in MODEL_NAMES if (data, name) in RECIPES)
        raise ConfigError(
            f"--model {model} cannot read --data {data}; models for {data}: {fitting}"
        ) from None
