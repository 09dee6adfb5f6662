"""One worker process of a command: ``python -m dblp.cli.worker JOB PLAN FOLDER PARENT``.

It reports by lines of JSON in a file of its own (``events-RANK.jsonl`` in FOLDER), read by
the parent as they come.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Plan = dict[str, Any]
"""What a job is to do: the JSON object that the parent wrote."""
Emit = Callable[..., None]
"""``emit(kind, **fields)``: report an event to the parent."""

JOBS = {
    "train": "dblp.cli.train.loop",
    "bench-allreduce": "dblp.cli.bench.loop",
    "bench-burst": "dblp.cli.bench.burst_loop",
}
"""Module of each job; its function ``work(plan, emit)`` does it."""

_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that this process gets when its parent dies."""


def main() -> None:
    """Run the job of the command line; an exception is left in torchelastic's error file for the parent."""
    job, plan_path, folder, parent = sys.argv[1:5]
    die_with_parent(int(parent))
    from torch.distributed.elastic.multiprocessing.errors import record

    record(_run)(job, Path(plan_path), Path(folder))


def events_path(folder: Path, rank: int) -> Path:
    """The file in which a rank reports."""
    return folder / f"events-{rank}.jsonl"


def _run(job: str, plan_path: Path, folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    plan: Plan = json.loads(plan_path.read_text())
    with events_path(folder, int(os.environ["RANK"])).open("a", buffering=1) as file:

        def emit(kind: str, **fields: Any) -> None:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")

        importlib.import_module(JOBS[job]).work(plan, emit)


def die_with_parent(parent: int) -> None:
    """End at once on Ctrl-C and when the parent is gone, wherever this process is, in C++ too.

    A Python handler would run only when the main thread is back in the interpreter, not while it waits in a
    collective.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before this process came so far
        os._exit(1)


if __name__ == "__main__":
    main()
