"""Replicas that may drift apart (``Consistency.RELAXED``): how far they have, and equal again."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch._C._distributed_c10d import BroadcastOptions

from dblp.collectives.torch.backend import DblpProcessGroup
from dblp.collectives.torch.buckets import square_norm


def resynchronise(group: DblpProcessGroup, parameters: Iterable[torch.Tensor]) -> float:
    """Give every rank the parameters of rank 0, by exact rounds; blocks. All ranks call it alike.

    Returns the drift that was found, the same on all ranks: the L2 norm of a rank's parameters less those of rank 0, over the
    norm of the latter, of the rank where it is largest. Takes as much memory as the parameters of one dtype, twice. What an
    optimiser remembers (momentum) is not touched.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter.detach())
    difference = norm = 0.0
    for tensors in by_dtype.values():
        apart, whole = _broadcast(group, tensors)
        difference += apart
        norm += whole
    drift = np.array([math.sqrt(difference / norm) if norm > 0.0 else math.inf if difference else 0.0])
    group.agree(drift)
    return float(drift[0])


def _broadcast(group: DblpProcessGroup, tensors: list[torch.Tensor]) -> tuple[float, float]:
    """Overwrite tensors of one dtype; returns the squares of the difference and of the norm."""
    mine = torch.cat([tensor.reshape(-1) for tensor in tensors])
    theirs = mine.clone()
    options = BroadcastOptions()
    options.rootRank = 0
    group.broadcast([theirs], options).wait()
    if group.rank() != 0:
        parts = torch.split(theirs, [tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
    return square_norm(mine.sub_(theirs)), square_norm(theirs)
