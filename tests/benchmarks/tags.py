"""What tags save: real gradients through a congested switch that drops low classes first, in virtual time.

    python -m tests.benchmarks.tags [--json FILE] [--model cnn] [--data digits] [--steps 2,10,30,80] [--lost 0.1]
    python -m tests.benchmarks.tags --cost [--json FILE] [--rounds 40]

Four workers train a model; the gradients of some steps are then reduced over a simulated network: all workers send to each
owner of a shard at once, through a port of a switch that is too small for them. Its buffer is shared by all classes, and when
it is full what waits of the highest class goes first. Such switches look at DSCP, so chunks leave by value from the start. One
row for each way to tag, at buffers in which a tenth of the contributions' chunks is lost for good: their classes, and the
share of the gradient's energy that they held, on average and at most.

``--cost``: an all-reduce of 25 MiB on two ranks on sockets, with tags and without; what they cost without any loss, where chunks
leave by value from the start (``by_value="always"``) and where they do only on a path that loses, as by default.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from dblp.cli.train.data import load
from dblp.cli.train.recipes import recipe_of
from dblp.cli.train.samples import Samples
from dblp.cli.train.standin import StandIn, train
from dblp.collectives.group import Group
from dblp.collectives.priority import Priority, Tagger
from dblp.collectives.reduction import DTYPES
from dblp.collectives.report import Report
from dblp.collectives.torch.buckets import BucketLayout
from dblp.sim.loop import run
from dblp.sim.port import HostSpec, Link, Network, SwitchPort
from dblp.transport.config import ALWAYS, BY_VALUE, LOSSY, TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.policy import Consistency, Policy, Tags
from dblp.transport.udp import open_port
from dblp.units import KIB, MIB

WORKERS = 4
ARMS = (Tags.NONE, Tags.RANDOM, Tags.LAYER, Tags.MAGNITUDE, Tags.BOTH)
CRITICAL_SHARE = 0.05
CHUNK = 352
"""Elements of a chunk: the float32 payload of a datagram for an MTU of 1500."""
BUDGET = 0.9
"""Of each message, so that nothing but what is critical is repaired: what is missing is what the switch dropped."""
SEARCH_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What the workers contribute in one step."""

    step: int
    rows: np.ndarray[Any, Any]
    """(workers, n)."""
    layers: BucketLayout


def gradients(model: str, data: str, steps: Sequence[int], seed: int = 0) -> list[Gradient]:
    """Train on ``data`` up to the last of ``steps`` and keep the gradients of all of them (counted from 1)."""
    samples, recipe = Samples(load(data, None)), recipe_of(data, model)
    layers, kept = layout(samples.build(model, seed=seed)), []
    done = 0

    def all_reduce(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        nonlocal done
        done += 1
        if done in steps:
            kept.append(Gradient(step=done, rows=rows.copy(), layers=layers))
        mean: np.ndarray[Any, Any] = rows.mean(axis=0)
        return mean

    plan = StandIn(
        model=model,
        optimizer="sgd",
        lr=recipe.lr["sgd"],
        batch=recipe.batch // WORKERS * WORKERS,
        steps=max(steps),
        seed=seed,
        workers=WORKERS,
        constant=True,
    )
    train(plan, samples, all_reduce)
    return kept


def layout(module: torch.nn.Module) -> BucketLayout:
    """All parameters of a model as one bucket, from the input side."""
    named = dict(module.named_parameters())
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in named))
    sizes = [parameter.numel() for parameter in named.values()]
    return BucketLayout(
        names=tuple(named),
        sizes=tuple(sizes),
        bounds=np.cumsum([0, *sizes], dtype=np.int64),
        layers=np.array([modules.index(name.rpartition(".")[0]) for name in named], np.int32),
        layer_count=len(modules),
    )


def lossy_round(gradient: Gradient, tags: Tags, share: float, seed: int = 0) -> dict[str, Any]:
    """The round of ``congested_round`` in which about ``share`` of the chunks is missing: by the size of the buffer."""
    low, high, found = 128 * KIB, 384 * KIB, []
    for _ in range(SEARCH_STEPS):
        size = (low + high) // 2
        found.append(congested_round(gradient, tags, size, seed))
        low, high = (size, high) if found[-1]["missing_share"] > share else (low, size)
    return min(found, key=lambda record: abs(record["missing_share"] - share))


def congested_round(gradient: Gradient, tags: Tags, queue_bytes: int, seed: int = 0) -> dict[str, Any]:
    """One round through a port with such a buffer, as a record."""
    policy = Policy(
        budget=BUDGET,
        consistency=Consistency.EXACT,
        tags=tags,
        critical_share=0.0 if tags is Tags.NONE else CRITICAL_SHARE,
    )
    reports = run(_congested(gradient, policy, queue_bytes, seed), until_s=60.0)
    chunks = sum(report.bounded_chunks for report in reports)
    missing = sum(report.missing_chunks for report in reports)
    return {
        "tags": tags.value,
        "step": gradient.step,
        "queue_bytes": queue_bytes,
        "chunks": chunks,
        "resent": sum(report.chunks_resent for report in reports),
        "missing_share": missing / chunks,
        "missing_by_class": _missing_by_class(gradient, policy, reports, seed),
        "energy_lost": _energy_lost(gradient, reports),
        "round_s": max(report.duration_s for report in reports),
    }


async def _congested(gradient: Gradient, policy: Policy, queue_bytes: int, seed: int) -> list[Report]:
    loop = asyncio.get_running_loop()
    hosts = [f"10.0.0.{rank + 1}" for rank in range(WORKERS)]
    switch = SwitchPort(rate_bps=1e9, queue_bytes=queue_bytes, push_out=True)
    network = Network(loop, seed, link=Link(latency_s=20e-6), host=HostSpec(switch=switch))
    endpoints = await connected(
        [network.port(host) for host in hosts],
        config=TransportConfig(seed=seed, timeout_s=30.0, by_value=ALWAYS),
    )

    async def worker(endpoint: Endpoint) -> Report:
        array = gradient.rows[endpoint.rank].copy()
        group = Group(endpoint)
        try:
            return await group.all_reduce(array, policy=policy, priority=Priority(gradient.layers))
        finally:
            group.close()

    reports = await asyncio.gather(*map(worker, endpoints))
    await asyncio.gather(*(endpoint.close(linger_s=0.1) for endpoint in endpoints))
    return list(reports)


async def connected(ports: Sequence[Any], *, config: TransportConfig) -> list[Endpoint]:
    """Endpoints of all ranks, one a port."""
    peers = [list(port.addresses) for port in ports]
    return await asyncio.gather(
        *(
            Endpoint.connect(port, rank=rank, world_size=len(ports), config=config, session=1, peers=peers)
            for rank, port in enumerate(ports)
        )
    )


def _energy_lost(gradient: Gradient, reports: Sequence[Report]) -> float:
    """Energy of what did not arrive over that of all that was sent, counted here."""
    squares = gradient.rows.astype(np.float64) ** 2
    by_chunk = np.add.reduceat(squares, np.arange(0, squares.shape[1], CHUNK), axis=1)
    owned = _shards(by_chunk.shape[1])
    sent = sum(by_chunk[rank].sum() - by_chunk[rank][owned[rank]].sum() for rank in range(WORKERS))
    lost = sum(by_chunk[peer][chunks].sum() for report in reports for peer, chunks in report.missing.items())
    return float(lost / sent)


def _missing_by_class(gradient: Gradient, policy: Policy, reports: Sequence[Report], seed: int) -> list[int]:
    if policy.tags is Tags.NONE:
        return [0, 0, sum(report.missing_chunks for report in reports), 0]
    counts = np.zeros(4, np.int64)
    for peer in range(WORKERS):
        row = gradient.rows[peer]
        tagger = Tagger(row, DTYPES["float32"], CHUNK, policy, Priority(gradient.layers), (seed, 0, peer))
        for report, shard in zip(reports, _shards(len(tagger.energies)), strict=True):
            chunks = report.missing.get(peer, np.empty(0, np.uint32)) - shard[0]
            counts += np.bincount(tagger.classes(shard[0], shard[-1] + 1)[chunks], minlength=4)
    return [int(count) for count in counts]


def _shards(chunks: int) -> list[np.ndarray[Any, Any]]:
    """The chunks that each rank owns: as many each, but for one more of the first."""
    return np.array_split(np.arange(chunks), WORKERS)


# --- cost


def cost(rounds: int, nbytes: int = 25 * MIB) -> list[dict[str, Any]]:
    """Times of all-reduces on two ranks in one process, on sockets, by kind of policy, taken in turns."""
    policies = {
        "exact": Policy(),
        "untagged": Policy(budget=0.1),
        "magnitude": Policy(budget=0.1, tags=Tags.MAGNITUDE, critical_share=CRITICAL_SHARE),
        "layer": Policy(budget=0.1, tags=Tags.LAYER, critical_share=CRITICAL_SHARE),
        "random": Policy(budget=0.1, tags=Tags.RANDOM, critical_share=CRITICAL_SHARE),
    }
    seconds = asyncio.run(_cost(policies, rounds, nbytes))
    return [
        {"policy": name, "nbytes": nbytes, "median_s": statistics.median(times), "best_s": min(times)}
        for name, times in seconds.items()
    ]


async def _cost(policies: dict[str, Policy], rounds: int, nbytes: int) -> dict[str, list[float]]:
    configs = {by_value: TransportConfig(by_value=by_value) for by_value in BY_VALUE}
    worlds = {
        by_value: await connected([open_port(config) for _ in range(2)], config=config)
        for by_value, config in configs.items()
    }
    groups = {by_value: [Group(endpoint) for endpoint in world] for by_value, world in worlds.items()}
    arrays = [np.random.default_rng(rank).standard_normal(nbytes // 4, np.float32) for rank in range(2)]
    arms = [(name, LOSSY) for name in policies] + [
        (name, ALWAYS) for name, policy in policies.items() if policy.tags is not Tags.NONE
    ]
    seconds: dict[str, list[float]] = {_arm(*arm): [] for arm in arms}
    for turn in range(rounds + 2):
        for arm in arms if turn % 2 == 0 else reversed(arms):
            name, by_value = arm
            start = time.perf_counter()
            await asyncio.gather(
                *(
                    group.all_reduce(array, "avg", policy=policies[name])
                    for group, array in zip(groups[by_value], arrays, strict=True)
                )
            )
            if turn >= 2:  # the first warm buffers up
                seconds[_arm(*arm)].append(time.perf_counter() - start)
    for group in itertools.chain(*groups.values()):
        group.close()
    await asyncio.gather(*(endpoint.close(linger_s=0.1) for endpoint in itertools.chain(*worlds.values())))
    return seconds


def _arm(name: str, by_value: str) -> str:
    return name if by_value == LOSSY else f"{name}, by value"


# --- the command


def main() -> None:
    """Run, print a table, write records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--steps", default="2,10,30,80", help="steps whose gradients are taken")
    parser.add_argument("--lost", type=float, default=0.1, help="share of the chunks that is to be missing")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cost:
        records = cost(options.rounds)
        shown = Table("policy", "median (ms)", "best (ms)", title="25 MiB, two ranks, sockets")
        for record in records:
            shown.add_row(
                record["policy"], f"{1e3 * record['median_s']:.1f}", f"{1e3 * record['best_s']:.1f}"
            )
    else:
        steps = [int(step) for step in options.steps.split(",")]
        taken = gradients(options.model, options.data, steps)
        records = [lossy_round(gradient, tags, options.lost) for tags in ARMS for gradient in taken]
        shown = table(records)
    Console(width=120).print(shown)
    if options.json:
        options.json.write_text("\n".join(json.dumps(record) for record in records) + "\n")


def table(records: Sequence[dict[str, Any]]) -> Table:
    """A row for each way to tag, over all steps."""
    title = "gradients of four workers through a switch that drops low classes first"
    shown = Table("tags", "missing (%)", "by class (%)", "energy lost (%)", "at most (%)", title=title)
    for tags in ARMS:
        mine = [record for record in records if record["tags"] == tags.value]
        if not mine:
            continue
        by_class = np.sum([record["missing_by_class"] for record in mine], axis=0)
        energies = [100 * record["energy_lost"] for record in mine]
        shown.add_row(
            tags.value,
            f"{100 * statistics.fmean(record['missing_share'] for record in mine):.1f}",
            " ".join(f"{share:.0%}" for share in by_class / max(by_class.sum(), 1)),
            f"{statistics.fmean(energies):.2f}",
            f"{max(energies):.2f}",
        )
    return shown


if __name__ == "__main__":
    main()
