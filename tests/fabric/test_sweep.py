"""Sweeps: records and claims, any number of processes, resumed ones; and the command over them."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dblp.cli.main import run as run_command
from dblp.cli.sim.command import SPREAD, cells, claim_at, headings
from dblp.errors import ConfigError, LocalError
from dblp.sim.fabric import sweep
from dblp.sim.fabric.cluster import run_checked
from dblp.sim.fabric.experiment import Case, read_experiment
from dblp.sim.fabric.reaction import reactions
from dblp.sim.fabric.sweep import CaseResult, claims, records, run_cases

pytestmark = pytest.mark.timeout(600)  # the machine code is made once, minutes on a busy machine

TEXT = """
title = "small"
paper = "nobody"
seeds = 2
[scenario]
topology = {kind = "leaf_spine", leaves = 2, spines = 2, hosts_per_leaf = 2}
workload = {algorithm = "direct", size = "64K"}
[[arms]]
policy = "random"
set = {"routing.policy" = "random"}
[[arms]]
policy = "ethereal"
set = {"routing.policy" = "ethereal"}
[axes]
"workload.size" = ["64K", "128K"]
[[claims]]
policy = "ethereal"
against = "random"
measure = "completion_s"
paper = -0.3
"""
LONG = """
[scenario]
topology = {kind = "star", hosts = 16}
workload = {algorithm = "ring", size = "2000M"}
[[arms]]
policy = "short"
set = {"workload.size" = "1M"}
[[arms]]
policy = "a"
[[arms]]
policy = "b"
set = {"jitter" = "60ns"}
[[arms]]
policy = "c"
set = {"jitter" = "70ns"}
"""
RECORD_KEYS = {
    "experiment",
    "policy",
    "hosts",
    "completion_s",
    "p99_s",
    "max_link_load_ratio",
    "paper",
    "ours",
}


@pytest.fixture
def experiment():
    return read_experiment("small", TEXT)


def figures(results):
    """All that doesn't depend on the machine's speed, in one order."""
    rows = [(r.policy, r.point, r.seed, r.times_s, r.max_load_ratio, dict(r.counts), r.hops) for r in results]
    return sorted(rows, key=lambda row: (row[0], row[1], row[2]))


def fake(case: Case, times, ended="done"):
    return CaseResult(
        key=case.key, policy=case.policy, point=case.point, seed=case.seed, hosts=4, ended=ended, times_s=times,
        max_load_ratio=1.0, missing_share=0.0, counts={}, hops=1, wall_s=1.0, picture={},
    )  # fmt: skip


def test_records_put_seeds_together_and_compare_arms(experiment):
    cases = experiment.cases([0, 1])
    results = [fake(case, (1.0 + case.seed,) if case.policy == "random" else (0.9,)) for case in cases]
    rows = records(experiment, results)
    assert len(rows) == 4
    assert set(rows[0]) >= RECORD_KEYS
    random, ethereal = rows[:2]
    assert (random["completion_s"], random["seeds"], random["paper"]) == (1.5, 2, None)
    assert ethereal["paper"] == -0.3
    assert ethereal["ours"] == pytest.approx(0.9 / 1.5 - 1.0)
    assert claims(experiment, rows)[0]["ours"] == pytest.approx(-0.4)


def test_the_spread_of_the_seeds_means_is_told_where_there_are_several(experiment):
    cases = experiment.cases([0, 1, 2])
    rows = records(experiment, [fake(case, (1.0 + case.seed, 3.0 + case.seed)) for case in cases])
    assert [row["completion_sd_s"] for row in rows] == [1.0] * 4
    assert headings(rows)[:3] == ["hosts", "mean", SPREAD]
    assert cells(rows[0], headings(rows))[:3] == ["4", "3 s", "± 1 s"]
    alone = records(experiment, [fake(case, (1.0, 3.0)) for case in experiment.cases([0])])
    assert [row["completion_sd_s"] for row in alone] == [None] * 4
    assert SPREAD not in headings(alone) and len(cells(alone[0], headings(alone))) == len(headings(alone))
    unended = records(experiment, [fake(c, (math.nan if c.seed else 1.0,)) for c in cases])
    assert unended[0]["completion_sd_s"] is None
    json.dumps(unended, allow_nan=False)


def test_records_of_runs_that_did_not_end_say_so(experiment):
    cases = experiment.cases([0])
    results = [fake(case, (math.nan,), "failed") for case in cases]
    rows = records(experiment, results)
    assert rows[0]["completion_s"] is None
    assert rows[0]["unfinished"] == 1
    assert rows[1]["ours"] is None
    json.dumps(rows, allow_nan=False)


def test_a_claim_is_told_with_the_point_that_it_is_taken_at(experiment):
    cases = experiment.cases([0])
    fast = {"64K": 0.9, "128K": 0.7}
    results = [fake(c, (1.0,) if c.policy == "random" else (fast[c.point[0][1]],)) for c in cases]
    (claim,) = claims(experiment, records(experiment, results))
    assert (claim["best_at"], claim["ours"]) == ("workload.size=128K", pytest.approx(-0.3))
    assert claim_at(claim) == "best: size 128K"


def test_the_papers_figure_is_at_its_point_alone(experiment):
    there = read_experiment("small", TEXT + 'at = "workload.size=128K"\n')
    results = [fake(case, (1.0,)) for case in there.cases([0])]
    rows = [row for row in records(there, results) if row["policy"] == "ethereal"]
    assert [(row["workload.size"], row["paper"]) for row in rows] == [("64K", None), ("128K", -0.3)]


def test_an_arm_that_sets_an_axis_has_its_own_value_in_its_records_and_is_compared():
    own = TEXT.replace(
        '{"routing.policy" = "random"}', '{"routing.policy" = "random", "workload.size" = "32K"}'
    )
    experiment = read_experiment("small", own)
    results = [fake(case, (1.0,) if case.policy == "random" else (0.8,)) for case in experiment.cases([0])]
    rows = records(experiment, results)
    assert [(row["policy"], row["workload.size"]) for row in rows] == [
        ("random", "32K"), ("ethereal", "64K"), ("random", "32K"), ("ethereal", "128K")
    ]  # fmt: skip
    assert [row["ours"] for row in rows if row["policy"] == "ethereal"] == pytest.approx([-0.2, -0.2])


def test_rounds_that_failed_have_no_share_and_are_kept_in_json(experiment, tmp_path):
    case = experiment.cases([0])[0]
    for ratios, share in (((math.nan, 0.5), 0.5), ((math.nan, math.nan), None)):
        rounds = {"rate_bps": (8.0, 8.0), "ratio": ratios}
        result = replace(fake(case, (math.nan, 1.0)), rounds=rounds)
        rows = records(experiment, [result])
        assert rows[0]["sent_share"] == share
        json.dumps(rows, allow_nan=False)
        assert cells(rows[0], headings(rows))[-2] == ("-" if share is None else "50.00%")
        sweep._write(tmp_path, result)
        kept = sweep._read(tmp_path, case)
        assert kept is not None and [math.isnan(r) for r in kept.rounds["ratio"]] == [
            math.isnan(r) for r in ratios
        ]


@pytest.mark.processes
def test_any_number_of_processes_gives_the_same_bits(experiment, monkeypatch):
    cases = experiment.cases([0, 1])
    alone = list(run_cases(cases, processes=1))
    pools = []

    def pool(processes, context, **options):
        pools.append(processes)
        return ProcessPoolExecutor(processes, context, **options)

    monkeypatch.setattr(sweep, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(sweep, "HELP_AFTER_S", 0.0)
    many = list(run_cases(cases, processes=3))
    assert figures(alone) == figures(many)
    assert len(pools) == 1, "some were run elsewhere"


def test_a_small_sweep_starts_no_process(experiment, monkeypatch):
    """It would be over before one is there."""
    cases = experiment.cases([0])
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", None)
    assert figures(list(run_cases(cases, processes=3))) == figures(list(run_cases(cases)))


def test_no_more_work_at_a_time_than_processes(experiment, monkeypatch):
    """This process counts while it runs a case."""
    lock, at_work, most = threading.Lock(), [0], []

    def work(case, pictured):
        with lock:
            at_work[0] += 1
            most.append(at_work[0])
        time.sleep(0.3)
        with lock:
            at_work[0] -= 1
        return fake(case, (1.0,))

    monkeypatch.setattr(sweep, "HELP_AFTER_S", 0.05)
    monkeypatch.setattr(sweep, "run_case", work)
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", lambda count, *_, **__: ThreadPoolExecutor(count))
    assert len(list(run_cases(experiment.cases([0, 1, 2]), processes=2))) == 12
    assert max(most) == 2


@pytest.mark.processes
def test_an_interrupt_of_the_command_alone_ends_it_at_once_and_keeps_what_is_there(tmp_path):
    """As a supervisor sends it, not to the whole group."""
    file, kept = tmp_path / "long.toml", tmp_path / "kept"
    file.write_text(LONG)
    command = [sys.executable, "-m", "dblp.cli.main", "sim", "run", str(file), "--processes", "2"]
    with subprocess.Popen(
        [*command, "--resume", str(kept)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        children = Path(f"/proc/{run.pid}/task")
        deadline = time.monotonic() + 120.0
        while time.monotonic() < deadline and not _workers(children):
            time.sleep(0.1)
        time.sleep(2.0)  # they are at their cases
        workers = _workers(children)
        began = time.monotonic()
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
        took = time.monotonic() - began
    assert workers
    assert run.returncode == 130, said
    assert took < 8.0  # 1 or 2 on an idle machine; the cases take half a minute and more
    assert "nothing is left running" in said
    assert "resource_tracker" not in said and "Traceback" not in said
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert len(list(kept.glob("*.json"))) == 1
    assert not list(kept.glob("*.part"))


def _workers(tasks: Path) -> list[int]:
    """Processes of a pool among the children of a process: not multiprocessing's tracker."""
    found = []
    for task in tasks.iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("broken", "error", "words"),
    [
        ("initializer", LocalError, "a process of the sweep was killed"),
        ("scenario", ConfigError, "no such"),
        ("pool", OSError, "no more processes"),
    ],
)
def test_what_fails_elsewhere_is_raised_here(experiment, monkeypatch, broken, error, words):
    def no_pool(*arguments, **options):
        raise OSError("no more processes")

    monkeypatch.setattr(sweep, "HELP_AFTER_S", 0.0)
    cases = experiment.cases([0]) * 3
    if broken == "pool":
        monkeypatch.setattr(sweep, "ProcessPoolExecutor", no_pool)
    if broken == "scenario":
        cases[1:] = [replace(case, table={**case.table, "odd": 1}) for case in cases[1:]]
    initializer: Callable[..., object] = os._exit if broken == "initializer" else int
    with pytest.raises(error, match=words):
        list(run_cases(cases, processes=2, initializer=initializer, initargs=(3,)))
    assert not [thread for thread in threading.enumerate() if thread.name == "dblp-sweep"]


def test_numba_is_heard_where_it_compiles_only(tmp_path, caplog):
    """Once for a folder, at its first function: the others take as long, and what is kept takes no time."""
    source = tmp_path / "kernel.py"
    source.write_text(
        "from dblp.sim.fabric.kernel.compiled import compiled\n"
        "@compiled\ndef twice(n: 'int') -> 'int':\n    return 2 * n\n"
        "@compiled\ndef thrice(n: 'int') -> 'int':\n    return 3 * n\n"
    )
    for said in (1, 1):
        spec = importlib.util.spec_from_file_location("kernel", source)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.twice(21) == 42 and module.thrice(14) == 42
        assert caplog.text.count("numba compiles the packet engine") == said


def test_a_sweep_goes_on_where_it_was_stopped(experiment, tmp_path):
    cases = experiment.cases([0])
    running = run_cases(cases, folder=tmp_path)
    first = next(running)
    running.close()
    assert len(list(tmp_path.glob("*.json"))) == 1
    stamp = next(tmp_path.glob("*.json")).stat().st_mtime_ns
    again = list(run_cases(cases, folder=tmp_path))
    assert figures([r for r in again if r.key == first.key]) == figures([first])
    assert len(again) == len(cases) == len(list(tmp_path.glob("*.json")))
    assert (tmp_path / f"{first.key}.json").stat().st_mtime_ns == stamp
    assert figures(list(run_cases(cases, folder=tmp_path))) == figures(again)


def test_a_broken_result_is_named(experiment, tmp_path):
    case = experiment.cases([0])[0]
    (tmp_path / f"{case.key}.json").write_text("{}")
    with pytest.raises(LocalError, match=case.key):
        list(run_cases([case], folder=tmp_path))


@pytest.mark.parametrize("broken", ["full", "folder", "no folder", "unreadable"])
def test_a_result_that_cannot_be_kept_is_told_with_its_path(experiment, tmp_path, broken):
    case = experiment.cases([0])[0]
    folder, part = tmp_path, tmp_path / f"{case.key}.part"
    if broken == "full":
        part.symlink_to("/dev/full")
    elif broken == "folder":
        part.mkdir()
    elif broken == "no folder":
        folder = Path("/proc/dblp-results")
    else:
        (tmp_path / f"{case.key}.json").mkdir()
    with pytest.raises(LocalError, match=rf"{case.key}.*cannot be .* Remedy"):
        list(run_cases([case], folder=folder))


def test_a_changed_scenario_is_another_case(experiment):
    keys = {case.key for case in experiment.cases([0, 1])}
    assert len(keys) == 8
    other = read_experiment("small", TEXT.replace("spines = 2", "spines = 1"))
    assert not keys & {case.key for case in other.cases([0, 1])}


# on Ray


@pytest.mark.slow  # a cluster starts, whose machine code may be cold
@pytest.mark.processes
@pytest.mark.sockets
def test_ray_gives_the_records_of_one_process_and_goes_on_where_it_was_stopped(tmp_path):
    """In processes of their own: Ray's threads outlive it."""
    pytest.importorskip("ray")
    file = tmp_path / "small.toml"
    file.write_text(TEXT)
    found = {}
    for name, options in {
        "alone": ["--processes", "1"],
        "ray": ["--ray", "local", "--resume", str(tmp_path / "kept")],
        "again": ["--ray", "local", "--resume", str(tmp_path / "kept")],
    }.items():
        json_file = tmp_path / f"{name}.json"
        command = [
            sys.executable,
            "-m",
            "dblp.cli.main",
            "sim",
            "run",
            str(file),
            "--json",
            str(json_file),
            *options,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(json_file.read_text())["records"]
    kept = [{key: row[key] for key in row if key != "wall_s"} for row in found["alone"]]
    for name in ("ray", "again"):
        assert [{key: row[key] for key in row if key != "wall_s"} for row in found[name]] == kept
    assert found["again"] == found["ray"]  # read, not run again: its wall_s is the same too


@pytest.mark.parametrize(
    ("address", "error", "says"),
    [
        ("nowhere", ConfigError, "HOST:PORT"),
        ("10.0.0.1:x", ConfigError, "HOST:PORT"),
        ("127.0.0.1:1", LocalError, "no Ray cluster answers there"),
        ("ray://127.0.0.1:1", LocalError, "ray start --head"),
    ],
)
def test_an_address_without_a_cluster_is_told_at_once(experiment, address, error, says):
    with pytest.raises(error, match=says):
        list(run_cases(experiment.cases([0]), ray=address))


def test_a_missing_ray_is_told_with_the_pip_line(monkeypatch, capsys):
    monkeypatch.setattr("dblp.cli.extras.find_spec", lambda name: None if name == "ray" else object())
    assert run_command(["sim", "run", "scale", "--ray", "local"]) == 2
    assert "[ray]" in capsys.readouterr().err


def test_a_machine_with_another_version_is_refused(experiment):
    with pytest.raises(LocalError, match="another version"):
        run_checked(experiment.cases([0])[0], False, "other code")


# rounds that compress


def test_a_reaction_is_half_as_much_again_or_two_thirds():
    rates = [8.0] * 12 + [2.0] * 4 + [8.0] * 4
    ratios = [0.3] * 13 + [0.21, 0.19, 0.1] + [0.1, 0.1, 0.1, 0.2]
    assert reactions(ratios, rates)[0] == 3
    assert math.isnan(reactions(ratios, rates)[1])
    assert reactions([1.0, 1.0], [5.0, 5.0]) == []


def test_records_of_rounds_tell_the_share_and_the_slowest_reaction(experiment):
    cases = experiment.cases([0, 1])
    rates = (8.0,) * 3 + (2.0,) * 3
    late = {0: (0.4,) * 4 + (0.1,) * 2, 1: (0.4,) * 5 + (0.1,)}
    results = [
        replace(fake(case, (1.0,)), rounds={"rate_bps": rates, "ratio": late[case.seed]}) for case in cases
    ]
    rows = records(experiment, results)
    assert rows[0]["reaction_rounds"] == 3
    assert rows[0]["sent_share"] == pytest.approx((1.8 + 2.1) / 12)
    assert "reaction_rounds" not in records(experiment, [fake(case, (1.0,)) for case in cases])[0]


# the command


def test_run_writes_json_picture_and_page(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "small.toml"
    file.write_text(TEXT)
    written = {name: tmp_path / f"out.{name}" for name in ("json", "png", "html")}
    options = [part for name, path in written.items() for part in (f"--{name}", str(path))]
    assert run_command(["sim", "run", str(file), "--seeds", "1", "--processes", "1", *options]) == 0
    table = json.loads(written["json"].read_text())
    assert table["command"] == "sim run"
    assert {row["policy"] for row in table["records"]} == {"random", "ethereal"}
    assert all(set(row) >= RECORD_KEYS for row in table["records"])
    assert [(run["policy"], run["seed"], run["ended"]) for run in table["runs"]][:2] == [
        ("random", 0, "done"),
        ("ethereal", 0, "done"),
    ]
    assert table["runs"][0]["completion_s"] == table["records"][0]["completion_s"]
    assert table["scenario"]["topology"]["kind"] == "leaf_spine"
    assert table["engine"] == "packet"
    assert table["claims"][0]["ours"] is not None
    assert written["png"].read_bytes().startswith(b"\x89PNG")
    page = written["html"].read_text()
    assert "ethereal" in page
    assert "data:image/png;base64," in page
    assert "How it was run" in page
    assert "leaf_spine" in page
    assert "packet engine, seeds 0" in page


def test_list_shows_experiments_and_traces(capsys):
    assert run_command(["sim", "list"]) == 0
    shown = capsys.readouterr().out
    assert "ethereal" in shown
    assert "resnet50" in shown


def test_trace_writes_what_load_reads(tmp_path):
    from dblp.sim.fabric.traces import load_trace

    file = tmp_path / "mine.json"
    assert run_command(["sim", "trace", "vgg16", "--output", str(file), "--batch", "8"]) == 0
    assert load_trace(str(file)).compute_s == pytest.approx(load_trace("vgg16").compute_s / 4)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["run", "nothing"], "known are"),
        (["run", "missing.toml"], "No such file or directory; `dblp sim list`"),
        (["run", "scale", "--processes", "-1"], "--processes -1"),
        (["run", "scale", "--processes", "2", "--ray", "local"], "one of the two"),
        (["run", "scale", "--seeds", "x"], "--seeds"),
        (
            ["run", "scale", "--resume", "/proc/dblp-results"],
            "--resume /proc/dblp-results: cannot be written",
        ),
        (["run", "scale", "--resume", "/proc"], "--resume /proc: cannot be written"),
        (["trace", "alexnet", "--output", "x.json"], "known are resnet50"),
    ],
)
def test_wrong_use_is_told_in_one_line(arguments, error, capsys):
    assert run_command(["sim", *arguments]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"\xff\xfe\x00", "no text"), (b"title = \n", "not TOML"), (b"", "topology is missing")],
)
def test_files_that_are_no_experiment_are_told_with_their_path(content, says, tmp_path):
    from dblp.sim.fabric.experiment import load_experiment

    file = tmp_path / "odd.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        load_experiment(str(file))
    assert str(file) in str(caught.value)


def test_a_missing_numba_is_told_with_the_pip_line(monkeypatch, capsys):
    monkeypatch.setattr("dblp.cli.extras.find_spec", lambda name: None if name == "numba" else object())
    assert run_command(["sim", "run", "scale"]) == 2
    assert "[sim]" in capsys.readouterr().err


def test_an_experiment_file_that_is_no_experiment_names_the_field(tmp_path):
    file = tmp_path / "wrong.toml"
    file.write_text("scenario.topology = {kind = 'star', hosts = 1}")
    with pytest.raises(ConfigError, match=r"topology\.hosts=1"):
        from dblp.sim.fabric.experiment import load_experiment

        load_experiment(str(file))
