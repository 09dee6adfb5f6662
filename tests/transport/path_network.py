"""A simulated network whose paths differ: each (source, target, path) may have a link of its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dblp.collectives.group import Group
from dblp.collectives.report import Report
from dblp.errors import DblpError
from dblp.sim.links import Wire
from dblp.sim.loop import run
from dblp.sim.port import Link, Network
from dblp.transport import wire
from dblp.transport.config import HEADER_BYTES, TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.policy import Exact, Policy
from dblp.transport.port import Burst
from dblp.transport.wire import Type

LATENCY_S = 200e-6
FAST = Link(latency_s=LATENCY_S, rate_bps=1e9)
DEAD = Link(latency_s=LATENCY_S, impair="loss(1)")


class PathNetwork(Network):
    """Set links path by path; the others have the network's default link, each path its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._path = 0
        self._by_path: dict[tuple[str, str, int], Wire] = {}
        self._default = options.get("link") or Link()
        self.datagrams: Counter[int] = Counter()
        """Datagrams sent, by path."""
        self.chunks: Counter[int] = Counter()
        """Datagrams that hold a chunk, by path."""
        self.records: Counter[tuple[int, Type]] = Counter()
        """Records of control, by path and type."""

    def set_path(self, source: str, target: str, path: int, link: Link, *, one_way: bool = False) -> None:
        """Give one path between two hosts (one direction if ``one_way``) its own link."""
        self._by_path[source, target, path] = self._wire(link, source, target)
        if not one_way:
            self._by_path[target, source, path] = self._wire(link, target, source)

    def carry(self, burst: Burst, *args: Any) -> None:
        self._path = burst.path
        self.datagrams[burst.path] += burst.count
        if burst.data[1] == Type.DATA:
            self.chunks[burst.path] += burst.count
        else:
            self.records.update((burst.path, type_) for type_ in records_of(burst.data.tobytes()))
        super().carry(burst, *args)

    def _between(self, source: str, target: str) -> Wire:
        key = (source, target, self._path)
        if key not in self._by_path:
            self._by_path[key] = self._wire(self._default, source, target)
        return self._by_path[key]


def records_of(datagram: bytes) -> Iterator[Type]:
    """The types of the records of a control datagram."""
    at = 0
    while at < len(datagram):
        header = wire.decode_header(datagram, at)
        yield next(type_ for type_ in Type if type_ == header.type)
        at += HEADER_BYTES + header.length


@dataclass
class Job:
    """All-reduces of a few ranks on a network with several paths."""

    paths: int = 8
    world_size: int = 2
    elements: int = 2_000_000
    rounds: int = 1
    policy: Policy = field(default_factory=Exact)
    link: Link = FAST
    seed: int = 0
    timeout_s: float = 5.0
    config: dict[str, Any] = field(default_factory=dict)
    faults: Callable[[PathNetwork, int], None] | None = None
    """Called before the round of the number given."""
    after: Callable[[list[Endpoint]], Awaitable[None]] | None = None

    network: PathNetwork = field(init=False)
    arrays: list[list[np.ndarray]] = field(init=False)
    """By round and rank."""
    reports: list[list[Report]] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    """By round, the slowest rank's."""
    errors: list[DblpError] = field(default_factory=list)
    endpoints: list[Endpoint] = field(default_factory=list)

    def contribution(self, rank: int, round_: int) -> np.ndarray:
        return (
            np.random.default_rng([self.seed, rank, round_]).integers(-8, 9, self.elements).astype(np.float32)
        )

    def total(self, round_: int) -> np.ndarray:
        return sum(self.contribution(rank, round_) for rank in range(self.world_size))  # type: ignore[return-value]

    def play(self) -> Job:
        run(self.main(), until_s=600.0)
        return self

    async def main(self) -> None:
        loop = asyncio.get_running_loop()
        self.network = PathNetwork(loop, self.seed, link=self.link)
        if self.faults is not None:
            self.faults(self.network, -1)
        ports = [self.network.port(f"h{rank}", self.paths) for rank in range(self.world_size)]
        peers = [list(port.addresses) for port in ports]
        config = TransportConfig(paths=self.paths, seed=self.seed, timeout_s=self.timeout_s, **self.config)
        self.endpoints = list(
            await asyncio.gather(
                *(
                    Endpoint.connect(
                        port, rank=rank, world_size=self.world_size, config=config, session=5, peers=peers
                    )
                    for rank, port in enumerate(ports)
                )
            )
        )
        try:
            await self._rounds(loop)
            if self.after is not None:
                await self.after(self.endpoints)
        finally:
            await asyncio.gather(*(endpoint.close(linger_s=0.5) for endpoint in self.endpoints))

    async def _rounds(self, loop: asyncio.AbstractEventLoop) -> None:
        groups = [Group(endpoint, timeout_s=self.timeout_s) for endpoint in self.endpoints]
        self.arrays = []
        for round_ in range(self.rounds):
            arrays = [self.contribution(rank, round_) for rank in range(self.world_size)]
            if self.faults is not None:
                self.faults(self.network, round_)
            began = loop.time()
            outcomes = await asyncio.gather(
                *(
                    group.all_reduce(array, policy=self.policy)
                    for group, array in zip(groups, arrays, strict=True)
                ),
                return_exceptions=True,
            )
            self.took_s.append(loop.time() - began)
            self.arrays.append(arrays)
            self.reports.append([outcome for outcome in outcomes if isinstance(outcome, Report)])
            self.errors += [outcome for outcome in outcomes if isinstance(outcome, DblpError)]
            if self.errors:
                return
        for group in groups:
            group.close()
