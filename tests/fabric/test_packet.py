"""The packet engine: closed forms, conservation, determinism, bounds, faults. The first test to run compiles it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dblp.sim.fabric.graph import Graph
from dblp.sim.fabric.outcome import Outcome
from dblp.sim.fabric.packet import Plan, make_plan, run_packet, run_plan
from dblp.sim.fabric.scenario import Scenario
from dblp.sim.fabric.splitting import sprayed_loads
from dblp.units import Seconds
from tests.fabric.scenarios import MODELS, POLICIES, SWITCHES, leaf_spine, star

pytestmark = pytest.mark.timeout(600)  # the machine code is made once, minutes on a busy machine

PACKET, PAYLOAD = 1500, 1424
S_A_PACKET = PACKET * 8 / 10e9
S_AN_ACK = 64 * 8 / 10e9
DELAY_S = 1e-6
WIDE = {"transport__control": "window", "transport__initial_window": "64M"}
"""A window that no flow here fills: line rate."""


def run_flows(scenario: Scenario, build: Callable[[Graph], object], seed: int = 0) -> Outcome:
    """Run flows of one's own instead of the scenario's workload."""
    graph = Graph()
    build(graph)
    graph.per_flow = True
    plan = make_plan(scenario, seed)
    tasks = graph.build()
    none = np.zeros(len(plan.fabric.sources), bool)
    return run_plan(
        replace(
            plan,
            tasks=tasks,
            paths=np.zeros(len(tasks.source), np.int64),
            ideal_loads=sprayed_loads(tasks, plan.fabric, none),
        )
    )


def assert_conserved(outcome: Outcome) -> None:
    """Packets sent = delivered (trimmed headers among them) + dropped + under way, of data and of control."""
    counts = outcome.counts
    lost = ("no_buffer", "by_class", "pushed_out", "link_loss", "link_down")
    for kind in (0, 1):
        dropped = sum(counts[name][kind] for name in lost)
        assert counts["sent"][kind] == counts["delivered"][kind] + dropped + outcome.queued[kind]
    assert counts["trimmed"][0] <= counts["sent"][0]


# closed forms


@pytest.mark.parametrize("packets", [1, 2, 100])
def test_one_flow_takes_its_packets_one_more_and_two_delays(packets):
    """Store and forward: N packet times at the host, one more at the switch."""
    outcome = run_flows(star(**WIDE), lambda graph: graph.flows(0, 1, packets * PAYLOAD))
    assert outcome.times_s[0] == pytest.approx((packets + 1) * S_A_PACKET + 2 * DELAY_S, abs=1e-12)
    assert outcome.counts["sent"] == (packets, packets)


def test_a_short_last_packet_is_as_short_on_the_wire():
    outcome = run_flows(star(**WIDE), lambda graph: graph.flows(0, 1, 24))
    assert outcome.times_s[0] == pytest.approx(2 * 100 * 8 / 10e9 + 2 * DELAY_S, abs=1e-12)


@pytest.mark.parametrize("senders", [2, 3])
def test_senders_to_one_share_its_link_evenly(senders):
    """All end within a packet each of the time that the link needs for all."""
    wide = star(switch__buffer="64M", **WIDE)
    outcome = run_flows(wide, lambda graph: graph.flows(range(1, senders + 1), 0, 200 * PAYLOAD))
    total = (senders * 200 + 1) * S_A_PACKET + 2 * DELAY_S
    assert outcome.times_s.max() == pytest.approx(total, abs=S_A_PACKET)
    assert outcome.times_s.min() >= total - (senders + 1) * S_A_PACKET


def test_two_flows_of_one_host_take_turns():
    outcome = run_flows(star(**WIDE), lambda graph: graph.flows(0, [1, 2], 100 * PAYLOAD))
    assert (
        abs(outcome.times_s[0] - outcome.times_s[1]) <= 4 * S_A_PACKET
    )  # one in service, one waiting at first


def test_a_ring_takes_its_steps_one_after_another():
    """2 (n - 1) steps of a shard's packets, each with one more packet time and two delays; at most an acknowledgement before
    each."""
    shard = 10 * PAYLOAD
    outcome = run_packet(star(workload__size=4 * shard, **WIDE))
    least = 6 * (11 * S_A_PACKET + 2 * DELAY_S)
    assert least - 1e-11 <= outcome.times_s[0] <= least + 6 * 11 * S_AN_ACK


def test_direct_takes_two_legs():
    """Each sends and gets three shards in each leg; the switch's ports are never behind by more than a packet of each
    sender."""
    shard = 100 * PAYLOAD
    outcome = run_packet(
        star(workload__size=4 * shard, workload__algorithm="direct", switch__buffer="8M", **WIDE)
    )
    least = 2 * (301 * S_A_PACKET + 2 * DELAY_S)
    assert least <= outcome.times_s[0] + 1e-12 <= least + 2 * 301 * S_AN_ACK + 12 * S_A_PACKET


def test_a_ring_in_segments_leaves_no_link_idle():
    """Each part goes on as soon as it has come, so the packets of all steps leave one after another; at most an acknowledgement
    before each, and the first part's way at the end."""
    shard = 20 * PAYLOAD
    whole, parts = (
        run_packet(star(workload__size=4 * shard, workload__segment=segment, **WIDE)).times_s[0]
        for segment in (0, 2 * PAYLOAD)
    )
    least = 6 * 20 * S_A_PACKET + S_A_PACKET + 2 * DELAY_S
    assert least - 1e-11 <= parts <= least + 6 * 21 * S_AN_ACK
    assert whole > least + 5 * (S_A_PACKET + 2 * DELAY_S) - 1e-11


def test_a_direct_exchange_in_segments_begins_its_second_leg_in_the_first():
    shard = 100 * PAYLOAD
    load = {"workload__size": 4 * shard, "workload__algorithm": "direct", "switch__buffer": "8M", **WIDE}
    whole, parts = (run_packet(star(workload__segment=size, **load)) for size in (0, 10 * PAYLOAD))
    assert parts.ended == "done"
    assert parts.flows["bytes"].sum() == whole.flows["bytes"].sum()
    second = parts.flows["leg"] == 1
    assert parts.flows["start_s"][second].min() < parts.flows["finish_s"][~second].max()
    assert 600 * S_A_PACKET < parts.times_s[0] < whole.times_s[0]


PORTIONS = {
    "transport__card": True,
    "transport__portions": 4,
    "transport__control": "window",
    "transport__initial_window": 16 * PACKET,
}


def test_flows_in_portions_share_their_paths_window_and_leave_in_order():
    """A window of 16 packets, an answer for every four: the second flow gets none of it before the first has sent all."""
    outcome = run_flows(star(**PORTIONS), lambda graph: graph.flows(0, [1, 1], 100 * PAYLOAD))
    assert outcome.ended == "done"
    assert outcome.counts["sent"] == (200, 50)
    first, second = outcome.flows["finish_s"]
    assert second - first == pytest.approx(100 * S_A_PACKET, rel=0.05)
    alone = run_flows(star(**PORTIONS), lambda graph: graph.flows(0, 1, 100 * PAYLOAD))
    assert first == pytest.approx(alone.times_s[0], abs=1e-12)


def test_a_host_turns_from_peer_to_peer():
    """Four packets to each in turn: both are done within four packets, and not one after another."""
    outcome = run_flows(star(**PORTIONS), lambda graph: graph.flows(0, [1, 2], 100 * PAYLOAD))
    first, second = outcome.flows["finish_s"]
    assert second == pytest.approx(200 * S_A_PACKET, rel=0.02)
    assert 0.0 < second - first < 5 * S_A_PACKET


def test_parts_of_a_message_are_answered_as_one():
    """A hundred parts of a packet that are all there leave, and are answered, as one flow of a hundred packets does."""

    def parts(graph: Graph) -> None:
        for _ in range(100):
            graph.flows(0, 1, PAYLOAD, message=1)

    whole = run_flows(star(**PORTIONS), lambda graph: graph.flows(0, 1, 100 * PAYLOAD))
    outcome = run_flows(star(**PORTIONS), parts)
    assert outcome.counts["sent"] == whole.counts["sent"] == (100, 25)
    assert outcome.flows["finish_s"].max() == pytest.approx(whole.times_s[0], abs=1e-12)


def late_part(graph: Graph) -> None:
    """A message of nine packets, the last of which is there 20 ms after the others."""
    graph.flows(0, 1, 8 * PAYLOAD, message=1)
    graph.order(graph.tasks(0, 20e-3), graph.flows(0, 1, PAYLOAD, message=1))


def test_what_does_not_ask_is_told_of_after_a_while():
    """The window has room for as much again, so nothing is asked; the receiver tells of it 4 ms later, before the sender's
    timeout, and then that it has all."""
    wide = {**PORTIONS, "transport__initial_window": 400 * PACKET, "transport__min_rto": "8ms"}
    outcome = run_flows(star(**wide), late_part)
    assert outcome.counts["sent"] == (9, 2)
    assert outcome.flows["finish_s"].max() == pytest.approx(20e-3 + 2 * (DELAY_S + S_A_PACKET), abs=1e-9)


def test_what_shares_a_window_shares_a_path():
    one_port = {
        "transport__card": True,
        "transport__portions": 4,
        "workload__size": "1M",
        "workload__segment": "1.4K",
    }
    plan = make_plan(leaf_spine("dblp", "ecmp", **one_port), 0)
    pairs: dict[tuple[int, int], set[int]] = {}
    for source, target, path in zip(plan.tasks.source, plan.tasks.target, plan.paths, strict=True):
        pairs.setdefault((source, target), set()).add(path)
    assert all(len(paths) == 1 for paths in pairs.values())
    assert len(set.union(*pairs.values())) == 4


def test_less_than_a_portion_waits_for_more():
    """A message of nine packets leaves in portions of two at least: the first, alone, waits 20 ms for the others."""

    def parts(graph: Graph) -> None:
        graph.flows(0, 1, PAYLOAD, message=1)
        graph.order(graph.tasks(0, 20e-3), graph.flows(0, 1, 8 * PAYLOAD, message=1))

    outcome = run_flows(star(**PORTIONS), parts)
    assert outcome.flows["finish_s"].min() > 20e-3


def test_where_round_trips_are_long_a_window_is_paced():
    """A window of 400 packets over 8 ms: what waits at the host is a portion of it, not all."""
    far = {"topology__host_link": {"rate": "10gbit", "delay": "2ms"}, "switch__buffer": "8M"}
    wide = {**PORTIONS, "transport__initial_window": 400 * PACKET}
    outcome = run_flows(star(**far, **wide), lambda graph: graph.flows(0, 1, 2000 * PAYLOAD))
    assert outcome.ended == "done"
    peak = outcome.link_peak[outcome.link_names.index("h0>switch")]
    assert 80 * PACKET < peak <= 100 * PACKET


def test_shards_in_parts_are_cut_between_chunks():
    """As the collectives cut them: 10 chunks and a short one over 4 ranks are 3, 3, 3 and 2."""
    load = {"workload__size": 10 * PAYLOAD + 8, "workload__segment": PAYLOAD, "workload__algorithm": "ring"}
    flows = run_packet(star(**load)).flows
    assert sorted(set(flows["bytes"].tolist())) == [8, PAYLOAD]
    assert (flows["bytes"] == PAYLOAD).sum() == 6 * 10


def test_what_a_portion_lost_is_asked_for_and_repaired():
    """Half of the data is lost at first, answered packets among it: after a timeout the sender asks, and repairs what lacks."""
    failures = [{"link": "h0-switch", "loss": 0.5, "until": "100us", "one_way": True, "data_only": True}]
    outcome = run_flows(
        star(failures=failures, **PORTIONS), lambda graph: graph.flows(0, [1, 1], 100 * PAYLOAD)
    )
    assert outcome.ended == "done"
    assert outcome.counts["link_loss"][0] > 0
    assert outcome.flows["lost"].sum() == outcome.counts["link_loss"][0]
    assert outcome.counts["sent"][0] == 200 + outcome.counts["link_loss"][0]
    assert_conserved(outcome)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "flows", "total"),
    [
        ("ring", 16, 2 * 15 * 16, 2 * 15),
        ("direct", 16, 2 * 15 * 16, 2 * 15),
        ("halving_doubling", 16, 8 * 16, 2 * 15),
        ("hierarchical", 16, None, None),
        ("double_tree", 16, 2 * 2 * 8 * 15, 2 * 15),
        ("double_tree", 13, 2 * 2 * 8 * 12, 2 * 12),
        ("ps", 16, 2 * 4 * 15 - 2 * 4 * 3, None),
    ],
)
def test_algorithms_send_what_they_must_and_end(algorithm, ranks, flows, total):
    """``total``: gradients' worth of bytes over all ranks."""
    size = 16 * 13 * 16 * 100
    scenario = leaf_spine(
        workload__algorithm=algorithm, workload__ranks=ranks, workload__servers=4, workload__size=size
    )
    outcome = run_packet(scenario)
    assert outcome.ended == "done"
    assert flows is None or len(outcome.flows) == flows
    if total is not None:
        assert outcome.flows["bytes"].sum() == pytest.approx(total * size, rel=0.01)
    assert_conserved(outcome)


def test_parameter_servers_stand_apart_and_each_has_a_share_of_all_gradients():
    flows = run_packet(
        leaf_spine(workload__algorithm="ps", workload__ranks=16, workload__servers=4, workload__size=16_000)
    ).flows
    pushed = flows[flows["leg"] == 0]
    assert sorted({int(server) for server in pushed["target"]}) == [0, 4, 8, 12]
    assert len(pushed) == 4 * 12
    assert (pushed["bytes"] == 4_000).all()


def test_training_steps_cost_their_computation_and_what_is_not_hidden():
    from dblp.sim.fabric.traces import load_trace

    fast = {"topology__host_link": {"rate": "800gbit", "delay": "100ns"}, "transport__packet": 9000}
    load = {"workload__kind": "training", "workload__bytes_scale": 1e-3, "workload__steps": 3}
    hidden = run_packet(star(**fast, **load))
    compute = load_trace("resnet50").compute_s
    assert len(hidden.times_s) == 3
    assert compute <= hidden.mean_s <= 1.01 * compute
    slow = {"topology__host_link": {"rate": "100mbit", "delay": "100ns"}, "transport__packet": 9000}
    apart = run_packet(star(**slow, **load, workload__overlap=False))
    behind = run_packet(star(**slow, **load))
    assert compute < behind.mean_s < apart.mean_s


# conservation, every model with every policy


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_packets_are_conserved_and_all_arrives(model, policy):
    outcome = run_packet(leaf_spine(model, policy))
    assert outcome.ended == "done"
    assert_conserved(outcome)
    if model != "mlt":
        assert outcome.missing_share == 0.0
    else:
        assert outcome.missing_share <= 0.1


@pytest.mark.parametrize("loss", [0.0, 1e-6, 0.5, 1.0])
@pytest.mark.parametrize("model", MODELS)
def test_every_loss_ends(model, loss):
    """Half of the packets and half of the answers: a timeout in four round trips of five, so patience is needed."""
    patient = {"transport__max_timeouts": 40, "until": 1e6}
    failures = [{"link": "hosts", "loss": loss, "one_way": True}]
    outcome = run_packet(leaf_spine(model, "spray", failures=failures, workload__size="64K", **patient))
    assert outcome.ended == ("failed" if loss == 1.0 else "done")
    assert_conserved(outcome)
    assert np.isnan(outcome.times_s).all() == (loss == 1.0)


@pytest.mark.parametrize("loss", [0.0, 1e-6, 0.5, 1.0])
@pytest.mark.parametrize("bound", [0.0, 0.1])
@pytest.mark.parametrize("stop", ["stall", "eager"])
def test_every_loss_ends_in_portions(stop, bound, loss):
    patient = {
        "transport__max_timeouts": 40,
        "until": 1e6,
        "transport__loss_bound": bound,
        "transport__stop": stop,
    }
    sends = {
        "transport__card": True,
        "transport__portions": 4,
        "workload__segment": "1.4K",
        "workload__size": "64K",
    }
    failures = [{"link": "hosts", "loss": loss, "one_way": True}]
    outcome = run_packet(leaf_spine("dblp", "ecmp", failures=failures, **sends, **patient))
    assert outcome.ended == ("failed" if loss == 1.0 else "done")
    assert_conserved(outcome)


def test_time_that_is_over_ends_a_run():
    outcome = run_packet(leaf_spine(until=20e-6))
    assert outcome.ended == "until"
    assert outcome.simulated_s == pytest.approx(20e-6)
    assert_conserved(outcome)


# determinism


@pytest.mark.parametrize("policy", ["random", "reps", "adaptive"])
def test_one_seed_is_one_run_and_another_is_another(policy):
    scenario = leaf_spine("dctcp", policy, workload__size="256K")
    first, again, other = run_packet(scenario, 7), run_packet(scenario, 7), run_packet(scenario, 8)
    assert first.times_s.tobytes() == again.times_s.tobytes()
    assert first.flows.tobytes() == again.flows.tobytes()
    assert (first.events, first.counts) == (again.events, again.counts)
    assert first.flows.tobytes() != other.flows.tobytes()


# bounds


@pytest.mark.parametrize("model", ["dblp", "mlt"])
@pytest.mark.parametrize("bound", [0.0, 0.1, 0.4])
def test_no_flow_misses_more_than_its_bound(model, bound):
    failures = [{"link": "hosts", "loss": 0.3, "one_way": True}]
    outcome = run_packet(
        leaf_spine(
            model,
            "spray",
            transport__loss_bound=bound,
            transport__max_timeouts=40,
            workload__size="2M",
            failures=failures,
        )
    )
    assert outcome.ended == "done"
    assert (outcome.flows["missing"] <= np.floor(outcome.flows["chunks"] * bound)).all()
    assert (outcome.missing_share > 0) == (bound > 0)


def test_eager_throws_away_what_stall_waits_for():
    """On a network that loses nothing, ``stall`` misses nothing; ``eager`` all that it may."""
    settings = {"transport__loss_bound": 0.2, "workload__size": "2M"}
    stall = run_packet(leaf_spine("dblp", "spray", **settings))
    eager = run_packet(leaf_spine("dblp", "spray", transport__stop="eager", **settings))
    assert stall.missing_share == 0.0
    assert 0.15 < eager.missing_share <= 0.2
    assert eager.times_s[0] < stall.times_s[0]


def test_critical_chunks_always_arrive():
    failures = [{"link": "hosts", "loss": 0.4, "one_way": True}]
    settings = {"transport__loss_bound": 0.4, "transport__critical_share": 0.25, "workload__size": "2M"}
    plan = make_plan(leaf_spine("dblp", "spray", failures=failures, **settings), 0)
    assert run_plan(plan).ended == "done"
    from dblp.sim.fabric.kernel import state as k
    from dblp.sim.fabric.kernel.loop import run
    from dblp.sim.fabric.packet import make_arrays

    arrays = make_arrays(plan)
    while run(arrays.world(), 1 << 60, 1_000) == k.PAUSED:
        pass
    flows = arrays.flows[arrays.flows["chunks"] > 0]
    done = flows[flows["state"] == k.DONE]
    assert len(done)
    assert (done["critical_received"] == done["critical"]).all()
    assert done["critical"].min() > 0


def test_a_deadline_ends_a_flow_with_what_has_come():
    failures = [{"link": "h1-switch", "loss": 1.0, "data_only": True}]
    scenario = star(
        failures=failures, workload__algorithm="direct", transport__stop="deadline", transport__deadline=0.01
    )
    outcome = run_packet(scenario)
    assert outcome.ended == "done"
    assert outcome.times_s[0] == pytest.approx(0.02, rel=0.01)
    missing = outcome.flows[outcome.flows["missing"] > 0]
    assert set(missing["source"]) | set(missing["target"]) >= {1}
    assert (missing["finish_s"] - missing["ready_s"] == pytest.approx(0.01)) or len(missing) > 1


# switches


def test_the_lower_queue_passes_the_others():
    """A short flow of class 0 through a port that eight long ones of class 3 fill."""
    queues = [{"queue": 0}, {"queue": 1}, {"queue": 2}, {"queue": 3}]
    wide = star(switch={"buffer": "64M", "queues": 4, "classes": queues}, **WIDE)

    def build(graph):
        graph.flows([1, 2], 0, 500 * PAYLOAD, cls=3)
        graph.flows(3, 0, 20 * PAYLOAD, cls=0, latency_s=100e-6)

    alone = 21 * S_A_PACKET + 2 * DELAY_S
    assert run_flows(wide, build).times_s[2] <= alone + 2 * S_A_PACKET
    fifo = star(switch={"buffer": "64M"}, **WIDE)
    assert run_flows(fifo, build).times_s[2] > 3 * alone


def test_droppable_packets_are_dropped_first():
    switch = {"buffer": "8M", "classes": [{}], "droppable": [{"drop": "30K"}]}
    outcome = run_packet(
        star(
            switch=switch, transport__model="dblp", transport__control="none", transport__droppable_share=0.5,
            transport__loss_bound=0.5, workload__kind="incast",
        )
    )  # fmt: skip
    assert outcome.counts["by_class"][0] > 0
    assert outcome.counts["no_buffer"] == (0, 0)
    assert 0.0 < outcome.missing_share <= 0.5


def test_marks_keep_dctcps_queue_short_and_reno_fills_the_buffer():
    load = {
        "workload__kind": "incast",
        "workload__size": "4M",
        "switch": {"buffer": "512K", "classes": [{"mark_min": "60K"}]},
    }
    marked = run_packet(star(transport__model="dctcp", **load))
    filled = run_packet(star(transport__model="tcp", **load))
    assert marked.link_peak.max() < 200_000
    assert filled.link_peak.max() > 500_000
    assert marked.counts["no_buffer"][0] == 0 < filled.counts["no_buffer"][0]


def test_trimmed_packets_lose_no_time():
    outcome = run_packet(leaf_spine("ndp", "random", workload__kind="incast", workload__size="256K"))
    least = 15 * 2**18 * 8 / 100e9
    assert outcome.counts["trimmed"][0] > 100
    assert outcome.counts["no_buffer"][0] == 0
    assert least < outcome.times_s[0] < 1.2 * least


def test_a_shared_buffer_gives_one_port_more_than_its_part():
    load = {"workload__kind": "incast", "workload__size": "256K", **WIDE}
    apart = run_packet(star(switch={"buffer": "64K"}, **load))
    shared = run_packet(star(switch={"buffer": "256K", "shared": True, "alpha": 2.0}, **load))
    assert apart.link_peak.max() <= 64 * 1024
    assert 64 * 1024 < shared.link_peak.max() <= 2 / 3 * 256 * 1024 + PACKET


# paths and faults


def test_spraying_in_turn_loads_links_evenly_and_ecmp_does_not():
    load = {"workload__kind": "permutation", "workload__size": "1M"}
    spray, ecmp = (run_packet(leaf_spine("dctcp", policy, **load)) for policy in ("spray", "ecmp"))
    assert spray.max_load_ratio < 1.1 < ecmp.max_load_ratio
    assert spray.times_s[0] < ecmp.times_s[0]


def test_ethereal_is_no_slower_than_random_spraying():
    pairs = [
        [run_packet(leaf_spine("dctcp", policy, transport__recovery="time", workload__size="4M"), seed).times_s[0]
         for policy in ("ethereal", "random")]
        for seed in range(5)
    ]  # fmt: skip
    ethereal, random = np.array(pairs).mean(axis=0)
    assert ethereal <= random


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cut_link_is_left_and_taken_back(policy):
    cut = [{"link": "leaf0-spine1", "at": 20e-6, "until": 1e-3}]
    scenario = leaf_spine("dblp", policy, failures=cut, workload__size="8M", workload__rounds=4)
    outcome = run_packet(scenario)
    assert outcome.ended == "done"
    assert outcome.counts["link_down"][0] > 0
    assert outcome.times_s[3] < outcome.times_s[0] * 1.2
    assert_conserved(outcome)


@pytest.mark.parametrize("policy", ["spray", "random", "reps", "adaptive", "ethereal"])
@pytest.mark.parametrize("at", [0.0, 1e-6])
def test_a_dead_paths_load_spreads_over_all_that_are_left(policy, at):
    """No link gets more than of ideal spraying over what remains and a flow more, what was lost and sent again apart; those that
    choose by chance, four standard deviations of the packets'. REPS and the shortest queue are not even anyway: a fifth more
    (the next path alone would get three times as much)."""
    cut = [{"link": f"leaf0-spine{spine}", "at": at} for spine in (2, 3)]
    changes = {"topology__spines": 8, "workload__size": "2M", "failures": cut, "switch": {"buffer": "16M"}}
    scenario = leaf_spine("dctcp", policy, transport__recovery="time", routing__detect=0.0, **changes)
    known = replace(
        scenario, failures=tuple(replace(failure, at=Seconds(0.0)) for failure in scenario.failures)
    )
    ideal = make_plan(known, 0).ideal_loads
    outcome = run_packet(scenario)
    assert outcome.ended == "done"
    inner = [n for n, name in enumerate(outcome.link_names) if "leaf0" in name and "spine" in name]
    packets = ideal[inner].max() / scenario.transport.payload
    flow = -(-scenario.workload.size // 16)
    by_chance = 4 * packets**0.5 * scenario.transport.payload
    slack = {"random": by_chance, "reps": 0.2 * ideal[inner].max(), "adaptive": 0.2 * ideal[inner].max()}.get(
        policy, flow
    )
    slack += outcome.counts["link_down"][0] * scenario.transport.payload
    wire = scenario.transport.packet / scenario.transport.payload
    assert outcome.link_bytes[inner].max() <= wire * (ideal[inner].max() + slack)


@pytest.mark.parametrize("chunks", [1, 2])
def test_sprayed_flows_shorter_than_a_turn_spread_over_what_is_left(chunks):
    """Two paths of eight are dead: flows that would begin there begin anywhere, not all on the next path, which would have half
    as much again with two packets a flow. Within four standard deviations of the packets that a link gets by chance."""
    cut = [{"link": f"leaf0-spine{spine}"} for spine in (2, 3)]
    changes = {"topology__spines": 8, "failures": cut, "switch": {"buffer": "16M"}, "workload__rounds": 8}
    scenario = leaf_spine("dctcp", "spray", workload__size=16 * chunks * PAYLOAD, **changes)
    outcome = run_packet(scenario)
    assert outcome.ended == "done"
    loads = dict(zip(outcome.link_names, outcome.link_bytes.tolist(), strict=True))
    for way in ("leaf0>spine{}", "spine{}>leaf0"):
        packets = np.array([loads[way.format(spine)] for spine in range(8)]) / PACKET
        left = packets[[0, 1, 4, 5, 6, 7]]
        assert left.max() <= left.mean() + 4 * left.mean() ** 0.5
        assert left.min() >= left.mean() - 4 * left.mean() ** 0.5
        assert packets[[2, 3]].max() == 0


def test_repeats_that_are_lost_wait_for_a_timeout_by_order_and_not_by_time():
    """RFC 6675 tells the loss of a repeat by nothing but the timeout, RFC 8985 does. Half is lost for a quarter of the time that
    2 MB take, so that repeats are, too, and the end is not."""
    failures = [{"link": "hosts", "loss": 0.5, "until": "400us", "one_way": True, "data_only": True}]
    load = {"workload__kind": "permutation", "workload__size": 2_000_000, "topology__hosts": 2}
    times = {}
    for recovery in ("order", "time"):
        transport = {
            "model": "dctcp", "recovery": recovery, "control": "window", "min_rto": 0.2, "initial_window": "256K"
        }  # fmt: skip
        outcome = run_packet(star(failures=failures, transport=transport, **load))
        assert outcome.ended == "done"
        times[recovery] = outcome.times_s.max()
    assert times["order"] > 0.2 > 20 * times["time"]


def test_flows_that_fan_in_arrive_together_at_one_host():
    load = {"workload__kind": "flows", "workload__flows": 12, "workload__fan_in": 3, "workload__size": 10_000}
    outcome = run_packet(star(transport__model="dctcp", **load))
    assert len(outcome.times_s) == 12
    for place in range(0, 12, 3):
        group = outcome.flows[place : place + 3]
        assert len(set(group["target"])) == 1
        assert len(set(group["source"]) | set(group["target"])) == 4
        assert np.ptp(group["start_s"]) == 0.0


def test_a_link_that_is_known_to_be_down_carries_nothing():
    outcome = run_packet(leaf_spine("dctcp", "spray", failures=[{"link": "leaf0-spine1"}]))
    loads = dict(zip(outcome.link_names, outcome.link_bytes, strict=True))
    assert loads["leaf0>spine1"] == loads["spine1>leaf0"] == 0
    assert loads["leaf1>spine1"] > 0
    assert outcome.counts["link_down"] == (0, 0)


def test_hosts_that_are_cut_off_fail_their_flows_alone():
    failures = [{"link": "h3-switch"}]
    load = {"workload__kind": "flows", "workload__flows": 60, "workload__size": 20_000}
    outcome = run_packet(star(failures=failures, **load))
    assert outcome.ended == "failed"
    touched = (outcome.flows["source"] == 3) | (outcome.flows["target"] == 3)
    assert (np.isnan(outcome.times_s) == touched).all()


@pytest.mark.parametrize("model", MODELS)
def test_flows_that_start_together_starve_nobody(model):
    """Eight equal flows to one port, twenty seeds: each host's mean place at the finish is the middle one, 3.5, within four
    of its standard deviations of 2.29 / sqrt(20)."""
    table = {"workload__kind": "incast", "workload__size": "256K", "topology__hosts": 9, "jitter": 50e-9}
    switch = SWITCHES.get(model, {"buffer": "512K", "classes": [{"mark_min": "60K"}]})
    runs = [run_packet(star(transport__model=model, switch=switch, **table), seed) for seed in range(20)]
    places = np.array([np.argsort(np.argsort(run.flows["finish_s"])) for run in runs])
    assert all(run.ended == "done" for run in runs)
    assert np.abs(places.mean(axis=0) - 3.5).max() < 4 * 2.29 / 20**0.5


def test_background_and_microbursts_delay_but_are_not_timed():
    others = {
        "background": {"load": 0.3, "until": "200us", "sizes": "fixed", "size": "100K"},
        "bursts": {"rate_hz": 50_000.0, "senders": 4, "until": "200us"},
    }
    plain = [run_packet(leaf_spine("dctcp", "ecmp"), seed) for seed in range(6)]
    busy = [run_packet(leaf_spine("dctcp", "ecmp", **others), seed) for seed in range(6)]
    assert all(len(one.flows) == len(other.flows) for one, other in zip(busy, plain, strict=True))
    # Of one seed the hashes may send it around the traffic.
    assert np.mean([run.times_s[0] for run in busy]) > 1.05 * np.mean([run.times_s[0] for run in plain])
    for run in busy:
        assert_conserved(run)


# samples


def test_samples_follow_the_backlogs():
    outcome = run_packet(leaf_spine("dctcp", "ecmp", workload__size="4M"), sampled=True)
    assert len(outcome.series) == len(outcome.series_s) <= 256
    assert outcome.series.shape[1] == len(outcome.link_names)
    assert 0 < outcome.series.max() <= outcome.link_peak.max()
    assert outcome.series_s[-1] <= outcome.simulated_s


def test_samples_go_on_where_nothing_was_under_way_at_the_first():
    """At a microsecond all hosts compute."""
    outcome = run_packet(
        star(workload__kind="training", workload__bytes_scale=0.2, transport__packet=9000), sampled=True
    )
    assert len(outcome.series) > 100
    assert outcome.series.max() > 0


def test_a_plan_says_what_was_drawn():
    plan = make_plan(leaf_spine("dctcp", "ecmp"), 3)
    assert isinstance(plan, Plan)
    assert plan.ideal_loads[plan.fabric.fabric_links()].max() > 0


@pytest.mark.parametrize("hosts", [3, 4])
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_hosts_that_hand_over_whole_windows_find_room_for_them(algorithm, hosts):
    """Windows of megabytes leave in one event, each packet a flow with a timer of its own: more than was free. Room is made
    before the next event, and the host goes on."""
    run = star(
        topology__hosts=hosts,
        switch__buffer="16M",
        transport={"model": "dblp", "packet": 1456, "header": 48, "ack": 140, "target": "1.2ms", "flow_target": "400us",
                   "card": True, "portions": 4, "min_rto": "8ms", "initial_window": 65536},
        workload__algorithm=algorithm, workload__size="8M", workload__segment=1408,
    )  # fmt: skip
    outcome = run_packet(run)
    assert outcome.ended == "done"
    wire_s = 2 * (hosts - 1) / hosts * (8 << 20) * 8 / 10e9
    assert wire_s < outcome.times_s[0] < 2 * wire_s
    again = run_packet(run)
    assert again.times_s.tobytes() == outcome.times_s.tobytes()
    assert np.array_equal(again.flows, outcome.flows)


def test_little_room_changes_no_time(monkeypatch):
    """However few packets there are at first."""
    run = star(
        topology__hosts=2,
        switch__buffer="16M",
        transport={"model": "dblp", "card": True, "target": "1.2ms"},
        workload__size="4M",
    )
    plenty = run_packet(run)
    monkeypatch.setattr("dblp.sim.fabric.packet.FREE_PACKETS", 200)
    assert run_packet(run).times_s[0] == pytest.approx(plenty.times_s[0], rel=0.1)
