"""Scenarios: every collective of the backend, with the answer in closed form. Each runs on all ranks at
once."""

# mypy: disable-error-code="attr-defined, union-attr, arg-type, index"
# torch.distributed's stubs miss names that it exports, and call every group and work optional.

from datetime import timedelta
from functools import reduce
from operator import and_, or_, xor

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLE = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
MOVED = [*REAL[1:3], torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
SIZES = [0, 1, 7, 1000, 70_001]


def init(rank, world_size, folder, timeout_s=20.0, name="store"):
    store = dist.FileStore(f"{folder}/{name}", world_size)
    dist.init_process_group(
        "dblp", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )


def values(size, dtype, rank):
    """Small whole numbers, exact in every dtype and in every sum of up to eight ranks."""
    return ((torch.arange(size) + rank) % 5 + 1).to(dtype)


def all_values(size, dtype, world_size):
    return torch.stack([values(size, torch.float64, rank) for rank in range(world_size)])


def check(actual, expected):
    expected = expected.to(actual.dtype)
    assert torch.equal(actual, expected), f"{actual.dtype} {tuple(actual.shape)}: {actual} is not {expected}"


def all_reduce(rank, world_size, folder):
    init(rank, world_size, folder)
    folds = {
        ReduceOp.SUM: lambda stack: stack.sum(0),
        ReduceOp.PRODUCT: lambda stack: stack.prod(0),
        ReduceOp.MIN: lambda stack: stack.amin(0),
        ReduceOp.MAX: lambda stack: stack.amax(0),
    }
    for dtype in REAL + WHOLE:
        for size in SIZES[:4]:
            stack = all_values(size, dtype, world_size)
            for op, fold in folds.items():
                tensor = values(size, dtype, rank)
                dist.all_reduce(tensor, op)
                check(tensor, fold(stack))
    for dtype in REAL + COMPLEX:
        tensor = values(1000, dtype, rank)
        dist.all_reduce(tensor, ReduceOp.AVG)
        torch.testing.assert_close(tensor, all_values(1000, dtype, world_size).mean(0).to(dtype))
    for dtype in COMPLEX:
        tensor = values(1000, dtype, rank) * (1 + 2j)
        dist.all_reduce(tensor)
        check(tensor, all_values(1000, dtype, world_size).sum(0) * (1 + 2j))
    bits = [1 << peer | 64 for peer in range(world_size)]
    for op, combine in [(ReduceOp.BAND, and_), (ReduceOp.BOR, or_), (ReduceOp.BXOR, xor)]:
        tensor = torch.full((9,), bits[rank], dtype=torch.int64)
        dist.all_reduce(tensor, op)
        check(tensor, torch.full((9,), reduce(combine, bits)))
    flags = torch.tensor([True, rank == 0, False])
    dist.all_reduce(flags, ReduceOp.SUM)
    assert flags.tolist() == [True, True, False]
    _all_reduce_shapes(rank, world_size)
    _all_reduce_async(rank, world_size)
    dist.destroy_process_group()


def _all_reduce_shapes(rank, world_size):
    total = world_size * (world_size + 1) // 2
    strided = torch.zeros(40, 6)[:, ::2]
    strided += rank + 1
    dist.all_reduce(strided)
    check(strided, torch.full((40, 3), float(total)))
    scalar = torch.tensor(float(rank + 1))
    dist.all_reduce(scalar)
    assert scalar.item() == total
    leaf = torch.full((4,), float(rank + 1), requires_grad=True)
    dist.all_reduce(leaf)
    check(leaf.detach(), torch.full((4,), float(total)))
    scaled = torch.ones(5)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    check(scaled, torch.full((5,), world_size / 2))


def _all_reduce_async(rank, world_size):
    tensors = [torch.full((size,), float(rank)) for size in SIZES]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works]
    for work, future, tensor in zip(works, futures, tensors, strict=True):
        assert future.wait()[0] is tensor
        assert work.is_completed() and work.is_success()
        assert work.report.collective == "all_reduce"
        check(tensor, torch.full_like(tensor, float(sum(range(world_size)))))


def moving(rank, world_size, folder):
    init(rank, world_size, folder)
    for dtype in [
        torch.float32,
        torch.bfloat16,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ]:
        for size in (0, 3, 5000):
            _gathering(rank, world_size, size, dtype)
            _scattering(rank, world_size, size, dtype)
    _uneven(rank, world_size)
    _objects(rank, world_size)
    dist.destroy_process_group()


def _same(actual, expected):
    assert torch.equal(actual.to(torch.complex64), expected.to(torch.complex64))


def _gathering(rank, world_size, size, dtype):
    mine = [values(size, dtype, peer) for peer in range(world_size)]
    for root in range(world_size):
        tensor = mine[root].clone() if rank == root else torch.zeros(size).to(dtype)
        dist.broadcast(tensor, root)
        _same(tensor, mine[root])
        outputs = [torch.zeros(size).to(dtype) for _ in range(world_size)] if rank == root else None
        dist.gather(mine[rank], outputs, dst=root)
        for output, expected in zip(outputs or [], mine, strict=False):
            _same(output, expected)
    outputs = [torch.zeros(size).to(dtype) for _ in range(world_size)]
    dist.all_gather(outputs, mine[rank])
    for output, expected in zip(outputs, mine, strict=True):
        _same(output, expected)
    flat = torch.zeros(size * world_size).to(dtype)
    dist.all_gather_into_tensor(flat, mine[rank])
    _same(flat, torch.cat([part.to(torch.complex64) for part in mine]))


def _scattering(rank, world_size, size, dtype):
    parts = [values(size, dtype, peer) for peer in range(world_size)]
    for root in range(world_size):
        output = torch.zeros(size).to(dtype)
        dist.scatter(output, parts if rank == root else None, src=root)
        _same(output, parts[rank])
    inputs = [values(size, dtype, rank * world_size + peer) for peer in range(world_size)]
    outputs = [torch.zeros(size).to(dtype) for _ in range(world_size)]
    dist.all_to_all(outputs, inputs)
    for peer, output in enumerate(outputs):
        _same(output, values(size, dtype, peer * world_size + rank))
    single = torch.zeros(size * world_size).to(dtype)
    dist.all_to_all_single(single, torch.cat([part.view(torch.uint8) for part in inputs]).view(dtype))
    _same(single, torch.cat([part.to(torch.complex64) for part in outputs]))


def _uneven(rank, world_size):
    outputs = [torch.zeros(peer + 1) for peer in range(world_size)]
    dist.all_gather(outputs, torch.full((rank + 1,), float(rank)))
    assert [output.tolist() for output in outputs] == [
        [float(peer)] * (peer + 1) for peer in range(world_size)
    ]
    # Rank r sends peer p (r + 2 p) rows of two columns.
    counts = [[source + 2 * target for target in range(world_size)] for source in range(world_size)]
    sent = torch.full((sum(counts[rank]), 2), float(rank))
    received = torch.zeros(sum(counts[source][rank] for source in range(world_size)), 2)
    splits = [counts[source][rank] for source in range(world_size)]
    dist.all_to_all_single(received, sent, splits, counts[rank])
    expected = [float(source) for source in range(world_size) for _ in range(splits[source])]
    assert received[:, 0].tolist() == expected


def _objects(rank, world_size):
    gathered = [None] * world_size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": peer, "text": "x" * peer} for peer in range(world_size)]
    box = [{"answer": 42}] if rank == 0 else [None]
    dist.broadcast_object_list(box, 0)
    assert box == [{"answer": 42}]


def reducing(rank, world_size, folder):
    init(rank, world_size, folder)
    for dtype in [torch.float32, torch.bfloat16, torch.int32]:
        for size in (0, 3, 5000):
            stack = all_values(size * world_size, dtype, world_size).sum(0)
            mine = values(size * world_size, dtype, rank)
            output = torch.zeros(size, dtype=dtype)
            dist.reduce_scatter_tensor(output, mine)
            check(output, stack[rank * size : (rank + 1) * size])
            output.zero_()
            dist.reduce_scatter(output, list(mine.chunk(world_size)) if size else [mine] * world_size)
            check(output, stack[rank * size : (rank + 1) * size])
            for root in range(world_size):
                tensor = mine.clone()
                dist.reduce(tensor, root)
                if rank == root:
                    check(tensor, stack)
    averaged = torch.zeros(4)
    dist.reduce_scatter_tensor(averaged, torch.full((4 * world_size,), float(rank)), ReduceOp.AVG)
    check(averaged, torch.full((4,), (world_size - 1) / 2))
    _coalesced(rank, world_size)
    dist.destroy_process_group()


def _coalesced(rank, world_size):
    total = world_size * (world_size + 1) // 2
    tensors = [torch.full((size,), float(rank + 1)) for size in (1, 50, 3000)]
    dist.all_reduce_coalesced(tensors)
    for tensor in tensors:
        check(tensor, torch.full_like(tensor, float(total)))
    tensors = [torch.full((size,), float(rank + 1)) for size in (1, 50, 3000)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor in tensors:
        check(tensor, torch.full_like(tensor, float(total)))
    outputs = [torch.zeros(world_size * size) for size in (1, 50)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output, size in zip(outputs, (1, 50), strict=True):
            dist.all_gather_into_tensor(output, torch.full((size,), float(rank)))
    manager.wait()
    for output, size in zip(outputs, (1, 50), strict=True):
        check(output, torch.arange(world_size).repeat_interleave(size))
    shards = [torch.zeros(3), torch.zeros(5)]
    with dist._coalescing_manager():
        for shard in shards:
            dist.reduce_scatter_tensor(shard, torch.ones(len(shard) * world_size))
    for shard in shards:
        check(shard, torch.full_like(shard, float(world_size)))
    tensor = torch.full((8,), float(rank + 1))
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(tensor, 0)
    manager.wait()
    check(tensor, torch.ones(8))


def point_to_point(rank, world_size, folder):
    init(rank, world_size, folder)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for size in (0, 10, 400_000):  # all send first: large ones would deadlock if they queued
        sent, received = torch.full((size,), float(rank)), torch.zeros(size)
        works = [dist.isend(sent, right), dist.irecv(received, left)]
        for work in works:
            work.wait()
        check(received, torch.full((size,), float(left)))
    if rank == 0:
        for _ in range(world_size - 1):
            tensor = torch.zeros(3)
            source = dist.recv(tensor, tag=9)
            assert tensor.tolist() == [float(source)] * 3 and source > 0
        dist.send(torch.ones(2, dtype=torch.bfloat16), 1, tag=5)
    else:
        dist.send(torch.full((3,), float(rank)), 0, tag=9)
    if rank == 1:
        tensor = torch.zeros(2, dtype=torch.bfloat16)
        dist.recv(tensor, 0, tag=5)
        check(tensor, torch.ones(2))
    operations = [
        dist.P2POp(dist.isend, torch.full((100,), float(rank)), right),
        dist.P2POp(dist.irecv, received := torch.zeros(100), left),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    check(received, torch.full((100,), float(left)))
    dist.destroy_process_group()


def groups(rank, world_size, folder):
    init(rank, world_size, folder)
    group = dist.group.WORLD
    assert dist.get_backend() == "dblp" and group.name() == "dblp"
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    dist.barrier()
    dist.barrier(async_op=True).wait()
    group.monitored_barrier(timedelta(seconds=10))
    even, odd = (dist.new_group(list(range(start, world_size, 2)), group_desc="half") for start in (0, 1))
    half = odd if rank % 2 else even
    assert half.group_desc == "half" and half.group_name
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, group=half)
    check(tensor, torch.full((1000,), float(len(range(rank % 2, world_size, 2)))))
    dist.destroy_process_group(half)
    dist.all_reduce(tensor := torch.ones(3))
    check(tensor, torch.full((3,), float(world_size)))
    mixed = dist.new_group(backend="gloo")
    dist.all_reduce(tensor := torch.ones(3), group=mixed)
    check(tensor, torch.full((3,), float(world_size)))
    _functional(rank, world_size)
    _refused(world_size)
    dist.destroy_process_group()


def _functional(rank, world_size):
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    total = float(world_size * (world_size + 1) // 2)
    check(functional.all_reduce(torch.full((5,), rank + 1.0), "sum", group).wait(), torch.full((5,), total))
    gathered = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, group).wait()
    check(gathered, torch.arange(world_size).repeat_interleave(2))
    scattered = functional.reduce_scatter_tensor(torch.ones(2 * world_size), "sum", 0, group).wait()
    check(scattered, torch.full((2,), float(world_size)))
    # The one call that falls through to the gloo group behind ours.
    output = torch.zeros(2 * world_size)
    torch.ops._c10d_functional.all_gather_into_tensor_out(
        torch.full((2,), float(rank)), world_size, group.group_name, out=output
    )
    torch.ops._c10d_functional.wait_tensor(output)
    check(output, torch.arange(world_size).repeat_interleave(2))


def _refused(world_size):
    from dblp.errors import ConfigError, UnsupportedError

    for error, call in [
        (ConfigError, lambda: dist.new_group(backend="cpu:dblp,cuda:gloo")),
        (ConfigError, lambda: dist.new_group(pg_options={"paths": 2})),
        (UnsupportedError, lambda: dist.all_reduce(torch.eye(2).to_sparse_csr())),
        (UnsupportedError, lambda: dist.broadcast(torch.eye(2).to_sparse(), 0)),
        (UnsupportedError, lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))),
    ]:
        try:
            call()
        except error:
            continue
        raise AssertionError(f"{error.__name__} was expected")
    dist.all_reduce(tensor := torch.ones(3))  # refused calls cost nothing
    check(tensor, torch.full((3,), float(world_size)))
