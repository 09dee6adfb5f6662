"""What a model's buckets carry over, between DDP and checkpoints.

The store of ``collectives/carry.py`` knows names and numpy arrays. Here a bucket's tensor and layout get their residual, and the
store's state becomes tensors, which ``torch.load(weights_only=True)`` reads, arrays not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dblp.collectives.carry import CarryStore, Residual
from dblp.collectives.torch.buckets import BucketLayout
from dblp.errors import ConfigError
from dblp.transport.policy import Policy


class Carries:
    """The residuals of one rank's model. They begin with the first policy that carries; from then on every bucket has one, so
    that what was lost is delivered even if later policies keep nothing new."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """``sizes``: elements of each of the model's parameters, by name."""
        self._sizes = dict(sizes)
        self._store = CarryStore()
        self._begun = False

    def of(self, tensor: torch.Tensor, layout: BucketLayout, policy: Policy) -> Residual | None:
        """The residual of a bucket whose flat gradient is ``tensor``; None if nothing is carried. All ranks have one, or none
        does, since all have the same policies. Complex gradients are not carried."""
        self._begun |= policy.carry is not None
        if not self._begun or not tensor.is_floating_point():
            return None
        dtype = "float64" if tensor.dtype is torch.float64 else "float32"
        return self._store.residual(tuple(zip(layout.names, layout.sizes, strict=True)), dtype)

    def state_dict(self) -> dict[str, Any]:
        """``CarryStore.state_dict`` in tensors; take it between iterations."""
        state = self._store.state_dict()
        parameters = {
            name: {
                "layers": [torch.from_numpy(values) for values in entry["layers"]],
                "velocity": None if entry["velocity"] is None else torch.from_numpy(entry["velocity"]),
            }
            for name, entry in state["parameters"].items()
        }
        return {**state, "parameters": parameters, "begun": self._begun}

    def loaded(self, state: Mapping[str, Any]) -> Carries:
        """The residuals of the same model that ``state`` holds. Raises ConfigError if it is not usable, or of another model."""
        loaded = Carries(self._sizes)
        try:
            loaded._begun = bool(state["begun"])
            parameters = {
                name: {"layers": [_array(t) for t in entry["layers"]], "velocity": _array(entry["velocity"])}
                for name, entry in state["parameters"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"this is no state of dblp.attach: carry: {error!r}") from None
        loaded._store.load_state_dict({**state, "parameters": parameters})
        for name, entry in parameters.items():
            self._check(name, entry)
        return loaded

    def _check(self, name: str, entry: Mapping[str, Any]) -> None:
        if name not in self._sizes:
            raise ConfigError(f"carry: the model has no parameter {name!r}; load a state of the same model")
        for values in (*entry["layers"], entry["velocity"]):
            if values is not None and len(values) != self._sizes[name]:
                raise ConfigError(
                    f"carry: parameter {name!r} has {self._sizes[name]} elements, {len(values)} are carried; "
                    "load a state of the same model"
                )


def _array(values: torch.Tensor | None) -> Any:
    return None if values is None else values.detach().cpu().numpy()
