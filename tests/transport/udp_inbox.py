"""Helpers of the UDP port's tests: an inbox that keeps copies, seeded payloads, and both event loops."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import uvloop

from dblp.transport.config import TransportConfig
from dblp.transport.port import Address, Port, Slab

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
CONFIG = TransportConfig()
SEGMENT = 1456


def run(loop_factory, main):
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


class Inbox:
    """A port's callbacks: copies of all datagrams as (path, source, bytes), slab shapes, and calls of on_writable."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.datagrams: list[tuple[int, Address, bytes]] = []
        self.shapes: list[tuple[int, int, int, int]] = []
        self.stamps: list[float] = []
        self.arrivals: list[float] = []
        self.batches: list[int] = []
        self.writable = 0
        port.open(self.on_batch, self.on_writable)

    def on_batch(self, slabs: Sequence[Slab]) -> None:
        self.batches.append(sum(slab.count * slab.supers for slab in slabs))
        for slab in itertools.chain.from_iterable(slab.parts() for slab in slabs):
            self.shapes.append((slab.size, slab.count, slab.last, slab.stride))
            self.stamps.append(slab.received_at)
            for index in range(slab.count):
                self.arrivals.append(slab.arrival(index))
                self.datagrams.append((slab.path, slab.source(index), slab.datagram(index)))

    def on_writable(self) -> None:
        self.writable += 1

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.001)

    async def count(self, expected: int) -> None:
        await self.until(lambda: len(self.datagrams) >= expected)

    def payloads(self) -> list[bytes]:
        return [payload for _, _, payload in self.datagrams]


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def cut(data: np.ndarray, segment: int = SEGMENT) -> list[bytes]:
    return [data[start : start + segment].tobytes() for start in range(0, len(data), segment)]
