"""The commands with real workers: a training, a benchmark, a crash, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dblp.cli.launch import FOLDER
from dblp.scratch import remove_lost_folders

pytestmark = pytest.mark.processes
COMMAND = [sys.executable, "-m", "dblp.cli.main"]
RUN_SECONDS = 240
"""Long enough for a loaded machine; a hang is what it stops."""


def dblp(*arguments, **options):
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=RUN_SECONDS, **options,
    )  # fmt: skip


def worker_pids(parent):
    """The living processes that the agent started: their parent is ours."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            pids.append(int(stat.parent.name))
    return pids


def wait_until(condition, what):
    deadline = time.monotonic() + RUN_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_epoch_over_gloo(tmp_path):
    figures, picture = tmp_path / "train.json", tmp_path / "train.png"
    done = dblp(
        "train", "--arms", "gloo", "--ranks", 2, "--epochs", 1, "--model", "mlp",
        "--json", figures, "--picture", picture, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "replicas identical on all 2 ranks" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(figures.read_text())
    (record,) = content["records"]
    assert content["command"] == "train"
    assert (record["arm"], record["seed"]) == ("gloo", 0)
    assert 0.5 < record["test_accuracy"] <= 1.0
    assert 0 < record["allreduce_p50_s"] <= record["allreduce_p99_s"] < record["wall_s"]
    assert record["rounds"] >= 1347 // 64


def test_dblp_arms_lose_datagrams_and_keep_replicas_identical(tmp_path):
    figures = tmp_path / "train.json"
    done = dblp(
        "train", "--ranks", 2, "--epochs", 2, "--model", "mlp", "--impair", "loss(0.1),seed(3)",
        "--json", figures, "--picture", tmp_path / "train.png", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    gloo, exact, bounded = json.loads(figures.read_text())["records"]
    assert [record["arm"] for record in (gloo, exact, bounded)] == ["gloo", "dblp-exact", "dblp-bounded"]
    assert exact["test_accuracy"] == pytest.approx(gloo["test_accuracy"], abs=0.02)
    for record in (exact, bounded):
        assert 0.08 < record["network_loss"] < 0.12
        assert record["retransmitted_share"] > 0
    assert exact["missing_share"] in (None, 0.0)
    assert 0 < bounded["missing_share"] <= 0.1


def test_policies_train_by_name(tmp_path):
    """One with a controller, and one with a transform and a rule for steps that all skip; neither keeps replicas equal itself."""
    records = trained(tmp_path, "dblp,optireduce", "--arms", "dblp", "--model", "resnet", "--batch", 512)
    assert list(records) == ["dblp", "optireduce"]
    assert all(record["rounds"] >= 4 for record in records.values()), "two steps an epoch"


@pytest.mark.slow
def test_all_policies_train_by_name(tmp_path):
    """DBLP's phases follow the epochs: it loses little in the first one, more of the gradient later."""
    names = ["mlt", "dblp", "ltp", "optireduce", "default"]
    records = trained(tmp_path, ",".join(names), "--arms", "dblp-exact", "--model", "mlp", "--batch", 256)
    assert list(records) == ["dblp-exact", *names]
    assert len({record["rounds"] for record in records.values()}) == 1
    assert records["dblp-exact"]["missing_share"] is None
    assert 0 < records["mlt"]["missing_share"] <= 0.008
    assert records["mlt"]["missing_share"] < records["dblp"]["missing_share"]
    for name in ("ltp", "optireduce", "default"):
        assert 0 < records[name]["missing_share"] < 0.3, name


def trained(tmp_path, policy, *options):
    """Two epochs on two ranks where a tenth is lost; the records by arm."""
    figures = tmp_path / "train.json"
    done = dblp(
        "train", "--policy", policy, "--ranks", 2, "--epochs", 2, "--impair", "loss(0.1),seed(3)", *options,
        "--json", figures, "--picture", tmp_path / "train.png", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "replicas identical on all 2 ranks" in done.stdout
    return {record["arm"]: record for record in json.loads(figures.read_text())["records"]}


def test_a_tiny_benchmark(tmp_path):
    figures = tmp_path / "bench.json"
    done = dblp(
        "bench", "allreduce", "--ranks", "2", "--sizes", "4K,64K", "--rounds", 3, "--arms", "exact,bounded",
        "--policy-budget", "0.1", "--busy-main", "--memory", "--impair", "loss(0.05),seed(1)", "--json", figures,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "congestion control" in done.stdout
    content = json.loads(figures.read_text())
    assert content["command"] == "bench allreduce"
    assert [(record["ranks"], record["bytes"]) for record in content["records"]] == [(2, 4096), (2, 65536)]
    for record in content["records"]:
        assert record["rounds"] == 3
        assert record["impair"] == "loss(0.05),seed(1)"
        assert record["ratio_p50"] == pytest.approx(record["gloo_p50_s"] / record["dblp_p50_s"])
        for name in ("gloo", "dblp", "bounded", "gloo_busy", "exact_busy"):
            assert 0 < record[f"{name}_p50_s"] <= record[f"{name}_p99_s"]


RAISES = """
import dblp.cli.train.plan as plan
def fail(values):
    raise ValueError("sabotaged")
plan.TrainPlan.from_json = fail
"""
DIES = """
import signal, sys
print("sabotaged", file=sys.stderr, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("sabotage", "words"),
    [(RAISES, "ValueError: sabotaged"), (DIES, "killed by SIGKILL\nsabotaged")],
    ids=["raises", "dies"],
)
def test_a_workers_end_is_told_and_the_exit_code_is_1(tmp_path, sabotage, words):
    body = "".join(f"    {line}\n" for line in sabotage.strip().splitlines())
    (tmp_path / "sitecustomize.py").write_text(f"import os\nif os.environ.get('RANK') == '1':\n{body}")
    done = dblp(
        "train", "--arms", "gloo", "--ranks", 2, "--epochs", 1,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1
    assert f"rank 1 of 2 failed: {words}" in done.stderr


@pytest.mark.parametrize("whole_group", [True, False], ids=["process group", "parent only"])
def test_ctrl_c_ends_everything(tmp_path, whole_group):
    process = subprocess.Popen(
        [*COMMAND, "train", "--arms", "gloo", "--ranks", "2", "--epochs", "500", "--picture", str(tmp_path / "x.png")],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        wait_until(
            lambda: len(worker_pids(process.pid)) == 2 or process.poll() is not None, "no workers came up"
        )
        workers = worker_pids(process.pid)
        assert len(workers) == 2
        time.sleep(0.5)  # anywhere: importing, meeting or training
        if whole_group:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in error
    assert not any(alive(pid) for pid in workers)


def test_workers_do_not_outlive_a_killed_parent(monkeypatch, tmp_path):
    """Their folder is left: a later run finds and removes it."""
    process = subprocess.Popen(
        [*COMMAND, "train", "--arms", "gloo", "--ranks", "2", "--epochs", "500", "--picture", str(tmp_path / "x.png")],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    wait_until(lambda: len(worker_pids(process.pid)) == 2 or process.poll() is not None, "no workers came up")
    workers = worker_pids(process.pid)
    assert len(workers) == 2
    process.kill()
    process.wait()
    wait_until(lambda: not any(alive(pid) for pid in workers), "workers outlived their parent")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (left,) = tmp_path.glob("dblp-*")
    assert remove_lost_folders(FOLDER) == [str(left)] and not left.exists()
