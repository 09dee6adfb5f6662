"""Experiments and arms: what a person writes is read once, and every fault is named with its place."""

from __future__ import annotations

import json

import pytest

from dblp.cli.main import run as run_command
from dblp.errors import ConfigError
from dblp.sim.lab.arms import parse_arm
from dblp.sim.lab.experiment import from_table, load_experiment, shipped
from dblp.transport.policy import Stop

TABLE = {"title": "t", "arms": ["gloo-cubic", "default"], "topology": {"kind": "star", "hosts": 4}}

ISSUE = {
    "clean", "loss-0.1", "loss-1", "loss-5", "gemodel", "bursts", "bursts-short", "dblp", "tail-1.5", "tail-3",
    "slow-rank", "grey-link", "wan", "incast", "train-bursts",
}  # fmt: skip


def test_all_experiments_ship_and_load():
    assert set(shipped()) == ISSUE
    for name in shipped():
        experiment = load_experiment(name)
        assert experiment.name == name and experiment.title and experiment.about
        assert "gloo-cubic" in [arm.name for arm in experiment.arms]
        assert any(arm.preset is not None for arm in experiment.arms)
        json.dumps(experiment.record(), allow_nan=False)


@pytest.mark.parametrize(
    ("name", "share"),
    [("clean", 0.0), ("loss-0.1", 0.001), ("loss-1", 0.01), ("loss-5", 0.05), ("gemodel", 0.0323)],
)
def test_the_losses_are_those_of_the_names(name, share):
    assert load_experiment(name).schedule.base.loss == pytest.approx(share, abs=1e-4)


def test_a_file_says_everything(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        title = "Mine"
        impair = "loss(0.02)"
        sizes = ["1M", 4096]
        arms = ["gloo-bbr", "bounded(budget=0.2,stop=eager)"]
        rounds = 7
        block = 2
        seconds = "1500ms"
        timeout = "1min"
        algorithm = "ring"
        topology = "star"
        [slow]
        rank = 3
        by = "5ms"
        """
    )
    experiment = load_experiment(path)
    assert (experiment.name, experiment.sizes, experiment.seconds) == ("mine", (2**20, 4096), 1.5)
    assert (experiment.timeout_s, experiment.algorithm) == (60.0, "ring")
    assert experiment.slow is not None and (experiment.slow.rank, experiment.slow.by_s) == (3, 0.005)
    assert experiment.topology.hosts == 4 and load_experiment(str(path)) == experiment


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arm": []}, "no field 'arm': known are topology"),
        ({"arm": []}, "did you mean 'arms'?"),
        ({"arms": ["gloo-foo"]}, "arms: arm, column 1: 'foo' is no congestion control of TCP"),
        ({"arms": ["gloo-cubik"]}, "did you mean 'cubic'?"),
        ({"arms": ["defualt"]}, "did you mean 'default'?"),
        (
            {"impair": "loss(0.1),links(h9)"},
            "impair: links(h9): no link 'h9' in this star: known are h0, h1, h2, h3",
        ),
        ({"impair": "loss(0.1),links(h0+h11)"}, "did you mean 'h1'?"),
        ({"impair": "rate(1bit)"}, "impair: rate: 1 bit/s will not do: 8kbit at least, at which a packet"),
        ({"impair": "rate(1gbit,queue=8G)"}, "a queue of 1073741824 bytes fit"),
        ({"impair": "delay(2min)"}, "a packet can be 60 s late at most"),
        ({"topology": {"kind": "star", "hosts": 4, "rate": "1bit"}}, "topology: rate: 1 bit/s will not do"),
        ({"topology": {"kind": "star", "hosts": 4, "rte": "1bit"}}, "did you mean 'rate'?"),
        ({"traffic": "traffic(rate=1bit)"}, "traffic: traffic, column 1: rate: 1 bit/s will not do"),
        ({"title": None}, "title: a text is expected"),
        ({"arms": "default"}, "arms: a list is expected"),
        ({"arms": []}, "arms: one or more are needed"),
        ({"arms": ["default", "default"]}, "arms: default stands twice"),
        ({"arms": ["gloo-cubic", "nosuch"]}, "arms: arm, column 1: 'nosuch' is none: known are gloo-cubic"),
        ({"impair": "loss(2)"}, "schedule, column 6"),
        ({"impair": "loss(0.1"}, "schedule, column 9"),
        ({"sizes": ["3x"]}, "sizes: '3x' is not a size"),
        ({"sizes": [6]}, "each a multiple of 4 bytes"),
        ({"rounds": 0}, "rounds=0: needs a number of at least 1"),
        ({"rounds": 1.5}, "rounds: a whole number is expected"),
        ({"block": True}, "block: a whole number is expected"),
        ({"seconds": []}, "seconds: a number with a unit"),
        ({"topology": 4}, "topology: a table is expected"),
        ({"topology": {"kind": "star"}}, "topology: lacks hosts"),
        ({"topology": {"kind": "star", "hosts": 1}}, "hosts=1: a rank a host"),
        ({"topology": {"kind": "ring", "hosts": 2}}, "kind='ring'"),
        ({"seconds": float("nan")}, "seconds: 'nan' is not a time"),
        ({"seconds": float("inf")}, "seconds: 'inf' is not a time"),
        ({"slow": {"rank": 4, "by": "1ms"}}, "slow: rank=4: there are ranks 0 to 3"),
        ({"slow": {"rank": 1}}, "slow: lacks by"),
        ({"slow": {"rank": 1, "by": "1ms", "to": 2}}, "slow: no field 'to': known are rank, by"),
        ({"slow": 3}, "slow: a table is expected"),
        ({"train": {"seeds": ["x"]}}, "train: seeds: a whole number is expected"),
        ({"algorithm": "nosuch"}, "arms: default by algorithm nosuch: "),
        ({"algorithm": "ps(servers=9)"}, "arms: default by algorithm ps(servers=9): servers=(9,)"),
        ({"traffic": "traffic(rate=1gbit)"}, "traffic: the topology has no cross hosts"),
    ],
)
def test_faults_are_named(changes, says):
    with pytest.raises(ConfigError) as caught:
        from_table({**TABLE, **changes}, "mine.toml", "mine")
    assert str(caught.value).startswith("mine.toml: ") and says in str(caught.value)


@pytest.mark.parametrize("lacking", ["title", "arms", "topology"])
def test_what_lacks_is_named(lacking):
    table = {key: value for key, value in TABLE.items() if key != lacking}
    with pytest.raises(ConfigError, match=f"mine.toml: lacks {lacking}"):
        from_table(table, "mine.toml", "mine")


@pytest.mark.parametrize(
    ("train", "says"),
    [
        (
            'model = "resnt"',
            "train: model='resnt': known are mlp, cnn, resnet, transformer; did you mean 'resnet'?",
        ),
        (
            'data = "fashion_mnist"',
            "train: data='fashion_mnist': known are digits, fashion-mnist, text; did you mean 'fashion-mnist'?",
        ),
        ('data = "text"', "train: model='cnn' cannot read data='text'; its models: transformer"),
        ("batch = 63", "train: batch=63: samples a step over all ranks, a multiple of hosts=4"),
        ("epochs = -1", "train: epochs=-1"),
        ("seeds = []", "train: seeds=[]: one or more are needed"),
    ],
)
def test_a_training_that_cannot_begin_is_refused_with_the_file(train, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dblp.sim.lab.run.run_experiment", None)  # to call it would raise TypeError
    path = tmp_path / "mine.toml"
    path.write_text(f'title = "t"\narms = ["default"]\ntopology = "star"\n[train]\n{train}\n')
    assert run_command(["lab", "run", str(path)]) == 2
    assert f"{path}: {says}" in capsys.readouterr().err


def test_what_the_ranks_hold():
    """4 ranks: gloo has a pattern and a buffer, default what it carries too; making a tensor takes two arrays of int64."""
    from dblp.cli.lab.needs import held_bytes

    made = from_table({**TABLE, "sizes": [400, 4000]}, "made", "made")
    assert held_bytes(made) == 4 * ((2 + 3) * 4400 + 2 * 4000)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "bad.toml").write_text("title = \n")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for source, says in (
        (tmp_path / "bad.toml", "not TOML"),
        (tmp_path / "bytes.toml", "cannot be read"),
        (tmp_path / "absent.toml", "cannot be read"),
        ("nosuch", "neither a .toml file nor one that ships"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_experiment(source)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["run", "clean", "--sizes", ""], "size"),
        (["run", "clean", "--arms", ""], "arms: one or more are needed"),
        (["run", "clean", "--arms", ";"], "arms: one or more are needed"),
        (["run", "clean", "--seconds", "nan"], "seconds=nan"),
        (["run", "clean", "--seconds", "20q"], "--seconds: '20q' is not a time"),
        (["run", "clean", "--seconds", "0"], "seconds=0.0: needs a number of at least 0.01"),
        (["run", "clean", "--rounds", "0"], "rounds=0"),
        (["run", "clean", "--hosts", "0"], "hosts=0"),
        (["run", "clean", "--rate", "fast"], "--rate: 'fast' is not a rate"),
        (["run", "clean", "--rate", "1kbit"], "8kbit at least"),
        (["run", "clean", "--arms", "gloo-foo"], "--arms: arm, column 1: 'foo' is no congestion control"),
        (["run", "clean", "--capture", "FOLDER"], "is a folder; name a file"),
        (["run", "clean", "--capture", "x.pcap", "--capture-host", "4"], "there are hosts 0 to 3"),
        (["run", "train-bursts", "--epochs", "0"], "--epochs 0"),
        (
            ["run", "train-bursts", "--data", "text"],
            "with these options: train: model='cnn' cannot read data='text'",
        ),
        (["run", "train-bursts", "--data", "fashion-mnist", "--data-dir", "FOLDER"], "[.gz]: no such file"),
        (["run", "claen"], "did you mean 'clean'?"),
        (["run", "clean", "--seconds", "inf"], "seconds=inf"),
        (["run", "clean", "--json", "FOLDER"], "is a folder; name a file"),
        (["run", "clean", "--picture", "FOLDER"], "is a folder; name a file"),
        (["capture", "clean", "x.pcap", "--arm", "gloo-cubic"], "gloo's arms send TCP"),
    ],
)
def test_the_command_refuses_before_anything_is_built(options, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dblp.sim.lab.run.run_experiment", None)  # to call it would raise TypeError
    arguments = [str(tmp_path) if option == "FOLDER" else option for option in options]
    assert run_command(["lab", *arguments]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_arms():
    assert parse_arm("gloo-cubic").congestion == "cubic" and not parse_arm("gloo-cubic").lossy
    assert parse_arm("gloo-bbr").preset is None
    exact = parse_arm("dblp-exact").preset
    assert exact is not None and not exact.policy.lossy
    leg = parse_arm("default(leg=40%)")
    assert leg.name == "default(leg=40%)" and leg.lossy and leg.preset is not None
    assert leg.preset.policy.gather_leg_budget == pytest.approx(0.4)
    assert leg.preset.policy.reduce_leg_budget == pytest.approx(0.4)
    bounded = parse_arm("bounded(budget=0.1, stop=eager)").preset
    assert bounded is not None and (bounded.policy.budget, bounded.policy.stop) == (0.1, Stop.EAGER)
    tolerant = parse_arm("dblp(phase=tolerant)").preset
    assert tolerant is not None and tolerant.policy.gather_leg_budget == pytest.approx(0.408)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "column 1: expected the name of an arm"),
        ("gloo-", "takes TCP's congestion control in its name"),
        ("gloo-cubic(x=1)", "no settings"),
        ("default(leg=x)", "leg=x: a number is expected"),
        ("default(log=1)", "has no setting 'log'"),
        ("default(leg=2)", "leg=2.0"),
        ("default(leg=0.1,leg=0.2)", "column 17: leg is given twice"),
        ("default(leg 0.1)", "column 13: expected '='"),
        ("default(leg=0.1) x", "column 18: expected the end"),
        ("default(leg=0.1", "column 16: expected"),
        ("bounded", "bounded lacks budget"),
        ("bounded(share=0.1)", "bounded has no 'share'"),
        ("default(phase=tolerant)", "default knows critical only"),
        ("dblp(phase=third)", "dblp knows critical or tolerant"),
    ],
)
def test_faults_in_arms(text, says):
    with pytest.raises(ConfigError) as caught:
        parse_arm(text)
    assert says in str(caught.value)
