"""Workers of a training whose gradients are compressed, on a network in virtual time: what an all-reduce of ``standin.train`` is.

Real groups with their endpoints, congestion control and repairs on a simulated star; only the time is virtual. Or, for thousands
of rounds, a network without protocol (``ideal_network.py``). One flat gradient is one bucket, as in a worker loop that computes,
reduces and steps in turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch import nn

from dblp.collectives.budget import agree
from dblp.collectives.compression.accordion import Accordion
from dblp.collectives.compression.base import Bucket, Part
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.compression.rounds import Compression, Totals
from dblp.collectives.group import Group
from dblp.sim.loop import VirtualLoop
from dblp.sim.port import HostSpec, Link, Network
from dblp.transport.config import TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.port import Burst
from tests.benchmarks.ideal_network import IdealNetwork

Floats = npt.NDArray[np.float32]
T = TypeVar("T")

TIMEOUT_S = 300.0
QUEUE = "1464KB"
"""Queue of each link: 1,000 datagrams."""
_ENDLESS = 1 << 62
_DATAGRAM_BYTES = 1464
_BURST = 20
"""Datagrams of the background traffic that leave together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Star:
    """The network: a switch, and a link to each rank."""

    rate_bps: float
    """Of each link."""
    delay_s: float = 0.5e-3
    """Of each link; a datagram crosses two."""
    background: float = 0.0
    """Share of each link's rate that other traffic to its host takes while it is on: half of the time."""
    read_s: float = 2e-4
    """Datagrams that arrive within so long are read together: what keeps the simulation quick."""
    ideal: bool = False
    """Without protocol, and without background."""


def parts_of(module: nn.Module) -> Bucket:
    """A model's parameters as one bucket, in the order of ``standin.train``'s gradients."""
    return Bucket([Part(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()])


class CompressedWorkers:
    """The ranks of one training with one method."""

    def __init__(
        self,
        method: str,
        star: Star,
        parts: Bucket,
        *,
        ranks: int,
        compute_s: float,
        epoch_steps: int,
        seed: int,
    ) -> None:
        self._parts, self._ranks, self._seed = parts, ranks, seed
        self._compute_s, self._epoch_steps = compute_s, epoch_steps
        self._loop = VirtualLoop(until_s=float("inf"), max_events=_ENDLESS)
        self._network: Network
        self._ideal = IdealNetwork(ranks, star.rate_bps, 2.0 * 2.0 * star.delay_s) if star.ideal else None
        self._endpoints = [] if self._ideal else self._run(self._connect(star))
        self._groups: Sequence[Any] = (
            self._ideal.groups
            if self._ideal
            else [Group(endpoint, timeout_s=TIMEOUT_S) for endpoint in self._endpoints]
        )
        self._compressions = [Compression(parse_compression(method), seed=seed) for _ in range(ranks)]
        chosen = self._compressions[0].method
        self._controllers = [
            chosen.controller(learning_rate=False) if isinstance(chosen, Accordion) else None
            for _ in range(ranks)
        ]
        self._background = [self._loop.create_task(task) for task in self._others(star)]
        self._began = self._loop.time()
        self.ended_s: list[float] = []
        """When each step's round ended, since training began."""
        self.figures: list[dict[str, float]] = []
        """What the method had decided in each step."""

    @property
    def seconds(self) -> float:
        """Virtual time since training began."""
        return self._loop.time() - self._began

    @property
    def totals(self) -> Totals:
        """Of one rank."""
        return self._compressions[0].totals

    def set_star(self, star: Star) -> None:
        """Change the links' rate, between steps."""
        if self._ideal is not None:
            self._ideal.rate_bps = star.rate_bps
            return
        for rank in range(self._ranks):
            self._network.set_host(f"h{rank}", _host(star))

    def all_reduce(self, gradients: Floats) -> Floats:
        """Compute for a while, then average (ranks, n) in place; returns what every rank got."""
        self._run(asyncio.sleep(self._compute_s))
        step = len(self.ended_s)
        self._run(self._gathered(lambda rank: self._round(rank, step, gradients[rank])))
        self.ended_s.append(self.seconds)
        self.figures.append(self._compressions[0].figures)
        average: Floats = gradients[0]
        return average

    def close(self) -> None:
        """End all groups and the loop."""
        for task in self._background:
            task.cancel()
        for group in self._groups if self._endpoints else ():
            group.close()
        self._run(self._left())
        self._loop.close()

    async def _left(self) -> None:
        await asyncio.gather(*(endpoint.close(linger_s=1.0) for endpoint in self._endpoints))
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _round(self, rank: int, step: int, gradient: Floats) -> None:
        compression, controller = self._compressions[rank], self._controllers[rank]
        begins = step % self._epoch_steps == 0
        if begins:
            compression.epoch(step // self._epoch_steps)
        phases = None
        if controller is not None:
            if begins:
                controller.epoch(step // self._epoch_steps)
            controller.begin_iteration()
            phases = controller.phases
            norms = self._layer_norms(gradient)
        await compression.all_reduce(
            self._groups[rank], gradient, self._parts, timeout_s=TIMEOUT_S, iteration=step, phases=phases
        )
        if controller is not None:
            total = float(np.linalg.norm(list(norms.values())))
            await agree(self._groups[rank], controller, norm=total, layer_norms=norms)

    def _layer_norms(self, gradient: Floats) -> dict[str, float]:
        cut = zip(self._parts.parts, self._parts.cut(gradient), strict=True)
        return dict(sorted((part.name, float(np.linalg.norm(flat))) for part, flat in cut))

    async def _connect(self, star: Star) -> list[Endpoint]:
        self._network = network = Network(
            self._loop,
            self._seed,
            link=Link(latency_s=2.0 * star.delay_s),
            host=_host(star),
            interrupt_s=star.read_s,
        )
        ports = [network.port(f"h{rank}") for rank in range(self._ranks)]
        config = TransportConfig(seed=self._seed)
        peers = [list(port.addresses) for port in ports]
        connects = [
            Endpoint.connect(
                port, rank=rank, world_size=self._ranks, config=config, session=self._seed + 1, peers=peers
            )
            for rank, port in enumerate(ports)
        ]
        return list(await asyncio.gather(*connects))

    def _others(self, star: Star) -> Iterator[Coroutine[Any, Any, None]]:
        """Traffic to each rank's host that is nobody's here: on and off for random times of 100 ms on average."""
        for rank in range(self._ranks) if star.background and not star.ideal else ():
            yield self._other(rank, star)

    async def _other(self, rank: int, star: Star) -> None:
        network = self._network
        network.set_host(f"x{rank}", HostSpec())
        source, sink = network.port(f"x{rank}"), network.port(f"h{rank}")
        sink.open(lambda batch: None, lambda: None)
        rng = np.random.default_rng([self._seed, rank])
        data = np.zeros(_BURST * _DATAGRAM_BYTES, np.uint8)
        gap_s = 8.0 * len(data) / (star.background * star.rate_bps)
        while True:
            until = self._loop.time() + rng.exponential(0.1)
            while self._loop.time() < until:
                source.send(Burst(data, _DATAGRAM_BYTES, 0, 3, sink.addresses[0]))
                await asyncio.sleep(gap_s)
            await asyncio.sleep(rng.exponential(0.1))

    async def _gathered(self, call: Callable[[int], Any]) -> list[Any]:
        return list(await asyncio.gather(*(call(rank) for rank in range(self._ranks))))

    def _run(self, main: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(main)


def _host(star: Star) -> HostSpec:
    return HostSpec(egress_bps=star.rate_bps, ingress=f"rate({star.rate_bps:g}bit,queue={QUEUE})")
