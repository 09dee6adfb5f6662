"""Slabs: every way of grouping shows the same datagrams."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dblp.sim.slabs import MAX_COALESCED, Arrival, regroup, scribble, slabs_of
from dblp.transport.port import Address, Slab

A, B = Address("a", 1), Address("b", 2)


def _arrival(
    count: int, segment: int, tail: int, source: Address = A, path: int = 0, fill: int = 0
) -> Arrival:
    nbytes = (count - 1) * segment + min(tail, segment)
    data = ((np.arange(nbytes) // segment + fill) % 256).astype(np.uint8)
    return Arrival(data, segment, source, path, 0.5)


arrivals = st.lists(
    st.builds(
        _arrival,
        st.sampled_from([1, 1, 1, 2, 3, 20]),
        st.sampled_from([8, 64, 1464]),
        st.sampled_from([1, 8, 1464]),
        st.sampled_from([A, B]),
        st.integers(0, 1),
        st.integers(0, 255),
    ),
    max_size=12,
)


def _contents(slabs: list[Slab]) -> list[tuple[int, Address, bytes]]:
    parts = [part for slab in slabs for part in slab.parts()]
    return [(part.path, part.source(i), part.datagram(i)) for part in parts for i in range(part.count)]


def _expected(batch: list[Arrival]) -> list[tuple[int, Address, bytes]]:
    return [
        (arrival.path, arrival.source, arrival.part(i, i + 1).data.tobytes())
        for arrival in batch
        for i in range(arrival.count)
    ]


@given(arrivals)
def test_slabs_hold_the_datagrams_in_order(batch):
    slabs = slabs_of(batch)
    assert _contents(slabs) == _expected(batch)
    for slab in slabs:
        assert 0 < slab.last <= slab.size <= slab.stride
        assert slab.received_at == 0.5


@given(arrivals, st.integers(0, 2**32), st.floats(0.0, 1.0))
def test_regrouping_keeps_the_datagrams_in_order(batch, seed, share):
    mixed = regroup(batch, np.random.default_rng(seed), share)
    assert _contents(slabs_of(mixed)) == _expected(batch)


def test_rows_of_a_slab_of_singles_are_views_with_the_slot_as_stride():
    slab = slabs_of([_arrival(1, 1464, 1464, fill=n) for n in range(5)])[0]
    rows = slab.rows(1, 3, 8, 364, np.dtype(np.float32))
    assert slab.count == 5
    assert slab.stride > 1464
    assert slab.stride % 64 == 0
    assert rows.shape == (3, 364)
    assert rows.view(np.uint8)[:, 0].tolist() == [1, 2, 3]


def test_singles_of_several_senders_share_a_slab():
    slab = slabs_of([_arrival(1, 64, 64, source) for source in (A, B, A)])[0]
    assert [slab.source(i) for i in range(3)] == [A, B, A]


def test_a_longer_single_starts_a_new_slab():
    slabs = slabs_of([_arrival(1, 64, 8), _arrival(1, 64, 64), _arrival(1, 64, 8), _arrival(1, 64, 8)])
    assert [(slab.count, slab.size, slab.last) for slab in slabs] == [(1, 8, 8), (2, 64, 8), (1, 8, 8)]


def test_every_way_of_regrouping_occurs():
    rng = np.random.default_rng(3)
    batch = [_arrival(4, 64, 64, fill=4 * n) for n in range(100)]
    counts = {arrival.count for arrival in regroup(batch, rng, 1.0)}
    assert {1, 2, 3} <= counts
    assert max(counts) > 4


def test_joined_arrivals_stay_within_the_limits_of_gro():
    batch = [_arrival(20, 1464, 1464) for _ in range(200)]
    for arrival in regroup(batch, np.random.default_rng(1), 0.9):
        assert arrival.count <= MAX_COALESCED
        assert len(arrival.data) <= 65_507


def test_scribble_destroys_the_arenas():
    slabs = slabs_of([_arrival(3, 64, 64), _arrival(1, 8, 8)])
    scribble(slabs)
    assert {datagram for _, _, datagram in _contents(slabs)} == {b"\xa5" * 64, b"\xa5" * 8}
