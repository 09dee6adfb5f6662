"""Presets: the papers' constants, what is refused, and that nothing is lost where the network loses nothing."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from dblp.collectives.algorithms import BOUNDED
from dblp.collectives.carry import Residual
from dblp.collectives.phases import Phase
from dblp.collectives.presets import end_to_end, preset, presets
from dblp.errors import ConfigError
from dblp.transport.config import TransportConfig
from dblp.transport.policy import Consistency, Fill, Policy, Short, Stop, Tags
from tests.collectives.worlds import run_network

NAMES = ("exact", "mlt", "dblp", "ltp", "optireduce", "default")
EAGER = {"mlt", "dblp"}
"""They stop the moment that the bound is met, and throw away what is on its way."""
PATIENT = [name for name in NAMES if name not in EAGER and name != "exact"]
COUNT = 40_000


def test_all_are_there():
    assert presets() == NAMES
    for name in presets():
        assert preset(name).name == name
        assert preset(name).source


@pytest.mark.parametrize("name", NAMES)
def test_presets_are_frozen(name):
    found = preset(name)
    with pytest.raises(FrozenInstanceError):
        found.name = "other"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        found.policy.budget = 0.5  # type: ignore[misc]
    assert preset(name).policy == found.policy


@pytest.mark.parametrize("name", NAMES[1:5])
def test_published_ones_name_their_differences(name):
    found = preset(name)
    assert "arXiv" in found.source
    assert len(found.differences) >= 5
    assert len(set(found.differences)) == len(found.differences)


def test_exact_loses_nothing():
    assert preset("exact").policy == Policy()
    assert not preset("exact").policy.lossy


@pytest.mark.parametrize(("settings", "low"), [({}, 0.008), ({"low": 0.024}, 0.024)])
def test_mlt_misses_p_low_on_both_legs(settings, low):
    policy = preset("mlt", **settings).policy
    assert policy.gather_leg_budget == low
    assert policy.reduce_leg_budget == pytest.approx(low)
    assert (policy.stop, policy.consistency, policy.fill) == (Stop.EAGER, Consistency.RELAXED, Fill.ZERO)
    assert preset("mlt", **settings).controller is None


@pytest.mark.parametrize(("settings", "low"), [({}, 0.008), ({"low": 0.024}, 0.024)])
def test_dblp_is_mlt_with_40_points_more_in_tolerant_phases(settings, low):
    found = preset("dblp", **settings)
    assert found.policy == preset("mlt", **settings).policy
    assert found.tolerant is not None
    assert found.tolerant.gather_leg_budget == pytest.approx(low + 0.40)
    assert found.tolerant.reduce_leg_budget == pytest.approx(low + 0.40)
    assert replace(found.tolerant, budget=0.1, gather_budget=0.05) == replace(
        found.policy, budget=0.1, gather_budget=0.05
    )


def test_dblp_follows_the_phase():
    """It starts in P_low; a norm that changes by less than half makes the next epoch tolerant, one that halves critical."""
    found = preset("dblp")
    assert found.controller is not None
    controller, policies = found.controller(), []
    for norm in (8.0, 7.0, 3.4, 3.4):
        controller.epoch()
        controller.begin_iteration()
        policies.append(controller.policy(found.policy))
        controller.end_iteration(norm=norm)
        vector = controller.vector_to_agree()
        assert vector is not None
        controller.decide(vector)
    policies.append(controller.policy(found.policy))
    critical, tolerant = found.policy, found.tolerant
    assert policies == [critical, critical, tolerant, critical, tolerant]
    assert Phase.TOLERANT is controller.phases.of("")


def test_a_controller_is_made_for_each_model():
    make = preset("dblp").controller
    assert make is not None
    assert make() is not make()


def test_dblp_s_steps_and_eta_are_settings():
    found = preset("dblp", low=0.01, step=0.2, eta=0.3)
    assert found.tolerant is not None
    assert found.tolerant.gather_leg_budget == pytest.approx(0.21)


def test_ltp_loses_pushes_only_and_closes_early():
    found = preset("ltp", share=0.15, deadline_s=0.1)
    policy = found.policy
    assert (policy.gather_leg_budget, policy.reduce_leg_budget) == (0.0, 0.15)
    assert (policy.stop, policy.stop_after_s) == (Stop.DEADLINE, 0.1)
    assert policy.consistency is Consistency.EXACT
    assert found.config(seed=3) == replace(TransportConfig(seed=3), congestion="bbr", copies=1)


def test_optireduce_has_its_time_bound_rotation_and_safeguard():
    policy = preset("optireduce").policy
    assert (policy.stop, policy.stop_after_s, policy.short) == (Stop.DEADLINE, 0.37, Short.SKIP)
    assert (policy.algorithm, policy.hadamard) == ("direct", True)
    assert policy.consistency is Consistency.RELAXED
    assert preset("optireduce", t_b_s=0.2).policy.stop_after_s == 0.2


def test_default_keeps_replicas_and_gradients():
    policy = preset("default").policy
    assert policy.carry is not None
    assert (policy.consistency, policy.stop, policy.tags) == (Consistency.AGREED, Stop.STALL, Tags.BOTH)
    assert preset("default").config() == TransportConfig()


def test_in_the_papers_nothing_is_sent_in_copies():
    assert [preset(name).transport.get("copies") for name in NAMES] == [None, 1, 1, 1, 1, None]


def test_only_mlt_and_dblp_repair_in_passes():
    assert {name for name in NAMES if preset(name).config().repair == "passes"} == {"mlt", "dblp"}


def test_a_configuration_can_be_overruled(monkeypatch):
    monkeypatch.setenv("DBLP_PATHS", "2")
    assert preset("mlt").config().paths == 2
    assert preset("mlt").config(paths=4, copies=3) == TransportConfig(paths=4, copies=3, repair="passes")


def test_two_legs():
    assert end_to_end(0.5) == 0.75
    assert end_to_end(0.0) == 0.0


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("dlcp", {}, "preset 'dlcp'.*exact, mlt, dblp, ltp, optireduce, default"),
        ("mlt", {"step": 0.4}, "'mlt' has no setting 'step'.*low"),
        ("exact", {"low": 0.1}, "'exact' has no setting 'low'.*none"),
        ("mlt", {"low": 1.5}, "low=1.5: the share"),
        ("dblp", {"low": 0.7}, r"low \+ step=1.1: the share"),
        ("ltp", {"deadline_s": 0.0}, "stop_after_s"),
        ("dblp", {"step": -0.001}, "step=-0.001"),
        ("ltp", {"share": 1.0}, "share=1.0"),
        ("optireduce", {"leg": -0.1}, "leg=-0.1"),
        ("default", {"leg": 1.0}, "leg=1.0"),
        ("default", {"leg": None}, "leg=None"),
        ("dblp", {"low": "x"}, "low='x'"),
        ("dblp", {"step": None}, "step=None"),
        ("dblp", {"eta": -1.0}, "eta=-1.0"),
        ("dblp", {"eta": float("nan")}, "eta=nan"),
        (None, {}, "preset None"),
    ],
)
def test_what_makes_no_policy_is_refused(name, settings, match):
    with pytest.raises(ConfigError, match=match):
        preset(name, **settings)


async def rounds(group, policy, algorithm):
    """Two rounds of standard normal gradients, whose sums depend on their order."""
    carry = Residual(COUNT) if policy.carry is not None else None
    results = []
    for number in range(2):
        gradient = np.random.default_rng([number, group.rank]).standard_normal(COUNT, np.float32)
        report = await group.all_reduce(gradient, "avg", policy=policy, algorithm=algorithm, carry=carry)
        assert report.missing_chunks == report.filled_chunks == 0
        results.append(gradient.tobytes())
    return results


def run_rounds(name, policy, algorithm, world_size=4):
    return run_network(lambda group: rounds(group, policy, algorithm), world_size, **preset(name).transport)


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        (name, algorithm)
        for name in PATIENT
        for algorithm in sorted(BOUNDED)
        if algorithm == "direct" or preset(name).policy.short is Short.REPAIR
    ],
)
def test_without_loss_a_bound_gives_the_bits_of_exact(name, algorithm):
    """Contract C5, over the algorithms; only direct knows ``Short.SKIP``."""
    policy = replace(preset(name).policy, hadamard=False)
    exact = run_rounds("exact", Policy(), algorithm)
    assert run_rounds(name, policy, algorithm) == exact
    assert len({tuple(of_rank) for of_rank in exact}) == 1


@pytest.mark.parametrize("name", sorted(EAGER))
def test_eager_presets_stay_within_their_bound_without_loss(name):
    """At 40.8 % a receiver stops before all has come. At 0.8 % it may not: that is less than one of a message's 115 chunks."""
    policy = preset(name).tolerant or preset(name).policy

    async def member(group):
        gradient = np.ones(COUNT, np.float32)
        report = await group.all_reduce(gradient, "sum", policy=policy)
        return report.missing_share, gradient

    shares, gradients = zip(*run_network(member, 4, **preset(name).transport), strict=True)
    assert max(shares) <= policy.gather_leg_budget
    assert (max(shares) > 0) == (name == "dblp")
    for gradient in gradients:
        assert set(np.unique(gradient)) <= {0.0, 1.0, 2.0, 3.0, 4.0}
        assert np.count_nonzero(gradient) >= (1.0 - policy.budget) * COUNT


def test_exact_repeats_bit_for_bit_whatever_is_lost():
    """Contract C5: the same bits without loss and at 20 %."""
    policy = preset("exact").policy

    async def member(group):
        return await rounds(group, policy, "auto")

    clean, again, lossy = (
        run_network(member, 4, seed=seed, impair=impair)
        for seed, impair in ((1, ""), (2, ""), (3, "loss(0.2)"))
    )
    assert clean == again == lossy
