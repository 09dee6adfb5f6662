"""Calls: what all ranks of a round must agree on, as a signature of at most 32 bytes and in words.

A policy is in it whole, but for the algorithm's name, which stands there as it was chosen: its budget as a number, what it has
by name (stop rule, fill, ...) so that an error can tell both sides' names, and its other numbers as a digest.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from dblp.collectives.reduction import DType, Op, dtype_name, op_name
from dblp.transport.policy import CarryBound, Consistency, Fill, Policy, Short, Stop, Tags

_LAYOUT = struct.Struct("!BBBBhQfHIQ")
"""collective, operation, dtype, algorithm, root, elements, budget, names of the policy, digest of its numbers, digest of sizes
or options: 32 bytes."""
_NONE = 255
"""Code of an operation, dtype or algorithm that the call does not have."""


class Collective(enum.IntEnum):
    """A collective call; the value is its code in the signature."""

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    REDUCE = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9
    SEND_RECV = 10

    @property
    def label(self) -> str:
        """Name in lower case."""
        return self.name.lower()


ALGORITHM_CODES = {"direct": 1, "ring": 2, "flat": 3, "halving_doubling": 4, "hierarchical": 5, "ps": 6}
"""Codes of the algorithms that a caller can choose."""
_ALGORITHM_NAMES = {code: name for name, code in ALGORITHM_CODES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective call: the same on all ranks of the group, or the round ends in a MismatchError."""

    collective: Collective
    dtype: DType | None = None
    op: Op | None = None
    count: int = 0
    """Elements, where all ranks must have equally many."""
    root: int = -1
    """Rank in the group, -1 without a root."""
    algorithm: str = "direct"
    """Name of the algorithm, with its options."""
    reason: str = "the only one for this collective"
    policy: Policy = field(default_factory=Policy)
    residual: bool = False
    """The caller gave what it carries over (``carry=``): all ranks do, or none."""
    sizes: int = 0
    """Digest of the sizes of all ranks' parts where they may differ; 0 if all are equal."""

    @property
    def label(self) -> str:
        """Name of the collective."""
        return self.collective.label

    def signature(self) -> bytes:
        """What must be equal on all ranks, 32 bytes."""
        name, _, options = self.algorithm.partition("(")
        return _LAYOUT.pack(
            self.collective,
            _NONE if self.op is None else self.op,
            _NONE if self.dtype is None else self.dtype.code,
            ALGORITHM_CODES.get(name, _NONE),
            self.root,
            self.count,
            self.policy.budget,
            *_policy_codes(self.policy, self.residual),
            digest(options) if options else self.sizes,
        )


def details_of(call: Call) -> dict[str, str | int | float]:
    """What the call is besides its name, as plain values for the flight recorder."""
    policy = call.policy
    details: dict[str, str | int | float] = {
        "dtype": "" if call.dtype is None else call.dtype.name,
        "op": "" if call.op is None else call.op.name.lower(),
        "root": call.root,
        "algorithm": call.algorithm,
        "budget": policy.budget,
    }
    if policy.lossy:
        details |= {
            "stop": policy.stop.value,
            "fill": policy.fill.value,
            "consistency": policy.consistency.value,
            "carry": policy.carry is not None,
        }
    return details


def describe(signature: bytes) -> str:
    """A signature in words, for the error that names both sides; any bytes are fine."""
    if len(signature) != _LAYOUT.size:
        return f"an unknown call ({signature.hex()})"
    collective, op, dtype, algorithm, root, count, budget, named, numbers, sizes = _LAYOUT.unpack(signature)
    name = Collective(collective).label if collective in set(Collective) else f"collective {collective}"
    words = [name if op == _NONE else f"{name}({op_name(op)})"]
    if dtype != _NONE:
        words.append(
            f"of {count} {dtype_name(dtype)} elements" if count or not sizes else f"of {dtype_name(dtype)}"
        )
    if root >= 0:
        words.append(f"root {root}")
    if op != _NONE and algorithm in _ALGORITHM_NAMES:
        words.append(f"by {_ALGORITHM_NAMES[algorithm]}")
    if budget:
        words.append(f"with a budget of {budget:.6g}")
    if budget or (named, numbers) != _policy_codes(Policy()):
        words.append(f"under {_policy_names(named)} ({_NUMBERS}: digest {numbers:08x})")
    if sizes:
        what = "options of its own" if collective == Collective.ALL_REDUCE else "parts of unequal sizes"
        words.append(f"with {what} (digest {sizes:016x})")
    return " ".join(words)


_NAMES: dict[str, tuple[str, ...]] = {
    "stop": tuple(member.value for member in Stop),
    "short": tuple(member.value for member in Short),
    "fill": tuple(member.value for member in Fill),
    "consistency": tuple(member.value for member in Consistency),
    "tags": tuple(member.value for member in Tags),
    "carry": ("off", *(f"by {member.value}" for member in CarryBound)),
    "hadamard": ("off", "on"),
    "residual": ("none", "given"),
}
"""What a policy has by name, and whether a residual came with it, in the order of the digits of their code, each with as many
values as it has names."""
_NUMBERS = "gather_budget, stop_after_s, resync_rounds, critical_share and the numbers of carry"
"""What a policy has by number, of which a signature has no more than a digest."""


@functools.lru_cache(maxsize=256)
def _policy_codes(policy: Policy, residual: bool = False) -> tuple[int, int]:
    """The code of a policy's names (16 bits) and a digest of its numbers (32 bits), its budget left out."""
    carry = policy.carry
    chosen = (
        policy.stop.value,
        policy.short.value,
        policy.fill.value,
        policy.consistency.value,
        policy.tags.value,
        "off" if carry is None else f"by {carry.bound.value}",
        "on" if policy.hadamard else "off",
        "given" if residual else "none",
    )
    code = 0
    for names, name in zip(reversed(_NAMES.values()), reversed(chosen), strict=True):
        code = code * len(names) + names.index(name)
    numbers = [policy.gather_leg_budget, policy.stop_after_s, policy.resync_rounds, policy.critical_share]
    if carry is not None:
        numbers += [getattr(carry, entry.name) for entry in fields(carry) if entry.name != "bound"]
    return code, digest(repr([float(number) for number in numbers])) >> 32


def _policy_names(code: int) -> str:
    """The names that a code stands for; any number is fine."""
    words = []
    for field_name, names in _NAMES.items():
        code, digit = divmod(code, len(names))
        words.append(f"{field_name}={names[digit]}")
    return "a policy of an unknown kind" if code else " ".join(words)


def digest_sizes(sizes: Iterable[int]) -> int:
    """A 64-bit digest of sizes, never 0."""
    return digest(",".join(str(size) for size in sizes))


def digest(text: str) -> int:
    """A 64-bit digest of a text, never 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") or 1
