"""The exact engine: the real endpoint and collectives over the same description, and its agreement with the packet engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dblp.cli.sim.command import cells, headings
from dblp.errors import ConfigError
from dblp.sim.fabric.exact import run_exact
from dblp.sim.fabric.experiment import read_experiment
from dblp.sim.fabric.load import scenario
from dblp.sim.fabric.packet import make_plan, run_packet
from dblp.sim.fabric.spec import FailureSpec
from dblp.sim.fabric.splitting import HashedPaths, fixed_loads
from dblp.sim.fabric.sweep import records, run_cases
from dblp.sim.fabric.topology import make_fabric
from dblp.sim.port import Network
from tests.fabric.scenarios import leaf_spine

pytestmark = pytest.mark.timeout(600)

STAR = {"kind": "star", "hosts": 4, "host_link": {"rate": "1gbit", "delay": "50us"}}
SPINES = {
    "kind": "leaf_spine", "leaves": 2, "spines": 2, "hosts_per_leaf": 2,
    "host_link": {"rate": "1gbit", "delay": "50us"}, "fabric_link": {"rate": "1gbit", "delay": "50us"},
}  # fmt: skip


def small(topology, policy="ecmp", algorithm="direct", size="2M", segment=0, **more):
    return scenario(
        {
            "topology": topology,
            "switch": {"buffer": "512K"},
            "transport": {"packet": 1464, **more},
            "routing": {"policy": policy},
            "workload": {"algorithm": algorithm, "size": size, "segment": segment},
        }
    )


IDEAL = {"header": 48, "target": "1.2ms", "initial_window": 65536}
"""What the endpoint has without being told."""
ENDPOINT = {
    **IDEAL,
    "card": True,
    "portions": 4,
    "flow_target": "400us",
    "min_rto": "8ms",
    "packet": 1456,
    "ack": 140,
}
"""What the endpoint does with a window, its least timeout, its chunks of 1,408 bytes and its answers (docs/fabric.md)."""
SEGMENT = 1408
"""What the collectives pipeline by: chunks, of which the endpoint makes bursts."""


@pytest.mark.parametrize(
    ("topology", "algorithm", "hosts", "size"),
    [
        (STAR, "ring", 4, "512K"),
        (STAR, "ring", 4, "1M"),
        (STAR, "direct", 2, "512K"),
        (STAR, "direct", 2, "1M"),
        (STAR, "direct", 4, "1M"),
        (STAR, "direct", 4, "2M"),
        (STAR, "ring", 8, "1M"),
        (SPINES, "ring", 4, "512K"),
        (STAR, "direct", 4, "512K"),
        (STAR, "direct", 2, "2M"),
        (STAR, "ring", 4, "2M"),
        (STAR, "ring", 4, "4M"),
        (STAR, "ring", 8, "2M"),
        (STAR, "direct", 8, "1M"),
        (SPINES, "ring", 4, "2M"),
    ],
)
def test_both_engines_agree_within_a_twentieth(topology, algorithm, hosts, size):
    """Where the model sends as the endpoint does."""
    if topology is STAR:
        topology = {**STAR, "hosts": hosts}
    exact = run_exact(small(topology, algorithm=algorithm, size=size))
    packet = run_packet(small(topology, algorithm=algorithm, size=size, segment=SEGMENT, **ENDPOINT))
    assert exact.ended == packet.ended == "done"
    assert packet.times_s[0] == pytest.approx(exact.times_s[0], rel=0.05)


@pytest.mark.parametrize(
    ("hosts", "size", "segment"), [(4, "512K", SEGMENT), (4, "1M", 0), (8, "1M", SEGMENT)]
)
def test_ideal_hosts_agree_on_rings(hosts, size, segment):
    """The model as most experiments have it: nothing waits in a card, every packet is answered. Where shards are of a few bursts,
    a ring whose shards go on as a whole takes 8 % more than one that is pipelined, as the collectives' is; the longer they are,
    the more of the endpoint's own delays ideal hosts leave out."""
    topology = {**STAR, "hosts": hosts}
    exact = run_exact(small(topology, algorithm="ring", size=size))
    packet = run_packet(small(topology, algorithm="ring", size=size, segment=segment, **IDEAL))
    assert exact.ended == packet.ended == "done"
    assert packet.times_s[0] == pytest.approx(exact.times_s[0], rel=0.05)


def test_ranks_turn_to_different_peers_first(monkeypatch):
    """The first burst of each goes to the rank behind it, whatever was sent before: else they would meet at one port."""
    first: dict[str, str] = {}
    carry = Network.carry

    def noted(network, burst, source, host, ecn):
        if len(burst.data) > 2000:
            first.setdefault(source.host, burst.address.host)
        carry(network, burst, source, host, ecn)

    monkeypatch.setattr(Network, "carry", noted)
    assert run_exact(small({**STAR, "hosts": 5}, size="1M")).ended == "done"
    assert first == {f"h{rank}": f"h{(rank + 1) % 5}" for rank in range(5)}


@pytest.mark.parametrize("policy", ["ecmp", "spray", "ethereal"])
def test_bursts_take_the_fabrics_paths(policy):
    outcome = run_exact(small(SPINES, policy, size="512K"))
    assert outcome.ended == "done"
    loads = dict(zip(outcome.link_names, outcome.link_bytes.tolist(), strict=True))
    up = [loads["leaf0>spine0"], loads["leaf0>spine1"]]
    crossing = 2 * 2 * 2**18  # two hosts, two legs: half of the gradient goes to the other leaf in each
    assert sum(up) > crossing
    if policy != "ecmp":
        assert max(up) < 1.2 * min(up)


FABRIC = {
    "kind": "leaf_spine", "leaves": 3, "spines": 4, "hosts_per_leaf": 2,
    "host_link": {"rate": "1gbit", "delay": "10us"}, "fabric_link": {"rate": "1gbit", "delay": "10us"},
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1])
def test_switches_hash_pairs_of_hosts_to_the_same_paths_in_both_engines(seed):
    """By ECMP what one host sends another keeps to one path, others have others, and the other engine's plan has the same."""
    wanted = small(FABRIC, size="192K", **ENDPOINT)
    plan = make_plan(wanted, seed)
    fabric, tasks = plan.fabric, plan.tasks
    hashes = HashedPaths(fabric, seed)
    pairs = zip(tasks.source.tolist(), tasks.target.tolist(), strict=True)
    assert plan.paths.tolist() == [hashes.of(*pair) for pair in pairs]
    outcome = run_exact(small(FABRIC, size="192K"), seed)
    assert outcome.ended == "done"
    inner = fabric.fabric_links()
    loads = fixed_loads(tasks, fabric, plan.paths)[inner]  # payload, and no answers
    assert np.all(outcome.link_bytes[inner][loads > 0] >= loads[loads > 0])
    assert np.corrcoef(loads, outcome.link_bytes[inner])[0, 1] > 0.9
    assert len(np.unique(plan.paths)) == fabric.paths


def test_what_was_hashed_to_a_dead_path_spreads_over_those_that_are_left_and_comes_back():
    fabric = make_fabric(small(FABRIC).topology)
    hashes = HashedPaths(fabric, 0)
    pairs = [(source, target) for source in (0, 1) for target in range(2, 6)]
    before = [hashes.of(*pair) for pair in pairs]
    hashes.mark(fabric.links_of("leaf0-spine2", one_way=False), dead=True)
    during = [hashes.of(*pair) for pair in pairs]
    moved = [new for old, new in zip(before, during, strict=True) if old == 2]
    assert moved
    assert 2 not in during
    assert [new for old, new in zip(before, during, strict=True) if old != 2] == [
        old for old in before if old != 2
    ]
    hashes.mark(fabric.links_of("leaf0-spine2", one_way=False), dead=False)
    assert [hashes.of(*pair) for pair in pairs] == before


def test_ports_tell_flows_apart():
    hashes = HashedPaths(make_fabric(small(FABRIC).topology), 0)
    assert {hashes.of(0, 5, port) for port in range(4)} == {0, 1, 2, 3}


@pytest.mark.parametrize("at", [0.0, 1e-3])
def test_switches_lead_around_a_cut_link_once_they_know(at):
    """Every spine but one is cut off from the first leaf for good: what was hashed to them is lost until then, and repaired."""
    cuts = tuple(FailureSpec(link=f"leaf0-spine{spine}", at=at) for spine in range(3))
    outcome = run_exact(replace(small(FABRIC, size="512K"), failures=cuts))
    assert outcome.ended == "done"
    loads = dict(zip(outcome.link_names, outcome.link_bytes.tolist(), strict=True))
    assert (
        loads["leaf0>spine3"] > 2 * 2 * 2**19 / 6
    )  # two hosts send four of six shards away, in each of two legs
    if at == 0.0:
        assert sum(loads[f"leaf0>spine{spine}"] for spine in range(3)) < 50_000  # of the handshake


def test_one_seed_is_one_run():
    wanted = small(STAR, size="256K")
    first, again = run_exact(wanted, 3), run_exact(wanted, 3)
    assert first.times_s.tobytes() == again.times_s.tobytes()
    assert np.array_equal(first.link_bytes, again.link_bytes)


def test_a_grey_link_is_repaired():
    table = small(STAR, size="256K")
    grey = replace(table, failures=(FailureSpec(link="h1-switch", loss=0.05),))
    outcome = run_exact(grey)
    assert outcome.ended == "done"
    assert outcome.counts["dropped"][0] > 0


@pytest.mark.parametrize("at", [0.0, 5e-3])
def test_times_of_failures_count_from_the_first_round_in_both_engines(at):
    """A link that is cut for good after the handshake, which takes 10 ms and more: what is over before it is done."""
    cut = {"link": "h1-switch", "at": at, "until": at + 40e-3}
    table = small(STAR, size="128K")  # 1.5 ms on an idle network
    for run in (run_exact, run_packet):
        outcome = run(replace(table, failures=(FailureSpec(**cut),)))
        assert outcome.ended == "done"
        assert (outcome.times_s[0] > 40e-3) == (at == 0.0)


def test_what_is_missing_under_a_bound_is_told():
    grey = [{"link": "h1-switch", "loss": 0.05}]
    table = {"topology": STAR, "failures": grey, "workload": {"algorithm": "direct", "size": "512K"}}
    bounded = run_exact(scenario({**table, "transport": {"model": "mlt", "packet": 1464}}))
    assert bounded.ended == "done"
    assert 0.0 < bounded.missing_share <= 0.19  # 10 % in each leg
    assert np.isnan(bounded.max_load_ratio)
    exact = run_exact(scenario({**table, "transport": {"packet": 1464}}))
    assert exact.missing_share == 0.0


def test_a_round_of_which_nothing_arrived_is_not_told_to_miss_nothing(tmp_path):
    """The endpoints report nothing of a round that failed: what is missing is unknown, and a folder of results keeps it so."""
    toml = """
        engine = "exact"
        [scenario]
        topology = {kind = "star", hosts = 2, host_link = {rate = "1gbit", delay = "50us"}}
        transport = {packet = 1464}
        workload = {algorithm = "direct", size = "64K", rounds = 2}
        failures = [{link = "hosts", at = "1ns"}]
    """
    experiment = read_experiment("cut", toml)
    cases = experiment.cases([0])
    for found in (list(run_cases(cases, folder=tmp_path)), list(run_cases(cases, folder=tmp_path))):
        assert found[0].ended == "failed" and np.isnan(found[0].missing_share)
        (row,) = records(experiment, found)
        assert row["missing_share"] is None and row["unfinished"] == 1
        assert cells(row, headings([row])) == ["2", "-", "-", "-", "-", "1"]


@pytest.mark.parametrize(
    "load", [{"algorithm": "ps", "servers": 2}, {"algorithm": "hierarchical", "group": 2}]
)
def test_servers_and_groups_are_those_of_the_workload(load):
    outcome = run_exact(
        scenario({"topology": STAR, "transport": {"packet": 1464}, "workload": {"size": "256K", **load}})
    )
    assert outcome.ended == "done"
    loads = dict(zip(outcome.link_names, outcome.link_bytes.tolist(), strict=True))
    to_hosts = [loads[f"switch>h{host}"] for host in range(4)]
    if load["algorithm"] == "ps":
        # Ranks 0 and 2 get a half from both workers, and the other's half of the sum; the workers both halves of it.
        assert [nbytes / 2**17 for nbytes in to_hosts] == pytest.approx([3, 2, 3, 2], rel=0.1)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (leaf_spine("tcp"), "transport.control='reno'"),
        (leaf_spine("dblp", "adaptive"), "routing.policy='adaptive'"),
        (leaf_spine("dblp", "ecmp", workload__kind="incast"), "workload.kind='incast'"),
        (leaf_spine("dblp", "ecmp", switch={"shared": True}), "switch.shared=True"),
        (leaf_spine(transport__stop="deadline", transport__deadline="1ms"), "transport.stop='deadline'"),
        (leaf_spine(transport__critical_share=0.1), "transport.critical_share=0.1"),
        (leaf_spine(transport__droppable_share=0.1), "transport.droppable_share=0.1"),
        (leaf_spine("dctcp"), "transport.recovery='order': the exact engine has time, passes"),
        (leaf_spine(transport__initial_window="64K"), "transport.initial_window=65536"),
        (leaf_spine(transport__target="1ms"), "transport.target=0.001"),
        (leaf_spine(transport__ecn=True), "transport.ecn=True"),
        (
            leaf_spine(switch={"queues": 2}, transport__priority="remaining"),
            "switch.classes[0].queue=0: the exact engine has one queue, or class 1 in queue 1",
        ),
        (leaf_spine(pull_transport={"model": "mlt"}), "pull_transport.model='mlt'"),
        (leaf_spine(workload__segment=1408), "workload.segment=1408"),
        (leaf_spine(workload__latency="1ms"), "workload.latency=0.001"),
        (leaf_spine(switch={"classes": [{"mark_min": "8K"}, {"mark_min": "9K"}]}), "switch.classes[1].mark_min=9216"),
        (leaf_spine(switch={"classes": [{"mark_min": "8K", "mark_share": 0.5}]}), "switch.classes[0].mark_share=0.5"),
        (leaf_spine(switch={"droppable": [{"drop": "8K"}]}), "switch.droppable"),
        (leaf_spine(jitter=1e-6), "jitter=1e-06"),
        (leaf_spine(until=1.0), "until=1.0"),
        (leaf_spine("dblp", "spray", routing__detect="1ms"), "routing.detect=0.001"),
        (leaf_spine(failures=[{"link": "hosts", "loss": 0.1, "data_only": True}]), "failures[0].data_only=True"),
        (leaf_spine(failures=[{"link": "h0-h1"}]), "failures[0].link='h0-h1'"),
        (leaf_spine(topology__hosts_per_leaf=32), "topology='128 hosts': the exact engine has 64 at most"),
        (leaf_spine(topology__hosts_per_leaf=32, workload__ranks=65), "workload.ranks='65 hosts'"),
    ],
)  # fmt: skip
def test_what_it_has_not_is_refused_with_its_value(wanted, says):
    with pytest.raises(ConfigError) as caught:
        run_exact(wanted)
    assert str(caught.value).startswith(says)


# rounds that compress, rates that change


def compressing(method, rounds=1, **more):
    return scenario(
        {
            "topology": STAR,
            "switch": {"buffer": "512K"},
            "transport": {"packet": 1464},
            "workload": {"algorithm": "direct", "size": "128K", "rounds": rounds, "compression": method, **more.pop("load", {})},
            **more,
        }
    )  # fmt: skip


def test_a_tenth_of_the_elements_is_less_and_sooner():
    dense, tenth = (run_exact(compressing(method)) for method in ("none", "topk(0.1)"))
    assert tenth.link_bytes.sum() < 0.5 * dense.link_bytes.sum()
    assert tenth.times_s[0] < dense.times_s[0]
    (ratio,) = tenth.rounds["ratio"]
    assert ratio == pytest.approx(0.2, rel=0.02)  # an index for each value
    assert dense.rounds == {"rate_bps": (1e9,), "ratio": (1.0,)}


def test_rates_change_before_their_round():
    """A dense round of 128 KB moves 192 KB over each host's link: 1.5 ms at 1 Gb/s, 7.7 ms at 200 Mb/s."""
    outcome = run_exact(compressing("none", 4, rates=[{"round": 2, "rate": "200mbit"}]))
    assert outcome.rounds["rate_bps"] == (1e9, 1e9, 2e8, 2e8)
    assert outcome.times_s[1] < 4e-3
    assert outcome.times_s[2:].min() > 192 * 1024 * 8 / 2e8


def test_a_rate_for_a_round_that_is_not_run_is_refused():
    with pytest.raises(ConfigError, match=r"rates\[0\].round=4: there are 4 rounds, from 0"):
        compressing("none", 4, rates=[{"round": 4, "rate": "200mbit"}])


def test_what_a_grey_link_loses_is_repaired_in_passes():
    """``mlt`` without a bound: what a bitmap lacks goes again after each pass, until all is there."""
    grey = (FailureSpec(link="h1-switch", loss=0.05),)
    plain = small(STAR, size="256K", model="mlt", recovery="passes", loss_bound=0.0)
    outcome = run_exact(replace(plain, failures=grey))
    assert outcome.ended == "done"
    assert outcome.counts["dropped"][0] > 0
    assert outcome.missing_share == 0.0
    assert outcome.times_s[0] > run_exact(plain).times_s[0]


def test_netsense_follows_the_rate_within_five_rounds():
    """Down and up by five; it has settled before."""
    from dblp.sim.fabric.reaction import reactions

    rates = [{"round": 24, "rate": "200mbit"}, {"round": 44, "rate": "1gbit"}]
    topology = {"kind": "star", "hosts": 3, "host_link": {"rate": "1gbit", "delay": "250us"}}
    load = {"size": "300K", "compute": "1ms"}
    outcome = run_exact(compressing("netsense", 54, topology=topology, rates=rates, load=load))
    assert outcome.ended == "done"
    assert max(reactions(outcome.rounds["ratio"], outcome.rounds["rate_bps"])) <= 5
    assert min(outcome.rounds["ratio"]) < 0.1


def test_background_is_others_traffic_and_delays():
    calm = run_exact(compressing("none", 6))
    busy = run_exact(compressing("none", 6, background={"load": 0.4, "sizes": "onoff"}))
    assert busy.link_bytes.sum() > calm.link_bytes.sum()
    assert busy.times_s.mean() > calm.times_s.mean()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"workload": {"compression": "topk(0.1)"}}, "workload.compression"),
        ({"workload": {"compute": "1ms"}}, "workload.compute"),
        ({"rates": [{"round": 0, "rate": "1gbit"}]}, "rates"),
        ({"background": {"load": 0.1, "sizes": "onoff"}}, "background.sizes"),
    ],
)
def test_the_packet_engine_refuses_what_it_has_not(changes, field):
    with pytest.raises(ConfigError, match=field):
        run_packet(scenario({"topology": STAR, **changes}))


def test_compression_under_a_bound_and_background_by_flows_are_refused():
    with pytest.raises(ConfigError, match=r"workload\.compression"):
        run_exact(compressing("topk(0.1)", transport={"packet": 1464, "loss_bound": 0.1}))
    with pytest.raises(ConfigError, match=r"background\.sizes"):
        run_exact(compressing("none", background={"load": 0.1}))


def test_an_unknown_method_is_refused_when_the_file_is_read():
    with pytest.raises(ConfigError, match="gzip"):
        compressing("gzip")
