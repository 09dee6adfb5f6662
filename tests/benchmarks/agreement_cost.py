"""What it costs, where nothing is lost, that all ranks hold the same bits although the gather leg may lose chunks.

    python -m tests.benchmarks.agreement_cost [--ranks 2,4,8,16,32] [--size 25M] [--mode virtual|sockets|both] [--json FILE]

Rounds of ``direct``: exact; bounded with an exact gather leg; bounded on both legs and relaxed; the same agreed; and with a
carry. The cost is the agreed round's time over that of the bounded round with an exact gather leg, less one: that leg is the
other way to equal bits. The relaxed round (sockets only) shows how much of it is agreement, how much the bounded leg.

Virtual: a star of 10 Gb/s links, 50 us there and back, queues that take everything. Nothing is lost, processors cost nothing,
and the congestion control is ``fixed``, since the others' search for the rate differs from run to run by more than what is to be
seen: the time that the messages of the agreement add behind the data.
Sockets: processes on this host, over loopback, up to ``SOCKET_RANKS``; the arms take turns round by round in the
same processes, so that all meet the same load. The median of the rounds' times on rank 0, each from a barrier to the end of the
round, and the quartiles; and the same of the processor time that all ranks spend on a round together, which tells more where
other work shares the processors.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import dblp
from dblp.cli.host import document, write_json
from dblp.cli.options import parse_ranks, parse_sizes
from dblp.collectives.carry import Residual
from dblp.sim.port import HostSpec
from dblp.transport.policy import Carry, Consistency, Exact, Policy
from dblp.units import format_bytes, format_seconds
from tests.benchmarks.algorithms import rounds

BUDGET = 0.1
"""End to end, with a gather leg of a tenth of it."""
ARMS = {
    "exact": Exact(),
    "bounded": Policy(budget=BUDGET, consistency=Consistency.EXACT),
    "relaxed": Policy(budget=BUDGET, consistency=Consistency.RELAXED),
    "agreed": Policy(budget=BUDGET),
    "agreed, carry": Policy(budget=BUDGET, carry=Carry()),
}
CLEAN = HostSpec(egress_bps=10e9, ingress="rate(10gbit,queue=1000MB)", receive_buffer_bytes=1 << 26)
"""A host whose switch port drops nothing."""
VIRTUAL_ROUNDS = 3
"""The first, in which congestion windows open, does not count."""
SOCKET_RANKS = 4
SOCKET_ROUNDS = 24
"""Rounds of each arm."""


def virtual(world_size: int, nbytes: int) -> dict[str, list[float]]:
    """Times of the rounds of each arm, in virtual seconds; of the slowest rank. What a carry costs are processors alone."""
    times = {}
    for arm, policy in ARMS.items():
        if policy.carry is not None or policy.consistency is Consistency.RELAXED:
            continue
        seen = rounds(
            "direct",
            world_size,
            nbytes // 4,
            loss=0.0,
            policy=policy,
            number=VIRTUAL_ROUNDS,
            seed=1,
            host=CLEAN,
            congestion="fixed",
        )
        times[arm] = [max(report.duration_s for _, report in round_) for round_ in seen[1:]]
        assert not any(report.chunks_resent for round_ in seen for _, report in round_), (
            "nothing is lost here"
        )
    return times


def over_sockets(world_size: int, nbytes: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The same of processes on this host: wall-clock seconds on rank 0, and processor seconds of all ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.benchmarks.agreement_cost", "--worker", "--size", str(nbytes)]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    workers = [
        subprocess.Popen(command, env=os.environ | common | {"RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(world_size)
    ]
    outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise SystemExit(f"workers ended with {[worker.returncode for worker in workers]}")
    told = [json.loads(output) for output in outputs]
    spent = {
        arm: [sum(rounds_) for rounds_ in zip(*(one["cpu"][arm] for one in told), strict=True)]
        for arm in ARMS
    }
    return told[0]["wall"], spent


def work(nbytes: int) -> None:
    """One process of ``over_sockets``: prints its times."""
    dblp.init_process_group()
    array = np.zeros(nbytes // 4, np.float32)
    residual = Residual(array.size)
    wall: dict[str, list[float]] = {arm: [] for arm in ARMS}
    cpu: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(SOCKET_ROUNDS + 1):
        for arm, policy in ARMS.items():
            array[:] = dblp.get_rank() + 1
            dblp.barrier()
            began, spent = time.perf_counter(), time.process_time()
            dblp.all_reduce(
                array, "avg", policy, algorithm="direct", carry=residual if policy.carry is not None else None
            )
            if number:  # the first opens congestion windows and touches memory
                wall[arm].append(time.perf_counter() - began)
            dblp.barrier()  # what a rank still does for its peers is part of what the round costs
            if number:
                cpu[arm].append(time.process_time() - spent)
    sys.stdout.write(json.dumps({"wall": wall, "cpu": cpu}) + "\n")
    dblp.destroy_process_group()


def report(
    mode: str, cells: Sequence[tuple[int, dict[str, list[float]]]], nbytes: int, console: Console
) -> list[dict[str, Any]]:
    """Print a table and return its records."""
    table = Table(title=f"{mode}, {format_bytes(nbytes)}: time of a round (quartiles) and cost of agreement")
    for column in ("ranks", *ARMS, "cost", "cost with carry"):
        table.add_column(column, justify="right")
    records = []
    for world_size, times in cells:
        medians = {arm: statistics.median(values) for arm, values in times.items()}
        costs = {arm: medians[arm] / medians["bounded"] - 1.0 for arm in medians if arm.startswith("agreed")}
        shown = [_spread(times[arm]) if arm in times else "" for arm in ARMS]
        ends = [f"{costs[arm]:+.1%}" if arm in costs else "" for arm in ("agreed", "agreed, carry")]
        table.add_row(str(world_size), *shown, *ends)
        records += [
            {
                "mode": mode,
                "ranks": world_size,
                "nbytes": nbytes,
                "arm": arm,
                "seconds": medians[arm],
                "times": values,
                "cost": costs.get(arm),
            }
            for arm, values in times.items()
        ]
    console.print(table)
    return records


def _spread(times: Sequence[float]) -> str:
    middle = format_seconds(statistics.median(times))
    if len(times) < 4:
        return middle
    low, _, high = statistics.quantiles(times, n=4)
    return f"{middle}\n{format_seconds(low)} .. {format_seconds(high)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4,8,16,32")
    parser.add_argument("--size", default="25M")
    parser.add_argument("--mode", choices=("virtual", "sockets", "both"), default="both")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    (nbytes,) = parse_sizes(options.size)
    if options.worker:
        work(nbytes)
        return
    ranks, console, records = parse_ranks(options.ranks), Console(width=150), []
    if options.mode != "virtual":
        cells = [(size, over_sockets(size, nbytes)) for size in ranks if size <= SOCKET_RANKS]
        records += report("sockets", [(size, wall) for size, (wall, _) in cells], nbytes, console)
        spent = [(size, cpu) for size, (_, cpu) in cells]
        records += report("sockets, processor time of all ranks", spent, nbytes, console)
    if options.mode != "sockets":
        records += report("virtual", [(size, virtual(size, nbytes)) for size in ranks], nbytes, console)
    if options.json is not None:
        write_json(options.json, document("agreement_cost", records, budget=BUDGET))


if __name__ == "__main__":
    main()
