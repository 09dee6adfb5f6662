"""Workloads as graphs: rounds of an all-reduce, training steps, random flows, incasts, permutations; and the traffic of
others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dblp.sim.fabric.algorithms import PIPELINED, PLAIN, hierarchical, ps
from dblp.sim.fabric.distributions import draw_sizes, mean_size
from dblp.sim.fabric.fit import group_of
from dblp.sim.fabric.graph import Floats, Graph, Ints, Tasks
from dblp.sim.fabric.scenario import Scenario
from dblp.sim.fabric.topology import Fabric
from dblp.sim.fabric.traces import Bucket, Trace, buckets, load_trace

BACKGROUND_LEG, BURST_LEG = 2, 3
"""Transports of the traffic of others, see ``Tasks.leg``."""
LOWEST_CLASS = 3
Z99 = 2.326
"""99th percentile of the normal distribution, in standard deviations."""


def make_tasks(scenario: Scenario, fabric: Fabric, rng: np.random.Generator) -> Tasks:
    """The workload of a scenario and all other traffic. Raises ConfigError if they do not fit the fabric."""
    graph = Graph()
    _WORKLOADS[scenario.workload.kind](graph, scenario, fabric, rng)
    _background(graph, scenario, rng)
    _bursts(graph, scenario, rng)
    return _delayed(graph.build(), scenario, fabric, rng)


def all_reduce(
    graph: Graph, scenario: Scenario, fabric: Fabric, hosts: Ints, starts: Ints, nbytes: int, cls: int
) -> Ints:
    """One all-reduce by the workload's algorithm; returns what each rank ends with."""
    load, chunk = scenario.workload, scenario.transport.payload
    if load.algorithm == "ps":
        return ps(graph, hosts, nbytes, starts, cls, load.servers)
    if load.algorithm == "hierarchical":
        return hierarchical(graph, hosts, nbytes, starts, cls, group_of(scenario, fabric))
    if load.algorithm in PIPELINED:
        return PIPELINED[load.algorithm](graph, hosts, nbytes, starts, cls, load.segment, chunk)
    return PLAIN[load.algorithm](graph, hosts, nbytes, starts, cls)


def _rounds(graph: Graph, scenario: Scenario, fabric: Fabric, rng: np.random.Generator) -> None:
    load = scenario.workload
    hosts = np.arange(scenario.ranks)
    ends = graph.tasks(hosts)
    for _ in range(load.rounds):
        starts = ends
        ends = all_reduce(graph, scenario, fabric, hosts, starts, load.size, cls=0)
        graph.rounds.append((starts, ends))


def _training(graph: Graph, scenario: Scenario, fabric: Fabric, rng: np.random.Generator) -> None:
    load = scenario.workload
    trace = load_trace(load.model)
    parts = buckets(trace, load.bucket)
    hosts = np.arange(scenario.ranks)
    done = [graph.tasks(hosts)] * len(parts)
    for _ in range(load.steps):
        first = done
        done = _step(graph, scenario, fabric, hosts, trace, parts, done)
        graph.rounds.append((np.concatenate(first), np.concatenate(done)))


def _step(
    graph: Graph,
    scenario: Scenario,
    fabric: Fabric,
    hosts: Ints,
    trace: Trace,
    parts: list[Bucket],
    fresh: list[Ints],
) -> list[Ints]:
    """One training step. ``fresh``: for each bucket, front layers first, what each rank's parameters wait for; returns the
    same for the next step."""
    load = scenario.workload
    last = fresh[0]
    for part, ready in zip(parts, fresh, strict=True):
        compute = graph.tasks(hosts, part.forward_s)
        graph.order(last, compute)
        graph.order(ready, compute)
        last = compute
    gradients = []
    for part in reversed(parts):
        compute = graph.tasks(hosts, part.backward_s)
        graph.order(last, compute)
        gradients.append(compute)
        last = compute
    done = []
    for number, (part, there) in enumerate(zip(reversed(parts), gradients, strict=True)):
        place = len(parts) - 1 - number
        cls = min(place * (LOWEST_CLASS + 1) // len(parts), LOWEST_CLASS) if load.layer_classes else 0
        nbytes = max(round(part.nbytes * load.bytes_scale), 4)
        starts = there if load.overlap else last
        done.append(all_reduce(graph, scenario, fabric, hosts, starts, nbytes, cls))
    return done[::-1]


def _flows(graph: Graph, scenario: Scenario, fabric: Fabric, rng: np.random.Generator) -> None:
    """Poisson arrivals, each of ``fan_in`` flows from different hosts to one."""
    load, many = scenario.workload, scenario.workload.fan_in
    count = -(-load.flows // many)
    sources, targets = _pairs(scenario.ranks, count, rng)
    if many > 1:
        others = np.array([rng.choice(scenario.ranks - 1, many, replace=False) + 1 for _ in range(count)])
        sources, targets = ((targets[:, None] + others) % scenario.ranks).ravel(), np.repeat(targets, many)
    sizes = draw_sizes(load.sizes, load.size, len(sources), rng)
    rate = load.load * scenario.topology.host_link.rate * scenario.ranks / 8.0
    gaps = rng.exponential(many * mean_size(load.sizes, load.size) / rate, count)
    graph.flows(sources, targets, sizes, latency_s=np.repeat(np.cumsum(gaps), many), batch=graph.next_batch())
    graph.per_flow = True


def _incast(graph: Graph, scenario: Scenario, fabric: Fabric, rng: np.random.Generator) -> None:
    hosts = np.arange(1, scenario.ranks)
    ends = graph.tasks(hosts)
    for _ in range(scenario.workload.rounds):
        flows = graph.flows(hosts, 0, scenario.workload.size, batch=graph.next_batch())
        meeting = graph.tasks(0)
        graph.order(ends, flows)
        graph.order(flows, meeting)
        graph.rounds.append((ends, meeting))
        ends = meeting


def _permutation(graph: Graph, scenario: Scenario, fabric: Fabric, rng: np.random.Generator) -> None:
    hosts = np.arange(scenario.ranks)
    ends = graph.tasks(0)
    for _ in range(scenario.workload.rounds):
        order = rng.permutation(hosts)  # each to the next in a random order: nobody to itself
        flows = graph.flows(order, np.roll(order, -1), scenario.workload.size, batch=graph.next_batch())
        meeting = graph.tasks(0)
        graph.order(ends, flows)
        graph.order(flows, meeting)
        graph.rounds.append((ends, meeting))
        ends = meeting


_WORKLOADS: dict[str, Callable[[Graph, Scenario, Fabric, np.random.Generator], None]] = {
    "all_reduce": _rounds,
    "training": _training,
    "flows": _flows,
    "incast": _incast,
    "permutation": _permutation,
}


def _background(graph: Graph, scenario: Scenario, rng: np.random.Generator) -> None:
    spec, hosts = scenario.background, scenario.topology.host_count
    if not spec.load:
        return
    rate = spec.load * scenario.topology.host_link.rate * hosts / 8.0
    count = int(rng.poisson(rate / mean_size(spec.sizes, spec.size) * spec.until))
    sources, targets = _pairs(hosts, count, rng)
    sizes = draw_sizes(spec.sizes, spec.size, count, rng)
    starts = rng.uniform(0.0, spec.until, count)
    graph.flows(
        sources, targets, sizes, leg=BACKGROUND_LEG, cls=spec.cls, latency_s=starts, timed=False,
        batch=graph.next_batch(),
    )  # fmt: skip


def _bursts(graph: Graph, scenario: Scenario, rng: np.random.Generator) -> None:
    spec, hosts = scenario.bursts, scenario.topology.host_count
    for start in np.sort(rng.uniform(0.0, spec.until, int(rng.poisson(spec.rate_hz * spec.until)))):
        target = int(rng.integers(hosts))
        sources = rng.choice(np.delete(np.arange(hosts), target), spec.senders, replace=False)
        seconds = rng.exponential(spec.mean, spec.senders)
        sizes = np.maximum(seconds * scenario.topology.host_link.rate / 8.0, 1.0).astype(np.int64)
        graph.flows(
            sources, target, sizes, leg=BURST_LEG, cls=LOWEST_CLASS, latency_s=start, timed=False,
            batch=graph.next_batch(),
        )  # fmt: skip


def _pairs(hosts: int, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Random sources, and targets other than they."""
    sources = rng.integers(hosts, size=count)
    return sources, (sources + rng.integers(1, hosts, size=count)) % hosts


def _delayed(tasks: Tasks, scenario: Scenario, fabric: Fabric, rng: np.random.Generator) -> Tasks:
    """Add each flow's jitter and, to the workload's, a log-normal latency whose P99 is ``tail`` times its median. What sends in
    portions has the jitter of its host: it posts all at once."""
    extra: Floats = rng.uniform(0.0, scenario.jitter, len(tasks.source)) if scenario.jitter else np.zeros(1)
    if scenario.transport.portions and scenario.jitter:
        extra = rng.uniform(0.0, scenario.jitter, fabric.hosts)[tasks.source]
    load = scenario.workload
    if load.latency:
        sigma = math.log(load.tail) / Z99
        extra = extra + tasks.timed * load.latency * rng.lognormal(0.0, sigma, len(tasks.source))
    return replace(tasks, latency_s=tasks.latency_s + np.where(tasks.bytes > 0, extra, 0.0))
