"""Rounds that callbacks call get the same numbers on ranks that reach their callbacks at other times."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.collectives.group import Group
from dblp.collectives.numbering import Origin, begin_as, in_callback
from dblp.errors import DeadlineError, MismatchError, PeerError, UnsupportedError
from dblp.sim.loop import run as run_virtual
from dblp.transport import places
from dblp.transport.message import message_id, round_of
from dblp.transport.rounds import MOST_BEHIND, RoundBook, following, round_name
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
        callback = origin.next_callback()
        for step in (1, 2):
            with in_callback(callback):
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


async def places_of(group, program):
    """What the flight recorder tells of the rounds of ``program(calls)`` but the first, in the order in which they began."""
    await program(Calls(group))
    rounds = group.flight_recorder.report()["rounds"]
    return [(entry["round"], entry.get("place", "")) for entry in rounds]


def test_rounds_are_told_by_their_place():
    async def program(calls):
        origin, task = calls.call(1.0)
        await task
        first, second = (origin.next_callback() for _ in range(2))
        with in_callback(first):
            inner, task = calls.call(2.0)
            _, other = calls.call(2.0)
        await asyncio.gather(task, other)
        with in_callback(first.result.next_callback()):
            _, task = calls.call(3.0)
        await task
        with in_callback(inner.next_callback()):
            _, task = calls.call(4.0)
        await task
        with in_callback(second):
            _, task = calls.call(5.0)
        await task
        await calls.call(6.0)[1]

    assert (
        run_network(lambda group: places_of(group, program), 2)
        == [[(0, ""), (0, "1:1"), (0, "1:2"), (0, "1.1:1"), (0, "1:1/1:1"), (0, "2:1"), (1, "")]] * 2
    )


def test_a_call_of_several_rounds_has_a_place_for_each():
    async def program(calls):
        origin, task = calls.call(1.0)
        await task
        with in_callback(origin.next_callback()):
            several = Origin()
        for _ in range(3):
            await begin_as(several, lambda: calls.group.all_reduce(np.ones(4, np.float32)))
        with in_callback(several.next_callback()):
            _, task = calls.call(2.0)
        await task

    assert (
        run_network(lambda group: places_of(group, program), 2)
        == [[(0, ""), (0, "1:1"), (0, "1:1+1"), (0, "1:1+2"), (0, "1:1/1:1")]] * 2
    )


def test_calls_without_a_place_go_by_their_order():
    """Those behind the 252nd of a callback, and those in callbacks on them anew."""

    async def program(calls):
        origin, task = calls.call(1.0)
        await task
        callback = origin.next_callback()
        for number in range(255):
            with in_callback(callback):
                last, task = calls.call(float(number))
            assert (await task)[0] == 2 * number
        with in_callback(last.next_callback()):
            _, task = calls.call(7.0)
        assert (await task)[0] == 14.0

    found = run_network(lambda group: places_of(group, program), 2, flight_rounds=300)
    assert found[0] == found[1]
    assert found[0][1:253] == [(0, f"1:{number + 1}") for number in range(252)]
    assert found[0][253:] == [(1, ""), (2, ""), (3, ""), (3, "1:1")]


def test_callbacks_may_branch_and_be_added_early_or_late():
    """Two callbacks on a future, one on the first one's, two calls at once in one of them, each with a callback: whatever comes
    first, sums are those of the same calls."""

    async def member(group):
        calls, early = Calls(group), group.rank == 0
        origin, task = calls.call(1.0)
        first, second = (origin.next_callback() for _ in range(2))
        chained = first.result.next_callback()
        await task
        sums = {}

        async def call(callback, name, value):
            with in_callback(callback):
                inner, task = calls.call(value + group.rank)
            sums[name] = (await task)[0]
            return inner

        async def chain(name, inner, task, value):
            sums[name] = (await task)[0]
            await call(inner.next_callback(), name.lower(), value)

        async def both():
            with in_callback(second):
                pairs = [calls.call(value + group.rank) for value in (100.0, 200.0)]
            chains = [chain("B", *pairs[0], 1000.0), chain("C", *pairs[1], 2000.0)]
            await asyncio.gather(*(chains if early else reversed(chains)))

        branches = [call(first, "A", 10.0), call(chained, "D", 50.0), both()]
        await asyncio.gather(*(branches if early else reversed(branches)))
        return sums

    expected = {"A": 21, "B": 201, "C": 401, "D": 101, "b": 2001, "c": 4001}
    assert run_network(member, 2) == [expected] * 2


def test_another_groups_callbacks_are_numbered_by_their_order():
    async def main():
        endpoints = await connect_network(2)
        firsts = [Group(endpoint) for endpoint in endpoints]
        seconds = [Group(endpoint, group_id=1) for endpoint in endpoints]

        async def member(first, second):
            origin, task = Calls(first).call(1.0)
            await task
            with in_callback(origin.next_callback()):
                other, task = Calls(second).call(2.0)
            await task

            async def program(calls):
                with in_callback(other.next_callback()):
                    _, task = calls.call(3.0)
                await task

            return await places_of(second, program)

        found = await asyncio.gather(*map(member, firsts, seconds))
        await asyncio.gather(*(endpoint.close(linger_s=0.1) for endpoint in endpoints))
        return found

    assert run_virtual(main()) == [[(0, ""), (0, "1:1")]] * 2


def test_nothing_follows_a_transfer():
    async def program(calls):
        origin, array, group = Origin(), np.full(3, 5.0, np.float32), calls.group
        start = group.send if group.rank else group.recv
        await begin_as(origin, lambda: start(array, 1 - group.rank))
        with in_callback(origin.next_callback()):
            _, task = calls.call(1.0)
        await task

    found = run_network(lambda group: places_of(group, program), 2)
    assert [rounds[-1] for rounds in found] == [(0, "")] * 2


def test_what_follows_a_round_that_is_long_past_is_refused():
    async def member(group):
        calls = Calls(group)
        origin, task = calls.call(1.0)
        await task
        group._numbering._next += MOST_BEHIND
        with in_callback(origin.next_callback()):
            _, task = calls.call(2.0)
        with pytest.raises(UnsupportedError, match=r"callback on round 0, .* rounds later"):
            await task
        return (await calls.call(3.0)[1])[0]

    assert run_network(member, 2) == [6.0, 6.0], "and nothing is lost"


@pytest.mark.parametrize(
    ("other", "error", "text"),
    [
        (
            "another call",
            MismatchError,
            r"round 0/1:1 of group 0: rank . called .*0 float32.* but rank . called .*0 float32",
        ),
        ("none", DeadlineError, r"round 0/1:1 of group 0.*rank 1"),
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
            with in_callback(origin.next_callback()):
                _, task = calls.call(2.0, 50 if group.rank else 40)
            return await task

        results = await asyncio.gather(*map(member, groups), return_exceptions=True)
        await asyncio.gather(*(endpoint.close(linger_s=0.0) for endpoint in endpoints))
        return results[0], groups[0].flight_recorder.to_text()

    result, told = run_virtual(main())
    assert isinstance(result, error)
    with pytest.raises(error, match=text):
        raise result
    assert "round 0/1:1: all_reduce" in told


def test_names_of_rounds_on_the_wire():
    assert round_name(3, 70_000) == "3:70000"
    assert round_name(0x8003, 1 << 21) == "3:p2p"
    place = places.add_round(places.add_call(places.add_callback(places.START, 0), 1), 0)
    assert round_name(*following(3, 5, place)) == "3:5/1:2"
    assert following(3, 5 + (1 << 14), place) == following(3, 5, place)
    assert round_name(*following(3, 5, 5)) == "3:5/0x5", "garbage is no place"


WAY = st.lists(
    st.tuples(st.lists(st.integers(0, 20), min_size=1, max_size=3), st.integers(0, 300), st.integers(0, 5)),
    min_size=1, max_size=3,
)  # fmt: skip


def code_of(way, code=places.START):
    for callbacks, call, round_ in way:
        code = places.add_callback(code, callbacks[0])
        for index in callbacks[1:]:
            code = places.add_callback(places.add_result(code), index)
        code = places.add_round(places.add_call(code, call), round_)
    return code


@settings(deadline=None)
@given(WAY, WAY)
def test_different_ways_have_different_codes(way, other):
    assert (code_of(way) == code_of(other)) == (way == other)
    assert (places.place_name(code_of(way)) == places.place_name(code_of(other))) == (way == other)
    assert places.join(code_of(way), code_of(other)) == code_of(other, code_of(way))


@settings(deadline=None)
@given(st.integers(0, (1 << 18) - 1))
def test_any_number_has_a_name(code):
    assert places.place_name(code)


def test_ids_come_back_when_nobody_needs_them():
    """After 16,384 rounds of the group: what ended so long ago is forgotten before, here and where FINAL is kept."""
    book = RoundBook()
    place = code_of([([0], 0, 0)])
    keys = [round_of(message_id(*following(0, number, place), 0)) for number in (0, 5120)]
    for number in range(0, 9000, 1024):
        book.begin(number, b"", repr)
        book.end(number)
        for key in keys[:1] if number == 0 else keys[1:] if number == 5120 else []:
            book.begin(key, b"", repr)
            book.end(key)
        if number == 4096 - 1024:
            assert book.over(keys[0])
    assert [book.over(key) for key in keys] == [False, True]
