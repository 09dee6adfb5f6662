"""A stand-in for a GPU: ordinary tensors that count as a device's, and streams that run what is queued on them later.

Each stream is a thread with a queue; an event is a place in it. A stream may be held, so that a test decides when what is queued
there happens: code that forgets to wait for an event reads what was there before, or hangs, and code that blocks the caller never
returns. What happens on each stream is logged.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator

import torch

from dblp.collectives.torch.staging import Accelerator, Accelerators, Event

PATIENCE_S = 20.0
"""Longest that anything waits for an event: beyond it the test fails."""


class Stream:
    """What is queued runs in its order, on a thread of its own."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self._log = log
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"stand-in-{name}")
        self._thread.start()
        atexit.register(self._close)

    def put(self, what: str, call: Callable[[], object]) -> None:
        """Queue ``call``; ``what``: for the log, empty: not logged."""

        def run() -> None:
            call()
            if what:
                self._log.append(f"{self.name}: {what}")

        self._queue.put(run)

    def record(self) -> Event:
        """An event behind what is queued now."""
        event = threading.Event()
        self.put("", event.set)
        return event

    def wait_for(self, event: Event) -> None:
        """What is queued from now on waits for an event."""
        self.put("", lambda: wait(event))

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            call()

    def _close(self) -> None:
        """Before the interpreter ends: a thread that frees a tensor then asks for its lock within torch, which aborts the
        process. One that is held for good frees none."""
        self._queue.put(None)
        self._thread.join(1.0)


def wait(event: threading.Event) -> None:
    """Block until an event has happened."""
    assert event.wait(PATIENCE_S), "an event that never happened"


class StandIn(Accelerator, Accelerators):
    """An accelerator and the table that finds it, for the tensors that ``own`` was told of."""

    def __init__(self, *, copy_s: float = 0.0) -> None:
        """``copy_s``: seconds that each copy takes."""
        self.log: list[str] = []
        self.main, self.out, self.back = (Stream(name, self.log) for name in ("main", "out", "back"))
        self.fail_with: Exception | None = None
        self._copy_s = copy_s
        self._owned: dict[int, torch.Tensor] = {}
        self._thread = threading.local()

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """From now on this tensor, and all views of its memory, are on the device."""
        self._owned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    @property
    def current(self) -> Stream:
        """The calling thread's current stream."""
        found: Stream = getattr(self._thread, "stream", self.main)
        return found

    def of(self, tensor: torch.Tensor) -> Accelerator | None:
        return self if tensor.untyped_storage().data_ptr() in self._owned else None

    def dense(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.own(tensor.detach().contiguous())

    def host(self, like: torch.Tensor) -> torch.Tensor:
        return torch.full(like.shape, 77, dtype=torch.uint8).to(like.dtype)  # what no test expects

    def mark(self) -> Event:
        return self.current.record()

    def copy_out(self, host: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        self.out.wait_for(after)
        return self._copy(self.out, host, source)

    def copy_back(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        return self._copy(self.back, target, source)

    def _copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> Event:
        def copy() -> None:
            time.sleep(self._copy_s)
            with torch.no_grad():
                target.copy_(source)

        stream.put(f"copy of {source.numel()}", copy)
        return stream.record()

    def finish(self, event: Event) -> None:
        if self.fail_with is not None:
            raise self.fail_with
        wait(event)

    def join(self, event: Event) -> None:
        self.current.wait_for(event)

    def keep(self, tensor: torch.Tensor) -> None:
        self.log.append(f"{self.current.name}: keeps {tensor.layout}")

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the caller's stream sees of a tensor: read there, behind all that it waits for."""
        seen: list[torch.Tensor] = []
        self.current.put("read", lambda: seen.append(tensor.clone()))
        wait(self.current.record())
        return seen[0]

    @contextlib.contextmanager
    def under(self) -> Iterator[None]:
        before = self.current
        self._thread.stream = self.back
        try:
            yield
        finally:
            self._thread.stream = before
