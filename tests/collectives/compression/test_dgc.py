"""Deep gradient compression: its books, its parts one by one, and its schedules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dblp.collectives.budget import BudgetController, Budgets
from dblp.collectives.compression.dgc import DGC
from dblp.collectives.compression.memory import Memory
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.compression.rounds import Compression
from dblp.collectives.compression.warmup import ratio_in
from dblp.collectives.phases import NormChange
from dblp.errors import ConfigError
from tests.collectives.compression.cases import bucket, job
from tests.collectives.worlds import run_memory

SHAPES: list[tuple[int, ...]] = [(20, 30), (20,), (7, 5, 3), ()]


def _sparse_mask(parts):
    return np.concatenate([np.full(part.size, len(part.shape) > 1) for part in parts.parts])


def _integers(seed, size):
    return np.random.default_rng([seed, size]).integers(-8, 9, size).astype(np.float32)


class _Plain:
    """The paper's formulas, element by element; what is sent is taken from the method under test."""

    def __init__(self, size, method):
        self.u, self.v, self.method = np.zeros(size), np.zeros(size), method

    def add(self, gradient):
        momentum = self.method.momentum
        for i, new in enumerate(gradient.tolist()):
            if self.method.nesterov:
                self.u[i] = momentum * (self.u[i] + new)
                self.v[i] = self.v[i] + self.u[i] + new
            else:
                self.u[i] = momentum * self.u[i] + new
                self.v[i] = self.v[i] + self.u[i]

    def sent(self, own):
        self.v[own != 0] = 0
        if self.method.masking:
            self.u[own != 0] = 0


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("momentum", [0.5, 0.0])
def test_momentum_correction_and_masking_are_the_papers(nesterov, masking, momentum):
    """With m = 1/2 and small integers all sums are exact."""
    parts, method = bucket(SHAPES), DGC(ratio=0.05, momentum=momentum, nesterov=nesterov, masking=masking)
    sparse, plain, memory = _sparse_mask(parts), _Plain(parts.size, method), Memory(parts.size)
    for number in range(6):
        gradient = _integers(number, parts.size)
        work = job(parts, gradient, "float32", memory, number=number)
        method.begin(work, gradient)
        plain.add(np.where(sparse, gradient, 0))
        np.testing.assert_array_equal(work.values, np.where(sparse, plain.v, gradient))
        own = method.own_part(work, method.compress(work))
        assert 0 < np.count_nonzero(own[sparse]) <= 30 + 6
        np.testing.assert_array_equal(own[~sparse], gradient[~sparse])
        plain.sent(own * sparse)
        np.testing.assert_array_equal(work.values, plain.v)
        if momentum:
            assert memory.velocity is not None
            np.testing.assert_array_equal(memory.velocity, plain.u)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sending_all_is_sgd_with_momentum(nesterov):
    """Ratio 1 without masking: each average is the step that torch's SGD takes; dense parameters take it at any ratio."""
    parts, steps = bucket(SHAPES), 4
    gradients = [[_integers(10 * rank + step, parts.size) for step in range(steps)] for rank in range(3)]
    for text in (
        f"dgc(1,momentum=0.5,masking=false,nesterov={nesterov})",
        f"dgc(0.01,momentum=0.5,nesterov={nesterov})",
    ):
        compression_of = parse_compression(text)

        async def member(group, method=compression_of):
            compression, averages = Compression(method), []
            for step in range(steps):
                array = gradients[group.rank][step].copy()
                await compression.all_reduce(group, array, parts, timeout_s=10.0, iteration=step)
                averages.append(array)
            return averages

        results = run_memory(member, 3)
        velocity, mask = np.zeros(parts.size), _sparse_mask(parts)
        for step in range(steps):
            mean = np.mean([gradients[rank][step] for rank in range(3)], axis=0)
            velocity = 0.5 * velocity + mean
            wanted = mean + 0.5 * velocity if nesterov else velocity
            shown = slice(None) if compression_of.masking is False else ~mask  # type: ignore[attr-defined]
            for result in results:
                np.testing.assert_allclose(result[step][shown], wanted[shown], rtol=1e-5, atol=1e-5)
                np.testing.assert_array_equal(result[step], results[0][step])


@pytest.mark.parametrize(("text", "limit"), [("clip=2", 2 / 4**0.5), ("clip=2,clip_scaled=false", 2.0)])
def test_clipping_is_of_parameters_that_are_sent_as_they_are_too(text, limit):
    parts, method = bucket([(10,), (3, 3), (4,)]), parse_compression(f"dgc(0.01,{text})")
    gradient = np.concatenate([np.full(10, 3.0), np.full(9, 0.1), np.full(4, 0.1)]).astype(np.float32)
    work = job(parts, gradient, "float32", world_size=4)
    method.begin(work, gradient)
    method.compress(work)
    large, small = work.notes["dense"][:10], work.notes["dense"][10:]
    np.testing.assert_allclose(large, limit / 10**0.5, rtol=1e-5)
    np.testing.assert_array_equal(small, gradient[19:])
    assert (gradient[:10] == 3.0).all(), "the gradient itself is left alone"


def test_with_fp16_values_dense_parameters_go_in_fp16_and_what_that_takes_away_waits():
    """Every gradient comes through in the end, also beyond 65504, where float16 ends."""
    parts, method = bucket([(3,)]), parse_compression("dgc(0.01,momentum=0,values=fp16)")
    gradients = np.array([[0.1, 70_000.0, 1e-9], [0.1, 1.0, 1e-9], [0.1, -0.5, 1e-9]], np.float32)
    memory, came = Memory(parts.size), np.zeros(parts.size, np.float32)
    for number, gradient in enumerate(gradients):
        work = job(parts, gradient, "float32", memory, number=number)
        method.begin(work, gradient)
        before = work.values.copy()
        own = method.own_part(work, method.compress(work))
        assert work.notes["dense"].dtype == np.float16 and work.notes["dense"].nbytes == 6
        np.testing.assert_array_equal(own + work.values, before)
        came += own
        if not number:
            np.testing.assert_array_equal(own, np.array([0.1, 65504.0, 0.0], np.float16))
            np.testing.assert_array_equal(work.values, gradient - own)
    assert memory.residual is not None
    np.testing.assert_array_equal(came + memory.residual, gradients.sum(axis=0))
    assert came[1] == 70_000.5 and memory.residual[1] == 0 and memory.residual[2] == gradients[:, 2].sum()


@pytest.mark.parametrize("values", ["full", "fp16"])
def test_dense_parameters_take_their_own_bytes(values):
    """Of 1,000 elements, beside one entry; in float16 half as many."""

    async def member(group):
        compression = Compression(parse_compression(f"dgc(0.01,values={values})"))
        array = _integers(group.rank, 1100)
        await compression.all_reduce(group, array, bucket([(10, 10), (1000,)]), timeout_s=10.0)
        return compression.totals.payload_bytes

    width = 4 if values == "full" else 2
    assert run_memory(member, 2) == [1000 * width + 24 + 4 + width] * 2


@pytest.mark.parametrize("values", ["full", "fp16"])
def test_velocities_of_dense_parameters_outlive_a_spoiled_round(values):
    """They are the same on all ranks: those of the rank whose gradient was not finite, too."""
    parts = bucket([(4, 5), (6,)])

    async def member(group):
        compression, averages = Compression(parse_compression(f"dgc(0.1,values={values})")), []
        for step in range(4):
            array = _integers(10 * group.rank + step, parts.size)
            if (group.rank, step) == (1, 2):
                array[22] = np.inf
            await compression.all_reduce(group, array, parts, timeout_s=10.0, iteration=step)
            averages.append(array)
        velocity = compression._memories.of(parts.layout).velocity
        assert velocity is not None
        return averages, velocity[20:]

    results = run_memory(member, 3)
    assert np.isnan(results[0][0][2]).all() and np.isfinite(results[0][0][3]).all()
    assert results[0][1].all()
    for averages, velocity in results:
        np.testing.assert_array_equal(averages, results[0][0])
        np.testing.assert_array_equal(velocity, results[0][1])


@pytest.mark.parametrize(("text", "limit"), [("clip=2", 2 / 4**0.5), ("clip=2,clip_scaled=false", 2.0)])
def test_clipping_comes_before_the_sum(text, limit):
    parts, method = bucket([(10, 10), (3, 3)]), parse_compression(f"dgc(0.01,{text})")
    gradient = np.concatenate([np.full(100, 3.0), np.full(9, 0.1)]).astype(np.float32)
    work = job(parts, gradient, "float32", world_size=4)
    method.begin(work, gradient)
    first, second = parts.cut(work.values)
    assert np.linalg.norm(first) == pytest.approx(limit, rel=1e-5)
    np.testing.assert_array_equal(second, gradient[100:], "a parameter within the limit is left alone")
    np.testing.assert_array_equal(gradient[:100], np.full(100, 3.0), "the gradient itself too")


def test_the_largest_of_each_parameter_or_of_the_whole_bucket():
    """With ``scope=bucket`` a parameter whose values are small sends nothing, and what waits of dense ones is no candidate."""
    parts = bucket([(10, 20), (6,), (10, 30)])
    gradient = _integers(1, parts.size)
    gradient[:200] *= 100.0
    gradient[200:206] = 1e6  # beyond float16: most of it waits
    found = {}
    for scope in ("parameter", "bucket"):
        method = parse_compression(f"dgc(0.01,momentum=0,values=fp16,scope={scope})")
        work = job(parts, gradient, "float32")
        method.begin(work, gradient)
        own = method.own_part(work, method.compress(work))
        np.testing.assert_array_equal(own[200:206], 65504)
        np.testing.assert_array_equal(own + work.values, gradient)
        own[200:206] = 0
        found[scope] = np.flatnonzero(own)
    of_each, of_all = found["parameter"], found["bucket"]
    assert [np.count_nonzero(of_each < 200), np.count_nonzero(of_each >= 206)] == [2, 3]
    assert of_all.size == 5 and of_all.max() < 200
    assert np.abs(gradient[of_all]).min() >= np.sort(np.abs(gradient[:200]))[-5]


def test_schedules():
    paper = [ratio_in(epoch, 0.001, 4, "paper") for epoch in range(6)]
    assert paper == [0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001]
    assert [ratio_in(epoch, 0.05, 4, "paper") for epoch in range(5)] == [0.25, 0.0625, 0.05, 0.05, 0.05]
    assert [ratio_in(epoch, 0.001, 8, "paper") for epoch in (0, 1, 2, 7)] == [0.25, 0.25, 0.0625, 0.004]
    released = [ratio_in(epoch, 0.001, 5, "geometric") for epoch in range(6)]
    np.testing.assert_allclose(released, [0.3162, 0.1, 0.03162, 0.01, 0.003162, 0.001], rtol=1e-3)
    assert ratio_in(1, 0.001, 2, (0.5, 0.25)) == 0.25
    assert ratio_in(0, 0.001, 0, "paper") == 0.001


@pytest.mark.parametrize(("steps", "epochs"), [("epoch_steps=2", []), ("epoch_steps=0", [0, None, 5])])
def test_the_warm_up_is_followed(steps, epochs):
    """By counting iterations, or as told; what is sent in the payload shrinks with it."""
    parts = bucket([(100, 100)])

    async def member(group):
        compression = Compression(parse_compression(f"dgc(0.001,warmup=2,schedule=0.5/0.1,{steps})"))
        sizes = []
        for iteration in range(6):
            if epochs and iteration % 2 == 0:
                compression.epoch(epochs[iteration // 2])
            before = compression.totals.payload_bytes
            array = _integers(iteration, parts.size)
            await compression.all_reduce(group, array, parts, timeout_s=10.0, iteration=iteration)
            sizes.append((compression.totals.payload_bytes - before - 24) // 8)
        return sizes

    for sizes in run_memory(member, 2):
        assert sizes == [5000, 5000, 1000, 1000, 10, 10]


@pytest.mark.parametrize(
    ("method", "epochs", "warned"),
    [
        ("dgc(0.1,warmup=2)", [], True),
        ("dgc(0.1,warmup=2)", [0], False),
        ("dgc(0.1,warmup=2,epoch_steps=2)", [], False),
        ("dgc(0.1)", [], False),
        ("topk(0.1)", [], False),
    ],
)
def test_a_warm_up_that_no_epoch_moves_is_warned_of_once(method, epochs, warned, caplog):
    parts = bucket([(10, 10)])

    async def member(group):
        compression = Compression(parse_compression(method))
        for epoch in epochs:
            compression.epoch(epoch)
        for iteration in range(3):
            await compression.all_reduce(
                group, _integers(iteration, parts.size), parts, timeout_s=10.0, iteration=iteration
            )

    run_memory(member, 1)
    assert [record.message.count("no epoch was told") for record in caplog.records] == [1] * warned


@pytest.mark.parametrize("number", [1.5, float("nan"), -1, "x", True])
def test_what_is_no_epoch_is_refused(number: Any):
    two: Any = np.int64(2)
    for told in (Compression(DGC()), BudgetController(NormChange(), Budgets(low=0.1, high=0.2))):
        with pytest.raises(ConfigError, match=r"epoch\(.*\): a whole number from 0 on"):
            told.epoch(number)
        told.epoch(two)


def test_values_that_make_no_method():
    for text, words in [
        ("dgc(ratio=0)", "share in"),
        ("dgc(momentum=1)", "factor in"),
        ("dgc(warmup=2,schedule=0.5)", "one share for each epoch"),
        ("dgc(schedule=0.5/2)", "shares in"),
    ]:
        with pytest.raises(ConfigError, match=words):
            parse_compression(text)
    with pytest.raises(ConfigError, match="epochs only go on"):
        compression = Compression(DGC())
        compression.epoch(3)
        compression.epoch(2)
