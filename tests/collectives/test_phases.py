"""Detectors of training phases: told numbers, answer phases."""

# mypy: disable-error-code="arg-type, list-item"
# Wrong types are what some tests are about.

import json
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.collectives.phases import (
    AnyOf,
    Detector,
    Hold,
    LearningRateChange,
    Manual,
    Metric,
    Needs,
    NormChange,
    Observation,
    Phase,
    Phases,
    Schedule,
    relative_change,
)
from dblp.errors import ConfigError

C, T = Phase.CRITICAL, Phase.TOLERANT


def run(detector, **series):
    """The model's phase at each check; ``series``: one list a field of Observation."""
    (count,) = {len(values) for values in series.values()}
    return [
        detector.check(
            Observation(**{"iteration": i, **{name: values[i] for name, values in series.items()}})
        ).model
        for i in range(count)
    ]


def test_dblps_rule():
    """Critical at first, then where the norm changed by half or more since the check before; eta is 0.5."""
    norms = [4.0, 6.1, 9.15, 4.6, 2.31, 1.155, 1.0, 0.4]
    assert run(NormChange(), norm=norms) == [C, C, C, T, T, C, T, C]
    assert NormChange().eta == 0.5


@pytest.mark.parametrize(
    ("previous", "current", "expected"),
    [(1.0, 1.5, C), (1.0, 1.4999, T), (1.0, 0.5, C), (1.0, 0.5001, T), (0.0, 0.0, T), (0.0, 1e-30, C)],
)
def test_the_threshold_belongs_to_the_critical_phase(previous, current, expected):
    assert run(NormChange(0.5), norm=[previous, current])[1] is expected


def test_consecutive_checks_are_compared_not_the_first():
    norms = [8.0 * 0.8**step for step in range(20)]
    assert run(NormChange(0.5), norm=norms) == [C] + [T] * 19


def test_checks_without_a_norm_change_nothing():
    assert run(NormChange(), norm=[None, 1.0, None, 1.1, None, 1.2]) == [C, C, C, T, T, T]
    assert run(NormChange(), norm=[1.0, 9.0, None, 9.0]) == [C, C, C, T]


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=20), st.floats(0.01, 3.0), st.floats(1e-3, 1e3))
def test_the_scale_of_the_gradient_does_not_matter(norms, eta, scale):
    """Powers of two scale exactly, so the phases must be equal, and follow the definition."""
    factor = 2.0 ** round(math.log2(scale))
    phases = run(NormChange(eta), norm=norms)
    assert phases == run(NormChange(eta), norm=[norm * factor for norm in norms])
    for before, now, phase in zip(norms, norms[1:], phases[1:], strict=False):
        assert (phase is C) == (abs(before - now) / before >= eta)


def test_layers_by_themselves():
    detector = NormChange(layers=True)
    assert detector.needs is Needs.LAYER_NORMS
    first = detector.check(Observation(iteration=0, layer_norms={"a": 1.0, "b": 1.0}))
    assert first == Phases(C, {"a": C, "b": C})
    second = detector.check(Observation(iteration=1, layer_norms={"a": 1.1, "b": 2.0}))
    assert second == Phases(C, {"a": T, "b": C})
    third = detector.check(Observation(iteration=2, layer_norms={"a": 1.1, "b": 2.0, "new": 1.0}))
    assert third.layers == {"a": T, "b": T, "new": C} and third.model is C
    assert third.of("a") is T and third.of("never measured") is C
    calm = detector.check(Observation(iteration=3, layer_norms={"a": 1.1, "b": None, "new": 1.0}))
    assert calm.model is T and calm.of("b") is T


def test_nothing_measured_is_critical():
    assert NormChange(layers=True).check(Observation(iteration=0)).model is C


def test_learning_rate_changes():
    """A decay by ten and a warm-up step count, a cosine's small steps do not."""
    cosine = [0.1 * (1 + math.cos(math.pi * step / 100)) / 2 for step in range(10)]
    assert run(LearningRateChange(), learning_rate=cosine) == [C] + [T] * 9
    assert run(LearningRateChange(), learning_rate=[0.1, 0.1, 0.01, 0.01, None, 0.02]) == [C, T, C, T, T, C]
    with pytest.raises(ConfigError, match="optimizer"):
        LearningRateChange().check(Observation(iteration=0))


def test_metric_gains():
    """DBLP's early cut-offs: accuracy above a half, gain below 0.07, one way."""
    accuracies = [0.2, 0.25, 0.45, 0.52, None, 0.57, 0.7, 0.1]
    assert run(Metric(), metric=accuracies) == [C, C, C, C, C, T, T, T]
    assert run(Metric(one_way=False), metric=accuracies) == [C, C, C, C, C, T, C, C]
    assert run(Metric(0.03), metric=[0.6, 0.65, 0.67]) == [C, C, T]
    losses = [-2.0, -1.0, -0.9, -0.89]
    assert run(Metric(0.1001, floor=-math.inf), metric=losses) == [C, C, T, T]


def test_schedules():
    epochs = Schedule(epochs=[(0, 2), (4, 5)])
    assert run(epochs, epoch=list(range(6))) == [C, C, T, T, C, T]
    assert epochs.needs is Needs.NOTHING
    assert run(Schedule(iterations=[(1, 3)]), iteration=list(range(5))) == [T, C, C, T, T]


def test_manual_requests_last():
    assert run(Manual(), request=[None, T, None, C, None]) == [C, T, T, C, C]
    assert run(Manual(T), request=[None]) == [T]


def test_any_critical_is_critical_and_all_see_every_check():
    norm, rate = NormChange(), LearningRateChange()
    both = norm | rate | Schedule(epochs=[(9, 10)])
    assert isinstance(both, AnyOf) and len(both.detectors) == 3
    assert both.needs == Needs.NORM | Needs.LEARNING_RATE
    phases = run(
        both, norm=[1.0, 1.0, 9.0, 9.0, 9.0], learning_rate=[0.1, 0.1, 0.1, 0.01, 0.01], epoch=[0, 1, 2, 3, 9]
    )
    assert phases == [C, T, C, C, C]


def test_a_critical_model_makes_its_layers_critical():
    both = NormChange(layers=True) | Manual(T)
    both.check(Observation(iteration=0, layer_norms={"a": 1.0}))
    assert both.check(Observation(iteration=1, layer_norms={"a": 1.0})).of("a") is T
    asked = both.check(Observation(iteration=2, layer_norms={"a": 1.0}, request=C))
    assert asked.of("a") is C and asked.model is C


@pytest.mark.parametrize(("intervals", "expected"), [(1, [C, T, T, T]), (2, [C, C, T, T]), (3, [C, C, C, T])])
def test_hysteresis(intervals, expected):
    assert run(Hold(NormChange(), intervals), norm=[1.0] * 4) == expected


def test_hysteresis_starts_anew_at_each_detection():
    found = [C, T, C, T, T, T]
    assert run(Hold(Manual(), 2), request=found) == [C, C, C, C, T, T]


@settings(deadline=None)
@given(st.lists(st.sampled_from([C, T]), max_size=30), st.integers(1, 5))
def test_hysteresis_by_its_definition(found, intervals):
    """Critical iff one of the last ``intervals`` checks was."""
    held = run(Hold(Manual(), intervals), request=found) if found else []
    for index, phase in enumerate(held):
        assert (phase is C) == (C in found[max(0, index - intervals + 1) : index + 1])


def test_hysteresis_of_layers():
    held = Hold(NormChange(layers=True), 2)
    held.check(Observation(iteration=0, layer_norms={"a": 1.0, "b": 1.0}))
    held.check(Observation(iteration=1, layer_norms={"a": 1.0, "b": 3.0}))
    phases = held.check(Observation(iteration=2, layer_norms={"a": 1.0, "b": 3.0}))
    assert phases.layers == {"a": T, "b": C}


DETECTORS: dict[str, Callable[[], Detector]] = {
    "norm": NormChange,
    "layers": lambda: NormChange(layers=True),
    "rate": LearningRateChange,
    "metric": Metric,
    "schedule": lambda: Schedule(epochs=[(1, 3)]),
    "manual": Manual,
    "hold": lambda: Hold(NormChange(), 3),
    "all": lambda: NormChange() | Hold(Metric(one_way=False), 2) | LearningRateChange() | Manual(T),
}


@st.composite
def observations(draw):
    number = st.one_of(st.none(), st.floats(0.01, 100.0))
    return Observation(
        iteration=draw(st.integers(0, 9)),
        epoch=draw(st.integers(0, 4)),
        norm=draw(number),
        layer_norms=draw(st.dictionaries(st.sampled_from("abc"), number)),
        learning_rate=draw(st.floats(0.01, 1.0)),
        metric=draw(number),
        request=draw(st.sampled_from([None, C, T])),
    )


@pytest.mark.parametrize("name", DETECTORS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_saved_detector_goes_on_as_if_nothing_had_happened(name, data):
    """Through JSON, as a checkpoint may go, at any point of any series of observations."""
    series = data.draw(st.lists(observations(), max_size=12))
    cut = data.draw(st.integers(0, len(series)))
    one, other = DETECTORS[name](), DETECTORS[name]()
    for seen in series[:cut]:
        one.check(seen)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert [one.check(seen) for seen in series[cut:]] == [other.check(seen) for seen in series[cut:]]


def checked(detector):
    detector.check(Observation(iteration=0, norm=1.0, layer_norms={"a": 1.0}))
    return detector


@pytest.mark.parametrize(
    ("detector", "state", "words"),
    [
        (NormChange(), LearningRateChange().state_dict(), "'LearningRateChange' does not fit NormChange"),
        (NormChange(), {}, "does not fit"),
        (NormChange(), None, "does not fit"),
        (NormChange(), {"kind": "NormChange", "previous": {}, "phases": {"": "odd"}}, "'odd'"),
        (Metric(), {"kind": "Metric"}, "no state of Metric"),
        (Manual() | Metric(), {"kind": "AnyOf"}, "no state of AnyOf"),
        (Manual() | Metric(), {"kind": "AnyOf", "detectors": []}, "state of 0 detectors, and here are 2"),
        (NormChange(), checked(NormChange(layers=True)).state_dict(), "measured each layer"),
        (NormChange(layers=True), checked(NormChange()).state_dict(), "measured the whole model"),
        (Hold(Manual(), 2), {"kind": "Hold", "left": {}, "detector": {"kind": "Metric"}}, "'Metric'"),
    ],
)
def test_states_of_others_are_refused(detector, state, words):
    with pytest.raises(ConfigError, match=words):
        detector.load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NormChange(0.0), "eta"),
        (lambda: NormChange(math.nan), "eta"),
        (lambda: LearningRateChange(-1.0), "change"),
        (lambda: Metric(math.nan), "gain"),
        (lambda: Schedule(epochs=[(3, 3)]), r"epochs=\[\(3, 3\)\]"),
        (lambda: Schedule(iterations=[(-1, 3)]), "iterations"),
        (lambda: Manual("calm"), "'critical', 'tolerant'"),
        (lambda: Hold(Manual(), 0), "intervals"),
        (lambda: AnyOf(), "at least one"),
        (lambda: NormChange("0.5"), "eta='0.5'"),
        (lambda: NormChange(True), "eta=True"),
        (lambda: NormChange(layers="no"), "layers='no': True or False"),
        (lambda: LearningRateChange("x"), "change='x'"),
        (lambda: Metric(gain="x"), "gain='x'"),
        (lambda: Metric(one_way=1), "one_way=1: True or False"),
        (lambda: Hold(Manual(), 1.5), "intervals=1.5"),
        (lambda: Hold(Manual(), math.nan), "intervals=nan"),
        (lambda: Hold(Manual, 2), r"no detector: .* made: Manual\(\)"),
        (lambda: Hold("x", 2), "'x' is no detector"),
        (lambda: AnyOf(Manual(), NormChange), r"made: NormChange\(\)"),
        (lambda: Schedule(epochs=(0, 5)), r"epochs=\(0, 5\): a list of spans"),
        (lambda: Schedule(epochs=[(0, 1.5)]), r"\(0, 1.5\) is no span"),
        (lambda: Schedule(iterations=[(0, math.inf)]), "is no span"),
        (lambda: Schedule(iterations=[(0, 1, 2)]), "is no span"),
        (lambda: Schedule(iterations=3), "a list of spans"),
    ],
)
def test_wrong_settings_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    ("detector", "name"),
    [
        (Manual(), "phase"),
        (NormChange(), "etta"),
        (Hold(Manual(), 2), "interval"),
        (Schedule(), "epoch"),
        (Metric(), "gains"),
    ],
)
def test_misspelt_settings_are_errors(detector, name):
    with pytest.raises(AttributeError, match=name):
        setattr(detector, name, 3)


def test_only_detectors_are_joined():
    with pytest.raises(TypeError, match="unsupported operand"):
        Manual() | Manual


def test_relative_change():
    assert relative_change(2.0, 3.0) == 0.5 == relative_change(2.0, 1.0)
    assert relative_change(0.0, 0.0) == 0.0 and relative_change(0.0, 1.0) == math.inf


def test_a_detector_of_ones_own():
    class Odd(Detector):
        def check(self, seen):
            return Phases(C if seen.iteration % 2 else T)

    assert run(Odd() | Manual(T), iteration=[0, 1, 2]) == [T, C, T]
    Odd().load_state_dict(Odd().state_dict())
