"""All-reduce algorithms side by side, in virtual time: how long they take, and how far off a lossy result is.

    python -m tests.benchmarks.algorithms [--ranks 4,8,16] [--sizes 64K,1M,4M] [--seeds 5] [--only time|error] [--json FILE]

Time: exact rounds on a star of 10 Gb/s links with a round trip of 50 us and 512 KiB of queue in front of each host, clean and
with 1 % of the datagrams lost; the median of the rounds after the first, and how often chunks were sent again. Processors cost
nothing here: what a rank spends on a chunk shows in ``dblp bench allreduce``.

Error: mean squared error of the average of standard normal arrays on 8 ranks where every hop loses 1 % of its datagrams and none
is repaired (a budget above the loss, ``relaxed``), over that of ``direct``: on unlimited links, where all lose alike, and on
the star, where queues that overflow add to it. OptiReduce's figures (NSDI'25, a tensor of 500 M elements) stand beside.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dblp.cli.host import document, write_json
from dblp.cli.options import parse_ranks, parse_sizes
from dblp.collectives.group import Group
from dblp.collectives.report import Report
from dblp.sim.loop import run
from dblp.sim.port import HostSpec, Link, Network
from dblp.transport.config import TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.policy import Consistency, Exact, Policy
from dblp.units import format_bytes, format_seconds

STAR = HostSpec(egress_bps=10e9, ingress="rate(10gbit,queue=512KB)")
"""A host on a 10 Gb/s link, and the switch's queue in front of it."""
TIMED = ("auto", "flat", "direct", "ring", "halving_doubling", "hierarchical", "ps")
"""Algorithms of the table of times. ``flat`` is left out above ``FLAT_BYTES``."""
FLAT_BYTES = 64 * 1024
LOSSES = (0.0, 0.01)
ROUNDS = 4
"""Rounds a cell; the first, in which congestion windows open, does not count."""
ERROR_RANKS, ERROR_ELEMENTS, ERROR_LOSS = 8, 1 << 18, 0.01
ERRORS = {
    "direct": ("direct", 2.47),
    "ps": ("ps(serve_only)", 9.92),
    "ring": ("ring", 14.55),
    "halving_doubling": ("halving_doubling", None),
    "hierarchical": ("hierarchical", None),
}
"""Algorithm as called, and OptiReduce's figure for it."""


def rounds(
    algorithm: str,
    world_size: int,
    count: int,
    *,
    loss: float,
    policy: Policy,
    number: int,
    seed: int,
    host: HostSpec = STAR,
    congestion: str = "delay",
) -> list[list[tuple[np.ndarray, Report]]]:
    """So many rounds of ``count`` float32: for each round, each rank's result and report."""

    async def main() -> list[list[tuple[np.ndarray, Report]]]:
        network = Network(
            asyncio.get_running_loop(),
            seed,
            link=Link(latency_s=25e-6, impair=f"loss({loss})" if loss else ""),
            host=host,
        )
        ports = [network.port(f"h{rank}") for rank in range(world_size)]
        peers = [list(port.addresses) for port in ports]
        config = TransportConfig(seed=seed, congestion=congestion)
        connects = [
            Endpoint.connect(port, rank=rank, world_size=world_size, config=config, session=1, peers=peers)
            for rank, port in enumerate(ports)
        ]
        endpoints = await asyncio.gather(*connects)
        groups = [Group(endpoint, timeout_s=60.0) for endpoint in endpoints]
        seen = []
        for round_ in range(number):
            arrays = [contribution(seed, round_, rank, count) for rank in range(world_size)]
            tasks = [
                group.all_reduce(array, "avg", policy=policy, algorithm=algorithm)
                for group, array in zip(groups, arrays, strict=True)
            ]
            seen.append(list(zip(arrays, await asyncio.gather(*tasks), strict=True)))
        await asyncio.gather(*(endpoint.close(linger_s=1.0) for endpoint in endpoints))
        return seen

    return run(main())


def contribution(seed: int, round_: int, rank: int, count: int) -> np.ndarray:
    """Standard normal float32."""
    return np.random.default_rng([seed, round_, rank]).standard_normal(count, np.float32)


def measure_time(algorithm: str, world_size: int, nbytes: int, loss: float) -> dict[str, Any]:
    """One cell of the table of times."""
    seen = rounds(algorithm, world_size, nbytes // 4, loss=loss, policy=Exact(), number=ROUNDS, seed=1)
    reports = [[report for _, report in round_] for round_ in seen[1:]]
    return {
        "kind": "time",
        "algorithm": algorithm,
        "ran": reports[0][0].algorithm,
        "reason": reports[0][0].reason,
        "world_size": world_size,
        "nbytes": nbytes,
        "loss": loss,
        "seconds": statistics.median(max(r.duration_s for r in round_) for round_ in reports),
        "resent_share": sum(r.chunks_resent for round_ in reports for r in round_)
        / max(1, sum(r.chunks_sent for round_ in reports for r in round_)),
    }


def measure_error(name: str, seed: int, host: HostSpec) -> float:
    """Mean squared error of the average, over the ranks that train."""
    algorithm, _ = ERRORS[name]
    serving = 1 if "serve_only" in algorithm else 0
    world_size = ERROR_RANKS + serving
    policy = Policy(budget=0.9, gather_budget=0.6, consistency=Consistency.RELAXED)
    (seen,) = rounds(
        algorithm,
        world_size,
        ERROR_ELEMENTS,
        loss=ERROR_LOSS,
        policy=policy,
        number=1,
        seed=seed,
        host=host,
    )
    parts = [contribution(seed, 0, rank, ERROR_ELEMENTS) for rank in range(serving, world_size)]
    wanted = np.mean(parts, axis=0, dtype=np.float64)
    return statistics.mean(float(((array - wanted) ** 2).mean()) for array, _ in seen[serving:])


def times(ranks: Sequence[int], sizes: Sequence[int], console: Console) -> list[dict[str, Any]]:
    """Measure and print the tables of times."""
    records = []
    for loss in LOSSES:
        table = Table(title=f"time of an exact round, {loss:.0%} loss (chunks sent again)")
        table.add_column("size, ranks")
        for algorithm in TIMED:
            table.add_column(algorithm, justify="right")
        for nbytes in sizes:
            for world_size in ranks:
                cells = []
                for algorithm in TIMED:
                    if algorithm == "flat" and nbytes > FLAT_BYTES:
                        cells.append("-")
                        continue
                    record = measure_time(algorithm, world_size, nbytes, loss)
                    records.append(record)
                    text = f"{format_seconds(record['seconds'])} ({record['resent_share']:.1%})"
                    cells.append(text + (f" {record['ran']}" if algorithm == "auto" else ""))
                table.add_row(f"{format_bytes(nbytes)}, {world_size}", *cells)
        console.print(table)
    return records


def errors(seeds: int, console: Console) -> list[dict[str, Any]]:
    """Measure and print the table of errors."""
    measured = {
        name: [[measure_error(name, seed, host) for seed in range(seeds)] for host in (HostSpec(), STAR)]
        for name in ERRORS
    }
    base = [statistics.mean(values) for values in measured["direct"]]
    table = Table(
        title=f"mean squared error, {ERROR_RANKS} ranks, {ERROR_LOSS:.0%} lost a hop, {seeds} seeds"
    )
    for column in (
        "algorithm",
        "all lose alike",
        "over direct",
        "star",
        "over direct",
        "OptiReduce",
        "over TAR",
    ):
        table.add_column(column, justify="left" if column == "algorithm" else "right")
    records = []
    for name, both in measured.items():
        published = ERRORS[name][1]
        cells = []
        for values, least in zip(both, base, strict=True):
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            mean = statistics.mean(values)
            cells += [f"{mean:.3e} ± {spread:.0e}", f"{mean / least:.2f}"]
        theirs = (f"{published:g}", f"{published / 2.47:.2f}") if published else ("", "")
        table.add_row(name, *cells, *theirs)
        for network, values in zip(("alike", "star"), both, strict=True):
            algorithm = ERRORS[name][0]
            records.append(
                {
                    "kind": "error",
                    "algorithm": algorithm,
                    "network": network,
                    "mse": values,
                    "published": published,
                }
            )
    console.print(table)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="4,8,16")
    parser.add_argument("--sizes", default="64K,1M,4M")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=("time", "error"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=180)
    records: list[dict[str, Any]] = []
    if options.only != "time":
        records += errors(options.seeds, console)
    if options.only != "error":
        records += times(parse_ranks(options.ranks), parse_sizes(options.sizes), console)
    if options.json is not None:
        write_json(options.json, document("algorithms", records))


if __name__ == "__main__":
    main()
