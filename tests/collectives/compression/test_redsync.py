"""RedSync's selection by bisection."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.collectives.compression.redsync import RedSync, by_bisection
from dblp.collectives.compression.selection import largest
from tests.collectives.compression.cases import bucket, gradient, job


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("spread", [0.1, 2.0])
@pytest.mark.parametrize("count", [1, 7, 100, 2500, 4000, 5000])
def test_it_selects_the_largest(dtype, spread, count):
    values = gradient(5000, dtype, spread=spread)
    np.testing.assert_array_equal(by_bisection(values, count), largest(values, count))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(-3, 3), max_size=40), st.integers(0, 45))
def test_with_ties_and_zeros_it_selects_none_that_is_smaller_than_one_left_out(integers, count):
    values = np.array(integers, np.float32)
    found = by_bisection(values, count)
    assert len(found) == min(count, np.count_nonzero(values)) and (np.diff(found) > 0).all()
    left = np.delete(np.abs(values), found)
    assert not len(found) or np.abs(values[found]).min() >= left.max(initial=0)


def test_all_of_one_magnitude():
    assert len(by_bisection(np.full(1000, -2.0, np.float32), 10)) == 10


def test_each_parameter_sends_its_share():
    shapes, method = bucket([(40, 30), (50,), (), (0,)]), RedSync(ratio=0.1)
    array = gradient(shapes.size, "float32")
    array[:1200] *= 1e4
    work = job(shapes, array, "float32")
    method.begin(work, array)
    own = method.own_part(work, method.compress(work))
    assert [np.count_nonzero(part) for part in shapes.cut(own)] == [120, 5, 1, 0]
