"""Loss policies: what a round may lose, when a receiver stops waiting, and what stands in for what is missing."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dblp.errors import ConfigError


class Stop(enum.Enum):
    """When a receiver of a bounded message stops waiting. The bound and the critical chunks are always met first."""

    EAGER = "eager"
    """The moment that 1 - budget of the chunks is there (DBLP, arXiv 2605.01989; MLT, NSDI'24)."""
    STALL = "stall"
    """The bound is met and nothing useful has been in flight for a delay estimate: throws nothing away."""
    DEADLINE = "deadline"
    """As ``stall``, but at the latest ``stop_after_s`` after the message was opened (LTP's early close, OptiReduce's
    t_B); a bound that is not met by then still goes on being repaired."""


class Fill(enum.Enum):
    """What stands in for a missing chunk of a contribution."""

    ZERO = "zero"
    """Nothing is added (MLT, LTP, DBLP)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What an all-reduce may lose. The default loses nothing.

    Only floating-point sums and averages may carry a policy with a budget above 0, and only a call that names it.
    """

    budget: float = 0.0
    """Largest share of a peer's chunks that a message of the reduce leg may miss, in [0, 1)."""
    stop: Stop = Stop.STALL
    """When a receiver stops waiting."""
    stop_after_s: float = 0.0
    """Seconds after which ``Stop.DEADLINE`` stops; other rules ignore it."""
    fill: Fill = Fill.ZERO
    """What stands in for a missing chunk."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.budget < 1.0:
            raise ConfigError(
                f"budget={self.budget!r}: a loss budget is a share in [0, 1); 0.1 allows 10 % of a peer's chunks to miss"
            )
        if self.stop is Stop.DEADLINE and not self.stop_after_s > 0.0:
            raise ConfigError(
                f"stop_after_s={self.stop_after_s!r}: Stop.DEADLINE needs a time above 0 seconds"
            )

    @property
    def lossy(self) -> bool:
        """True if this policy may lose anything."""
        return self.budget > 0.0


def Exact() -> Policy:
    """The policy that loses nothing."""
    return Policy()


def Bounded(budget: float, *, stop: Stop | str = Stop.STALL, stop_after_s: float = 0.0) -> Policy:
    """A policy whose reduce leg may miss at most ``budget`` of each peer's chunks.

    Raises ConfigError if the budget is outside [0, 1) or the stop rule is unknown.
    """
    try:
        rule = Stop(stop)
    except ValueError:
        names = ", ".join(repr(rule.value) for rule in Stop)
        raise ConfigError(f"stop={stop!r}: not a stop rule; use one of {names}") from None
    return Policy(budget=budget, stop=rule, stop_after_s=stop_after_s)
