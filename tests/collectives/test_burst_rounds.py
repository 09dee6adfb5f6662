"""Rounds that loss bursts hit, in virtual time (``benchmarks.burst_rounds``)."""

from __future__ import annotations

import pytest

from dblp.transport.policy import Exact, Policy
from tests.benchmarks.burst_rounds import BURST_S, hit_rounds, summary

SOON_S = 0.05
"""A round that the burst's last datagrams hit is over so long after it."""


@pytest.mark.parametrize("policy", [Exact(), Policy(budget=0.4, gather_budget=0.2)], ids=["exact", "bounded"])
def test_a_round_outlasts_its_burst_by_a_few_passes_at_most(policy):
    """Also where repairs met the bound and lost chunks were left over: the receiver must hear that nothing follows."""
    times = hit_rounds(2, 1 << 20, policy, 2)
    assert times and max(times) < BURST_S + SOON_S


@pytest.mark.parametrize("policy", [Exact(), Policy(budget=0.4, gather_budget=0.2)], ids=["exact", "bounded"])
def test_rounds_end_within_a_burst(policy):
    """A burst is not taken for congestion for long: windows that shrank by its loss once made rounds last as long as it."""
    times = hit_rounds(2, 1 << 20, policy, 3)
    assert len(times) >= 5 and summary(times)["median"] < 0.75 * BURST_S


def test_a_summary_is_ordered():
    figures = summary([0.3, 0.1, 0.2])
    assert list(figures.values()) == sorted(figures.values())
    assert (figures["median"], figures["max"]) == (0.2, 0.3)
