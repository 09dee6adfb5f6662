"""Lanes: whatever is offered leaves once, class by class, within the limit, the short last chunk at the end of its class."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dblp.transport.lanes import UNRANKED_CLASS, Lanes


@st.composite
def jobs(draw: st.DrawFn) -> tuple[np.ndarray, bool, list[np.ndarray], list[int], int]:
    """Classes, whether the last chunk is short, the offers, the limits, and a seed."""
    chunks = draw(st.integers(1, 200))
    seed = draw(st.integers(0, 1 << 32))
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, draw(st.integers(1, 4)), chunks).astype(np.uint8)
    borders = np.sort(rng.integers(0, chunks + 1, draw(st.integers(0, 6))))
    offers = [np.sort(part).astype(np.uint32) for part in np.split(rng.permutation(chunks), borders)]
    limits = sorted(draw(st.lists(st.integers(0, chunks), max_size=3)))
    return classes, draw(st.booleans()), offers, [*limits, chunks], seed


@given(jobs())
def test_all_that_is_offered_leaves_once_and_by_class(job):
    classes, short, offers, limits, seed = job
    rng = np.random.default_rng(seed)
    chunks, whole = len(classes), len(classes) - short
    lanes = Lanes(classes, whole)
    out: list[int] = []
    limit, steps = 0, [*offers, *limits]
    rng.shuffle(steps)
    for step in [*steps, chunks]:
        if isinstance(step, np.ndarray):
            lanes.offer(step)
        else:
            limit = max(limit, int(step))
            lanes.raise_limit(int(step))
        while lanes.next >= 0 and rng.random() < 0.7:
            cls, most = lanes.next, int(rng.integers(1, 60))
            ready, full = lanes.ready(cls), lanes.whole(cls)
            taken = lanes.take(cls, most)
            assert len(taken) == min(most, ready) and 0 <= ready - full <= 1
            assert (np.diff(taken.astype(int)) > 0).all() and (classes[taken] == cls).all()
            assert (taken < limit).all(), "within the limit"
            if short and chunks - 1 in taken:
                assert full < most, "the short chunk is the last of its class and ends its burst"
                assert int(taken[-1]) == chunks - 1
            out += taken.tolist()
    while lanes.next >= 0:
        out += lanes.take(lanes.next, 50).tolist()
    assert sorted(out) == list(range(chunks))
    assert lanes.waiting == 0 and not lanes.blocked


@given(jobs())
def test_what_is_there_at_once_leaves_in_order_of_class(job):
    classes, short, *_ = job
    lanes = Lanes(classes, len(classes) - short)
    lanes.raise_limit(len(classes))
    lanes.offer(np.arange(len(classes), dtype=np.uint32))
    out = []
    while lanes.next >= 0:
        out += lanes.take(lanes.next, 7).tolist()
    assert out == np.argsort(classes, kind="stable").tolist()


@given(jobs(), st.integers(0, 200))
def test_what_is_not_ranked_leaves_in_its_own_order_behind_the_critical_ones_until_it_is(job, before):
    classes, short, offers, limits, _ = job
    lanes = Lanes(classes, len(classes) - short, ranked=False)
    lanes.raise_limit(limits[0])
    for offer in offers:
        lanes.offer(offer)
    lanes.raise_limit(len(classes))
    merged = np.where(classes > 0, UNRANKED_CLASS, 0)
    assert lanes.last_class == merged.max()
    out: list[int] = []
    while lanes.next >= 0 and len(out) < before:
        cls = lanes.next
        out += lanes.take(cls, 1).tolist()
        assert merged[out[-1]] == cls
    assert (np.diff(merged[out]) >= 0).all()
    lanes.rank()
    assert lanes.last_class == classes.max()
    rest: list[int] = []
    while lanes.next >= 0:
        rest += lanes.take(lanes.next, 7).tolist()
    assert (np.diff(classes[rest].astype(int)) >= 0).all()
    assert sorted(out + rest) == list(range(len(classes))) and not lanes.waiting


def test_what_lies_beyond_the_limit_waits_for_it():
    lanes = Lanes(np.array([3, 2, 0, 1, 0], np.uint8), 5)
    lanes.offer(np.arange(5, dtype=np.uint32))
    assert lanes.blocked and lanes.next == -1 and lanes.waiting == 5
    lanes.raise_limit(2)
    assert (lanes.next, lanes.blocked) == (2, False)
    assert lanes.take(2, 10).tolist() == [1] and lanes.take(3, 10).tolist() == [0]
    assert lanes.blocked and lanes.waiting == 3
    lanes.raise_limit(1)
    assert lanes.blocked, "limits only rise"
    lanes.raise_limit(5)
    assert lanes.take(0, 10).tolist() == [2, 4]
    lanes.clear()
    assert lanes.next == -1 and not lanes.waiting and not lanes.blocked
