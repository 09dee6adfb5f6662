"""Experiments on the real kernel, by the command: short runs, a loss that did not happen, Ctrl-C, no root. Root only."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dblp.cli.main import run as dblp_here
from dblp.sim.lab import namespaces, tools
from dblp.sim.lab import run as run_module
from dblp.sim.lab.arms import parse_arm
from dblp.sim.lab.experiment import load_experiment, shipped
from dblp.sim.lab.network import LabNetwork
from dblp.sim.lab.ranks import RankError
from dblp.sim.lab.run import run_experiment
from tests.lab.datagrams import needs_lab, needs_loss

pytestmark = [pytest.mark.lab, pytest.mark.processes]
COMMAND = [sys.executable, "-m", "dblp.cli.main", "lab"]
RUN_SECONDS = 280
SHORT = ["--hosts", "2", "--sizes", "256K", "--rounds", "5", "--block", "3"]


def dblp(*arguments):
    """Run the command; exit code, output, error output and the process id that it had."""
    command = [*COMMAND, *map(str, arguments)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        stdout, stderr = child.communicate(timeout=RUN_SECONDS)
    finally:
        child.kill()
    return SimpleNamespace(returncode=child.returncode, stdout=stdout, stderr=stderr, pid=child.pid)


def left_behind(pid):
    return [name for name in namespaces.names() if namespaces.owner_of(name) == pid]


def rounds_of(content):
    return {entry["arm"]: entry for entry in content["rounds"]}


class Quiet:
    """Hears a run and says nothing."""

    def stage(self, text):
        pass

    def means(self, means):
        pass

    def block(self, arm, nbytes, done, rounds):
        pass

    def event(self, rank, event):
        pass


@needs_lab
def test_a_clean_run(tmp_path):
    """All arms do their rounds in turn, exactly; JSON, report and picture are written; nothing is left behind."""
    figures, page, picture = tmp_path / "c.json", tmp_path / "c.html", tmp_path / "c.png"
    arms = ["gloo-cubic", "dblp-exact", "default(leg=0.4)"]
    done = dblp(
        "run", "clean", *SHORT, "--arms", "; ".join(arms), "--json", figures, "--report", page, "--picture", picture
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = json.loads(figures.read_text())
    assert (content["command"], content["failed"]) == ("lab run", None)
    assert [(r["arm"], r["rounds"], r["bytes"], r["ranks"]) for r in content["records"]] == [
        (arm, 5, 2**18, 2) for arm in arms
    ]
    for record in content["records"]:
        assert (record["offered_loss"], record["missing_share"], record["burst_p50_s"]) == (0.0, 0.0, None)
        assert 0 < record["p50_s"] <= record["p99_s"] <= record["wall_s"] and record["cpu_s_per_gb"] > 0
        assert record["packets"] > 5 * 2**18 / 1500, "each byte crosses the network at least once"
    rounds = rounds_of(content)
    firsts = [min(rounds[arm]["start_s"]) for arm in arms]
    lasts = [max(rounds[arm]["start_s"]) for arm in arms]
    assert max(firsts) < min(lasts), "blocks of the arms take turns"
    assert "Results" in page.read_text() and picture.read_bytes().startswith(b"\x89PNG")
    assert not left_behind(done.pid)


@needs_loss
@pytest.mark.skipif(tools.find("tcpdump") is None, reason="no tcpdump")
def test_a_run_with_loss_and_its_capture(tmp_path, capsys):
    """What the counters dropped is what was asked; bounded rounds miss some of it; the capture tells rounds and repairs."""
    figures, pcap, look = tmp_path / "l.json", tmp_path / "l.pcap", tmp_path / "p.json"
    arms = "dblp-exact; bounded(budget=0.2)"
    options = ["--hosts", "2", "--sizes", "256K", "--rounds", "6", "--block", "3", "--arms", arms]
    done = dblp("run", "loss-5", *options, "--json", figures, "--capture", pcap, "--capture-host", 1)
    assert done.returncode == 0, done.stderr
    exact, bounded = json.loads(figures.read_text())["records"]
    for record in (exact, bounded):
        assert 0.02 < record["offered_loss"] < 0.08
    assert (exact["missing_share"], exact["repaired_share"] > 0.02) == (0.0, True)
    assert 0 < bounded["missing_share"] < 0.2
    assert dblp_here(["pcap", str(pcap), "--json", str(look)]) == 0
    seen = json.loads(look.read_text())
    assert seen["capture"]["faults"] == {} and len(seen["records"]) >= 2 * 6
    assert sum(record["missing"] for record in seen["records"]) > 0
    assert sum(record["repairs"] for record in seen["records"]) > 0
    assert {message["receiver"] for message in seen["messages"]} == {0, 1}
    capsys.readouterr()


@needs_loss
@pytest.mark.skipif(tools.find("tcpdump") is None, reason="no tcpdump")
def test_a_capture_succeeds_whether_bursts_came_or_not(tmp_path):
    """Some rounds of one arm may pass between two bursts; that is no fault of a capture."""
    pcap = tmp_path / "round.pcap"
    options = ["--arm", "default(leg=0.4)", "--rounds", 2, "--sizes", "256K"]
    done = dblp("capture", "bursts", pcap, *options)
    assert done.returncode == 0, done.stderr
    assert f"look into it with: dblp pcap {pcap}" in done.stdout
    assert dblp_here(["pcap", str(pcap), "--json", str(tmp_path / "p.json")]) == 0
    assert len(json.loads((tmp_path / "p.json").read_text())["records"]) >= 2
    assert not left_behind(done.pid)


@needs_loss
@pytest.mark.skipif(tools.find("tcpdump") is None, reason="no tcpdump")
def test_a_capture_without_the_loss_is_one_with_a_note(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(LabNetwork, "apply", lambda self, conditions: None)
    options = ["--rounds", "1", "--sizes", "256K"]
    assert dblp_here(["lab", "capture", "loss-5", str(tmp_path / "round.pcap"), *options]) == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "note: as a measurement this would have failed: default: a loss of 5.000% was asked for" in said


@needs_lab
def test_a_run_says_first_how_it_is_done():
    done = dblp("run", "clean", *SHORT, "--arms", "dblp-exact")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^loss by (tc netem|nftables|nothing), rates by ", done.stdout, re.MULTILINE)


@needs_lab
@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        (
            RankError("rank 1 of 2 ended: exit code 3"),
            1,
            "it ended before its end: rank 1 of 2 ended: exit code 3",
        ),
        (KeyboardInterrupt(), 130, "it was interrupted before its end"),
    ],
)
def test_a_run_that_fails_midway_keeps_what_was_measured(fault, code, says, tmp_path, monkeypatch, capsys):
    real, calls = run_module._block, []

    def block(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise fault
        return real(*arguments)

    monkeypatch.setattr(run_module, "_block", block)
    figures, page = tmp_path / "e.json", tmp_path / "e.html"
    options = [*SHORT, "--arms", "gloo-cubic; dblp-exact", "--json", str(figures), "--report", str(page)]
    assert dblp_here(["lab", "run", "clean", *options]) == code
    content = json.loads(figures.read_text())
    assert content["failed"] == says and says in page.read_text()
    assert [(record["arm"], record["rounds"]) for record in content["records"]] == [
        ("gloo-cubic", 3),
        ("dblp-exact", 3),
    ]
    assert "what was measured until then" in capsys.readouterr().out
    assert not left_behind(os.getpid())


def test_each_connection_of_an_arm_must_have_its_congestion_control():
    arm = parse_arm("gloo-cubic")
    before = {("10.81.0.1:40", "10.81.0.2:50"): ["bbr", "rto:204"]}
    cubic = {("10.81.0.1:41", "10.81.0.2:51"): ["ts", "cubic", "rto:204"]}
    reno = {("10.81.0.1:42", "10.81.0.2:52"): ["ts", "reno", "rto:204"]}
    run_module.check_congestion(arm, before, {**before, **cubic})
    with pytest.raises(
        tools.LabError, match=r"1 of its 2 connections do not use cubic, as that of 10\.81\.0\.1:42"
    ):
        run_module.check_congestion(arm, before, {**before, **cubic, **reno})
    with pytest.raises(tools.LabError, match="made no connection"):
        run_module.check_congestion(arm, {**before, **cubic}, {**before, **cubic})


@needs_loss
def test_a_loss_that_did_not_happen_fails_the_run(tmp_path, monkeypatch, capsys):
    """The rule is not there: the counters say so, and so does the command."""
    monkeypatch.setattr(LabNetwork, "apply", lambda self, conditions: None)
    figures = tmp_path / "f.json"
    options = ["--hosts", "2", "--sizes", "1M", "--rounds", "2", "--block", "2", "--arms", "dblp-exact"]
    assert dblp_here(["lab", "run", "loss-5", *options, "--json", str(figures)]) == 1
    said = capsys.readouterr().err
    assert "the run failed: dblp-exact: a loss of 5.000% was asked for, and 0 of" in said
    assert json.loads(figures.read_text())["failed"] in said.replace("\n", " ")
    assert not left_behind(os.getpid())


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(number):
    """Ctrl-C reaches the whole process group of a terminal, SIGTERM the command alone."""
    arguments = [*COMMAND, "run", "clean", *SHORT, "--rounds", "100000", "--arms", "gloo-cubic"]
    child = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert child.stdout is not None
        while "connecting" not in (line := child.stdout.readline()):
            assert line, child.stderr.read() if child.stderr else ""
        assert left_behind(child.pid)
        time.sleep(1.0)
        if number == signal.SIGINT:
            os.killpg(child.pid, number)
        else:
            child.send_signal(number)
        _, said = child.communicate(timeout=RUN_SECONDS)
    finally:
        child.kill()
    assert child.returncode == 128 + number, said
    assert "Traceback" not in said
    if number == signal.SIGTERM:
        assert "ended by SIGTERM; nothing is left running" in said
    assert not left_behind(child.pid)
    assert not _running_in_session(child.pid)


def _running_in_session(session):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(stat.parent.name)
    return found


@needs_lab
@pytest.mark.parametrize("arguments", [["run", "clean"], ["clean"], ["check"]])
def test_without_root_there_is_a_message_and_no_trace(arguments):
    """A root without capabilities is none, and can still read this Python, wherever it is installed."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("no setpriv (util-linux)")
    command = [setpriv, "--bounding-set", "-all", "--inh-caps", "-all", *COMMAND, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_SECONDS)
    assert done.returncode == 77, done.stderr
    assert "the laboratory cannot run here: root" in done.stderr and "Traceback" not in done.stderr


@needs_lab
def test_check_says_how_it_will_be_done(tmp_path):
    done = dblp("check", "--json", tmp_path / "c.json")
    assert done.returncode == 0, done.stderr
    found = {record["what"]: record for record in json.loads((tmp_path / "c.json").read_text())["records"]}
    assert found["loss"]["found"] and found["single datagrams"]["ok"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "nosuch"], "neither a .toml file nor one that ships"),
        (["run", "clean", "--arms", "gloo-cubic; x"], "arm, column 1: 'x' is none"),
        (["run", "clean", "--sizes", "1Q"], "--sizes"),
        (["run", "clean", "--hosts", "1"], "hosts=1"),
        (["run", "clean", "--epochs", "3"], "are for training"),
        (
            ["run", "clean", "--capture", "x.pcap", "--capture-host", "4"],
            "--capture-host 4: there are hosts 0 to 3",
        ),
        (["capture", "clean", "x.pcap", "--host", "4"], "error: --host 4: there are hosts 0 to 3"),
        (["capture", "clean", "x.pcap", "--arm", "x"], "error: --arm: arm, column 1: 'x' is none"),
        (["capture", "clean", "/proc/x.pcap"], "error: FILE"),
    ],
)
def test_wrong_use_is_told_before_anything_is_built(arguments, says, capsys):
    assert dblp_here(["lab", *arguments]) == 2
    assert says in re.sub(r"\s+", " ", capsys.readouterr().err)


def test_experiments_are_listed(tmp_path, capsys):
    assert dblp_here(["lab", "list", "--json", str(tmp_path / "l.json")]) == 0
    records = json.loads((tmp_path / "l.json").read_text())["records"]
    assert [record["name"] for record in records] == list(shipped())
    said = capsys.readouterr().out
    assert all(name in said for name in shipped())


# --- minutes long


@needs_loss
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in shipped() if name not in ("wan", "train-bursts")])
def test_every_shipped_experiment_runs(name):
    """Some blocks of each arm, enough to meet a burst; the loss that it claims happened."""
    experiment = load_experiment(name)
    short = experiment.with_(rounds=80, block=20, sizes=(2**20,), seconds=10.0)
    run = run_experiment(short, Quiet())
    assert not run.failed, run.failed
    assert {block.arm for block in run.blocks} == {arm.name for arm in experiment.arms}


@needs_loss
@pytest.mark.slow
def test_training_under_bursts(tmp_path):
    figures = tmp_path / "t.json"
    done = dblp(
        "run", "train-bursts", "--hosts", 2, "--epochs", 3, "--json", figures, "--report", tmp_path / "t.html"
    )
    assert done.returncode == 0, done.stderr
    for record in json.loads(figures.read_text())["records"]:
        assert 0.2 < record["test_accuracy"] <= 1.0 and record["wall_s"] > 0
        assert record["offered_loss"] > 0
