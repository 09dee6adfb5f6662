"""What a model's buckets carry over, between DDP and checkpoints.

The store of ``collectives/carry.py`` knows names and numpy arrays. Here a bucket's tensor and layout get their residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dblp.collectives.carry import CarryStore, Residual
from dblp.collectives.keyed import Layout
from dblp.collectives.torch.buckets import BucketLayout
from dblp.collectives.torch.keyed import array_state, tensor_state
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
        does, since all have the same policies. Complex gradients are pairs of real numbers in ``tensor``, and carried as such."""
        return self._residual(tensor, tuple(zip(layout.names, layout.sizes, strict=True)), policy)

    def _residual(self, tensor: torch.Tensor, parts: Layout, policy: Policy) -> Residual | None:
        self._begun |= policy.carry is not None
        if not self._begun or not tensor.is_floating_point():
            return None
        dtype = "float64" if tensor.dtype is torch.float64 else "float32"
        return self._store.residual(parts, dtype)

    def state_dict(self) -> dict[str, Any]:
        """``CarryStore.state_dict`` in tensors; take it between iterations."""
        return {**tensor_state(self._store.state_dict()), "begun": self._begun}

    def loaded(self, state: Mapping[str, Any]) -> Carries:
        """The residuals of the same model that ``state`` holds. Raises ConfigError if it is not usable, or of another model."""
        loaded = Carries(self._sizes)
        try:
            loaded._begun = bool(state["begun"])
        except (KeyError, TypeError) as error:
            raise ConfigError(f"this is no state of dblp.attach: carry: {error!r}") from None
        loaded._store.load_state_dict(array_state(state, self._sizes, "carry"))
        return loaded
