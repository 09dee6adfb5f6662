"""Speed of the packet engine, and of SimPy on the same packets in the same run; and the largest all-reduces.

Run: python -m tests.benchmarks.fabric_speed [--json FILE] [--large]

The comparison: every host of a leaf-spine sends one flow to another host at line rate, each packet is acknowledged. In SimPy
a port is a process with a Store, and a packet's propagation is a timeout with a callback: its quickest common form. Both must
end at the same simulated time, or the comparison is void. ``--large``: 4 MB all-reduces of 1,024 hosts by ring and direct,
time and peak memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import simpy

from dblp.sim.fabric.experiment import changed, load_experiment
from dblp.sim.fabric.load import scenario
from dblp.sim.fabric.packet import Plan, make_plan, run_packet, run_plan

TOPOLOGY = {"kind": "leaf_spine", "leaves": 4, "spines": 4, "hosts_per_leaf": 4}
WIDE = {"control": "window", "initial_window": "1G", "min_rto": "1s"}


class SimpyFabric:
    """Ports as processes; packets are (size, route, step, is_ack, flow)."""

    def __init__(self, plan: Plan) -> None:
        self.env = simpy.Environment()
        self.plan = plan
        self.hops = 0
        self.left: list[int] = []
        self.finished: list[float] = []
        fabric = plan.fabric
        self.stores = [simpy.Store(self.env) for _ in fabric.sources]
        self.unsent: list[list[Any]] = [[] for _ in fabric.sources]
        for link in range(len(self.stores)):
            self.env.process(self.port(link, float(fabric.rates[link]), float(fabric.delays[link])))

    def port(self, link: int, rate: float, delay: float) -> Generator[Any, Any, None]:
        """Serve one queue for ever; a host's next packet comes when one leaves, so that acknowledgements need not wait for
        all."""
        store, unsent = self.stores[link], self.unsent[link]
        while True:
            packet = yield store.get()
            if unsent and not packet[3]:
                store.put(unsent.pop())
            yield self.env.timeout(packet[0] * 8.0 / rate)
            self.hops += 1
            self.env.timeout(delay, packet).callbacks.append(self.arrive)

    def arrive(self, event: Any) -> None:
        """The next port, or the host."""
        size, route, step, is_ack, flow = event.value
        if step + 1 < len(route):
            self.stores[route[step + 1]].put((size, route, step + 1, is_ack, flow))
        elif not is_ack:
            self.deliver(flow)

    def deliver(self, flow: int) -> None:
        """Count, and acknowledge."""
        self.left[flow] -= 1
        if self.left[flow] == 0:
            self.finished[flow] = self.env.now
        back = self.plan.fabric.route(
            int(self.plan.tasks.target[flow]), int(self.plan.tasks.source[flow]), int(self.plan.paths[flow])
        )
        self.stores[back[0]].put((self.plan.scenario.transport.ack, back, 0, True, flow))

    def run(self) -> None:
        """Send all flows of the plan."""
        spec, tasks = self.plan.scenario.transport, self.plan.tasks
        for flow, nbytes in enumerate(tasks.bytes.tolist()):
            packets = -(-nbytes // spec.payload)
            self.left.append(packets)
            self.finished.append(0.0)
            route = (
                self.plan.fabric.route(
                    int(tasks.source[flow]), int(tasks.target[flow]), int(self.plan.paths[flow])
                )
                if nbytes
                else []
            )
            for number in range(packets):
                size = spec.header + min(spec.payload, nbytes - number * spec.payload)
                self.unsent[route[0]].append((size, route, 0, False, flow))
        for store, unsent in zip(self.stores, self.unsent, strict=True):
            unsent.reverse()
            if unsent:
                store.put(unsent.pop())
        self.env.run()


def compare(packets: int) -> dict[str, Any]:
    """Both simulators on one plan."""
    table = {
        "topology": TOPOLOGY, "switch": {"buffer": "1G"}, "transport": WIDE, "jitter": 0.0,
        "workload": {"kind": "permutation", "size": packets * 1424},
    }  # fmt: skip
    plan = make_plan(scenario(table), 0)
    run_plan(plan)  # compiles
    began = time.perf_counter()
    ours = run_plan(plan)
    ours_s = time.perf_counter() - began
    theirs = SimpyFabric(plan)
    began = time.perf_counter()
    theirs.run()
    theirs_s = time.perf_counter() - began
    difference = abs(max(theirs.finished) / ours.flows["finish_s"].max() - 1.0)
    assert difference < 1e-3, f"the two end {difference:.2%} apart: they don't simulate the same"
    return {
        "packets": packets * 16,
        "engine_hops_per_s": ours.hops / ours.wall_s,
        "engine_with_set_up_hops_per_s": ours.hops / ours_s,
        "simpy_hops_per_s": theirs.hops / theirs_s,
        "ratio": (ours.hops / ours.wall_s) / (theirs.hops / theirs_s),
        "end_difference": difference,
    }


def large(policy: str) -> dict[str, Any]:
    """4 MB on 1,024 hosts."""
    experiment = load_experiment("scale")
    arm = next(arm for arm in experiment.arms if arm.policy == policy)
    table = changed(experiment.table, {"topology.leaves": 64, **arm.changes})
    began = time.perf_counter()
    outcome = run_packet(scenario(table), 0)
    return {
        "policy": policy,
        "ended": outcome.ended,
        "completion_s": float(outcome.times_s[0]),
        "hops": outcome.hops,
        "wall_s": time.perf_counter() - began,
        "hops_per_s": outcome.hops / outcome.wall_s,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--packets", type=int, default=2_000, help="of each flow")
    parser.add_argument(
        "--large", nargs="*", metavar="ALGORITHM", help="ring, direct, ...; none: ring and direct"
    )
    options = parser.parse_args()
    found = {"compare": compare(options.packets)}
    if options.large is not None:
        found |= {policy: large(policy) for policy in options.large or ["ring", "direct"]}
    text = json.dumps(found, indent=2)
    sys.stdout.write(text + "\n")
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
