"""torch's reduce operations in dblp's words."""

from __future__ import annotations

from typing import Any

import torch

from dblp.collectives.torch.tensors import Staged, stage
from dblp.errors import UnsupportedError

_NAMES = {
    "SUM": "sum",
    "AVG": "avg",
    "PRODUCT": "product",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
    "PREMUL_SUM": "sum",
}


def op_name(op: Any) -> str:
    """dblp's name of a torch ReduceOp; raises UnsupportedError for one that has none here."""
    name = str(getattr(op, "op", op)).rpartition(".")[2]
    if name not in _NAMES:
        raise UnsupportedError(
            f"reduce operation {name} is unknown to dblp; known are {', '.join(sorted(_NAMES))}"
        )
    return _NAMES[name]


def premultiply(tensor: torch.Tensor, op: Any) -> torch.Tensor:
    """The tensor, or for PREMUL_SUM a new one multiplied by the operation's factor: the sum that follows is
    the rest."""
    if not str(getattr(op, "op", op)).endswith("PREMUL_SUM"):
        return tensor
    _, factor = op.__getstate__()  # what it is pickled as: before torch 2.8 it has no attribute ``factor``
    return tensor.detach().mul(factor)


def stage_operand(tensor: torch.Tensor, op: Any) -> Staged:
    """A tensor that is reduced in place; for PREMUL_SUM the multiplied copy, whose result goes back into
    it."""
    operand = premultiply(tensor, op)
    item = stage(operand, arithmetic=True)
    if operand is not tensor:
        item.tensor, item.copied = tensor, True
    return item
