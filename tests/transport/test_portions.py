"""Portions: what gets done chunk by chunk leaves in pieces that are worth a system call, and nothing waits for ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dblp.transport.burst import burst_chunks
from dblp.transport.message import MessageSpec
from dblp.transport.outgoing import PORTIONS, Outgoing
from dblp.transport.policy import Stop

CHUNK = 1024


def message(chunks: int, *, tagged: bool = False, budget: float = 0.0, limit: int | None = None) -> Outgoing:
    spec = MessageSpec(nbytes=chunks * CHUNK, chunk_bytes=CHUNK, budget=budget, stop=Stop.STALL)
    classes = np.arange(chunks, dtype=np.uint8) % 4 if tagged else None
    data = np.zeros(chunks * CHUNK, np.uint8)
    out = Outgoing(1 << 48, spec, data, bytearray(48), burst_chunks(CHUNK), classes)
    out.opened = True
    out.raise_limit(chunks if limit is None else limit)
    return out


def test_crumbs_wait_for_a_portion_or_the_end():
    out = message(40)
    assert out.portion == 40 // PORTIONS
    out.offer(0, out.portion - 1)
    assert not out.sendable()
    out.offer(out.portion - 1, 1)
    assert out.sendable()
    assert out.take_run(40) == (0, out.portion)
    out.offer(out.portion, 1)
    assert not out.sendable(), "a crumb again"
    out.offer(out.portion + 1, 40 - out.portion - 1)
    assert out.sendable(), "all is offered"


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_nothing_waits_on_paths_that_lose(tagged, budget):
    out = message(40, tagged=tagged, budget=budget)
    out.offer(3, 1)
    assert not out.sendable(), "a crumb"
    out.hurry()
    assert out.sendable()


def test_crumbs_of_a_message_with_classes_do_not_wait_for_what_the_limit_holds_back():
    out = message(40, tagged=True, limit=2)
    out.offer(0, 2)
    assert not out.sendable()
    out.offer(2, 1)
    assert out.sendable()


def test_results_that_come_one_by_one_share_a_burst():
    out = message(100)
    out.hurry()
    for chunk in (40, 7, 9, 60, 99):
        out.offer(chunk, 1)
    taken = out.take_runs(4)
    assert taken is not None and taken.tolist() == [7, 9, 40, 60] and out.chunks_sent == 4
    assert out.take_runs(4) is None and out.take_run(4) == (99, 1), "the only one"
    out.offer(0, 5)
    out.offer(20, 8)
    assert out.take_runs(5) is None and out.take_runs(10) is None, (
        "the next run is enough: half a burst has no gaps"
    )
    taken = out.take_runs(12)
    assert taken is not None and taken.tolist() == [0, 1, 2, 3, 4, 20, 21, 22, 23, 24, 25, 26]
    limited = message(100, limit=10)
    limited.hurry()
    for chunk in (3, 5, 50):
        limited.offer(chunk, 1)
    taken = limited.take_runs(9)
    assert taken is not None and taken.tolist() == [3, 5]
    assert limited.blocked()


def test_scattered_crumbs_count_together():
    out = message(40)
    out.offer_scattered(np.arange(0, 2 * out.portion - 2, 2, dtype=np.uint32))
    assert not out.sendable()
    out.offer_scattered(np.array([39], np.uint32))
    assert out.sendable()


def test_what_the_limit_cuts_short_does_not_wait():
    out = message(40, limit=3)
    out.offer(0, 3)
    assert out.sendable(), "a receiver that grants three chunks may wait for them before it grants more"


def test_a_long_message_leaves_in_whole_bursts():
    out = message(1000)
    assert out.portion == out.per_burst


@given(st.integers(1, 300), st.booleans(), st.integers(0, 1 << 32))
def test_all_that_is_offered_leaves(chunks, tagged, seed):
    rng = np.random.default_rng(seed)
    out = message(chunks, tagged=tagged, budget=0.5 if tagged else 0.0, limit=0)
    cuts = np.sort(rng.integers(0, chunks + 1, 5))
    steps: list[Any] = [np.sort(part).astype(np.uint32) for part in np.split(rng.permutation(chunks), cuts)]
    steps += [*rng.integers(0, chunks + 1, 4).tolist(), chunks]
    rng.shuffle(steps)
    sent = 0
    for step in [*steps, None]:
        if isinstance(step, np.ndarray):
            out.offer_scattered(step)
        elif step is not None:
            out.raise_limit(max(int(step), out.limit))
        while out.sendable():
            out.aim()
            taken = len(out.take_tagged(64)) if tagged else out.take_run(64)[1]
            assert taken
            sent += taken
    assert sent == chunks and out.all_sent
