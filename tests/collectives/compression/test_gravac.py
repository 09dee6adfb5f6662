"""GraVAC between ranks in virtual time: levels, agreement, states, and what the gain is."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import numpy as np
import pytest

from dblp.collectives.compression.base import Bucket, Part
from dblp.collectives.compression.gravac import GraVAC
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.compression.rounds import Compression
from dblp.collectives.compression.search import DENSE
from dblp.errors import ConfigError
from tests.collectives.compression.cases import agree, bucket, gradient, job
from tests.collectives.worlds import run_memory, run_network

PARTS = bucket([(60, 50), (70,), (20, 10)])
LATER = Bucket([Part("q0", (40, 40)), Part("q1", (13,))])
COMPRESSORS = ("topk", "dgc", "redsync", "randomk")


def _member(text, steps, *, buckets=(PARTS,), scale=lambda rank, step: 1.0, compute=lambda rank, step: 0.0):
    """A member that trains; returns thetas and averages by iteration, the sums of what was given and withheld, and totals."""

    async def member(group):
        compression = Compression(parse_compression(text))
        thetas, averages = [], []
        given = [np.zeros(parts.size) for parts in buckets]
        for step in range(steps):
            await asyncio.sleep(compute(group.rank, step))
            arrays = []
            for parts, total in zip(buckets, given, strict=True):
                array = np.round(
                    scale(group.rank, step) * gradient(parts.size, "float32", 7 * step + group.rank)
                )
                total += array
                arrays.append(array)
            await asyncio.gather(
                *(
                    compression.all_reduce(group, array, parts, timeout_s=30.0, iteration=step)
                    for array, parts in zip(arrays, buckets, strict=True)
                )
            )
            thetas.append(compression.figures["theta"])
            averages.append([array.copy() for array in arrays])
        held = [compression._memories.of(parts.layout).residual for parts in buckets]
        return thetas, averages, given, held, compression.figures, compression.totals

    return member


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_ranks_decide_alike_and_nothing_is_lost(compressor):
    """Ranks of different speed and gradients, two buckets, on a network that loses: over two ranks, all that was given was
    delivered or is withheld."""
    text = (
        f"gravac(compressor={compressor},theta_max=160,window=3,epsilon=0.05,omega=0.001,scaling=geometric)"
    )
    results = run_network(
        _member(
            text, 24, buckets=(PARTS, LATER),
            scale=lambda rank, step: 1.0 + 30.0 * rank, compute=lambda rank, step: 1e-3 * (1 + rank),
        ),
        2, impair="loss(0.02)",
    )  # fmt: skip
    (thetas, averages, *mine), (others, also, *theirs) = results
    assert thetas == others and len(set(thetas)) > 1 and thetas[:3] == [10.0] * 3
    assert mine[2] == theirs[2], "the figures are agreed"
    for index in (0, 1):
        delivered = sum(average[index].astype(np.float64) for average in averages)
        np.testing.assert_array_equal(delivered, sum(average[index].astype(np.float64) for average in also))
        given = mine[0][index] + theirs[0][index]
        np.testing.assert_array_equal(2 * delivered + mine[1][index] + theirs[1][index], given)


def test_it_climbs_while_less_data_is_less_time_and_the_gain_allows():
    """A slow network and a gradient that is nearly all in a few elements: every level is tried and the last one kept."""

    async def member(group):
        compression = Compression(parse_compression("gravac(theta_max=100,window=4,omega=0.001)"))
        sparse = np.zeros(PARTS.size, np.float32)
        sparse[:20] = 100.0
        for step in range(40):
            array = sparse + gradient(PARTS.size, "float32", step) * np.float32(1e-3)
            await compression.all_reduce(group, array, PARTS, timeout_s=30.0, iteration=step)
        return compression.figures

    figures, other = run_network(member, 2, impair="rate(2mbit)")
    assert figures == other
    assert figures["theta"] == 100.0 and figures["settled"] and figures["gain"] > 0.9
    assert figures["search_steps"] == 4 + 3 * 4 and figures["steps"] == 38


def test_a_flat_gradient_is_sent_as_it_is():
    """All elements alike: a tenth of them has a third of the norm, less than epsilon; after the warm-up nothing is withheld."""

    async def member(group):
        compression, thetas = Compression(parse_compression("gravac(window=2,epsilon=0.9)")), []
        for step in range(12):
            array = np.ones(PARTS.size, np.float32)
            await compression.all_reduce(group, array, PARTS, timeout_s=30.0, iteration=step)
            thetas.append(compression.figures["theta"])
        held = compression._memories.of(PARTS.layout).residual
        assert held is not None and not held.any()
        return thetas

    thetas, others = run_memory(member, 2)
    assert thetas == others and thetas[:2] == [10.0, 10.0] and thetas[-1] == 1.0


def test_levels_are_nested_and_their_norms_fall():
    array = gradient(PARTS.size, "float32")
    for compressor in COMPRESSORS:
        method = GraVAC(compressor=compressor, scaling="geometric", theta_max=320.0)
        work = job(PARTS, array, "float32")
        method.begin(work, array)
        agree(method, work)
        method.compress(work)
        nested = work.notes["nested"]
        assert [len(indices) for indices in nested] == [
            int(np.ceil(PARTS.size / theta)) for theta in method.thetas
        ]
        for more, fewer in pairwise(nested):
            assert set(fewer) < set(more) and (np.diff(fewer) > 0).all()
        norms = work.notes["iteration"].norms
        assert (np.diff(norms) <= 0).all()
        raw = sum(np.linalg.norm(part.astype(np.float64)) for part in PARTS.cut(array))
        np.testing.assert_allclose(norms[0], raw)
        least = np.zeros_like(array)
        least[nested[0]] = array[nested[0]]
        np.testing.assert_allclose(
            norms[1], sum(np.linalg.norm(part) for part in PARTS.cut(least)), rtol=1e-6
        )


@pytest.mark.parametrize(("gain", "stays"), [("gradient", True), ("residual", False)])
def test_the_gain_of_a_level_is_against_the_gradient_not_against_what_has_piled_up(gain, stays):
    """Normal gradients: what waits grows to several times their norm, and a tenth of the elements has as much norm as they have.
    Against gradient and residual together that is little, and everything would be sent, again and again."""

    async def member(group):
        text = f"gravac(theta_max=10,window=12,alpha=0.5,epsilon=0.75,gain={gain})"
        compression, thetas = Compression(parse_compression(text)), []
        for step in range(24):
            array = gradient(PARTS.size, "float32", step, spread=0.0)
            await compression.all_reduce(group, array, PARTS, timeout_s=30.0, iteration=step)
            thetas.append(compression.figures["theta"])
        assert 0.0 <= compression.figures["gain"] <= 1.0
        return thetas

    thetas, others = run_memory(member, 2)
    assert thetas == others and thetas[:12] == [10.0] * 12
    assert (1.0 not in thetas) == stays


def test_a_spoiled_iteration_is_no_measurement():
    """Of one rank: its norms do not count, the others' do; decisions stay alike and finite."""

    async def member(group):
        compression = Compression(parse_compression("gravac(window=2)"))
        for step in range(10):
            array = gradient(PARTS.size, "float32", step)
            if group.rank == 1 and step % 3 == 0:
                array[3] = np.inf
            await compression.all_reduce(group, array, PARTS, timeout_s=30.0, iteration=step)
        return compression.figures, compression.totals.spoiled

    first, second = run_memory(member, 2)
    assert first == second and first[1] == 4 and np.isfinite(list(first[0].values())).all()


def test_a_loaded_state_goes_on():
    """Halfway through a trial: what was saved chooses as what was not (times between iterations apart, which a rank measures)."""
    text = "gravac(theta_max=160,window=3,epsilon=0.05,omega=0.001)"

    async def member(group):
        straight, before = Compression(parse_compression(text)), Compression(parse_compression(text))
        thetas = []
        for step in range(30):
            await straight.all_reduce(
                group, gradient(PARTS.size, "float32", step), PARTS, timeout_s=30.0, iteration=step
            )
            thetas.append(straight.figures["theta"])
        for step in range(11):
            await before.all_reduce(
                group, gradient(PARTS.size, "float32", step), PARTS, timeout_s=30.0, iteration=step
            )
        after = Compression(parse_compression(text))
        after.load_state_dict(before.state_dict())
        assert after.figures == before.figures and after.figures["steps"] == 9
        for step in range(11, 30):
            array = gradient(PARTS.size, "float32", step)
            await after.all_reduce(group, array, PARTS, timeout_s=30.0, iteration=step)
        assert after.figures["steps"] == 27, "one iteration at the seam is not heard of"
        return thetas, after.figures

    first, second = run_memory(member, 2)
    assert first == second


def test_a_state_of_another_ladder_begins_anew():
    async def member(group):
        old = Compression(parse_compression("gravac(theta_max=160)"))
        array = gradient(PARTS.size, "float32")
        await old.all_reduce(group, array.copy(), PARTS, timeout_s=30.0)
        new = Compression(parse_compression("gravac(theta_max=20)"))
        new.load_state_dict(old.state_dict())
        for step in range(3):
            await new.all_reduce(group, array.copy(), PARTS, timeout_s=30.0, iteration=step + 1)
        return new.figures

    assert all(figures["steps"] == 1 for figures in run_memory(member, 2))


def test_iterations_are_told_apart_without_numbers_and_through_rebuilt_buckets():
    """All calls say iteration 0: a bucket that comes again begins one."""

    async def member(group):
        compression = Compression(parse_compression("gravac(window=2)"))
        for step in range(8):
            for parts in (PARTS, LATER) if step < 4 else (bucket([(60, 50), (70,), (20, 10), (9,)]),):
                await compression.all_reduce(
                    group, gradient(parts.size, "float32", step), parts, timeout_s=30.0
                )
        return compression.figures["steps"]

    assert run_memory(member, 2) == [5, 5]


def test_options():
    method = parse_compression("gravac(theta_max=1000,scaling=geometric,step=10,compressor=redsync)")
    assert isinstance(method, GraVAC) and method.thetas == (10, 100, 1000)
    assert GraVAC().thetas == (10, 20, 40, 160, 2560, 10_000) and DENSE not in range(len(GraVAC().thetas))
    assert GraVAC().figures({}) == {}
    for text in (
        "gravac(theta_min=0.5)",
        "gravac(theta_min=100,theta_max=10)",
        "gravac(compressor=randomk,values=fp16)",
        "gravac(compressor=randomk,indices=delta)",
        "gravac(window=0)",
        "gravac(step=1)",
    ):
        with pytest.raises(ConfigError):
            parse_compression(text)
