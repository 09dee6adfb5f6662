"""The least round trip of a path's network, for who senses it."""

from __future__ import annotations

import numpy as np

from dblp.transport.backlog import Backlog
from dblp.transport.config import TransportConfig
from dblp.transport.port import Address
from dblp.transport.send_path import LEAST_RTT_LIFE_S, SendPath
from tests.collectives.worlds import run_network


def _path():
    return SendPath(0, Address("h1", 1), 1 << 20, TransportConfig(), Backlog())


def test_it_is_the_least_of_late_and_forgotten_after_two_lives():
    path = _path()
    assert path.least_rtt == 0.0
    samples = [(1.0, 5e-3), (2.0, 2e-3), (3.0, 4e-3)]
    for now, sample in samples:
        path.on_net_rtt(sample, now)
    assert path.least_rtt == 2e-3 and path.net_rtt == 4e-3
    path.on_net_rtt(9e-3, 3.0 + LEAST_RTT_LIFE_S)
    assert path.least_rtt == 2e-3, "of the life before"
    path.on_net_rtt(8e-3, 4.0 + 2 * LEAST_RTT_LIFE_S)
    assert path.least_rtt == 8e-3


def test_a_group_knows_its_farthest_rank():
    async def member(group):
        for _ in range(5):
            await group.all_reduce(np.ones(100_000, np.float32))
        return group.least_delay_s()

    for delay_s in run_network(member, 3):
        assert 0.99 * 2 * 50e-6 <= delay_s < 3 * 2 * 50e-6, "there and back, and what the hosts take to read"
