"""Bounded rounds: what is missing is missing exactly, said exactly, and the same on all ranks."""

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
from dblp.transport.policy import Bounded
from tests.collectives.fake import FakeNet
from tests.collectives.worlds import run_network, total, values


def contributions(world_size, count, seed, dtype="float32"):
    """Each rank's array: integers 1..9, so that a hole shows and sums are exact."""
    return [
        np.random.default_rng([seed, rank]).integers(1, 10, count).astype(dtype) for rank in range(world_size)
    ]


def lossy_run(world_size, count, budget, seed, *, op="sum", loss=1.0, dtype="float32"):
    """One bounded round; returns the net, the results and the reports."""

    async def main():
        net = FakeNet(world_size, seed=seed, loss=loss, chunk_bytes=512)
        groups = [Group(endpoint) for endpoint in net.endpoints]
        arrays = contributions(world_size, count, seed, dtype)
        reports = await asyncio.gather(
            *(
                group.all_reduce(a, op, policy=Bounded(budget))
                for group, a in zip(groups, arrays, strict=True)
            )
        )
        return net, arrays, reports

    return run_virtual(main())


def arrived(parts, reports, budget, largest=512):
    """The sum over the contributions that arrived, by the reports: a hole of peer p in owner o's shard is zero."""
    world_size = len(parts)
    chunk = chunk_bytes(-(-parts[0].nbytes // world_size), largest, Bounded(budget))
    parts = [part.copy() for part in parts]
    for owner, report in enumerate(reports):
        for peer, chunks in report.missing.items():
            shard = cut(parts[peer], world_size, chunk)[owner]
            per_chunk = chunk // shard.itemsize
            for index in chunks:
                shard[index * per_chunk : (index + 1) * per_chunk] = 0
    return total(parts)


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
            peer: chunks
            for (peer, message), chunks in net.endpoints[rank].missing.items()
            if chunks and not message & 1
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
            for index in report.missing[peer]:
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
                Group(net.endpoints[rank]).reduce_scatter(outputs[rank], parts[rank], policy=Bounded(0.2))
                for rank in range(world_size)
            )
        )
        return outputs, reports

    outputs, reports = run_virtual(main())
    wanted = arrived(contributions(world_size, count, 2), reports, 0.2)
    assert (np.concatenate(outputs) == wanted).all()
    assert all(report.missing_chunks > 0 for report in reports)


def test_energy_of_nan_falls_back_on_the_missing_share():
    async def main():
        net = FakeNet(2, seed=1, loss=1.0, chunk_bytes=512)
        arrays = [np.full(20_000, np.nan, np.float32) for _ in range(2)]
        return await asyncio.gather(
            *(Group(net.endpoints[r]).all_reduce(arrays[r], policy=Bounded(0.2)) for r in range(2))
        )

    for report in run_virtual(main()):
        assert report.energy_lost == report.missing_share > 0


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
        report = await group.all_reduce(array, policy=Bounded(0.3, stop=stop))
        return array, report

    results = run_network(member, world_size, seed=4, impair="loss(0.2)")
    assert len({array.tobytes() for array, _ in results}) == 1
    reports = [report for _, report in results]
    assert 0 < max(report.missing_share for report in reports) <= 0.3
    parts = [values(rank, count, "float32") for rank in range(world_size)]
    wanted = arrived(parts, reports, 0.3, ETHERNET_DATAGRAM_BYTES - HEADER_BYTES)
    assert (results[0][0] == wanted).all()
