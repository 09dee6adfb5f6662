"""The exact engine: the real endpoint and collectives over the same description, and its agreement with the packet engine."""

from __future__ import annotations

import numpy as np
import pytest

from dblp.errors import ConfigError
from dblp.sim.fabric.exact import run_exact
from dblp.sim.fabric.load import scenario
from dblp.sim.fabric.packet import run_packet
from tests.fabric.scenarios import leaf_spine

pytestmark = pytest.mark.timeout(600)

STAR = {"kind": "star", "hosts": 4, "host_link": {"rate": "1gbit", "delay": "50us"}}
SPINES = {
    "kind": "leaf_spine", "leaves": 2, "spines": 2, "hosts_per_leaf": 2,
    "host_link": {"rate": "1gbit", "delay": "50us"}, "fabric_link": {"rate": "1gbit", "delay": "50us"},
}  # fmt: skip


def small(topology, policy="ecmp", algorithm="direct", size="2M", **more):
    return scenario(
        {
            "topology": topology,
            "switch": {"buffer": "512K"},
            "transport": {"packet": 1464, "header": 48, "target": "1.2ms", "initial_window": 65536, **more},
            "routing": {"policy": policy},
            "workload": {"algorithm": algorithm, "size": size},
        }
    )


@pytest.mark.parametrize(("hosts", "size"), [(4, "512K"), (4, "1M"), (8, "1M")])
def test_both_engines_agree_within_a_twentieth(hosts, size):
    """Rings. Where many send to one, and in long messages, the endpoint leaves links idle that the model fills:
    docs/fabric.md."""
    wanted = small({**STAR, "hosts": hosts}, algorithm="ring", size=size)
    exact, packet = run_exact(wanted), run_packet(wanted)
    assert exact.ended == packet.ended == "done"
    assert packet.times_s[0] == pytest.approx(exact.times_s[0], rel=0.05)


@pytest.mark.parametrize("policy", ["ecmp", "spray", "ethereal"])
def test_bursts_take_the_fabrics_paths(policy):
    outcome = run_exact(small(SPINES, policy, size="512K"))
    assert outcome.ended == "done"
    loads = dict(zip(outcome.link_names, outcome.link_bytes.tolist(), strict=True))
    up = [loads["leaf0>spine0"], loads["leaf0>spine1"]]
    crossing = 2 * 2 * 2**18  # two hosts, two legs: half of the gradient goes to the other leaf in each
    assert sum(up) > crossing
    if policy == "ecmp":
        assert min(up) < 0.1 * max(up)  # one port a host, the same for both: all on one path
    else:
        assert max(up) < 1.2 * min(up)


def test_one_seed_is_one_run():
    wanted = small(STAR, size="256K")
    first, again = run_exact(wanted, 3), run_exact(wanted, 3)
    assert first.times_s.tobytes() == again.times_s.tobytes()
    assert np.array_equal(first.link_bytes, again.link_bytes)


def test_a_grey_link_is_repaired():
    table = small(STAR, size="256K")
    from dataclasses import replace

    from dblp.sim.fabric.spec import FailureSpec

    grey = replace(table, failures=(FailureSpec(link="h1-switch", loss=0.05),))
    outcome = run_exact(grey)
    assert outcome.ended == "done"
    assert outcome.counts["dropped"][0] > 0


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (leaf_spine("tcp"), "transport.control"),
        (leaf_spine("dblp", "adaptive"), "routing.policy"),
        (leaf_spine("dblp", "ecmp", workload__kind="incast"), "workload.kind"),
        (leaf_spine("dblp", "ecmp", switch={"shared": True}), "switch.shared"),
    ],
)
def test_what_it_has_not_is_refused(wanted, field):
    with pytest.raises(ConfigError, match=field):
        run_exact(wanted)
