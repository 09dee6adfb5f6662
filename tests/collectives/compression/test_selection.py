"""The largest elements, exactly and by a sampled threshold, against a full sort."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.collectives.compression.selection import above, largest, sampled


def _values(kind, size, seed=0):
    rng = np.random.default_rng([seed, size])
    return {
        "normal": lambda: rng.standard_normal(size),
        "heavy": lambda: rng.standard_cauchy(size),
        "equal": lambda: np.full(size, -2.0),
        "sparse": lambda: np.where(rng.random(size) < 1e-4, rng.standard_normal(size), 0.0),
        "sorted": lambda: np.arange(size, dtype=float),
        "periodic": lambda: np.where(np.arange(size) % 4 == 0, 5.0, 0.1),
        "tiny": lambda: rng.standard_normal(size) * 1e-44,
    }[kind]().astype(np.float32)


KINDS = ["normal", "heavy", "equal", "sparse", "sorted", "periodic", "tiny"]


@pytest.mark.parametrize("size", [1, 50, 70_000, 300_000])
@pytest.mark.parametrize("kind", KINDS)
def test_largest_is_exact(kind, size):
    values = _values(kind, size)
    ascending = np.sort(np.abs(values))
    for share in (1e-4, 0.01, 0.3, 1.0):
        count = max(int(size * share), 1)
        found = largest(values, count)
        assert (np.diff(found) > 0).all()
        wanted = ascending[size - count :]
        np.testing.assert_array_equal(np.sort(np.abs(values[found])), wanted[wanted > 0])


@pytest.mark.parametrize("size", [1, 50, 70_000, 300_000])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_takes_nearly_as_many_and_the_largest_of_them(kind, size):
    for share in (1e-4, 0.001, 0.05, 1.0):
        _check_sampled(kind, size, share)


def _check_sampled(kind, size, share):
    values, count = _values(kind, size), max(int(size * share), 1)
    found = sampled(values, count, np.random.default_rng(5))
    nonzero = int(np.count_nonzero(values))
    assert (np.diff(found) > 0).all() and found.size <= count and values[found].all()
    assert found.size >= 0.79 * min(count, nonzero) - 1
    if found.size and kind in ("normal", "heavy"):
        exact = np.sort(np.abs(values))[size - min(count, size) :].sum()
        assert np.abs(values[found]).sum() >= 0.75 * exact, "close to what an exact selection holds"


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(-4, 4, width=32), max_size=40), st.floats(0, 4, width=32))
def test_above_is_the_definition(values, threshold):
    array = np.array(values, np.float32)
    wanted = np.flatnonzero((np.abs(array) >= threshold) & (array != 0))
    np.testing.assert_array_equal(above(array, threshold), wanted)


def test_nothing_of_nothing():
    empty = np.empty(0, np.float32)
    assert (
        largest(empty, 0).size
        == sampled(empty, 0, np.random.default_rng(0)).size
        == above(empty, 1.0).size
        == 0
    )
