"""Random networks, jobs and faults from a seed, and one run of a job on them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
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
from dblp.transport.policy import Bounded, Exact, Policy, Tags

TIMEOUT_S = 60.0
"""Of every round: far above what the worst of the networks needs."""
FAULTY_TIMEOUT_S = 3.0
"""The same where a host fails; such networks lose little, and no fault that ends lasts longer than half a second."""
EARLY_BYTES = 65_536
"""What a rank may hold of a peer's message before its receive is posted."""
PERIOD = 7
"""Contributions repeat with it; no chunk has a multiple of it in elements, so a chunk in a wrong place shows."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What befalls one host, and when."""

    kind: str
    """kill, partition, pause: for good; one-way: as partition, but only what the host sends is lost, and only to one other;
    hiccup: a pause that ends; flap: a partition that heals."""
    rank: int
    at_s: float
    lasts_s: float = 0.0

    @property
    def fatal(self) -> bool:
        return self.kind in ("kill", "partition", "pause", "one-way")

    @property
    def isolating(self) -> bool:
        """All others must name this host."""
        return self.fatal and self.kind != "one-way"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One job on one network."""

    seed: int
    world_size: int
    elements: int
    rounds: int
    policy: Policy
    algorithm: str
    link: Link
    host: HostSpec
    regroup: float
    block: float
    paths: int
    paths_how: dict[str, Any] = field(default_factory=dict)
    """Settings of the choice among several paths."""
    fault: Fault | None
    real: bool = False
    """Contributions are any numbers, for tests that compare bits: nothing can be read off their sum."""

    @property
    def timeout_s(self) -> float:
        return FAULTY_TIMEOUT_S if self.fault else TIMEOUT_S

    def contribution(self, rank: int, round_: int) -> np.ndarray:
        """Integers that show in a sum whose contributions are there: 2**rank times 1 + (i + round) % PERIOD."""
        if self.real:
            rng = np.random.default_rng([self.seed, rank, round_])
            return rng.standard_normal(self.elements, np.float32)
        return (1 << rank) * self.pattern(round_)

    def pattern(self, round_: int) -> np.ndarray:
        pattern: np.ndarray = (1 + (np.arange(self.elements) + round_) % PERIOD).astype(np.float32)
        return pattern


def plan(seed: int, *, faulty: bool = False) -> Plan:
    """Draw a plan. Losses reach 15 % by the datagram and 80 % for a time; rates reach down to 50 Mb/s.

    ``faulty``: a host fails, on a network that loses 2 % at most.
    """
    rng = np.random.default_rng([seed, int(faulty)])
    world_size = int(rng.integers(2, 6))
    algorithm = str(rng.choice(["auto", "direct", "ring", "flat"]))
    bounded = bool(rng.random() < 0.6) and algorithm in ("auto", "direct")
    link = _link(rng, faulty)
    return Plan(
        seed=seed,
        world_size=world_size,
        elements=_elements(rng, link, world_size),
        rounds=3,
        policy=_tagged(_policy(rng), np.random.default_rng([seed, 3])) if bounded else Exact(),
        algorithm=algorithm,
        link=link,
        host=HostSpec(
            receive_buffer_bytes=int(rng.choice([212_992, 1 << 20, 4 << 20])),
            egress_bps=float(rng.choice([0.0, 0.0, 1e9])),
            send_buffer_bytes=int(rng.choice([100_000, 4 << 20])),
            processing_s=float(rng.choice([0.0, 0.0, 5e-5, 5e-4])),
        ),
        regroup=float(rng.choice([0.0, 0.3, 1.0])),
        block=float(rng.choice([0.0, 0.0, 0.1])),
        paths=int(rng.choice([1, 1, 2, 3, 5, 8])),
        paths_how=_paths_how(seed),
        fault=_fault(rng, world_size) if faulty else None,
    )


def _paths_how(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng([seed, 3])
    name = str(rng.choice(["spray", "random", "reps", "ethereal", "single"]))
    return {
        "path_choice": name,
        "path_chunks": int(rng.choice([0, 0, 1, 16])),
        "leaf_ranks": int(rng.integers(1, 4)),
    }


def _elements(rng: np.random.Generator, link: Link, world_size: int) -> int:
    """None to several trains of bursts; the largest only for few ranks on fast links: their messages are the longest."""
    fast = link.rate_bps in (0.0, 1e9) and world_size <= 3
    sizes = [0, 1, 5, 300, 3000, 10_000] + [90_000, 90_000] * fast
    size = int(rng.choice(sizes))
    return size + int(rng.integers(0, size // 2 + 50)) if size else 0


def _policy(rng: np.random.Generator) -> Policy:
    budget = float(rng.choice([0.05, 0.2, 0.5]))
    stop = str(rng.choice(["stall", "eager", "deadline"]))
    return Bounded(budget, stop=stop, stop_after_s=0.01 if stop == "deadline" else 0.0)


def _tagged(policy: Policy, rng: np.random.Generator) -> Policy:
    """The same with the chunks of half of the jobs tagged."""
    tags = Tags(str(rng.choice(["none", "none", "none", "random", "magnitude", "both"])))
    if tags is Tags.NONE:
        return policy
    return dataclasses.replace(policy, tags=tags, critical_share=float(rng.choice([0.0, 0.02, 0.1])))


def _link(rng: np.random.Generator, faulty: bool) -> Link:
    losses = ["", "", f"loss({rng.uniform(0.001, 0.02 if faulty else 0.15):.4f})"]
    if not faulty:
        losses += ["ge(p=0.01,r=0.1,bad=0.8)", "ge_time(burst=2ms,gap=20ms,bad=0.8)"]
        losses += ["bursts(loss=0.4..0.8,length=10ms,every=50ms,start=1ms)"]
    parts = [str(rng.choice(losses))]
    for element in ("duplicate(0.02)", "jitter(200us)", "reorder(p=0.05,by=500us)", "corrupt(0.01)"):
        if rng.random() < 0.2:
            parts.append(element)
    return Link(
        latency_s=float(rng.choice([2e-5, 2e-4, 5e-3])),
        rate_bps=float(rng.choice([0.0, 0.0, 5e7, 1e9])),
        queue_bytes=int(rng.choice([50_000, 300_000])),
        impair=",".join(part for part in parts if part),
    )


def _fault(rng: np.random.Generator, world_size: int) -> Fault:
    return Fault(
        kind=str(rng.choice(["kill", "partition", "pause", "one-way", "hiccup", "flap"])),
        rank=int(rng.integers(world_size)),
        at_s=float(rng.exponential(5e-3)),
        lasts_s=float(rng.uniform(0.01, 0.5)),
    )


@dataclass
class Outcome:
    """What became of a job."""

    errors: dict[int, DblpError] = field(default_factory=dict)
    """By rank: what its first failing call raised."""
    results: dict[int, list[np.ndarray]] = field(default_factory=dict)
    """By rank: the arrays of the rounds that it finished."""
    reports: dict[int, list[Report]] = field(default_factory=dict)
    ended_s: dict[int, float] = field(default_factory=dict)
    """By rank: virtual time at which its last call ended."""
    round_began_s: dict[int, float] = field(default_factory=dict)
    """By rank: virtual time at which its last call began."""
    max_chunk_bytes: int = 0
    early_bytes: int = 0
    """Most that a rank held for one peer before the receive was posted."""
    left_early: int = 0
    """What all ranks together still held of it at the end."""
    lost: Counter[str] = field(default_factory=Counter)
    digest: str = ""


def play(plan: Plan) -> Outcome:
    """Run a plan's job to its end in virtual time."""
    return run(_Job(plan).main(), until_s=600.0)


class _Job:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.outcome = Outcome()

    async def main(self) -> Outcome:
        plan, loop = self.plan, asyncio.get_running_loop()
        network = Network(
            loop, plan.seed, link=plan.link, host=plan.host, regroup=plan.regroup, block=plan.block
        )
        endpoints = await self.connect(network)
        watch = asyncio.create_task(self.watch(endpoints))
        if plan.fault is not None:
            loop.call_later(plan.fault.at_s, self.strike, network, plan.fault)
        try:
            await asyncio.gather(*(self.rank(endpoint) for endpoint in endpoints))
        finally:
            self.outcome.left_early = sum(r.inbox.early_bytes for e in endpoints for r in _receivers(e))
            self.outcome.max_chunk_bytes = endpoints[0].max_chunk_bytes
            watch.cancel()
            await asyncio.gather(*(endpoint.close(linger_s=0.5) for endpoint in endpoints))
        self.outcome.lost = network.lost()
        self.outcome.digest = network.trace_digest()
        return self.outcome

    async def connect(self, network: Network) -> list[Endpoint]:
        plan = self.plan
        config = TransportConfig(
            seed=plan.seed,
            timeout_s=plan.timeout_s,
            early_bytes=EARLY_BYTES,
            window_bytes=262_144,
            paths=plan.paths,
            **plan.paths_how,
        )
        ports = [network.port(_host(rank), plan.paths) for rank in range(plan.world_size)]
        peers = [list(port.addresses) for port in ports]
        options: dict[str, Any] = {"world_size": plan.world_size, "config": config, "peers": peers}
        return await asyncio.gather(
            *(
                Endpoint.connect(port, rank=rank, session=plan.seed + 1, **options)
                for rank, port in enumerate(ports)
            )
        )

    async def rank(self, endpoint: Endpoint) -> None:
        """The job of one rank: the rounds one after the other, up to the first error."""
        plan, outcome, rank = self.plan, self.outcome, endpoint.rank
        group = Group(endpoint, timeout_s=plan.timeout_s)
        outcome.results[rank], outcome.reports[rank] = [], []
        try:
            for round_ in range(plan.rounds):
                array = plan.contribution(rank, round_)
                outcome.round_began_s[rank] = endpoint.time()
                report = await group.all_reduce(array, policy=plan.policy, algorithm=plan.algorithm)
                outcome.results[rank].append(array)
                outcome.reports[rank].append(report)
        except DblpError as error:
            outcome.errors[rank] = error
        finally:
            outcome.ended_s[rank] = endpoint.time()
            group.close()

    async def watch(self, endpoints: list[Endpoint]) -> None:
        """Note the most that any rank holds early: often at first, seldom while a fault is waited out."""
        looks = 0
        while True:
            held = (receiver.inbox.early_bytes for e in endpoints for receiver in _receivers(e))
            self.outcome.early_bytes = max(self.outcome.early_bytes, *held)
            looks += 1
            await asyncio.sleep(2e-4 if looks < 250 else 5e-3)

    def strike(self, network: Network, fault: Fault) -> None:
        loop, host = asyncio.get_running_loop(), _host(fault.rank)
        others = [_host(rank) for rank in range(self.plan.world_size) if rank != fault.rank]
        if fault.kind == "kill":
            network.kill(host)
        elif fault.kind in ("pause", "hiccup"):
            network.pause(host)
        elif fault.kind == "one-way":
            network.partition(host, others[0], one_way=True)
        else:
            for other in others:
                network.partition(host, other)
        if fault.kind == "hiccup":
            loop.call_later(fault.lasts_s, network.resume, host)
        elif fault.kind == "flap":
            loop.call_later(fault.lasts_s, network.heal)


def _host(rank: int) -> str:
    return f"10.0.0.{rank + 1}"


def _receivers(endpoint: Endpoint) -> list[Any]:
    receivers: Any = endpoint.core.receivers
    return list(receivers.values() if isinstance(receivers, dict) else receivers)
