"""Loss policies: what a round may lose, when a receiver stops waiting, and what becomes of what is missing."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from numbers import Real

from dblp.errors import ConfigError
from dblp.transport.fields import check_fields, named

DEFAULT_GATHER_SHARE = 0.1
"""Share of an end-to-end budget that the gather leg gets under ``Consistency.AGREED``: a lost result misses the sum of all
ranks, a lost contribution that of one."""
MAX_CRITICAL_SHARE = 0.1
"""Most of a message's chunks that may be critical: what is always repaired bounds what a round can save."""


class Stop(enum.Enum):
    """When a receiver of a bounded message stops waiting. The bound and the critical chunks are always met first."""

    EAGER = "eager"
    """The moment that 1 - budget of the chunks is there (DBLP, arXiv 2605.01989; MLT, NSDI'24)."""
    STALL = "stall"
    """The bound is met and nothing useful has been in flight for a delay estimate: throws nothing away."""
    DEADLINE = "deadline"
    """As ``stall``, but at the latest ``stop_after_s`` after the message was opened (LTP's early close, OptiReduce's
    t_B); a bound that is not met by then still goes on being repaired."""
    ABANDON = "abandon"
    """As ``deadline``, but the message ends then, its bound met or not: what ``Short.SKIP`` makes of the rule."""


class Fill(enum.Enum):
    """What stands in for a missing chunk of a contribution."""

    ZERO = "zero"
    """Nothing is added (MLT, LTP, DBLP)."""
    RESCALE = "rescale"
    """The sum of the contributions that came, times world_size over their number: unbiased (arXiv 1810.07766). Excludes
    ``carry``."""
    PREVIOUS = "previous"
    """What the receiver's array held before: for parameters (MLT's stale fill)."""


class Consistency(enum.Enum):
    """What holds between the ranks' results after a lossy all-reduce."""

    AGREED = "agreed"
    """All ranks hold the same bits although the gather leg loses chunks too: receivers tell the shard's owner what they miss,
    the owner sends back the union, and every rank fills the union alike."""
    EXACT = "exact"
    """The gather leg is exact (LTP's broadcast): only contributions are lost, and all ranks hold the same bits."""
    RELAXED = "relaxed"
    """Each rank fills what it misses itself, as in DBLP, MLT and OptiReduce: replicas drift apart. The drift is measured and
    removed every ``resync_rounds`` rounds."""


class CarryBound(enum.Enum):
    """How the carry is kept from growing."""

    NORM = "norm"
    """Whole chunks are dropped, smallest first, until the carry's norm is at most ``limit`` times the gradient's."""
    DECAY = "decay"
    """Half of what a round lost is dropped, so that a chunk lost j times in a row weighs 2^-j; and as ``norm``."""
    AGE = "age"
    """What was not delivered for ``limit`` rounds is dropped."""
    NONE = "none"
    """Nothing is dropped: can diverge at high loss (docs/carry.md); for comparisons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """What a sender does with gradient that did not arrive: it is added to its next one."""

    bound: CarryBound = CarryBound.DECAY
    """How the carry is bounded; the default is measured (docs/carry.md)."""
    limit: float = 1.0
    """The bound: a multiple of the norm of the rank's new gradient (``NORM`` and ``DECAY``), or rounds (``AGE``)."""
    momentum: float = 0.0
    """DGC's momentum correction (arXiv 1712.01887, section 3.2): the carry is of velocities with this factor; 0: of gradients."""
    masking: bool = False
    """DGC's momentum factor masking: the velocity of what was delivered restarts at zero."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0.0 < self.limit < float("inf"):
            raise ConfigError(f"limit={self.limit!r}: a carry's bound is a number above 0")
        if self.bound is CarryBound.AGE and self.limit != int(self.limit):
            raise ConfigError(f"limit={self.limit!r}: CarryBound.AGE counts whole rounds")
        if not 0.0 <= self.momentum < 1.0:
            raise ConfigError(f"momentum={self.momentum!r}: a momentum factor is in [0, 1)")
        if self.masking and not self.momentum:
            raise ConfigError("masking=True: there is no velocity to mask without momentum")


class Tags(enum.Enum):
    """How chunks get their classes."""

    NONE = "none"
    """All of a bounded message's chunks have one class."""
    RANDOM = "random"
    """At random, in the same shares as the others: for comparisons."""
    LAYER = "layer"
    """By the position of the layer that the chunk's gradients belong to (DLCP, MLT)."""
    MAGNITUDE = "magnitude"
    """By the chunk's energy."""
    BOTH = "both"
    """By energy, weighed by the position of the layer."""


class Short(enum.Enum):
    """What happens when ``stop_after_s`` is over and the bound is not met."""

    REPAIR = "repair"
    """The round goes on until the bound is met or its deadline passes."""
    SKIP = "skip"
    """All ranks skip the step alike (OptiReduce's safeguard): the result is zeros everywhere, and the report says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What an all-reduce may lose. The default loses nothing.

    Only floating-point sums and averages may carry a policy with a budget above 0, and only a call that names it.
    """

    budget: float = 0.0
    """Largest missing share of a contribution's chunks, end to end, in [0, 1): over both legs and all hops."""
    gather_budget: float | None = None
    """Share of the result's chunks that the gather leg may miss, over all ranks together; None: a tenth of ``budget`` under
    ``Consistency.AGREED`` and ``RELAXED``, 0 under ``EXACT``."""
    stop: Stop = Stop.STALL
    """When a receiver stops waiting."""
    stop_after_s: float = 0.0
    """Seconds after which ``Stop.DEADLINE`` stops; other rules ignore it."""
    short: Short = Short.REPAIR
    """What happens when that time is over and the bound is not met."""
    fill: Fill = Fill.ZERO
    """What stands in for a missing chunk."""
    consistency: Consistency = Consistency.AGREED
    """What holds between the ranks' results."""
    resync_rounds: int = 100
    """Rounds after which ``Consistency.RELAXED`` makes the replicas equal again; 0: never. ``dblp.attach`` does that, which has
    the parameters; a single all-reduce cannot."""
    carry: Carry | None = None
    """What becomes of gradient that did not arrive; None: it is discarded."""
    tags: Tags = Tags.NONE
    """How chunks get their classes."""
    critical_share: float = 0.0
    """Share of the chunks that is critical: never lost, repaired first; at most 0.1."""
    hadamard: bool = False
    """Rotate gradients by a randomised Hadamard transform, so that a lost chunk takes a little of everything (OptiReduce). Of
    ``dblp.attach``; ``dblp.all_reduce`` refuses it."""
    algorithm: str = "auto"
    """Algorithm of the all-reduce; a call may name another."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.gather_budget is not None and not isinstance(self.gather_budget, Real):
            raise ConfigError(f"gather_budget={self.gather_budget!r}: a number is needed, or None")
        if self.gather_budget is not None:
            object.__setattr__(self, "gather_budget", float(self.gather_budget))
        if self.carry is not None and not isinstance(self.carry, Carry):
            raise ConfigError(f"carry={self.carry!r}: use a dblp.Carry, such as dblp.Carry(), or None")
        if not 0.0 <= self.budget < 1.0:
            raise ConfigError(
                f"budget={self.budget!r}: a loss budget is a share in [0, 1); 0.1 allows 10 % of a peer's chunks to miss"
            )
        if self.gather_budget is not None and not 0.0 <= self.gather_budget <= self.budget:
            raise ConfigError(
                f"gather_budget={self.gather_budget!r}: the gather leg's share of the budget lies in [0, {self.budget:g}]"
            )
        if self.gather_budget and self.consistency is Consistency.EXACT:
            raise ConfigError(
                f"gather_budget={self.gather_budget:g}: Consistency.EXACT loses nothing on the gather leg"
            )
        if self.stop is Stop.ABANDON:
            raise ConfigError(
                "stop='abandon': use Stop.DEADLINE with short=Short.SKIP, which tells all ranks"
            )
        if not 0.0 <= self.stop_after_s < math.inf:
            raise ConfigError(f"stop_after_s={self.stop_after_s!r}: a finite number of seconds, 0 or more")
        if self.stop is Stop.DEADLINE and not self.stop_after_s > 0.0:
            raise ConfigError(
                f"stop_after_s={self.stop_after_s!r}: Stop.DEADLINE needs a time above 0 seconds"
            )
        if self.short is not Short.REPAIR and self.stop is not Stop.DEADLINE:
            raise ConfigError(f"short={self.short.value!r}: only Stop.DEADLINE ends a round below its bound")
        if self.fill is Fill.PREVIOUS and self.lossy and self.consistency is not Consistency.RELAXED:
            raise ConfigError("fill='previous' keeps each rank's own values: it needs consistency='relaxed'")
        if self.carry is not None and self.fill is not Fill.ZERO:
            raise ConfigError(
                f"fill={self.fill.value!r} with carry: what is carried over must not be made up for as well; use one of them"
            )
        if self.carry is not None and self.hadamard:
            raise ConfigError(
                "hadamard with carry: what is carried belongs to parameters, and each round rotates them in another way; use one"
            )
        if not 0.0 <= self.critical_share <= MAX_CRITICAL_SHARE:
            raise ConfigError(
                f"critical_share={self.critical_share!r}: at most {MAX_CRITICAL_SHARE:g} of the chunks may be critical"
            )
        if self.critical_share and self.tags is Tags.NONE:
            raise ConfigError(
                f"critical_share={self.critical_share:g} without tags: say by which value, as in tags=Tags.MAGNITUDE"
            )
        if self.resync_rounds < 0:
            raise ConfigError(f"resync_rounds={self.resync_rounds!r}: a number of rounds, 0 for never")

    @property
    def lossy(self) -> bool:
        """True if this policy may lose anything."""
        return self.budget > 0.0

    @property
    def message_stop(self) -> Stop:
        """The stop rule of this policy's messages."""
        return Stop.ABANDON if self.short is Short.SKIP else self.stop

    @property
    def gather_leg_budget(self) -> float:
        """Share of the result's chunks that the gather leg may miss."""
        if self.gather_budget is not None:
            return self.gather_budget
        return 0.0 if self.consistency is Consistency.EXACT else DEFAULT_GATHER_SHARE * self.budget

    @property
    def reduce_leg_budget(self) -> float:
        """Share of a contribution's chunks that the reduce leg may miss, so that both legs together miss ``budget``:
        1 - (1 - reduce)(1 - gather) = budget."""
        gather = self.gather_leg_budget
        return (self.budget - gather) / (1.0 - gather)


def Exact() -> Policy:
    """The policy that loses nothing."""
    return _EXACT


_EXACT = Policy()


def Bounded(
    budget: float,
    *,
    stop: Stop | str = Stop.STALL,
    stop_after_s: float = 0.0,
    consistency: Consistency | str = Consistency.AGREED,
    carry: Carry | None = Carry(),
) -> Policy:
    """A policy that may miss at most ``budget`` of each contribution's chunks, keeps the ranks equal and carries what was
    lost over to the next round.

    Raises ConfigError if the budget is outside [0, 1) or a name is unknown.
    """
    return Policy(
        budget=budget,
        stop=named(Stop, "stop", stop),
        stop_after_s=stop_after_s,
        consistency=named(Consistency, "consistency", consistency),
        carry=carry,
    )
