"""Rounds that callbacks call get the same numbers on ranks that reach their callbacks at other times."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.collectives.group import Group
from dblp.collectives.numbering import Origin, begin_as, in_callback
from dblp.errors import ClosedError, DeadlineError, MismatchError, PeerError
from dblp.sim.loop import run as run_virtual
from dblp.transport.rounds import MOST_FOLLOWING, following, round_name
from tests.collectives.worlds import connect_network, run_network


class Calls:
    """One rank's calls, each with its origin, as the torch backend makes them."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def call(self, value: float, count: int = 40) -> tuple[Origin, asyncio.Task[np.ndarray]]:
        origin = Origin()
        array = np.full(count, value, np.float32)

        async def run():
            await begin_as(origin, lambda: self.group.all_reduce(array))
            return array

        return origin, begin_as(origin, lambda: asyncio.ensure_future(run()))


def two_steps(group: Group, pauses: list[float], late: float):
    """Every bucket's round is followed, in a callback that comes ``late``, by a second and a third one; ``pauses``: before the
    buckets are ready. All rounds have equally many elements: only numbers tell them apart."""
    calls = Calls(group)

    async def follow(origin, first, bucket):
        sums = [(await first)[0]]
        await asyncio.sleep(late)
        for step in (1, 2):
            with in_callback(origin):
                _, task = calls.call(100 * step + 10 * bucket + group.rank)
            sums.append((await task)[0])
        return sums

    async def run():
        followed = []
        for bucket, pause in enumerate(pauses):
            await asyncio.sleep(pause)
            origin, first = calls.call(10 * bucket + group.rank)
            followed.append(asyncio.ensure_future(follow(origin, first, bucket)))
        return await asyncio.gather(*followed)

    return run()


def expected(buckets: int, world_size: int) -> list[list[float]]:
    ranks = sum(range(world_size))
    return [
        [world_size * (100 * step + 10 * bucket) + ranks for step in range(3)] for bucket in range(buckets)
    ]


PAUSES = st.lists(st.sampled_from([0.0, 1e-5, 2e-4, 3e-3]), min_size=4, max_size=4)


@settings(max_examples=30, deadline=None)
@given(
    pauses=st.lists(PAUSES, min_size=3, max_size=3),
    late=st.lists(st.sampled_from([0.0, 1e-4, 2e-3]), min_size=3, max_size=3),
    impair=st.sampled_from(["", "loss(0.2),seed(3)"]),
)
def test_callbacks_may_run_at_any_time_on_any_rank(pauses, late, impair):
    results = run_network(
        lambda group: two_steps(group, pauses[group.rank], late[group.rank]), 3, impair=impair, seed=1
    )
    assert results == [expected(4, 3)] * 3


def test_without_an_origin_one_slow_rank_takes_a_round_for_another():
    """What the numbers are for: the same calls, numbered in their order alone."""

    async def member(group):
        with contextlib.suppress(ClosedError, MismatchError):
            calls = Calls(group)
            first = calls.call(group.rank)[1]
            if group.rank:
                await first
                second = calls.call(100 + group.rank)[1]
                third = calls.call(10 + group.rank)[1]
            else:
                third = calls.call(10 + group.rank)[1]
                await first
                second = calls.call(100 + group.rank)[1]
            return float((await second)[0]), float((await third)[0])

    results = run_network(member, 2)
    assert results == [(111.0, 111.0)] * 2, "gloo's sums are as wrong"


def test_more_callbacks_than_can_be_numbered_go_by_the_order_of_the_calls():
    async def member(group):
        calls = Calls(group)
        origin, task = calls.call(1.0)
        await task
        numbers = []
        for number in range(MOST_FOLLOWING + 3):
            with in_callback(origin):
                origin_here, task = calls.call(float(number))
            assert (await task)[0] == 2 * number
            numbers.append(group.flight_recorder.report()["rounds"][-1])
        with in_callback(
            origin_here
        ):  # the last was numbered as a first call, and so has followers of its own
            _, task = calls.call(7.0)
        assert (await task)[0] == 14.0
        numbers.append(group.flight_recorder.report()["rounds"][-1])
        return [(entry["round"], entry.get("following", 0)) for entry in numbers]

    (mine, others) = run_network(member, 2)
    assert mine == others
    assert mine[:MOST_FOLLOWING] == [(0, number + 1) for number in range(MOST_FOLLOWING)]
    assert mine[MOST_FOLLOWING:] == [(1, 0), (2, 0), (3, 0), (3, 1)]


def test_followers_of_followers_count_among_those_of_the_first():
    async def member(group):
        calls = Calls(group)
        origin, task = calls.call(1.0)
        await task
        with in_callback(origin):
            second, task = calls.call(2.0)
        await task
        with in_callback(second):
            _, task = calls.call(3.0)
        await task
        return [
            (entry["round"], entry.get("following", 0)) for entry in group.flight_recorder.report()["rounds"]
        ]

    assert run_network(member, 2) == [[(0, 0), (0, 1), (0, 2)]] * 2


def test_another_groups_callbacks_are_numbered_by_their_order():
    async def main():
        endpoints = await connect_network(2)
        firsts = [Group(endpoint) for endpoint in endpoints]
        seconds = [Group(endpoint, group_id=1) for endpoint in endpoints]

        async def member(first, second):
            origin, task = Calls(first).call(1.0)
            await task
            with in_callback(origin):
                other, task = Calls(second).call(2.0)
            await task
            with in_callback(other):
                _, task = Calls(second).call(3.0)
            await task
            rounds = second.flight_recorder.report()["rounds"]
            return [(entry["round"], entry.get("following", 0)) for entry in rounds]

        found = await asyncio.gather(*map(member, firsts, seconds))
        await asyncio.gather(*(endpoint.close(linger_s=0.1) for endpoint in endpoints))
        return found

    assert run_virtual(main()) == [[(0, 0), (0, 1)]] * 2


def test_a_transfer_has_no_followers():
    async def member(group):
        calls = Calls(group)
        origin, array = Origin(), np.full(3, 5.0, np.float32)
        start = group.send if group.rank else group.recv
        await begin_as(origin, lambda: start(array, 1 - group.rank))
        with in_callback(origin):
            _, task = calls.call(1.0)
        await task
        return group.flight_recorder.report()["rounds"][-1]["round"]

    assert run_network(member, 2) == [0, 0]


@pytest.mark.parametrize(
    ("other", "error", "text"),
    [
        (
            "another call",
            MismatchError,
            r"round 0\.1: rank . called .*0 float32.* but rank . called .*0 float32",
        ),
        ("none", DeadlineError, r"round 0\.1 of group 0.*rank 1"),
        ("close", PeerError, "rank 1"),
    ],
)
def test_ranks_that_disagree_in_a_callback_are_told(other, error, text):
    async def main():
        endpoints = await connect_network(2)
        groups = [Group(endpoint, timeout_s=0.5) for endpoint in endpoints]

        async def member(group):
            calls = Calls(group)
            origin, task = calls.call(1.0)
            await task
            if group.rank and other == "none":
                return await asyncio.sleep(1.0)
            if group.rank and other == "close":
                return await endpoints[1].close(linger_s=0.0)
            with in_callback(origin):
                _, task = calls.call(2.0, 50 if group.rank else 40)
            return await task

        results = await asyncio.gather(*map(member, groups), return_exceptions=True)
        await asyncio.gather(*(endpoint.close(linger_s=0.0) for endpoint in endpoints))
        return results[0], groups[0].flight_recorder.to_text()

    result, told = run_virtual(main())
    assert isinstance(result, error)
    with pytest.raises(error, match=text):
        raise result
    assert "round 0.1: all_reduce" in told


def test_names_of_rounds_on_the_wire():
    assert round_name(3, 70_000) == "3:70000"
    assert round_name(*following(3, 5, 2)) == "3:5.2"
    assert following(3, 5 + (1 << 24), 2) == following(3, 5, 2)
    assert round_name(0x8003, 1 << 21) == "3:p2p"
