"""The state of a ``KeyedStore`` in tensors, which ``torch.load(weights_only=True)`` reads, arrays not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dblp.collectives.compression.rounds import Compression
from dblp.errors import ConfigError


def tensor_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """``KeyedStore.state_dict`` in tensors."""
    parameters = {
        name: {
            "layers": [torch.from_numpy(values) for values in entry["layers"]],
            "velocity": None if entry["velocity"] is None else torch.from_numpy(entry["velocity"]),
        }
        for name, entry in state["parameters"].items()
    }
    return {**state, "parameters": parameters}


def array_state(state: Mapping[str, Any], sizes: Mapping[str, int], what: str) -> dict[str, Any]:
    """Back from ``tensor_state``. ``sizes``: elements of the model's parameters, by name; ``what`` is held, for errors. Raises
    ConfigError if it is none, or of another model."""
    try:
        parameters = {
            name: {"layers": [_array(t) for t in entry["layers"]], "velocity": _array(entry["velocity"])}
            for name, entry in state["parameters"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"this is no state of dblp.attach: {what}: {error!r}") from None
    for name, entry in parameters.items():
        _check(name, entry, sizes, what)
    return {**state, "parameters": parameters}


def save_compression(compression: Compression) -> dict[str, Any]:
    """``Compression.state_dict`` in tensors."""
    state = compression.state_dict()
    factors = {name: torch.from_numpy(factor) for name, factor in state["factors"].items()}
    return {**state, "memory": tensor_state(state["memory"]), "factors": factors}


def load_compression(compression: Compression, state: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Take what ``save_compression`` gave. ``sizes``: elements of the model's parameters, by name. Raises ConfigError if it is
    not usable, or of another model or method."""
    try:
        factors = {name: factor.detach().cpu().numpy() for name, factor in state["factors"].items()}
        memory = state["memory"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"this is no state of a compression: it has no {error}; give what its state_dict() returned, or load the "
            "attachment's whole"
            if isinstance(error, KeyError)
            else f"this is no state of a compression, but a {type(state).__name__}"
        ) from None
    arrays = array_state(memory, sizes, "compression")
    compression.load_state_dict({**state, "memory": arrays, "factors": factors})


def _check(name: str, entry: Mapping[str, Any], sizes: Mapping[str, int], what: str) -> None:
    if name not in sizes:
        raise ConfigError(f"{what}: the model has no parameter {name!r}; load a state of the same model")
    for values in (*entry["layers"], entry["velocity"]):
        if values is not None and values.size != sizes[name] and values.ndim == 1:
            raise ConfigError(
                f"{what}: parameter {name!r} has {sizes[name]} elements, {values.size} are held; "
                "load a state of the same model"
            )


def _array(values: torch.Tensor | None) -> Any:
    return None if values is None else values.detach().cpu().numpy()
