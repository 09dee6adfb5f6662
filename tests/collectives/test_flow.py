"""All-reduces of several hops under a bound: equal ranks, nothing unaccounted for, no more missing than the budget."""

from __future__ import annotations

import asyncio
import functools
import itertools
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.collectives import algorithms
from dblp.collectives.algorithms import direct, halving_doubling, hierarchical, ps, ring
from dblp.collectives.algorithms.flow import Flow
from dblp.collectives.algorithms.hops import Copy, Segments, Span
from dblp.collectives.algorithms.union import Union, schedule
from dblp.collectives.carry import Residual
from dblp.collectives.group import Group
from dblp.sim.loop import run as run_virtual
from dblp.transport.outgoing import Outgoing
from dblp.transport.policy import Consistency, Policy, Stop
from tests.collectives.fake import FakeNet
from tests.collectives.worlds import run_members, run_memory, run_network, total

POSTS = {
    "direct": direct.post,
    "ring": ring.post,
    "halving_doubling": halving_doubling.post,
    "hierarchical": hierarchical.post,
    "ps": ps.post,
}


def contribution(rank, count, seed=0, dtype="float32"):
    """Integers from 1 on, so that a hole shows and every sum is exact."""
    return np.random.default_rng([seed, rank]).integers(1, 10, count).astype(dtype)


def keeping(monkeypatch, name):
    """Let the algorithm's ranks note what they keep: rank -> {round: array of what is in no result}."""
    kept: dict[int, dict[int, np.ndarray]] = {}

    def post(round_, buffer, reducer, policy, *, keep=None):
        mine = kept.setdefault(round_.rank, {}).setdefault(round_.number.number, np.zeros_like(buffer))

        def noting(first: int, values: np.ndarray, *, divisor: int = 1, ranks: int = 1) -> None:
            assert divisor == 1 and 1 <= ranks <= round_.world_size
            mine[first : first + values.size] += values

        POSTS[name](round_, buffer, reducer, policy, keep=noting)

    monkeypatch.setitem(algorithms.ALL_REDUCE, name, post)
    return kept


def policy(budget, *, gather=None, stop=Stop.STALL, consistency=Consistency.AGREED):
    return Policy(budget=budget, gather_budget=gather, stop=stop, consistency=consistency)


def lossy_run(name, world_size, count, chosen, seed, *, loss=1.0, op="sum", dtype="float32"):
    async def main():
        net = FakeNet(world_size, seed=seed, loss=loss, chunk_bytes=512)
        arrays = [contribution(rank, count, seed, dtype) for rank in range(world_size)]

        async def member(group):
            return await group.all_reduce(arrays[group.rank], op, policy=chosen, algorithm=name)

        return arrays, await run_members(net.endpoints, member, 60.0)

    return run_virtual(main())


@pytest.mark.parametrize("name", POSTS)
@settings(max_examples=12, deadline=None)
@given(
    world_size=st.integers(2, 9),
    count=st.integers(1, 20_000),
    budget=st.sampled_from([0.1, 0.4, 0.9]),
    gather=st.sampled_from([0.0, 0.05, 0.1]),
    stop=st.sampled_from([Stop.STALL, Stop.EAGER]),
    seed=st.integers(0, 10_000),
)
def test_ranks_stay_equal_and_nothing_is_lost_without_a_trace(
    name, world_size, count, budget, gather, stop, seed
):
    with pytest.MonkeyPatch.context() as patch:
        kept = keeping(patch, name)
        arrays, reports = lossy_run(name, world_size, count, policy(budget, gather=gather, stop=stop), seed)
    assert len({array.tobytes() for array in arrays}) == 1, "C3: all ranks, the same bits"
    contributed = total(contribution(rank, count, seed) for rank in range(world_size))
    carried = total(rounds[0] for rounds in kept.values())
    assert (arrays[0] + carried == contributed).all(), "C4: delivered + kept == contributed"
    assert all(report.missing_share <= budget for report in reports), "C2: bounded means bounded"


@pytest.mark.parametrize("name", POSTS)
@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_something_is_kept_on_both_legs(monkeypatch, name, world_size):
    """With every budget used up: the reduce leg's keepers hold partial sums, the gather leg's owners whole results."""
    kept = keeping(monkeypatch, name)
    count = 60_000
    arrays, reports = lossy_run(name, world_size, count, policy(0.5, gather=0.2), 3)
    whole = total(contribution(rank, count, 3) for rank in range(world_size))
    dropped = np.flatnonzero(arrays[0] == 0)
    assert {report.filled_chunks for report in reports} == {-(-len(dropped) // 128)}, "chunks of 128 elements"
    assert 0.05 < len(dropped) / count <= 0.2, "the union of the holes is within the gather leg's budget"
    owned = sum((rounds[0][dropped] == whole[dropped]).sum() for rounds in kept.values())
    assert owned > 0.02 * len(dropped)
    partial = np.flatnonzero((arrays[0] != whole) & (arrays[0] != 0))
    assert len(partial) > 0.02 * count
    assert sum(report.missing_chunks for report in reports) > 0
    for report in reports:  # all chunks weigh about as much
        assert report.energy_lost == pytest.approx(report.missing_share, abs=0.05)


@pytest.mark.parametrize("name", POSTS)
@pytest.mark.parametrize("world_size", [3, 6])
def test_an_exact_gather_leg_loses_contributions_only(name, world_size):
    arrays, reports = lossy_run(name, world_size, 10_000, policy(0.5, consistency=Consistency.EXACT), 1)
    assert len({array.tobytes() for array in arrays}) == 1
    assert all((array > 0).all() for array in arrays), "each owner's own contribution is there"
    assert all(report.filled_chunks == 0 for report in reports)
    assert sum(report.missing_chunks for report in reports) > 0


@pytest.mark.parametrize("name", POSTS)
def test_relaxed_ranks_differ_only_by_their_holes(name):
    """Each rank has the others' result, or zeros where a chunk did not reach it, nothing else."""
    arrays, reports = lossy_run(
        name,
        6,
        60_000,
        policy(0.6, gather=0.4, consistency=Consistency.RELAXED),
        2,
    )
    assert len({array.tobytes() for array in arrays}) > 1
    for array, report in zip(arrays, reports, strict=True):
        zeros = -(-np.count_nonzero(array == 0) // 128)
        assert report.filled_chunks <= zeros, "zeros that a peer forwards are no holes"
        assert name in ("ring", "halving_doubling", "hierarchical") or report.filled_chunks == zeros
    assert sum(report.filled_chunks for report in reports) > 0
    stack = np.stack(arrays)
    best = stack.max(axis=0)
    assert ((stack == best) | (stack == 0)).all()


@pytest.mark.parametrize("name", POSTS)
@pytest.mark.parametrize("world_size", [2, 3, 6])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_bounded_without_loss_gives_the_bits_of_exact(run, name, world_size, dtype):
    """C5, with any floats: the grids are the same, so the sums are."""

    async def member(group):
        exact = np.random.default_rng(group.rank).standard_normal(3000).astype(dtype)
        bounded = exact.copy()
        await group.all_reduce(exact, "avg", algorithm=name)
        report = await group.all_reduce(bounded, "avg", algorithm=name, policy=policy(0.4))
        assert report.missing_share == report.energy_lost == 0.0 and report.bounded_chunks > 0
        return exact.tobytes(), bounded.tobytes()

    assert len({bits for pair in run(member, world_size) for bits in pair}) == 1


@pytest.mark.parametrize("name", POSTS)
@pytest.mark.parametrize("world_size", [3, 6])
def test_averages_divide_by_all_where_the_last_sum_is_a_hole_too(name, world_size):
    summed, _ = lossy_run(name, world_size, 10_000, policy(0.5), 4)
    averaged, reports = lossy_run(name, world_size, 10_000, policy(0.5), 4, op="avg")
    assert sum(report.missing_chunks for report in reports) > 0
    np.testing.assert_allclose(averaged[0], summed[0] / world_size, rtol=1e-6)


@pytest.mark.parametrize("world_size", range(2, 10))
def test_halving_and_doubling_adds_in_a_tree(world_size):
    """((r0 + r1) + (r2 + r3)) + ...; where there are too many ranks for a power of two, the first pairs count as one."""
    parts = [
        np.random.default_rng(rank).standard_normal(3000).astype(np.float32) for rank in range(world_size)
    ]
    folded = world_size - (1 << (world_size.bit_length() - 1))
    leaves = [parts[2 * i] + parts[2 * i + 1] for i in range(folded)] + parts[2 * folded :]
    while len(leaves) > 1:
        leaves = [leaves[i] + leaves[i + 1] for i in range(0, len(leaves), 2)]

    async def member(group):
        array = parts[group.rank].copy()
        await group.all_reduce(array, algorithm="halving_doubling")
        return array.tobytes()

    assert {bits for seed in range(3) for bits in run_memory(member, world_size, seed=seed)} == {
        leaves[0].tobytes()
    }


@pytest.mark.parametrize("name", POSTS)
@pytest.mark.parametrize("stop", ["stall", "eager"])
@pytest.mark.parametrize("loss", [0.01, 0.2])
def test_over_a_lossy_network(monkeypatch, name, stop, loss):
    """Real endpoints: replicas agree in every round, the bound holds, integers add up."""
    kept = keeping(monkeypatch, name)
    world_size, count = 4, 15_000

    async def member(group):
        arrays = [contribution(group.rank, count, seed) for seed in range(2)]
        tasks = [group.all_reduce(a, policy=policy(0.5, stop=Stop(stop)), algorithm=name) for a in arrays]
        return arrays, await asyncio.gather(*tasks)

    results = run_network(member, world_size, seed=5, impair=f"loss({loss}),reorder(0.05,1ms)")
    for number in range(2):
        assert len({arrays[number].tobytes() for arrays, _ in results}) == 1
        contributed = total(contribution(rank, count, number) for rank in range(world_size))
        carried = total(kept[rank][number] for rank in range(world_size))
        assert (results[0][0][number] + carried == contributed).all()
    assert all(report.missing_share <= 0.5 for _, reports in results for report in reports)
    assert sum(report.missing_chunks for _, reports in results for report in reports) > 0


@pytest.mark.parametrize("name", ["direct", "ps(servers=0+1+2)"])
@pytest.mark.parametrize("stop", ["stall", "eager"])
def test_fills_are_never_counted_as_contributions(name, stop):
    """Real endpoints, no carry: results overwrite contributions at once, fills only when those have been counted. The reduce leg
    is exact here, so what an owner has made is the sum of all, though its peers gave up results before it had their parts."""
    world_size, count = 3, 60_000
    chosen = policy(0.3, gather=0.3, stop=Stop(stop), consistency=Consistency.RELAXED)

    async def member(group):
        array = contribution(group.rank, count)
        return array, await group.all_reduce(array, policy=chosen, algorithm=name)

    results = run_network(member, world_size, seed=7, impair="loss(0.15),reorder(0.05,1ms)")
    wanted = total(contribution(rank, count) for rank in range(world_size))
    for array, report in results:
        assert ((array == wanted) | (array == 0)).all()
        assert report.filled_chunks > 0
    assert (np.stack([array for array, _ in results]).max(axis=0) == wanted).all(), "owners have no holes"


@pytest.mark.parametrize("name", ["direct", "ps(servers=0+1+2)"])
def test_nothing_waits_where_nothing_is_lost_or_kept(monkeypatch, name):
    """Results go straight to their place in an agreed round; with a residual, what they overwrite is put aside."""
    staged: list[type] = []
    aside: list[type] = []

    def noting(kind, method, notes):
        original = getattr(kind, method)

        def call(self):
            notes.append(kind)
            return original(self)

        monkeypatch.setattr(kind, method, call)

    noting(Copy, "_take_stage", staged)
    noting(Flow, "_take_aside", aside)

    async def member(group, residual=None):
        array = contribution(group.rank, 60_000)
        await group.all_reduce(array, policy=policy(0.1), algorithm=name, carry=residual)
        return array.tobytes()

    straight = run_network(member, 3, seed=1)
    assert not staged and not aside
    kept = run_network(lambda group: member(group, Residual(60_000)), 3, seed=1)
    assert aside and not staged
    assert set(straight) == set(kept) and len(set(kept)) == 1


# the union of bitmaps


@pytest.mark.parametrize("world_size", range(2, 18))
def test_schedules_of_all_ranks_fit_together(world_size):
    """Every message has a sender and a receiver, and everyone takes ceil(log2) + 1 steps at most."""
    sends = {
        (rank, peer, step)
        for rank in range(world_size)
        for peer, step, out, _ in schedule(rank, world_size)
        if out
    }
    receives = {
        (peer, rank, step)
        for rank in range(world_size)
        for peer, step, _, back in schedule(rank, world_size)
        if back
    }
    assert sends == receives
    assert max(len(schedule(rank, world_size)) for rank in range(world_size)) <= world_size.bit_length() + 1


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8, 9])
def test_all_ranks_learn_the_union(monkeypatch, world_size):
    known: dict[int, np.ndarray] = {}
    bits = [
        np.frombuffer(zlib.crc32(b"%d" % rank).to_bytes(4, "big") * 25, np.uint8)
        for rank in range(world_size)
    ]
    bits = [part & np.uint8(1 << rank % 8) for rank, part in enumerate(bits)]

    def post(round_, buffer, reducer, policy, *, keep=None):
        union = Union(round_, 100, 0, functools.partial(known.__setitem__, round_.rank))
        asyncio.get_running_loop().call_later(1e-3 * round_.rank, union.start, bits[round_.rank])

    monkeypatch.setitem(algorithms.ALL_REDUCE, "ring", post)

    async def member(group: Group):
        await group.all_reduce(np.zeros(8, np.float32), algorithm="ring")

    run_memory(member, world_size)
    wanted = functools.reduce(np.bitwise_or, bits).tobytes()
    assert {known[rank].tobytes() for rank in range(world_size)} == {wanted}


@given(st.integers(1, 300), st.integers(1, 64), st.randoms(use_true_random=False))
def test_segments_are_offered_whole_and_once(chunks, segment, random):
    """Runs of chunks get ready in any order: each is offered once, with all of its segment, as soon as that is complete."""
    borders = sorted({0, chunks, *(random.randrange(chunks) for _ in range(random.randrange(8)))})
    ready = list(itertools.pairwise(borders))
    random.shuffle(ready)
    segments, there, offered = Segments(chunks, segment), np.zeros(chunks, bool), np.zeros(chunks, int)
    for low, high in ready:
        there[low:high] = True
        for first, count in segments.ready(low, high):
            assert first % segment == 0 and (count % segment == 0 or first + count == chunks)
            offered[first : first + count] += 1
        complete = np.array(
            [there[c // segment * segment : (c // segment + 1) * segment].all() for c in range(chunks)]
        )
        assert (offered == complete).all()


def test_exact_hops_send_whole_bursts_where_the_network_loses(monkeypatch):
    """A chunk that waits for its repair leaves no gap in what the next hop sends."""
    gapped = 0
    take = Outgoing.take_runs

    def taking(outgoing, most):
        nonlocal gapped
        chunks = take(outgoing, most)
        gapped += 0 if chunks is None else len(chunks)
        return chunks

    monkeypatch.setattr(Outgoing, "take_runs", taking)
    shard = 8 * 44 * 352  # eight bursts of 44 chunks of 352 elements

    async def member(group):
        array = contribution(group.rank, 4 * shard)
        await group.all_reduce(array, algorithm="ring")
        return array

    results = run_network(member, 4, seed=3, impair="loss(0.02)")
    contributed = total(contribution(rank, 4 * shard) for rank in range(4))
    assert all((array == contributed).all() for array in results)
    assert gapped == 0  # 61 % of all chunks, were they offered as they come


def test_spans_are_cut_evenly():
    assert Span(3, 13).cut(4) == [Span(3, 6), Span(6, 9), Span(9, 11), Span(11, 13)]
    assert Span(0, 2).cut(3) == [Span(0, 1), Span(1, 2), Span(2, 2)]


@pytest.mark.parametrize("name", ["direct", "ps"])
def test_the_energy_of_lost_contributions_is_told(name):
    """Rank 1 has nearly all of the energy: a hole of its contribution weighs 10,000 times one of another's."""
    weights = {rank: 1.0 if rank == 1 else 1e-4 for rank in range(4)}

    async def main():
        net = FakeNet(4, seed=3, loss=1.0, chunk_bytes=512)

        async def member(group):
            array = np.full(40_960, np.sqrt(weights[group.rank]), np.float32)
            chosen = policy(0.4, consistency=Consistency.EXACT)
            return await group.all_reduce(array, policy=chosen, algorithm=name)

        return await run_members(net.endpoints, member, 60.0)

    reports = [report for report in run_virtual(main()) if report.missing_chunks]
    assert reports
    for rank, report in enumerate(reports):
        peers = [peer for peer in weights if peer != rank]
        lost = sum(weights[peer] * len(report.missing.get(peer, ())) for peer in peers)
        whole = sum(weights[peer] * report.bounded_chunks / 3 for peer in peers)
        assert report.energy_lost == pytest.approx(lost / whole, rel=1e-3)
