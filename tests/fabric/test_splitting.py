"""Minimal splitting: loads equal to those of ideal spraying, exactly, over a sweep of topologies and collectives."""

from __future__ import annotations

from fractions import Fraction
from math import lcm

import numpy as np
import pytest

from dblp.sim.fabric.graph import Graph
from dblp.sim.fabric.load import scenario
from dblp.sim.fabric.packet import make_plan
from dblp.sim.fabric.splitting import fixed_loads, split, sprayed_loads
from dblp.sim.fabric.topology import make_fabric

SHAPES = [(2, 2, 1), (2, 3, 2), (3, 4, 5), (4, 6, 4), (4, 8, 3), (5, 5, 7), (8, 16, 6), (16, 16, 16)]
"""Leaves, spines, hosts under a leaf."""


def plan_of(shape, algorithm, seed=0):
    leaves, spines, under = shape
    hosts = leaves * under
    exact = lcm(*range(1, spines + 1)) * hosts * 1500  # shards that every number of parts divides
    return make_plan(
        scenario(
            {
                "topology": {
                    "kind": "leaf_spine",
                    "leaves": leaves,
                    "spines": spines,
                    "hosts_per_leaf": under,
                },
                "routing": {"policy": "ethereal"},
                "workload": {"algorithm": algorithm, "size": exact},
            }
        ),
        seed,
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_load_of_each_link_is_exactly_that_of_ideal_spraying(shape, algorithm, seed):
    """Bytes are integers, and every flow is divisible: no tolerance is needed."""
    plan = plan_of(shape, algorithm, seed)
    loads = fixed_loads(plan.tasks, plan.fabric, plan.paths)
    inner = plan.fabric.fabric_links()
    assert [Fraction(int(load)) for load in loads[inner]] == [
        Fraction(load) for load in plan.ideal_loads[inner]
    ]
    assert plan.planned_ratio == 1.0


def test_ecmp_loads_some_link_more_than_spraying_would():
    table = {"topology": {"kind": "leaf_spine", "leaves": 4, "spines": 4, "hosts_per_leaf": 4}}
    plan = make_plan(scenario({**table, "workload": {"algorithm": "direct", "size": "1M"}}), 0)
    assert plan.planned_ratio > 1.1


def test_a_split_flow_waits_and_is_waited_for_as_a_whole():
    fabric = make_fabric(
        scenario({"topology": {"kind": "leaf_spine", "leaves": 2, "spines": 4, "hosts_per_leaf": 1}}).topology
    )
    graph = Graph()
    first = graph.tasks(0)
    flow = graph.flows(0, 1, 40_000)
    last = graph.tasks(1)
    graph.order(first, flow)
    graph.order(flow, last)
    tasks, paths = split(
        graph.build(), fabric, np.zeros(len(fabric.sources), bool), 1_000, np.random.default_rng(0)
    )
    parts = np.flatnonzero(tasks.bytes > 0)
    assert len(parts) == 4
    assert tasks.bytes[parts].sum() == 40_000
    assert sorted(paths[parts]) == [0, 1, 2, 3]
    edges = set(zip(tasks.before.tolist(), tasks.after.tolist(), strict=True))
    wanted = {(int(first[0]), int(part)) for part in parts} | {(int(part), int(flow[0])) for part in parts}
    assert edges == wanted | {(int(flow[0]), int(last[0]))}


def test_a_part_is_never_less_than_a_packet():
    fabric = make_fabric(
        scenario({"topology": {"kind": "leaf_spine", "leaves": 2, "spines": 4, "hosts_per_leaf": 1}}).topology
    )
    graph = Graph()
    graph.flows(0, 1, 3_999)
    tasks, _ = split(
        graph.build(), fabric, np.zeros(len(fabric.sources), bool), 1_000, np.random.default_rng(0)
    )
    assert tasks.bytes.tolist() == [3_999]


def test_known_failures_are_split_around():
    """Two of four spines are cut off from leaf 0: what crosses takes the other two, evenly."""
    fabric = make_fabric(
        scenario({"topology": {"kind": "leaf_spine", "leaves": 3, "spines": 4, "hosts_per_leaf": 1}}).topology
    )
    dead = np.zeros(len(fabric.sources), bool)
    for spine in (1, 3):
        dead[fabric.links_of(f"leaf0-spine{spine}", one_way=False)] = True
    graph = Graph()
    graph.flows([0, 1, 1], [1, 0, 2], 12_000)
    plain = graph.build()
    tasks, paths = split(plain, fabric, dead, 1, np.random.default_rng(0))
    loads = fixed_loads(tasks, fabric, paths)
    assert not loads[dead].any()
    assert loads.tolist() == sprayed_loads(plain, fabric, dead).tolist()
