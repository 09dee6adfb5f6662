"""Sparse bodies: what goes in comes out, in as many bytes as said, and garbage is refused by its sender's rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.collectives.compression import entries
from dblp.errors import MismatchError


@st.composite
def _picks(draw):
    size = draw(st.sampled_from([1, 7, 1000, 2**20, 2**31 - 1, 2**31, 2**33, 2**40]))
    picked = draw(st.sets(st.integers(0, size - 1), max_size=60))
    return size, np.array(sorted(picked), np.int64)


@settings(max_examples=150, deadline=None)
@given(_picks(), st.booleans(), st.sampled_from(["float16", "float32", "float64"]))
def test_round_trip(pick, delta, dtype):
    size, indices = pick
    if delta and size > 2**33:
        return  # a few entries of so many elements would take gigabytes of unary: nobody codes them so
    values = np.random.default_rng(indices.size).standard_normal(indices.size).astype(dtype)
    body = entries.encode(indices, values, size, delta=delta)
    padded = np.concatenate([body, np.zeros(24, np.uint8)])
    for form in (body, padded):
        found, read = entries.decode(form, size, 3)
        np.testing.assert_array_equal(found, indices)
        np.testing.assert_array_equal(read, values)
    if not delta:
        assert body.size == entries.plain_bytes(size, indices.size, values.itemsize)
        assert (body.size - 16) == indices.size * (values.itemsize + (4 if size < 2**31 else 8))


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.3, 1.0])
def test_coded_gaps_are_near_the_entropy(share):
    size = 1_000_000
    indices = np.flatnonzero(np.random.default_rng(1).random(size) < share)
    _, coded = entries.encode_gaps(indices, size)
    bits = 8 * coded.size / indices.size
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share if share < 1 else 0.0
    assert entropy <= bits + 1e-9 and bits <= max(entropy + 0.15, 1.3)
    assert coded.size <= entries.most_bytes(size, indices.size)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 100))
def test_garbage_is_refused_or_read_within_bounds(text, size):
    try:
        indices, values = entries.decode(np.frombuffer(text, np.uint8), size, 5)
    except MismatchError as error:
        assert error.ranks == (5,) and "rank 5" in str(error)
    else:
        assert indices.size == values.size and (indices < max(size, 1)).all() and (indices >= 0).all()


def test_each_fault_is_named():
    good = entries.encode(np.array([1, 5]), np.ones(2, np.float32), 10, delta=False)
    swapped = good.copy()
    swapped[16:24] = np.array([5, 1], "<u4").view(np.uint8)
    for body, size, words in [
        (good[:10], 10, "no sparse gradient"),
        (good[:-1], 10, "no sparse gradient"),
        (good, 5, "beyond the gradient"),
        (swapped, 10, "not ascending"),
        (good, 1, "its header"),
    ]:
        with pytest.raises(MismatchError, match=words):
            entries.decode(body, size, 0)


def test_halves_are_finite():
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(entries.to_half(np.array([1e9, -1e9, 1.0])), [65504, -65504, 1])
