"""Chunk sizes, shards, segments and runs."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dblp.collectives.algorithms.grid import chunk_bytes, cut, runs, segment_chunks, spec
from dblp.transport.policy import Bounded, Exact

CHUNKS = st.sampled_from([16, 64, 256, 1408])


@given(st.integers(0, 5000), st.integers(1, 9), CHUNKS, st.sampled_from(["u1", "f2", "f4", "c16"]))
def test_shards_tile_the_array_at_chunk_borders(count, parts, chunk, dtype):
    array = np.zeros(count, dtype)
    shards = cut(array, parts, chunk)
    assert len(shards) == parts and sum(shard.size for shard in shards) == count
    chunks = [-(-shard.nbytes // chunk) for shard in shards]
    assert max(chunks) - min(chunks) <= 1 and chunks == sorted(chunks, reverse=True)
    start = array.__array_interface__["data"][0]
    at = 0
    for shard in shards:
        if shard.size:
            assert shard.__array_interface__["data"][0] - start == at and at % chunk == 0
        at += shard.nbytes


@given(st.integers(0, 1 << 30), st.integers(464, 65_459))
def test_chunk_sizes(nbytes, largest):
    exact, bounded = (chunk_bytes(nbytes, largest, policy) for policy in (Exact(), Bounded(0.1)))
    assert exact == largest // 16 * 16
    assert bounded % 16 == 0 and 256 <= bounded <= exact
    if nbytes >= 64 * 256:
        assert spec(nbytes, bounded).chunks >= 64, "a budget of 10 % must be some chunks"


def test_a_segment_is_one_burst():
    assert segment_chunks(1408) == 44
    assert segment_chunks(256) == 64
    assert segment_chunks(8896) == 7
    assert segment_chunks(65_456) == 1


@given(st.sets(st.integers(0, 200)))
def test_runs_cover_the_indices(indices):
    found = runs(np.array(sorted(indices), np.uint32))
    assert (
        set(itertools.chain.from_iterable(range(first, first + count) for first, count in found)) == indices
    )
    assert all(first + count < following for (first, count), (following, _) in itertools.pairwise(found))
