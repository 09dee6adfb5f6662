"""Tensors on a device, by a stand-in: what is checked is order and correctness, not a GPU's speed (``tests.benchmarks.cuda``)."""

import asyncio
import functools

import pytest

from dblp.collectives.torch.turns import Turns, departed


@pytest.mark.processes
@pytest.mark.sockets
@pytest.mark.parametrize(
    "scenario",
    [
        "device_order",
        "device_kinds",
        "device_coalesced",
        "device_sparse",
        "device_sparse_coalesced",
        "device_segments",
        "device_futures",
        "device_fails",
    ],
)
def test_device_tensors(ranks, scenario):
    ranks(scenario, 2)


@pytest.mark.processes
@pytest.mark.sockets
def test_an_interpreter_ends_though_a_copy_does_not(ranks):
    assert ranks("device_exit", 2, timeout_s=15) == ["", ""]


class Copy:
    """A departure that ends when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


def test_calls_that_wait_for_nothing_begin_at_once():
    async def main() -> None:
        turns, begun = Turns(), []

        async def call(name: str) -> str:
            return name

        def begin(name: str):
            begun.append(name)
            return call(name)

        first = turns.start((), functools.partial(begin, "a"))
        assert begun == ["a"], "without a turn of the loop"
        assert await first == "a"

    asyncio.run(main())


def test_calls_begin_in_order_behind_one_that_waits():
    async def main() -> list[str]:
        turns, begun, gate = Turns(), [], asyncio.Event()

        async def slow():
            await gate.wait()
            begun.append("first")
            return asyncio.sleep(0, "first")

        async def end(name: str) -> str:
            return name

        def begin(name: str):
            begun.append(name)
            return end(name)

        tasks = [asyncio.ensure_future(turns.take(slow))]
        await asyncio.sleep(0)
        for name in ("second", "third"):
            tasks.append(asyncio.ensure_future(turns.start((), functools.partial(begin, name))))
        await asyncio.sleep(0.01)
        assert begun == []
        gate.set()
        assert await asyncio.gather(*tasks) == ["first", "second", "third"]
        return begun

    assert asyncio.run(main()) == ["first", "second", "third"]


def test_a_call_whose_copy_fails_or_that_is_cancelled_lets_the_next_go_on():
    async def main() -> None:
        turns = Turns()

        async def end() -> int:
            return 5

        failing = turns.start([Copy(OSError("the device is gone"))], end)  # type: ignore[list-item]
        task, after = asyncio.ensure_future(failing), None
        await asyncio.sleep(0)
        after = asyncio.ensure_future(turns.start((), end))
        with pytest.raises(OSError, match="the device is gone"):
            await task
        assert await after == 5

        async def never():
            await asyncio.sleep(3600)
            return end()

        stuck = asyncio.ensure_future(turns.take(never))
        await asyncio.sleep(0)
        after = asyncio.ensure_future(turns.start([Copy()], end))  # type: ignore[list-item]
        await asyncio.sleep(0)
        stuck.cancel()
        assert await after == 5

    asyncio.run(main())


def test_nothing_to_wait_for_is_no_wait():
    asyncio.run(departed(()))
