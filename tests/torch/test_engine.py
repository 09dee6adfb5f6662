"""The engine thread: order, results, errors, stopping, forks and the switch interval."""

import asyncio
import multiprocessing
import os
import subprocess
import sys
import threading

import pytest

from dblp.collectives import engine as engine_module
from dblp.collectives.engine import Engine, acquire_engine, release_engine
from dblp.errors import ClosedError


@pytest.fixture
def engine():
    made = acquire_engine(switch_interval_s=1e-3)
    yield made
    release_engine(made)


async def value(x):
    return x


async def forever():
    await asyncio.sleep(3600)


def test_run_returns_what_the_coroutine_returns(engine):
    assert engine.run(lambda: value(7)) == 7


def test_run_raises_what_the_coroutine_raises(engine):
    async def bad():
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        engine.run(bad)


def test_an_error_of_the_factory_itself_is_reported(engine):
    def factory():
        raise KeyError("made nothing")

    with pytest.raises(KeyError, match="made nothing"):
        engine.run(factory)


def test_factories_are_called_in_the_order_of_submission(engine):
    started, left = [], threading.Semaphore(0)

    def start(index):
        started.append(index)
        return value(index)

    for index in range(500):
        engine.submit(lambda index=index: start(index), lambda result, error: left.release())
    for _ in range(500):
        assert left.acquire(timeout=10)
    assert started == list(range(500))


def test_work_in_flight_fails_when_the_engine_stops():
    engine, outcomes = acquire_engine(), []
    engine.submit(forever, lambda result, error: outcomes.append(error))
    engine.run(lambda: value(0))
    release_engine(engine)
    assert [type(error) for error in outcomes] == [ClosedError]
    assert not engine.alive
    with pytest.raises(ClosedError, match="destroyed"):
        engine.submit(forever, lambda result, error: None)


def test_closers_are_awaited_before_the_loop_ends():
    engine, closed = acquire_engine(), []

    async def close(name):
        await asyncio.sleep(0)
        closed.append(name)

    engine.add_closer(lambda: close("kept"))
    engine.remove_closer(engine.add_closer(lambda: close("removed")))
    release_engine(engine)
    assert closed == ["kept"]


def test_a_dying_engine_thread_fails_what_is_pending():
    engine = Engine()
    outcomes, ended = [], threading.Event()

    def done(result, error):
        outcomes.append(error)
        ended.set()

    engine.submit(forever, done)

    async def die():
        raise SystemExit("out of memory, say")

    engine.submit(die, lambda result, error: None)
    assert ended.wait(10)
    assert isinstance(outcomes[0], ClosedError)
    with pytest.raises(ClosedError):
        engine.run(lambda: value(1))


def test_one_engine_is_shared_and_stops_with_its_last_user():
    first = acquire_engine()
    second = acquire_engine()
    assert first is second
    release_engine(first)
    assert second.alive
    release_engine(second)
    assert not second.alive
    third = acquire_engine()
    assert third is not first
    release_engine(third)


def test_the_switch_interval_is_lowered_and_restored():
    before = sys.getswitchinterval()
    engine = acquire_engine(switch_interval_s=50e-6)
    assert sys.getswitchinterval() == pytest.approx(50e-6)
    release_engine(engine)
    assert sys.getswitchinterval() == before


def test_an_interval_that_somebody_else_set_meanwhile_is_left_alone():
    before = sys.getswitchinterval()
    engine = acquire_engine(switch_interval_s=50e-6)
    sys.setswitchinterval(2e-3)
    release_engine(engine)
    assert sys.getswitchinterval() == pytest.approx(2e-3)
    sys.setswitchinterval(before)


def test_blocking_on_the_engine_thread_is_refused(engine):
    async def call_again():
        return engine.run(lambda: value(1))

    with pytest.raises(ClosedError, match="own engine thread"):
        engine.run(call_again)


def _in_child(engine, results):
    try:
        engine.run(lambda: value(1))
    except ClosedError as error:
        results.put(str(error))
    other = acquire_engine()
    results.put(other.run(lambda: value(5)))
    release_engine(other)


@pytest.mark.processes
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # Python 3.12 warns of forks beside threads: the very case
def test_a_forked_child_gets_a_clear_error_and_may_make_its_own(engine):
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(engine, results))
    child.start()
    message = results.get()
    assert str(os.getpid()) in message and "fork" in message
    assert results.get() == 5
    child.join(10)
    assert child.exitcode == 0


@pytest.mark.processes
def test_exit_with_work_in_flight_is_clean():
    code = (
        "import asyncio\n"
        "from dblp.collectives.engine import acquire_engine\n"
        "async def forever(): await asyncio.sleep(3600)\n"
        "engine = acquire_engine()\n"
        "engine.submit(forever, lambda result, error: print(type(error).__name__))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ClosedError\n", "")


def test_plain_asyncio_serves_where_uvloop_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    engine = engine_module.Engine()
    try:
        assert type(engine.loop).__module__.startswith("asyncio")
        assert engine.run(lambda: value(3)) == 3
    finally:
        engine.stop()
