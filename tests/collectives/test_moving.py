"""Collectives that move without reducing: every rank's bytes at their place, whatever the order of arrival."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dblp.collectives.algorithms.exchange import RELAY_BYTES
from tests.collectives.worlds import run_memory, values

WORLD_SIZES = [1, 2, 3, 5]
DTYPES = ["float16", "complex128", "uint8", "bool"]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 999])
def test_all_gather(run, world_size, dtype, count):
    """Into one array, and in place where the input is this rank's part of the output."""

    async def member(group):
        own = values(group.rank, count, dtype)
        output = np.zeros(count * world_size, dtype)
        report = await group.all_gather(output, own)
        assert report.collective == "all_gather" and report.nbytes == output.nbytes
        in_place = np.zeros((world_size, count), dtype)
        in_place[group.rank] = own
        await group.all_gather(in_place, in_place[group.rank])
        return output, in_place

    wanted = np.concatenate([values(rank, count, dtype) for rank in range(world_size)])
    for output, in_place in run(member, world_size):
        assert (output == wanted).all() and (in_place.reshape(-1) == wanted).all()


@pytest.mark.parametrize("world_size", [2, 4])
def test_uneven_all_gather_into_strided_arrays(run, world_size):
    sizes = [7, 0, 1500, 1][:world_size]

    async def member(group):
        frames = [np.zeros((size, 2)) for size in sizes]
        await group.all_gather(
            [frame[:, 1] for frame in frames], values(group.rank, sizes[group.rank], "float64")
        )
        return frames

    for frames in run(member, world_size):
        for rank, frame in enumerate(frames):
            assert (frame[:, 0] == 0).all() and (frame[:, 1] == values(rank, sizes[rank], "float64")).all()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("nbytes", [0, 1, RELAY_BYTES, RELAY_BYTES + 1, 3 * RELAY_BYTES + 77])
def test_broadcast(run, world_size, nbytes):
    """From the root at once, and above RELAY_BYTES by way of the receivers."""

    async def member(group):
        arrays = [values(group.rank, nbytes, "uint8") for _ in range(world_size)]
        await asyncio.gather(*(group.broadcast(array, root) for root, array in enumerate(arrays)))
        return arrays

    settings = {"chunk_bytes": 1408} if run is run_memory else {}
    for arrays in run(member, world_size, **settings):
        for root, array in enumerate(arrays):
            assert (array == values(root, nbytes, "uint8")).all()


def test_a_relayed_broadcast_leaves_its_root_once():
    count = 2 * RELAY_BYTES

    async def member(group):
        report = await group.broadcast(values(1, count, "uint8"), 1)
        return report.bytes_sent - 48 * report.chunks_sent

    payload = run_memory(member, 5, chunk_bytes=1024)
    assert payload[1] == count and sum(payload) == 4 * count


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("even", [True, False])
def test_gather_and_scatter(run, world_size, even):
    sizes = [600] * world_size if even else [5, 0, 1200, 33, 1][:world_size]
    root = world_size - 1

    async def member(group):
        own = values(group.rank, sizes[group.rank], "int32")
        parts = output = None
        if group.rank == root:
            parts = [np.zeros(size, np.int32) for size in sizes]
            output = np.zeros(sum(sizes), np.int32) if even else parts
        await group.gather(output, own, root)
        gathered = None
        if output is not None:
            gathered = output.copy() if even else np.concatenate(output)
        back = np.zeros_like(own)
        await group.scatter(back, output, root)
        return gathered, back

    results = run(member, world_size)
    wanted = np.concatenate([values(rank, sizes[rank], "int32") for rank in range(world_size)])
    assert (results[root][0] == wanted).all()
    for rank, (_, back) in enumerate(results):
        assert (back == values(rank, sizes[rank], "int32")).all()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_to_all(run, world_size):
    """Part j of rank i comes out as part i of rank j: one array, a list, and with the input overwritten."""

    async def member(group):
        whole = values(group.rank, 300 * world_size, "float32")
        output = np.zeros_like(whole)
        await group.all_to_all(output, whole)
        listed = [np.zeros(300, np.float32) for _ in range(world_size)]
        await group.all_to_all(listed, np.split(whole, world_size))
        await group.all_to_all(whole, whole)
        return output, np.concatenate(listed), whole

    everyone = [np.split(values(rank, 300 * world_size, "float32"), world_size) for rank in range(world_size)]
    for rank, outputs in enumerate(run(member, world_size)):
        wanted = np.concatenate([parts[rank] for parts in everyone])
        for output in outputs:
            assert (output == wanted).all()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_uneven_all_to_all(run, world_size):
    """Rank i sends i * j rows of 3 to rank j; some parts are empty."""

    async def member(group):
        splits = [group.rank * peer for peer in range(world_size)]
        rows = sum(splits)
        source = values(group.rank, 3 * rows, "int16").reshape(rows, 3)
        output = np.zeros((rows, 3), np.int16)
        await group.all_to_all(output, source, output_splits=splits, input_splits=splits)
        return output

    for rank, output in enumerate(run(member, world_size)):
        wanted = []
        for peer in range(world_size):
            source = values(peer, 3 * peer * sum(range(world_size)), "int16").reshape(-1, 3)
            start = peer * sum(range(rank))
            wanted.append(source[start : start + peer * rank])
        assert (output == np.concatenate(wanted)).all()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_nobody_leaves_a_barrier_before_all_have_come(run, world_size):
    come = set()

    async def member(group):
        await asyncio.sleep(0.01 * group.rank)
        come.add(group.rank)
        await group.barrier()
        return set(come)

    assert run(member, world_size) == [set(range(world_size))] * world_size


def test_inputs_may_be_read_only_and_strided(run):
    async def member(group):
        source = np.broadcast_to(np.int64(group.rank), (3, 4))
        output = np.zeros((2, 3, 4), np.int64)
        await group.all_gather(output, source)
        return output

    for output in run(member, 2):
        assert (output[0] == 0).all() and (output[1] == 1).all()
