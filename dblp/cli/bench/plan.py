"""What an all-reduce benchmark is to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dblp.errors import ConfigError
from dblp.transport.config import TransportConfig
from dblp.transport.policy import Bounded
from dblp.units import MIB

GLOO, EXACT, BOUNDED = "gloo", "exact", "bounded"
ARMS = (EXACT, BOUNDED)
"""Arms of dblp; gloo always runs beside them."""
ALGORITHMS = ("auto", "ring", "direct", "flat", "halving_doubling", "hierarchical", "ps")
WARM_UP_ROUNDS = 3
HELD_TENSORS = 5
"""Times the size that a rank holds at least while it makes its tensor: two arrays of int64, and the tensor itself."""
_ROUNDS_BYTES = 600 * MIB
"""Without --rounds, as many rounds of a size as move this much, between the two bounds below."""
_FEWEST_ROUNDS, _MOST_ROUNDS = 10, 100
_IMPAIRED_FACTOR = 10
"""Impaired runs last longer: a burst each second needs seconds to be met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """Sizes for one world size, each with every arm in turn, round by round."""

    ranks: int
    sizes: tuple[int, ...]
    """Bytes of the reduced float32 tensor."""
    arms: tuple[str, ...]
    rounds: int
    """Timed rounds of each size; 0: chosen by size."""
    impair: str
    datagram_bytes: int
    algorithm: str
    budget: float
    stop: str
    busy_main: bool
    memory: bool

    def __post_init__(self) -> None:
        if self.rounds < 0:
            raise ConfigError(f"--rounds {self.rounds}: must not be negative")
        if BOUNDED in self.arms and not self.budget > 0:
            raise ConfigError(
                f"--policy-budget {self.budget}: the arm {BOUNDED} needs a budget above 0, such as 0.1"
            )
        Bounded(self.budget, stop=self.stop)
        TransportConfig(datagram_bytes=self.datagram_bytes, impair=self.impair)

    @property
    def variants(self) -> list[Variant]:
        """Everything that a round is timed for, in order."""
        loads = (False, True) if self.busy_main else (False,)
        return [Variant(arm, busy) for busy in loads for arm in (GLOO, *self.arms)]

    def rounds_of(self, nbytes: int) -> int:
        """Timed rounds of a size."""
        if self.rounds:
            return self.rounds
        rounds = min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, _ROUNDS_BYTES // nbytes))
        return rounds * _IMPAIRED_FACTOR if self.impair else rounds

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, for the workers."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> BenchPlan:
        """Back from ``to_json``."""
        return cls(**{**values, "sizes": tuple(values["sizes"]), "arms": tuple(values["arms"])})


@dataclass(frozen=True, slots=True)
class Variant:
    """An arm, with or without a busy main thread."""

    arm: str
    busy: bool

    @property
    def name(self) -> str:
        """Key of the variant in events."""
        return f"{self.arm}+busy" if self.busy else self.arm
