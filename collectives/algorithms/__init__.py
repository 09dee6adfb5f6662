"""Algorithms of the collectives, and the one place where ``auto`` chooses among those of all-reduce."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import numpy.typing as npt

from dblp.collectives.algorithms import direct, flat, halving_doubling, hierarchical, ps, ring
from dblp.collectives.algorithms.hops import Keep
from dblp.collectives.algorithms.options import check_options, format_algorithm, parse_algorithm
from dblp.collectives.reduction import DType, Reducer
from dblp.collectives.round import Round
from dblp.errors import ConfigError, UnsupportedError
from dblp.transport.policy import Fill, Policy, Short
from dblp.units import format_bytes

FLAT_BYTES = 16 * 1024
"""``auto``: arrays up to this size go in one hop: a second hop costs more than sending them world_size times."""
FLAT_SENT_BYTES = 96 * 1024
"""``auto``: so do larger ones, as long as a rank sends no more than this in all."""
FLAT_PAIR_BYTES = 1024 * 1024
"""``auto``: and between two ranks those up to this size: one hop or two, they send the same bytes. Beyond it each would reduce
all of it when the last of it has come, which takes longer than a hop. Measured as ``RING_BYTES``: 32 KiB to 1 MiB on two ranks in
0.7 to 0.9 of the time of ``direct``, 32 KiB on four in two thirds."""
DIRECT_WORLD_SIZE = 32
"""``auto``: largest group in which each rank sends to each other at once: more messages than this cost more than more hops."""
RING_BYTES = 1024 * 1024
"""``auto``: from this size on, three ranks or more go around a ring: received rows are added where they belong, without the
direct exchange's staging. Measured on 2 cores (``dblp bench allreduce --ranks 4 --algorithm ring`` and ``direct``): 25 MiB
in about two thirds of the time."""


class Algorithm(Protocol):
    """Posts all messages of an all-reduce; the round is done when its receives have ended."""

    def __call__(
        self,
        round_: Round,
        buffer: npt.NDArray[Any],
        reducer: Reducer,
        policy: Policy,
        *,
        keep: Keep | None = None,
    ) -> None:
        """``keep`` is told what no result has."""


ALL_REDUCE: dict[str, Algorithm] = {
    "direct": direct.post,
    "ring": ring.post,
    "flat": flat.post,
    "halving_doubling": halving_doubling.post,
    "hierarchical": hierarchical.post,
    "ps": ps.post,
}
"""Algorithms of all-reduce by name."""
BOUNDED = frozenset({"direct", "ring", "halving_doubling", "hierarchical", "ps"})
"""Those that can lose chunks within a budget."""
FLOWS = BOUNDED - {"direct"}
"""Those of them that are flows: what they can't do under a bound, ``direct`` can."""


def choose(algorithm: str, nbytes: int, world_size: int, dtype: DType, policy: Policy) -> tuple[str, str]:
    """The name of the algorithm to run and why: the caller's choice, or that of ``auto``.

    Every rank comes to the same answer from what all ranks share. Raises ConfigError for an unknown name,
    UnsupportedError for an exact-only algorithm with a lossy policy.
    """
    chosen = "the caller's choice"
    if algorithm == "auto":
        algorithm, chosen = policy.algorithm, "the policy's choice"
    if algorithm != "auto":
        algorithm = _check(algorithm, world_size, policy)
    if nbytes == 0:  # its empty messages tell a rank that has more
        return "flat", "nothing to reduce"
    if algorithm != "auto":
        return algorithm, chosen
    if policy.lossy:
        return _choose_lossy(world_size, policy)
    flat_bytes = flat_up_to(world_size)
    if nbytes <= flat_bytes:
        return "flat", f"at most {format_bytes(flat_bytes)}"
    if not dtype.half and world_size > DIRECT_WORLD_SIZE:
        return _choose_for_many(nbytes, world_size)
    if not dtype.half and world_size > 2 and nbytes >= RING_BYTES:
        return "ring", f"{format_bytes(RING_BYTES)} or more on more than 2 ranks"
    return "direct", f"above {format_bytes(flat_bytes)}"


def flat_up_to(world_size: int) -> int:
    """Bytes of the largest array that ``auto`` reduces in one hop."""
    return FLAT_PAIR_BYTES if world_size == 2 else max(FLAT_BYTES, FLAT_SENT_BYTES // max(world_size - 1, 1))


def _choose_lossy(world_size: int, policy: Policy) -> tuple[str, str]:
    if world_size <= DIRECT_WORLD_SIZE:
        return "direct", "one hop a contribution, so the budget holds end to end"
    limit = f"more than {DIRECT_WORLD_SIZE} ranks under a bound"
    if policy.fill is not Fill.ZERO or policy.short is not Short.REPAIR:
        return "direct", f"{limit}, and what only a direct exchange can do"
    if hierarchical.most_square(world_size) > 1:
        return "hierarchical", f"{limit}: two hops a contribution, each with half of the budget"
    return "halving_doubling", f"{limit}, whose number has no divisors"


def _choose_for_many(nbytes: int, world_size: int) -> tuple[str, str]:
    """Halving and doubling takes 2 log2(N) steps, the ring 2 (N - 1); where N is no power of two, the former moves the array of
    some ranks twice more, which long arrays notice."""
    if world_size & (world_size - 1) and nbytes >= RING_BYTES:
        return (
            "ring",
            f"{format_bytes(RING_BYTES)} or more on more than {DIRECT_WORLD_SIZE} ranks, no power of two",
        )
    return "halving_doubling", f"more than {DIRECT_WORLD_SIZE} ranks: few steps"


def check_policy(policy: Policy, world_size: int) -> None:
    """Raise what ``choose`` would raise for the algorithm that the policy names, whatever the array."""
    if policy.algorithm != "auto":
        _check(policy.algorithm, world_size, policy)


def check_reduce_scatter(policy: Policy) -> None:
    """Raise UnsupportedError for a policy that asks a reduce-scatter for what only an all-reduce can do."""
    for field, value, usual in (("fill", policy.fill, Fill.ZERO), ("short", policy.short, Short.REPAIR)):
        if value is not usual:
            raise UnsupportedError(
                f"a reduce-scatter with {field}={value.value!r}: it has no second leg that could tell all ranks; "
                f"use {field}={usual.value!r}"
            )
    if parse_algorithm(policy.algorithm)[0] not in ("auto", "direct"):
        raise UnsupportedError(
            f"a reduce-scatter with algorithm={policy.algorithm!r}: it is a direct exchange; use 'auto' or 'direct'"
        )


def algorithm_of(name: str) -> Algorithm:
    """What ``choose`` has chosen, its options bound."""
    base, options = parse_algorithm(name)
    return functools.partial(ALL_REDUCE[base], **options) if options else ALL_REDUCE[base]


def contributes(name: str, rank: int) -> bool:
    """The rank's array is a part of the sum: not that of a parameter server that serves only."""
    base, options = parse_algorithm(name)
    return not (base == "ps" and options.get("serve_only") and rank in options.get("servers", (0,)))


def weighs(name: str) -> bool:
    """The algorithm tells the round the energy of the contributions that it sends under a bound."""
    return name == "direct"


def _check(algorithm: str, world_size: int, policy: Policy) -> str:
    """A named algorithm in the form that all ranks compare; raises what ``choose`` raises."""
    name, options = parse_algorithm(algorithm)
    if name not in ALL_REDUCE:
        names = ", ".join(repr(name) for name in ("auto", *ALL_REDUCE))
        raise ConfigError(f"algorithm={algorithm!r}: not an all-reduce; use one of {names}")
    check_options(name, options, world_size)
    if policy.lossy and name not in BOUNDED:
        raise UnsupportedError(
            f"algorithm={algorithm!r} is exact only; a budget of {policy.budget:g} needs 'direct'"
        )
    if policy.lossy and name in FLOWS:
        for field, value, usual in (("fill", policy.fill, Fill.ZERO), ("short", policy.short, Short.REPAIR)):
            if value is not usual:
                raise UnsupportedError(
                    f"algorithm={algorithm!r} with {field}={value.value!r}: only {usual.value!r} is known there; use 'direct'"
                )
    return format_algorithm(name, options)
