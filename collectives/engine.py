"""The engine: one thread a process that runs an event loop, where all endpoints and rounds live.

Callers hand over coroutine factories from any thread (``submit``) and are called back when the work has
ended. The factories are called on the engine's thread in the order of submission, so rounds are numbered in
call order.

The switch interval. CPython lets a waiting thread ask for the interpreter lock only after
``sys.getswitchinterval()``, 5 ms by default: with a busy pure-Python main thread every wake-up of the engine
would cost 5 ms. While an engine is alive the interval is lowered to ``switch_interval_s`` (50 us by default,
for the whole process) and restored when the last group has gone. Raising it while the engine works on a batch
and lowering it before the engine waits was tried and does not help (``tests/benchmarks/switch_interval.py``):
the evicted main thread reads the interval the moment it loses the lock, before the engine can raise it, and
the engine, thrown out all the same, would itself wait the long interval.

Placement. The engine's thread is bound to a share of the process's processors (``bind``, ``placement``); no other thread is.

Processes. A forked child has no engine thread; there every call on a group of its parent raises ClosedError,
and new groups get a new engine.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Generic, TypeVar

from dblp.errors import ClosedError

T = TypeVar("T")
Done = Callable[[Any, BaseException | None], None]
"""``done(result, error)``: called once when submitted work has ended; one of the two is None."""

_STOP_SECONDS = 5.0
"""How long stopping waits for closers (lingering endpoints) before it cuts them off; atexit must not hang."""
_log = logging.getLogger("dblp.engine")


class Engine:
    """A thread with an event loop (uvloop; asyncio where it is missing). Stopped by ``stop`` or at exit."""

    def __init__(self, *, switch_interval_s: float = 50e-6) -> None:
        self._pid = os.getpid()
        self._sharers = 0  # ranks among which the processors were shared that the thread is bound to
        self._lock = threading.Lock()
        self._inbox: deque[_Job] = deque()
        self._jobs: dict[asyncio.Future[Any], _Job] = {}
        self._closers: dict[int, Callable[[], Awaitable[None]]] = {}
        self._closers_made = 0
        self._woken = False
        self._closed: str | None = None
        self._interval = _SwitchInterval(switch_interval_s)
        self._loop = _new_event_loop()
        self._thread = threading.Thread(target=self._main, name="dblp-engine", daemon=True)
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The engine's event loop."""
        return self._loop

    @property
    def alive(self) -> bool:
        """True while work may be submitted from this process."""
        return self._closed is None and self._pid == os.getpid() and self._thread.is_alive()

    @property
    def owned(self) -> bool:
        """True in the process that made it, False in a fork."""
        return self._pid == os.getpid()

    def submit(self, start: Callable[[], Awaitable[T]], done: Done) -> None:
        """Await ``start()`` on the engine; ``done`` is called on the engine's thread when it has ended.

        Raises ClosedError if the engine is stopped or belongs to the parent process.
        """
        self._check_process()
        with self._lock:
            if self._closed is not None:
                raise ClosedError(self._closed)
            self._inbox.append(_Job(start, done))
            if not self._woken:
                self._woken = True
                self._loop.call_soon_threadsafe(self._drain)

    def run(self, start: Callable[[], Awaitable[T]]) -> T:
        """Run ``start()`` on the engine and wait for its result; raises what it raises."""
        if threading.current_thread() is self._thread:
            raise ClosedError(
                "a blocking dblp call on dblp's own engine thread would wait for itself; await instead"
            )
        call: _BlockingCall[T] = _BlockingCall()
        self.submit(start, call.finish)
        return call.wait()

    def bind(self, processors: Collection[int], sharers: int) -> None:
        """Have the engine's thread keep to these processors, unless a group whose ranks share them among as many or more has said
        so before."""
        self._loop.call_soon_threadsafe(self._bind, processors, sharers)

    def add_closer(self, close: Callable[[], Awaitable[None]]) -> int:
        """Have ``close()`` awaited when the engine stops; returns a token for ``remove_closer``."""
        with self._lock:
            self._closers_made += 1
            self._closers[self._closers_made] = close
            return self._closers_made

    def remove_closer(self, token: int) -> None:
        """Forget a closer; idempotent."""
        with self._lock:
            self._closers.pop(token, None)

    def stop(self, reason: str = "the process group was destroyed") -> None:
        """Fail work in flight, close what is open, end the thread, restore the switch interval;
        idempotent."""
        if self._pid != os.getpid():
            return  # a forked child owns neither the thread nor the sockets' other end
        with self._lock:
            if self._closed is not None:
                return
            self._closed = f"dblp's engine is stopped: {reason}"
            self._loop.call_soon_threadsafe(self._begin_stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_SECONDS + 1.0)

    def forget(self) -> None:
        """In a forked child: undo what the parent's engine set in this process."""
        self._interval.restore()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(
                f"this dblp group was made in process {self._pid}, but process {os.getpid()} is a fork of it "
                "and has no engine thread; make the group after the fork, or start workers with 'spawn'"
            )

    # From here on: the engine's thread.

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        cause = "its thread has ended"
        try:
            self._loop.run_forever()
        except BaseException as error:  # whatever it was, callers must not wait for ever
            cause = f"its thread died of {type(error).__name__}: {error}"
            _log.exception("dblp's engine died")
        finally:
            self._fail_rest(cause)
            self._interval.restore()
            self._loop.close()

    def _bind(self, processors: Collection[int], sharers: int) -> None:
        if sharers <= self._sharers:
            return
        self._sharers = sharers
        try:
            os.sched_setaffinity(0, processors)  # of the calling thread
        except OSError as error:  # one has been taken away since: slower perhaps, never wrong
            _log.warning("the engine cannot be bound to processors %s: %s", sorted(processors), error)

    def _drain(self) -> None:
        # Cleared first: what is appended during the loop either is seen by it or wakes the engine again.
        self._woken = False
        while self._inbox:
            self._begin(self._inbox.popleft())

    def _begin(self, job: _Job) -> None:
        try:
            task = asyncio.ensure_future(job.start(), loop=self._loop)
        except Exception as error:
            job.finish(None, error)
            return
        self._jobs[task] = job
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        job = self._jobs.pop(task)
        if task.cancelled():
            job.finish(None, ClosedError(self._closed or "the work was cancelled"))
        elif (error := task.exception()) is not None:
            job.finish(None, error)
        else:
            job.finish(task.result(), None)

    def _begin_stop(self) -> None:
        self._stopping = self._loop.create_task(self._stop())

    async def _stop(self) -> None:
        try:
            for task in list(self._jobs):
                task.cancel()
            closers = [self._close_one(close) for close in self._closers.values()]
            await asyncio.wait_for(
                asyncio.gather(*self._jobs, *closers, return_exceptions=True), _STOP_SECONDS
            )
        except TimeoutError:
            _log.warning("dblp's engine stopped before everything was closed")
        finally:
            self._loop.stop()

    async def _close_one(self, close: Callable[[], Awaitable[None]]) -> None:
        await close()

    def _fail_rest(self, cause: str) -> None:
        with self._lock:
            self._closed = self._closed or f"dblp's engine is stopped: {cause}"
            rest = [*self._jobs.values(), *self._inbox]
            self._jobs.clear()
            self._inbox.clear()
        for job in rest:
            job.finish(None, ClosedError(self._closed))


class _Job:
    __slots__ = ("done", "start")

    def __init__(self, start: Callable[[], Awaitable[Any]], done: Done) -> None:
        self.start = start
        self.done = done

    def finish(self, result: object, error: BaseException | None) -> None:
        try:
            self.done(result, error)
        except Exception:
            _log.exception("a completion callback raised")


class _BlockingCall(Generic[T]):
    """A result that one thread waits for."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    def finish(self, result: T | None, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self._ended.set()

    def wait(self) -> T:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # T itself may be None


class _SwitchInterval:
    """Lowers the interpreter's switch interval and puts it back, unless somebody has changed it since."""

    def __init__(self, seconds: float) -> None:
        self._before = sys.getswitchinterval()
        self._set = 0.0
        if 0 < seconds < self._before:
            sys.setswitchinterval(seconds)
            self._set = sys.getswitchinterval()

    def restore(self) -> None:
        if self._set and sys.getswitchinterval() == self._set:
            sys.setswitchinterval(self._before)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class _Shared:
    """The process's engine and the number of groups that use it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: Engine | None = None
        self.users = 0


_shared = _Shared()


def acquire_engine(*, switch_interval_s: float = 50e-6) -> Engine:
    """The process's engine, started if there is none in this process; pair with ``release_engine``."""
    with _shared.lock:
        if _shared.engine is None or not _shared.engine.alive:
            _shared.engine = Engine(switch_interval_s=switch_interval_s)
            _shared.users = 0
        _shared.users += 1
        return _shared.engine


def release_engine(engine: Engine) -> None:
    """Give the engine back; the last one to do so stops it."""
    with _shared.lock:
        if engine is not _shared.engine:
            return
        _shared.users -= 1
        if _shared.users > 0:
            return
        _shared.engine = None
    engine.stop()


def _after_fork() -> None:
    # The lock may have been held by a thread that does not exist in the child.
    _shared.lock = threading.Lock()
    if _shared.engine is not None:
        _shared.engine.forget()
    _shared.engine = None
    _shared.users = 0


_exit_calls: list[Callable[[], object]] = []


_leaving = threading.Event()


def leaving() -> bool:
    """True from the moment at which the interpreter's exit has come to the engine."""
    return _leaving.is_set()


def at_exit(call: Callable[[], object]) -> None:
    """Have ``call()`` called at interpreter exit, after the engine has stopped."""
    _exit_calls.append(call)


def _stop_at_exit() -> None:
    _leaving.set()
    engine = _shared.engine
    if engine is not None:
        engine.stop("the process is exiting")
    for call in _exit_calls:
        call()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_stop_at_exit)
