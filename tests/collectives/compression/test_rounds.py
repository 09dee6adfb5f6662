"""Compressed rounds between ranks, in virtual time: replicas, orders, states, disagreements."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest

from dblp.collectives.carry import CarryStore
from dblp.collectives.compression.base import Bucket
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.compression.rounds import Compression
from dblp.collectives.reduction import DTYPES
from dblp.errors import ConfigError, DblpError, DeadlineError, MismatchError, PeerError, UnsupportedError
from dblp.transport.policy import Carry, CarryBound
from tests.collectives import worlds
from tests.collectives.compression.cases import SHAPES, TEXTS, bucket, compression_of, gradient, wide

PARTS = bucket(SHAPES[0])
LOSSY_NETWORK = "loss(0.02)"


def _everywhere(results):
    for result in results[1:]:
        for mine, theirs in zip(results[0], result, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    return results[0]


def _steps(text, dtype="float32", *, steps=3, parts=PARTS, spoil=None, seed=0):
    """A member that averages ``steps`` gradients; returns the averages."""

    async def member(group):
        compression, averages = compression_of(text, seed=seed), []
        for step in range(steps):
            array = gradient(parts.size, dtype, seed=100 * group.rank + step)
            if spoil == (group.rank, step):
                array[0] = 0x7FC0 if dtype == "bfloat16" else np.nan
            report = await compression.all_reduce(
                group, array, parts, timeout_s=20.0, iteration=step, dtype=dtype
            )
            assert report.algorithm == compression.method.name and report.nbytes == array.nbytes
            assert str(compression.method) in report.reason and report.duration_s >= 0
            averages.append(array)
        assert compression.totals.rounds == steps
        assert compression.totals.dense_bytes == steps * parts.size * array.itemsize
        assert compression.totals.wire_bytes > 0 or parts.size == 0 or group.world_size == 1
        return averages

    return member


def test_ranks_in_different_epochs_of_a_warm_up_are_told_so():
    parts = bucket([(100, 100)])

    async def member(group):
        compression = Compression(parse_compression("dgc(0.001,warmup=4)"))
        for epoch in range(1 + group.rank):
            compression.epoch(epoch)
        with pytest.raises(MismatchError) as caught:
            await compression.all_reduce(group, gradient(parts.size, "float32"), parts, timeout_s=5.0)
        return str(caught.value)

    for rank, text in enumerate(worlds.run_network(member, 2)):
        assert (
            f"dgc is in epoch {rank} of its warm-up" in text
            or f"dgc is in epoch {1 - rank} of its warm-up" in text
        )
        assert "attachment.epoch(number) must tell all ranks the same" in text


@pytest.mark.parametrize("size", [7, 2**40])
def test_a_payload_of_another_length_is_refused_before_memory_is_taken(size):
    parts = bucket([(10, 10)])

    async def member(group):
        compression = Compression(parse_compression("topk(0.1,indices=delta)"))
        if group.rank == 0:
            with contextlib.suppress(PeerError):  # that the other has refused it
                await group.all_gather(np.empty(2, np.int64), np.array([size]), timeout_s=5.0)
            return None
        with pytest.raises(MismatchError, match=f"rank 0 announces {size} bytes") as caught:
            await compression.all_reduce(group, gradient(parts.size, "float32"), parts, timeout_s=5.0)
        return caught.value.ranks

    assert worlds.run_memory(member, 2)[1] == (0,)


@pytest.mark.parametrize("text", TEXTS)
def test_replicas_are_identical(text):
    """On a network that loses: three ranks, all elements finite."""
    averages = _everywhere(worlds.run_network(_steps(text), 3, impair=LOSSY_NETWORK))
    assert all(np.isfinite(average).all() for average in averages)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("text", TEXTS)
def test_other_types(text, dtype):
    averages = _everywhere(worlds.run_memory(_steps(text, dtype), 2))
    assert all(np.isfinite(wide(average, dtype)).all() for average in averages)


@pytest.mark.parametrize("text", TEXTS)
def test_one_rank_and_buckets_of_one_element_or_none(text):
    for shapes in (SHAPES[1:5], SHAPES[:1]):
        for shape in shapes:
            for ranks in (1, 2):
                averages = _everywhere(worlds.run_memory(_steps(text, parts=bucket(shape)), ranks))
                assert all(np.isfinite(average).all() for average in averages)


@pytest.mark.parametrize("text", [text for text in TEXTS if text != "none"])
def test_a_rank_whose_values_are_not_finite_is_heard_by_all(text):
    first, second, third = _everywhere(worlds.run_memory(_steps(text, spoil=(1, 1)), 3))
    assert np.isfinite(first).all() and np.isnan(second).all() and np.isfinite(third).all()


@pytest.mark.parametrize(
    ("text", "apart"),
    [
        ("fp16", 0.01),
        ("int8(exchange=gather)", 0.01),
        ("powersgd(8,min_rate=1)", 0.05),
        ("sign", 0.3),
        ("topk(0.5)", 0.01),
    ],
)
def test_errors_are_fed_back(text, apart):
    """The same gradient over and over: the mean of the averages comes close to it, as the residual is bounded."""
    parts, wanted = bucket([(30, 20)]), gradient(600, "float32", spread=1.0)

    async def member(group):
        compression, total = Compression(parse_compression(text)), np.zeros(600)
        for _ in range(60):
            array = wanted.copy()
            await compression.all_reduce(group, array, parts, timeout_s=20.0)
            total += array
        return total / 60

    for mean in worlds.run_memory(member, 2):
        assert np.linalg.norm(mean - wanted) < apart * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("text", "ranks", "error"), [("int8", 2, 0.01), ("int8", 4, 0.025), ("int4(exchange=gather)", 3, 0.1)]
)
def test_stochastic_rounding_is_unbiased(text, ranks, error):
    """QSGD without feedback: the mean over many rounds is the gradient, each round within a step of it."""
    parts, text = (
        bucket([(500,)]),
        text.replace(")", ",feedback=false)") if "(" in text else f"{text}(feedback=false)",
    )
    wanted = np.random.default_rng(3).uniform(-1, 1, 500).astype(np.float32)

    async def member(group):
        compression, averages = Compression(parse_compression(text)), []
        for _ in range(40):
            array = wanted.copy()
            await compression.all_reduce(group, array, parts, timeout_s=20.0)
            averages.append(array)
        return averages

    averages = np.array(_everywhere(worlds.run_memory(member, ranks)))
    assert np.abs(averages - wanted).max() <= 1.001 * error * (1 + 7 * (ranks == 3)) + 0.02
    assert np.abs(averages.mean(axis=0) - wanted).max() < 6 * error / np.sqrt(40 * ranks)


def test_buckets_overlap_in_one_order():
    """Many buckets of methods with several rounds are under way at once, and are posted alike on all ranks."""
    sizes = [(40, 30), (7,), (100, 20), (0,), (64, 64)]

    async def member(group):
        results = []
        for text in ("powersgd(1)", "int8", "threshold(1)", "dgc(0.01,indices=delta)"):
            compression = Compression(parse_compression(text), offload=_later(group.rank))
            arrays = [gradient(int(np.prod(shape)), "float32", seed=group.rank) for shape in sizes]
            parts = [bucket([shape]) for shape in sizes]
            for index, part in enumerate(parts):
                part.layout = tuple((f"{name}{index}", size) for name, size in part.layout)
            await asyncio.gather(
                *(
                    compression.all_reduce(group, array, part, timeout_s=30.0)
                    for array, part in zip(arrays, parts, strict=True)
                )
            )
            results += arrays
        return results

    _everywhere(worlds.run_network(member, 3))


def _later(rank):
    """Steps that take a while, another one on each rank."""

    async def offload(step):
        await asyncio.sleep(0.001 * (rank + 1))
        return step()

    return offload


@pytest.mark.parametrize("text", [text for text in TEXTS if "feedback=false" not in text and text != "none"])
def test_state_goes_through_a_checkpoint_and_new_buckets(text):
    """A run that is saved, loaded and cut into other buckets goes on as the one that was not, where methods look at elements or
    parameters by themselves."""
    whole = bucket(SHAPES[0])
    cut = [Bucket(whole.parts[:2]), Bucket(whole.parts[2:])]

    async def member(group):
        first, second = compression_of(text), Compression(parse_compression(text))
        for step in range(3):
            array = gradient(whole.size, "float32", seed=group.rank + 10 * step)
            await first.all_reduce(group, array, whole, timeout_s=20.0, iteration=step)
        second.load_state_dict(first.state_dict())
        same, moved = (gradient(whole.size, "float32", seed=77 + group.rank) for _ in range(2))
        before = _held(second, whole)
        parts = [second._memories.of(part.layout) for part in cut]
        for name in ("residual", "velocity"):
            pieces = [getattr(part, name) for part in parts]
            if getattr(before, name) is not None:
                joined = [np.zeros(p.size) if x is None else x for p, x in zip(cut, pieces, strict=True)]
                np.testing.assert_array_equal(np.concatenate(joined), getattr(before, name))
        second.load_state_dict(first.state_dict())
        await first.all_reduce(group, same, whole, timeout_s=20.0, iteration=3)
        await second.all_reduce(group, moved, whole, timeout_s=20.0, iteration=3)
        np.testing.assert_array_equal(same, moved)
        return [moved]

    _everywhere(worlds.run_memory(member, 2))


def _held(compression, parts):
    """A copy of the memory of a bucket."""
    copy = Compression(compression.method)
    copy.load_state_dict(compression.state_dict())
    return copy._memories.of(parts.layout)


def test_types_may_change():
    """What is withheld in float32 goes on in float64."""

    async def member(group):
        compression = Compression(parse_compression("topk(0.1)"))
        total = np.zeros(PARTS.size)
        delivered = total.copy()
        for step, dtype in enumerate(["float32", "float64", "float32"]):
            array = np.random.default_rng([group.rank, step]).integers(-8, 9, PARTS.size).astype(dtype)
            total += array
            await compression.all_reduce(group, array, PARTS, timeout_s=20.0)
            delivered += array
        return total, delivered, compression._memories.of(PARTS.layout).residual

    results = worlds.run_memory(member, 2)
    withheld = sum(result[2] for result in results)
    np.testing.assert_array_equal(sum(result[0] for result in results), 2 * results[0][1] + withheld)


def test_a_carry_becomes_a_residual():
    """The states of both have one form: what a lossy run carries is not lost when it is resumed with compression."""
    store = CarryStore()
    residual = store.residual(PARTS.layout)
    residual.check(PARTS.size, DTYPES["float32"])
    array = np.ones(PARTS.size, np.float32)
    residual.begin(array, DTYPES["float32"], Carry(bound=CarryBound.NONE))
    residual.keep(0, array)
    residual.settle()
    compression = Compression(parse_compression("topk(0.1)"))
    state = compression.state_dict()
    compression.load_state_dict({**state, "memory": store.state_dict()})
    np.testing.assert_array_equal(compression._memories.of(PARTS.layout).residual, 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("topk(0.1)", "topk(0.2)"),
        ("topk(0.1)", "fp16"),
        ("threshold(1)", "sign"),
        ("int8", "int4"),
        ("dgc(0.1)", "none"),
    ],
)
def test_ranks_that_disagree_get_an_error(first, second):
    async def member(group):
        compression = Compression(parse_compression((first, second)[group.rank]))
        array = gradient(PARTS.size, "float32")
        with pytest.raises(DblpError) as caught:
            await compression.all_reduce(group, array, PARTS, timeout_s=5.0)
        return type(caught.value)

    assert MismatchError in worlds.run_memory(member, 2)


def test_a_rank_that_does_not_come_is_named():
    async def member(group):
        if group.rank == 2:
            await asyncio.sleep(30)
            return ("", ())
        compression = Compression(parse_compression("dgc(0.01,indices=delta)"))
        with pytest.raises(DblpError) as caught:
            await compression.all_reduce(group, gradient(PARTS.size, "float32"), PARTS, timeout_s=2.0)
        assert not compression._memories.of(PARTS.layout).busy
        return type(caught.value), getattr(caught.value, "ranks", ())

    errors = worlds.run_memory(member, 3)[:2]
    assert (DeadlineError, (2,)) in errors


def test_a_payload_that_makes_no_sense_ends_the_group_on_all_ranks():
    """One rank finds the fault; the other, which found none, learns of it long before its deadline."""
    parts = bucket([(100, 10)])

    async def member(group):
        compression = Compression(parse_compression("topk(0.01)"))
        array = gradient(parts.size, "float32")
        garbage = np.full(8 + 16 + 10 * 8, 255, np.uint8)
        garbage[0] = 0
        started = asyncio.get_running_loop().time()
        with pytest.raises(DblpError) as caught:
            if group.rank == 0:
                await group.all_gather([np.empty_like(garbage) for _ in range(2)], garbage, timeout_s=50.0)
            await compression.all_reduce(group, array, parts, timeout_s=50.0)
        assert asyncio.get_running_loop().time() - started < 5.0
        return type(caught.value).__name__, str(caught.value)

    (kind, told), (other, found) = worlds.run_memory(member, 2)
    assert other == "MismatchError" and "rank 0 sent what is no sparse gradient" in found
    assert kind in ("PeerError", "MismatchError") and "no sparse gradient" in told


def test_arguments_that_do_not_fit():
    async def member(group):
        compression = Compression(parse_compression("topk(0.1)"))
        for array, error, words in [
            (np.zeros(PARTS.size, np.int32), UnsupportedError, "int32"),
            (np.zeros(PARTS.size, np.complex64), UnsupportedError, "complex64"),
            (np.zeros(3, np.float32), ConfigError, "flat and contiguous"),
            (np.zeros(2 * PARTS.size, np.float32)[::2], ConfigError, "flat and contiguous"),
        ]:
            with pytest.raises(error, match=words):
                await compression.all_reduce(group, array, PARTS, timeout_s=5.0)
        with pytest.raises(ConfigError, match="don't fit a lane"):
            eight = Compression(parse_compression("int4(exchange=sum)"))
            await eight.all_reduce(_Many(group), _zeros(), PARTS, timeout_s=5.0)  # type: ignore[arg-type]

    worlds.run_memory(member, 1)


class _Many:
    """A group that says it has eight ranks."""

    def __init__(self, group):
        self._group = group
        self.rank, self.world_size = 0, 8


def test_states_that_are_none_are_refused_and_change_nothing():
    compression = Compression(parse_compression("topk(0.1)"))
    good = compression.state_dict()
    for broken, words in [
        ({}, "no state of a compression"),
        ({**good, "version": 99}, "version 99"),
        ({**good, "method": "dgc(ratio=0.1)"}, "the state is of 'dgc'"),
        ({**good, "memory": {}}, "no state of a MemoryStore"),
        ({**good, "totals": {"x": 1}}, "no state of a compression"),
        ({**good, "factors": None}, "no state of a compression"),
    ]:
        with pytest.raises(ConfigError, match=words):
            compression.load_state_dict(broken)
    assert compression.state_dict() == good


def _zeros():
    return np.zeros(PARTS.size, np.float32)
