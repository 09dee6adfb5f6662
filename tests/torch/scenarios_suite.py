"""Scenarios: faults that torch's own suites found. Sparse tensors, coalesced gathers, events in the profiler, Join."""

# mypy: disable-error-code="attr-defined, union-attr, arg-type, call-arg, index"
# torch.distributed's stubs miss names that it exports, and call every group and work optional.

import gc
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

from dblp.collectives.torch.sparse import SparseReduction


def _init(rank, world_size, folder):
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(
        "dblp", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=20)
    )


def _check(actual, expected):
    assert torch.equal(actual, expected.to(actual.dtype)), f"{actual} is not {expected}"


def _entries(rank, dtype=torch.float32, dense=(3,)):
    """Rows 0 to rank of a tensor with 10 rows, the last of them twice; each entry counts rank + 1."""
    rows = torch.tensor([[*range(rank + 1), rank]])
    return torch.sparse_coo_tensor(rows, torch.full((rank + 2, *dense), rank + 1).to(dtype), (10, *dense))


def sparse(rank, world_size, folder):
    _init(rank, world_size, folder)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for dense in ((), (3,), (2, 2)):
            expected = sum(_entries(peer, dtype, dense).to_dense() for peer in range(world_size))
            tensor = _entries(rank, dtype, dense)
            dist.all_reduce(tensor)
            _check(tensor.to_dense(), expected)
    first = _entries(rank)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, torch.ones(4))]
    for work in works:
        work.wait()
    _check(first.to_dense(), sum(_entries(peer).to_dense() for peer in range(world_size)))
    averaged = _entries(rank, torch.float64)
    dist.all_reduce(averaged, ReduceOp.AVG)
    _check(averaged.to_dense() * world_size, sum(_entries(peer).to_dense() for peer in range(world_size)))
    empty = torch.sparse_coo_tensor(size=(4, 5))
    dist.all_reduce(empty)
    assert empty._nnz() == 0
    _refused(rank)
    dist.destroy_process_group()


def _refused(rank):
    try:
        dist.all_reduce(_entries(rank), ReduceOp.MAX)
    except TypeError as error:
        assert "sparse tensor by max" in str(error), error
    else:
        raise AssertionError("MAX of sparse tensors was taken")
    shape = (10, 3) if rank else (11, 3)
    try:
        dist.all_reduce(torch.sparse_coo_tensor(size=shape))
    except Exception as error:
        assert "(11, 3)" in str(error) and "(10, 3)" in str(error), error
    else:
        raise AssertionError("sparse tensors of different shapes were added")


def sparse_coalesced(rank, world_size, folder):
    """What waits for coalesced works waits until a sparse tensor has its sum, not only for the rounds that bring the entries."""
    _init(rank, world_size, folder)
    add = SparseReduction.add

    def add_late(reduction):
        time.sleep(0.3)
        return add(reduction)

    SparseReduction.add = add_late  # type: ignore[method-assign]
    expected = sum(_entries(peer).to_dense() for peer in range(world_size))
    group = dist.group.WORLD
    group._start_coalescing(torch.device("cpu"))
    tensor, beside = _entries(rank), torch.ones(5)
    group.allreduce([tensor])
    group.allreduce([beside])
    joined = group._end_coalescing(torch.device("cpu"))
    joined.wait()
    _check(tensor.to_dense(), expected)
    _check(beside, torch.full((5,), world_size))
    assert all(output is whole for output, whole in zip(joined.result(), (tensor, beside), strict=True))
    tensors = [_entries(rank), torch.ones(5), _entries(rank)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor, total in zip(tensors, (expected, torch.full((5,), world_size), expected), strict=True):
        _check(tensor.to_dense() if tensor.is_sparse else tensor, total)
    _failed_sum(group)
    dist.destroy_process_group()


def _failed_sum(group):
    """What fails after the rounds fails the work that joins them."""

    def fail(reduction):
        raise ArithmeticError("no sum")

    SparseReduction.add = fail  # type: ignore[method-assign]
    group._start_coalescing(torch.device("cpu"))
    group.allreduce([_entries(group.rank())])
    try:
        group._end_coalescing(torch.device("cpu")).wait()
    except dist.DistBackendError as error:
        assert "no sum" in str(error), error
    else:
        raise AssertionError("a sum that failed was taken for one that is there")


def sparse_gradients(rank, world_size, folder):
    """DDP of an embedding with sparse gradients: the step is that of one process with all batches."""
    _init(rank, world_size, folder)
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(50, 4, sparse=True)
    alone = torch.nn.Embedding(50, 4, sparse=True)
    alone.load_state_dict(embedding.state_dict())
    model = DistributedDataParallel(embedding)
    words = torch.arange(world_size * 8).reshape(world_size, 8) % 11
    for _ in range(2):
        for module, batch in ((model, words[rank]), (alone, words.flatten())):
            module(batch).square().mean().backward()
            (parameter,) = module.parameters()
            assert parameter.grad.is_sparse
            parameter.data -= 0.5 * parameter.grad.to_dense()
            parameter.grad = None
        torch.testing.assert_close(embedding.weight, alone.weight)
    dist.destroy_process_group()


def coalesced_gather(rank, world_size, folder):
    _init(rank, world_size, folder)
    sizes = (1, 0, 30)
    outputs = [[torch.zeros(size) for size in sizes] for _ in range(world_size)]
    dist.all_gather_coalesced(outputs, [torch.full((size,), rank * 10.0 + size) for size in sizes])
    for peer, tensors in enumerate(outputs):
        for tensor, size in zip(tensors, sizes, strict=True):
            _check(tensor, torch.full((size,), peer * 10.0 + size))
    dist.destroy_process_group()


def profiled(rank, world_size, folder):
    """Each call is one event with the shapes of its inputs, also if it has ended before the caller could look."""
    _init(rank, world_size, folder)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(4, 2))
        dist.all_reduce_coalesced([torch.ones(3), torch.ones(5)])
        dist.all_gather([torch.zeros(2) for _ in range(world_size)], torch.ones(2))
        dist.barrier()
        sent = dist.isend(torch.ones(6), right)
        dist.recv(torch.zeros(6), left)
        sent.wait()
        try:
            dist.all_reduce(torch.ones(3, dtype=torch.float8_e4m3fn))
        except TypeError:
            refused = True
        else:
            refused = False
    assert refused
    shapes = {
        event.name: event.input_shapes for event in profile.function_events if event.name.startswith("dblp:")
    }
    assert shapes == {
        "dblp:all_reduce": [[3]],  # the last, which was refused
        "dblp:all_reduce_coalesced": [[3], [5]],
        "dblp:all_gather": [[2]],
        "dblp:barrier": [],
        "dblp:send": [[6]],
        "dblp:recv": [[6]],
    }, shapes
    events = [event for event in profile.function_events if event.name == "dblp:all_reduce"]
    assert [event.input_shapes for event in events] == [[[4, 2]], [[3]]]
    assert [event.is_async for event in events] == [True, False]
    dist.destroy_process_group()


def join_by_active_ranks(rank, world_size, folder):
    """The reducer asks the work that Join made, in C++, for the number of ranks that still train."""
    _init(rank, world_size, folder)
    layer = torch.nn.Linear(3, 1, bias=False)
    model = DistributedDataParallel(layer)
    with model.join(divide_by_initial_world_size=False):
        for step in range(rank + 1):  # rank r trains r + 1 steps: in step s the ranks from s on
            layer.weight.grad = None
            model(torch.full((1, 3), rank + 1.0)).sum().backward()
            gc.collect()
            active = range(step, world_size)
            expected = sum(peer + 1.0 for peer in active) / len(active)
            torch.testing.assert_close(layer.weight.grad, torch.full((1, 3), expected))
    dist.destroy_process_group()
