"""Traffic of others in the exact engine: each host sends to the next, on and off, and nobody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import numpy as np

from dblp.sim.fabric.scenario import BackgroundSpec
from dblp.sim.port import Network, SimPort
from dblp.transport.port import Burst

MEAN_S = 0.1
"""Of the times on and of those off, exponential."""
BURST = 20
"""Datagrams that leave together."""


@contextlib.asynccontextmanager
async def background(
    network: Network,
    spec: BackgroundSpec,
    hosts: int,
    datagram: int,
    rate_bps: Callable[[], float],
    seed: int,
) -> AsyncIterator[None]:
    """Send while the block runs. ``rate_bps()``: that of the hosts' links now; ``spec.load``: share of it, on average;
    ``datagram``: bytes of each."""
    ports = [network.port(f"h{host}") for host in range(hosts)] if spec.load else []
    for port in ports:
        port.open(lambda batch: None, lambda: None)
    tasks = [
        asyncio.ensure_future(
            _send(port, ports[(host + 1) % hosts], spec, datagram, rate_bps, [seed, host, 2])
        )
        for host, port in enumerate(ports)
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for port in ports:
            port.close()


async def _send(
    source: SimPort,
    sink: SimPort,
    spec: BackgroundSpec,
    datagram: int,
    rate_bps: Callable[[], float],
    seed: list[int],
) -> None:
    rng, loop = np.random.default_rng(seed), asyncio.get_running_loop()
    data = np.zeros(BURST * datagram, np.uint8)
    while True:
        until = loop.time() + rng.exponential(MEAN_S)
        while loop.time() < until:
            source.send(Burst(data, datagram, 0, spec.cls, sink.addresses[0]))
            await asyncio.sleep(8.0 * len(data) / (2.0 * spec.load * rate_bps()))
        await asyncio.sleep(rng.exponential(MEAN_S))
