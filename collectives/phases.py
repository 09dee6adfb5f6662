"""Phases: when training can do without part of its gradients, and when it cannot.

A detector is told a few numbers at each check (``Observation``) and answers with a phase for the model, and for single layers
where it measures layers. Detectors neither measure nor communicate: who calls them (``budget.BudgetController``) makes sure that
all ranks tell theirs the same numbers, so all ranks get the same answer.

Words: an iteration is one step of the optimiser, with all rounds of its backward pass. A check happens at the end of the first
iteration of each interval (of an epoch, of K iterations), and its answer holds until the next check.

Sources: critical learning regimes (Achille et al., ICLR 2019); the norm test with eta = 0.5, the first interval critical, and a
decay of the learning rate critical too: Accordion (Agarwal et al., MLSys 2021, arXiv 2010.16248); the norm test at each epoch:
DBLP (arXiv 2605.01989).

Differences from the papers. DBLP does not say which two norms it compares at the border of an epoch; its authors' earlier code
compares those of consecutive checks, and so does this. Accordion takes the norm of a gradient that it accumulates over an epoch;
here it is the norm of the averaged gradient of one iteration, or the root mean square over the interval, which needs no copy of
the model. Neither has hysteresis: ``Hold`` adds it. DBLP's earlier code knew three phases by accuracy; a budget has two levels,
so ``Metric`` has one cut-off.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dblp.errors import ConfigError
from dblp.transport.fields import is_number, is_whole

ETA = 0.5
"""Relative change of the gradient's norm from which an interval is critical (Accordion, section 4; DBLP)."""
LEARNING_RATE_CHANGE = 0.1
"""Relative change of the learning rate that counts: a smooth schedule moves by less from check to check, a decay by more."""
METRIC_GAIN = 0.07
"""Gain of accuracy between two evaluations that ends the first phase (DBLP's earlier code)."""
METRIC_FLOOR = 0.5
"""Accuracy below which training is at its start whatever the gain (DBLP's earlier code)."""
_MODEL = ""
"""Key of the whole model among those of its layers: no parameter has an empty name."""


class Phase(enum.Enum):
    """A training regime with a budget."""

    CRITICAL = "critical"
    """What is lost now is not made up for later: the low budget."""
    TOLERANT = "tolerant"
    """The high budget."""

    def __or__(self, other: Phase) -> Phase:
        """Critical if either is."""
        return self if self is Phase.CRITICAL else other


class Needs(enum.Flag):
    """What a detector must be told."""

    NOTHING = 0
    NORM = enum.auto()
    """The L2 norm of the whole averaged gradient."""
    LAYER_NORMS = enum.auto()
    """Those of each parameter."""
    LEARNING_RATE = enum.auto()
    """The optimiser's learning rate."""
    METRIC = enum.auto()
    """An evaluation metric, larger is better."""
    REQUEST = enum.auto()
    """A phase that the user asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a check tells the detectors; None stands for what was not measured since the last check, or is not finite."""

    iteration: int
    """Number of the iteration that has just ended, from 0."""
    epoch: int = 0
    """Number of the epoch that it belongs to, from 0."""
    norm: float | None = None
    """L2 norm of the averaged gradient."""
    layer_norms: Mapping[str, float | None] = field(default_factory=dict)
    """The same by the parameter's name."""
    energy_lost: float | None = None
    """Share of the gradient's energy that was lost, of the rank that lost most."""
    learning_rate: float | None = None
    """The optimiser's learning rate."""
    metric: float | None = None
    """Evaluation metric, larger is better."""
    request: Phase | None = None
    """The phase that the user asked for."""


@dataclass(frozen=True, slots=True)
class Phases:
    """The phase of the model and those of the layers that were measured by themselves."""

    model: Phase
    layers: Mapping[str, Phase] = field(default_factory=dict)

    def of(self, name: str) -> Phase:
        """The phase of the parameter ``name``: its own, else the model's."""
        return self.layers.get(name, self.model)

    def __or__(self, other: Phases) -> Phases:
        """Critical where either is."""
        names = {*self.layers, *other.layers}
        layers = {name: self.of(name) | other.of(name) for name in sorted(names)}
        return Phases(self.model | other.model, layers)

    def state(self) -> dict[str, str]:
        """As plain values for a checkpoint."""
        return {_MODEL: self.model.value} | {name: phase.value for name, phase in self.layers.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, str]) -> Phases:
        """From ``state``; raises KeyError or ValueError for what is none."""
        return cls(
            Phase(state[_MODEL]), {name: Phase(value) for name, value in state.items() if name != _MODEL}
        )


class Detector(ABC):
    """Tells phases. ``a | b`` is critical where either is."""

    __slots__ = ()  # a misspelt setting of one of those below is an error; yours may have any attributes

    needs: Needs = Needs.NOTHING
    """What its observations must contain."""

    @abstractmethod
    def check(self, seen: Observation) -> Phases:
        """The phases from now on; called once a check. Raises ConfigError if it was never told what it needs."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, as plain values."""
        return {"kind": type(self).__name__, **self._state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` gave; raises ConfigError for the state of another detector."""
        kind = type(self).__name__
        if not isinstance(state, Mapping) or state.get("kind") != kind:
            found = state.get("kind") if isinstance(state, Mapping) else state
            raise ConfigError(
                f"the state of a detector {found!r} does not fit {kind}: use the detectors of the run that saved it"
            )
        try:
            self._load(state)
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"this is no state of {kind}: {error!r}") from None

    def __or__(self, other: Detector) -> AnyOf:
        if not isinstance(other, Detector):
            return NotImplemented
        return AnyOf(*_members(self), *_members(other))

    def _state(self) -> dict[str, Any]:
        return {}

    def _load(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # some detectors remember nothing
        """Nothing to take."""


class NormChange(Detector):
    """Critical where the gradient's norm changes fast: abs(previous - current) / previous >= eta, of consecutive checks.

    The first check, and a layer that is measured for the first time, are critical. A check without a finite norm (an overflow
    of scaled gradients) changes nothing.
    """

    __slots__ = ("_phases", "_previous", "eta", "needs")

    def __init__(self, eta: float = ETA, *, layers: bool = False) -> None:
        """``layers``: each parameter by itself (Accordion), and the model critical while one of them is; else the whole model
        (DBLP). Raises ConfigError unless eta is above 0."""
        check_eta(eta)
        _check_flag("layers", layers)
        self.eta = eta
        self.needs = Needs.LAYER_NORMS if layers else Needs.NORM
        self._previous: dict[str, float] = {}
        self._phases: dict[str, Phase] = {}

    def check(self, seen: Observation) -> Phases:
        """Compare with the last check."""
        if self.needs is Needs.NORM:
            return Phases(self._one(_MODEL, seen.norm))
        layers = {name: self._one(name, norm) for name, norm in seen.layer_norms.items()}
        calm = bool(layers) and Phase.CRITICAL not in layers.values()
        return Phases(Phase.TOLERANT if calm else Phase.CRITICAL, layers)

    def _one(self, key: str, norm: float | None) -> Phase:
        if norm is not None:
            previous = self._previous.get(key)
            self._previous[key] = norm
            critical = previous is None or relative_change(previous, norm) >= self.eta
            self._phases[key] = Phase.CRITICAL if critical else Phase.TOLERANT
        return self._phases.get(key, Phase.CRITICAL)

    def _state(self) -> dict[str, Any]:
        phases = {key: phase.value for key, phase in self._phases.items()}
        return {"previous": dict(self._previous), "phases": phases}

    def _load(self, state: Mapping[str, Any]) -> None:
        phases = {str(key): Phase(value) for key, value in state["phases"].items()}
        if phases and (_MODEL in phases) != (self.needs is Needs.NORM):
            found = "the whole model" if _MODEL in phases else "each layer"
            raise ConfigError(
                f"the state of a NormChange that measured {found}: give it the layers=... that it was saved with"
            )
        self._previous = {str(key): float(value) for key, value in state["previous"].items()}
        self._phases = phases


class LearningRateChange(Detector):
    """Critical for the interval in which the learning rate changed: by ``change`` or more since the check before (Accordion's
    second rule, for decays; a rise counts here too). The first check is critical. Combine with ``Hold`` for more intervals."""

    __slots__ = ("_previous", "change")

    needs = Needs.LEARNING_RATE

    def __init__(self, change: float = LEARNING_RATE_CHANGE) -> None:
        """``change``: relative. Raises ConfigError unless it is above 0."""
        if not is_number(change) or not change > 0.0 or not math.isfinite(change):
            raise ConfigError(
                f"change={change!r}: a relative change above 0, such as {LEARNING_RATE_CHANGE:g}"
            )
        self.change = change
        self._previous: float | None = None

    def check(self, seen: Observation) -> Phases:
        """Compare with the last check."""
        rate, previous = seen.learning_rate, self._previous
        if rate is None:
            rate = previous
        if rate is None:
            raise ConfigError(
                "LearningRateChange was told no learning rate: give dblp.attach the optimizer, or note(learning_rate=...) before "
                "each check"
            )
        self._previous = rate
        critical = previous is None or relative_change(previous, rate) >= self.change
        return Phases(Phase.CRITICAL if critical else Phase.TOLERANT)

    def _state(self) -> dict[str, Any]:
        return {"previous": self._previous}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._previous = None if state["previous"] is None else float(state["previous"])


class Metric(Detector):
    """Critical until an evaluation metric is above ``floor`` and gained less than ``gain`` since the evaluation before.

    ``one_way``: tolerant for good from then on, as in DBLP's earlier code; else critical again whenever it gains more. The
    larger metric is the better one: tell minus the loss, with ``floor=-math.inf``.
    """

    __slots__ = ("_phase", "_previous", "floor", "gain", "one_way")

    needs = Needs.METRIC

    def __init__(
        self, gain: float = METRIC_GAIN, *, floor: float = METRIC_FLOOR, one_way: bool = True
    ) -> None:
        if not is_number(gain) or not is_number(floor) or math.isnan(gain) or math.isnan(floor):
            raise ConfigError(f"gain={gain!r}, floor={floor!r}: numbers in the metric's unit")
        _check_flag("one_way", one_way)
        self.gain = gain
        self.floor = floor
        self.one_way = one_way
        self._previous: float | None = None
        self._phase = Phase.CRITICAL

    def check(self, seen: Observation) -> Phases:
        """Compare with the last evaluation; without a new one nothing changes."""
        if seen.metric is not None:
            previous, self._previous = self._previous, seen.metric
            settled = previous is not None and seen.metric > self.floor and seen.metric - previous < self.gain
            if settled:
                self._phase = Phase.TOLERANT
            elif not self.one_way:
                self._phase = Phase.CRITICAL
        return Phases(self._phase)

    def _state(self) -> dict[str, Any]:
        return {"previous": self._previous, "phase": self._phase.value}

    def _load(self, state: Mapping[str, Any]) -> None:
        phase = Phase(state["phase"])
        self._previous = None if state["previous"] is None else float(state["previous"])
        self._phase = phase


class Schedule(Detector):
    """Critical in given spans of epochs or iterations, tolerant elsewhere.

    A check comes at the end of an interval's first iteration, so a span takes effect one iteration after its first.
    """

    __slots__ = ("epochs", "iterations")

    def __init__(
        self,
        *,
        epochs: Iterable[tuple[int, int]] = (),
        iterations: Iterable[tuple[int, int]] = (),
    ) -> None:
        """``epochs``, ``iterations``: spans [first, end) that are critical. Raises ConfigError for an empty or negative one."""
        self.epochs = _spans("epochs", epochs)
        self.iterations = _spans("iterations", iterations)

    def check(self, seen: Observation) -> Phases:
        """Look up the epoch and the iteration."""
        critical = _inside(self.epochs, seen.epoch) or _inside(self.iterations, seen.iteration)
        return Phases(Phase.CRITICAL if critical else Phase.TOLERANT)


class Manual(Detector):
    """The phase that the user asked for last, on any rank: critical wins where ranks ask for different ones."""

    __slots__ = ("_phase",)

    needs = Needs.REQUEST

    def __init__(self, phase: Phase | str = Phase.CRITICAL) -> None:
        """``phase``: until the first request."""
        self._phase = parse_phase(phase)

    def check(self, seen: Observation) -> Phases:
        """Take the request, if there is one."""
        if seen.request is not None:
            self._phase = seen.request
        return Phases(self._phase)

    def _state(self) -> dict[str, Any]:
        return {"phase": self._phase.value}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._phase = Phase(state["phase"])


class AnyOf(Detector):
    """Critical where any of its detectors is; all of them see every check."""

    __slots__ = ("detectors", "needs")

    def __init__(self, *detectors: Detector) -> None:
        if not detectors:
            raise ConfigError("AnyOf() has no detectors: give it at least one")
        for detector in detectors:
            _check_detector(detector)
        self.detectors = detectors
        self.needs = Needs.NOTHING
        for detector in detectors:
            self.needs |= detector.needs

    def check(self, seen: Observation) -> Phases:
        """Ask all."""
        first, *others = [detector.check(seen) for detector in self.detectors]
        for phases in others:
            first |= phases
        return first

    def _state(self) -> dict[str, Any]:
        return {"detectors": [detector.state_dict() for detector in self.detectors]}

    def _load(self, state: Mapping[str, Any]) -> None:
        if len(state["detectors"]) != len(self.detectors):
            raise ConfigError(
                f"the state of {len(state['detectors'])} detectors, and here are {len(self.detectors)}: use the detectors of the "
                "run that saved it"
            )
        for detector, inner in zip(self.detectors, state["detectors"], strict=True):
            detector.load_state_dict(inner)


class Hold(Detector):
    """Hysteresis: what ``detector`` found critical stays so for at least ``intervals`` intervals, that one included."""

    __slots__ = ("_left", "detector", "intervals", "needs")

    def __init__(self, detector: Detector, intervals: int) -> None:
        _check_detector(detector)
        if not is_whole(intervals) or intervals < 1:
            raise ConfigError(f"intervals={intervals!r}: a number of intervals from 1")
        self.detector = detector
        self.intervals = intervals
        self.needs = detector.needs
        self._left: dict[str, int] = {}

    def check(self, seen: Observation) -> Phases:
        """Ask the detector, and hold what was critical."""
        found = self.detector.check(seen)
        layers = {name: self._one(name, phase) for name, phase in found.layers.items()}
        return Phases(self._one(_MODEL, found.model), layers)

    def _one(self, key: str, phase: Phase) -> Phase:
        left = self.intervals if phase is Phase.CRITICAL else self._left.get(key, 0)
        self._left[key] = max(0, left - 1)
        return Phase.CRITICAL if left else Phase.TOLERANT

    def _state(self) -> dict[str, Any]:
        return {"left": dict(self._left), "detector": self.detector.state_dict()}

    def _load(self, state: Mapping[str, Any]) -> None:
        left = {str(key): int(value) for key, value in state["left"].items()}
        self.detector.load_state_dict(state["detector"])
        self._left = left


def relative_change(previous: float, current: float) -> float:
    """abs(previous - current) / previous, for numbers from 0; from 0 to anything else it is infinite, from 0 to 0 it is 0."""
    difference = abs(previous - current)
    if difference == 0.0:
        return 0.0
    return difference / abs(previous) if previous else math.inf


def _members(detector: Detector) -> Sequence[Detector]:
    return detector.detectors if isinstance(detector, AnyOf) else (detector,)


def _spans(name: str, spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    try:
        found = [tuple(span) for span in spans]
    except TypeError:
        raise ConfigError(
            f"{name}={spans!r}: a list of spans (first, end) is needed, as in {name}=[(0, 5)]"
        ) from None
    for span in found:
        whole = len(span) == 2 and all(map(is_whole, span))
        if not whole or not 0 <= span[0] < span[1]:
            raise ConfigError(
                f"{name}={found}: {span} is no span (first, end) of whole numbers from 0, first < end"
            )
    return tuple((int(first), int(end)) for first, end in found)


def check_eta(eta: object) -> None:
    """Raise ConfigError for what is no relative change of a norm."""
    if not is_number(eta) or not eta > 0.0 or not math.isfinite(eta):
        raise ConfigError(f"eta={eta!r}: a relative change above 0, such as {ETA:g}")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: True or False is needed")


def _check_detector(value: object) -> None:
    if not isinstance(value, Detector):
        made = f", made: {value.__name__}()" if isinstance(value, type) else ""
        raise ConfigError(f"{value!r} is no detector: give one, such as dblp.NormChange(){made}")


def _inside(spans: Sequence[tuple[int, int]], number: int) -> bool:
    return any(first <= number < end for first, end in spans)


def parse_phase(value: Phase | str) -> Phase:
    """A phase or its name; raises ConfigError for what is neither."""
    try:
        return Phase(value)
    except ValueError:
        names = ", ".join(repr(phase.value) for phase in Phase)
        raise ConfigError(f"phase={value!r}: use one of {names}") from None
