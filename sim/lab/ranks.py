"""The ranks of an experiment: one worker process in each host's namespace, told what to do by lines of JSON.

A worker reads commands on its standard input and answers on its standard output; what else it prints goes to a file of its own,
whose last lines say why it died. Workers end with this process, whatever ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from types import TracebackType
from typing import IO, Any

from dblp.errors import LocalError
from dblp.scratch import folder_prefix
from dblp.sim.lab.leftovers import FOLDER
from dblp.sim.lab.network import LabNetwork

WORKER = "dblp.cli.lab.worker"
"""Module of the worker: ``python -m dblp.cli.lab.worker FOLDER PARENT``."""
MASTER_PORT = 29_400
"""torch's default; the hosts' namespaces have nothing else that listens."""
_OWN_IMPAIRMENT = "DBLP_IMPAIR"
"""Not for ranks of a laboratory: its network alone impairs."""
_TAIL_LINES = 12
_NOISE = "The hostname of the client socket cannot be retrieved"
"""torch's warning in a namespace without names: no cause of anything."""
_END_S = 5.0
"""What workers get to end after they were told to."""

Event = dict[str, Any]
OnEvent = Callable[[int, Event], None]


class RankError(LocalError):
    """A rank failed; the network and the other ranks were fine."""

    code = "worker"
    exit_code = 1


class Ranks:
    """Use as a context manager. ``env`` is added to the workers' environment. Raises RankError when one fails."""

    def __init__(self, network: LabNetwork, env: Mapping[str, str] | None = None) -> None:
        self._network = network
        self._env = dict(env or {})
        self._folder = tempfile.TemporaryDirectory(prefix=folder_prefix(FOLDER), ignore_cleanup_errors=True)
        self._workers: list[Popen[bytes]] = []
        self._events: queue.SimpleQueue[tuple[int, Event | None]] = queue.SimpleQueue()
        self._errors: list[IO[bytes]] = []

    def __enter__(self) -> Ranks:
        try:
            for rank in range(len(self._network.hosts)):
                self._start(rank)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._say({"do": "end"})
        self.close()

    def __len__(self) -> int:
        return len(self._network.hosts)

    def command(
        self, what: Mapping[str, Any], *, timeout_s: float, on_event: OnEvent | None = None
    ) -> list[Event]:
        """Tell all ranks to do something; returns their ``done`` events by rank. Others go to ``on_event``.

        Raises RankError when a rank fails, ends or does not answer within ``timeout_s`` seconds.
        """
        self._say(what)
        done: dict[int, Event] = {}
        deadline = time.monotonic() + timeout_s
        while len(done) < len(self):
            rank, event = self._next(deadline, done, what)
            if event["kind"] == "done":
                done[rank] = event
            elif on_event is not None:
                on_event(rank, event)
        return [done[rank] for rank in range(len(self))]

    def close(self) -> None:
        """End all workers; a second call does nothing."""
        deadline = time.monotonic() + _END_S
        for worker in self._workers:
            if worker.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # what a dead worker was told last
                    worker.stdin.close()
        for worker in self._workers:
            while worker.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            if worker.poll() is None:
                worker.kill()
                worker.wait()
        self._workers.clear()
        for file in self._errors:
            file.close()
        self._errors.clear()
        self._folder.cleanup()

    def _start(self, rank: int) -> None:
        hosts = self._network.hosts
        host = hosts[rank]
        errors = (Path(self._folder.name) / f"stderr-{rank}").open("wb")
        self._errors.append(errors)
        env = {
            **{name: value for name, value in os.environ.items() if name != _OWN_IMPAIRMENT},
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": host.interface,
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(MASTER_PORT),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "LOCAL_RANK": "0",
            **self._env,
        }
        argv = [sys.executable, "-m", WORKER, self._folder.name, str(os.getpid())]
        worker = self._network.popen(host, argv, stdin=PIPE, stdout=PIPE, stderr=errors, env=env)
        self._workers.append(worker)
        threading.Thread(target=self._read, args=(rank, worker), name=f"dblp-lab-{rank}", daemon=True).start()

    def _read(self, rank: int, worker: Popen[bytes]) -> None:
        assert worker.stdout is not None
        with worker.stdout as lines:
            for line in lines:
                self._events.put((rank, json.loads(line)))
        self._events.put((rank, None))

    def _say(self, what: Mapping[str, Any]) -> None:
        line = json.dumps(what).encode() + b"\n"
        for rank, worker in enumerate(self._workers):
            assert worker.stdin is not None
            try:
                worker.stdin.write(line)
                worker.stdin.flush()
            except (BrokenPipeError, ValueError):
                if what["do"] != "end":
                    raise self._fault(rank) from None

    def _next(self, deadline: float, done: Mapping[int, Event], what: Mapping[str, Any]) -> tuple[int, Event]:
        try:
            rank, event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            late = ", ".join(str(rank) for rank in range(len(self)) if rank not in done)
            raise RankError(
                f"no answer to {what['do']!r} from rank {late} in time; they were ended"
            ) from None
        if event is None:
            raise self._fault(rank)
        if event["kind"] == "error":
            raise RankError(f"rank {rank} of {len(self)} failed: {event['text']}")
        return rank, event

    def _fault(self, rank: int) -> RankError:
        """What a rank that ended died of, by its exit code and its last words."""
        worker = self._workers[rank]
        try:
            code = worker.wait(1.0)
        except TimeoutExpired:
            code = 0
        text = (Path(self._folder.name) / f"stderr-{rank}").read_text(errors="replace")
        lines = [line for line in text.splitlines() if _NOISE not in line]
        return RankError(
            "\n".join([f"rank {rank} of {len(self)} ended: {_cause(code)}", *lines[-_TAIL_LINES:]])
        )


def _cause(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
