"""Topologies: what ships, what a table may say, and how each fault is told."""

import pytest

from dblp.errors import ConfigError
from dblp.sim.lab.plan import Role, make_plan
from dblp.sim.lab.topology import KINDS, Topology, load_topology, shipped


def test_each_kind_ships_and_loads():
    assert shipped() == tuple(sorted(KINDS))
    assert [load_topology(name).kind for name in shipped()] == list(shipped())


def test_a_table_is_read_with_its_units():
    table = {
        "kind": "dumbbell",
        "hosts": 6,
        "rate": "1gbit",
        "core_delay": "15ms",
        "core_queue": "64KB",
        "cross": 2,
    }
    topology = load_topology(table, core_rate="200mbit")
    assert topology == Topology(
        kind="dumbbell",
        hosts=6,
        rate_bps=1e9,
        core_rate_bps=2e8,
        core_delay_s=0.015,
        core_queue_bytes=65536,
        cross=2,
    )
    assert topology.needs_delay


def test_a_file_is_read_and_named_in_errors(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('kind = "star"\nhosts = 3\n')
    assert load_topology(path).hosts == 3
    path.write_text('kind = "star"\nhosts = 3\nspeed = 1\n')
    with pytest.raises(ConfigError, match=r"mine\.toml: no field 'speed': known are kind, hosts"):
        load_topology(str(path))
    path.write_text("kind = ")
    with pytest.raises(ConfigError, match=r"mine\.toml: not TOML"):
        load_topology(path)
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file"):
        load_topology(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"hosts": 2}, "lacks kind"),
        ({}, "lacks kind and hosts"),
        ({"kind": "ring", "hosts": 2}, "kind='ring' is none: known are star"),
        ({"kind": "star", "hosts": 0}, "hosts=0: needs a number in 1..64"),
        ({"kind": "star", "hosts": 2.5}, "hosts=2.5: needs a whole number"),
        ({"kind": "star", "hosts": True}, "hosts=True: needs a number"),
        ({"kind": "star", "hosts": 60, "cross": 4}, "makes 68 namespaces of hosts"),
        ({"kind": "star", "hosts": 2, "rate": "fast"}, "rate: 'fast' is not a rate"),
        ({"kind": "star", "hosts": 2, "delay": [1]}, r"delay_s=\[1\]: needs a number"),
        ({"kind": "star", "hosts": 2, "core_delay": "1ms"}, "a star has no core link"),
        (
            {"kind": "star", "hosts": 2, "rate": "1gbit", "queue": "1KB"},
            "queue_bytes=1024 holds less than two packets",
        ),
        (
            {"kind": "star", "hosts": 2, "discipline": "lifo"},
            "discipline='lifo' is none: known are fifo, red, prio",
        ),
        ({"kind": "star", "hosts": 2, "discipline": "red"}, "discipline='red' needs a rate"),
        (
            {"kind": "star", "hosts": 2, "rate": 1e9, "queue": 9000, "discipline": "red"},
            "needs queues of at least 16384",
        ),
        ({"kind": "leaf-spine", "hosts": 2, "spines": 0}, "spines=0: needs a number in 1..16"),
    ],
)
def test_faults_name_the_field(table, said):
    with pytest.raises(ConfigError, match=said):
        load_topology(table)


def test_an_unknown_name_lists_what_ships():
    with pytest.raises(ConfigError, match=r"neither a \.toml file nor one that ships .*leaf-spine"):
        load_topology("torus")


@pytest.mark.parametrize("name", KINDS)
def test_every_host_has_a_link_with_a_point_each_way(name):
    plan = make_plan(load_topology(name, hosts=5, cross=1))
    hosts = [node.name for node in plan.nodes if node.role is Role.HOST]
    assert hosts == ["h0", "h1", "h2", "h3", "h4", "x0", "y0"]
    for host in hosts:
        ways = {point.way: point for point in plan.points if point.link == host}
        assert set(ways) == {"down", "up"}
        assert not ways["down"].ingress
        assert ways["up"].ingress
    addresses = [plan.host_end(host).ip for host in hosts]
    assert len(set(addresses)) == len(hosts)
    macs = [end.mac for wire in plan.wires for end in (wire.a, wire.b)]
    assert len(set(macs)) == len(macs)


def test_two_sites_split_the_hosts_and_a_core_joins_them():
    plan = make_plan(load_topology("two-sites", hosts=4))
    homes = {wire.a.node: wire.b.node for wire in plan.wires if wire.link != "core"}
    assert homes == {"h0": "sw0", "h1": "sw0", "h2": "sw1", "h3": "sw1"}
    assert ("sw0", "core", plan.host_end("h3").mac) in plan.fdb
    assert ("sw1", "ph3", plan.host_end("h3").mac) in plan.fdb


def test_a_leaf_reaches_other_leaves_over_all_spines():
    plan = make_plan(load_topology("leaf-spine", hosts=4, leaves=2, spines=3))
    route = next(r for r in plan.routes if r.node == "leaf0" and r.dst == "10.81.3.0/30")
    assert len(route.gateways) == 3
    assert {"l0s0", "l0s2", "l1s1"} < set(plan.links)
