"""Sizes: the flows of a scenario are counted before they are made, and too many are refused."""

from __future__ import annotations

import pytest

from dblp.errors import ConfigError
from dblp.sim.fabric.experiment import changed, load_experiment, read_experiment
from dblp.sim.fabric.fit import check_fit, group_of
from dblp.sim.fabric.load import scenario
from dblp.sim.fabric.packet import make_plan
from dblp.sim.fabric.size import MOST_FLOWS, _workload
from dblp.sim.fabric.topology import make_fabric
from tests.fabric.scenarios import LEAF_SPINE

LARGE = {"topology": {"kind": "star", "hosts": 10_000}}


@pytest.mark.parametrize(
    "changes",
    [
        {"workload.algorithm": "ring"},
        {"workload.algorithm": "direct", "workload.rounds": 3},
        {"workload.algorithm": "direct", "workload.segment": "8K"},
        {"workload.algorithm": "ring", "workload.segment": 1, "workload.size": "300K"},
        {"workload.algorithm": "halving_doubling"},
        {"workload.algorithm": "double_tree"},
        {"workload.algorithm": "hierarchical"},
        {"workload.algorithm": "hierarchical", "workload.group": 2},
        {"workload.algorithm": "ps", "workload.servers": 3},
        {"workload.kind": "training", "workload.algorithm": "ring", "workload.segment": "256K"},
        {"workload.kind": "incast", "workload.rounds": 2},
        {"workload.kind": "permutation", "workload.rounds": 2},
        {"workload.kind": "flows", "workload.flows": 50},
    ],
)
def test_the_count_is_that_of_the_graph(changes):
    """All that has bytes: of a segmented shard, the last part may be empty at some ranks."""
    wanted = scenario(changed(LEAF_SPINE, changes))
    tasks = make_plan(wanted, 0).tasks
    made = int(((tasks.bytes > 0) | (tasks.source != tasks.target)).sum())
    assert _workload(wanted, group_of(wanted, make_fabric(wanted.topology))) == made


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {},
            r"workload.algorithm='ring', 10,000 ranks: 199,980,000 flows, .* 20,000,000 .* up to about 3,162",
        ),
        ({"workload.algorithm": "direct"}, "workload.algorithm='direct', 10,000 ranks"),
        (
            {"workload.ranks": 1000, "workload.segment": 1, "workload.size": "100M"},
            "segment=1.* larger workload.segment",
        ),
        ({"workload.ranks": 1000, "workload.rounds": 100}, "workload.rounds=100: 199,800,000 flows"),
        ({"workload.algorithm": "ps", "workload.servers": 5000}, "workload.algorithm='ps'"),
        ({"workload.algorithm": "hierarchical"}, "workload.algorithm='hierarchical'"),
        ({"workload.kind": "flows", "workload.flows": 10**12}, "workload.flows=1000000000000"),
        ({"workload.kind": "incast", "workload.rounds": 10**6}, "workload.rounds=1000000"),
        ({"workload.kind": "incast", "background.load": 0.5, "background.until": 1e3}, "background.load=0.5"),
        ({"workload.kind": "incast", "bursts.rate_hz": 1e12}, "bursts.rate_hz=1e"),
    ],
)
def test_more_flows_than_memory_holds_are_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        check_fit(scenario(changed(LARGE, changes)))


def test_it_is_told_when_the_file_is_read():
    with pytest.raises(ConfigError, match=r"^big: arm 'big': workload\.algorithm='ring', 10,000 ranks"):
        read_experiment("big", 'scenario.topology = {kind = "star", hosts = 10_000}')


@pytest.mark.parametrize("name", ["scale", "ethereal-large", "cross-check-packet"])
def test_what_the_package_has_is_well_inside(name):
    for case in load_experiment(name).cases([0]):
        assert _workload(case.scenario, 16) < MOST_FLOWS / 4
