"""Local workers under torch's own elastic launcher, their events, and their end (done, failed, stopped)."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dblp import errors
from dblp.cli.environment import environment
from dblp.cli.worker import events_path
from dblp.errors import LocalError
from dblp.scratch import folder_prefix, remove_lost_folders

OnEvent = Callable[[int, dict[str, Any]], None]
"""``on_event(rank, event)``: called on a thread of its own while the workers run."""

FOLDER = "dblp-run"
"""Kind of the runs' temporary folders: plan, events and logs of the workers."""
_WORKER_ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""One thread a worker, as there are more workers than cores; gloo on loopback, as dblp is."""
_POLL_S = 0.05
"""Seconds between looks into the workers' files: quicker than the eye, cheaper than a hundredth of a core."""
_SHUTDOWN_S = 3
"""Seconds that workers get to end after a signal, before they are killed."""
_BACKEND_ERROR = re.compile(r"DistBackendError: (dblp: .*)")
"""How an error of the backend reads, in torch's class, perhaps within other errors' text."""
_TAIL_LINES = 12
"""Lines of a worker's own output that an error shows."""


class WorkerError(LocalError):
    """A worker process failed; the message holds that worker's error."""

    code = "worker"
    exit_code = 1


def run_workers(
    job: str, plan: Mapping[str, Any], *, ranks: int, on_event: OnEvent, env: Mapping[str, str] | None = None
) -> None:
    """Run ``ranks`` local workers of a job of ``dblp.cli.worker`` to their end.

    ``env`` is added to their environment. Raises WorkerError with the error of the worker that failed first,
    and KeyboardInterrupt on Ctrl-C, when all workers have ended. Main thread only: it handles signals. Folders that killed runs
    left behind are removed.
    """
    remove_lost_folders(FOLDER)
    with tempfile.TemporaryDirectory(prefix=folder_prefix(FOLDER), ignore_cleanup_errors=True) as name:
        folder = Path(name)
        plan_path = folder / "plan.json"
        plan_path.write_text(json.dumps(dict(plan)))
        with (
            environment({**_WORKER_ENV, **(env or {})}),
            _signals_restored(),
            _events(folder, ranks, on_event),
        ):
            _launch(job, plan_path, folder, ranks)


def _launch(job: str, plan_path: Path, folder: Path, ranks: int) -> None:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quieten_launcher()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        shutdown_timeout=_SHUTDOWN_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
    )
    command = ["-m", "dblp.cli.worker", job, str(plan_path), str(folder), str(os.getpid())]
    try:
        elastic_launch(config, sys.executable)(*command)
    except SignalException as error:
        raise _interruption(error.sigval) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise WorkerError(f"rank {rank} of {ranks} failed: {_describe(failure, folder, rank)}") from None


def _interruption(signum: int) -> BaseException:
    """The exception that ends this process as the signal would: 130 for SIGINT, 128 + n for others."""
    return KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signum)


def _describe(failure: Any, folder: Path, rank: int) -> str:
    """What a worker died of: its exception, or the signal or exit code and the last lines that it wrote."""
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):  # else it wrote no error file
        trace = str(message.get("extraInfo", {}).get("py_callstack", "")).rstrip()
        return _ours(message["message"]) or f"{message['message']}\n{trace}"
    cause = (
        f"killed by {signal.Signals(-failure.exitcode).name}"
        if failure.exitcode < 0
        else f"exit code {failure.exitcode}"
    )
    logs = sorted(folder.glob(f"logs/**/{rank}/stderr.log"))
    lines = logs[-1].read_text(errors="replace").splitlines()[-_TAIL_LINES:] if logs else []
    return "\n".join([cause, *lines])


def _ours(message: str) -> str | None:
    """The text of an error of ours, without the traces that torch's futures add: it says what to do. Else None."""
    found = _BACKEND_ERROR.search(message)
    if found is not None:
        return found[1]
    name, _, text = message.partition(": ")
    kind = getattr(errors, name.rpartition(".")[2], None)
    return text if isinstance(kind, type) and issubclass(kind, errors.DblpError) else None


def _quieten_launcher() -> None:
    """The launcher's log lines repeat, in its own words, what the command says itself."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)


@contextmanager
def _signals_restored() -> Iterator[None]:
    """The launcher installs handlers and leaves them: put back what was there."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _events(folder: Path, ranks: int, on_event: OnEvent) -> Iterator[None]:
    """Read the workers' events on a thread until the block ends; raise what went wrong there."""
    reader = EventReader(folder, ranks, on_event)
    reader.start()
    try:
        yield
    finally:
        reader.stop()
    reader.raise_error()


class EventReader(threading.Thread):
    """Follows the files in which workers report, line by line."""

    def __init__(self, folder: Path, ranks: int, on_event: OnEvent) -> None:
        super().__init__(name="dblp-events", daemon=True)
        self._paths = [events_path(folder, rank) for rank in range(ranks)]
        self._rests = [b""] * ranks
        self._offsets = [0] * ranks
        self._on_event = on_event
        self._ending = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        """Thread body: look, sleep, and once more at the end."""
        try:
            while not self._ending.wait(_POLL_S):
                self._read()
            self._read()
        except Exception as error:
            self._error = error

    def stop(self) -> None:
        """Read what is there and end the thread."""
        self._ending.set()
        self.join()

    def raise_error(self) -> None:
        """Raise what ``on_event`` raised, if it did."""
        if self._error is not None:
            raise self._error

    def _read(self) -> None:
        for rank, path in enumerate(self._paths):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._offsets[rank])
                data = file.read()
            self._offsets[rank] += len(data)
            *lines, self._rests[rank] = (self._rests[rank] + data).split(b"\n")
            for line in lines:
                self._on_event(rank, json.loads(line))
