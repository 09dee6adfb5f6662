"""Runs made by hand, with figures that can be worked out: for results, reports, claims and comparisons."""

from __future__ import annotations

from typing import Any

import numpy as np

from dblp.sim.lab.counters import Counters, LinkCounters
from dblp.sim.lab.experiment import Experiment, from_table
from dblp.sim.lab.run import Block, Run, Trained
from dblp.sim.lab.schedule import Applied

START = 1000.0


def experiment(**changes: Any) -> Experiment:
    table = {
        "title": "Made <by hand>",
        "about": "Figures & shares",
        "arms": ["gloo-cubic", "default"],
        "sizes": ["1M"],
        "topology": {"kind": "star", "hosts": 2},
    }
    return from_table({**table, **changes}, "made", "made")


def counted(forwarded: int, model: int = 0, queue: int = 0) -> Counters:
    return Counters({"h0_down": LinkCounters(forwarded, model, queue)}, frozenset(("h0_down",)))


def block(
    arm: str, seconds: list[float], *, at: float = START, counters: Counters | None = None, **counts: int
) -> Block:
    times = np.array(seconds)
    starts = at + np.concatenate(([0.0], np.cumsum(times[:-1])))
    made = counters if counters is not None else counted(1000)
    return Block(
        arm=arm, nbytes=2**20, starts=starts, seconds=times, cpu_s=0.1 * len(times), counters=made, **counts
    )


def span(start: float, end: float, inside: Counters | None = None, before: Counters | None = None) -> Applied:
    return Applied(START + start, START + start, START + end, START + end, "loss(0.8)", inside, before)


def run(blocks: list[Block], spans: tuple[Applied, ...] = (), **changes: Any) -> Run:
    return Run(
        experiment=experiment(**changes),
        blocks=blocks,
        spans=spans,
        start_s=START,
        wall_s=10.0,
        means={
            "loss": "nft",
            "rate": "tbf",
            "delay": "none",
            "why": "",
            "schedule": changes.get("impair", ""),
        },
    )


def trained(arm: str, seed: int, wall_s: float, accuracy: float, **traffic: int) -> Trained:
    event = {
        "kind": "result",
        "wall_s": wall_s,
        "test_accuracy": accuracy,
        "allreduce_s": [0.01, 0.03],
        "traffic": traffic or None,
    }
    return Trained(
        arm=arm,
        seed=seed,
        events=(event, {**event, "wall_s": wall_s / 2}),
        counters=counted(900, 100),
        start_s=START,
    )


def document(made: Run) -> dict[str, Any]:
    """As ``dblp lab run --json`` writes it, with a host of its own."""
    from dblp.sim.lab.results import document_of

    host = {"cpu": "made", "cores": 2, "kernel": "6", "torch": "2", "python": "3", "machine": "x"}
    return {"command": "lab run", "version": "0", "host": host, **document_of(made)}
