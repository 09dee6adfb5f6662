"""Rounds that loss bursts hit, exact and bounded, in virtual time.

    python -m tests.benchmarks.burst_rounds [--ranks 2,4] [--size 1M] [--budgets 0.1,0.2,0.4] [--bursts 10] [--json FILE]

Every second, the network between all hosts loses ``LOSS`` of its datagrams for ``BURST_S``; links of 1 Gb/s, 100 us there
and back. Rounds follow each other with ``PAUSE_S`` of computing between them. What counts are the rounds of which a part lies
within a burst: their number, and the quartiles, 90th percentile and maximum of their times, as the slowest rank had them. One
seed for all arms: the bursts are the same, the draws are not, since the arms send different datagrams.

Arms: exact; and for each budget one that leaves a tenth of it to the gather leg, as is the default, and one that leaves
half of it.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dblp.cli.host import document, write_json
from dblp.cli.options import parse_ranks, parse_sizes
from dblp.collectives.group import Group
from dblp.sim.loop import run
from dblp.sim.port import HostSpec, Link, Network
from dblp.transport.config import TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.policy import Carry, Exact, Policy
from dblp.units import format_bytes, format_seconds

LOSS, BURST_S, EVERY_S, START_S = 0.8, 0.2, 1.0, 0.5
PAUSE_S = 0.02
WARM_S = 0.05
"""Rounds go on from so long before a burst to its end; what lies between bursts tells nothing."""
SEED = 1


def arms(budgets: Sequence[float]) -> dict[str, Policy]:
    """The policies to compare, by name."""
    found = {"exact": Exact()}
    for budget in budgets:
        found[f"{budget:g}"] = Policy(budget=budget, carry=Carry())
        found[f"{budget:g}, half on each leg"] = Policy(
            budget=budget, gather_budget=budget / 2, carry=Carry()
        )
    return found


def hit_rounds(world_size: int, nbytes: int, policy: Policy, bursts: int, *, seed: int = SEED) -> list[float]:
    """Times of the rounds that the first ``bursts`` bursts hit, in virtual seconds; of the slowest rank."""

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        impair = f"bursts(loss={LOSS},length={BURST_S:g}s,every={EVERY_S:g}s,start={START_S:g}s)"
        network = Network(
            loop, seed, link=Link(latency_s=50e-6, impair=impair), host=HostSpec(egress_bps=1e9)
        )
        ports = [network.port(f"h{rank}") for rank in range(world_size)]
        peers = [list(port.addresses) for port in ports]
        config = TransportConfig(seed=seed)
        connects = [
            Endpoint.connect(port, rank=rank, world_size=world_size, config=config, session=1, peers=peers)
            for rank, port in enumerate(ports)
        ]
        endpoints = await asyncio.gather(*connects)
        groups = [Group(endpoint, timeout_s=60.0) for endpoint in endpoints]
        times = []
        for burst in range(bursts):
            start = START_S + burst * EVERY_S
            await asyncio.sleep(max(0.0, start - WARM_S - loop.time()))
            while loop.time() < start + BURST_S:
                began = loop.time()
                arrays = [np.ones(nbytes // 4, np.float32) for _ in groups]
                tasks = [
                    group.all_reduce(array, "avg", policy=policy, algorithm="direct")
                    for group, array in zip(groups, arrays, strict=True)
                ]
                await asyncio.gather(*tasks)
                if _in_burst(began, loop.time()):
                    times.append(loop.time() - began)
                await asyncio.sleep(PAUSE_S)
        await asyncio.gather(*(endpoint.close(linger_s=1.0) for endpoint in endpoints))
        return times

    return run(main())


def _in_burst(began: float, ended: float) -> bool:
    """A part of the time lies within a burst."""
    into = (began - START_S) % EVERY_S
    return ended > START_S and (into < BURST_S or into + ended - began > EVERY_S)


def summary(times: Sequence[float]) -> dict[str, float]:
    """Quartiles, 90th percentile and maximum, in seconds."""
    shares = {"q1": 0.25, "median": 0.5, "q3": 0.75, "p90": 0.9, "max": 1.0}
    return {name: float(np.quantile(times, share)) for name, share in shares.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--size", default="1M")
    parser.add_argument("--budgets", default="0.1,0.2,0.4")
    parser.add_argument("--bursts", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    (nbytes,) = parse_sizes(options.size)
    budgets = [float(budget) for budget in options.budgets.split(",")]
    console = Console(width=120)
    records: list[dict[str, Any]] = []
    for world_size in parse_ranks(options.ranks):
        table = Table(
            title=f"{world_size} ranks, {format_bytes(nbytes)}: rounds hit by a burst of {LOSS:.0%} loss"
        )
        for column in ("budget", "rounds", "q1", "median", "q3", "p90", "max"):
            table.add_column(column, justify="left" if column == "budget" else "right")
        for arm, policy in arms(budgets).items():
            times = hit_rounds(world_size, nbytes, policy, options.bursts)
            figures = summary(times)
            table.add_row(arm, str(len(times)), *(format_seconds(value) for value in figures.values()))
            records.append({"ranks": world_size, "nbytes": nbytes, "arm": arm, "times": times, **figures})
        console.print(table)
    if options.json is not None:
        write_json(
            options.json, document("burst_rounds", records, loss=LOSS, burst_s=BURST_S, every_s=EVERY_S)
        )


if __name__ == "__main__":
    main()
