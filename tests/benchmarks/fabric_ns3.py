"""The packet engine beside ns-3: flow completion times of TCP Reno on a dumbbell and on a leaf-spine of 16 hosts.

Run: python -m tests.benchmarks.fabric_ns3 --python PYTHON [--only WORDS] [--json FILE]

PYTHON is an interpreter that has the package ``ns3`` (3.44; it brings its own compiler, so give it an environment of its own:
``python -m venv ns3-env && ns3-env/bin/pip install ns3``). Both get the same cables, buffers, flows and paths: in ns-3 each
destination has one static route, by the spine of its number, and in the packet engine each flow has that path. Hosts' own queues
drop nothing in either.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dblp.sim.fabric.graph import Graph
from dblp.sim.fabric.load import scenario
from dblp.sim.fabric.packet import Plan, make_plan, run_plan
from dblp.sim.fabric.topology import NO_LINK, Fabric

HEADER, PAYLOAD = 54, 1448
TICK_S = 10e-6
UNTIL_S = 5.0
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


def plan_of(table: dict[str, Any], buffer: str, flows: list[tuple[int, int, int, float]]) -> Plan:
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


def ns3_plan(plan: Plan, flows: list[tuple[int, int, int, float]]) -> dict[str, Any]:
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


def scenarios() -> dict[str, tuple[dict[str, Any], str, list[tuple[int, int, int, float]]]]:
    """Name: topology, buffer of each port, flows."""
    rng = np.random.default_rng(1)
    four = [(host, 4 + host, 4_000_000, 0.0) for host in range(4)]
    order = rng.permutation(16)
    permutation = [(int(a), int(b), 2_000_000, 0.0) for a, b in zip(order, np.roll(order, -1), strict=True)]
    return {
        "dumbbell, 1 flow": (DUMBBELL, "4M", four[:1]),
        "dumbbell, 4 flows, deep buffer": (DUMBBELL, "16M", four),
        "dumbbell, 4 flows, losses": (DUMBBELL, "150K", four),
        "leaf-spine, permutation": (LEAF_SPINE, "4M", permutation),
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
    mean, last = (
        float(pick(ours.times_s) / pick(np.array(theirs["finished"])) - 1.0) for pick in (np.mean, np.max)
    )
    return {
        "scenario": name,
        "ours_mean_s": float(ours.times_s.mean()),
        "ns3_mean_s": float(np.mean(theirs["finished"])),
        "mean_difference": mean,
        "last_difference": last,
        "ours_s": ours.times_s.tolist(),
        "ns3_s": theirs["finished"],
        "ours_wall_s": ours.wall_s,
        "ns3_wall_s": theirs["wall_s"],
        "ours_hops_per_s": ours.hops / ours.wall_s,
        "hops": ours.hops,
        "ns3_events": theirs["events"],
    }


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
