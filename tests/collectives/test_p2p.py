"""send and recv: matched by source and tag, from any source, beside collectives, with every kind of disagreement named."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.collectives.p2p import transfer_id
from dblp.errors import ClosedError, DeadlineError, MismatchError, PeerError
from dblp.transport.message import round_of
from tests.collectives.worlds import run_memory, run_network, values


@pytest.mark.parametrize("count", [0, 1, 500, 200_000])
def test_both_ways_at_once(run, count):
    """Large ones would deadlock if a send waited for its recv before the own recv was posted."""

    async def member(group):
        peer = 1 - group.rank
        target = np.zeros(count, np.float64)
        done = await asyncio.gather(
            group.send(values(group.rank, count, "float64"), peer), group.recv(target, peer)
        )
        assert list(done) == [peer, peer]
        return target

    settings_ = {"chunk_bytes": 1408} if run is run_memory else {}
    for rank, target in enumerate(run(member, 2, **settings_)):
        assert (target == values(1 - rank, count, "float64")).all()


def test_tags_are_met_in_any_order(run):
    tags = [3, 0, -7, 1 << 40, 5]

    async def member(group):
        if group.rank == 0:
            await asyncio.gather(*(group.send(np.full(3000, tag), 1, tag) for tag in tags))
            return None
        targets = {tag: np.zeros(3000, np.int64) for tag in tags}
        for tag in sorted(tags):
            await group.recv(targets[tag], 0, tag)
        return targets

    for tag, target in run(member, 2)[1].items():
        assert (target == tag).all()


def test_one_tag_keeps_the_order_of_the_sends(run):
    async def member(group):
        if group.rank == 0:
            await asyncio.gather(*(group.send(np.full(10, i), 1) for i in range(20)))
            return None
        targets = [np.zeros(10, np.int64) for _ in range(20)]
        await asyncio.gather(*(group.recv(target, 0) for target in targets))
        return [int(target[0]) for target in targets]

    assert run(member, 2)[1] == list(range(20))


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_source(run, world_size):
    """Rank 0 takes what comes, then meets the rest by name; every message arrives once."""

    async def member(group):
        if group.rank:
            await asyncio.sleep(0.001 * group.rank)
            for i in range(2):
                await group.send(np.array([group.rank, i, 7, 7]), 0, tag=9)
            return None
        found = []
        for _ in range(world_size - 1):
            target = np.zeros(4, np.int64)
            source = await group.recv(target, None, tag=9)
            assert source == target[0]
            found.append((source, int(target[1])))
        for peer in range(1, world_size):
            for _ in range(2 - sum(source == peer for source, _ in found)):
                target = np.zeros(4, np.int64)
                assert await group.recv(target, peer, tag=9) == peer
                found.append((peer, int(target[1])))
        return found

    found = run(member, world_size)[0]
    assert sorted(found) == [(peer, i) for peer in range(1, world_size) for i in range(2)]


def test_beside_collectives(run):
    """Transfers between some ranks do not shift the rounds of all."""

    async def member(group):
        array = np.full(4000, float(group.rank + 1))
        tasks = [group.all_reduce(array)]
        if group.rank == 2:
            tasks.append(group.send(np.arange(9), 0))
        tasks.append(group.barrier())
        if group.rank == 0:
            target = np.zeros((3, 6), np.int64)[:, ::2]
            tasks.append(group.recv(target, 2))
        done = await asyncio.gather(*tasks)
        if group.rank == 0:
            assert (target.reshape(-1) == np.arange(9)).all()
        assert done[0].round == 0 and (array == 6.0).all()
        return await group.all_reduce(array)

    assert [report.round for report in run(member, 3)] == [2, 2, 2]


def test_disagreement_about_size_and_type_is_named(run):
    async def member(group):
        if group.rank == 0:
            await group.send(np.zeros(5, np.float32), 1, tag=4)
            with pytest.raises(
                (PeerError, MismatchError, ClosedError), match="tag 4: rank 0 sends 5 float32"
            ):
                await group.recv(np.zeros(1), 1)
        else:
            with pytest.raises(
                MismatchError, match="rank 0 sends 5 float32 elements, rank 1 expects 6 float32 elements"
            ):
                await group.recv(np.zeros(6, np.float32), 0, tag=4)

    run(member, 2)


def test_a_missing_send_is_a_deadline_with_its_tag(run):
    async def member(group):
        if group.rank == 1:
            with pytest.raises(
                DeadlineError, match=r"recv from rank 0, tag 8.*rank 0 .*has not sent with tag 8"
            ) as caught:
                await group.recv(np.zeros(2), 0, tag=8, timeout_s=2.0)
            assert caught.value.ranks == (0,)
        else:
            await asyncio.sleep(4.0)

    run(member, 2)


def test_a_recv_without_a_match_can_be_withdrawn(run):
    async def member(group):
        peer = 1 - group.rank
        task = group.recv(np.zeros(3), peer, tag=1)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        target = np.zeros(3)
        await asyncio.gather(group.send(np.ones(3), peer, tag=1), group.recv(target, peer, tag=1))
        assert (target == 1).all()

    run(member, 2)


def test_a_rank_that_leaves_harms_nobody_who_expects_nothing_of_it():
    """A recv from any source looks out for all ranks; one of them leaves, after it or during it."""

    async def member(group):
        if group.rank == 2:
            await group._endpoint.close(linger_s=1.0)
        elif group.rank == 1:
            await group.send(np.ones(3), 0)
            await asyncio.sleep(0.5)
            await asyncio.gather(group.send(np.ones(5), 0), group.recv(np.zeros(7), 0))
        else:
            assert await group.recv(np.zeros(3), None) == 1
            assert (
                await group.recv(target := np.zeros(5), None) == 1
            )  # posted before rank 2 leaves, met after
            await group.send(np.ones(7), 1)
            assert (target == 1).all()

    run_network(member, 3)


def test_a_cancelled_send_in_progress_fails_both():
    async def member(group):
        if group.rank == 0:
            task = group.send(np.zeros(1_000_000), 1)
            await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(ClosedError, match="send to rank 1, tag 0 was cancelled on rank 0"):
                group.barrier()
        else:
            with pytest.raises(PeerError, match="was cancelled on rank 0"):
                await group.recv(np.zeros(1_000_000), 0)

    run_memory(member, 2, chunk_bytes=1408)


@settings(max_examples=20, deadline=None)
@given(
    plan=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2), st.integers(0, 300)), max_size=25
    ),
    seed=st.integers(0, 1000),
)
def test_any_pattern_of_transfers_arrives(plan, seed):
    """Random (source, target, tag, size): each recv gets the sends of its source and tag in their order."""
    plan = [step for step in plan if step[0] != step[1]]

    async def member(group):
        tasks, targets = [], []
        for number, (source, target, tag, size) in enumerate(plan):
            if group.rank == source:
                tasks.append(group.send(np.full(size, number), target, tag))
            if group.rank == target:
                targets.append((number, np.full(size, -1)))
                tasks.append(group.recv(targets[-1][1], source, tag))
        await asyncio.gather(*tasks)
        assert all((array == number).all() for number, array in targets)

    run_memory(member, 4, seed=seed)


@settings(deadline=None)
@given(st.data())
def test_ids_of_transfers_do_not_meet(data):
    """At one endpoint: no round key is shared between peers, directions and sequence numbers, no id with a collective's."""
    rank = data.draw(st.integers(0, 1023))
    other = st.integers(0, 1023).filter(lambda peer: peer != rank)
    key = st.tuples(st.integers(0, 32_767), other, st.booleans(), st.integers(0, (1 << 21) - 1))
    first, second = data.draw(key), data.draw(key)

    def ids(group, peer, outgoing, sequence):
        ends = (rank, peer) if outgoing else (peer, rank)
        return [transfer_id(group, *ends, sequence, part) for part in (0, 1)]

    ours, theirs = ids(*first), ids(*second)
    assert round_of(ours[0]) == round_of(ours[1]) and ours[0] != ours[1]
    assert (round_of(ours[0]) == round_of(theirs[0])) == (first == second)
    assert ours[0] >> 63 == 1
