"""An asyncio event loop whose clock is virtual: a run of minutes takes seconds and replays exactly.

Theory of operation: a coroutine under this loop never waits for anything outside of the process, so whenever
no callback is ready, nothing can happen before the next timer: the clock jumps there. Timers of one instant
run in the order in which they were set (asyncio's own heap leaves that open). If there is neither a callback
nor a timer, nothing will ever happen: that is a deadlock, and an error instead of a hang.

Sockets, files, signals, subprocesses and threads are refused with UnsupportedError.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from dblp.errors import LocalError, UnsupportedError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

UNTIL_S = 3600.0
"""Default limit of virtual time: far above any timeout of the protocol, so what runs into it is a fault."""
MAX_EVENTS = 50_000_000
"""Default limit of callbacks: minutes of real time."""
MAX_EVENTS_AT_ONCE = 1_000_000
"""Callbacks at one instant: more are a loop that waits for time to pass without letting it (``sleep(0)``)."""
MAX_EVENTS_AT_CLOSE = 100_000
"""Callbacks that cancelled tasks may take to end."""
SHOWN_TASKS = 20
"""Pending tasks that an error lists before it only counts them."""
SHOWN_CALLS = 4
"""Calls of a pending task that an error shows, innermost last."""


class SimulationError(LocalError):
    """A simulated run cannot go on. ``tasks`` describes the tasks that were pending."""

    code = "simulation"

    def __init__(self, message: str, tasks: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tasks = tasks


class SimulationDeadlock(SimulationError):
    """No callback is ready, no timer is set, and the run is not done."""

    code = "simulation-deadlock"


class SimulationLimit(SimulationError):
    """The run reached its limit of virtual time or of events."""

    code = "simulation-limit"


class _Timer(asyncio.TimerHandle):
    """A timer; ``_scheduled`` is True while it stands in the loop's heap."""

    __slots__ = ()
    _scheduled: bool
    _cancelled: bool


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time; ``time()`` starts at 0.0.

    ``until_s``: virtual seconds, ``max_events``: callbacks, beyond which SimulationLimit is raised. An
    exception in a callback (not in a task) ends the run and is raised as it is: in a simulation it is a bug
    and must not only be logged.
    """

    virtual = True
    """Tells code that would read a finer clock elsewhere that ``time()`` is the only one."""

    # Attributes of BaseEventLoop that typeshed leaves out.
    _ready: deque[asyncio.Handle]
    _stopping: bool
    _thread_id: int | None
    _check_closed: Callable[[], None]

    def __init__(self, *, until_s: float = UNTIL_S, max_events: int = MAX_EVENTS) -> None:
        super().__init__()
        self.until_s = until_s
        self.max_events = max_events
        self.events = 0
        self._events_before = 0  # events when the clock last moved
        self._now = 0.0
        self._order = 0
        self._timers: list[tuple[float, int, _Timer]] = []
        self._cancelled = 0
        self._failure: BaseException | None = None

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run ``callback(*args)`` at virtual time ``when`` (now, if that has passed)."""
        self._check_closed()
        timer = _Timer(when, callback, args, self, context)
        timer._scheduled = True
        self._order += 1
        heapq.heappush(self._timers, (when, self._order, timer))
        return timer

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run ``callback(*args)`` after ``delay`` virtual seconds."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As ``call_soon``; UnsupportedError from another thread than the loop's: that would not replay."""
        if self._thread_id not in (None, threading.get_ident()):
            raise UnsupportedError("call_soon_threadsafe from another thread: a simulation has one thread")
        return self.call_soon(callback, *args, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep a callback's exception, to end the run with it; anything else goes the usual way."""
        error = context.get("exception")
        if error is not None and "handle" in context:
            self._failure = self._failure or error
            return
        super().call_exception_handler(context)

    def close(self) -> None:
        """Forget all timers and close; idempotent."""
        self._timers.clear()
        super().close()

    # What BaseEventLoop calls.

    def _run_once(self) -> None:
        if not self._ready:
            self._advance()
        self._take_due()
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle._cancelled:
                continue
            self.events += 1
            handle._run()
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
        if self.events > self.max_events:
            raise self._limit(f"{self.max_events} events")
        if self.events - self._events_before > MAX_EVENTS_AT_ONCE:
            raise self._limit(f"{MAX_EVENTS_AT_ONCE} events at one instant (does a task spin on sleep(0)?)")

    def _advance(self) -> None:
        """Jump to the next timer that was not cancelled."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            self._pop()
        if not timers:
            if self._stopping:
                return
            raise self._deadlock()
        if timers[0][0] > self.until_s:
            raise self._limit(f"{self.until_s:g} s of virtual time")
        if timers[0][0] > self._now:
            self._now = timers[0][0]
            self._events_before = self.events

    def _take_due(self) -> None:
        """Make the timers that are due ready, in the order of their times, then of their setting."""
        while self._timers and self._timers[0][0] <= self._now:
            timer = self._pop()
            if not timer._cancelled:
                self._ready.append(timer)

    def _pop(self) -> _Timer:
        timer = heapq.heappop(self._timers)[2]
        timer._scheduled = False
        self._cancelled -= timer._cancelled
        return timer

    def _timer_handle_cancelled(self, handle: _Timer) -> None:
        """Drop cancelled timers once they are the greater part: protocols re-arm theirs at each event."""
        if not handle._scheduled:
            return
        self._cancelled += 1
        if self._cancelled > 64 and self._cancelled * 2 > len(self._timers):
            # The handle at hand is marked as cancelled only after this call.
            self._timers = [
                entry for entry in self._timers if not entry[2]._cancelled and entry[2] is not handle
            ]
            heapq.heapify(self._timers)
            handle._scheduled = False
            self._cancelled = 0

    def _deadlock(self) -> SimulationDeadlock:
        tasks = self._pending()
        return SimulationDeadlock(
            f"deadlock at {self._now:.6f} s of virtual time: nothing is scheduled, "
            f"so these tasks wait for ever: {_listed(tasks)}",
            tasks,
        )

    def _limit(self, limit: str) -> SimulationLimit:
        tasks = self._pending()
        return SimulationLimit(
            f"the simulation reached its limit of {limit}, at {self._now:.6f} s after {self.events} events; "
            f"raise until_s or max_events if it may take so long. Pending: {_listed(tasks)}",
            tasks,
        )

    def _pending(self) -> tuple[str, ...]:
        return tuple(sorted(_describe(task) for task in asyncio.all_tasks(self)))


def run(
    main: Coroutine[Any, Any, T],
    *,
    until_s: float = UNTIL_S,
    max_events: int = MAX_EVENTS,
    debug: bool = False,
) -> T:
    """Run a coroutine in virtual time from 0.0 and return its result, as ``asyncio.run`` does.

    Raises what the coroutine or a callback raises, SimulationDeadlock, or SimulationLimit beyond ``until_s``
    virtual seconds or ``max_events`` callbacks. Tasks that are left are cancelled.
    """
    loop = VirtualLoop(until_s=until_s, max_events=max_events)
    loop.set_debug(debug)
    try:
        return loop.run_until_complete(main)
    finally:
        try:
            _cancel_all(loop)
        finally:
            loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    """Cancel what is left; a task that will not end is left behind (the run's own error says more)."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.until_s = float("inf")
    loop.max_events = loop.events + MAX_EVENTS_AT_CLOSE
    try:
        if tasks:
            loop.run_until_complete(_settle(tasks))
        loop.run_until_complete(loop.shutdown_asyncgens())
    except SimulationError:
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # the error has named it


async def _settle(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def _describe(task: asyncio.Task[Any]) -> str:
    """Name a task and where it waits: the innermost calls of its chain of awaits."""
    coro: Any = task.get_coro()
    name = f"{task.get_name()} ({getattr(coro, '__qualname__', coro)})"
    calls: list[str] = []
    while (frame := getattr(coro, "cr_frame", None)) is not None:
        calls.append(f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}")
        coro = coro.cr_await
    return f"{name} at {' > '.join(calls[-SHOWN_CALLS:])}" if calls else name


def _listed(tasks: tuple[str, ...]) -> str:
    shown = "; ".join(tasks[:SHOWN_TASKS]) or "none"
    return shown + (f"; and {len(tasks) - SHOWN_TASKS} more" if len(tasks) > SHOWN_TASKS else "")


_REFUSED = (
    *("run_in_executor", "getaddrinfo", "getnameinfo"),
    *("create_connection", "create_server", "create_datagram_endpoint", "create_unix_connection"),
    *("create_unix_server", "connect_accepted_socket", "start_tls", "sendfile"),
    *("add_reader", "remove_reader", "add_writer", "remove_writer"),
    *("add_signal_handler", "remove_signal_handler"),
    *("sock_recv", "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into", "sock_sendall", "sock_sendto"),
    *("sock_connect", "sock_accept", "sock_sendfile"),
    *("connect_read_pipe", "connect_write_pipe", "subprocess_exec", "subprocess_shell"),
)
"""Calls that would leave virtual time."""


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: VirtualLoop, *args: object, **kwargs: object) -> NoReturn:
        raise UnsupportedError(
            f"{name} under virtual time: a simulation has no sockets, files, threads or processes; "
            "use dblp.sim.port for a network and call_at for time"
        )

    refuse.__name__ = name
    return refuse


for _name in _REFUSED:
    setattr(VirtualLoop, _name, _refusal(_name))
