"""The least round trip: seen again, probed for, raised late."""

from __future__ import annotations

import itertools

import pytest

from dblp.transport.congestion.round_trip import FIRST_LIFE_S, MOST_LIFE_S, LeastRoundTrip

LEAST_S = 1e-4
QUEUED_S = 2e-3


def seen(rtt_s: float = LEAST_S) -> LeastRoundTrip:
    least = LeastRoundTrip()
    least.update(rtt_s, 0.0)
    return least


def feed(least: LeastRoundTrip, rtt_s: float, start: float, stop: float, near_s: float = 0.0) -> list[float]:
    """Samples each millisecond; when probes ended."""
    count = round((stop - start) / 1e-3)
    return [t for t in (start + i * 1e-3 for i in range(count)) if least.update(rtt_s, t, near_s=near_s)]


def test_it_is_the_least_sample():
    least = seen(3e-4)
    for rtt in (5e-4, 1e-4, 2e-4):
        least.update(rtt, 0.01)
    assert least.value_s == 1e-4 and not least.probing


def test_a_value_that_is_not_seen_again_is_probed_for_ever_more_rarely():
    least = seen()
    ends = feed(least, QUEUED_S, 1e-3, 3.0)
    gaps = [later - earlier for earlier, later in itertools.pairwise(ends)]
    assert ends[0] == pytest.approx(FIRST_LIFE_S, abs=10e-3)
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(gaps[:3]))
    assert gaps[-1] == pytest.approx(0.5, abs=0.03)


def test_a_sample_near_it_proves_that_it_holds():
    least = seen()
    assert not feed(least, 2e-4, 1e-3, 1.0, near_s=2e-4) and not least.probing
    assert least.value_s == LEAST_S


def test_a_probe_lowers_it_and_raises_it_only_when_it_was_not_seen_for_long():
    least = seen(1e-3)
    feed(least, 3e-3, 1e-3, 0.053)
    assert least.probing
    least.update(LEAST_S, 0.054)
    feed(least, 3e-3, 0.055, 0.1)
    assert least.value_s == LEAST_S, "what others see of a drained queue counts"
    feed(least, QUEUED_S, 0.1, MOST_LIFE_S)
    assert least.value_s == LEAST_S, "a queue that many share is not emptied by one"
    feed(least, QUEUED_S, MOST_LIFE_S, MOST_LIFE_S + 1.2)
    assert least.value_s == 2 * LEAST_S
    feed(least, QUEUED_S, MOST_LIFE_S + 1.2, 7 * MOST_LIFE_S)
    assert least.value_s == QUEUED_S, "routes change"
