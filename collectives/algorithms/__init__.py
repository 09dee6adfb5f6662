"""Algorithms of the collectives, and the one place where ``auto`` chooses among those of all-reduce."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

from dblp.collectives.algorithms import direct, flat, halving_doubling, hierarchical, ring
from dblp.collectives.reduction import DType, Reducer
from dblp.collectives.round import Round
from dblp.errors import ConfigError, UnsupportedError
from dblp.transport.policy import Policy
from dblp.units import format_bytes

FLAT_BYTES = 16 * 1024
"""``auto``: arrays up to this size go in one hop: a second hop costs more than sending them world_size times."""
DIRECT_WORLD_SIZE = 32
"""``auto``: largest group in which each rank sends to each other at once; a ring above."""
RING_BYTES = 1024 * 1024
"""``auto``: from this size on, three ranks or more go around a ring: received rows are added where they belong, without the
direct exchange's staging. Measured on 2 cores (``dblp bench allreduce --ranks 4 --algorithm ring`` and ``direct``): 25 MiB
in about two thirds of the time."""


class Algorithm(Protocol):
    """Posts all messages of an all-reduce; the round is done when its receives have ended."""

    def __call__(self, round_: Round, buffer: npt.NDArray[Any], reducer: Reducer, policy: Policy) -> None: ...


ALL_REDUCE: dict[str, Algorithm] = {
    "direct": direct.post,
    "ring": ring.post,
    "flat": flat.post,
    "halving_doubling": halving_doubling.post,
    "hierarchical": hierarchical.post,
}
"""Algorithms of all-reduce by name."""
BOUNDED = frozenset({"direct", "ring", "halving_doubling", "hierarchical"})
"""Those that can lose chunks within a budget."""


def choose(algorithm: str, nbytes: int, world_size: int, dtype: DType, policy: Policy) -> tuple[str, str]:
    """The name of the algorithm to run and why: the caller's choice, or that of ``auto``.

    Every rank comes to the same answer from what all ranks share. Raises ConfigError for an unknown name,
    UnsupportedError for an exact-only algorithm with a lossy policy.
    """
    if algorithm != "auto":
        if algorithm not in ALL_REDUCE:
            names = ", ".join(repr(name) for name in ("auto", *ALL_REDUCE))
            raise ConfigError(f"algorithm={algorithm!r}: not an all-reduce; use one of {names}")
        if policy.lossy and algorithm not in BOUNDED:
            raise UnsupportedError(
                f"algorithm={algorithm!r} is exact only; a budget of {policy.budget:g} needs 'direct'"
            )
    if nbytes == 0:  # its empty messages tell a rank that has more
        return "flat", "nothing to reduce"
    if algorithm != "auto":
        return algorithm, "the caller's choice"
    if policy.lossy:
        return "direct", "one hop a contribution, so the budget holds end to end"
    if nbytes <= FLAT_BYTES:
        return "flat", f"at most {format_bytes(FLAT_BYTES)}"
    if not dtype.half and world_size > DIRECT_WORLD_SIZE:
        return "ring", f"more than {DIRECT_WORLD_SIZE} ranks"
    if not dtype.half and world_size > 2 and nbytes >= RING_BYTES:
        return "ring", f"{format_bytes(RING_BYTES)} or more on more than 2 ranks"
    return "direct", f"above {format_bytes(FLAT_BYTES)}"
