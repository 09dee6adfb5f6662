"""Traces of a training step: the layers of a model, their gradients' bytes, and the times that their passes take.

A trace is a JSON file: ``name``, ``source``, ``step_s`` (both passes of one step, without communication) and ``layers``,
front first, each with ``name``, ``bytes`` and ``flops``. Sizes come from published shapes or a torch model (``dblp sim trace``);
times are ``step_s`` shared out by flops, the backward pass taking twice the forward's, which is what its two products cost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from dblp.errors import ConfigError

BACKWARD_SHARE = 2.0 / 3.0
"""Of a step's computation."""
PACKAGE = "dblp.sim.experiments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer."""

    name: str
    """As torch names the module."""
    nbytes: int
    """Of its gradient."""
    forward_s: float
    """Time of its forward pass."""
    backward_s: float
    """Time of its backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A model's step."""

    name: str
    """Of the model."""
    source: str
    """Where the sizes and the time are from."""
    layers: tuple[Layer, ...]
    """Front first."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole gradient."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Time of both passes."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Layers in a row that are reduced together."""

    nbytes: int
    """Of their gradients."""
    forward_s: float
    """Of their forward passes."""
    backward_s: float
    """Of their backward passes."""


def trace_names() -> list[str]:
    """Traces in the package."""
    files = resources.files(PACKAGE).iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def load_trace(name: str) -> Trace:
    """A trace by its name, or from a JSON file. Raises ConfigError."""
    if name in trace_names():
        return read_trace(json.loads(resources.files(PACKAGE).joinpath(f"{name}.json").read_text()), name)
    if not name.endswith(".json"):
        raise ConfigError(f"workload.model={name!r}: known are {', '.join(trace_names())}, or a JSON file")
    try:
        return read_trace(json.loads(Path(name).read_text()), name)
    except OSError as error:
        raise ConfigError(f"workload.model={name!r}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"workload.model={name!r}: not JSON: {error}") from None


def read_trace(table: Mapping[str, Any], place: str) -> Trace:
    """A trace from its JSON; raises ConfigError that names what is wrong."""
    try:
        rows, step_s = table["layers"], float(table["step_s"])
        total = sum(float(row["flops"]) for row in rows)
        layers = [_layer(row, step_s / total) for row in rows]
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"trace {place}: {error!r}: layers with name, bytes and flops, and step_s, are needed"
        ) from None
    return Trace(
        name=str(table.get("name", place)), source=str(table.get("source", "")), layers=tuple(layers)
    )


def _layer(row: Mapping[str, Any], s_per_flop: float) -> Layer:
    seconds = float(row["flops"]) * s_per_flop
    return Layer(
        name=str(row["name"]),
        nbytes=int(row["bytes"]),
        forward_s=seconds * (1.0 - BACKWARD_SHARE),
        backward_s=seconds * BACKWARD_SHARE,
    )


def buckets(trace: Trace, most_bytes: int) -> list[Bucket]:
    """Layers from the back, in buckets that are full at ``most_bytes`` (as DDP forms them); returned front first."""
    groups: list[list[Layer]] = [[]]
    for layer in reversed(trace.layers):
        if groups[-1] and sum(each.nbytes for each in groups[-1]) + layer.nbytes > most_bytes:
            groups.append([])
        groups[-1].append(layer)
    return [_bucket(group) for group in reversed(groups)]


def _bucket(layers: Sequence[Layer]) -> Bucket:
    return Bucket(
        nbytes=sum(layer.nbytes for layer in layers),
        forward_s=sum(layer.forward_s for layer in layers),
        backward_s=sum(layer.backward_s for layer in layers),
    )
