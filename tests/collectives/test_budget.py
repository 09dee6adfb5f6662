"""Budgets by phase: the controller alone, and on four ranks of a simulated lossy network in virtual time."""

# mypy: disable-error-code="arg-type, attr-defined, dict-item, list-item"
# Wrong types are what some tests are about.

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.collectives.budget import (
    DBLP_LOW,
    BudgetController,
    Budgets,
    EnergyCap,
    Interval,
    agree,
    dblp_controller,
)
from dblp.collectives.phases import (
    Detector,
    LearningRateChange,
    Manual,
    Metric,
    Needs,
    NormChange,
    Phase,
    Schedule,
)
from dblp.collectives.report import Report
from dblp.errors import ConfigError, MismatchError
from dblp.transport.policy import Bounded, Consistency, Exact, Policy
from tests.collectives.worlds import run_network

C, T = Phase.CRITICAL, Phase.TOLERANT
LOW_HIGH = Budgets(low=0.01, high=0.4)
BASE = Bounded(0.2)


def report(energy_lost, nbytes=1000):
    return Report(
        round=0,
        collective="all_reduce",
        algorithm="direct",
        reason="",
        nbytes=nbytes,
        world_size=4,
        duration_s=0.0,
        energy_lost=energy_lost,
    )


def iterate(controller, *, norm=None, layer_norms=None, lost=()):
    """One iteration of a world of one: what it lost, what it measured, and its decision."""
    controller.begin_iteration()
    for share in lost:
        controller.hear(report(share))
    controller.end_iteration(norm=norm, layer_norms=layer_norms)
    if (vector := controller.vector_to_agree()) is not None:
        controller.decide(vector)
    return vector is not None


def end(controller, **measured):
    """The vector of an iteration that ends in a check."""
    controller.end_iteration(**measured)
    vector = controller.vector_to_agree()
    assert vector is not None
    return vector


def test_dblps_preset():
    """P_low 0.8 %, P_high 40 points above it, eta 0.5, one check an epoch, P_low at first: as in the paper."""
    controller = dblp_controller()
    assert controller.budgets.low == DBLP_LOW == 0.008
    assert controller.budgets.high == pytest.approx(0.408)
    assert isinstance(controller.detector, NormChange) and controller.detector.eta == 0.5
    budgets, exchanges = [], 0
    for epoch, norm in enumerate([4.0, 1.9, 1.5, 1.1, 0.5, 0.6]):
        controller.epoch(epoch)
        for _ in range(5):
            budgets.append(controller.policy(BASE).budget)
            exchanges += iterate(controller, norm=norm)
    low, high = [0.008], [controller.budgets.high]
    assert budgets == low * 11 + high * 10 + low * 5 + high * 4, (
        "each decision holds from an epoch's second iteration on"
    )
    assert exchanges == 6
    assert dblp_controller(0.024).budgets.high == pytest.approx(0.424), "ResNet50"


def test_starts_in_p_low_and_measures_only_where_a_check_is():
    controller = BudgetController(NormChange(), LOW_HIGH, interval=Interval(iterations=10))
    assert controller.phases.model is C and controller.policy(BASE).budget == 0.01
    measured = []
    for _ in range(21):
        controller.begin_iteration()
        measured.append(controller.measures is Needs.NORM)
        controller.end_iteration(norm=1.0)
        if (vector := controller.vector_to_agree()) is not None:
            controller.decide(vector)
    assert [i for i, found in enumerate(measured) if found] == [0, 10, 20]
    assert controller.policy(BASE).budget == 0.4


def test_average_of_norms_over_the_interval():
    """The root mean square of 3, 5 and 7 is 5.26; against the first iteration's 10 that is a change of 0.47."""
    controller = BudgetController(NormChange(), LOW_HIGH, interval=Interval(iterations=3), average_norms=True)
    for norm in [10.0, 3.0, 5.0]:
        iterate(controller, norm=norm)
    assert controller.phases.model is C
    iterate(controller, norm=7.0)
    assert controller.phases.model is T
    for unusable in [math.nan, math.inf, None]:
        iterate(controller, norm=unusable)
    assert controller.phases.model is T, "iterations without a finite norm are left out"


@pytest.mark.parametrize(
    ("base", "gather"),
    [
        (Bounded(0.2), None),
        (Policy(budget=0.2, gather_budget=0.05), 0.1),
        (Policy(budget=0.2, gather_budget=0.0), 0.0),
        (Bounded(0.2, consistency="exact"), None),
        (Policy(), None),
    ],
)
def test_both_legs(base, gather):
    """Where budgets say nothing of the gather leg, it keeps its share of the base policy's budget."""
    controller = BudgetController(Schedule(), LOW_HIGH, interval=Interval(iterations=1))
    iterate(controller)
    policy = controller.policy(base)
    assert policy.budget == 0.4 and policy.gather_budget == gather
    assert policy.gather_leg_budget == pytest.approx(
        0.0 if base.consistency is Consistency.EXACT else 0.04 if gather is None else gather
    )
    assert (policy.stop, policy.carry, policy.consistency) == (base.stop, base.carry, base.consistency)


def test_gather_budgets_of_their_own():
    budgets = Budgets(low=0.01, high=0.4, gather_low=0.0, gather_high=0.02)
    controller = BudgetController(Schedule(), budgets, interval=Interval(iterations=1))
    assert controller.policy(BASE).gather_budget == 0.0
    iterate(controller)
    assert controller.policy(BASE).gather_budget == 0.02
    assert controller.policy(Bounded(0.2, consistency="exact")).gather_leg_budget == 0.0


def test_layers_by_pattern():
    controller = BudgetController(
        Schedule(),
        LOW_HIGH,
        layers={
            "head.bias": Budgets(low=0.0, high=0.0),
            "head.*": Budgets(low=0.0, high=0.1, gather_low=0.0, gather_high=0.001),
        },
        interval=Interval(iterations=1),
    )
    iterate(controller)
    assert controller.policy(BASE, ["body.0.weight"]).budget == 0.4
    assert controller.policy(BASE, ["body.0.weight", "head.weight"]).budget == 0.1, "the lowest of a bucket's"
    assert controller.policy(BASE, ["body.0.weight", "head.weight"]).gather_budget == 0.001
    assert not controller.policy(BASE, ["head.weight", "head.bias"]).lossy
    assert controller.policy(BASE) == controller.policy(BASE, ["other"])
    controller.check_names(["head.weight", "head.bias"])
    with pytest.raises(ConfigError, match=r"'head.bias': no parameter .* head.weight"):
        controller.check_names(["head.weight"])


def test_layers_by_their_own_norms():
    controller = BudgetController(NormChange(layers=True), LOW_HIGH, interval=Interval(iterations=1))
    iterate(controller, layer_norms={"a": 1.0, "b": 1.0})
    iterate(controller, layer_norms={"a": 1.0, "b": 2.0})
    assert [controller.policy(BASE, names).budget for names in (["a"], ["b"], ["a", "b"], [])] == [
        0.4,
        0.01,
        0.01,
        0.01,
    ]


def test_epochs():
    controller = BudgetController(Schedule(epochs=[(0, 1)]), LOW_HIGH, interval=Interval(epochs=2))
    for number in [None, 0]:
        controller.epoch(number)  # the first, named twice
    found = []
    for epoch in [0, None, None, 3, None]:
        controller.epoch(epoch)
        for _ in range(2):
            iterate(controller)
        found.append(controller.phases.model)
    assert found == [C, C, T, T, T]
    with pytest.raises(ConfigError, match="epochs only go up"):
        controller.epoch(3)


def test_an_epoch_that_nobody_names_is_the_first():
    controller = dblp_controller()
    assert [iterate(controller, norm=1.0) for _ in range(3)] == [True, False, False]
    controller.epoch()
    assert iterate(controller, norm=1.0) and controller.phases.model is T


@pytest.mark.parametrize(
    ("interval", "named", "warned"),
    [(Interval(epochs=1), False, 1), (Interval(epochs=1), True, 0), (Interval(iterations=5), False, 0)],
)
def test_epochs_that_are_never_named_are_missed_aloud(interval, named, warned, caplog):
    controller = BudgetController(NormChange(0.1), LOW_HIGH, interval=interval)
    if named:
        controller.epoch()
    for _ in range(10_050):
        controller.begin_iteration()
    assert [record.getMessage()[:32] for record in caplog.records] == [
        "10000 iterations and no epoch ye"
    ] * warned


def test_notes_and_their_agreement():
    """Notes reach the next check once; the larger rate, the best metric and the critical request of all ranks count."""
    detector = LearningRateChange() | Metric() | Manual(T)
    one, other = (
        BudgetController(detector_, LOW_HIGH, interval=Interval(iterations=1))
        for detector_ in (detector, LearningRateChange() | Metric() | Manual(T))
    )
    one.note(learning_rate=0.1, metric=0.9)
    other.note(phase="critical", metric=0.8)
    vectors = []
    for controller in (one, other):
        controller.begin_iteration()
        vectors.append(end(controller))
    agreed = np.maximum(*vectors)
    one.decide(agreed)
    other.decide(agreed)
    assert one.state_dict()["detector"] == other.state_dict()["detector"]
    parts = one.state_dict()["detector"]["detectors"]
    assert (parts[0]["previous"], parts[1]["previous"], parts[2]["phase"]) == (0.1, 0.9, "critical")
    one.note(phase=T)
    iterate(one)
    assert one.state_dict()["detector"]["detectors"][2]["phase"] == "tolerant"


def test_ranks_that_count_differently_get_an_error():
    one, other = dblp_controller(), dblp_controller()
    one.begin_iteration()
    other.epoch(5)
    other.begin_iteration()
    agreed = np.maximum(end(one, norm=1.0), end(other, norm=1.0))
    for controller in (one, other):
        with pytest.raises(MismatchError, match="epochs \\(0 and 5\\)"):
            controller.decide(agreed)


# the cap


def test_the_cap_halves_and_rises_slowly():
    cap = EnergyCap(limit=0.1, interval=Interval(iterations=1), increase=0.1)
    controller = BudgetController(Schedule(), LOW_HIGH, interval=Interval(iterations=1), cap=cap)
    iterate(controller, lost=[0.9])
    assert controller.cap_share == 1.0, "the first iteration was critical: P_low is not lowered"
    shares = []
    for lost in [[0.2], [0.3, 0.0], [0.1], [0.0], [math.nan], [0.101]]:
        iterate(controller, lost=lost)
        shares.append(controller.cap_share)
    assert shares == pytest.approx([0.5, 0.25, 0.35, 0.45, 0.45, 0.225])
    assert controller.policy(BASE).budget == pytest.approx(0.01 + 0.225 * 0.39)
    for _ in range(8):
        iterate(controller, lost=[1.0])
    assert controller.cap_share == 0.0 and controller.policy(BASE).budget == 0.01


def test_lost_energy_is_weighed_by_bytes():
    cap = EnergyCap(limit=0.1, interval=Interval(iterations=1))
    controller = BudgetController(Schedule(), LOW_HIGH, interval=Interval(iterations=1), cap=cap)
    iterate(controller)
    for big, share in [(9_000, 1.0), (7_000, 0.5)]:
        controller.begin_iteration()
        controller.hear(report(0.0, big))
        controller.hear(report(1.0, 1_000))
        controller.decide(end(controller))
        assert controller.cap_share == share


@settings(max_examples=50, deadline=None)
@given(
    losses=st.lists(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=3), max_size=30),
    requests=st.lists(st.sampled_from([None, C, T]), max_size=30),
    limit=st.floats(0.001, 0.999),
)
def test_budgets_stay_between_low_and_high(losses, requests, limit):
    cap = EnergyCap(limit=limit, interval=Interval(iterations=2))
    controller = BudgetController(Manual(), LOW_HIGH, interval=Interval(iterations=3), cap=cap)
    for lost, request in zip(losses, requests, strict=False):
        controller.note(phase=request)
        iterate(controller, lost=lost)
        budget = controller.policy(BASE).budget
        assert 0.01 <= budget <= 0.4
        assert budget == 0.01 or controller.phases.model is T


def test_the_cap_holds_what_a_steady_loss_takes():
    """Lost energy is 0.8 of the budget, as with i.i.d. loss above it: the mean settles below the cap, not at P_low."""
    cap = EnergyCap(limit=0.1, interval=Interval(iterations=5))
    controller = BudgetController(Schedule(), LOW_HIGH, interval=Interval(iterations=1), cap=cap)
    lost = []
    for _ in range(400):
        lost.append(0.8 * controller.policy(BASE).budget)
        iterate(controller, lost=[lost[-1]])
    settled = lost[100:]
    assert 0.5 * 0.1 < np.mean(settled) < 0.1
    assert max(settled) < 0.1 + 0.8 * 0.39 * cap.increase, "above it by less than one rise, for one interval"
    assert np.mean(np.array(settled) > 0.1) < 0.3


# checkpoints


SERIES = st.lists(
    st.tuples(
        st.one_of(st.none(), st.floats(0.01, 100.0), st.just(math.nan)),
        st.lists(st.floats(0.0, 1.0), max_size=2),
        st.booleans(),
        st.sampled_from([None, C, T]),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(series=SERIES, cut=st.integers(0, 25), average=st.booleans())
def test_a_saved_controller_decides_as_if_nothing_had_happened(series, cut, average):
    def make():
        return BudgetController(
            NormChange() | NormChange(layers=True) | Manual(T),
            LOW_HIGH,
            layers={"a": Budgets(low=0.0, high=0.2)},
            interval=Interval(epochs=1),
            cap=EnergyCap(limit=0.2, interval=Interval(iterations=3)),
            average_norms=average,
        )

    def play(controller, part):
        found = []
        for norm, lost, epoch, request in part:
            if epoch:
                controller.epoch()
            controller.note(phase=request)
            iterate(controller, norm=norm, layer_norms={} if norm is None else {"a": norm}, lost=lost)
            found.append(controller.policy(BASE, ["a"]))
        return found

    one, other = make(), make()
    play(one, series[:cut])
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert play(one, series[cut:]) == play(other, series[cut:])
    assert one.state_dict() == other.state_dict()


def test_a_checkpoint_in_mid_iteration():
    """Before an iteration's rounds, and between their end and the decision, as the DDP hook saves."""
    one, other, third = dblp_controller(), dblp_controller(), dblp_controller()
    iterate(one, norm=1.0)
    one.epoch()
    one.begin_iteration()
    other.load_state_dict(one.state_dict())
    one.end_iteration(norm=1.2)
    other.end_iteration(norm=1.2)
    third.load_state_dict(other.state_dict())
    for controller in (one, other, third):
        vector = controller.vector_to_agree()
        assert vector is not None
        controller.decide(vector)
        assert controller.phases.model is T and controller.vector_to_agree() is None


@pytest.mark.parametrize("broken", [{}, None, {"version": 1}, {"phases": {"": "odd"}}])
def test_broken_states_are_refused(broken):
    controller = dblp_controller()
    good = controller.state_dict()
    with pytest.raises(ConfigError, match="no state"):
        controller.load_state_dict(broken if not broken else {**good, "phases": {}} | broken)
    assert controller.state_dict() == good


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BudgetController("norm", Budgets(low=0.1, high=0.5)), "detector='norm': use a detector"),
        (lambda: BudgetController(NormChange(), 0.1), "budgets=0.1: use dblp.Budgets"),
        (
            lambda: BudgetController(NormChange(), Budgets(low=0.1, high=0.5), interval=5),
            "interval=5: use dblp.Interval",
        ),
        (
            lambda: BudgetController(NormChange(), Budgets(low=0.1, high=0.5), cap=0.02),
            "cap=0.02: use dblp.EnergyCap",
        ),
        (
            lambda: BudgetController(NormChange(), Budgets(low=0.1, high=0.5), layers={"x": 0.1}),
            r"layers\['x'\]=0.1: use dblp.Budgets",
        ),
        (lambda: Budgets(low="0.1", high=0.5), "low='0.1': a share"),
        (lambda: Interval(epochs=0.5), "epochs=0.5: a whole number"),
        (lambda: EnergyCap(limit="2%"), "limit='2%'"),
        (lambda: EnergyCap(limit=0.1, interval=5), "interval=5: use dblp.Interval"),
        (lambda: Budgets(low=0.1, high=0.5, gather_low="a", gather_high=0.2), "gather_low='a': a share"),
        (lambda: BudgetController(NormChange(), LOW_HIGH, layers={1: LOW_HIGH}), "a pattern of layers=1"),
        (lambda: BudgetController(NormChange(), LOW_HIGH, layers=["a"]), r"layers=\['a'\]"),
        (lambda: BudgetController(NormChange(), LOW_HIGH, average_norms="no"), "average_norms='no'"),
        (lambda: BudgetController(Metric(), LOW_HIGH).note(metric="x"), "metric='x': a number"),
        (lambda: Interval(), "one of them"),
        (lambda: Interval(epochs=1, iterations=1), "one of them"),
        (lambda: Interval(epochs=-1), "one of them"),
        (lambda: Budgets(low=0.5, high=0.4), "low <= high"),
        (lambda: Budgets(low=0.0, high=1.0), "low <= high"),
        (lambda: Budgets(low=0.1, high=0.4, gather_low=0.0), "go together"),
        (lambda: Budgets(low=0.1, high=0.4, gather_low=0.2, gather_high=0.3), "gather leg"),
        (lambda: EnergyCap(limit=0.0), "limit"),
        (lambda: EnergyCap(limit=0.1, decrease=1.0), "decrease"),
        (lambda: EnergyCap(limit=0.1, increase=0.0), "increase"),
        (lambda: dblp_controller().note(metric=0.5), "no detector"),
        (lambda: dblp_controller().note(phase="critical"), "no detector"),
        (lambda: BudgetController(Manual(), LOW_HIGH).note(phase="calm"), "'critical', 'tolerant'"),
    ],
)
def test_wrong_use_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_state_of_another_version_is_named_as_such():
    controller = dblp_controller()
    with pytest.raises(
        ConfigError, match=r"^a state of a BudgetController of version 99; this version reads 1$"
    ):
        controller.load_state_dict({**controller.state_dict(), "version": 99})


def test_a_misspelt_setting_is_an_error():
    with pytest.raises(AttributeError, match="intervall"):
        dblp_controller().intervall = 3


def test_budgets_of_a_leg_that_loses_nothing_are_refused():
    gathers = Budgets(low=0.1, high=0.5, gather_low=0.05, gather_high=0.4)
    for controller in (
        BudgetController(NormChange(), gathers),
        BudgetController(NormChange(), LOW_HIGH, layers={"a": gathers}),
    ):
        controller.check_base(Bounded(0.1))
        with pytest.raises(ConfigError, match="loses nothing on the gather leg"):
            controller.check_base(Bounded(0.1, consistency="exact"))


def test_a_detector_that_returns_no_phases_is_named():
    class Odd(Detector):
        def check(self, seen):
            return Phase.TOLERANT

    controller = BudgetController(Odd(), LOW_HIGH, interval=Interval(iterations=1))
    controller.begin_iteration()
    controller.end_iteration()
    with pytest.raises(ConfigError, match=r"Odd.check\(\) returned .*TOLERANT.*: it must return Phases"):
        controller.vector_to_agree()


# on a network, in virtual time


def gradient(rank, iteration, count=20_000):
    """Falls fast for six iterations, then slowly."""
    scale = 0.4 ** min(iteration, 6)
    return np.random.default_rng([rank, iteration]).normal(0.0, scale, count).astype(np.float32)


async def train(group, controller, iterations, base, noise=0.0):
    """Budget, phase, cap's share and result of each iteration; ``noise``: what norms are off by, other on each rank."""
    seen = []
    for iteration in range(iterations):
        controller.begin_iteration()
        policy = controller.policy(base)
        array = gradient(group.rank, iteration)
        found = await group.all_reduce(array, "avg", policy=policy)
        controller.hear(found)
        norm = float(np.linalg.norm(array)) * (1.0 + noise * ((group.rank + iteration // 2) % 3))
        await agree(group, controller, norm=norm)
        seen.append((found.budget, controller.phases.model, controller.cap_share, array.tobytes()))
    return seen


@pytest.mark.parametrize("noise", [0.0, 0.8])
def test_four_ranks_decide_alike_under_loss(noise):
    """Whatever each rank measures: equal budgets in each round, and equal bits. Without the exchange both cases would differ: the
    energy lost straddles the cap, and norms that are off by up to 160 % straddle eta."""

    async def member(group):
        cap = EnergyCap(limit=0.06, interval=Interval(iterations=2))
        controller = BudgetController(NormChange(), LOW_HIGH, interval=Interval(iterations=2), cap=cap)
        return await train(group, controller, 14, Bounded(0.1, stop="eager"), noise)

    first, *others = run_network(member, 4, seed=5, impair="loss(0.1)")
    assert all(other == first for other in others)
    phases = [phase for _, phase, _, _ in first]
    assert phases[:6] == [C] * 6 and phases[-1] is T
    budgets = [budget for budget, _, _, _ in first]
    assert budgets[0] == 0.01 and max(budgets) == pytest.approx(0.4)
    assert first[-1][2] < 1.0, "the eager rule took more than 6 % of the energy on a rank"


def test_one_rank_in_another_epoch_raises_everywhere():
    async def member(group):
        controller = dblp_controller()
        controller.epoch(1 if group.rank == 2 else 0)
        try:
            await train(group, controller, 2, Exact())
        except MismatchError as error:
            return str(error)
        raise AssertionError("no error")

    texts = run_network(member, 4, seed=6)
    assert all("epochs (0 and 1)" in text for text in texts), texts


def test_ranks_with_different_budgets_meet_in_a_mismatch():
    """No silent divergence: the round's signature holds the budget."""

    async def member(group):
        high = 0.3 if group.rank == 1 else 0.4
        controller = BudgetController(
            Schedule(), Budgets(low=0.01, high=high), interval=Interval(iterations=1)
        )
        try:
            await train(group, controller, 3, Bounded(0.1))
        except MismatchError as error:
            return str(error)
        raise AssertionError("no error")

    texts = run_network(member, 2, seed=7)
    assert any("0.3" in text and "0.4" in text for text in texts), texts
