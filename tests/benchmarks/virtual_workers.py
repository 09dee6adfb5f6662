"""Workers of a training on a network in virtual time: what an all-reduce of ``standin.train`` is there.

Real groups, with their endpoints, congestion control and repairs, on a simulated star; only the time is virtual. One flat
gradient is one round, as in a worker loop that computes, reduces and steps in turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dblp.cli.bench.burst_port import BurstPort
from dblp.cli.bench.burst_rounds import QUEUE
from dblp.collectives.budget import BudgetController, agree
from dblp.collectives.carry import Residual
from dblp.collectives.group import Group
from dblp.collectives.priority import Layers, Priority
from dblp.collectives.report import Report
from dblp.sim.loop import VirtualLoop
from dblp.sim.port import HostSpec, Link, Network
from dblp.transport.config import TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.policy import Consistency, Policy

Floats = npt.NDArray[np.float32]
T = TypeVar("T")

TIMEOUT_S = 120.0
_ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Star:
    """The network: a switch, and a link to each rank."""

    rate_bps: float
    """Of each link."""
    delay_s: float = 1e-3
    """Of each link; a datagram crosses two."""
    read_s: float = 5e-4
    """Datagrams that arrive within so long are read together: what keeps the simulation quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A policy as training runs it."""

    policy: Policy
    controller: Callable[[], BudgetController] | None = None
    transport: Mapping[str, Any] = field(default_factory=dict)

    @property
    def drifts(self) -> bool:
        """Each rank may get an average of its own."""
        return self.policy.lossy and self.policy.consistency is Consistency.RELAXED


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step's round."""

    seconds: float
    """Of the slowest rank, with the exchange of a check."""
    burst: bool
    tolerant: bool
    """The phase was."""
    missing_share: float
    """Missing chunks over those of all bounded messages to all ranks."""
    energy_lost: float
    """Share of the gradient's energy that was lost, mean over the ranks."""


class VirtualWorkers:
    """The ranks of one training. ``loss``: of datagrams, in the rounds of ``bursts`` (steps from 0)."""

    def __init__(
        self,
        arm: Arm,
        star: Star,
        *,
        ranks: int,
        elements: int,
        layers: Layers,
        epoch_steps: int,
        compute_s: float,
        loss: float = 0.0,
        bursts: frozenset[int] = frozenset(),
        seed: int = 0,
    ) -> None:
        self._arm, self._star, self._ranks, self._seed = arm, star, ranks, seed
        self._epoch_steps, self._compute_s = epoch_steps, compute_s
        self._loss, self._bursts = loss, bursts
        self._loop = VirtualLoop(until_s=float("inf"), max_events=_ENDLESS)
        self._ports: list[BurstPort] = []
        self._endpoints = self._run(self._connect())
        self._groups = [Group(endpoint, timeout_s=TIMEOUT_S) for endpoint in self._endpoints]
        kept = elements if arm.policy.carry is not None else 0
        self._carries = [Residual(kept) if kept else None for _ in range(ranks)]
        self._priorities = [Priority(layers) for _ in range(ranks)]
        self._controllers = [arm.controller() if arm.controller else None for _ in range(ranks)]
        self._began = self._loop.time()
        self._synced_at = 0
        self.steps: list[Step] = []

    @property
    def seconds(self) -> float:
        """Virtual time since training began."""
        return self._loop.time() - self._began

    def all_reduce(self, gradients: Floats) -> Floats:
        """Compute for a while, then average (ranks, n) in place; returns what every rank got, or the one row of all."""
        self._run(asyncio.sleep(self._compute_s))
        number, start = len(self.steps), self._loop.time()
        burst = number in self._bursts
        for port in self._ports if burst else ():
            port.begin(self._loss)
        reports = self._run(self._gathered(lambda rank: self._round(rank, number, gradients[rank])))
        for port in self._ports:  # a burst lasts for one round: the exchange of a check is another
            port.end()
        self._run(self._gathered(lambda rank: self._check(rank, gradients[rank], reports[rank])))
        bounded = sum(report.bounded_chunks for report in reports)
        self.steps.append(
            Step(
                seconds=self._loop.time() - start,
                burst=burst,
                tolerant=reports[0].budget > self._arm.policy.budget,
                missing_share=sum(report.missing_chunks for report in reports) / bounded if bounded else 0.0,
                energy_lost=float(np.mean([report.energy_lost for report in reports])),
            )
        )
        return gradients if self._arm.drifts else gradients[0]

    def resynchronise(self, parameters: Floats) -> None:
        """Give all ranks the parameters of rank 0 (ranks, n) where they may drift, every ``resync_rounds`` rounds."""
        policy, done = self._arm.policy, len(self.steps)
        if not self._arm.drifts or not policy.resync_rounds or done - self._synced_at < policy.resync_rounds:
            return
        self._synced_at = done
        self._run(self._gathered(lambda rank: self._groups[rank].broadcast(parameters[rank], 0)))

    def close(self) -> None:
        """End all groups and the loop."""
        for group in self._groups:
            group.close()
        self._run(self._gathered(lambda rank: self._endpoints[rank].close(linger_s=1.0)))
        self._loop.close()

    async def _round(self, rank: int, number: int, gradient: Floats) -> Report:
        group, controller, policy = self._groups[rank], self._controllers[rank], self._arm.policy
        if controller is not None:
            if number % self._epoch_steps == 0:
                controller.epoch(number // self._epoch_steps)
            controller.begin_iteration()
            policy = controller.policy(policy)
        return await group.all_reduce(
            gradient, "avg", policy=policy, carry=self._carries[rank], priority=self._priorities[rank]
        )

    async def _check(self, rank: int, gradient: Floats, report: Report) -> None:
        if (controller := self._controllers[rank]) is not None:
            controller.hear(report)
            await agree(self._groups[rank], controller, norm=float(np.linalg.norm(gradient)))

    async def _connect(self) -> list[Endpoint]:
        star, loop = self._star, self._loop
        network = Network(
            loop,
            self._seed,
            link=Link(latency_s=2.0 * star.delay_s),
            host=HostSpec(egress_bps=star.rate_bps, ingress=f"rate({star.rate_bps:g}bit,queue={QUEUE})"),
            interrupt_s=star.read_s,
        )
        for rank in range(self._ranks):
            seed = self._seed * self._ranks + rank
            self._ports.append(BurstPort(network.port(f"h{rank}"), loop, seed=seed))
        config = TransportConfig(seed=self._seed, **self._arm.transport)
        peers = [list(port.addresses) for port in self._ports]
        connects = [
            Endpoint.connect(
                port, rank=rank, world_size=self._ranks, config=config, session=self._seed + 1, peers=peers
            )
            for rank, port in enumerate(self._ports)
        ]
        return list(await asyncio.gather(*connects))

    async def _gathered(self, call: Callable[[int], Any]) -> list[Any]:
        return list(await asyncio.gather(*(call(rank) for rank in range(self._ranks))))

    def _run(self, main: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(main)
