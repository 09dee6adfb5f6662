"""Ranks that leave a group, each when it has done its part: what they sent outlives them, and nobody else is disturbed.

Real endpoints on a simulated network, in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from dblp.collectives.group import Group
from dblp.errors import PeerError
from dblp.sim.loop import run as run_virtual
from dblp.transport.drop import Drop
from dblp.transport.endpoint import Endpoint
from tests.collectives.worlds import connect_network

LINGER_S = 2.0


class Rank:
    """One rank's group, and its endpoint to leave by."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.group = Group(endpoint)

    async def leave(self, linger_s: float = LINGER_S) -> float:
        """Close as ``Session.close`` does; returns the seconds that it took."""
        begun = self.endpoint.time()
        self.group.close()
        await self.endpoint.close(linger_s=linger_s)
        return self.endpoint.time() - begun

    async def send_and_leave(self, to: int, *, after_s: float = 0.0, count: int = 4) -> float:
        await asyncio.sleep(after_s)
        await self.group.send(full(self.endpoint.rank, count), to)
        return await self.leave()


def full(value: float, count: int = 4) -> np.ndarray[Any, Any]:
    return np.full(count, value, np.float32)


def play(*members: Callable[[Rank], Awaitable[Any]], **settings: Any) -> list[Any]:
    """Run one member a rank; results by rank."""

    async def main() -> list[Any]:
        endpoints = await connect_network(len(members), **settings)
        return await asyncio.gather(
            *(member(Rank(endpoint)) for member, endpoint in zip(members, endpoints, strict=True))
        )

    return run_virtual(main())


@pytest.mark.parametrize("impair", ["", "loss(0.3)"])
def test_a_source_that_left_does_not_disturb_who_receives_from_any(impair):
    """Rank 2 has sent and left while rank 0 waits for rank 1: the envelope that is posted for rank 2 never comes."""

    async def server(rank: Rank) -> list[int]:
        sources = [await rank.group.recv(full(0)) for _ in range(2)]
        await rank.leave()
        return sources

    members = [server, lambda rank: rank.send_and_leave(0, after_s=1.0), lambda rank: rank.send_and_leave(0)]
    assert play(*members, seed=3, impair=impair)[0] == [2, 1]


@pytest.mark.parametrize("count", [4, 50_000])
@pytest.mark.parametrize("impair", ["", "loss(0.3)"])
def test_a_returned_send_outlives_its_sender_however_late_it_is_received(impair, count):
    """The reader comes to it after five times the linger time; it lives and answers, so the sender stays."""

    async def reader(rank: Rank) -> np.ndarray[Any, Any]:
        await asyncio.sleep(5 * LINGER_S)
        target = full(0, count)
        await rank.group.recv(target, 1)
        await rank.leave()
        return target

    target, took = play(reader, lambda rank: rank.send_and_leave(0, count=count), seed=5, impair=impair)
    assert (target == 1).all()
    assert 4 * LINGER_S < took < 6 * LINGER_S


SENDS = 8
LARGE = 50_000
"""Elements: 200 kB, copied by a send that returns at once; eight of them are more than what a peer holds early."""


async def send_many_and_leave(rank: Rank, to: int) -> float:
    for number in range(SENDS):
        await rank.group.send(full(number, LARGE), to)
    return await rank.leave()


@pytest.mark.parametrize("impair", ["", "loss(0.1)"])
def test_so_do_more_than_a_peer_holds_early(impair):
    async def reader(rank: Rank) -> list[float]:
        await asyncio.sleep(1.5 * LINGER_S)
        seen = []
        for _ in range(SENDS):
            await rank.group.recv(target := full(-1, LARGE))
            assert (target == target[0]).all()
            seen.append(float(target[0]))
        await rank.leave()
        return seen

    seen, took = play(reader, lambda rank: send_many_and_leave(rank, 0), seed=7, impair=impair)
    assert seen == [float(number) for number in range(SENDS)]
    assert took > 1.4 * LINGER_S


def test_a_rank_does_not_wait_for_a_dead_peer_longer_than_the_linger_time(caplog):
    async def dies(rank: Rank) -> None:
        await asyncio.sleep(0.5)
        rank.endpoint._shut()  # without a word

    _, took = play(dies, lambda rank: rank.send_and_leave(0, after_s=1.0), seed=9)
    assert LINGER_S <= took < LINGER_S + 0.1
    assert "rank 1 leaves" in caplog.text and "rank 0 has not acknowledged" in caplog.text


def test_nor_for_a_living_one_that_does_not_receive_longer_than_the_timeout(caplog):
    async def deaf(rank: Rank) -> None:
        await asyncio.sleep(20.0)
        assert rank.endpoint.core.gone == {1}
        await rank.leave()

    _, took = play(deaf, lambda rank: rank.send_and_leave(0), seed=9, timeout_s=6.0)
    assert 6.0 <= took < 6.1
    assert "does not receive what was sent" in caplog.text


def test_two_that_leave_do_not_wait_for_each_other():
    """Each has sent what the other will never receive."""
    took = play(lambda rank: rank.send_and_leave(1), lambda rank: rank.send_and_leave(0, after_s=1.0), seed=9)
    assert took == pytest.approx([LINGER_S + 1.0, LINGER_S], abs=0.4)


def test_one_that_leaves_at_once_when_all_is_received():
    async def reader(rank: Rank) -> float:
        await rank.group.recv(full(0), 1)
        return await rank.leave()

    assert all(seconds < 0.1 for seconds in play(reader, lambda rank: rank.send_and_leave(0), seed=9))


@pytest.mark.parametrize("call", ["recv", "send", "barrier", "all_reduce", "broadcast"])
def test_calls_that_need_a_rank_that_has_left_raise_at_once_and_name_it(call):
    async def stays(rank: Rank) -> float:
        await asyncio.sleep(1.0)
        group, begun = rank.group, rank.endpoint.time()
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "recv": lambda: group.recv(full(0), 1),
            "send": lambda: group.send(full(0), 1),
            "barrier": group.barrier,
            "all_reduce": lambda: group.all_reduce(full(0)),
            "broadcast": lambda: group.broadcast(full(0), 1),
        }
        with pytest.raises(PeerError, match="rank 1 has closed its group") as caught:
            await calls[call]()
        assert caught.value.ranks == (1,)
        took = rank.endpoint.time() - begun
        await rank.leave()
        return took

    assert play(stays, Rank.leave, seed=11)[0] < 0.1


def test_a_server_hears_from_all_until_the_last_has_left():
    """Workers send a few times each and leave; then a recv from any rank says that none is left, and whom it lacks."""

    async def server(rank: Rank) -> list[int]:
        sources = [await rank.group.recv(full(0)) for _ in range(6)]
        with pytest.raises(PeerError, match="has closed its group") as caught:
            await rank.group.recv(full(0))
        assert set(caught.value.ranks) < {1, 2, 3} and caught.value.ranks
        await rank.leave()
        return sources

    async def worker(rank: Rank) -> None:
        for _ in range(rank.endpoint.rank):
            await asyncio.sleep(0.3 * rank.endpoint.rank)
            await rank.group.send(full(1), 0)
        await rank.leave()

    sources = play(server, worker, worker, worker, seed=13, impair="loss(0.2)")[0]
    assert sorted(sources) == [1, 2, 2, 3, 3, 3]


@pytest.mark.parametrize(("impair", "most"), [("", 30), ("loss(0.3)", 80)])
def test_who_waits_long_for_a_grant_asks_less_and_less_often(impair, most):
    """A rank that leaves, and has more to send than its peer holds early, asks whether it may: the peer lives and says no. Nor
    does what it repeats and copies while chunks are lost fill the peer's early pool, so that what lacks would be refused."""
    wait_s = 10.0

    async def reader(rank: Rank) -> None:
        await asyncio.sleep(wait_s)
        assert not rank.endpoint.core.drops[Drop.EARLY_FULL]
        for _ in range(SENDS):
            await rank.group.recv(target := full(-1, LARGE))
            assert (target == target[0]).all()
        await rank.leave()

    async def sender(rank: Rank) -> int:
        tasks = [rank.group.send(full(number, LARGE), 0) for number in range(SENDS)]
        await asyncio.gather(*tasks)
        rank.group.close()
        leaving = asyncio.create_task(rank.endpoint.close(linger_s=LINGER_S, most_s=2 * wait_s))
        await asyncio.sleep(0.2 * wait_s)
        sent = rank.endpoint.core.senders[0].datagrams_sent
        await asyncio.sleep(0.6 * wait_s)
        sent = rank.endpoint.core.senders[0].datagrams_sent - sent
        await leaving
        return sent

    assert play(reader, sender, seed=7, impair=impair)[1] < most
