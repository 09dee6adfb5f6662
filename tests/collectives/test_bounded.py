"""Bounded direct exchanges: what is missing is missing exactly, said exactly, and the same on all ranks.

What holds for all algorithms is in ``test_flow``.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.collectives.algorithms.grid import chunk_bytes, cut
from dblp.collectives.group import Group
from dblp.collectives.report import energy_lost_share
from dblp.sim.loop import run as run_virtual
from dblp.transport.config import ETHERNET_DATAGRAM_BYTES, HEADER_BYTES
from dblp.transport.policy import Bounded, Consistency, Fill, Policy, Short, Stop
from tests.collectives.fake import FakeNet
from tests.collectives.worlds import run_network, total, values


def contributions(world_size, count, seed, dtype="float32"):
    """Each rank's array: integers 1..9, so that a hole shows and sums are exact."""
    return [
        np.random.default_rng([seed, rank]).integers(1, 10, count).astype(dtype) for rank in range(world_size)
    ]


def bounded(budget, **options):
    """Only contributions are lost."""
    return Bounded(budget, consistency="exact", **options)


def lossy_run(world_size, count, budget, seed, *, op="sum", loss=1.0, dtype="float32", policy=None):
    """One bounded round; returns the net, the results and the reports."""

    async def main():
        net = FakeNet(world_size, seed=seed, loss=loss, chunk_bytes=512)
        groups = [Group(endpoint) for endpoint in net.endpoints]
        arrays = contributions(world_size, count, seed, dtype)
        reports = await asyncio.gather(
            *(
                group.all_reduce(a, op, policy=policy or bounded(budget))
                for group, a in zip(groups, arrays, strict=True)
            )
        )
        return net, arrays, reports

    return run_virtual(main())


def present(parts, reports, budget, largest=512):
    """The contributions as they arrived, by the reports: a hole of peer p at owner o is zero."""
    chunk = chunk_bytes(-(-parts[0].nbytes // len(parts)), largest, Bounded(budget))
    per_chunk = chunk // parts[0].itemsize
    parts = [part.copy() for part in parts]
    for report in reports:
        for peer, chunks in report.missing.items():
            for index in chunks:
                parts[peer][index * per_chunk : (index + 1) * per_chunk] = 0
    return parts


def arrived(parts, reports, budget, largest=512):
    """Their sum."""
    return total(present(parts, reports, budget, largest))


def first_chunk(owner, world_size, count, budget):
    """Where the owner's shard starts, in chunks."""
    chunk = chunk_bytes(-(-count * 4 // world_size), 512, Bounded(budget))
    shards = cut(np.empty(count, np.float32), world_size, chunk)
    return sum(-(-shard.nbytes // chunk) for shard in shards[:owner])


@settings(max_examples=30, deadline=None)
@given(
    world_size=st.integers(2, 6),
    count=st.integers(1, 20_000),
    budget=st.sampled_from([0.05, 0.3, 0.9]),
    seed=st.integers(0, 10_000),
)
def test_the_result_is_the_sum_of_what_arrived(world_size, count, budget, seed):
    net, arrays, reports = lossy_run(world_size, count, budget, seed)
    wanted = arrived(contributions(world_size, count, seed), reports, budget)
    for array in arrays:
        assert array.tobytes() == wanted.tobytes(), "C3: all ranks, the same bits"
    for rank, report in enumerate(reports):
        truth = {
            peer: [chunk + first_chunk(rank, world_size, count, budget) for chunk in chunks]
            for (peer, message), chunks in net.endpoints[rank].missing.items()
            if chunks
        }
        assert {peer: chunks.tolist() for peer, chunks in report.missing.items()} == truth
        assert report.missing_share <= budget, "C2: bounded means bounded"


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_something_is_lost_and_accounted_for(world_size):
    """With the whole budget of 25 % lost: share, chunks and energy by a count of one's own."""
    count, seed = 40_000, 3
    _, _, reports = lossy_run(world_size, count, 0.25, seed)
    parts = contributions(world_size, count, seed)
    chunk = chunk_bytes(-(-parts[0].nbytes // world_size), 512, Bounded(0.25))
    for owner, report in enumerate(reports):
        lost = whole = chunks = 0.0
        for peer in range(world_size):
            if peer == owner:
                continue
            shard = cut(parts[peer], world_size, chunk)[owner].astype(np.float64)
            whole += (shard**2).sum()
            chunks += -(-shard.size * 4 // chunk)
            for index in report.missing[peer] - first_chunk(owner, world_size, count, 0.25):
                lost += (shard[index * chunk // 4 : (index + 1) * chunk // 4] ** 2).sum()
        assert 0.2 < report.missing_share <= 0.25
        assert report.missing_share == report.missing_chunks / chunks
        assert report.energy_lost == pytest.approx(lost / whole, rel=1e-5)
        assert "missing 2" in str(report) and report.stop == "stall"


@pytest.mark.parametrize("world_size", [2, 4])
def test_average_still_divides_by_all(world_size):
    """Fill is zero: a hole counts as a contribution of nothing, so the divisor stays world_size."""
    _, arrays, reports = lossy_run(world_size, 30_000, 0.3, 5, op="avg")
    wanted = arrived(contributions(world_size, 30_000, 5), reports, 0.3)
    assert (arrays[0] == wanted / np.float32(world_size)).all()
    assert sum(report.missing_chunks for report in reports) > 0


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_floating_types(world_size, dtype):
    _, arrays, reports = lossy_run(world_size, 20_000, 0.3, 7, dtype=dtype)
    wanted = arrived(contributions(world_size, 20_000, 7, dtype), reports, 0.3)
    assert (arrays[-1] == wanted).all() and all(0 < report.energy_lost < 1 for report in reports)


@pytest.mark.parametrize("world_size", [2, 4])
def test_bounded_reduce_scatter(world_size):
    count = 8192 * world_size

    async def main():
        net = FakeNet(world_size, seed=2, loss=1.0, chunk_bytes=512)
        parts = contributions(world_size, count, 2)
        outputs = [np.zeros(8192, np.float32) for _ in range(world_size)]
        reports = await asyncio.gather(
            *(
                Group(net.endpoints[rank]).reduce_scatter(outputs[rank], parts[rank], policy=bounded(0.2))
                for rank in range(world_size)
            )
        )
        return outputs, reports

    outputs, reports = run_virtual(main())
    for owner, (output, report) in enumerate(zip(outputs, reports, strict=True)):
        per_chunk = chunk_bytes(8192 * 4, 512, Bounded(0.2)) // 4
        wanted = np.zeros(8192, np.float32)
        for rank, part in enumerate(contributions(world_size, count, 2)):
            shard = part[owner * 8192 : (owner + 1) * 8192].copy()
            for index in report.missing.get(rank, ()):
                shard[index * per_chunk : (index + 1) * per_chunk] = 0
            wanted += shard
        assert (output == wanted).all()
    assert all(report.missing_chunks > 0 for report in reports)


def test_energy_of_nan_falls_back_on_the_missing_share():
    async def main():
        net = FakeNet(2, seed=1, loss=1.0, chunk_bytes=512)
        arrays = [np.full(20_000, np.nan, np.float32) for _ in range(2)]
        return await asyncio.gather(
            *(Group(net.endpoints[r]).all_reduce(arrays[r], policy=bounded(0.2)) for r in range(2))
        )

    for report in run_virtual(main()):
        assert report.energy_lost == report.missing_share > 0


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rescale_divides_by_the_contributions_that_came(world_size, op, dtype):
    """Of constant contributions the result is the constant, whatever is missing."""

    async def main():
        net = FakeNet(world_size, seed=3, loss=1.0, chunk_bytes=512)
        arrays = [np.full(30_000, 6.0, dtype) for _ in range(world_size)]
        chosen = Policy(budget=0.5, consistency=Consistency.EXACT, fill=Fill.RESCALE)
        reports = await asyncio.gather(
            *(Group(net.endpoints[r]).all_reduce(arrays[r], op, policy=chosen) for r in range(world_size))
        )
        return arrays, reports

    arrays, reports = run_virtual(main())
    assert sum(report.missing_chunks for report in reports) > 10
    wanted = 6.0 if op == "avg" else 6.0 * world_size
    for array in arrays:
        np.testing.assert_allclose(array, wanted, rtol=1e-3 if dtype == "float16" else 1e-6)
    assert len({array.tobytes() for array in arrays}) == 1


def test_previous_keeps_what_stood_there():
    chosen = Policy(budget=0.6, gather_budget=0.4, consistency=Consistency.RELAXED, fill=Fill.PREVIOUS)
    _, arrays, _ = lossy_run(3, 40_000, 0.6, 2, policy=chosen)
    mine = contributions(3, 40_000, 2)
    stack = np.stack(arrays)
    kept = np.stack([array == own for array, own in zip(arrays, mine, strict=True)])
    low = np.where(kept, np.inf, stack).min(axis=0)
    high = np.where(kept, -np.inf, stack).max(axis=0)
    assert (kept.all(axis=0) | (low == high)).all(), "whoever got the result has the same one"
    assert len({array.tobytes() for array in arrays}) > 1


@pytest.mark.parametrize("consistency", ["agreed", "exact"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_that_is_too_short_is_skipped_by_all(world_size, consistency):
    """One rank's datagrams hardly get through: at the deadline all ranks have zeros, and say so."""
    chosen = Policy(
        budget=0.02,
        stop=Stop.DEADLINE,
        stop_after_s=0.01,  # repair is quick: within 0.03 s it may come to the bound in spite of the loss
        short=Short.SKIP,
        consistency=Consistency(consistency),
    )

    async def member(group):
        skipped = []
        for _ in range(4):
            array = values(group.rank, 60_000, "float32")
            report = await group.all_reduce(array, policy=chosen)
            assert report.skipped == (not array.any())
            if not report.skipped:
                assert report.missing_share <= 0.02
            skipped.append(report.skipped)
        return skipped

    heavy = run_network(member, world_size, seed=3, impair="loss(0.75)")
    assert all(skips == heavy[0] for skips in heavy) and any(heavy[0])
    light = run_network(member, world_size, seed=3, impair="loss(0.003)")
    assert not any(any(skips) for skips in light)


def test_a_skipped_round_needs_no_loss_of_a_chunk():
    """Without loss, deadlines or not, nothing is skipped."""
    chosen = Policy(budget=0.1, stop=Stop.DEADLINE, stop_after_s=5.0, short=Short.SKIP)

    async def member(group):
        array = values(group.rank, 10_000, "float32")
        report = await group.all_reduce(array, policy=chosen)
        return report.skipped, array.tobytes()

    assert {skipped for skipped, _ in run_network(member, 3, seed=1)} == {False}


def test_energy_share_stays_in_its_range():
    assert energy_lost_share([(4.0, 3.0), (6.0, 2.0)], 0.1) == 0.5
    assert energy_lost_share([(4.0, 4.1)], 0.1) == 0.0
    assert energy_lost_share([(0.0, 0.0)], 0.1) == 0.0
    assert energy_lost_share([(float("inf"), 1.0)], 0.1) == 0.1
    assert energy_lost_share([(4.0, 1.0)], 0.0) == 0.0


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stop", ["eager", "stall"])
def test_over_a_lossy_network(world_size, stop):
    """Real endpoints, 20 % of all datagrams lost: replicas agree, the bound holds, integers add up."""
    count = 60_000

    async def member(group):
        array = values(group.rank, count, "float32")
        report = await group.all_reduce(array, policy=bounded(0.3, stop=stop))
        return array, report

    results = run_network(member, world_size, seed=4, impair="loss(0.2)")
    assert len({array.tobytes() for array, _ in results}) == 1
    reports = [report for _, report in results]
    assert 0 < max(report.missing_share for report in reports) <= 0.3
    parts = [values(rank, count, "float32") for rank in range(world_size)]
    wanted = arrived(parts, reports, 0.3, ETHERNET_DATAGRAM_BYTES - HEADER_BYTES)
    assert (results[0][0] == wanted).all()
