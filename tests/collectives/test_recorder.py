"""The flight recorder: what it says of rounds that ended, run and fail, in virtual time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from dblp.collectives.group import Group
from dblp.collectives.recorder import SHOWN_BRIEFLY, SHOWN_RANGES, FlightRecorder, MessageState, runs
from dblp.errors import DblpError, DeadlineError
from dblp.sim.loop import run as run_virtual
from dblp.transport.policy import Bounded
from tests.collectives.worlds import connect_network, run_network

COUNT = 200_000


def ones(count: int = COUNT) -> np.ndarray[Any, Any]:
    return np.ones(count, np.float32)


def reports_of(calls: int, **settings: Any) -> list[dict[str, Any]]:
    async def member(group: Group) -> dict[str, Any]:
        for _ in range(calls):
            await group.all_reduce(ones())
        await group.all_reduce(ones(), "avg", policy=Bounded(0.1))
        return group.flight_recorder.report("a test")

    return run_network(member, 3, **settings)


def test_rounds_that_ended_well_are_kept_with_their_messages():
    for rank, report in enumerate(reports_of(2)):
        assert (report["rank"], report["ranks"], report["groups"]) == (rank, [0, 1, 2], {"0": "default"})
        assert report["reason"] == "a test"
        assert [round_["round"] for round_ in report["rounds"]] == [0, 1, 2]
        for round_ in report["rounds"]:
            assert (round_["call"], round_["state"], round_["error"]) == ("all_reduce", "done", "")
            assert (round_["nbytes"], round_["dtype"], round_["lacks_ranks"]) == (4 * COUNT, "float32", [])
            assert {message["peer"] for message in round_["messages"]} <= {0, 1, 2} - {rank}
            assert all(message["done"] and not message["missing"] for message in round_["messages"])
        exact, bounded = report["rounds"][0], report["rounds"][-1]
        assert (exact["budget"], bounded["budget"], bounded["op"]) == (0.0, 0.1, "avg")
        assert bounded["stop"] == "stall" and "stop" not in exact


def test_the_ring_keeps_the_last_ones():
    for report in reports_of(6, flight_rounds=3):
        assert [round_["round"] for round_ in report["rounds"]] == [4, 5, 6]
    assert all(report["rounds"] == [] for report in reports_of(1, flight_rounds=0))


def fail_without(silent: int, *, cut_at_s: float = 0.0, **call: Any) -> list[Group]:
    """Three ranks all-reduce with a timeout of a second; rank ``silent`` says nothing from ``cut_at_s`` of its call on."""

    async def one(group: Group, rank: int) -> None:
        if rank == silent and not cut_at_s:
            return
        task = group.all_reduce(ones(1 << 20), timeout_s=1.0, **call)
        if rank == silent:
            await asyncio.sleep(cut_at_s)
            group._endpoint._shut()  # type: ignore[attr-defined]  # as if it had been killed
            task.cancel()
            return
        with pytest.raises(DeadlineError):
            await task

    async def main() -> list[Group]:
        endpoints = await connect_network(3, seed=4, congestion="fixed", rate_bps=1e9)
        groups = [Group(endpoint) for endpoint in endpoints]
        await asyncio.gather(*(one(group, rank) for rank, group in enumerate(groups)))
        await asyncio.gather(*(endpoint.close(linger_s=0.1) for endpoint in endpoints))
        return groups

    return run_virtual(main())


@pytest.mark.parametrize(("algorithm", "cut_at_s"), [("direct", 0.0), ("direct", 0.01), ("ring", 0.01)])
def test_a_round_that_failed_names_who_lacks_what(cut_at_s, algorithm):
    for group in fail_without(2, cut_at_s=cut_at_s, algorithm=algorithm)[:2]:
        recorder = group.flight_recorder
        (round_,) = recorder.report()["rounds"]
        assert round_["state"] == "failed" and "rank 2" in round_["error"]
        assert 2 in round_["lacks_ranks"]
        assert 1.0 <= round_["seconds"] < 1.1
        lacking = [m for m in round_["messages"] if m["peer"] == 2 and not m["done"]]
        assert lacking
        for message in lacking:
            assert 0 <= message["arrived"] < message["chunks"]
            listed = sum(last - first + 1 for first, last in message["missing"])
            if len(message["missing"]) < SHOWN_RANGES:
                assert listed == message["chunks"] - message["arrived"]
        came = sum(m["arrived"] for m in round_["messages"] if m["peer"] == 2 and not m["outgoing"])
        if algorithm == "direct":  # around a ring not all receive from rank 2
            assert (came > 0) == (cut_at_s > 0)
        text = recorder.to_text("why")
        assert "round 0: all_reduce, 4194304 bytes, dtype float32" in text and "why" in text
        assert ("rank 2, step" in text and "missing 0-" in text) or cut_at_s


def test_text_and_json_tell_the_same():
    recorder = fail_without(2)[0].flight_recorder
    told = json.loads(recorder.to_json("r"))
    assert told["rounds"][0]["error"] == recorder.report("r")["rounds"][0]["error"]
    assert told["version"] == 2
    assert recorder.to_text(brief=True).count("round 0") >= 1


def test_the_brief_text_tells_of_the_first_rounds_that_have_not_ended_well():
    recorder = FlightRecorder(rank=0, ranks=range(20), group=3, rounds=100, clock=lambda: 5.0)
    lacking = [MessageState(peer, False, 0, 9, 4, 0, False, ((4, 8),)) for peer in range(1, 20)]
    for number in range(30):
        entry = recorder.begin(number, "barrier", 0, dict, 1.0, lambda missing: lacking)
        if number < 10:
            entry.end(5.0, done=True)
    text = recorder.to_text(brief=True)
    assert "round 9:" not in text and "round 10:" in text and "round 22:" not in text
    assert text.count("from rank") == SHOWN_BRIEFLY**2 and text.count("    and 7 more") == SHOWN_BRIEFLY
    assert text.endswith("\n  and 8 more")
    whole = recorder.to_text()
    assert "round 9:" in whole and "round 29:" in whole and "more" not in whole
    assert whole.count("from rank") == 20 * 19


def test_a_look_at_a_running_round_disturbs_nothing():
    async def member(group: Group) -> dict[str, Any] | None:
        if group.rank == 1:
            await asyncio.sleep(1.0)
        task = group.all_reduce(array := ones())
        seen = None
        if group.rank == 0:
            await asyncio.sleep(0.5)
            seen = group.flight_recorder.report()["rounds"][0]
        await task
        assert (array == 2).all()
        return seen

    seen = run_network(member, 2)[0]
    assert seen is not None
    assert seen["state"] == "running" and seen["lacks_ranks"] == [1] and 0.45 < seen["seconds"] < 0.55
    (message,) = [m for m in seen["messages"] if not m["outgoing"] and not m["step"]]
    assert message["arrived"] == 0 and message["missing"] == ((0, message["chunks"] - 1),)


def test_transfers_stand_in_it_too():
    async def member(group: Group) -> list[dict[str, Any]]:
        if group.rank == 0:
            waiting = group.recv(ones(), tag=5)
            await asyncio.sleep(0.1)
            first = group.flight_recorder.report()["rounds"]
            await waiting
            return [*first, *group.flight_recorder.report()["rounds"]]
        if group.rank == 1:
            await asyncio.sleep(0.2)
            await group.send(ones(), 0, tag=5)
        return []

    before, after = run_network(member, 3)[0]
    assert (before["call"], before["state"], before["tag"]) == ("recv", "running", 5)
    assert before["lacks_ranks"] == [1, 2], "any of them may send"
    assert (after["state"], after["lacks_ranks"]) == ("done", [])
    assert [m["peer"] for m in after["messages"]] == [1]


def test_a_cancelled_round_is_told_from_one_that_ended():
    async def member(group: Group) -> dict[str, Any]:
        if group.rank == 0:
            task = group.barrier()
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return group.flight_recorder.report()

    async def main() -> list[dict[str, Any]]:
        endpoints = await connect_network(2)
        reports = [await member(Group(endpoint)) for endpoint in endpoints]
        await asyncio.gather(*(endpoint.close(linger_s=0.1) for endpoint in endpoints))
        return reports

    (round_,) = run_virtual(main())[0]["rounds"]
    assert (round_["call"], round_["state"], round_["lacks_ranks"]) == ("barrier", "cancelled", [1])


def test_the_first_failure_is_told_once():
    told: list[BaseException] = []

    async def main() -> None:
        endpoints = await connect_network(2)
        group = Group(endpoints[0])
        group.on_failure = told.append
        tasks = [group.barrier(timeout_s=0.5), group.all_reduce(ones(), timeout_s=0.6)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, DblpError) for result in results)
        assert [round_["state"] for round_ in group.flight_recorder.report()["rounds"]] == ["failed"] * 2
        await asyncio.gather(*(endpoint.close(linger_s=0.1) for endpoint in endpoints))

    run_virtual(main())
    assert len(told) == 1 and isinstance(told[0], DeadlineError)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([], ()),
        ([4], ((4, 4),)),
        ([0, 1, 2, 5, 7, 8], ((0, 2), (5, 5), (7, 8))),
        (range(0, 100, 2), tuple((at, at) for at in range(0, 2 * SHOWN_RANGES, 2))),
    ],
)
def test_missing_chunks_are_told_as_runs(chunks, expected):
    assert runs(np.array(chunks, np.int64)) == expected


def test_groups_of_the_same_ranks_stand_in_one_report_by_name():
    """As the rounds of a compressed model do, which has a group of its own beside the default one."""

    async def main() -> FlightRecorder:
        endpoints = await connect_network(2)
        firsts = [Group(endpoint) for endpoint in endpoints]
        seconds = [Group(endpoint, group_id=1, name="compression") for endpoint in endpoints]
        for first, second in zip(firsts, seconds, strict=True):
            first.flight_recorder.include(second.flight_recorder)
        for groups in (firsts, seconds, firsts):
            await asyncio.gather(*(group.all_reduce(ones(10)) for group in groups))
        await asyncio.gather(*(endpoint.close(linger_s=0.1) for endpoint in endpoints))
        return firsts[0].flight_recorder

    recorder = run_virtual(main())
    report = json.loads(recorder.to_json())
    assert report["groups"] == {"0": "default", "1": "compression"}
    assert [(round_["group"], round_["round"]) for round_ in report["rounds"]] == [(0, 0), (1, 0), (0, 1)]
    text = recorder.to_text()
    assert "group 0 (default), group 1 (compression)" in text
    assert "round 0 of group 1: all_reduce, 40 bytes" in text and "round 1 of group 0: all_reduce" in text
