"""Deadlines where the process stood still: on a real loop, with all of its timers late."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from dblp.collectives.deadline import LATE_S, Deadline


class Endpoint:
    """Counts pings."""

    def __init__(self) -> None:
        self.pings = 0

    def ping(self, peers: Any) -> None:
        self.pings += 1


def expired(timeout_s: float, stall_s: float, *, cancel_after_s: float | None = None) -> tuple[float, int]:
    """Seconds after which a deadline expired (infinity: not within two seconds more), and its pings, where the loop stands still
    from its begin on; ``cancel_after_s``: what came meanwhile cancels it so long after the stall."""

    async def main() -> tuple[float, int]:
        loop, endpoint = asyncio.get_running_loop(), Endpoint()
        over = loop.create_future()
        begun = loop.time()
        deadline = Deadline(endpoint, [1], timeout_s, lambda: over.set_result(loop.time() - begun))  # type: ignore[arg-type]
        time.sleep(stall_s)
        if cancel_after_s is not None:
            loop.call_later(cancel_after_s, deadline.cancel)
        try:
            async with asyncio.timeout(timeout_s + 2.0):
                return await over, endpoint.pings
        except TimeoutError:
            return float("inf"), endpoint.pings

    return asyncio.run(main())


def test_in_time_it_expires_at_once_after_three_pings():
    took, pings = expired(0.4, 0.0)
    assert took >= 0.4 and pings == 3


@pytest.mark.parametrize(("stall_s", "grace_s"), [(0.5, 0.3), (1.8, 1.0)])
def test_after_a_stall_what_came_is_read_first(stall_s, grace_s):
    took, pings = expired(0.2, stall_s)
    assert took >= stall_s + grace_s - LATE_S
    assert pings >= 1, "the peers are asked whether they live once the process does"


def test_what_came_during_the_stall_counts():
    assert expired(0.2, 0.6, cancel_after_s=0.1)[0] == float("inf")
