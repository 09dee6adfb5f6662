"""Failures: every one ends every rank's wait, names what happened where, and poisons the group."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dblp.collectives.call import Call, Collective, describe
from dblp.collectives.group import Group
from dblp.collectives.presets import preset
from dblp.collectives.report import Report
from dblp.errors import ClosedError, ConfigError, DeadlineError, MismatchError, PeerError, RemoteError
from dblp.sim.loop import run as run_virtual
from dblp.transport.policy import Bounded, Carry, CarryBound, Consistency, Exact, Fill, Policy, Stop, Tags
from tests.collectives.fake import FakeNet
from tests.collectives.worlds import run_memory, run_network

A = np.zeros(1000, np.float32)

MISMATCHES = {
    "size": (
        lambda g: g.all_reduce(A.copy()),
        lambda g: g.all_reduce(A[:999].copy()),
        "1000 float32.*999 float32",
    ),
    "dtype": (lambda g: g.all_reduce(A.copy()), lambda g: g.all_reduce(A.astype(int)), "float32.*int64"),
    "op": (
        lambda g: g.all_reduce(A.copy()),
        lambda g: g.all_reduce(A.copy(), "max"),
        r"all_reduce\(sum\).*\(max\)",
    ),
    "policy": (
        lambda g: g.all_reduce(A.copy(), policy=Bounded(0.1)),
        lambda g: g.all_reduce(A.copy(), policy=Bounded(0.25)),
        "budget of 0.1.*budget of 0.25",
    ),
    "algorithm": (
        lambda g: g.all_reduce(A.copy(), algorithm="ring"),
        lambda g: g.all_reduce(A.copy(), algorithm="direct"),
        "by ring.*by direct",
    ),
    "collective": (lambda g: g.all_reduce(A.copy()), lambda g: g.barrier(), "all_reduce.*barrier"),
    "empty": (
        lambda g: g.all_reduce(A.copy()),
        lambda g: g.all_reduce(A[:0].copy()),
        "1000 float32.* 0 float32",
    ),
    "root": (lambda g: g.broadcast(A.copy(), 0), lambda g: g.broadcast(A.copy(), 1), "root 0.*root 1"),
    "gather root": (
        lambda g: g.gather(A[:10].copy(), A[:5], g.rank),
        lambda g: g.gather(A[:10].copy(), A[:5], g.rank),
        "root 0.*root 1",
    ),
    "reduce root": (lambda g: g.reduce(A.copy(), 0), lambda g: g.reduce(A.copy(), 1), "root 0.*root 1"),
    "parts": (
        lambda g: g.all_gather([A[:5].copy(), A[:6].copy()], A[: 5 + g.rank].copy()),
        lambda g: g.all_gather([A[:5].copy(), A[:7].copy()], A[: 5 + 2 * g.rank].copy()),
        "unequal sizes",
    ),
    "scatter": (
        lambda g: g.scatter(A[:6].copy(), [A[:6], A[:6]], 0),
        lambda g: g.scatter(A[:7].copy(), None, 0),
        "24 bytes.*28",
    ),
    "all_to_all": (
        lambda g: g.all_to_all(A[:10].copy(), A[:10]),
        lambda g: g.all_to_all(A[:9].copy(), A[:9], input_splits=[4, 5], output_splits=[4, 5]),
        "16.*20",
    ),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_ranks_that_disagree_are_named(run, kind):
    """One of the two sees both sides, the other is told."""
    calls, errors = MISMATCHES[kind][:2], []

    async def member(group):
        with pytest.raises(RemoteError) as caught:
            await calls[group.rank](group)
        errors.append(caught.value)
        with pytest.raises(ClosedError, match="failed before this call"):
            group.barrier()

    run(member, 2, timeout_s=20.0)
    assert any(isinstance(error, MismatchError) for error in errors)
    assert not any(isinstance(error, DeadlineError) for error in errors), "named, not hung"
    pattern = MISMATCHES[kind][2]
    texts = " / ".join(str(error) for error in errors)
    backwards = ".*".join(reversed(pattern.split(".*")))
    assert re.search(f"{pattern}|{backwards}", texts, re.DOTALL), texts


BASE = Policy(budget=0.3, carry=Carry())
OTHER_POLICIES: dict[str, tuple[dict[str, Any], str]] = {
    "stop": ({"stop": Stop.EAGER}, "stop=stall.*stop=eager"),
    "deadline": ({"stop": Stop.DEADLINE, "stop_after_s": 0.1}, "stop=stall.*stop=deadline"),
    "fill": ({"fill": Fill.RESCALE, "carry": None}, "fill=zero.*fill=rescale"),
    "consistency": ({"consistency": Consistency.EXACT}, "consistency=agreed.*consistency=exact"),
    "tags": ({"tags": Tags.BOTH}, "tags=none.*tags=both"),
    "carry": ({"carry": None}, "carry=by decay.*carry=off"),
    "carry's bound": ({"carry": Carry(bound=CarryBound.AGE)}, "carry=by decay.*carry=by age"),
    "carry's limit": ({"carry": Carry(limit=2.0)}, r"digest \w{8}.*digest \w{8}"),
    "carry's momentum": ({"carry": Carry(momentum=0.9)}, r"digest \w{8}.*digest \w{8}"),
    "hadamard": ({"hadamard": True, "carry": None}, "hadamard=off.*hadamard=on"),
    "gather budget": ({"gather_budget": 0.2}, r"digest \w{8}.*digest \w{8}"),
    "resynchronisation": ({"resync_rounds": 7}, r"digest \w{8}.*digest \w{8}"),
}


@pytest.mark.parametrize("kind", OTHER_POLICIES)
def test_ranks_whose_policies_differ_in_any_field_are_named(kind):
    """The budget is the same: without the rest of the policy in the signature they would give other results."""
    changes, pattern = OTHER_POLICIES[kind]
    policies, errors = [BASE, replace(BASE, **changes)], []

    async def member(group):
        with pytest.raises(RemoteError) as caught:
            await group.all_reduce(A.copy(), "avg", policy=policies[group.rank], algorithm="direct")
        errors.append(caught.value)

    run_network(member, 2, timeout_s=20.0)
    assert any(isinstance(error, MismatchError) for error in errors)
    texts = " / ".join(str(error) for error in errors)
    backwards = ".*".join(reversed(pattern.split(".*")))
    assert re.search(f"{pattern}|{backwards}", texts, re.DOTALL), texts


@pytest.mark.parametrize("wrong", [preset("default"), "default", 0.1])
def test_what_is_no_policy_is_refused_before_anything_is_sent(wrong):
    async def member(group):
        with pytest.raises(ConfigError, match=r"a Policy is needed.*preset\('default'\)\.policy"):
            await group.all_reduce(A.copy(), policy=wrong)
        await group.all_reduce(A.copy(), policy=Exact())

    run_network(member, 2, timeout_s=20.0)


def test_a_policy_that_says_the_same_in_other_words_is_the_same():
    """The usual gather budget by its number, and the algorithm by the call instead of the policy."""
    usual = Policy(budget=0.3)
    policies = [usual, replace(usual, gather_budget=usual.gather_leg_budget, algorithm="direct")]

    async def member(group):
        array = np.full(5000, group.rank + 1, np.float32)
        await group.all_reduce(array, policy=policies[group.rank], algorithm="direct")
        return array

    for array in run_network(member, 2):
        assert (array == 3.0).all()


def test_every_signature_is_told_with_the_names_of_its_policy():
    policy = Policy(budget=0.3, stop=Stop.EAGER, tags=Tags.LAYER, consistency=Consistency.RELAXED)
    told = describe(Call(collective=Collective.ALL_REDUCE, policy=policy).signature())
    for words in ("budget of 0.3", "stop=eager", "tags=layer", "consistency=relaxed", "carry=off"):
        assert words in told
    exact = Call(collective=Collective.BARRIER).signature()
    assert len(exact) == 32 and describe(exact) == "barrier", "a call without a policy says nothing of one"


def dead_rank(world_size, call, *, after_s=0.0, timeout_s=8.0):
    """Kill the last rank, at once or in the middle of a round; returns each survivor's (error, seconds)."""

    async def member(endpoint):
        group = Group(endpoint, timeout_s=timeout_s)
        start = endpoint.time()
        with pytest.raises(RemoteError) as caught:
            await call(group)
        return caught.value, endpoint.time() - start

    async def main():
        net = FakeNet(world_size, seed=1, chunk_bytes=64)
        victim = net.endpoints[-1]
        task = call(Group(victim, timeout_s=1000.0)) if after_s else None
        asyncio.get_running_loop().call_later(after_s, net.kill, world_size - 1)
        survivors = await asyncio.gather(*(member(endpoint) for endpoint in net.endpoints[:-1]))
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return survivors

    return run_virtual(main())


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("algorithm", ["direct", "ring", "flat", "halving_doubling", "hierarchical", "ps"])
@pytest.mark.parametrize("after_s", [0.0, 0.002])
def test_a_dead_rank_is_named_by_every_survivor_in_time(world_size, algorithm, after_s):
    victim = world_size - 1
    survivors = dead_rank(
        world_size,
        lambda group: group.all_reduce(np.zeros(20_000, np.float32), algorithm=algorithm),
        after_s=after_s,
    )
    assert len(survivors) == world_size - 1
    for error, elapsed in survivors:
        assert isinstance(error, DeadlineError) and isinstance(error, TimeoutError)
        assert error.ranks == (victim,) and elapsed <= 8.1
        assert f"rank {victim} (silent for" in str(error) and "DBLP_TIMEOUT_S" in str(error)


def test_the_deadline_says_what_each_rank_lacks():
    """Nobody is silent, but rank 2 never calls: it is blamed for its data, the others are not."""

    async def member(group):
        if group.rank == 2:
            await asyncio.sleep(20.0)
            return None
        with pytest.raises(DeadlineError) as caught:
            await group.all_reduce(np.zeros(20_000, np.float32), timeout_s=4.0, algorithm="direct")
        return [caught.value]

    errors = [error for found in run_memory(member, 3) for error in found or []]
    first = next(error for error in errors if "round 0 of group 0 on rank" in str(error))
    assert first.ranks == (2,) and "not complete within 4 s" in str(first)
    assert "rank 2 (alive; has not called it; 0 of " in str(first) and "timeout_s" in str(first)


def test_peers_are_pinged_while_waiting():
    async def main():
        net = FakeNet(2)
        group = Group(net.endpoints[0], timeout_s=8.0)
        task = group.barrier()
        for after_s, pings in ((3.9, 0), (4.1, 1), (6.1, 2), (7.1, 3)):
            await asyncio.sleep(after_s - asyncio.get_running_loop().time())
            assert net.endpoints[0].pings == pings
        with pytest.raises(DeadlineError):
            await task

    run_virtual(main())


def test_a_rank_without_a_network_says_so():
    async def main():
        net = FakeNet(3)
        net.kill(1)
        net.kill(2)
        with pytest.raises(DeadlineError, match="Nothing was heard from any peer") as caught:
            await Group(net.endpoints[0], timeout_s=1.0).barrier()
        assert caught.value.ranks == (1, 2)

    run_virtual(main())


@pytest.mark.parametrize("delay_s", [None, 0.0001])
def test_cancelling_a_round_ends_it_everywhere(run, delay_s):
    """Before the task ran at all, and in the middle."""

    async def member(group):
        array = np.zeros(300_000, np.float32)
        if group.rank == 0:
            task = group.all_reduce(array, algorithm="direct")
            if delay_s is not None:
                await asyncio.sleep(delay_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(ClosedError, match="all_reduce, round 0 of group 0 was cancelled on rank 0"):
                group.barrier()
        else:
            with pytest.raises(PeerError, match="was cancelled on rank 0"):
                await group.all_reduce(array, algorithm="direct")

    settings = {"chunk_bytes": 1408} if run is run_memory else {}
    run(member, 3, **settings)


def test_one_failure_ends_all_rounds_in_flight(run):
    async def member(group):
        op = "sum" if group.rank else "max"
        tasks = [
            group.all_reduce(np.zeros(50_000, np.float32)),
            group.all_reduce(A.copy(), op),
            group.barrier(),
        ]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[1], RemoteError)
        for result in (results[0], results[2]):
            assert isinstance(result, (RemoteError, ClosedError, Report))

    run(member, 2)


def test_a_fault_of_a_callback_fails_the_round(monkeypatch):
    """An error in the middle of a reduction reaches the caller and the peers, and leaves no task behind."""
    from dblp.collectives.reduction import Reducer

    def broken(self, parts, out, scratch):
        raise FloatingPointError("broken on purpose")

    monkeypatch.setattr(Reducer, "fold", broken)

    async def member(group):
        with pytest.raises((FloatingPointError, PeerError), match="broken on purpose"):
            await group.all_reduce(np.zeros(50_000, np.float32), algorithm="direct")

    run_memory(member, 3, chunk_bytes=1408)


def test_closed_groups_and_wrong_members():
    async def main():
        net = FakeNet(3)
        group = Group(net.endpoints[1])
        group.close()
        group.close()
        for call in (group.barrier, lambda: group.send(A, 0), lambda: group.recv(A.copy())):
            with pytest.raises(ClosedError, match="group 0 was closed"):
                call()
        for ranks, text in (([0, 2], "not among them"), ([1, 1], "different ranks"), ([1, 3], "0..2")):
            with pytest.raises(ConfigError, match=text):
                Group(net.endpoints[1], ranks=ranks)
        with pytest.raises(ConfigError, match="group_id=40000"):
            Group(net.endpoints[1], group_id=40_000)

    run_virtual(main())


def test_any_signature_can_be_described():
    rng = np.random.default_rng(0)
    for length in (0, 5, 28, 32):
        for _ in range(200):
            assert describe(rng.bytes(length))
