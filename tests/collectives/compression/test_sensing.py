"""What is told of a network from the times of rounds."""

from __future__ import annotations

import numpy as np
import pytest

from dblp.collectives.compression.iterations import Iteration
from dblp.collectives.compression.sensing import Sample, Sensing


def _sensed(*samples):
    sensing = Sensing(np.zeros(Sensing.SIZE))
    for data, seconds, delay in samples:
        assert sensing.hear(Sample(data_bytes=data, seconds=seconds, crossings=1, delay_s=delay))
        sensing = Sensing(sensing.state())
    return sensing


def test_the_delay_is_no_part_of_the_bandwidth():
    """100 KB in 9 ms, 1 ms of them on the way: 100 Mb/s, of which 25 KB fit into a round trip of 2 ms; the rest was a queue."""
    sensing = _sensed((100_000, 9e-3, 2e-3))
    assert sensing.bandwidth_bps == pytest.approx(1e8)
    assert sensing.bdp_bytes == pytest.approx(25_000) and sensing.queue_bytes == pytest.approx(75_000)


def test_an_all_reduce_crosses_twice():
    sensing = Sensing(np.zeros(Sensing.SIZE))
    assert sensing.hear(Sample(data_bytes=100_000, seconds=10e-3, crossings=2, delay_s=2e-3))
    assert sensing.bandwidth_bps == pytest.approx(1e8)


def test_no_more_is_claimed_than_a_round_has_shown():
    """A round that is all delay: its data took a quarter of the delay at least."""
    assert _sensed((1_000, 1e-3, 2e-3)).bandwidth_bps == pytest.approx(8 * 1_000 / 0.5e-3)


def test_what_was_before_a_change_is_forgotten_after_two_rounds():
    fast, slow = (100_000, 2e-3, 2e-3), (100_000, 41e-3, 2e-3)
    assert _sensed(fast, slow).bandwidth_bps == pytest.approx(8e8)
    assert _sensed(fast, slow, slow).bandwidth_bps == pytest.approx(2e7)
    assert _sensed(slow, fast).bandwidth_bps == pytest.approx(8e8), "more bandwidth shows at once"


@pytest.mark.parametrize("sample", [(0, 1e-3, 1e-3), (100, 0.0, 1e-3), (100, 1e-3, 0.0)])
def test_what_was_not_measured_tells_nothing(sample):
    sensing = Sensing(np.zeros(Sensing.SIZE))
    data, seconds, delay = sample
    assert not sensing.hear(Sample(data_bytes=data, seconds=seconds, crossings=1, delay_s=delay))
    assert not sensing.known and sensing.bandwidth_bps == sensing.queue_bytes == sensing.bdp_bytes == 0.0


@pytest.mark.parametrize(
    ("spans", "busy"),
    [
        ([], (0.0, 0)),
        ([(1, 3, 1)], (2.0, 1)),
        ([(1, 3, 1), (2, 4, 2)], (3.0, 2)),  # they overlap: one after the other only on the network
        ([(5, 6, 1), (1, 3, 1)], (3.0, 2)),  # apart: each waits for the delay
        ([(1, 9, 1), (2, 3, 1), (4, 5, 2)], (8.0, 2)),
    ],
)
def test_rounds_that_overlap_count_once(spans, busy):
    assert Iteration(0.0, spans=spans).busy() == busy
