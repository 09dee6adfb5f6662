"""One of eight paths goes dead in the middle of a round: how long that round takes, and those after it. In virtual time.

    python -m tests.benchmarks.paths [--choices spray,random,reps,ethereal] [--ranks 2] [--deaths 6] [--only death|load]
                                     [--json FILE]

Death: all-reduces of 1.2 MB over eight paths of 1 Gb/s and 0.4 ms there and back. In the third of five rounds one path between
ranks 0 and 1 takes everything and delivers nothing, both ways; which path, and when in the round, differs from run to run.
``late``: by how much this round or the next took longer than the one before, in timeouts of 8 ms, the least that the transport
has (``MIN_RTO_S``); the claim is that no run is later than 2. ``after``: the second round after it, on seven paths. Exact rounds
must have the right sum, bounded ones (10 %) the bound and equal bits on all ranks, or the command fails.

Load: ``ethereal``'s rule for every number of flows and paths up to 64, in exact fractions: the load of the fullest path over that
of ideal spraying, n / s, and how many flows it splits at most.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dblp.cli.host import document, write_json
from dblp.cli.options import parse_choices, parse_ranks
from dblp.transport.paths.ethereal import parts_of_flows, path_loads, spread
from dblp.transport.policy import Bounded, Exact
from dblp.transport.send_path import MIN_RTO_S
from dblp.units import format_seconds
from tests.transport.path_network import DEAD, Job, PathNetwork

CHOICES = ("spray", "random", "reps", "ethereal")
POLICIES = {"exact": Exact(), "bounded": Bounded(0.1)}
PATHS = 8
ELEMENTS = 300_000
ROUNDS = 5
HIT = 2
"""The number of the round, from 0, in which the path dies; the first opens congestion windows, the second is a clean one."""
TIMEOUTS = 2
"""That a round may be late by."""
MOST = 64
"""Flows and paths of the table of loads."""


def death(choice: str, policy: str, world_size: int, seed: int, clean_s: float) -> dict[str, Any]:
    """One run: the times of its rounds in virtual seconds. ``clean_s``: about how long a round takes."""
    rng = np.random.default_rng([seed, world_size])
    path, after_s = int(rng.integers(PATHS)), float(rng.uniform(0.1, 0.9)) * clean_s

    def faults(network: PathNetwork, number: int) -> None:
        if number == HIT:
            network.loop.call_later(after_s, network.set_path, "h0", "h1", path, DEAD)

    job = _play(choice, policy, world_size, seed, faults)
    _check(job, policy)
    before_s = job.took_s[HIT - 1]
    left = [not job.endpoints[rank].path_states(1 - rank)[path].alive for rank in (0, 1)]
    return {
        "kind": "death",
        "choice": choice,
        "policy": policy,
        "ranks": world_size,
        "seed": seed,
        "path": path,
        "died_after_s": after_s,
        "before_s": before_s,
        "during_s": job.took_s[HIT],
        "next_s": job.took_s[HIT + 1],
        "after_s": job.took_s[HIT + 2],
        "late_timeouts": (max(job.took_s[HIT], job.took_s[HIT + 1]) - before_s) / MIN_RTO_S,
        "left": all(left),
        "missing_share": max(report.missing_share for report in job.reports[HIT]),
    }


def _play(choice: str, policy: str, world_size: int, seed: int, faults: Any = None) -> Job:
    job = Job(
        paths=PATHS,
        world_size=world_size,
        elements=ELEMENTS,
        rounds=ROUNDS,
        policy=POLICIES[policy],
        seed=seed,
        faults=faults,
        config={"path_choice": choice},
    )
    return job.play()


def _check(job: Job, policy: str) -> None:
    """Raise unless every round has kept its promise."""
    if job.errors:
        raise job.errors[0]
    for number, (arrays, reports) in enumerate(zip(job.arrays, job.reports, strict=True)):
        wanted = job.total(number) if policy == "exact" else arrays[0]
        if not all(np.array_equal(array, wanted) for array in arrays):
            raise AssertionError(f"round {number}: the ranks' results are not what they must be")
        if any(report.missing_share > POLICIES[policy].budget for report in reports):
            raise AssertionError(f"round {number}: more is missing than the bound allows")


def deaths(
    choices: Sequence[str], ranks: Sequence[int], number: int, console: Console
) -> list[dict[str, Any]]:
    """Measure and print the table of dying paths."""
    table = Table(title=f"one of {PATHS} paths dies in a round: medians of {number} runs, worst in brackets")
    for column in (
        "ranks",
        "choice",
        "round",
        "before",
        "during",
        "late (timeouts)",
        "after",
        "met",
        "missing",
    ):
        table.add_column(column, justify="left" if column in ("choice", "round") else "right")
    records = []
    for world_size in ranks:
        for choice in choices:
            for policy in POLICIES:
                clean_s = _play(choice, policy, world_size, seed=0).took_s[HIT]
                mine = [death(choice, policy, world_size, seed, clean_s) for seed in range(number)]
                records += mine
                met = sum(record["late_timeouts"] <= TIMEOUTS for record in mine)
                table.add_row(
                    str(world_size),
                    choice,
                    policy,
                    *(_times(mine, name) for name in ("before_s", "during_s")),
                    _worst([record["late_timeouts"] for record in mine]),
                    _times(mine, "after_s"),
                    f"{met} of {number}",
                    f"{max(record['missing_share'] for record in mine):.1%}",
                )
    console.print(table)
    return records


def _times(records: Sequence[dict[str, Any]], name: str) -> str:
    values = [record[name] for record in records]
    return f"{format_seconds(statistics.median(values))} ({format_seconds(max(values))})"


def _worst(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({max(values):.2f})"


def load(flows: int, paths: int) -> dict[str, Any]:
    """What ``ethereal`` makes of so many flows, exactly."""
    parts = parts_of_flows(flows, paths)
    most = max(path_loads(spread(parts, paths), paths))
    return {
        "kind": "load",
        "flows": flows,
        "paths": paths,
        "over_spraying": str(most * paths / flows),
        "split": sum(count > 1 for count in parts),
        "subflows": sum(parts),
        "whole_flows_over_spraying": str(-(-flows // paths) * paths / flows),
    }


def loads(console: Console) -> list[dict[str, Any]]:
    """Compute all loads and print what they come to."""
    records = [load(flows, paths) for flows in range(1, MOST + 1) for paths in range(1, MOST + 1)]
    equal = sum(record["over_spraying"] == "1" for record in records)
    table = Table(title=f"ethereal, n flows over s paths, n and s from 1 to {MOST}: {len(records)} cases")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("fullest path carries exactly n / s, as by spraying", f"{equal} of {len(records)}")
    table.add_row(
        "the same of whole flows, round-robin, none split",
        f"{sum(record['flows'] % record['paths'] == 0 for record in records)} of {len(records)}",
    )
    table.add_row("most flows split in any case", str(max(record["split"] for record in records)))
    table.add_row(
        "subflows over flows, mean",
        f"{statistics.mean(record['subflows'] / record['flows'] for record in records):.2f}",
    )
    table.add_row(
        "the same where n >= s",
        f"{statistics.mean(r['subflows'] / r['flows'] for r in records if r['flows'] >= r['paths']):.2f}",
    )
    console.print(table)
    return records


def main() -> None:
    """Run, print tables, write records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--choices", default=",".join(CHOICES))
    parser.add_argument("--ranks", default="2")
    parser.add_argument(
        "--deaths", type=int, default=6, help="runs a row, each with a path and an instant of its own"
    )
    parser.add_argument("--only", choices=("death", "load"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console, records = Console(width=140), []
    if options.only != "load":
        choices = parse_choices("--choices", options.choices, CHOICES)
        records += deaths(choices, parse_ranks(options.ranks), options.deaths, console)
    if options.only != "death":
        records += loads(console)
    if options.json is not None:
        write_json(options.json, document("paths", records, timeout_s=MIN_RTO_S))


if __name__ == "__main__":
    main()
