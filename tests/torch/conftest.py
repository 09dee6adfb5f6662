"""``ranks``: run a scenario of ``worker.py`` in real processes, one a rank."""

import json
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pytest

TORCH = tuple(map(int, metadata.version("torch").split(".")[:2]))
FSDP2_HOOK = pytest.mark.skipif(
    TORCH < (2, 9),
    reason="torch 2.9 or later: set_custom_reduce_scatter, by which attach reaches a model of fully_shard",
)
ROOT = Path(__file__).parents[2]


class Ranks:
    """A launcher process that has imported torch once and forks the ranks of every scenario."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.torch.worker"],
            cwd=ROOT,  # which scenarios import from
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin and self._process.stdout
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def __call__(self, scenario, world_size, *, timeout_s=60, killed=(), **options):
        """Run it; every rank must exit with 0, those in ``killed`` by SIGKILL. Returns the ranks' outputs."""
        with tempfile.TemporaryDirectory() as folder:
            request = {
                "scenario": scenario,
                "world_size": world_size,
                "timeout_s": timeout_s,
                "folder": folder,
                "options": options,
            }
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
            answer = json.loads(self._answers.readline())
        expected = [-9 if rank in killed else 0 for rank in range(world_size)]
        report = "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(answer["outputs"]))
        assert answer["codes"] == expected, f"exit codes {answer['codes']}\n{report}"
        return answer["outputs"]

    def close(self):
        self._requests.close()
        self._answers.close()
        self._process.wait(60)  # on a busy machine one that was not used may still be importing torch


@pytest.fixture(scope="session")
def ranks():
    launcher = Ranks()
    yield launcher
    launcher.close()
