"""Random networks from a seed: a job on the simulated network, what it must come to, and what it came to.

A scenario draws world size, latencies, rates, queues, buffers, impairments, paths, sizes, algorithms and policies; a third of them
break something (a rank is killed, paused, or partitioned) while rounds are under way. Every rank contributes small integers, so that
sums are exact in any order and the result of a bounded round can be computed from the holes that its reports state.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dblp.collectives.group import Group
from dblp.collectives.report import Report
from dblp.errors import DblpError
from dblp.sim.loop import run
from dblp.sim.port import HostSpec, Link, Network
from dblp.transport.config import TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.policy import Bounded, Policy

LOSSES = (
    "loss(0.001)",
    "loss(0.02)",
    "loss(0.2)",
    "ge(p=0.002,r=0.05,bad=0.8)",
    "ge(p=0.05,r=0.2,bad=1)",
    "bursts(loss=0.6..0.9,length=20ms,every=100ms)",
    "bursts(loss=0.8,length=200ms,every=1s,start=1ms)",
    "corrupt(0.01)",
)
"""Impairments that lose something."""
DISORDERS = ("jitter(200us)", "jitter(2ms)", "reorder(0.1,by=1ms)", "duplicate(0.05)", "delay(3ms)")
"""Impairments that lose nothing."""
TIMEOUT_S = 20.0
"""Virtual seconds; long against every loss above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One random job."""

    seed: int
    world_size: int
    sizes: tuple[int, ...]
    algorithm: str
    policy: Policy
    impair: str
    link: Link
    host: HostSpec
    regroup: float
    block: float
    paths: int
    fault: str
    fault_at_s: float
    victim: int

    @property
    def lossless(self) -> bool:
        """Nothing is lost on the way (full queues and buffers aside)."""
        return not any(element in self.impair for element in LOSSES)


@dataclass(slots=True)
class Outcome:
    """What each rank came to: arrays and reports of its rounds, or its error and when it was raised."""

    arrays: list[list[np.ndarray[Any, Any]]] = field(default_factory=list)
    reports: list[list[Report]] = field(default_factory=list)
    errors: dict[int, DblpError] = field(default_factory=dict)
    raised_at: dict[int, float] = field(default_factory=dict)
    began_at: dict[int, float] = field(default_factory=dict)
    early_peak: int = 0
    digest: str = ""
    lost: int = 0
    resent: int = 0


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = np.random.default_rng([seed, 2026])
    elements: list[str] = []
    if rng.random() < 0.65:
        elements.append(str(rng.choice(LOSSES)))
    if rng.random() < 0.5:
        elements.append(str(rng.choice(DISORDERS)))
    lossy = bool(rng.random() < 0.4)
    policy = (
        Bounded(float(rng.choice([0.02, 0.1, 0.4])), stop=str(rng.choice(["stall", "eager"])))
        if lossy
        else Policy()
    )
    rate = float(rng.choice([0.0, 0.0, 2e7, 1e8, 1e9]))
    biggest = 40_000 if 0 < rate < 5e7 else 400_000
    fault = str(rng.choice(["", "", "kill", "pause", "partition", "one-way"]))
    return Scenario(
        seed=seed,
        world_size=int(rng.integers(2, 6)),
        sizes=tuple(int(size) for size in rng.integers(0, biggest, int(rng.integers(1, 4)))),
        algorithm="auto" if lossy else str(rng.choice(["auto", "ring", "direct", "flat"])),
        policy=policy,
        impair=",".join(elements),
        link=Link(
            latency_s=float(rng.choice([20e-6, 200e-6, 5e-3])),
            rate_bps=rate,
            queue_bytes=int(rng.choice([65536, 262144])),
        ),
        host=HostSpec(
            receive_buffer_bytes=int(rng.choice([212_992, 1 << 20, 8 << 20])),
            processing_s=float(rng.choice([0.0, 0.0, 100e-6])),
        ),
        regroup=float(rng.choice([0.0, 0.3])),
        block=float(rng.choice([0.0, 0.05])),
        paths=int(rng.choice([1, 1, 3])),
        fault=fault,
        fault_at_s=float(rng.uniform(0.0, 0.01)),
        victim=0,
    )


def contribution(scenario: Scenario, rank: int, index: int) -> np.ndarray[Any, Any]:
    """What a rank puts into a round: small integers."""
    rng = np.random.default_rng([scenario.seed, rank, index])
    return rng.integers(-8, 9, scenario.sizes[index]).astype(np.float32)


def play(scenario: Scenario) -> Outcome:
    """Run the scenario in virtual time."""
    outcome = Outcome()
    run(_play(scenario, outcome), until_s=600.0, max_events=3_000_000)
    return outcome


async def _play(scenario: Scenario, outcome: Outcome) -> None:
    loop = asyncio.get_running_loop()
    link = Link(
        latency_s=scenario.link.latency_s,
        rate_bps=scenario.link.rate_bps,
        queue_bytes=scenario.link.queue_bytes,
        impair=scenario.impair,
    )
    network = Network(
        loop, scenario.seed, link=link, host=scenario.host, regroup=scenario.regroup, block=scenario.block
    )
    config = TransportConfig(
        seed=scenario.seed, paths=scenario.paths, timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S
    )
    ports = [network.port(f"h{rank}", scenario.paths) for rank in range(scenario.world_size)]
    peers = [list(port.addresses) for port in ports]
    endpoints = await asyncio.gather(
        *(
            Endpoint.connect(
                port,
                rank=rank,
                world_size=scenario.world_size,
                config=config,
                session=77 + scenario.seed,
                peers=peers,
            )
            for rank, port in enumerate(ports)
        )
    )
    if scenario.fault:
        loop.call_later(scenario.fault_at_s, _break, network, scenario)
    outcome.arrays = [[] for _ in endpoints]
    outcome.reports = [[] for _ in endpoints]
    await asyncio.gather(*(_member(scenario, endpoint, outcome) for endpoint in endpoints))
    await asyncio.gather(*(endpoint.close(linger_s=1.0) for endpoint in endpoints))
    outcome.digest = network.trace_digest()
    # CLOSE may reach a port that is closed already.
    outcome.lost = sum(count for reason, count in network.lost().items() if reason != "unreachable")


def _break(network: Network, scenario: Scenario) -> None:
    victim, other = f"h{scenario.victim}", f"h{(scenario.victim + 1) % scenario.world_size}"
    if scenario.fault == "kill":
        network.kill(victim)
    elif scenario.fault == "pause":
        network.pause(victim)
    else:
        for rank in range(scenario.world_size):
            host = f"h{rank}"
            if host != victim and (scenario.fault == "partition" or host == other):
                network.partition(victim, host, one_way=scenario.fault == "one-way")


async def _member(scenario: Scenario, endpoint: Endpoint, outcome: Outcome) -> None:
    group, rank = Group(endpoint), endpoint.rank
    loop = asyncio.get_running_loop()
    try:
        for index in range(len(scenario.sizes)):
            array = contribution(scenario, rank, index)
            outcome.began_at[rank] = loop.time()
            report = await group.all_reduce(
                array, "sum", policy=scenario.policy, algorithm=scenario.algorithm
            )
            outcome.arrays[rank].append(array)
            outcome.reports[rank].append(report)
            outcome.resent += report.chunks_resent
            held = max((receiver.early_bytes for receiver in endpoint.core.receivers.values()), default=0)
            outcome.early_peak = max(outcome.early_peak, held)
    except DblpError as error:
        outcome.errors[rank] = error
        outcome.raised_at[rank] = loop.time()
