"""Rounds on a network that reordered for a moment, and does not any more."""

from __future__ import annotations

import asyncio
import statistics
from typing import cast

import numpy as np

from dblp.sim.loop import run
from dblp.sim.port import Link, SimPort
from tests.collectives.worlds import connect_network, run_members

RANKS = 4
LATENCY_S = 50e-6


def test_rounds_are_as_fast_as_before_when_it_is_over():
    """On sockets, one datagram that a processor held up put off each repair by 37 ms to the end of the run, and rounds of 25 MiB
    at 5 % loss took twice as long. Here, with seed 3, they took 110 ms instead of 0.6."""

    async def main() -> tuple[float, float]:
        endpoints = await connect_network(RANKS, seed=3)
        network = cast(SimPort, endpoints[0].port).network
        loop = asyncio.get_running_loop()

        def impair(text: str) -> None:
            for source in range(RANKS):
                for target in range(source):
                    network.set_link(f"h{source}", f"h{target}", Link(latency_s=LATENCY_S, impair=text))

        async def member(group) -> tuple[float, float]:
            data = np.ones(50_000, np.float32)

            async def rounds(count: int) -> float:
                times = []
                for _ in range(count):
                    began = loop.time()
                    await group.all_reduce(data.copy())
                    times.append(loop.time() - began)
                return statistics.median(times)

            impair("loss(0.05)")
            before = await rounds(30)
            impair("loss(0.05),jitter(30ms)")
            await rounds(5)
            impair("loss(0.05)")
            await rounds(2)
            await asyncio.sleep(2.5)
            return before, await rounds(30)

        try:
            return (await run_members(endpoints, member, 60.0))[0]
        finally:
            await asyncio.gather(*(endpoint.close(linger_s=1.0) for endpoint in endpoints))

    before, after = run(main(), until_s=600.0)
    assert after < 2.0 * before
