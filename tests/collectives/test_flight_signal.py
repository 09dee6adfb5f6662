"""The signal that dumps: it reaches the engine's loop, whoever else wants signals, and leaves no trace."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dblp.collectives.flight_signal import parse_signal, watch
from dblp.errors import ConfigError

SIGNAL = signal.SIGUSR2


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that runs on another thread, as the engine's does."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(10)
    made.close()


class Heard:
    """What was dumped, and by which thread."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.threads: set[int] = set()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self.threads.add(threading.get_ident())

    def wait(self, count: int) -> None:
        deadline = time.monotonic() + 10
        while len(self.reasons) < count and time.monotonic() < deadline:
            time.sleep(0.005)
        assert self.reasons == ["asked for by SIGUSR2"] * count


def let_go(loop: asyncio.AbstractEventLoop) -> None:
    """Wait until the loop has done what was asked of it."""
    done = threading.Event()
    loop.call_soon_threadsafe(lambda: loop.call_soon(done.set))
    assert done.wait(10)


@pytest.fixture
def before() -> Iterator[list[int]]:
    """A handler that was there before; it must be there afterwards, and no descriptor may be left."""
    calls: list[int] = []

    def handler(number: int, frame: object) -> None:
        calls.append(number)

    first = signal.signal(SIGNAL, handler)
    yield calls
    assert signal.getsignal(SIGNAL) == handler
    assert signal.set_wakeup_fd(-1) == -1
    signal.signal(SIGNAL, first)


def test_all_who_watch_hear_on_the_loops_thread_and_so_does_who_was_there_before(loop, before):
    first, second = Heard(), Heard()
    ends = [watch("SIGUSR2", loop, first), watch("usr2", loop, second)]
    os.kill(os.getpid(), SIGNAL)
    first.wait(1)
    second.wait(1)
    assert first.threads == second.threads and threading.get_ident() not in first.threads
    ends[0]()
    os.kill(os.getpid(), SIGNAL)
    second.wait(2)
    assert len(first.reasons) == 1 and before == [SIGNAL] * 2
    ends[1]()
    let_go(loop)
    os.kill(os.getpid(), SIGNAL)
    assert len(second.reasons) == 2 and before == [SIGNAL] * 3


def test_where_the_descriptor_is_anothers_the_python_handler_does_it(loop, before):
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.setblocking(False)
        signal.set_wakeup_fd(mine.fileno())
        heard = Heard()
        end = watch("SIGUSR2", loop, heard)
        os.kill(os.getpid(), SIGNAL)
        heard.wait(1)
        assert theirs.recv(16) == bytes([SIGNAL]), "the other one has it as well"
        end()
        let_go(loop)
        assert signal.set_wakeup_fd(-1) == mine.fileno()


def test_other_signals_dump_nothing(loop, before):
    heard = Heard()
    end = watch("SIGUSR2", loop, heard)
    other = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    let_go(loop)
    os.kill(os.getpid(), SIGNAL)
    heard.wait(1)
    signal.signal(signal.SIGUSR1, other)
    end()
    let_go(loop)


def test_only_the_main_thread_can_watch(loop, before, caplog):
    heard = Heard()
    thread = threading.Thread(target=lambda: watch("SIGUSR2", loop, heard)())
    thread.start()
    thread.join(10)
    assert "only groups that are made on the main thread" in caplog.text
    os.kill(os.getpid(), SIGNAL)
    assert before == [SIGNAL] and heard.reasons == []


@pytest.mark.parametrize("name", ["SIGKILL", "stop", "SIGNAL", "10", "SIG_DFL"])
def test_names_that_are_no_signal_to_catch_are_refused(name):
    with pytest.raises(ConfigError, match="flight_signal="):
        parse_signal(name)
