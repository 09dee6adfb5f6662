"""A signal that dumps the flight recorders of a process: ``kill -USR1`` on a rank that hangs.

Theory of operation. A handler written in Python runs when the main thread next executes Python, which it does not while it waits
inside C++, as in the backward pass of DDP: just when one wants to look. But the interpreter also writes the signal's number to a
descriptor, in the signal's own context (``signal.set_wakeup_fd``); the engine's loop reads it there and dumps. Where the
descriptor is taken (by an event loop on the main thread), the Python handler has to do.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from dblp.errors import ConfigError

_log = logging.getLogger("dblp")
Dump = Callable[[str], object]
"""``dump(reason)``; called on the engine's thread."""


def parse_signal(name: str) -> signal.Signals:
    """The signal of a name such as ``SIGUSR1`` or ``usr1``; raises ConfigError for what is none or cannot be caught."""
    full = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
    number = getattr(signal, full, None)
    if not isinstance(number, signal.Signals) or number in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigError(f"flight_signal={name!r}: a signal that can be caught is needed, such as 'SIGUSR1'")
    return number


def watch(name: str, loop: asyncio.AbstractEventLoop, dump: Dump) -> Callable[[], None]:
    """Have ``dump`` called on ``loop``, which another thread runs, at each signal; returns what ends that. Only the main thread
    may do so: elsewhere a warning says that the signal will dump nothing. Raises ConfigError as ``parse_signal`` does."""
    number = parse_signal(name)
    if threading.current_thread() is not threading.main_thread():
        _log.warning(
            "flight_signal=%r: only groups that are made on the main thread can watch a signal", name
        )
        return _nothing
    found = _watches.get(number)
    if found is None or found.loop is not loop:
        if found is not None:
            found.close()
        found = _watches[number] = _Watch(number, loop)
    return found.add(dump)


class _Watch:
    """One signal and all who want to know of it."""

    def __init__(self, number: signal.Signals, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._number = number
        self._dumps: list[Dump] = []
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._before: Any = signal.signal(number, self._on_signal)
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
        loop.call_soon_threadsafe(loop.add_reader, self._reader.fileno(), self._on_wakeup)

    def add(self, dump: Dump) -> Callable[[], None]:
        self._dumps.append(dump)

        def remove() -> None:
            if dump in self._dumps:
                self._dumps.remove(dump)
            if not self._dumps and threading.current_thread() is threading.main_thread():
                self.close()

        return remove

    def close(self) -> None:
        """On the main thread: what handled the signal before does so again."""
        if _watches.get(self._number) is self:
            del _watches[self._number]
        if signal.getsignal(self._number) == self._on_signal:
            signal.signal(self._number, self._before)
        taken = signal.set_wakeup_fd(-1)
        if taken not in (-1, self._writer.fileno()):
            signal.set_wakeup_fd(taken)
        if self.loop.is_closed():
            self._let_go()
        else:
            self.loop.call_soon_threadsafe(self._let_go)

    def _let_go(self) -> None:
        if not self.loop.is_closed():
            self.loop.remove_reader(self._reader.fileno())
        self._reader.close()
        self._writer.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, sooner or later: needed only if the descriptor is another's."""
        ours = self._writer.fileno()
        taken = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if taken != ours:
            if taken != -1:
                signal.set_wakeup_fd(taken)
            self.loop.call_soon_threadsafe(self._tell)
        if callable(self._before):
            self._before(number, frame)

    def _on_wakeup(self) -> None:
        if int(self._number) in self._reader.recv(64):
            self._tell()

    def _tell(self) -> None:
        for dump in [*self._dumps]:
            dump(f"asked for by {self._number.name}")


_watches: dict[signal.Signals, _Watch] = {}


def _nothing() -> None:
    """Nothing is watched."""
