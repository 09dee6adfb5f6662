"""Work: the handle of one collective, as torch's Python and C++ callers wait on it.

Two ways to wait exist in torch: ``Work.wait`` and the future of ``get_future``. The DDP reducer uses the
future, with no timeout of its own, and runs callbacks (``then``) inside the completion; a callback may issue
another collective and wait for it. So futures are completed on threads of ``_Completer``, never on the
engine's thread, and are made only when somebody asks for one.

At the interpreter's exit nobody is told that a collective has ended. Whoever waits then is a daemon thread, often deep in
torch's C++: woken, it would ask for the interpreter's lock, be cut off there once the interpreter has begun to end, and
abort the process or leave a lock behind that the process waits for. Asleep it goes with the process. What is waited for
later (in exit handlers) raises.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.futures import Future

from dblp.collectives.engine import at_exit, leaving
from dblp.collectives.numbering import Origin
from dblp.collectives.report import Report
from dblp.collectives.torch.callbacks import mark
from dblp.collectives.torch.staging import Arrival, Restore, current
from dblp.errors import DeadlineError

GRACE_SECONDS = 5.0
"""A waiter trusts the engine's own deadline this much longer before it gives up by itself."""
_KEPT_WORKS = 256
_KEPT_BYTES = 64
_IDLE_THREADS = 4
"""Completion threads that are kept when idle; more are started while callbacks block, and end after use."""


class DblpWork(c10d.Work):
    """One collective in flight. ``report`` is there once it has ended (None for those without a round)."""

    def __init__(
        self,
        what: str,
        timeout_s: float,
        outputs: Sequence[torch.Tensor],
        restore: Restore | None = None,
    ) -> None:
        super().__init__()
        self._arrivals: list[Arrival] = []  # of what was copied back to devices
        self.report: Report | None = None
        self.source = -1
        self._what = what
        self._timeout_s = timeout_s
        self._outputs = list(outputs)
        self._restore = restore
        self._error: BaseException | None = None
        self._ended = False
        self._gate = _thread.allocate_lock()  # held until the end; cheaper than an Event, one a collective
        self._gate.acquire()
        self._before_end: Callable[[], object] | None = None
        self._future_lock = _thread.allocate_lock()
        self._base: Future[None] | None = None
        self.origin = Origin()
        self._future: Future[list[torch.Tensor]] | None = None

    def finish(self, result: object, error: BaseException | None) -> None:
        """Called once, on the engine's thread, with a Report, the source's rank of a ``recv``, or an
        error."""
        if isinstance(result, Report):
            self.report = result
        elif isinstance(result, int):
            self.source = result
        self._error = error
        if error is None and self._restore is not None:
            completer.submit(
                self._restore_and_end
            )  # copies to a GPU or a strided tensor would hold up the engine
        else:
            self._end()

    @property
    def timeout_s(self) -> float:
        """The call's timeout: its own, or the group's."""
        return self._timeout_s

    def before_end(self, call: Callable[[], object]) -> bool:
        """Have ``call()`` called, on whatever thread, before a wait returns; False if it is too late for that."""
        with self._future_lock:
            if not self._ended:
                self._before_end = call
            return not self._ended

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end; ``timedelta(0)`` means the collective's own timeout. Raises DistBackendError."""
        if not self._gate.acquire(blocking=False):
            self._sleep(timeout.total_seconds())
        self._gate.release()
        self._raise_error()
        for arrival in self._arrivals:
            arrival.join()
        return True

    def _sleep(self, timeout_s: float) -> None:
        """Until the gate is open."""
        if leaving():
            self._raise_error()
            raise dist.DistBackendError(f"dblp: {self._what}: not done, and the process is exiting")
        with completer.resting():
            if self._gate.acquire(timeout=timeout_s if timeout_s > 0 else self._timeout_s + GRACE_SECONDS):
                return
        limit = timeout_s if timeout_s > 0 else self._timeout_s
        raise dist.DistBackendError(f"dblp: {self._what}: {_timed_out(limit)} in wait(): it goes on")

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future of the output tensors; its callbacks run on a thread where they may wait for other
        collectives."""
        with self._future_lock:
            if self._future is None:
                self._make_future()
            assert self._future is not None
            return self._future

    def is_completed(self) -> bool:
        """True once it has ended, well or badly."""
        return self._ended

    def is_success(self) -> bool:
        """True if it has ended well."""
        return self._ended and self._error is None

    def exception(self) -> BaseException | None:
        """The error that it ended with."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._outputs

    def synchronize(self) -> None:
        """Same as ``wait()``."""
        self.wait()

    def source_rank(self) -> int:
        """For ``recv`` from any source: where the message came from."""
        return self.source

    _source_rank = source_rank

    def _restore_and_end(self) -> None:
        try:
            assert self._restore is not None
            self._arrivals += self._restore()
        except Exception as error:
            self._error = error
        self._end()

    def _end(self) -> None:
        self._restore = None
        with self._future_lock:
            self._ended = True
            base, before_end = self._base, self._before_end
        if leaving():
            return
        if before_end is not None:
            before_end()
        self._gate.release()
        if base is not None:
            completer.submit(lambda: self._complete(base))

    def _complete(self, base: Future[None]) -> None:
        """Under the streams of the copies back: torch has the callbacks' streams wait for what is queued on the current ones."""
        with current(self._arrivals):
            base.set_result(None)

    def _make_future(self) -> None:
        devices = sorted({str(tensor.device) for tensor in self._outputs if tensor.device.type != "cpu"})
        # An error must be raised in a callback to become one in C++: Future.set_exception stores it as a
        # value, which the reducer would read as its result.
        base: Future[None] = Future(devices=[torch.device(name) for name in devices] or None)
        self._future = mark(base.then(self._value), self.origin)
        if self._ended:
            self._complete(base)
        else:
            self._base = base

    def _value(self, _: Future[None]) -> list[torch.Tensor]:
        self._raise_error()
        return self._outputs

    def _raise_error(self) -> None:
        if self._error is not None:
            text = str(self._error)
            if isinstance(self._error, DeadlineError):
                text = f"{_timed_out(self._timeout_s)}: {text}"
            raise dist.DistBackendError(f"dblp: {self._what}: {text}") from self._error


class JoinedWork(DblpWork):
    """Several works as one: what ``_end_coalescing`` and the coalesced collectives hand back."""

    def __init__(
        self,
        what: str,
        timeout_s: float,
        works: Sequence[c10d.Work],
        outputs: Sequence[torch.Tensor] | None = None,
        restore: Restore | None = None,
    ) -> None:
        """``outputs``: if not those of the works; ``restore()`` is called when all works have ended well."""
        if outputs is None:
            outputs = [tensor for work in works for tensor in work.result()]
        super().__init__(what, timeout_s, outputs, restore)
        self._works = list(works)
        if self._works and isinstance(self._works[0], DblpWork):
            self.origin = self._works[0].origin
        self._left = len(self._works)
        self._count_lock = _thread.allocate_lock()
        if not self._works:
            self._end()
        for work in self._works:
            work.get_future().then(self._one_ended)

    def _one_ended(self, _: Future[Any]) -> None:
        with self._count_lock:
            self._left -= 1
            if self._left:
                return
        failed = [work for work in self._works if not work.is_success()]
        if failed and isinstance(failed[0], DblpWork):
            self._timeout_s = failed[0].timeout_s  # the error states it
        # All of them: several threads queue them, as rounds end, so none is known to be the last.
        self._arrivals = [
            arrival for work in self._works if isinstance(work, DblpWork) for arrival in work._arrivals
        ]
        self.finish(None, failed[0].exception() if failed else None)


_kept: deque[DblpWork] = deque(maxlen=_KEPT_WORKS)


def keep_if_small(work: DblpWork, tensor: torch.Tensor) -> None:
    """Keep the last works on single numbers alive. DDP hands such a work, of ``model.join()``, to its reducer in C++, which
    keeps only the C++ half of it; without the Python half the reducer's wait fails. Others stay with their callers."""
    if tensor.layout == torch.strided and tensor.untyped_storage().nbytes() <= _KEPT_BYTES:
        _kept.append(work)


def _timed_out(seconds: float) -> str:
    # gloo's words: scripts that tell timeouts from other errors look for them.
    return f"Timed out waiting {seconds * 1e3:.0f}ms"


class _Completer:
    """Daemon threads that run completions; a thread is added whenever all are busy, so none waits for
    another."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start anew; in a forked child, which has none of the threads."""
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._resting: set[int] = set()
        self._free = 0
        self._closed = False

    def submit(self, task: Callable[[], object]) -> None:
        """Run ``task`` soon on some thread; dropped once the interpreter exits."""
        with self._lock:
            if self._closed:
                return
            if self._free > 0:
                self._free -= 1
            else:
                self._start()
            self._queue.put(task)

    def runs_here(self) -> bool:
        """The calling thread is one of these."""
        return threading.current_thread() in self._threads

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """While the calling thread waits for the end of a collective: an exit doesn't wait for that."""
        ident = _thread.get_ident()
        self._resting.add(ident)
        try:
            yield
        finally:
            self._resting.discard(ident)

    def close(self, timeout_s: float = 5.0) -> None:
        """End idle threads and wait for busy ones, ``timeout_s`` in all: none may run Python code while the interpreter
        goes."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._queue.put(None)
        due = time.monotonic() + timeout_s
        while busy := [
            thread for thread in threads if thread.is_alive() and thread.ident not in self._resting
        ]:
            if time.monotonic() > due:
                break
            busy[0].join(0.01)

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name="dblp-completion", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            with contextlib.suppress(Exception):  # torch stores a callback's error in its future
                task()
            with self._lock:
                if self._free >= _IDLE_THREADS and not self._closed:
                    break
                self._free += 1
        with self._lock:
            self._threads.discard(threading.current_thread())


completer = _Completer()
"""The process's completion threads."""
os.register_at_fork(after_in_child=completer.reset)
at_exit(completer.close)  # after the engine: what a callback still waits for has then ended
