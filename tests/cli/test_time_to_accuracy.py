"""Training over a network in virtual time: real rounds, equal time for equal seeds, and what is told of them."""

import argparse
from dataclasses import replace

import numpy as np
import pytest

from dblp.cli.train.samples import Samples
from dblp.collectives.presets import preset
from dblp.errors import ConfigError
from tests.benchmarks.time_to_accuracy import (
    ARMS,
    DBLP,
    DEFAULT,
    EAGER,
    EXACT,
    MLT,
    WORKERS,
    Run,
    _data,
    _records_of,
    arm,
    experiment,
    records,
    run_of,
    savings,
)
from tests.benchmarks.virtual_workers import Arm, Star, Step, VirtualWorkers

ELEMENTS = 30_000
STAR = Star(rate_bps=2e8)


class Layers:
    """Two layers, half of the elements each."""

    layer_count = 2

    def layer_of(self, elements):
        return (elements >= ELEMENTS // 2).astype(np.int32)


def workers(chosen, **options):
    settings = {"epoch_steps": 2, "compute_s": 0.01, "loss": 0.8, "bursts": frozenset({1})}
    return VirtualWorkers(
        chosen, STAR, ranks=WORKERS, elements=ELEMENTS, layers=Layers(), **{**settings, **options}
    )


def gradients(step):
    """Whole numbers, so that sums are exact in any order."""
    return np.random.default_rng(step).integers(-8, 9, (WORKERS, ELEMENTS)).astype(np.float32)


@pytest.mark.parametrize("name", [EXACT, DEFAULT])
def test_without_loss_the_average_is_exact_and_takes_virtual_time(name):
    group = workers(arm(name, 0.008), bursts=frozenset())
    for step in range(2):
        mean = gradients(step).mean(0)
        np.testing.assert_array_equal(group.all_reduce(gradients(step)), mean)
    group.close()
    shortest = 1.5 * 8 * 4 * ELEMENTS / STAR.rate_bps
    assert all(step.seconds > shortest and step.missing_share == 0.0 for step in group.steps)
    assert group.seconds > 2 * (0.01 + shortest)


def test_eager_servers_leave_their_share_and_each_rank_gets_its_own():
    group = workers(arm(MLT, 0.2))
    results = [group.all_reduce(gradients(step)).copy() for step in range(2)]
    clean, burst = group.steps
    assert results[0].shape == (WORKERS, ELEMENTS) and burst.burst and not clean.burst
    assert 0.05 < clean.missing_share <= 0.2
    assert burst.seconds > 2 * clean.seconds
    assert any((results[1][0] != row).any() for row in results[1][1:])
    drifted = results[1].copy()
    group.resynchronise(drifted)
    assert (drifted[0] != drifted[3]).any(), "not before its time"
    group._synced_at = -preset(MLT).policy.resync_rounds
    group.resynchronise(drifted)
    group.close()
    assert all((row == results[1][0]).all() for row in drifted)


def test_phases_follow_the_epochs_and_runs_repeat():
    """The first epoch is critical; its norm and the next one's are equal, so the third step is still critical, the fourth not."""
    found = []
    for _ in range(2):
        group = workers(arm(DBLP, 0.01), bursts=frozenset())
        for _ in range(4):
            group.all_reduce(gradients(0))
        group.close()
        found.append(tuple(group.steps))
    assert found[0] == found[1]
    assert [step.tolerant for step in found[0]] == [False, False, False, True]
    assert found[0][3].missing_share > 0.25 > 0.05 > found[0][0].missing_share


def test_eager_default_is_dblp_by_value():
    low, high = preset("dblp").policy, preset("dblp").tolerant
    assert high is not None
    chosen = arm(EAGER, 0.008)
    assert (chosen.policy.budget, chosen.policy.gather_leg_budget) == (low.budget, low.gather_leg_budget)
    assert not chosen.drifts and arm(DBLP, 0.008).drifts
    assert chosen.controller is not None and chosen.policy.carry is not None
    assert arm(DBLP, 0.008, "direct").policy.algorithm == "direct"


def run(name, accuracies, round_s):
    tested = np.arange(1, len(accuracies) + 1) * 10
    steps = [
        Step(seconds=round_s, burst=number == 0, tolerant=False, missing_share=0.1, energy_lost=0.0)
        for number in range(10 * len(accuracies))
    ]
    return Run(
        arm=name, model="mlp", seed=0, tested_at=tested, seconds=tested * (round_s + 0.5), perplexity=None,
        accuracies=np.array(accuracies), steps=tuple(steps), compute_s=0.5,
    )  # fmt: skip


def test_time_to_accuracy_is_straight_between_tests_of_the_best_so_far():
    slow, quick = run(MLT, [0.5, 0.4, 0.9], 2.0), run(DBLP, [0.6, 0.8, 0.7], 1.0)
    assert slow.time_to(0.5, 0.0) == pytest.approx(20.0)
    assert slow.time_to(0.7, 0.0) == pytest.approx(50.0), "half way from 0.5, which 20 steps did not better"
    assert slow.time_to(0.7, 1.0) == pytest.approx(75.0)
    assert np.isnan(slow.time_to(0.95, 0.0))
    by_arm = {record["policy"]: record for record in records([slow, quick])}
    assert by_arm[DBLP]["target_accuracy"] == 0.8
    assert by_arm[DBLP]["total_saving_compute_0"] == pytest.approx(0.5)
    assert by_arm[DBLP]["total_saving_compute_1"] == pytest.approx(0.25), (
        "computing as long as a round of MLT"
    )
    assert by_arm[DBLP]["to_target_saving_compute_0"] == pytest.approx(1 - 20 / 55)
    assert by_arm[MLT]["to_target_saving_compute_0"] == 0.0


def test_records_of_several_files_are_compared_as_the_runs_were():
    runs = [run(MLT, [0.5, 0.4, 0.9], 2.0), run(DBLP, [0.6, 0.8, 0.7], 1.0)]
    found = records(runs)
    again = savings([run_of(record) for record in found])
    for record, saved in zip(found, again, strict=True):
        assert saved == {name: record[name] for name in saved}


def test_bursts_count_as_often_as_in_dblp_s_experiments():
    rare = run(MLT, [0.5, 0.9], 1.0)
    steps = tuple(replace(step, seconds=94.0) if step.burst else step for step in rare.steps)
    assert replace(rare, steps=steps).total_of_rare_bursts(0.5) == pytest.approx(
        20 * (1.0 + 93 * 2 / 930 + 0.5)
    )


def test_labels_are_drawn_at_random_for_the_training_alone():
    clean, noisy = _data("mlp", 0.0), _data("mlp", 0.2)
    changed = np.mean(clean.train_targets != noisy.train_targets)
    assert 0.14 < changed < 0.22, "a tenth of those that are drawn stays"
    assert (clean.test_targets == noisy.test_targets).all()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        ("not JSON", "not what --json of this benchmark wrote"),
        ("[]", "not what --json of this benchmark wrote"),
        ('{"records": [{"arm": "exact"}]}', "not what --json of this benchmark wrote"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, content, says):
    file = tmp_path / "runs.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"--read .*runs.json: .*{says}"):
        _records_of(file)


@pytest.mark.slow
def test_a_training_of_two_steps():
    options = argparse.Namespace(
        epochs=1, epoch_steps=2, transfer=0.005, delay=31e-6, compute=2.0, algorithm="", label_noise=0.2
    )
    found = experiment(options, Samples(_data("resnet", 0.2)), EAGER, "resnet", 0)
    assert found.tested_at.tolist() == [1, 2] and len(found.steps) == 2 and found.steps[0].burst
    assert (np.diff(found.seconds) > 0.01).all() and found.compute_s == 0.01
    assert EAGER in ARMS and isinstance(arm(EAGER, 0.1), Arm)
