"""The benchmark of a DDP step runs, and its figures say what they are said to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.ddp_step import ARMS, KINDS, record_of


def test_what_is_hidden_and_the_ratio_of_turns():
    times = {
        "step": {"gloo": [3.0, 6.0, 4.0], "dblp": [2.0, 3.0, 4.0]},
        "compute": {"gloo": [2.0] * 3, "dblp": [2.0] * 3},
        "communicate": {"gloo": [4.0] * 3, "dblp": [2.0] * 3},
    }
    record = record_of("wide", 2, 25, times)
    assert record["ratio"] == 1.5, "the median of 1.5, 2 and 1"
    assert record["hidden"] == {"gloo": 0.5, "dblp": 0.5}
    assert record["medians"]["step"] == {"gloo": 4.0, "dblp": 3.0}


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
