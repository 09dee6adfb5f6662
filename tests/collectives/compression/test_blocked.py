"""Sparse gradients in blocks: what is coded comes back, each block for itself, and garbage is told from it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.collectives.compression import blocked
from dblp.errors import MismatchError


def _entries(size, count, dtype, seed, *, clustered=False):
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, size, count)
    if clustered:
        drawn = np.where(rng.random(count) < 0.8, drawn % max(size // 1000, 1), drawn)
    indices = np.unique(drawn).astype(np.int64)
    return indices, rng.standard_normal(indices.size).astype(dtype)


def _encode(indices, values, size, chunk, coded):
    if coded:
        return blocked.encode_coded(indices, values, chunk)
    return blocked.encode_plain(indices, values, size, chunk)


@settings(max_examples=150, deadline=None)
@given(
    size=st.sampled_from([1, 2, 100, 70_000, 10**7, 2**31 - 1, 2**31, 2**40]),
    count=st.integers(0, 3000),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    chunk=st.sampled_from([256, 272, 1392, 8192]),
    coded=st.booleans(),
    clustered=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_block_stands_for_itself(size, count, dtype, chunk, coded, clustered, seed):
    indices, values = _entries(size, count, dtype, seed, clustered=clustered)
    rows, form = _encode(indices, values, size, chunk, coded)
    assert rows.shape[1] <= chunk and rows.shape[1] % 16 == 0
    assert blocked.Form.from_bytes(form.to_bytes()) == form
    counted = np.random.default_rng(seed).random(len(rows)) < 0.7
    found, back = blocked.decode(rows[counted], form, size, 0)
    wanted = np.repeat(counted, form.each)[: indices.size]
    np.testing.assert_array_equal(found, indices[wanted])
    np.testing.assert_array_equal(back, values[wanted])
    assert not indices.size or len(rows) == -(-indices.size // form.each)


@pytest.mark.parametrize("share", [0.001, 0.01])
def test_coded_blocks_cost_little_more_than_one_code(share):
    """About log2(1 / share) + 2 bits an index, and what fills up the blocks: within 8 % of the values' and indices' bits."""
    size = 4_000_000
    indices = np.flatnonzero(np.random.default_rng(0).random(size) < share)
    rows, _ = blocked.encode_coded(indices, np.ones(indices.size, np.float32), 1392)
    ideal = indices.size * (32 + 2 + np.log2(1 / share))
    assert 8 * rows.size < 1.08 * ideal


def _spoil(rows, form, *, header=None, form_=None, size=None):
    rows = rows.copy()
    for name, value in (header or {}).items():
        head = rows[:, :16].copy().view(blocked.HEADER)
        head[name] = value
        rows[:, :16] = head.view(np.uint8).reshape(-1, 16)
    return rows, form_ or form, size or 1000


@pytest.mark.parametrize(
    ("coded", "change"),
    [
        (False, {"header": {"count": 0}}),
        (False, {"header": {"count": 10**6}}),
        (False, {"form_": blocked.Form(5, 3, 4)}),
        (False, {"form_": blocked.Form(5, 4, 3)}),
        (False, {"form_": blocked.Form(0, 4, 4)}),
        (False, {"form_": blocked.Form(10**6, 4, 4)}),
        (False, {"size": 3}),
        (True, {"header": {"low_bits": 63}}),
        (True, {"header": {"low_bits": 0}}),
        (True, {"header": {"first": 2**63}}),
        (True, {"size": 3}),
    ],
)
def test_garbage_is_refused_and_named(coded, change):
    indices, values = _entries(1000, 300, "float32", 1)
    rows, form, size = _spoil(*_encode(indices, values, 1000, 512, coded), **change)
    with pytest.raises(MismatchError, match="rank 3 sent what are no blocks of a sparse gradient") as caught:
        blocked.decode(rows, form, size, 3)
    assert caught.value.ranks == (3,)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(min_size=64, max_size=64), each=st.integers(0, 9), width=st.sampled_from([0, 4, 8]))
def test_any_bytes_decode_or_are_refused(data, each, width):
    rows = np.frombuffer(data, np.uint8).reshape(1, 64)
    try:
        indices, _ = blocked.decode(rows, blocked.Form(each, width, 4), 1000, 0)
    except MismatchError:
        return
    assert (np.diff(indices) > 0).all() and indices[0] >= 0 and indices[-1] < 1000
