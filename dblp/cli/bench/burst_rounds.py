"""The rounds of one case, the same on sockets and in virtual time, and the case in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from dblp.cli.bench.burst_plan import MEASURED_ROUNDS, PAUSE_S, RANKS, WARM_UP_ROUNDS, BurstPlan, Case
from dblp.cli.bench.burst_port import BurstPort
from dblp.collectives.carry import Residual
from dblp.collectives.group import Group
from dblp.collectives.report import Report
from dblp.sim.loop import run as run_virtual
from dblp.sim.port import HostSpec, Link, Network
from dblp.transport.endpoint import Endpoint

QUEUE = "1464KB"
"""Queue of each link: Mininet's 1000 packets."""
TIMEOUT_S = 120.0

Meet = Callable[[], Awaitable[Any]]
"""Returns when all ranks have called it."""
Rounds = list[dict[str, Any]]
"""For each round after the warm-up, in order: ``burst``, ``seconds``, ``missing``, ``bounded`` (chunks), ``skipped``."""


async def run_rounds(
    group: Group, port: BurstPort, case: Case, plan: BurstPlan, number: int, meet: Meet
) -> Rounds:
    """This rank's rounds around burst ``number`` of the case: a warm-up, a clean round, the burst, a clean round. A burst begins
    before a round and ends when all ranks have ended theirs."""
    policy = case.policy
    carry = Residual(plan.nbytes // 4) if policy.carry is not None else None
    rounds: Rounds = []
    for place in range(-WARM_UP_ROUNDS, MEASURED_ROUNDS):
        burst = place == 1
        rng = np.random.default_rng([plan.seed, number, place + WARM_UP_ROUNDS, group.rank])
        gradient = rng.standard_normal(plan.nbytes // 4, np.float32)
        if burst:
            port.begin(case.loss)
        await meet()
        report = await group.all_reduce(gradient, "avg", policy=policy, carry=carry)
        await meet()
        port.end()
        if place >= 0:
            rounds.append(_entry(burst, report))
        await asyncio.sleep(PAUSE_S)
    return rounds


def port_seed(plan: BurstPlan, number: int, rank: int) -> list[int]:
    """Seed of the losses of a rank's burst ``number``."""
    return [plan.seed, number, rank]


def run_virtual_case(case: Case, plan: BurstPlan) -> list[Rounds]:
    """All bursts of the case, each on a simulated star of its own; each rank's rounds."""
    bursts = [_run_virtual_burst(case, plan, number) for number in range(plan.bursts)]
    return [[entry for rounds in bursts for entry in rounds[rank]] for rank in range(RANKS)]


def _run_virtual_burst(case: Case, plan: BurstPlan, number: int) -> list[Rounds]:
    async def main() -> list[Rounds]:
        loop = asyncio.get_running_loop()
        impair = f"loss({plan.loss})" if plan.loss else ""
        network = Network(
            loop,
            plan.seed * 1_000 + number,
            link=Link(latency_s=2.0 * plan.delay_s, impair=impair),
            host=HostSpec(egress_bps=plan.rate_bps, ingress=f"rate({plan.rate_bps:g}bit,queue={QUEUE})"),
        )
        ports = [
            BurstPort(
                network.port(f"h{rank}"),
                loop,
                seed=port_seed(plan, number, rank),
                control_too=plan.control_too,
            )
            for rank in range(RANKS)
        ]
        peers = [list(port.addresses) for port in ports]
        connects = [
            Endpoint.connect(
                port, rank=rank, world_size=RANKS, config=case.config, session=plan.seed + 1, peers=peers
            )
            for rank, port in enumerate(ports)
        ]
        endpoints = await asyncio.gather(*connects)
        barrier = asyncio.Barrier(RANKS)
        members = [
            run_rounds(Group(endpoint, timeout_s=TIMEOUT_S), port, case, plan, number, barrier.wait)
            for endpoint, port in zip(endpoints, ports, strict=True)
        ]
        rounds = await asyncio.gather(*members)
        await asyncio.gather(*(endpoint.close(linger_s=1.0) for endpoint in endpoints))
        return rounds

    return run_virtual(main())


def _entry(burst: bool, report: Report) -> dict[str, Any]:
    return {
        "burst": burst,
        "seconds": report.duration_s,
        "missing": report.missing_chunks,
        "bounded": report.bounded_chunks,
        "skipped": report.skipped,
    }
