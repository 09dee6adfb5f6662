"""The reducing collectives as a matrix: collective x dtype x operation x world size x order of arrival."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import tracemalloc
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.collectives.reduction import DTYPES, Op, narrow_bfloat16, widen_bfloat16
from dblp.errors import ConfigError, UnsupportedError
from dblp.transport.config import TransportConfig
from dblp.transport.policy import Bounded, Fill, Policy
from tests.collectives.worlds import run_memory, run_network, total, values

WORLD_SIZES = [1, 2, 3, 4, 5, 8]
ALGORITHMS = ["auto", "direct", "ring", "flat", "halving_doubling", "hierarchical", "ps"]
FUNCTIONS = {
    Op.SUM: np.add,
    Op.AVG: np.add,
    Op.PRODUCT: np.multiply,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.BAND: np.bitwise_and,
    Op.BOR: np.bitwise_or,
    Op.BXOR: np.bitwise_xor,
}


def expected(parts, op, name):
    """numpy's reduction of all ranks' small integers: exact in each type, so the order does not matter."""
    if name == "bfloat16":
        wide = functools.reduce(FUNCTIONS[op], [widen_bfloat16(part) for part in parts])
        return narrow_bfloat16(wide / np.float32(len(parts)) if op is Op.AVG else wide)
    reduced = functools.reduce(FUNCTIONS[op], parts)
    if op is not Op.AVG:
        return reduced
    if name == "float16":
        return (reduced.astype(np.float32) / np.float32(len(parts))).astype(np.float16)
    real = reduced.view(reduced.real.dtype)
    return (real / real.dtype.type(len(parts))).view(reduced.dtype)


def operations(name):
    kind = DTYPES[name].kind
    if kind == "f":
        return [Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX]
    if kind == "c":
        return [Op.SUM, Op.AVG, Op.PRODUCT]
    return [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR]


def all_reduces(count, name, ops, **options):
    """A member that reduces one array for each operation, all rounds in flight at once."""

    async def member(group):
        arrays = [values(group.rank, count, name) for _ in ops]
        named = {"dtype": name} if name == "bfloat16" else {}
        tasks = [group.all_reduce(a, op, **named, **options) for a, op in zip(arrays, ops, strict=True)]
        reports = await asyncio.gather(*tasks)
        return arrays, reports

    return member


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", DTYPES)
def test_every_type_and_operation(name, world_size):
    ops = operations(name)
    results = run_memory(all_reduces(231, name, ops, algorithm="direct"), world_size, seed=world_size)
    parts = [values(rank, 231, name) for rank in range(world_size)]
    for arrays, reports in results:
        for number, (array, op, report) in enumerate(zip(arrays, ops, reports, strict=True)):
            assert array.tobytes() == expected(parts, op, name).tobytes(), (op, name)
            assert (report.round, report.collective, report.algorithm) == (number, "all_reduce", "direct")
            assert report.missing_share == 0.0 == report.energy_lost and report.world_size == world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_and_size(run, algorithm, world_size):
    """Sizes around the borders: nothing, fewer elements than ranks, one chunk, ragged ends, many segments."""
    counts = [0, 1, world_size - 1, 16, 17, 352, 353, 2 * 352 * world_size + 3]

    async def member(group):
        arrays = [values(group.rank, count, "float32") for count in counts]
        await asyncio.gather(*(group.all_reduce(array, algorithm=algorithm) for array in arrays))
        return arrays

    for arrays in run(member, world_size, seed=world_size):
        for array, count in zip(arrays, counts, strict=True):
            wanted = total(values(rank, count, "float32") for rank in range(world_size))
            assert array.tobytes() == wanted.tobytes(), (algorithm, count)


@pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_same_bits_on_all_ranks_and_in_every_order_of_arrival(algorithm, world_size):
    """Sums of random floats depend on their order: equal bits mean that the order is fixed."""

    async def member(group):
        array = np.random.default_rng(group.rank).standard_normal(3000).astype(np.float32)
        await group.all_reduce(array, algorithm=algorithm)
        return array.tobytes()

    results = {bits for seed in range(4) for bits in run_memory(member, world_size, seed=seed)}
    assert len(results) == 1


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_nan_is_nan_on_all_ranks(algorithm, name):
    """In MIN and MAX too, whichever rank has it: gloo's ranks may end with different values there."""
    storage = DTYPES[name].storage

    async def member(group):
        results = []
        for op in ("min", "max", "sum", "avg"):
            wide = np.full(2000, group.rank, np.float32)
            wide[group.rank :: 7] = np.nan
            array = narrow_bfloat16(wide) if name == "bfloat16" else wide.astype(storage)
            await group.all_reduce(array, op, algorithm=algorithm, dtype=name)
            results.append(np.isnan(widen_bfloat16(array) if name == "bfloat16" else array))
        return results

    wanted = np.arange(2000) % 7 < 3
    for results in run_memory(member, 3):
        assert all((found == wanted).all() for found in results)


def test_direct_and_flat_sum_in_rank_order():
    parts = [np.random.default_rng(rank).standard_normal(3000).astype(np.float32) for rank in range(5)]
    wanted = ((((parts[0] + parts[1]) + parts[2]) + parts[3]) + parts[4]) / np.float32(5)

    async def member(group):
        arrays = [parts[group.rank].copy() for _ in range(2)]
        for array, algorithm in zip(arrays, ("direct", "flat"), strict=True):
            await group.all_reduce(array, "avg", algorithm=algorithm)
        return arrays

    for arrays in run_memory(member, 5):
        assert all(array.tobytes() == wanted.tobytes() for array in arrays)


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_bounded_without_loss_gives_the_bits_of_exact(run, name, world_size):
    """C5: the grids differ (small bounded messages have finer chunks), the bits do not."""
    named = {"dtype": "bfloat16"} if name == "bfloat16" else {}

    async def member(group):
        plain = np.random.default_rng(group.rank).standard_normal(9000)
        exact = narrow_bfloat16(plain.astype(np.float32)) if name == "bfloat16" else plain.astype(name)
        bounded = exact.copy()
        await group.all_reduce(exact, "avg", algorithm="direct", **named)
        report = await group.all_reduce(bounded, "avg", policy=Bounded(0.2), **named)
        assert (report.missing_share, report.energy_lost, report.budget) == (0.0, 0.0, 0.2)
        assert report.bounded_chunks > 0
        return exact.tobytes(), bounded.tobytes()

    pairs = run(member, world_size)
    assert len({bits for pair in pairs for bits in pair}) == 1


def test_what_comes_early_never_overwrites_a_small_window():
    """A peer may send ``early_bytes`` before it hears of the window: the rows are there."""

    async def member(group):
        array = np.random.default_rng(group.rank).integers(-8, 9, 3_000_000).astype(np.float32)
        if group.rank == 0:
            await asyncio.sleep(0.05)
        await group.all_reduce(array, algorithm="direct")
        return array

    parts = [np.random.default_rng(rank).integers(-8, 9, 3_000_000).astype(np.float32) for rank in range(3)]
    for array in run_network(member, 3, window_bytes=64 * 1024):
        np.testing.assert_array_equal(array, np.sum(parts, axis=0, dtype=np.float32))


def test_windowed_staging_keeps_memory_small():
    """16 MiB on 3 ranks with 256 KiB of window: the peak stays near the window, far from the 10 MiB of whole shards."""
    config = TransportConfig(window_bytes=256 * 1024, early_bytes=64 * 1024)
    count = 4 * 1024 * 1024
    measured = []

    async def member(group):
        array = np.full(count, float(group.rank + 1), np.float32)
        await group.barrier()
        if group.rank == 0:
            tracemalloc.start()
        task = group.all_reduce(array, algorithm="direct")
        if group.rank == 0:
            domain = tracemalloc.take_snapshot().filter_traces(
                [tracemalloc.Filter(True, "*/collectives/*"), tracemalloc.Filter(False, "*/tests/*")]
            )
            measured.append(sum(trace.size for trace in domain.traces))
            tracemalloc.stop()
        await task
        return (array == 6.0).all()

    assert all(run_memory(member, 3, chunk_bytes=16_384, config=config))
    assert 128 * 1024 <= measured[0] < 512 * 1024


@pytest.mark.parametrize("seed", range(5))
def test_a_tiny_window_moves_on(seed):
    """64 KiB for 7 peers is two segments each: the window must slide dozens of times, in any order of arrival."""
    config = TransportConfig(window_bytes=65_536)

    async def member(group):
        array = values(group.rank, 60_000, "float32", seed)
        await group.all_reduce(array, algorithm="direct")
        return array

    wanted = total(values(rank, 60_000, "float32", seed) for rank in range(4))
    for array in run_memory(member, 4, seed=seed, config=config):
        assert array.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_shapes_and_layouts(run, world_size):
    """0-d, transposed, strided, reversed and Fortran arrays; what lies between their elements stays."""

    async def member(group):
        base = np.arange(240, dtype=np.float64).reshape(12, 20)
        zero_d = np.array(float(group.rank))
        strided = base.copy()
        transposed = base.copy()
        reversed_ = base.copy()
        fortran = np.asfortranarray(base)
        views = [zero_d, strided[::2, 1::3], transposed.T, reversed_[::-1], fortran]
        await asyncio.gather(*(group.all_reduce(view) for view in views))
        return zero_d, strided, transposed, reversed_, fortran

    base = np.arange(240, dtype=np.float64).reshape(12, 20)
    for zero_d, strided, transposed, reversed_, fortran in run(member, world_size):
        assert zero_d == sum(range(world_size)) and zero_d.shape == ()
        hole = base.copy()
        hole[::2, 1::3] *= world_size
        assert (strided == hole).all()
        for array in (transposed, reversed_, fortran):
            assert (array == base * world_size).all()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_reduce(run, world_size, op):
    count = 2000

    async def member(group):
        arrays = [values(group.rank, count, "float32") for _ in range(world_size)]
        await asyncio.gather(*(group.reduce(array, root, op) for root, array in enumerate(arrays)))
        return arrays

    parts = [values(rank, count, "float32") for rank in range(world_size)]
    for rank, arrays in enumerate(run(member, world_size)):
        for root, array in enumerate(arrays):
            wanted = expected(parts, Op[op.upper()], "float32") if root == rank else parts[rank]
            assert (array == wanted).all()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("budget", [0.0, 0.1])
def test_reduce_scatter(run, world_size, budget):
    async def member(group):
        whole = values(group.rank, 700 * world_size, "float32")
        before = whole.copy()
        output = np.empty(700, np.float32)
        report = await group.reduce_scatter(output, whole, "avg", policy=Bounded(budget))
        assert (whole == before).all() and report.missing_share == 0.0
        aliased = whole.copy()
        part = aliased[group.rank * 700 : (group.rank + 1) * 700]
        wrong = whole.copy()
        await group.reduce_scatter(part, aliased)
        await group.reduce_scatter(wrong[:700], wrong)
        return output, part, wrong[:700]

    wanted = total(values(rank, 700 * world_size, "float32") for rank in range(world_size))
    for rank, (output, part, wrong) in enumerate(run(member, world_size)):
        own = wanted[rank * 700 : (rank + 1) * 700]
        assert (output == own / np.float32(world_size)).all()
        assert (part == own).all() and (wrong == own).all()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_uneven_reduce_scatter(run, world_size):
    sizes = [0, 5, 1000, 17][:world_size]

    async def member(group):
        parts = [values(group.rank, size, "int64") for size in sizes]
        output = np.empty(sizes[group.rank], np.int64)
        await group.reduce_scatter(output, parts)
        return output

    for rank, output in enumerate(run(member, world_size)):
        assert (output == total(values(peer, sizes[rank], "int64") for peer in range(world_size))).all()


@settings(max_examples=25, deadline=None)
@given(
    world_size=st.integers(2, 6),
    count=st.integers(0, 3000),
    algorithm=st.sampled_from(ALGORITHMS),
    name=st.sampled_from(["float16", "bfloat16", "float64", "uint8", "complex64"]),
    seed=st.integers(0, 10_000),
    chunk_bytes=st.sampled_from([16, 64, 512]),
)
def test_any_all_reduce_is_right(world_size, count, algorithm, name, seed, chunk_bytes):
    results = run_memory(
        all_reduces(count, name, [Op.SUM], algorithm=algorithm),
        world_size,
        seed=seed,
        chunk_bytes=chunk_bytes,
    )
    wanted = expected([values(rank, count, name) for rank in range(world_size)], Op.SUM, name)
    assert all(arrays[0].tobytes() == wanted.tobytes() for arrays, _ in results)


def test_auto_explains_its_choice():
    async def member(group):
        small, large = np.zeros(100, np.float32), np.zeros(300_000, np.float32)
        reports = [
            await group.all_reduce(small),
            await group.all_reduce(large),
            await group.all_reduce(small, policy=Bounded(0.1)),
            await group.all_reduce(large, algorithm="ring"),
        ]
        return [(report.algorithm, report.reason) for report in reports]

    chosen = run_memory(member, 2, chunk_bytes=1408)[0]
    assert [name for name, _ in chosen] == ["flat", "direct", "direct", "ring"]
    assert "1 MiB" in chosen[0][1] and "budget" in chosen[2][1] and "caller" in chosen[3][1]


def test_subgroups_have_their_own_ranks_and_rounds():
    """Ranks 3 and 1 (in this order) and all ranks at once, with rounds of both in flight."""
    from dblp.collectives.group import Group

    async def member(group):
        both = np.full(5000, float(group.rank), np.float32)
        everyone = np.full(5000, float(group.rank), np.float32)
        tasks = []
        if group.rank in (1, 3):
            sub = Group(group._endpoint, ranks=[3, 1], group_id=7)
            assert (sub.rank, sub.world_size, sub.ranks) == ({3: 0, 1: 1}[group.rank], 2, (3, 1))
            tasks.append(sub.all_reduce(both))
        tasks.append(group.all_reduce(everyone))
        await asyncio.gather(*tasks)
        return both, everyone

    for rank, (both, everyone) in enumerate(run_memory(member, 4)):
        assert (everyone == 6.0).all()
        assert (both == (4.0 if rank in (1, 3) else rank)).all()


LOSSY_RING = Policy(budget=0.1, algorithm="ring")
RESCALED = Policy(budget=0.1, fill=Fill.RESCALE)
BAD_CALLS = [
    (lambda g, a: g.all_reduce(a.astype(np.int32), policy=Bounded(0.1)), UnsupportedError, "SUM of int32"),
    (lambda g, a: g.all_reduce(a, "max", policy=Bounded(0.1)), UnsupportedError, "0.1 on MAX of float32"),
    (lambda g, a: g.all_reduce(a.astype(complex), policy=Bounded(0.1)), UnsupportedError, "complex128"),
    (lambda g, a: g.all_reduce(a, policy=Bounded(0.1), algorithm="flat"), UnsupportedError, "exact only"),
    (lambda g, a: g.all_reduce(a, algorithm="tree"), ConfigError, "'auto', 'direct', 'ring', 'flat'"),
    (lambda g, a: g.all_reduce(a, "mean"), ConfigError, "op='mean'"),
    (lambda g, a: g.all_reduce(a, "band"), UnsupportedError, "BAND on float32"),
    (lambda g, a: g.all_reduce(a.astype(np.int8), "avg"), UnsupportedError, "use SUM and divide"),
    (lambda g, a: g.all_reduce(a.tolist()), UnsupportedError, "array is a list"),
    (lambda g, a: g.all_reduce(np.broadcast_to(a, (2, 8))), UnsupportedError, "read-only"),
    (lambda g, a: g.all_reduce(a, timeout_s=0), ConfigError, "timeout_s=0"),
    (lambda g, a: g.reduce(a, 2), ConfigError, "root=2"),
    (lambda g, a: g.reduce_scatter(a, a[:6]), ConfigError, "8 elements on rank"),
    (lambda g, a: g.reduce_scatter(a[:4], a, policy=LOSSY_RING), UnsupportedError, "direct exchange"),
    (lambda g, a: g.reduce_scatter(a[:4], a, policy=RESCALED), UnsupportedError, "no second leg"),
    (lambda g, a: g.reduce_scatter(a[:4], a.astype(np.float64)), ConfigError, "must be equal"),
    (lambda g, a: g.reduce_scatter(a, a[:7]), ConfigError, "cannot share evenly"),
    (lambda g, a: g.all_gather([a], a), ConfigError, "one for each of the 2 ranks"),
    (lambda g, a: g.all_to_all(a, a, input_splits=[1, 2]), ConfigError, r"splits of input are \[1, 2\]"),
    (lambda g, a: g.gather(None, a, g.rank), ConfigError, "output is None"),
    (lambda g, a: g.send(a, g.rank), UnsupportedError, "another rank of the group"),
]


@pytest.mark.parametrize("number", range(len(BAD_CALLS)))
def test_refused_calls_cost_nothing(number):
    """The error comes from the call itself, and the group goes on."""
    call, kind, text = BAD_CALLS[number]

    async def member(group):
        array = np.ones(8, np.float32)
        with pytest.raises(kind, match=text):
            call(group, array)
        report = await group.all_reduce(array)
        assert report.round == 0
        return array

    assert all((array == 2.0).all() for array in run_memory(member, 2))


def test_reports_count_the_traffic(run):
    """Direct on 2 ranks: each sends half of the array, then the other half's result."""
    count = 352 * 40

    async def member(group):
        array = np.ones(count, np.float32)
        return await group.all_reduce(array, algorithm="direct")

    for report in run(member, 2):
        chunks = report.chunks_received
        assert report.nbytes == 4 * count and report.chunks_sent == chunks > 0
        assert report.bytes_sent == 4 * count + 48 * chunks and report.duration_s > 0
        assert str(report).startswith("round 0 all_reduce by direct: 55 KiB on 2 ranks in ")


def test_many_rounds_in_flight(run):
    async def member(group):
        arrays = [np.full(500, i + group.rank, np.int64) for i in range(30)]
        tasks = [group.all_reduce(array) for array in arrays]
        order = np.random.default_rng(group.rank).permutation(30)
        reports = {i: await tasks[i] for i in order}
        assert all(report.round == i for i, report in reports.items())
        return arrays

    for arrays, i in itertools.product(run(member, 3), range(30)):
        assert (arrays[i] == 3 * i + 3).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
@pytest.mark.parametrize("seed", range(4))
def test_exact_over_a_bad_network(algorithm, seed):
    """Real endpoints, losses, reordering and duplicates: every element right, the same bits, resends reported."""

    async def member(group):
        arrays = [values(group.rank, count, "float32") for count in (10, 4000, 90_000)]
        reports = await asyncio.gather(*(group.all_reduce(array, algorithm=algorithm) for array in arrays))
        assert all(report.missing_share == 0.0 for report in reports)
        return arrays, sum(report.chunks_resent for report in reports)

    results = run_network(member, 3, seed=seed, impair="loss(0.1),reorder(0.1,2ms),duplicate(0.05)")
    for arrays, _ in results:
        for array in arrays:
            assert (
                array.tobytes() == total(values(rank, array.size, "float32") for rank in range(3)).tobytes()
            )
    assert sum(resent for _, resent in results) > 0


@pytest.mark.parametrize("budget", [0.0, 0.2])
@pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
def test_arrays_are_let_go_without_the_garbage_collector(algorithm, budget):
    """Buckets are large and come every few milliseconds: nothing may keep them in a cycle."""

    async def member(group):
        array = np.zeros(150_000, np.float32)  # more than the window, in exact rounds
        alive = weakref.ref(array)
        chosen = "direct" if budget else algorithm
        report = await group.all_reduce(array, algorithm=chosen, policy=Bounded(budget))
        await asyncio.sleep(1.0)
        del array
        return alive() is None, report.missing_share

    gc.disable()
    try:
        assert run_network(member, 3, window_bytes=65_536) == [(True, 0.0)] * 3
    finally:
        gc.enable()
