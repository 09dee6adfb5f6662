"""Virtual time: it jumps, it is ordered, and a run that cannot go on says why."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from dblp.errors import UnsupportedError
from dblp.sim import loop as loop_module
from dblp.sim.loop import SimulationDeadlock, SimulationLimit, VirtualLoop, run


def test_time_starts_at_zero_and_jumps_to_the_timers():
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        seen = [loop.time()]
        for delay in (0.5, 3000.0, 0.25):
            await asyncio.sleep(delay)
            seen.append(loop.time())
        return seen

    started = time.perf_counter()
    assert run(main()) == [0.0, 0.5, 3000.5, 3000.75]
    assert time.perf_counter() - started < 300.0  # an hour of waiting would take an hour


def test_timers_of_one_instant_run_in_the_order_in_which_they_were_set():
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        order: list[int] = []
        for number in range(200):
            loop.call_at(1.0, order.append, number)
        loop.call_at(0.5, order.append, -1)
        await asyncio.sleep(2.0)
        return order

    assert run(main()) == [-1, *range(200)]


def test_a_timer_in_the_past_runs_now_and_time_never_goes_back():
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(1.0)
        late: asyncio.Future[float] = loop.create_future()
        loop.call_at(0.25, lambda: late.set_result(loop.time()))
        return await late, loop.time()

    assert run(main()) == (1.0, 1.0)


def test_a_due_timer_runs_although_callbacks_keep_the_loop_busy():
    async def main() -> int:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        loop.call_later(0.0, done.set)
        spins = 0
        while not done.is_set():
            spins += 1
            await asyncio.sleep(0)
        return spins

    assert run(main()) < 3


def test_cancelled_timers_neither_run_nor_hold_memory():
    async def main() -> tuple[list[str], int]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        ran: list[str] = []
        loop.call_at(500.0, ran.append, "kept")
        largest = 0
        for _ in range(5000):
            loop.call_at(100.0, ran.append, "cancelled").cancel()
            largest = max(largest, len(loop._timers))
        await asyncio.sleep(600.0)
        return ran, largest

    ran, largest = run(main())
    assert ran == ["kept"]
    assert largest < 200


def test_wait_for_times_out_in_virtual_time():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 30.0)
        return asyncio.get_running_loop().time()

    assert run(main()) == 30.0


def test_deadlock_is_an_error_that_names_the_tasks_and_where_they_wait():
    async def waiter() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(2.0)
        await asyncio.gather(
            asyncio.create_task(waiter(), name="rank 0"), asyncio.create_task(waiter(), name="rank 1")
        )

    with pytest.raises(SimulationDeadlock, match=r"2\.000000 s.*rank 0.*rank 1") as caught:
        run(main())
    assert len(caught.value.tasks) == 3
    assert any("waiter" in task and "> locks.py" in task for task in caught.value.tasks)


def test_cancelled_timers_alone_are_a_deadlock():
    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, print).cancel()
        await asyncio.Event().wait()

    with pytest.raises(SimulationDeadlock):
        run(main())


def test_the_limit_of_virtual_time():
    async def main() -> None:
        while True:
            await asyncio.sleep(1.0)

    with pytest.raises(SimulationLimit, match=r"10 s of virtual time.*main"):
        run(main(), until_s=10.0)


def test_the_limit_of_events():
    async def main() -> None:
        while True:
            await asyncio.sleep(1e-9)

    with pytest.raises(SimulationLimit, match="1000 events"):
        run(main(), max_events=1000)


def test_a_spin_at_one_instant_is_found(monkeypatch):
    monkeypatch.setattr(loop_module, "MAX_EVENTS_AT_ONCE", 1000)

    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(SimulationLimit, match="at one instant"):
        run(main())


def test_an_exception_in_a_callback_ends_the_run():
    def broken() -> None:
        raise KeyError("broken callback")

    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, broken)
        await asyncio.sleep(2.0)

    with pytest.raises(KeyError, match="broken callback"):
        run(main())


def test_run_returns_raises_and_cancels_what_is_left():
    ended: list[str] = []

    async def left() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(5.0)
            ended.append("left")

    async def main() -> None:
        tasks.append(asyncio.create_task(left()))
        await asyncio.sleep(0)
        raise ValueError("from main")

    tasks: list[asyncio.Task[None]] = []
    with pytest.raises(ValueError, match="from main"):
        run(main())
    assert ended == ["left"]
    assert tasks[0].cancelled()


def test_a_task_that_ignores_cancellation_does_not_hang_the_end():
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    async def main() -> str:
        tasks.append(asyncio.create_task(stubborn()))
        await asyncio.sleep(0)
        return "done"

    tasks: list[asyncio.Task[None]] = []
    assert run(main()) == "done"


@pytest.mark.parametrize(
    "call",
    [
        lambda loop: loop.run_in_executor(None, print),
        lambda loop: loop.getaddrinfo("localhost", 80),
        lambda loop: loop.create_datagram_endpoint(asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0)),
        lambda loop: loop.create_connection(asyncio.Protocol, "127.0.0.1", 1),
        lambda loop: loop.add_reader(0, print),
        lambda loop: loop.sock_recv(socket.socket, 1),
        lambda loop: loop.subprocess_exec(asyncio.SubprocessProtocol, "true"),
        lambda loop: loop.add_signal_handler(2, print),
    ],
)
def test_what_leaves_virtual_time_is_refused(call):
    async def main() -> None:
        await call(asyncio.get_running_loop())

    with pytest.raises(UnsupportedError, match="under virtual time"):
        run(main())


def test_a_call_from_another_thread_is_refused():
    async def main() -> list[Exception]:
        loop = asyncio.get_running_loop()
        errors: list[Exception] = []

        def other() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except UnsupportedError as error:
                errors.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        loop.call_soon_threadsafe(errors.append, ValueError("the loop's own thread may"))
        await asyncio.sleep(0)
        return errors

    errors = run(main())
    assert [type(error) for error in errors] == [UnsupportedError, ValueError]


def test_debug_mode_works():
    async def main() -> float:
        await asyncio.sleep(1.0)
        return asyncio.get_running_loop().time()

    assert run(main(), debug=True) == 1.0


def test_timers_that_do_not_move_the_clock_are_found(monkeypatch):
    """Rounding can make a delay vanish: a callback that waits for it would spin without end."""
    monkeypatch.setattr(loop_module, "MAX_EVENTS_AT_ONCE", 1000)

    async def main():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(1.0)

        def again():
            loop.call_at(loop.time() + 1e-18, again)

        again()
        await asyncio.sleep(1.0)

    with pytest.raises(SimulationLimit, match="at one instant"):
        run(main())
