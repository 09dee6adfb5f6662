"""Conditions and schedules as text, and what they ask of the kernel; nothing here needs one."""

import json
import subprocess
import sys
import threading
import time
from itertools import islice, pairwise

import numpy as np
import pytest

from dblp.errors import ConfigError
from dblp.sim.lab import nft, shaping
from dblp.sim.lab.counters import Counters, LinkCounters
from dblp.sim.lab.impairments import Applied, Conditions, Schedule, parse_conditions, parse_schedule
from dblp.sim.lab.plan import Point, Role
from dblp.sim.lab.traffic import Traffic, parse_traffic, spells
from dblp.transport.impair_model import Impairer
from dblp.transport.impair_spec import Delay, Loss, parse_impair

DOWN = Point("h0", "down", "sw0", "ph0")
UP = Point("h0", "up", "sw0", "ph0", ingress=True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "loss(0.01),delay(2ms)",
        "ge(p=0.002,r=0.05,bad=0.8),links(h2)",
        "rate(100mbit,queue=64KB),links(h1+h3,way=up)",
        "duplicate(1%),corrupt(2%),delay(5ms),jitter(1ms,dist=normal)",
        "slot(2ms),delay(1ms)",
        "loss(1%),slot(min=2ms,max=5ms),links(h1)",
    ],
)
def test_conditions_are_what_they_write(text):
    conditions = parse_conditions(text)
    assert parse_conditions(str(conditions)) == conditions
    assert bool(conditions) == bool(text)


def test_conditions_know_their_long_run_loss():
    assert parse_conditions("loss(3%)").loss == 0.03
    assert parse_conditions("ge(p=0.01,r=0.3)").loss == pytest.approx(0.01 / 0.31)
    assert parse_conditions("ge(0.01,0.3,bad=0.5,good=0.001)").loss == pytest.approx(
        (0.001 * 0.3 + 0.5 * 0.01) / 0.31
    )
    assert parse_conditions("delay(1ms)").loss == 0.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("los(0.1)", "conditions, column 1: 'los' is none: known are loss, ge"),
        ("loss(0.1),delay(x)", "column 17: time=x will not do"),
        ("loss(0.1),loss(0.2)", "column 11: loss stands more than once"),
        ("loss(0.1) delay(1ms)", "column 11: expected ','"),
        (
            "bursts(loss=0.8,length=200ms,every=1s)",
            "column 1: bursts changes in time: it belongs in a schedule",
        ),
        ("seed(7)", "column 1: 'seed' is none"),
        ("loss(0.1),links(h1-h2)", "column 17: links=h1-h2 will not do: names of links"),
        ("loss(0.1),links(h1,way=left)", "way=left will not do: both or down or up"),
        ("loss(0.1),ge(0.1,0.2)", "loss and ge exclude each other"),
        ("corrupt(0.1,deliver=true)", "a real kernel drops what fails its checksum"),
        ("delay(1ms),reorder(0.1,by=2ms)", "goes with neither delay nor jitter"),
        ("slot(5ms,2ms)", "slot: max=0.002s is below min=0.005s"),
        ("slot(0s)", "min=0s will not do: a time above 0"),
        ("slot(61s)", "60 s late at most"),
    ],
)
def test_faults_name_their_column(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_conditions(text)


def test_bursts_are_those_of_dblps_own_impairments():
    text = "bursts(loss=0.6..0.9,length=50ms,every=200ms,start=10ms),seed(7)"
    impairer = Impairer(parse_impair(text))
    count = 20_000
    for span in islice(parse_schedule(text).spans(), 20):
        fate = impairer.apply(np.full(count, 1000), (span.start_s + span.end_s) / 2)
        # Five standard deviations of a binomial share.
        assert 1 - len(fate.index) / count == pytest.approx(span.what.loss, abs=5 * 0.5 / count**0.5)
        assert impairer.quiet(span.start_s - 0.001)
        assert impairer.quiet(span.end_s + 0.001)


def test_exponential_bursts_have_the_means_that_were_asked_for():
    schedule = parse_schedule("loss(0.001),ge_time(burst=50ms,gap=1s,bad=0.8),links(h1),seed(3)")
    spans = list(islice(schedule.spans(), 4000))
    assert spans == list(islice(schedule.spans(), 4000)), "the same seed gives the same spans"
    lengths = [span.end_s - span.start_s for span in spans]
    gaps = [after.start_s - before.end_s for before, after in pairwise(spans)]
    assert sum(lengths) / len(lengths) == pytest.approx(0.05, rel=0.08)  # five standard errors
    assert sum(gaps) / len(gaps) == pytest.approx(1.0, rel=0.08)
    assert spans[0].what == Conditions((Loss(0.8),), ("h1",))
    assert schedule.base == Conditions((Loss(0.001),), ("h1",))
    assert schedule.share == pytest.approx(0.05 / 1.05)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bursts(loss=0.8,length=1ms,every=1s)", "too short for a schedule"),
        ("bursts(loss=0.8,length=2s,every=1s)", "column 1: bursts: length=2s is above every=1s"),
        ("bursts(0.8,100ms,1s),ge_time(50ms,1s)", "exclude each other"),
    ],
)
def test_schedules_that_cannot_be_kept_are_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_schedule(text)


def test_lists_of_spans_must_not_overlap():
    loss = parse_conditions("loss(0.5)")
    assert len(list(Schedule.of([(0.0, 1.0, loss), (1.0, 2.0, loss)]).spans())) == 2
    for spans in ([(0.0, 1.0, loss), (0.5, 2.0, loss)], [(1.0, 1.0, loss)]):
        with pytest.raises(ConfigError, match="overlaps the one before"):
            Schedule.of(spans)


class FakeNet:
    """Records what is applied, and when."""

    def __init__(self):
        self.applied = []

    def apply(self, conditions):
        self.applied.append((time.monotonic(), conditions.loss))


def test_a_schedule_is_played_in_order_and_recorded():
    net = FakeNet()
    record: list[Applied] = []
    schedule = Schedule.of(
        [(0.02, 0.05, parse_conditions("loss(0.5)")), (0.06, 0.08, parse_conditions("loss(0.7)"))]
    )
    assert schedule.run(net, threading.Event(), record) is record
    assert [loss for _, loss in net.applied] == [0.0, 0.5, 0.0, 0.7, 0.0, 0.0]
    origin = net.applied[0][0]
    assert [str(parse_conditions("loss(0.5)")), str(parse_conditions("loss(0.7)"))] == [
        a.what for a in record
    ]
    for applied, (start, end) in zip(record, ((0.02, 0.05), (0.06, 0.08)), strict=True):
        assert origin + start <= applied.start_s <= applied.full_s <= applied.clear_s <= applied.end_s
        assert applied.clear_s >= origin + end


def test_counters_are_read_within_a_span_and_between_two():
    """A network that passes a packet at each reading and each change: who reads when is in the counts."""
    net, read = FakeNet(), []

    def count():
        read.append([loss for _, loss in net.applied][-1])
        time.sleep(0.002)
        return Counters({"h0_down": LinkCounters(len(read))}, frozenset(("h0_down",)))

    spans = [(0.02, 0.05, parse_conditions("loss(0.5)")), (0.06, 0.08, parse_conditions("loss(0.7)"))]
    schedule = Schedule.of(spans, parse_conditions("loss(0.1)"))
    record = schedule.run(net, threading.Event(), count=count)
    assert read == [0.1, 0.5, 0.5, 0.7, 0.7]
    assert [a.inside and a.inside.offered for a in record] == [1, 1]
    assert [a.before for a in record] == [None, None]
    assert [loss for _, loss in net.applied] == [0.1, 0.5, 0.1, 0.7, 0.1, 0.1]
    read.clear()
    net.applied.clear()
    record = schedule.run(net, threading.Event(), count=count, gaps=True)
    assert read == [0.1, 0.1, 0.5, 0.5, 0.1, 0.1, 0.7, 0.7, 0.1]
    assert [a.inside and a.inside.offered for a in record] == [1, 1]
    assert [a.before and a.before.offered for a in record] == [1, 1]
    for applied, span in zip(record, spans, strict=True):
        assert applied.clear_s - net.applied[0][0] >= span[1], "the reading cuts nothing off"


def test_a_span_is_not_made_longer_to_be_counted():
    """A reading takes as long as a span: one in some is counted, the others are not read at all."""
    read: list[float] = []

    def count():
        read.append(time.monotonic())
        time.sleep(0.03)
        return Counters()

    spans = [(0.1 * k, 0.1 * k + 0.03, parse_conditions("loss(0.5)")) for k in range(1, 9)]
    record = Schedule.of(spans).run(FakeNet(), threading.Event(), count=count)
    counted = [applied.inside is not None for applied in record]
    assert not counted[0] and any(counted)
    assert len(read) == 1 + 2 * sum(counted) < len(spans)


def test_a_schedule_that_is_stopped_lifts_what_it_did():
    net, stop = FakeNet(), threading.Event()
    schedule = parse_schedule("bursts(loss=0.8,length=10s,every=20s)")
    thread = threading.Thread(target=schedule.run, args=(net, stop))
    thread.start()
    while len(net.applied) < 2:
        time.sleep(0.001)
    stop.set()
    thread.join(5)
    assert not thread.is_alive()
    assert [loss for _, loss in net.applied][:2] == [0.0, 0.8]
    assert net.applied[-1][1] == 0.0


def test_uniform_loss_is_a_rule_with_its_counter():
    text = nft.loss_ruleset(Role.SWITCH, {DOWN: parse_conditions("loss(1%)"), UP: Conditions()})
    rules = [line for line in text.splitlines() if line.startswith("add rule")]
    assert rules == [
        "add rule bridge dblp at_h0_down counter name seen_h0_down",
        "add rule bridge dblp at_h0_down numgen random mod 100000000 < 1000000 counter name model_h0_down drop",
        "add rule bridge dblp at_h0_up counter name seen_h0_up",
    ]


def test_a_router_loses_in_its_own_family():
    assert "add table ip dblp" in nft.base_ruleset(Role.ROUTER, [DOWN])
    assert "ether type ip" in nft.base_ruleset(Role.SWITCH, [DOWN])


def test_certain_loss_needs_no_draw_and_no_loss_no_rule():
    text = nft.loss_ruleset(Role.SWITCH, {UP: parse_conditions("loss(1)"), DOWN: parse_conditions("loss(0)")})
    assert "at_h0_up counter name model_h0_up drop" in text
    assert "numgen" not in text


def test_counters_are_read_from_nfts_own_json():
    document = {
        "nftables": [
            {"metainfo": {"version": "1.0.6"}},
            {
                "counter": {
                    "family": "bridge",
                    "name": "seen_h0_down",
                    "table": "dblp",
                    "packets": 7,
                    "bytes": 700,
                }
            },
            {
                "counter": {
                    "family": "bridge",
                    "name": "seen_h0_down",
                    "table": "other",
                    "packets": 9,
                    "bytes": 1,
                }
            },
        ]
    }
    assert nft.read_counters(document) == {"seen_h0_down": 7}


def test_netem_is_told_all_values_and_a_limit_that_holds_the_delay():
    text, table = shaping.netem_text(parse_conditions("loss(1%),delay(30ms)"), 0.0, 1e9, loses=True)
    assert text == (
        "netem limit 11986 delay 30000us 0us reorder 0% loss 1.000000% duplicate 0.000000% corrupt 0.000000%"
    )
    assert table == ""
    assert shaping.limit_packets(1e9, 0.03) >= 1e9 / 8 * 0.03 / 1500
    assert shaping.limit_packets(0.0, 0.0) == 1000
    text, table = shaping.netem_text(
        parse_conditions("ge(0.01,0.3,bad=0.9,good=0.001),jitter(1ms,dist=normal)"), 0.002, 0.0, loses=True
    )
    assert "loss gemodel 1.000000% 30.000000% 90.000000% 0.100000%" in text
    assert "delay 2000us 1000us distribution normal" in text
    assert table == "normal"
    text, _ = shaping.netem_text(parse_conditions("reorder(0.1,by=2ms)"), 0.0, 0.0, loses=False)
    assert "delay 2000us 0us reorder 90.000000% gap 1" in text
    assert "loss" not in text


def test_a_slot_is_netems_and_no_change_takes_it_back():
    text, fixed = shaping.netem_text(parse_conditions("slot(2ms,max=5ms)"), 0.0, 1e9, loses=True)
    assert text.endswith(" slot 2000us 5000us") and fixed == "slot 2000us 5000us"
    assert text.startswith(f"netem limit {shaping.limit_packets(1e9, 0.005)} ")
    text, fixed = shaping.netem_text(parse_conditions("slot(2ms)"), 0.0, 0.0, loses=True)
    assert fixed == "slot 2000us 2000us"
    assert shaping.Stack(text, "", fixed).shape != shaping.Stack(text, "", "").shape


def test_drops_of_the_queue_are_told_from_those_of_the_model():
    document = [
        {"kind": "netem", "dev": "ph0", "packets": 73, "drops": 20, "qlen": 7},
        {"kind": "tbf", "dev": "ph0", "packets": 0, "drops": 5},
        {"kind": "tbf", "dev": "core", "packets": 9, "drops": 3},
        {"kind": "noqueue", "dev": "lo", "packets": 1, "drops": 0},
    ]
    counts = shaping.read_counts(document)
    assert counts["ph0"] == shaping.QdiscCounts(80, 15, 5)
    assert counts["core"] == shaping.QdiscCounts(9, 0, 3)
    assert "lo" not in counts


def test_a_stack_is_written_from_the_root_down():
    stack = shaping.Stack("netem limit 1000", shaping.tbf_text(1e9, 65536))
    assert stack.lines("ph0", "add") == [
        "qdisc add dev ph0 root handle 1: netem limit 1000",
        "qdisc add dev ph0 parent 1:1 handle 10: tbf rate 1000000000bit burst 31250 limit 65536",
    ]
    assert shaping.Stack("", "tbf x").lines("ph0", "change") == ["qdisc change dev ph0 root handle 10: tbf x"]
    assert shaping.tbf_text(0.0, 1) == ""


def test_counters_subtract_and_add_up():
    before = Counters(
        {"h0_down": LinkCounters(10, 1, 0), "h0_up": LinkCounters(5, 0, 0)}, frozenset({"h0_down"})
    )
    after = Counters(
        {"h0_down": LinkCounters(100, 11, 4), "h0_up": LinkCounters(55, 5, 0)}, frozenset({"h0_down"})
    )
    spent = after - before
    assert (spent.forwarded, spent.dropped_by_model, spent.dropped_by_queue) == (90, 15, 4)
    assert spent.offered == 109
    assert spent.loss == pytest.approx(15 / 109)
    assert spent.link("h0") == LinkCounters(140, 15, 4)
    assert spent.link("h0", "down") == LinkCounters(90, 10, 4)
    assert spent.link("h0", "up") == LinkCounters(50, 5, 0)
    assert spent.link("h1", "up") == LinkCounters()


def test_a_sender_in_a_long_pause_ends_when_it_is_told_to():
    command = [
        sys.executable,
        "-m",
        "dblp.sim.lab.traffic",
        "127.0.0.1",
        "traffic(rate=1mbit,on=1ms,off=60s)",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as sender:
        assert sender.stdout is not None
        assert sender.stdout.readline() == b"sending\n"
        sender.terminate()
        said, _ = sender.communicate(timeout=30)  # the pause would be a minute
    assert sender.returncode == 0
    assert json.loads(said).keys() == {"sent"}


def test_traffic_is_what_it_writes_and_its_spells_have_their_means():
    traffic = parse_traffic("traffic(rate=900mbit,on=5ms,off=15ms)")
    assert parse_traffic(str(traffic)) == traffic == Traffic(9e8, 0.005, 0.015)
    assert traffic.mean_bps == pytest.approx(2.25e8)
    on, off = zip(*islice(spells(traffic, seed=1), 4000), strict=True)
    assert sum(on) / len(on) == pytest.approx(0.005, rel=0.08)
    assert sum(off) / len(off) == pytest.approx(0.015, rel=0.08)
    with pytest.raises(ConfigError, match="traffic, column 1: expected traffic"):
        parse_traffic("noise(1mbit)")
    with pytest.raises(ConfigError, match="column 24: expected the end"):
        parse_traffic("traffic(rate=900mbit)  x")


def test_delay_is_kept_beside_a_burst():
    conditions = parse_conditions("delay(5ms),loss(0.1)").with_loss(0.8)
    assert conditions.get(Delay) == Delay(0.005)
    assert conditions.loss == 0.8
