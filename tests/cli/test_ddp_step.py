"""The benchmark of a DDP step runs, and its figures say what they are said to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dblp.collectives.engine import Engine
from tests.benchmarks.ddp_engine import WAYS, Ways
from tests.benchmarks.ddp_step import ARMS, KINDS, overlap, record_of


def test_what_is_hidden_and_the_ratio_of_turns():
    times = {
        "step": {"gloo": [3.0, 6.0, 4.0], "dblp": [2.0, 3.0, 4.0]},
        "compute": {"gloo": [2.0] * 3, "dblp": [2.0] * 3},
        "communicate": {"gloo": [4.0] * 3, "dblp": [2.0] * 3},
    }
    told = {
        "parameters": 25,
        "times": times,
        "processor": times,
        "ran": times,
        "waited": times,
        "overlap": {"gloo": [0.5, 0.25, 0.75], "dblp": [1.0, 0.0, 0.5]},
        "instants": {"gloo": [[0.0, 1.0]], "dblp": [[0.0, 1.0]]},
    }
    record = record_of("wide", 2, told)
    assert record["ratio"] == 1.5, "the median of 1.5, 2 and 1"
    assert record["hidden"] == {"gloo": 0.5, "dblp": 0.5}
    assert record["medians"]["step"] == {"gloo": 4.0, "dblp": 3.0}
    assert record["overlap"] == {"gloo": 0.5, "dblp": 0.5}


@pytest.mark.parametrize(
    ("instants", "share"),
    [
        ([(1.0, 3.0)], 0.0),  # one bucket: it is ready when all gradients are
        ([(1.0, 3.0), (5.0, 7.0)], 0.5),
        ([(1.0, 6.0), (5.0, 7.0)], 4.0 / 6.0),  # both under way from 5 to 6: once
        ([(1.0, 9.0), (2.0, 4.0), (5.0, 7.0)], 0.5),  # a later one ends first
        ([(1.0, 2.0), (3.0, 4.0), (5.0, 6.0)], 2.0 / 3.0),
    ],
)
def test_overlap_is_what_is_over_when_the_last_bucket_is_ready(instants, share):
    assert overlap(instants) == pytest.approx(share)


@pytest.mark.processes
@pytest.mark.sockets
def test_it_runs(tmp_path):
    file = tmp_path / "step.json"
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.ddp_step",
        "--models",
        "cnn",
        "--ranks",
        "2",
        "--steps",
        "2",
    ]
    done = subprocess.run(
        [*command, "--json", str(file)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(file.read_text())["records"]
    assert record["steps"] == 2 and record["ratio"] > 0.0
    assert all(record["medians"][kind][arm] > 0.0 for kind in KINDS for arm in ARMS)
    assert all(record["processor"][kind][arm] > 0.0 for kind in KINDS for arm in ARMS)
    for arm in ARMS:
        first, last = record["instants"][arm]
        assert first[0] < last[0], "the CNN has two buckets"
        assert all(ready < ended for ready, ended in (first, last))
        assert 0.0 < record["overlap"][arm] < 1.0


@pytest.mark.processes
@pytest.mark.sockets
def test_the_engine_is_put_on_other_ways_and_back(tmp_path):
    file = tmp_path / "engine.json"
    command = [sys.executable, "-m", "tests.benchmarks.ddp_engine", "--models", "cnn", "--pairs", "2"]
    done = subprocess.run(
        [*command, "--json", str(file)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    records = json.loads(file.read_text())["records"]
    assert [record["way"] for record in records] == list(WAYS)
    assert all(record["pairs"] == 2 and min(record["ratio_quartiles"]) > 0.0 for record in records)


def test_ways_change_the_engine_and_leave_it_as_it_was():
    engine = Engine()

    def on_engine(call):
        async def called():
            return call()

        return engine.run(called)

    try:
        everywhere = os.sched_getaffinity(os.getpid())
        on_engine(lambda: os.sched_setaffinity(0, {min(everywhere)}))
        ways, interval_s = Ways(engine), sys.getswitchinterval()
        for way, found in (
            ("anywhere", lambda: os.sched_getaffinity(0)),
            ("long interval", sys.getswitchinterval),
        ):
            before = on_engine(found)
            ways.put(way, True)
            other = on_engine(found)
            ways.put(way, False)
            assert on_engine(found) == before and (other != before or len(everywhere) == 1), way
        assert interval_s < 5e-3
    finally:
        engine.stop()
