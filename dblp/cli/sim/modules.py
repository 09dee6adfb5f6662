"""Traces of any torch model: its layers are found by running it once on the meta device, which computes nothing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dblp.errors import ConfigError

TOKENS = "tokens:"


def trace_module(place: str, sample: str, batch: int, rate: float) -> dict[str, Any]:
    """The trace of the model that a call of ``place`` ("package.module:name") makes, for samples of the shape ``sample``
    ("3x224x224", or "tokens:1024" for numbers of tokens). Layers are modules with parameters of their own, in the order in which
    they begin; ``step_s`` is three times the forward pass's FLOPs over ``rate``. Raises ConfigError."""
    given = _sample(sample)
    with torch.device("meta"):
        model = _make(place)
        layers = _layers(model, place, given)
    total = sum(layer["flops"] for layer in layers)
    if not total:
        raise ConfigError(f"{place}: its forward pass has no FLOPs that torch counts: give step_s by hand")
    return {
        "name": place,
        "source": f"run by torch {torch.__version__}, samples of {sample}; a batch of {batch}, three times the forward pass's "
        f"FLOPs at {rate:g} FLOP/s",
        "step_s": 3.0 * total * batch / rate,
        "layers": layers,
    }


def _sample(sample: str) -> Tensor:
    tokens = sample.startswith(TOKENS)
    try:
        shape = [int(side) for side in sample.removeprefix(TOKENS).split("x")]
    except ValueError:
        shape = [0]
    if min(shape) < 1:
        raise ConfigError(f"--sample {sample!r}: a shape is needed, as 3x224x224, or tokens:1024")
    return torch.zeros(1, *shape, dtype=torch.int64 if tokens else torch.float32, device="meta")


def _make(place: str) -> nn.Module:
    """The model. A module beside which the command runs is found, as ``python -m`` finds it."""
    module, _, name = place.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        model = getattr(importlib.import_module(module), name)()
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"model {place!r}: it cannot be made: {type(error).__name__}: {error}") from None
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model {place!r}: the call gives {type(model).__name__}, a torch.nn.Module is needed"
        )
    return model


def _layers(model: nn.Module, place: str, sample: Tensor) -> list[dict[str, Any]]:
    """Name, gradient's bytes and FLOPs of each layer. What is computed between two layers belongs to the first of them."""
    rows: dict[str, dict[str, Any]] = {}
    counted: set[int] = set()
    last = 0
    counter = FlopCounterMode(display=False)

    def note(row: dict[str, Any]) -> None:
        nonlocal last
        now = counter.get_total_flops()
        row["flops"] += float(now - last)
        last = now

    def add(name: str, module: nn.Module) -> None:
        own = [each for each in module.parameters(recurse=False) if each.requires_grad]
        if not own:
            return

        def begin(*_: Any) -> None:
            if rows:
                note(next(reversed(rows.values())))
            if name not in rows:
                fresh = [each for each in own if id(each) not in counted]
                counted.update(map(id, fresh))
                nbytes = sum(each.numel() * each.element_size() for each in fresh)
                rows[name] = {"name": name or "model", "bytes": nbytes, "flops": 0.0}

        def end(*_: Any) -> None:
            note(rows[name])

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)

    for name, module in model.named_modules():
        add(name, module)
    try:
        with counter, torch.no_grad():
            model(sample)
    except Exception as error:
        raise ConfigError(
            f"model {place!r} does not take a sample of {tuple(sample.shape[1:])}: {type(error).__name__}: {error}"
        ) from None
    if not rows:
        raise ConfigError(f"model {place!r}: no module with parameters took part in the forward pass")
    note(next(reversed(rows.values())))
    return list(rows.values())
