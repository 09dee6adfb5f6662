"""How long rounds take on a simulated network that loses some of everything: what a repair waits for."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dblp.collectives.group import Group
from dblp.transport.policy import Bounded, Exact, Policy
from tests.collectives.worlds import run_network

ONE_WAY_S = 50e-6
"""Latency of ``run_network``'s links; there is no rate, so rounds take round trips only."""


def times(policy: Policy, elements: int, rounds: int, impair: str) -> np.ndarray:
    """Virtual seconds of each round, the slower of two ranks'."""

    async def member(group: Group) -> list[float]:
        loop = asyncio.get_running_loop()
        array, took = np.ones(elements, np.float32), []
        for _ in range(rounds + 4):
            began = loop.time()
            await group.all_reduce(array, "avg", policy=policy)
            took.append(loop.time() - began)
        return took[4:]

    by_rank: np.ndarray = np.array(run_network(member, 2, seed=3, impair=impair))
    return np.asarray(by_rank.max(axis=0))


def test_a_hole_in_a_small_message_is_told_at_once():
    """It waited for the sender's question, which came after a timeout, or for feedback that is due anyway (4 ms)."""
    took = times(Exact(), 4096, 200, "loss(0.02)")
    hit = took[took > 2.5 * ONE_WAY_S]  # of two messages of a dozen datagrams each
    assert len(hit) > 40
    assert np.median(hit) < 1e-3


@pytest.mark.parametrize("policy", [Exact(), Bounded(0.1)], ids=["exact", "bounded"])
def test_the_last_datagrams_of_a_lossy_path_are_asked_for_before_a_timeout(policy: Policy):
    """Nothing behind them tells of their loss. The timeout is 8 ms; once there was a loss, two round trips and 2 ms."""
    took = times(policy, 1 << 18, 100, "loss(0.03)")
    assert np.median(took) < 1e-3
    assert np.quantile(took, 0.95) < 4e-3


def test_on_a_clean_path_small_rounds_take_one_way():
    assert times(Exact(), 4096, 20, "") == pytest.approx(ONE_WAY_S, rel=0.05)
