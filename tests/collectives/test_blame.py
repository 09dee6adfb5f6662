"""Who a deadline names: every rank that is missing, and nobody who only waits for them. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import numpy as np
import pytest

from dblp.collectives.blame import Evidence, find_missing
from dblp.collectives.group import Group
from dblp.errors import DeadlineError, RemoteError
from dblp.sim.loop import run as run_virtual
from dblp.transport.endpoint import Endpoint
from dblp.transport.standing import Stand, Standing
from tests.collectives.worlds import connect_network

COUNT = 20_000
TIMEOUT_S = 2.0


def waits(*ranks: int, silent: Collection[int] = ()) -> Standing:
    return Standing(stand=Stand.WAITING, waits_for=ranks, silent=tuple(silent))


def elsewhere(*ranks: int) -> Standing:
    return Standing(stand=Stand.NOT_CALLED, waits_for=ranks)


ABSENT = "has not called it"
CASES: dict[str, tuple[dict[str, Any], dict[int, str]]] = {
    "it owes something and is silent": ({"owed": [2], "silent": [2], "told": {1: waits(2)}}, {2: ""}),
    "it is silent and owes only to others": ({"owed": [1], "silent": [2], "told": {1: waits(2)}}, {2: ""}),
    "around a ring": (
        {"owed": [3], "told": {3: waits(2), 1: waits(0), 2: elsewhere()}},
        {2: ABSENT},
    ),
    "two have not called": ({"owed": [3], "told": {1: elsewhere(), 3: elsewhere()}}, {1: ABSENT, 3: ABSENT}),
    "one is silent, another has not called": (
        {"owed": [3], "silent": [1], "told": {3: elsewhere()}},
        {1: "", 3: ABSENT},
    ),
    "it has not called because it waits in an earlier round": (
        {"owed": [1, 2], "silent": [2], "told": {1: elsewhere(2)}},
        {2: ""},
    ),
    "it is heard, and hears nothing from here": (
        {"owed": [2], "told": {1: waits(2), 2: waits(0, 1, silent=[0, 1])}},
        {2: "hears nothing from rank 0"},
    ),
    "a link between two others is dead": (
        {"owed": [1], "told": {1: waits(2, silent=[2]), 2: waits(1)}},
        {1: "hears nothing from rank 2", 2: "is not heard by rank 1"},
    ),
    "the end of the chain has told nothing": ({"owed": [3], "told": {3: waits(2), 1: waits(0)}}, {2: ""}),
    "nobody has told anything": ({"owed": [1, 3], "culprits": [3]}, {3: ""}),
    "all wait in a circle": (
        {"owed": [1], "told": {1: waits(2), 2: waits(3), 3: waits(0)}},
        {1: ""},
    ),
    "what strangers and the silent told does not count": (
        {"owed": [1], "silent": [1], "told": {1: waits(2, silent=[0]), 9: elsewhere()}},
        {1: ""},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_who_is_missing(case):
    known, expected = CASES[case]
    assert find_missing(Evidence(rank=0, peers=[1, 2, 3], **known)) == expected


Member = Callable[[Group, Endpoint], Awaitable[Any]]


def play(member: Member, world_size: int, **settings: Any) -> list[Any]:
    """Run ``member`` on each rank, with the group's timeout; results by rank."""

    async def main() -> list[Any]:
        endpoints = await connect_network(world_size, **settings)
        groups = [Group(endpoint, timeout_s=TIMEOUT_S) for endpoint in endpoints]
        results = await asyncio.gather(*map(member, groups, endpoints))
        await asyncio.gather(*(endpoint.close(linger_s=0.1) for endpoint in endpoints))
        return results

    return run_virtual(main())


def all_reduce(group: Group, algorithm: str, **call: Any) -> Awaitable[Any]:
    return group.all_reduce(np.ones(COUNT, np.float32), algorithm=algorithm, **call)


async def failure(task: Awaitable[Any]) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        await task
    return caught.value


def errors_without(
    absent: Collection[int], world_size: int, algorithm: str, **settings: Any
) -> list[RemoteError]:
    """The errors of an all-reduce that the living ranks ``absent`` do not call."""

    async def member(group: Group, endpoint: Endpoint) -> RemoteError | None:
        if group.rank in absent:
            await asyncio.sleep(2 * TIMEOUT_S)
            return None
        return await failure(all_reduce(group, algorithm))

    return [error for error in play(member, world_size, **settings) if error is not None]


@pytest.mark.parametrize("world_size", [3, 4, 8])
@pytest.mark.parametrize("algorithm", ["direct", "ring", "flat", "halving_doubling", "hierarchical", "ps"])
def test_a_living_rank_that_does_not_call_is_named_by_all(world_size, algorithm):
    absent = world_size - 2
    errors = errors_without([absent], world_size, algorithm)
    assert len(errors) == world_size - 1
    for error in errors:
        assert error.ranks == (absent,), error
        assert f"rank {absent} (alive; has not called it; " in str(error)


@pytest.mark.parametrize("absent", [(1, 2), (0, 3, 4)])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_all_who_do_not_call_are_named(absent, algorithm):
    for error in errors_without(absent, 5, algorithm):
        assert error.ranks == absent, error


@pytest.mark.parametrize("seed", range(4))
def test_they_are_named_where_a_third_of_all_datagrams_is_lost(seed):
    for error in errors_without([2], 5, "ring", seed=seed, impair="loss(0.3)"):
        assert error.ranks == (2,), error


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_who_waits_in_an_earlier_round_is_not_blamed_for_a_later_one(algorithm):
    """Rank 0 does not take part in the first round of all, rank 1 waits there and rank 3 has a later one under way as well."""

    async def member(group: Group, endpoint: Endpoint) -> RemoteError | None:
        if group.rank == 0:
            await asyncio.sleep(2 * TIMEOUT_S)
            return None
        tasks = [all_reduce(group, algorithm, timeout_s=2 * TIMEOUT_S)]
        if group.rank == 3:  # this one's deadline is the first to pass
            tasks.append(all_reduce(group, algorithm))
        return [await failure(task) for task in tasks][-1]

    errors = play(member, 4)
    assert errors[0] is None
    for error in errors[1:]:
        assert error.ranks == (0,), error
    assert isinstance(errors[3], DeadlineError)


@pytest.mark.parametrize("algorithm", ["ring", "direct", "halving_doubling"])
def test_a_rank_that_hears_nothing_is_named_by_all_others(algorithm):
    """It is alive and heard: the others know from what it tells."""
    deaf = 2

    async def member(group: Group, endpoint: Endpoint) -> RemoteError:
        if group.rank == deaf:
            endpoint.core.receive_burst = lambda batch, *, now: None  # type: ignore[method-assign]
        return await failure(all_reduce(group, algorithm))

    errors = play(member, 4)
    for rank in {0, 1, 3}:
        assert errors[rank].ranks == (deaf,), errors[rank]
    told = [
        error for error in errors if isinstance(error, DeadlineError) and "hears nothing from" in str(error)
    ]
    assert told
    assert errors[deaf].ranks == (0, 1, 3)
    assert "this rank's own network may be down" in str(errors[deaf])


def test_a_rank_that_nobody_hears_is_told_so():
    async def member(group: Group, endpoint: Endpoint) -> RemoteError:
        if group.rank == 2:
            endpoint.port.send = lambda burst: True  # type: ignore[method-assign]
            if hasattr(endpoint.port, "send_train"):
                endpoint._send_train = None
        return await failure(all_reduce(group, "ring"))

    errors = play(member, 3)
    for error in errors[:2]:
        assert error.ranks == (2,) and "rank 2 (silent for" in str(error)
    assert errors[2].ranks in ((0, 1), (2,)), "its peers' verdict may come before its own deadline"


def test_a_rank_that_is_late_costs_nobody_the_round():
    """Asked and told, and all goes on: it comes before the deadline."""

    async def member(group: Group, endpoint: Endpoint) -> float:
        if group.rank == 1:
            await asyncio.sleep(0.9 * TIMEOUT_S)
        array = np.ones(COUNT, np.float32)
        await group.all_reduce(array, algorithm="ring")
        return float(array[0])

    assert play(member, 4) == [4.0] * 4


def test_a_rank_that_has_not_been_asked_yet_is_not_called_silent():
    """Around a ring two ranks may have nothing to say to each other for half of the timeout."""
    told: list[Standing] = []

    async def member(group: Group, endpoint: Endpoint) -> None:
        await asyncio.sleep(TIMEOUT_S)  # nothing moves
        if group.rank == 1:
            await asyncio.sleep(0.9 * TIMEOUT_S)
        task = asyncio.ensure_future(all_reduce(group, "ring"))
        if group.rank == 0:
            await asyncio.sleep(0.6 * TIMEOUT_S)
            round_ = next(iter(endpoint.core.rounds.active.values()))
            told.extend(round_.counters.told.values())
        await task

    play(member, 5)
    assert len(told) == 4
    assert all(not standing.silent for standing in told), told
    assert [standing.stand for standing in told].count(Stand.NOT_CALLED) == 1
