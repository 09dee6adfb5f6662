"""Descriptions: units, defaults, and what is wrong is refused with the field's full name."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from dblp.errors import ConfigError
from dblp.sim.fabric.experiment import (
    changed,
    experiment_names,
    load_experiment,
    read_experiment,
)
from dblp.sim.fabric.load import scenario
from dblp.sim.fabric.models import make_trace
from dblp.sim.fabric.packet import make_plan, run_packet
from dblp.sim.fabric.topology import make_fabric
from dblp.sim.fabric.traces import buckets, load_trace, trace_names
from dblp.units import picoseconds

STAR = {"topology": {"kind": "star", "hosts": 4}}


def test_units_are_read_by_the_fields_type():
    found = scenario(
        {
            "topology": {"kind": "star", "hosts": 4, "host_link": {"rate": "400gbit", "delay": "500ns"}},
            "switch": {"buffer": "64M"},
            "workload": {"size": 4096},
        }
    )
    assert found.topology.host_link.rate == 400e9
    assert picoseconds(found.topology.host_link.delay) == 500_000
    assert found.switch.buffer == 64 << 20
    assert found.workload.size == 4096


def test_a_model_gives_the_defaults_of_its_transport():
    found = scenario({**STAR, "transport": {"model": "tcp", "min_rto": "10ms"}})
    assert (found.transport.control, found.transport.stop, found.transport.min_rto) == ("reno", "all", 0.01)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"topology.kind": "ring"}, "topology.kind='ring'"),
        ({"topology.hosts": 1}, "topology.hosts=1"),
        ({"topology.hosts": 20_000}, "topology.hosts=20000"),
        (
            {"topology": {"kind": "leaf_spine", "leaves": 1, "spines": 1, "hosts_per_leaf": 1}},
            "topology.hosts_per_leaf=1: hosts of the leaf_spine: 1,",
        ),
        (
            {"topology": {"kind": "leaf_spine", "leaves": 2, "spines": 1025, "hosts_per_leaf": 1}},
            "topology.spines=1025",
        ),
        ({"transport.loss_bound": 0.1, "transport.stop": "all"}, "transport.loss_bound=0.1: stop="),
        ({"transport.model": "dctcp", "transport.loss_bound": 0.1}, "transport.loss_bound=0.1: stop="),
        ({"pull_transport": {"model": "ndp"}}, "switch.trim=False: pull_transport"),
        (
            {"background": {"load": 0.1, "transport": {"model": "ndp"}}},
            "switch.trim=False: background.transport",
        ),
        ({"transport.model": "pfabric"}, "switch.queues=1: transport.priority='remaining'"),
        ({"workload.tail": 2.0}, "workload.tail=2.0"),
        ({"workload.algorithm": "ps", "workload.segment": 1408}, "workload.segment=1408"),
        ({"workload.kind": "incast", "workload.segment": 1408}, "workload.segment=1408"),
        ({"topology.spines": 2}, "topology.spines=2"),
        ({"topology.host_link": {"rate": "fast"}}, "topology.host_link.rate"),
        ({"topology.host_link": {"rate": 0}}, "topology.host_link.rate"),
        ({"topology.host_link": {"delay": "1 furlong"}}, "topology.host_link.delay"),
        ({"topology": {"kind": "leaf_spine", "leaves": 2, "hosts_per_leaf": 2}}, "topology.spines=0"),
        ({"topology": {"kind": "fat_tree", "k": 3, "levels": 2}}, "topology.k=3"),
        ({"topology": {"kind": "fat_tree", "k": 4, "levels": 4}}, "topology.levels=4"),
        ({"topology": {"kind": "dumbbell", "hosts": 5}}, "topology.hosts=5"),
        ({"switch.classes": [{"queue": 1}]}, "switch.classes[0].queue=1"),
        ({"switch.classes": [{"mark_max": "1K"}]}, "switch.classes[0].mark_max"),
        ({"switch.buffer": 0}, "switch.buffer=0"),
        (
            {"switch.buffer": 100},
            "switch.buffer=100: room for a packet of transport is needed, 1500 bytes on the wire",
        ),
        (
            {"switch.buffer": "1500", "pull_transport": {"packet": 1501}},
            "switch.buffer=1500: room for a packet of pull_transport is needed, 1501 bytes",
        ),
        (
            {"switch": {"buffer": 1499, "trim": True}},
            "switch.buffer=1499: room for a packet of transport is needed, 1500 bytes on the wire",
        ),
        (
            {"switch": {"buffer": 2999, "shared": True, "alpha": 0.5}},
            "switch.buffer=2999: room for a packet of transport is needed, 1500 bytes on the wire, in alpha=0.5 of it",
        ),
        ({"switch.alpha": 0.0}, "switch.alpha"),
        ({"transport.model": "quic"}, "transport.model='quic'"),
        ({"transport.loss_bound": 1.0}, "transport.loss_bound"),
        ({"transport.stop": "deadline"}, "transport.deadline"),
        ({"transport.model": "ndp"}, "switch.trim"),
        ({"routing.policy": "magic"}, "routing.policy='magic'"),
        ({"workload.algorithm": "gossip"}, "workload.algorithm"),
        ({"workload.ranks": 5}, "workload.ranks=5"),
        ({"workload.algorithm": "ps", "workload.servers": 4}, "workload.servers=4"),
        ({"failures": [{"link": "h0"}]}, "failures[0].link"),
        ({"failures": [{"link": "h0-switch", "loss": 2.0}]}, "failures[0].loss"),
        ({"failures": [{"link": "h0-switch", "at": 2.0, "until": 1.0}]}, "failures[0].until"),
        ({"failures": {"link": "h0-switch"}}, "failures"),
        ({"workload.rounds": True}, "workload.rounds"),
        ({"workload.lode": 1}, "workload.lode: no such field; did you mean load?"),
        ({"background.load": 1.0}, "background.load"),
        ({"bursts": {"rate_hz": 1.0, "senders": 4}}, "bursts.senders=4"),
    ],
)
def test_what_is_wrong_is_named(changes, field):
    with pytest.raises(ConfigError) as caught:
        scenario(changed(STAR, changes))
    assert str(caught.value).startswith(field), str(caught.value)


def test_a_buffer_of_one_packet_passes_packets():
    """What is refused is what passes none: one byte more does. Trimmed headers have as much room again."""
    trims = {"buffer": 1500, "trim": True, "queues": 2, "classes": [{"queue": 1}]}
    for switch, model in (
        ({"buffer": 1500}, "dblp"),
        (trims, "ndp"),
        ({"buffer": 3000, "shared": True, "alpha": 0.5}, "dblp"),
    ):
        load = {"size": "12K", "algorithm": "direct"}
        table = {**STAR, "switch": switch, "transport": {"model": model}, "workload": load}
        assert run_packet(scenario(table)).ended == "done", switch


def test_a_negative_time_is_called_so():
    with pytest.raises(ConfigError, match="jitter: '-5us' is not a time: it is negative"):
        scenario({**STAR, "jitter": "-5us"})


def test_few_nodes_are_named_once_each():
    with pytest.raises(ConfigError, match=r"nodes are h0, h1, h2, h3, switch$"):
        make_fabric(scenario(STAR).topology).link("h0", "h9")


def test_a_scenario_needs_a_topology():
    with pytest.raises(ConfigError, match="topology is missing"):
        scenario({})


@pytest.mark.parametrize("at", ["0", "1ms"])
@pytest.mark.parametrize("link", ["h0-h1", "leaf9-spine0"])
def test_a_failure_of_a_link_that_is_not_there_is_refused(link, at):
    found = scenario({**STAR, "failures": [{"link": link, "at": at}]})
    with pytest.raises(ConfigError, match=rf"^failures\[0\]\.link='{link}'"):
        make_plan(found, 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ('"failures" = [{link = "h0-h1"}]', r"failures\[0\]\.link='h0-h1'"),
        (
            '"workload.algorithm" = "halving_doubling", "topology.hosts" = 6',
            "workload.algorithm='halving_doubling': 6 ranks are no power of two",
        ),
        ('"workload.algorithm" = "hierarchical", "workload.group" = 3', "workload.group=3: 4 ranks"),
        ('"workload.kind" = "training", "workload.model" = "alexnet"', "workload.model='alexnet'"),
        ('"workload.compute" = "1ms"', "workload.compute"),
    ],
)
def test_what_does_not_fit_is_told_when_the_file_is_read_with_the_arm(changes, says):
    with pytest.raises(ConfigError, match=f"^mini: arm 'spray': {says}"):
        read_experiment("mini", MINI.replace('"routing.policy" = "spray"', changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            '"topology.host_link.rate" = 10',
            "topology.host_link.rate=10: a unit is needed: '10gbit', or '10bit'",
        ),
        ('"topology.host_link.rate" = "10"', "topology.host_link.rate='10': a unit is needed: '10gbit', or"),
        (
            '"topology.host_link" = {delay = 5.5}',
            "topology.host_link.delay=5.5: a unit is needed: '5.5us', or '5.5s'",
        ),
        ('"failures" = [{link = "h0-switch", at = 1}]', "failures[0].at=1: a unit is needed: '1us', or '1s'"),
        ('"background.transport" = {min_rto = 1}', "background.transport.min_rto=1: a unit is needed"),
    ],
)
def test_rates_and_times_without_a_unit_are_refused_in_a_file(changes, says):
    """10 was 10 bit/s. In tables from Python seconds are seconds; 0 is the same in any unit, and bytes are counted."""
    with pytest.raises(ConfigError) as caught:
        read_experiment("mini", MINI.replace('"routing.policy" = "spray"', changes))
    assert str(caught.value).startswith(f"mini: arm 'spray': {says}"), str(caught.value)
    zeros = '"topology.host_link" = {delay = 0}, "failures" = [{link = "h0-switch", at = 0.0}], "workload.size" = 4096'
    assert read_experiment("mini", MINI.replace('"routing.policy" = "spray"', zeros)).cases([0])
    assert scenario({**STAR, "until": 2}).until == 2.0


def test_what_the_exact_engine_has_not_is_told_when_the_file_is_read():
    text = 'engine = "exact"\n' + MINI.replace(
        '"routing.policy" = "spray"', '"transport.stop" = "deadline", "transport.deadline" = "1ms"'
    )
    with pytest.raises(ConfigError, match=r"^mini: arm 'spray': transport\.stop='deadline'"):
        read_experiment("mini", text)


@pytest.mark.parametrize(
    ("table", "hosts", "paths", "hops"),
    [
        ({"kind": "star", "hosts": 4}, 4, 1, 2),
        ({"kind": "dumbbell", "hosts": 6}, 6, 1, 3),
        ({"kind": "leaf_spine", "leaves": 3, "spines": 5, "hosts_per_leaf": 2}, 6, 5, 4),
        ({"kind": "leaf_spine", "leaves": 3, "spines": 5, "hosts_per_leaf": 2, "planes": 2}, 6, 10, 4),
        ({"kind": "fat_tree", "k": 4, "levels": 3}, 16, 4, 6),
        ({"kind": "fat_tree", "k": 4, "levels": 2, "oversubscription": 3}, 24, 2, 4),
    ],
)
def test_all_paths_of_a_topology_lead_there_and_differ(table, hosts, paths, hops):
    fabric = make_fabric(scenario({"topology": table}).topology)
    assert (fabric.hosts, fabric.paths) == (hosts, paths)
    routes = [tuple(fabric.route(0, hosts - 1, path)) for path in range(paths)]
    assert len(set(routes)) == paths
    for route in routes:
        assert len(route) == hops
        assert fabric.sources[route[0]] == 0
        assert fabric.targets[route[-1]] == hosts - 1
        assert (fabric.targets[list(route[:-1])] == fabric.sources[list(route[1:])]).all()


def test_routes_of_many_pairs_are_those_of_each():
    import numpy as np

    fabric = make_fabric(scenario({"topology": {"kind": "fat_tree", "k": 4, "levels": 3}}).topology)
    sources, targets = np.array([0, 0, 5, 15, 3]), np.array([1, 15, 6, 0, 2])
    for path in range(fabric.paths):
        rows = fabric.routes(sources, targets, path).T
        for row, source, target in zip(rows, sources, targets, strict=True):
            assert row[row >= 0].tolist() == fabric.route(int(source), int(target), path)


def test_a_three_level_fat_tree_is_that_of_al_fares():
    fabric = make_fabric(scenario({"topology": {"kind": "fat_tree", "k": 6, "levels": 3}}).topology)
    assert fabric.hosts == 54
    assert len(fabric.names) - 54 == 6 * 6 + 9
    assert len(fabric.sources) == 2 * 3 * 54


@pytest.mark.parametrize("name", experiment_names())
def test_experiments_of_the_package_are_sound(name):
    experiment = load_experiment(name)
    assert experiment.title
    assert experiment.cases([0, 1])
    assert {claim.policy for claim in experiment.claims} <= {arm.policy for arm in experiment.arms}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("tilte = 'x'", "tilte: no such field"),
        ("title = ", "Invalid value"),
        ("[scenario]\n[[arms]]\npolicy = 'a'", "arm 'a': topology is missing"),
        ("[[arms]]\nname = 'a'", r"arms\[0\]"),
        ("engine = 'ns3'\nscenario.topology = {kind = 'star', hosts = 2}", "engine='ns3'"),
        (
            "scenario.topology = {kind = 'star', hosts = 2}\n[[arms]]\npolicy = 'a'\n"
            "[[claims]]\npolicy = 'a'\nagainst = 'b'\nmeasure = 'p99_s'\npaper = 0.1",
            "no arm 'b'",
        ),
    ],
)
def test_a_wrong_experiment_is_refused(text, error):
    with pytest.raises(ConfigError, match=error):
        read_experiment("mine", text)


def test_changes_reach_into_arrays():
    table = {"failures": [{"loss": 0.1}, {"loss": 0.2}]}
    assert changed(table, {"failures.1.loss": 0.5})["failures"] == [{"loss": 0.1}, {"loss": 0.5}]
    assert table["failures"][1] == {"loss": 0.2}


@pytest.mark.parametrize(
    ("model", "parameters"), [("resnet50", 25_557_032), ("vgg16", 138_357_544), ("gpt2", 124_439_808)]
)
def test_traces_have_the_published_numbers_of_parameters(model, parameters):
    trace = load_trace(model)
    assert trace.nbytes == 4 * parameters
    assert trace.compute_s == pytest.approx(make_trace(model)["step_s"])
    assert model in trace_names()


def test_the_traces_of_the_package_are_what_the_command_makes():
    for model in trace_names():
        made = make_trace(model)
        assert [layer["bytes"] for layer in made["layers"]] == [
            layer.nbytes for layer in load_trace(model).layers
        ]


def test_buckets_hold_all_layers_and_fill_from_the_back():
    trace = load_trace("resnet50")
    parts = buckets(trace, 25 << 20)
    assert sum(part.nbytes for part in parts) == trace.nbytes
    assert all(part.nbytes <= 25 << 20 for part in parts)
    assert sum(part.forward_s + part.backward_s for part in parts) == pytest.approx(trace.compute_s)
    assert parts[-1].nbytes > 20 << 20


def test_an_unknown_trace_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="known are gpt2, resnet50, vgg16"):
        load_trace("alexnet")
    broken = tmp_path / "broken.json"
    broken.write_text('{"layers": []}')
    with pytest.raises(ConfigError, match="layers with name"):
        load_trace(str(broken))


MINI = """
[scenario]
topology = {kind = "star", hosts = 4}
[[arms]]
policy = "ecmp"
[[arms]]
policy = "spray"
set = {"routing.policy" = "spray"}
[axes]
"workload.size" = ["1M", "4M"]
"""


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("", "title = 3", "title=3: a text is expected"),
        ("", 'seeds = "x"', "seeds='x': a number of seeds is expected"),
        ("", "seeds = 0", "seeds=0: one or more are needed"),
        ("", "seeds = true", "seeds=True"),
        (
            "",
            "titel = 't'",
            "titel: no such field of an experiment; known are title, .*; did you mean 'title'",
        ),
        ("[scenario]", "[scenaro]", "scenaro: no such field of an experiment"),
        ('[axes]\n"workload.size" = ["1M", "4M"]', "[[axes]]", "axes=.*: a table is expected"),
        ('["1M", "4M"]', "[]", "axes: workload.size=.*: an array of one value or more"),
        ('["1M", "4M"]', '"1M"', "axes: workload.size='1M': an array of one value or more"),
        ('"workload.size"', '"topology.kind.x"', "arm 'ecmp': topology.kind.x: no such field"),
        ('{"routing.policy" = "spray"}', "4", r"arms\[1\]: set=4: a table of dotted names"),
        (
            '{"routing.policy" = "spray"}',
            '{"routing.polcy" = "spray"}',
            "arm 'spray': routing.polcy: no such field; did you",
        ),
        ('policy = "spray"\nset', 'policy = "ecmp"\nset', "arms: two have one policy"),
    ],
)
def test_what_is_wrong_in_the_file_itself_is_named(before, after, says, tmp_path):
    path = tmp_path / "mini.toml"
    path.write_text(MINI.replace(before, after, 1) if before else f"{after}\n{MINI}")
    with pytest.raises(ConfigError, match=says) as caught:
        load_experiment(str(path))
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        ({"against": "ecpm"}, "claims: no arm 'ecpm'; arms are ecmp, spray; did you mean 'ecmp'?"),
        (
            {"at": "workload.size=2M"},
            "claims: at='workload.size=2M': no such point; known are workload.size=1M, workload.size=4M",
        ),
    ],
)
def test_claims_are_of_arms_and_points_that_are_there(claim, says):
    values = {"policy": "spray", "against": "ecmp", "measure": "p99_s", "at": "workload.size=4M", **claim}
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    with pytest.raises(ConfigError) as caught:
        read_experiment("mini", "\n".join([MINI, "[[claims]]", *lines, "paper = -0.1"]))
    assert str(caught.value) == f"mini: {says}"


def test_a_name_that_is_near_is_told():
    with pytest.raises(ConfigError, match="did you mean 'ethereal'"):
        load_experiment("etherreal")


MINE = """
from torch import nn

def model():
    head = nn.Linear(8, 8, bias=False)
    tied = nn.Linear(8, 8, bias=False)
    tied.weight = head.weight
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), head, tied)

number = int
"""


def test_any_torch_model_gives_a_trace(tmp_path, monkeypatch, capsys):
    from dblp.cli.main import run

    (tmp_path / "mine_for_a_trace.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    command = ["sim", "trace", "mine_for_a_trace:model", "--output", "mine.json"]
    assert run([*command, "--sample", "3x32x32", "--batch", "4", "--rate", "1e9"]) == 0
    trace = load_trace("mine.json")
    assert [layer.nbytes for layer in trace.layers] == [
        4 * 3 * 8 * 9,
        4 * 2 * 8,
        4 * 64,
        0,
    ]  # the weight is tied
    flops = np.array([2 * 3 * 8 * 9 * 16 * 16, 0, 2 * 64, 2 * 64])
    times = [layer.forward_s + layer.backward_s for layer in trace.layers]
    assert times == pytest.approx(3 * 4 * flops / 1e9)
    for arguments, says in (
        (["--sample", "3x0"], "a shape is needed"),
        (["--sample", "8"], "does not take a sample"),
        ([], "goes with a model MODULE:NAME"),
    ):
        assert run([*command, *arguments]) == 2
        assert says in capsys.readouterr().err
    for name in ("nothing", "number"):
        assert run(["sim", "trace", f"mine_for_a_trace:{name}", "--output", "a.json", "--sample", "8"]) == 2
        assert f"mine_for_a_trace:{name}" in capsys.readouterr().err


def test_the_trace_command_says_what_it_wrote(tmp_path, capsys):
    from dblp.cli.main import run

    path = tmp_path / "mine.json"
    assert run(["sim", "trace", "resnet50", "--output", str(path)]) == 0
    assert f"trace: {path}; 54 layers, 102.2 MB, 100 ms a step" in capsys.readouterr().out
    assert len(load_trace(str(path)).layers) == 54
    for output, says in (
        (tmp_path, "is a folder; name a file"),
        (tmp_path / "a" / "b" / "c.json", "there is no folder"),
    ):
        assert run(["sim", "trace", "resnet50", "--output", str(output)]) == 2
        assert f"--output {output}: " in (said := capsys.readouterr().err) and says in said
    for rate in ("nan", "inf", "-1"):
        assert run(["sim", "trace", "resnet50", "--output", str(path), "--rate", rate]) == 2
