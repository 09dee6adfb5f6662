"""The packet engine beside ns-3: flow completion times of TCP Reno on a dumbbell and on a leaf-spine of 16 hosts.

Run: python -m tests.benchmarks.fabric_ns3 --python PYTHON [--only WORDS] [--json FILE]

PYTHON is an interpreter that has the package ``ns3`` (3.44; it brings its own compiler, so give it an environment of its own:
``python -m venv ns3-env && ns3-env/bin/pip install ns3``). Both get the same cables, buffers, flows and paths: in ns-3 each
destination has one static route, by the spine of its number, and in the packet engine each flow has that path. Hosts' own queues
drop nothing in either.

Where flows share queues from their first packet on, who grows first in slow start keeps its lead: single flows' times, and the
mean of one permutation, are as much chance as model. Such scenarios are repeated, each time with other starts (and another
permutation), the network empty in between; the mean is over all flows of all repeats.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dblp.sim.fabric.graph import Floats, Graph
from dblp.sim.fabric.load import scenario
from dblp.sim.fabric.packet import Plan, make_plan, run_plan
from dblp.sim.fabric.topology import NO_LINK, Fabric

HEADER, PAYLOAD = 54, 1448
TICK_S = 10e-6
UNTIL_S = 60.0
REPEATS = 20
QUANTILES = (0.1, 0.5, 0.9, 1.0)
START_S = 10e-6
"""Flows of a repeat start up to so much apart: some packets' times on the wire."""
TCP = {
    "model": "tcp",
    "packet": HEADER + PAYLOAD,
    "header": HEADER,
    "ack": HEADER,
    "initial_window": 10 * (HEADER + PAYLOAD),
    "card": True,  # ns-3's TCP puts all that its window lets go into its device's queue
}
DUMBBELL = {
    "topology": {
        "kind": "dumbbell", "hosts": 8,
        "host_link": {"rate": "10gbit", "delay": "5us"}, "fabric_link": {"rate": "10gbit", "delay": "20us"},
    },
}  # fmt: skip
LEAF_SPINE = {
    "topology": {
        "kind": "leaf_spine", "leaves": 4, "spines": 4, "hosts_per_leaf": 4,
        "host_link": {"rate": "10gbit", "delay": "2us"}, "fabric_link": {"rate": "10gbit", "delay": "2us"},
    },
}  # fmt: skip


Flow = tuple[int, int, int, float]
"""Source, target, bytes, start in seconds."""
Pairs = list[tuple[int, int]]
"""Sources and targets."""


def plan_of(table: dict[str, Any], buffer: str, flows: list[Flow]) -> Plan:
    """Flows (source, target, bytes, start) as a plan, each on the path of its target's number."""
    wanted = scenario(
        {**table, "switch": {"buffer": buffer}, "transport": TCP, "jitter": 0.0, "until": UNTIL_S}
    )
    graph = Graph()
    sources, targets, sizes, starts = zip(*flows, strict=True)
    graph.flows(sources, targets, sizes, latency_s=starts)
    graph.per_flow = True
    plan = make_plan(wanted, 0)
    tasks = graph.build()
    paths = (tasks.target % plan.fabric.paths).astype(np.int64)
    return replace(plan, tasks=tasks, paths=paths, ideal_loads=np.zeros(len(plan.fabric.sources)))


def ns3_plan(plan: Plan, flows: list[Flow]) -> dict[str, Any]:
    """The same for ``ns3_flows``: cables (a, b, rate, delay, bytes of each queue), routes (node, target, link)."""
    fabric = plan.fabric
    pairs = list(zip(fabric.sources.tolist(), fabric.targets.tolist(), strict=True))
    cables = [
        (a, b, float(fabric.rates[link]), float(fabric.delays[link]), int(plan.scenario.switch.buffer))
        for link, (a, b) in enumerate(pairs)
        if a < b
    ]
    return {
        "hosts": fabric.hosts, "nodes": len(fabric.names), "payload": PAYLOAD, "tick": TICK_S, "until": UNTIL_S,
        "cables": cables, "routes": routes(fabric), "flows": flows,
    }  # fmt: skip


def routes(fabric: Fabric) -> list[tuple[int, int, str]]:
    """The next link of each node for each host."""
    found = []
    for node in range(len(fabric.names)):
        for target in range(fabric.hosts):
            below = node >= fabric.hosts and fabric.down[node - fabric.hosts, target] != NO_LINK
            if node != target and (below or fabric.up_count[node]):
                link = fabric.next_link(node, target, target % fabric.paths)
                found.append((node, target, f"{node}-{int(fabric.targets[link])}"))
    return found


def repeated(pairs: Callable[[np.random.Generator], Pairs], nbytes: int, gap_s: float) -> list[Flow]:
    """Flows between pairs of hosts, drawn anew each time, ``gap_s`` after one another."""
    rng = np.random.default_rng(1)
    flows = []
    for repeat in range(REPEATS):
        drawn = pairs(rng)
        starts = repeat * gap_s + rng.uniform(0.0, START_S, len(drawn))
        flows += [(*pair, nbytes, float(start)) for pair, start in zip(drawn, starts, strict=True)]
    return flows


def permutation(rng: np.random.Generator) -> Pairs:
    """Each host to another one."""
    order = rng.permutation(16).tolist()
    return list(zip(order, order[1:] + order[:1], strict=True))


def across(_rng: np.random.Generator) -> Pairs:
    """Each host of a dumbbell's left side to one of the right."""
    return [(host, 4 + host) for host in range(4)]


def scenarios() -> dict[str, tuple[dict[str, Any], str, list[Flow]]]:
    """Name: topology, buffer of each port, flows."""
    four = [(*pair, 4_000_000, 0.0) for pair in across(np.random.default_rng(0))]
    return {
        "dumbbell, 1 flow": (DUMBBELL, "4M", four[:1]),
        "dumbbell, 4 flows, deep buffer": (DUMBBELL, "16M", four),
        "dumbbell, 4 flows, losses": (DUMBBELL, "150K", repeated(across, 4_000_000, 2.0)),
        "leaf-spine, permutations": (LEAF_SPINE, "4M", repeated(permutation, 2_000_000, 20e-3)),
        "leaf-spine, incast 8 to 1": (LEAF_SPINE, "4M", [(host, 0, 500_000, 0.0) for host in range(4, 12)]),
    }


def compare(python: Path, name: str) -> dict[str, Any]:
    """Both simulators on one scenario."""
    table, buffer, flows = scenarios()[name]
    plan = plan_of(table, buffer, flows)
    ours = run_plan(plan)
    script = Path(__file__).with_name("ns3_flows.py")
    done = subprocess.run(
        [python, script], input=json.dumps(ns3_plan(plan, flows)), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name}: ns-3 failed:\n{done.stderr[-2000:]}")
    theirs = json.loads(done.stdout)
    pairs = [np.sort(times) for times in (ours.times_s, np.array(theirs["finished"]))]
    return {
        "scenario": name,
        "flows": len(flows),
        "mean_s": [float(times.mean()) for times in pairs],
        "mean_difference": float(pairs[0].mean() / pairs[1].mean() - 1.0),
        "standard_error": _error(*pairs),
        "quantiles_s": {
            str(share): [float(np.quantile(times, share)) for times in pairs] for share in QUANTILES
        },
        "ours_s": ours.times_s.tolist(),
        "ns3_s": theirs["finished"],
        "ours_wall_s": ours.wall_s,
        "ns3_wall_s": theirs["wall_s"],
        "ours_hops_per_s": ours.hops / ours.wall_s,
        "hops": ours.hops,
        "ns3_events": theirs["events"],
    }


def _error(ours: Floats, theirs: Floats) -> float:
    """Standard error of the ratio of the means, as if flows were independent; NaN of few flows."""
    if len(ours) < 2 * REPEATS:
        return float("nan")
    spread = [times.std(ddof=1) / times.mean() / len(times) ** 0.5 for times in (ours, theirs)]
    return float(np.hypot(*spread))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="interpreter that has ns3")
    parser.add_argument("--only", default="", help="scenarios whose name has these words")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    for name in filter(lambda name: options.only in name, scenarios()):
        found.append(compare(options.python, name))
        sys.stdout.write(json.dumps(found[-1], indent=2) + "\n")
        sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
