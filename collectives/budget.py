"""Budgets that follow the training phase, and a cap on the share of the gradient's energy that is lost.

``BudgetController`` turns a base policy into the policy of the next rounds: P_low in critical phases, P_high in tolerant ones,
for the model or for layers by name, for both legs. A round that carries several layers gets the lowest of their budgets.

Theory of operation. All ranks must use the same budget in a round, so all must decide alike. They count iterations and epochs
alike by construction; all else that a check looks at may differ: what each rank lost, a learning rate or a metric that one rank
alone knows, gradients under ``Consistency.RELAXED``, and even the norm of equal gradients in its last bit, because a sum
depends on the number of threads and the kind of CPU. So at each check the ranks reduce one short vector (``Observation`` as
float64, by MAX, exact) and all decide from the result. MAX is what each entry needs: the rank that lost most, critical before
tolerant, a number before none. The counts are in it twice, once negated, so ranks that disagree on them get a MismatchError
instead of silently different budgets. Between checks nothing is exchanged, and a detector that looks at counts only
(``Schedule``) without a cap needs no exchange at all. Ranks whose controllers are set up differently meet in a MismatchError of
the round that they call with different budgets.

A caller makes these calls, on every rank alike (``collectives/torch/hook.py`` makes them for DDP)::

    controller.epoch()                        # where an epoch begins
    controller.begin_iteration()
    policy = controller.policy(base, names)   # of each round
    controller.hear(report)                   # of each round
    await agree(group, controller, norm=...)  # when all of them have ended

Source: P_low, P_high = P_low + 40 points, one check an epoch, P_low at first: DBLP (arXiv 2605.01989). The decision on one
place and its broadcast: Accordion (arXiv 2010.16248) decides on rank 0; here each rank decides, from equal numbers. The cap is
dblp's own: halved when too much is lost and raised slowly while not, like a congestion window (additive increase,
multiplicative decrease).
"""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.epochs import epoch_number
from dblp.collectives.group import Group
from dblp.collectives.phases import ETA, Detector, Needs, NormChange, Observation, Phase, Phases, parse_phase
from dblp.collectives.report import Report
from dblp.errors import ConfigError, MismatchError
from dblp.transport.fields import check_fields
from dblp.transport.policy import DEFAULT_GATHER_SHARE, Consistency, Policy

Vector = npt.NDArray[np.float64]

DBLP_LOW = 0.008
"""P_low of EfficientNetB0, AlexNet and GPT-2-S in DBLP, table I; ResNet50 has 0.024."""
DBLP_STEP = 0.40
"""P_high - P_low in DBLP."""
STATE_VERSION = 1
"""Of what ``BudgetController.state_dict`` gives."""
_FULL = 1.0
"""The cap's share at which it does not limit."""
_NEGLIGIBLE_SHARE = 1 / 64
"""Below this the cap's share becomes 0: P_low."""
_CACHE_SIZE = 4096
"""Policies that are kept from round to round: a bucket each."""
_COUNTS = 4
"""Entries of the vector that hold the counts: iteration, epoch and both negated."""
_NUMBERS = ("norm", "energy_lost", "learning_rate", "metric")
"""The entries that follow them; then the request, then a norm for each layer."""
_NONE = -math.inf
"""Stands for what was not measured: MAX takes any number instead."""
_UNNAMED_ITERATIONS = 10_000
"""Iterations without an epoch after which it is likelier that epochs are not named than that the first one goes on."""
_log = logging.getLogger("dblp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """How often a check happens: at the end of the first iteration of so many epochs, or of so many iterations."""

    epochs: int = 0
    """Epochs from check to check; 0: see ``iterations``."""
    iterations: int = 0
    """Iterations from check to check; 0: see ``epochs``."""

    def __post_init__(self) -> None:
        check_fields(self)
        if min(self.epochs, self.iterations) < 0 or bool(self.epochs) == bool(self.iterations):
            raise ConfigError(
                f"Interval(epochs={self.epochs!r}, iterations={self.iterations!r}): one of them is a number from 1"
            )

    def due(self, iteration: int, epoch: int, first_of_epoch: bool) -> bool:
        """True for the iteration at whose end a check happens."""
        if self.iterations:
            return iteration % self.iterations == 0
        return first_of_epoch and epoch % self.epochs == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """The budgets of a critical and of a tolerant phase."""

    low: float
    """P_low, end to end, in [0, 1)."""
    high: float
    """P_high, from P_low, below 1."""
    gather_low: float | None = None
    """Gather leg's budget in a critical phase; None: the share of the budget that it has in the base policy."""
    gather_high: float | None = None
    """The same in a tolerant phase."""

    def __post_init__(self) -> None:
        for name in ("low", "high", "gather_low", "gather_high"):
            value = getattr(self, name)
            if not isinstance(value, Real) and not (value is None and name.startswith("gather")):
                raise ConfigError(f"{name}={value!r}: a share is needed, a number in [0, 1)")
        if not 0.0 <= self.low <= self.high < 1.0:
            raise ConfigError(f"low={self.low!r}, high={self.high!r}: shares with 0 <= low <= high < 1")
        if (self.gather_low is None) != (self.gather_high is None):
            raise ConfigError("gather_low and gather_high go together: give both, or none")
        if self.gather_low is not None and self.gather_high is not None:
            fits = 0.0 <= self.gather_low <= self.low and self.gather_low <= self.gather_high <= self.high
            if not fits:
                raise ConfigError(
                    f"gather_low={self.gather_low!r}, gather_high={self.gather_high!r}: the gather leg's part of "
                    f"low={self.low:g} and high={self.high:g}, rising"
                )

    def at(self, share: float) -> tuple[float, float | None]:
        """Budget and gather budget at a share in [0, 1] of the way from low to high."""
        if self.gather_low is None or self.gather_high is None:
            return _between(self.low, self.high, share), None
        return _between(self.low, self.high, share), _between(self.gather_low, self.gather_high, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyCap:
    """Holds the measured share of the gradient's energy that is lost under ``limit``, by lowering P_high towards P_low.

    Measured is what a round's reports say, weighed by the rounds' bytes, of the rank that lost most. P_low itself is never
    lowered. The cap rests while no budget is above P_low: what is lost then says nothing about P_high.
    """

    limit: float
    """Share of the energy in (0, 1)."""
    interval: Interval = Interval(iterations=10)
    """How often it is looked at."""
    decrease: float = 0.5
    """Factor on the distance from P_low when more was lost; in (0, 1)."""
    increase: float = 0.05
    """Share of P_high - P_low by which the budget rises when not; in (0, 1]."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.interval, Interval):
            raise ConfigError(
                f"interval={self.interval!r}: use dblp.Interval(epochs=1) or dblp.Interval(iterations=...)"
            )
        if not isinstance(self.limit, Real) or not 0.0 < self.limit < 1.0:
            raise ConfigError(f"limit={self.limit!r}: a share of the gradient's energy in (0, 1)")
        if not 0.0 < self.decrease < 1.0 or not 0.0 < self.increase <= 1.0:
            raise ConfigError(
                f"decrease={self.decrease!r}, increase={self.increase!r}: a factor in (0, 1) and a share in (0, 1]"
            )

    def next_share(self, share: float, energy_lost: float | None) -> float:
        """The share of the way from P_low to P_high, after a measurement; None changes nothing."""
        if energy_lost is None:
            return share
        if energy_lost > self.limit:
            lowered = share * self.decrease
            return lowered if lowered >= _NEGLIGIBLE_SHARE else 0.0
        return min(_FULL, share + self.increase)


class BudgetController:
    """Decides the budgets of the next rounds. Neither measures nor communicates; not thread-safe.

    ``state_dict`` belongs in each rank's checkpoint. With rank 0's on all ranks the decisions are still equal on all, but the
    first check misses what the other ranks lost before it.
    """

    __slots__ = (  # so that a misspelt setting is an error
        "__weakref__", "_cap_due", "_due", "_epoch", "_epoch_named", "_iteration", "_layer_norms", "_lost", "_made",
        "_new_epoch", "_norm_needs", "_norms", "_notes", "_phases", "_request", "_share", "average_norms", "budgets",
        "cap", "detector", "interval", "layers",
    )  # fmt: skip

    def __init__(
        self,
        detector: Detector,
        budgets: Budgets,
        *,
        layers: Mapping[str, Budgets] | None = None,
        interval: Interval = Interval(epochs=1),
        cap: EnergyCap | None = None,
        average_norms: bool = False,
    ) -> None:
        """``layers``: budgets of parameters by name pattern (``*`` and ``?``, as in ``"classifier.*"``), the first that fits
        counts, ``budgets`` where none does. ``interval``: how often the detector is asked. ``average_norms``: tell it the root
        mean square of the norms since the last check, not the norm of the iteration that ends in the check: less noise, a norm
        to compute in each iteration. Raises ConfigError for what is none of these.
        """
        _check_kinds(detector, budgets, layers or {}, interval, cap)
        if not isinstance(average_norms, bool):
            raise ConfigError(f"average_norms={average_norms!r}: True or False is needed")
        self.detector = detector
        self.budgets = budgets
        self.layers = dict(layers or {})
        self.interval = interval
        self.cap = cap
        self.average_norms = average_norms
        self._norm_needs = detector.needs & (Needs.NORM | Needs.LAYER_NORMS)
        self._phases = Phases(Phase.CRITICAL)
        self._share = _FULL
        self._iteration = -1  # the running one
        self._epoch = 0
        self._new_epoch = True
        self._epoch_named = False
        self._due = False
        self._cap_due = False
        self._norms = _Squares()
        self._layer_norms: dict[str, _Squares] = {}
        self._lost = _Lost()
        self._notes: dict[str, float] = {}
        self._request: Phase | None = None
        self._made: dict[tuple[Policy, tuple[str, ...]], Policy] = {}

    @property
    def phases(self) -> Phases:
        """The phases as last decided; critical before the first check."""
        return self._phases

    @property
    def cap_share(self) -> float:
        """How far the cap lets budgets rise: 0 is P_low, 1 is P_high."""
        return self._share

    @property
    def iteration(self) -> int:
        """Number of the running iteration from 0; -1 before the first."""
        return self._iteration

    @property
    def measures(self) -> Needs:
        """Norms that must be measured in the running iteration."""
        return self._norm_needs if self._due or self.average_norms else Needs.NOTHING

    def policy(self, base: Policy, names: Sequence[str] = ()) -> Policy:
        """``base`` with the budgets of now, for a round with the parameters ``names``; without names, for the model."""
        key = (base, tuple(names) if self.layers or self._phases.layers else ())
        if (made := self._made.get(key)) is None:
            if len(self._made) >= _CACHE_SIZE:  # someone makes a new base policy for each round
                self._made.clear()
            made = self._made[key] = self._make(base, key[1])
        return made

    def loosest(self, base: Policy) -> Policy:
        """``base`` with the largest budget that any phase and any parameter may have."""
        return replace(
            base,
            budget=max(found.high for found in (self.budgets, *self.layers.values())),
            gather_budget=None,
        )

    def check_base(self, base: Policy) -> None:
        """Raises ConfigError for a policy under which these budgets mean something else than they say."""
        gathers = any(found.gather_high is not None for found in (self.budgets, *self.layers.values()))
        if gathers and base.consistency is Consistency.EXACT:
            raise ConfigError(
                "Budgets(gather_low=..., gather_high=...) with consistency='exact', which loses nothing on the gather leg: leave "
                "them out, or use consistency='agreed'"
            )

    def check_names(self, names: Sequence[str]) -> None:
        """Raises ConfigError if a pattern of ``layers`` fits none of the model's parameters: a budget that nothing gets."""
        for pattern in self.layers:
            if not fnmatch.filter(names, pattern):
                raise ConfigError(
                    f"layers={pattern!r}: no parameter has such a name; there are {', '.join(names[:8])}"
                    f"{' ...' if len(names) > 8 else ''}"
                )

    # telling

    def epoch(self, number: int | None = None) -> None:
        """An epoch begins with the next iteration; None: the one after the last, 0 at first. The running number changes nothing.

        Raises ConfigError for a number below the running epoch's, or for what is none.
        """
        if number is None:
            number = self._epoch + 1 if self._epoch_named or self._iteration >= 0 else 0
        number = epoch_number(number)
        if number < self._epoch:
            raise ConfigError(
                f"epoch({number}) after epoch {self._epoch}: epochs only go up; load_state_dict goes back to a checkpoint"
            )
        self._new_epoch = self._new_epoch or number > self._epoch
        self._epoch, self._epoch_named = number, True

    def note(
        self,
        *,
        learning_rate: float | None = None,
        metric: float | None = None,
        phase: Phase | str | None = None,
    ) -> None:
        """Tell the next check a learning rate, an evaluation metric or a wanted phase; one rank may know them alone.

        Raises ConfigError for what no detector here listens to.
        """
        for need, name, value in [
            (Needs.LEARNING_RATE, "learning_rate", learning_rate),
            (Needs.METRIC, "metric", metric),
            (Needs.REQUEST, "phase", phase),
        ]:
            if value is not None and need not in self.detector.needs:
                raise ConfigError(f"{name}={value!r}: no detector of this controller looks at it")
        for name, number in (("learning_rate", learning_rate), ("metric", metric)):
            if number is None:
                continue
            try:
                self._notes[name] = float(number)
            except (TypeError, ValueError):
                raise ConfigError(f"{name}={number!r}: a number is needed") from None
        if phase is not None:
            self._request = parse_phase(phase)

    def begin_iteration(self) -> None:
        """An iteration begins: its first round comes next."""
        self._iteration += 1
        if self._iteration == _UNNAMED_ITERATIONS:
            self._miss_epochs()
        when = self._iteration, self._epoch, self._new_epoch
        self._due = self.interval.due(*when)
        self._cap_due = self.cap is not None and self.cap.interval.due(*when)
        self._new_epoch = False

    def _miss_epochs(self) -> None:
        """Say so if checks wait for epochs that nobody names."""
        by_epochs = self.interval.epochs or (self.cap is not None and self.cap.interval.epochs)
        if by_epochs and not self._epoch_named:
            _log.warning(
                "%d iterations and no epoch yet: budgets are checked at the beginning of an epoch, so they stay as they are. "
                "Call attachment.epoch(), or epoch() of the controller, where an epoch begins, or use Interval(iterations=...)",
                self._iteration,
            )

    def hear(self, report: Report) -> None:
        """A round of the running iteration has ended on this rank."""
        if self.cap is not None and self._share_at_work():
            self._lost.add(report.nbytes, report.energy_lost)

    # deciding

    def end_iteration(
        self, *, norm: float | None = None, layer_norms: Mapping[str, float] | None = None
    ) -> None:
        """The running iteration has ended, with these L2 norms where ``measures`` asked for them."""
        if self.measures:
            self._norms.add(norm)
            for name, value in (layer_norms or {}).items():
                self._layer_norms.setdefault(name, _Squares()).add(value)

    def vector_to_agree(self) -> Vector | None:
        """After an iteration that ends in a check: the vector that all ranks reduce by MAX and give to ``decide``; else None.

        Where the counts alone decide, they do so here. A check that was due when the state was saved is due after loading it.
        """
        if not (self._due or self._cap_due):
            return None
        vector = self._vector()
        if self.detector.needs or self.cap is not None:
            return vector
        self.decide(vector)
        return None

    def decide(self, agreed: Vector) -> None:
        """Check, with the vector that all ranks have agreed on.

        Raises MismatchError if they do not count the same iterations and epochs, ConfigError if a detector was never told
        what it needs.
        """
        seen = self._observation(agreed)
        if self._cap_due and self.cap is not None:
            self._share = self.cap.next_share(
                self._share, seen.energy_lost if self._share_at_work() else None
            )
            self._lost = _Lost()
        if self._due:
            before, self._phases = self._phases, self._checked(seen)
            self._forget()
            if before.model is not self._phases.model:
                _log.info("%s from iteration %d on", self._phases.model.value, self._iteration + 1)
        self._due = self._cap_due = False
        self._made.clear()

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        """All that decisions depend on, as plain values."""
        return {
            "version": STATE_VERSION,
            "iteration": self._iteration,
            "epoch": self._epoch,
            "new_epoch": self._new_epoch,
            "epoch_named": self._epoch_named,
            "due": [self._due, self._cap_due],
            "phases": self._phases.state(),
            "share": self._share,
            "norms": self._norms.state(),
            "layer_norms": {name: squares.state() for name, squares in self._layer_norms.items()},
            "lost": self._lost.state(),
            "notes": dict(self._notes),
            "request": None if self._request is None else self._request.value,
            "detector": self.detector.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` gave; raises ConfigError if it is not usable here."""
        try:
            if state["version"] != STATE_VERSION:
                raise ConfigError(
                    f"a state of a BudgetController of version {state['version']!r}; this version reads {STATE_VERSION}"
                )
            phases = Phases.from_state(state["phases"])
            due, cap_due = (bool(value) for value in state["due"])
            norms, lost = _Squares(*state["norms"]), _Lost(*state["lost"])
            layer_norms = {str(name): _Squares(*value) for name, value in state["layer_norms"].items()}
            notes = {str(name): float(value) for name, value in state["notes"].items()}
            request = None if state["request"] is None else Phase(state["request"])
            counts = int(state["iteration"]), int(state["epoch"]), float(state["share"])
            flags = bool(state["new_epoch"]), bool(state["epoch_named"])
            detector = state["detector"]
        except ConfigError:
            raise  # it says by itself what is wrong
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"this is no state of a BudgetController: {error!r}") from None
        self.detector.load_state_dict(detector)
        self._iteration, self._epoch, self._share = counts
        self._new_epoch, self._epoch_named = flags
        self._due, self._cap_due = due, cap_due
        self._phases, self._norms, self._layer_norms, self._lost = phases, norms, layer_norms, lost
        self._notes, self._request = notes, request
        self._made.clear()

    # inside

    def _checked(self, seen: Observation) -> Phases:
        found = self.detector.check(seen)
        if not isinstance(found, Phases):
            raise ConfigError(
                f"{type(self.detector).__name__}.check() returned {found!r}: it must return Phases of dblp.collectives.phases, "
                "such as Phases(dblp.Phase.CRITICAL)"
            )
        return found

    def _make(self, base: Policy, names: tuple[str, ...]) -> Policy:
        pairs = [self._budgets_of(name, base) for name in names]
        pairs = pairs or [self._at(self.budgets, self._phases.model, base)]
        budget = min(pair[0] for pair in pairs)
        if all(gather is None for _, gather in pairs):
            return replace(base, budget=budget, gather_budget=None)
        gathers = [DEFAULT_GATHER_SHARE * low if gather is None else gather for low, gather in pairs]
        return replace(base, budget=budget, gather_budget=min(budget, *gathers))

    def _budgets_of(self, name: str, base: Policy) -> tuple[float, float | None]:
        budgets = next(
            (found for pattern, found in self.layers.items() if fnmatch.fnmatchcase(name, pattern)),
            self.budgets,
        )
        return self._at(budgets, self._phases.of(name), base)

    def _at(self, budgets: Budgets, phase: Phase, base: Policy) -> tuple[float, float | None]:
        budget, gather = budgets.at(self._share if phase is Phase.TOLERANT else 0.0)
        if base.consistency is Consistency.EXACT:
            return budget, None  # its gather leg loses nothing whatever the budgets say
        if gather is None and base.gather_budget is not None:
            gather = base.gather_budget / base.budget * budget if base.budget else 0.0
        return budget, gather

    def _share_at_work(self) -> bool:
        return self._phases.model is Phase.TOLERANT or Phase.TOLERANT in self._phases.layers.values()

    def _forget(self) -> None:
        self._norms, self._layer_norms = _Squares(), {}
        self._notes, self._request = {}, None

    def _vector(self) -> Vector:
        request = {None: _NONE, Phase.TOLERANT: 0.0, Phase.CRITICAL: 1.0}[self._request]
        numbers = [self._norms.root(), self._lost.share(), *(self._notes.get(name) for name in _NUMBERS[2:])]
        layers = [squares.root() for _, squares in sorted(self._layer_norms.items())]
        counts = [self._iteration, self._epoch, -self._iteration, -self._epoch]
        return np.array(
            [*counts, *map(_number, numbers), request, *map(_number, layers)],
            np.float64,
        )

    def _observation(self, agreed: Vector) -> Observation:
        iteration, epoch, first, lowest = (int(count) for count in agreed[:_COUNTS])
        if iteration != -first or epoch != -lowest:
            raise MismatchError(
                f"ranks check their budgets in different iterations ({-first} and {iteration}) or epochs "
                f"({-lowest} and {epoch}): all must run the same iterations and name each epoch"
            )
        rest = agreed[_COUNTS:].tolist()
        *numbers, request = rest[: len(_NUMBERS) + 1]
        values = {name: _found(value) for name, value in zip(_NUMBERS, numbers, strict=True)}
        wanted = _found(request)
        norms = zip(sorted(self._layer_norms), rest[len(_NUMBERS) + 1 :], strict=True)
        return Observation(
            iteration=self._iteration,
            epoch=self._epoch,
            layer_norms={name: _found(value) for name, value in norms},
            request=None if wanted is None else Phase.CRITICAL if wanted else Phase.TOLERANT,
            **values,
        )


async def agree(
    group: Group,
    controller: BudgetController,
    *,
    norm: float | None = None,
    layer_norms: Mapping[str, float] | None = None,
) -> None:
    """End an iteration on all ranks of ``group``: at a check, one exact all-reduce of the controller's vector, and its decision.

    Raises what ``Group.all_reduce`` and ``BudgetController.decide`` raise.
    """
    controller.end_iteration(norm=norm, layer_norms=layer_norms)
    if (vector := controller.vector_to_agree()) is not None:
        await group.all_reduce(vector, "max")
        controller.decide(vector)


def dblp_controller(low: float = DBLP_LOW, step: float = DBLP_STEP, eta: float = ETA) -> BudgetController:
    """DBLP's rule: P_low, and P_low + ``step`` while the norm of the whole gradient changed by less than ``eta`` from one epoch's
    check to the next.

    Differences from the paper: it checks at the beginning of an epoch, here the first iteration of the epoch is measured, and the
    decision holds from the next iteration on; of the possible pairs of norms those of consecutive checks are compared.
    """
    return BudgetController(NormChange(eta), Budgets(low=low, high=low + step), interval=Interval(epochs=1))


def _check_kinds(detector: Any, budgets: Any, layers: Any, interval: Any, cap: Any) -> None:
    """Raise ConfigError for an argument of ``BudgetController`` of a wrong type: it would speak up in training."""
    if not isinstance(layers, Mapping):
        raise ConfigError(
            f"layers={layers!r}: dblp.Budgets by name pattern are needed, as in {{'classifier.*': dblp.Budgets(...)}}"
        )
    wanted: list[tuple[str, Any, type | tuple[type, ...], str]] = [
        ("detector", detector, Detector, "a detector, such as dblp.NormChange()"),
        ("budgets", budgets, Budgets, "dblp.Budgets(low=..., high=...)"),
        *(
            ("a pattern of layers", name, str, "a parameter's name, with * and ?, as in 'classifier.*'")
            for name in layers
        ),
        *(
            (f"layers[{name!r}]", found, Budgets, "dblp.Budgets for each pattern")
            for name, found in layers.items()
        ),
        ("interval", interval, Interval, "dblp.Interval(epochs=1) or dblp.Interval(iterations=...)"),
        ("cap", cap, (EnergyCap, type(None)), "dblp.EnergyCap(limit=...) or None"),
    ]
    for name, value, kind, words in wanted:
        if not isinstance(value, kind):
            raise ConfigError(f"{name}={value!r}: use {words}")


class _Squares:
    """Mean of squares; numbers that are not finite are left out."""

    __slots__ = ("count", "total")

    def __init__(self, total: float = 0.0, count: int = 0) -> None:
        self.total = float(total)
        self.count = int(count)

    def add(self, norm: float | None) -> None:
        if norm is not None and math.isfinite(square := norm * norm):
            self.total += square
            self.count += 1

    def root(self) -> float | None:
        return math.sqrt(self.total / self.count) if self.count else None

    def state(self) -> list[float]:
        return [self.total, self.count]


class _Lost:
    """Mean share of energy lost, weighed by bytes."""

    __slots__ = ("lost", "nbytes")

    def __init__(self, lost: float = 0.0, nbytes: float = 0.0) -> None:
        self.lost = float(lost)
        self.nbytes = float(nbytes)

    def add(self, nbytes: int, share: float) -> None:
        if math.isfinite(share):
            self.lost += nbytes * share
            self.nbytes += nbytes

    def share(self) -> float | None:
        return self.lost / self.nbytes if self.nbytes else None

    def state(self) -> list[float]:
        return [self.lost, self.nbytes]


def _between(low: float, high: float, share: float) -> float:
    return min(high, low + share * (high - low))


def _number(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else _NONE


def _found(value: float) -> float | None:
    return value if math.isfinite(value) else None
