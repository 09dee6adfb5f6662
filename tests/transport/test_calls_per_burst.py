"""The hot path never loops in Python per datagram: function calls are counted, which no noise of a machine changes."""

from __future__ import annotations

import asyncio
import sys
from types import FrameType
from typing import Any

import numpy as np

from dblp.collectives.group import Group
from dblp.sim.loop import run
from dblp.sim.port import HostSpec, Link, Network
from dblp.transport.burst import burst_chunks
from dblp.transport.config import TransportConfig
from dblp.transport.endpoint import Endpoint

ELEMENTS = 4 << 20


class CallCounter:
    """Counts the calls of Python functions that are defined in the transport (ports and impairments aside)."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "/transport/" in name and "impair" not in name:
            self.calls += 1


async def exchange(elements: int, *, count: bool = True) -> tuple[float, int]:
    """Two clean all-reduces of two ranks: transport calls of the second, and the chunks that both sent in it."""
    loop = asyncio.get_running_loop()
    network = Network(loop, 1, link=Link(latency_s=20e-6), host=HostSpec(receive_buffer_bytes=16 << 20))
    ports = [network.port(f"h{rank}") for rank in range(2)]
    peers = [list(port.addresses) for port in ports]
    endpoints = await asyncio.gather(
        *(
            Endpoint.connect(port, rank=rank, world_size=2, config=TransportConfig(), session=9, peers=peers)
            for rank, port in enumerate(ports)
        )
    )
    groups = [Group(endpoint) for endpoint in endpoints]
    for _ in range(2):  # the first round opens the congestion window
        counter = CallCounter()
        arrays = [np.ones(elements, np.float32) for _ in groups]
        if count:
            sys.setprofile(counter)
        try:
            reports = await asyncio.gather(
                *(group.all_reduce(array) for group, array in zip(groups, arrays, strict=True))
            )
        finally:
            if count:
                sys.setprofile(None)
    await asyncio.gather(*(endpoint.close() for endpoint in endpoints))
    return counter.calls, sum(report.chunks_sent for report in reports)


def test_calls_are_few_per_burst_and_none_per_datagram() -> None:
    calls, chunks = run(exchange(ELEMENTS))
    bursts = chunks / burst_chunks(1408)
    # A loop per datagram on any of the two sides would cost 44 calls a burst or more.
    assert calls / bursts < 36, f"{calls} calls for {bursts:.0f} bursts"
    assert calls / chunks < 0.85
