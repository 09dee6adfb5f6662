"""Compressed rounds under a loss policy: which policies, and what becomes of what was lost.

A round that is compressed loses blocks of payloads (``collectives/blocks.py``) or chunks of sums, and all ranks count the same.
What of a rank's own part was not counted comes back to it and joins the residual of its method: there is one residual, and what
was lost waits in it with what was not sent.

The bound of ``policy.carry`` is for methods that send all of a gradient in each round (``fp16``, ``int8``, ``sign``, ...): with
``decay`` half of what was lost is dropped, as without compression. Methods that withhold by themselves (``topk``, ``dgc``, ...)
take it back whole: a lost entry is one that was not selected this time, and their residual is made to wait.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.algorithms import check_policy, contributes
from dblp.collectives.carry import NOTHING, Account
from dblp.collectives.reduction import DTYPES, energy
from dblp.errors import ConfigError
from dblp.transport.policy import CarryBound, Consistency, Fill, Policy, Tags

if TYPE_CHECKING:
    from dblp.collectives.compression.base import Method

Array = npt.NDArray[Any]


def check_lossy(policy: Policy, method: Method, world_size: int) -> None:
    """Raise ConfigError, which names ``method``, for a lossy policy that compressed rounds cannot keep; UnsupportedError as
    ``check_policy``."""
    if not policy.lossy and not policy.hadamard:
        return
    reason = _reason(policy)
    check_policy(policy, world_size)
    if not all(contributes(policy.algorithm, rank) for rank in range(world_size)):
        reason = (
            f"algorithm={policy.algorithm!r} has ranks that contribute nothing, whose residual would grow"
        )
    if reason is not None:
        raise ConfigError(f"compression {method.name!r} with this policy: {reason}")


def _reason(policy: Policy) -> str | None:
    carry = policy.carry
    if policy.hadamard:
        return "hadamard spreads a gradient over all elements, which leaves nothing to select or to withhold; use one of them"
    if policy.consistency is Consistency.RELAXED:
        return "consistency='relaxed': residuals and factors rest on averages that are equal on all ranks; use 'agreed'"
    if policy.fill is not Fill.ZERO:
        return f"fill={policy.fill.value!r}: what is missing stays with its sender, so nothing may stand in for it; use 'zero'"
    if carry is not None and carry.momentum:
        return "a carry with momentum: the residual is the method's; dgc brings momentum"
    if carry is not None and carry.bound in (CarryBound.NORM, CarryBound.AGE):
        return (
            f"a carry bounded by {carry.bound.value!r}: what is lost joins the method's residual, which has no age and no norm "
            "of its own; use 'decay' or 'none'"
        )
    return None


def of_sums(policy: Policy) -> Policy:
    """``policy`` for an all-reduce of lanes, whose chunks tell nothing of layers or magnitudes: without tags."""
    return replace(policy, tags=Tags.NONE, critical_share=0.0)


def split_lost(
    lost: Array, policy: Policy, *, keeps: bool, withholds: bool
) -> tuple[Array | None, Array | None]:
    """(what is kept, what is discarded) of ``lost``, (size,), which may be changed. What is not finite is neither: it is heard
    of as NaN. ``keeps``, ``withholds``: as of the method."""
    spoiled = ~np.isfinite(lost)
    if spoiled.any():
        lost[spoiled] = 0
    if policy.carry is None or not keeps:
        return None, lost
    if policy.carry.bound is CarryBound.DECAY and not withholds:
        half = lost * lost.dtype.type(0.5)
        lost -= half
        return lost, half
    return lost, None


def account(values: Array | None) -> Account:
    """Elements other than zero, sum and energy."""
    if values is None:
        return NOTHING
    return Account(
        elements=int(np.count_nonzero(values)),
        total=float(values.sum(dtype=np.float64)),
        energy=energy(values, DTYPES[values.dtype.name]),
    )
