"""The order of a group's calls where some must wait for a copy from a device before they can begin.

Rounds are numbered when they begin, and all ranks must number them alike. So a call that waits for its copy holds up the calls
behind it, which are ready; where nothing waits, calls begin at once, as they always did. Everything runs on the engine's loop but
the waiting for the copies, which a thread does in their order.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from dblp.collectives.torch.staging import Departure

_Ended: TypeAlias = "concurrent.futures.Future[None]"
Begin = Callable[[], Awaitable[Awaitable[Any]]]
"""``begin()``: waits for what it needs, begins its rounds, and returns what ends with them."""


class Turns:
    """One group's calls in their order."""

    def __init__(self) -> None:
        self._last: asyncio.Future[None] | None = None

    def start(self, departures: Sequence[Departure], call: Callable[[], Awaitable[Any]]) -> Awaitable[Any]:
        """``call()`` now, or, if it has to wait for copies or other calls, in its turn."""
        if not departures and self._last is None:
            return call()

        async def begin() -> Awaitable[Any]:
            await departed(departures)
            return call()

        return self.take(begin)

    def take(self, begin: Begin) -> asyncio.Task[Any]:
        """Begin when all calls before have begun; the result of what ``begin`` returned. The place is taken now."""
        loop = asyncio.get_running_loop()
        before, mine = self._last, loop.create_future()
        self._last = mine
        task = loop.create_task(self._take(before, mine, begin))
        task.add_done_callback(lambda _: self._begun(mine))  # if it was cancelled before it ran
        return task

    async def _take(
        self, before: asyncio.Future[None] | None, mine: asyncio.Future[None], begin: Begin
    ) -> Any:
        try:
            if before is not None:
                await asyncio.shield(before)
            running = await begin()
        finally:
            self._begun(mine)
        return await running

    def _begun(self, mine: asyncio.Future[None]) -> None:
        if not mine.done():
            mine.set_result(None)
        if self._last is mine:
            self._last = None


async def departed(departures: Sequence[Departure]) -> None:
    """Wait, on a loop, until copies have ended; raises what the device says of them."""
    if departures:
        await asyncio.wrap_future(_waiter.wait(departures))


class _Waiter:
    """A daemon thread that waits for copies, in the order in which they were queued, which is that of the side stream."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Sequence[Departure], _Ended]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wait(self, departures: Sequence[Departure]) -> _Ended:
        """A future of their end."""
        future: _Ended = concurrent.futures.Future()
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # the first time, and in a fork
                self._thread = threading.Thread(target=self._serve, name="dblp-staging", daemon=True)
                self._thread.start()
        self._queue.put((departures, future))
        return future

    def _serve(self) -> None:
        while True:
            departures, future = self._queue.get()
            error = _wait_for(departures)
            if not future.set_running_or_notify_cancel():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


def _wait_for(departures: Sequence[Departure]) -> Exception | None:
    try:
        for departure in departures:
            departure.wait()
    except Exception as error:  # of the device: whoever waits for the call raises it
        return error
    return None


_waiter = _Waiter()
