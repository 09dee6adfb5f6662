"""The lossy all-reduce behind the published table of fills and carries: what is delivered, what stays."""

import numpy as np
import pytest

from dblp.collectives.presets import preset
from dblp.transport.policy import Carry, CarryBound, Fill, Policy, Tags
from tests.benchmarks.carry_table import ARMS, response
from tests.benchmarks.lossy_all_reduce import CHUNK, NO_REPAIR, LossyAllReduce

WORKERS, LENGTH = 4, 20 * CHUNK - 7


def losing(loss, seed, **fields):
    """All that is lost stays lost."""
    return LossyAllReduce(loss, seed, Policy(budget=NO_REPAIR, gather_budget=0.0, **fields))


def gradients(step):
    """Whole numbers, so that sums are exact."""
    return np.random.default_rng(step).integers(-8, 9, (WORKERS, LENGTH)).astype(np.float32)


@pytest.mark.parametrize(
    "options",
    [{}, {"fill": Fill.RESCALE}, {"carry": Carry()}, {"tags": Tags.BOTH, "critical_share": 0.1}],
    ids=["zero", "rescale", "carry", "tags"],
)
def test_nothing_lost_is_the_average(options):
    reduce = losing(0.0, 0, **options)
    for step in range(3):
        np.testing.assert_array_equal(reduce(gradients(step)), gradients(step).mean(0))


def test_zero_and_rescale_are_about_the_share_that_arrived():
    """All gradients 1: with a quarter never lost and half of the rest, zero-fill gives 5/8, rescale 1."""
    ones = np.ones((WORKERS, 2000 * CHUNK), np.float32)
    assert losing(0.5, 0)(ones).mean() == pytest.approx(0.625, abs=0.02)
    np.testing.assert_array_equal(losing(0.5, 0, fill=Fill.RESCALE)(ones), ones[0])


def test_losses_are_those_of_the_seed_whatever_is_done_about_them():
    first, second, third = (losing(0.5, seed)(gradients(0)) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, second)
    assert np.any(first != third)
    np.testing.assert_array_equal(first, losing(0.5, 3, carry=Carry())(gradients(0)))


def test_a_workers_own_shard_arrives_always():
    """Nothing else arrives: each shard holds its owner's gradient alone."""
    average = losing(1.0, 0)(gradients(0))
    shards = (np.arange(20) * WORKERS // 20).repeat(CHUNK)[:LENGTH]
    np.testing.assert_array_equal(average * WORKERS, gradients(0)[shards, np.arange(LENGTH)])


def test_an_unbounded_carry_delivers_all_but_what_it_holds():
    reduce = losing(0.5, 1, carry=Carry(bound=CarryBound.NONE))
    delivered = sum(reduce(gradients(step)) for step in range(12)) * WORKERS
    contributed = sum(gradients(step).sum(0) for step in range(12))
    assert np.any(reduce.carried())
    np.testing.assert_array_equal(delivered + reduce.carried().sum(0), contributed)


def test_a_norm_bounds_what_is_carried():
    reduce = losing(0.8, 1, carry=Carry(bound=CarryBound.NORM, limit=0.5))
    for step in range(6):
        reduce(gradients(step))
        norms = np.linalg.norm(reduce.carried(), axis=1) / np.linalg.norm(gradients(step), axis=1)
        assert np.all(norms <= 0.500001)
        assert np.any(norms > 0.3)


def test_velocities_stand_for_gradients_with_momentum():
    """A constant gradient of 1 and momentum 1/2, nothing lost: 1, 3/2, 7/4."""
    reduce = losing(0.0, 0, carry=Carry(momentum=0.5))
    ones = np.ones((WORKERS, 10), np.float32)
    assert [float(reduce(ones)[0]) for _ in range(3)] == [1.0, 1.5, 1.75]


def test_what_is_critical_arrives_and_what_exceeds_the_budget_is_repaired_by_value():
    """One message of 25 chunks to each other worker, of which all are lost: 2 are critical, 10 more are repaired."""
    rng = np.random.default_rng(0)
    rows = np.repeat(rng.permuted(np.arange(1, 101)), CHUNK).astype(np.float32)
    policy = Policy(budget=0.52, gather_budget=0.0, tags=Tags.MAGNITUDE, critical_share=0.1)
    reduce = LossyAllReduce(1.0, 0, policy)
    average = reduce(np.stack([rows] * WORKERS))
    counts = np.rint(average * WORKERS / rows).reshape(-1, CHUNK)[:, 0]
    assert reduce.missing_share == 13 / 25
    for shard in range(WORKERS):
        part = slice(25 * shard, 25 * (shard + 1))
        arrived = counts[part] == WORKERS
        assert np.all(arrived | (counts[part] == 1)) and arrived.sum() == 12
        by_value = np.argsort(-rows.reshape(-1, CHUNK)[part, 0])
        assert arrived[by_value[:9]].all(), "class 0 and 1: 2 and 7 chunks"
        assert not arrived[by_value[18:]].any(), "class 3"


def test_what_starves_is_critical():
    """Under the default preset nothing is lost for ever."""
    policy = preset("default").policy
    reduce = LossyAllReduce(0.4, 0, policy)
    runs, longest = np.zeros((WORKERS, 20), int), 0
    for step in range(60):
        reduce(gradients(step))
        lost = np.any(np.pad(reduce.carried() != 0, ((0, 0), (0, 7))).reshape(WORKERS, 20, CHUNK), axis=2)
        runs = np.where(lost, runs + 1, 0)
        longest = max(longest, runs.max())
    assert 0 < reduce.missing_share < 0.6
    assert 3 <= longest <= 6, "promoted after 3 rounds, one of a message's 5 chunks at a time"


def test_a_burst_every_few_steps_leaves_the_others_whole():
    reduce = LossyAllReduce(0.5, 0, Policy(budget=NO_REPAIR, gather_budget=0.0), every=3)
    whole = [np.array_equal(reduce(gradients(step)), gradients(step).mean(0)) for step in range(6)]
    assert whole == [False, True, True, False, True, True]


@pytest.mark.parametrize("loss", [0.4, 0.8])
@pytest.mark.parametrize("arm", ["zero", "carry", "decay"])
def test_what_arrives_is_what_the_sums_say(arm, loss):
    """A chunk that comes after j losses (chance q^j (1 - q)) brings S_j gradients: 1 under zero-fill, j + 1 with an unbounded
    carry, 2 - 2^-j where half is dropped each round; of noise, the root of 1, j + 1 and (4 - 4^-j) / 3."""
    j = np.arange(200)
    brought, squares = {
        "zero": (np.ones(200), np.ones(200)),
        "carry": (j + 1.0, j + 1.0),
        "decay": (2 - 0.5**j, (4 - 0.25**j) / 3),
    }[arm]
    chance = (1 - loss) * (1 - loss) * loss**j
    mean = (chance * brought).sum()
    wanted = mean, mean / np.sqrt((chance * brought**2).sum()), mean / np.sqrt((chance * squares).sum())
    assert response(ARMS[arm], loss) == pytest.approx(wanted, abs=0.03)
