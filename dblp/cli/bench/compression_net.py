"""Ranks with a compression each, on a simulated star: all time is virtual, all bytes are those of real endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dblp.cli.bench.burst_port import BurstPort
from dblp.cli.bench.burst_rounds import QUEUE, TIMEOUT_S
from dblp.collectives.compression.base import Bucket
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.compression.rounds import Compression, Totals
from dblp.collectives.group import Group
from dblp.collectives.report import Report
from dblp.sim.loop import VirtualLoop
from dblp.sim.port import HostSpec, Link, Network
from dblp.transport.config import TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.policy import Policy
from dblp.transport.port import Burst

Floats = npt.NDArray[np.float32]
T = TypeVar("T")
_ENDLESS = 1 << 62
_DRAIN_S = 0.05
"""Virtual seconds after a round until its last datagrams have left."""
_READ_BITS, _LEAST_READ_S, _MOST_READ_S = 16 * 1464 * 8, 5e-5, 2e-3
"""Datagrams that arrive while a link takes so many bits are read together: what keeps the simulation quick."""


class CountingPort(BurstPort):
    """Counts what it sends: data and control datagrams, with dblp's headers, without those of UDP and IP."""

    nbytes = 0

    def send(self, burst: Burst) -> bool:
        """See ``Port.send``."""
        sent = super().send(burst)
        self.nbytes += len(burst.data) if sent else 0
        return sent


class CompressedRanks:
    """The ranks of one run; ``rate_bps``: of each rank's link, 0: unlimited."""

    def __init__(
        self,
        method: str,
        policy: Policy,
        *,
        ranks: int,
        rate_bps: float,
        delay_s: float,
        loss: float,
        seed: int,
    ) -> None:
        self._policy = policy
        self._ranks = ranks
        self._iterations = 0
        self._loop = VirtualLoop(until_s=float("inf"), max_events=_ENDLESS)
        self._endpoints = self._run(self._connect(rate_bps, delay_s, loss, seed))
        self._groups = [Group(endpoint, timeout_s=TIMEOUT_S) for endpoint in self._endpoints]
        self._compressions = [Compression(parse_compression(method), seed=seed) for _ in range(ranks)]

    @property
    def totals(self) -> Totals:
        """Of rank 0."""
        return self._compressions[0].totals

    @property
    def wire_bytes(self) -> int:
        """What a rank has sent up to now, mean over the ranks, once what is under way has left."""
        self._run(asyncio.sleep(_DRAIN_S))
        return round(sum(port.nbytes for port in self._ports) / self._ranks)

    def epoch(self, number: int) -> None:
        """An epoch begins."""
        for compression in self._compressions:
            compression.epoch(number)

    def average(self, gradients: Floats, bucket: Bucket) -> tuple[float, list[Report]]:
        """Average (ranks, n) in place; virtual seconds of the slowest rank, and each rank's report."""
        start = self._loop.time()
        number, self._iterations = self._iterations, self._iterations + 1

        async def one(rank: int) -> Report:
            return await self._compressions[rank].all_reduce(
                self._groups[rank],
                gradients[rank],
                bucket,
                timeout_s=TIMEOUT_S,
                iteration=number,
                policy=self._policy,
            )

        reports = self._run(self._gathered(one))
        return self._loop.time() - start, reports

    def close(self) -> None:
        """End all groups and the loop."""
        for group in self._groups:
            group.close()
        self._run(self._gathered(lambda rank: self._endpoints[rank].close(linger_s=1.0)))
        self._loop.close()

    async def _connect(self, rate_bps: float, delay_s: float, loss: float, seed: int) -> list[Endpoint]:
        host = HostSpec()
        if rate_bps:
            host = HostSpec(egress_bps=rate_bps, ingress=f"rate({rate_bps:g}bit,queue={QUEUE})")
        network = Network(
            self._loop,
            seed,
            link=Link(latency_s=2.0 * delay_s, impair=f"loss({loss:g})" if loss else ""),
            host=host,
            interrupt_s=max(min(_READ_BITS / rate_bps, _MOST_READ_S), _LEAST_READ_S) if rate_bps else 2e-4,
        )
        self._ports = [
            CountingPort(network.port(f"h{rank}"), self._loop, seed=rank) for rank in range(self._ranks)
        ]
        ports = self._ports
        peers = [list(port.addresses) for port in ports]
        config = TransportConfig(seed=seed)
        connects = [
            Endpoint.connect(
                port, rank=rank, world_size=self._ranks, config=config, session=seed + 1, peers=peers
            )
            for rank, port in enumerate(ports)
        ]
        return list(await asyncio.gather(*connects))

    async def _gathered(self, call: Callable[[int], Any]) -> list[Any]:
        return list(await asyncio.gather(*(call(rank) for rank in range(self._ranks))))

    def _run(self, main: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(main)
