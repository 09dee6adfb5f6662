"""Small scenarios that several tests share, and the first principles that their results are checked against."""

from __future__ import annotations

from typing import Any

from dblp.sim.fabric.experiment import changed
from dblp.sim.fabric.load import scenario
from dblp.sim.fabric.scenario import Scenario

STAR = {
    "topology": {"kind": "star", "hosts": 4, "host_link": {"rate": "10gbit", "delay": "1us"}},
    "jitter": 0.0,
}
LEAF_SPINE = {
    "topology": {"kind": "leaf_spine", "leaves": 4, "spines": 4, "hosts_per_leaf": 4},
    "switch": {"buffer": "128K", "classes": [{"mark_min": "60K"}]},
    "workload": {"algorithm": "direct", "size": "512K"},
}
SWITCHES: dict[str, dict[str, Any]] = {
    "ndp": {"buffer": "12K", "trim": True, "queues": 2, "classes": [{"queue": 1}]},
    "pfabric": {"buffer": "36K", "queues": 8, "push_out": True},
}
"""What a transport needs of its switches; others: as in LEAF_SPINE."""
MODELS = ("dblp", "mlt", "dctcp", "tcp", "cubic", "ndp", "pfabric")
POLICIES = ("ecmp", "spray", "random", "reps", "ethereal", "adaptive")


def star(**changes: Any) -> Scenario:
    """A star with fields changed: ``workload__size`` is ``workload.size``."""
    return scenario(changed(STAR, _dotted(changes)))


def leaf_spine(model: str = "dblp", policy: str = "ecmp", **changes: Any) -> Scenario:
    """A leaf-spine of 16 hosts with a transport model and a routing policy."""
    table = changed(LEAF_SPINE, {"transport.model": model, "routing.policy": policy, **_dotted(changes)})
    if model in SWITCHES:
        table["switch"] = SWITCHES[model]
    return scenario(table)


def _dotted(changes: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("__", "."): value for name, value in changes.items()}
