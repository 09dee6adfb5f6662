"""The lossy all-reduce behind the published table of fills and carries: what is delivered, what stays."""

import numpy as np
import pytest

from dblp.transport.policy import Carry, CarryBound, Fill
from tests.benchmarks.lossy_all_reduce import CHUNK, LossyAllReduce

WORKERS, LENGTH = 4, 20 * CHUNK - 7


def gradients(step):
    """Whole numbers, so that sums are exact."""
    return np.random.default_rng(step).integers(-8, 9, (WORKERS, LENGTH)).astype(np.float32)


@pytest.mark.parametrize(
    "options", [{}, {"fill": Fill.RESCALE}, {"carry": Carry()}], ids=["zero", "rescale", "carry"]
)
def test_nothing_lost_is_the_average(options):
    reduce = LossyAllReduce(0.0, 0, **options)
    for step in range(3):
        np.testing.assert_array_equal(reduce(gradients(step)), gradients(step).mean(0))


def test_zero_and_rescale_are_about_the_share_that_arrived():
    """All gradients 1: with a quarter never lost and half of the rest, zero-fill gives 5/8, rescale 1."""
    ones = np.ones((WORKERS, 2000 * CHUNK), np.float32)
    assert LossyAllReduce(0.5, 0)(ones).mean() == pytest.approx(0.625, abs=0.02)
    np.testing.assert_array_equal(LossyAllReduce(0.5, 0, fill=Fill.RESCALE)(ones), ones[0])


def test_losses_are_those_of_the_seed_whatever_is_done_about_them():
    first, second, third = (LossyAllReduce(0.5, seed)(gradients(0)) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, second)
    assert np.any(first != third)
    np.testing.assert_array_equal(first, LossyAllReduce(0.5, 3, carry=Carry())(gradients(0)))


def test_a_workers_own_shard_arrives_always():
    """Nothing else arrives: each shard holds its owner's gradient alone."""
    average = LossyAllReduce(1.0, 0)(gradients(0))
    shards = (np.arange(20) * WORKERS // 20).repeat(CHUNK)[:LENGTH]
    np.testing.assert_array_equal(average * WORKERS, gradients(0)[shards, np.arange(LENGTH)])


def test_an_unbounded_carry_delivers_all_but_what_it_holds():
    reduce = LossyAllReduce(0.5, 1, carry=Carry(bound=CarryBound.NONE))
    delivered = sum(reduce(gradients(step)) for step in range(12)) * WORKERS
    contributed = sum(gradients(step).sum(0) for step in range(12))
    assert np.any(reduce.carried())
    np.testing.assert_array_equal(delivered + reduce.carried().sum(0), contributed)


def test_a_norm_bounds_what_is_carried():
    reduce = LossyAllReduce(0.8, 1, carry=Carry(bound=CarryBound.NORM, limit=0.5))
    for step in range(6):
        reduce(gradients(step))
        norms = np.linalg.norm(reduce.carried(), axis=1) / np.linalg.norm(gradients(step), axis=1)
        assert np.all(norms <= 0.500001)
        assert np.any(norms > 0.3)


def test_velocities_stand_for_gradients_with_momentum():
    """A constant gradient of 1 and momentum 1/2, nothing lost: 1, 3/2, 7/4."""
    reduce = LossyAllReduce(0.0, 0, carry=Carry(momentum=0.5))
    ones = np.ones((WORKERS, 10), np.float32)
    assert [float(reduce(ones)[0]) for _ in range(3)] == [1.0, 1.5, 1.75]
