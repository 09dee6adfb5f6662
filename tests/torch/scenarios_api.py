"""Scenarios: the functions of ``import dblp``, on numpy arrays and tensors, without torch.distributed."""

# mypy: disable-error-code="attr-defined, union-attr, arg-type, index"
# torch.distributed's stubs miss names that it exports, and call every group and work optional.

import os
import time

import numpy as np
import torch

import dblp


def _init(rank, world_size, port, **options):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dblp.init_process_group(config=dblp.TransportConfig(timeout_s=20, connect_timeout_s=20), **options)
    assert (dblp.get_rank(), dblp.get_world_size()) == (rank, world_size)


def functions(rank, world_size, folder, port):
    assert not dblp.is_initialized()
    for kind in (np.asarray, torch.from_numpy):
        _init(rank, world_size, port)
        _check_functions(rank, world_size, kind)
        dblp.destroy_process_group()
    assert not dblp.is_initialized()


def _check_functions(rank, world_size, kind):
    def full(size, value):
        return kind(np.full(size, value, np.float32))

    ranks = list(range(world_size))
    total = float(sum(ranks) + world_size)
    report = dblp.all_reduce(x := full(1000, rank + 1))
    assert x.tolist() == [total] * 1000 and report.collective == "all_reduce"
    dblp.all_reduce(x := full(10, rank + 1), "avg", dblp.Bounded(0.2))
    assert x.tolist() == [total / world_size] * 10
    handle = dblp.all_reduce(x := full(10, rank + 1), async_op=True)
    assert handle.wait().nbytes == 40 and handle.done() and x.tolist() == [total] * 10
    dblp.reduce(x := full(3, 1), root=1)
    assert x.tolist() == [world_size if rank == 1 else 1] * 3
    dblp.reduce_scatter(x := full(2, 0), full(2 * world_size, rank + 1))
    assert x.tolist() == [total] * 2
    dblp.all_gather(x := full(2 * world_size, -1), full(2, rank))
    assert x.tolist() == [float(peer) for peer in ranks for _ in range(2)]
    parts = [full(peer + 1, -1) for peer in ranks]
    dblp.all_gather(parts, full(rank + 1, rank))
    assert [part.tolist() for part in parts] == [[float(peer)] * (peer + 1) for peer in ranks]
    dblp.broadcast(x := full(5, rank), root=1)
    assert x.tolist() == [1.0] * 5
    dblp.gather(full(1, rank), x := full(world_size, -1) if rank == 0 else None)
    assert rank or x.tolist() == [float(peer) for peer in ranks]
    dblp.scatter(x := full(1, -1), kind(np.arange(world_size, dtype=np.float32)) if rank == 0 else None)
    assert x.tolist() == [float(rank)]
    dblp.all_to_all(x := full(world_size, -1), full(world_size, rank))
    assert x.tolist() == [float(peer) for peer in ranks]
    dblp.barrier()
    if rank == 0:
        assert sorted(dblp.recv(full(4, 0)) for _ in ranks[1:]) == ranks[1:]
    else:
        dblp.send(full(4, rank), 0)


def leaving(rank, world_size, folder, port):
    """Each leaves when its sends have returned: more than rank 0 holds early, and long before it receives the last of them."""
    _init(rank, world_size, port)
    sends, large = 6, 50_000
    if rank:
        time.sleep(0.3 * rank)
        for number in range(sends):
            dblp.send(np.full(large, 10 * rank + number, np.float32), 0)
        dblp.destroy_process_group()
        return
    for source in range(
        world_size - 1, 0, -1
    ):  # those that sent last first: the others have left long ago, or linger
        for number in range(sends):
            target = np.zeros(large, np.float32)
            if (source, number) == (1, sends - 1):
                time.sleep(2.5)  # longer than a silent peer would be waited for
            assert dblp.recv(target, source) == source
            assert (target == 10 * source + number).all()
    dblp.destroy_process_group()


def leaving_any(rank, world_size, folder, port):
    """The last rank sends first and leaves while rank 0 still waits for the others."""
    _init(rank, world_size, port)
    if rank:
        time.sleep(0.5 * (world_size - rank))
        dblp.send(np.full(4, rank, np.float32), 0)
    else:
        sources = [dblp.recv(np.zeros(4, np.float32)) for _ in range(1, world_size)]
        assert sources == list(range(world_size - 1, 0, -1)), sources
    dblp.destroy_process_group()


def tensors(rank, world_size, folder, port):
    _init(rank, world_size, port)
    total = world_size * (world_size + 1) / 2
    for x in (
        torch.full((6,), rank + 1, dtype=torch.bfloat16),
        torch.full((4, 6), float(rank + 1)).t(),
        torch.full((5,), float(rank + 1), requires_grad=True),
    ):
        dblp.all_reduce(x)
        assert (x.detach() == total).all()
    for kind, words, array, options in [
        (dblp.UnsupportedError, "numpy array or a torch tensor", [1.0, 2.0], {}),
        (dblp.UnsupportedError, "int32", np.ones(3, np.int32), {"policy": dblp.Bounded(0.1)}),
        (dblp.UnsupportedError, "hadamard=False", np.ones(3), {"policy": dblp.preset("optireduce").policy}),
        (
            dblp.ConfigError,
            "a Residual(x.size)",
            np.ones(3),
            {"policy": dblp.Bounded(0.1), "carry": dblp.Carry()},
        ),
    ]:
        try:
            dblp.all_reduce(array, **options)
        except kind as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"{array!r} with {options} was taken")
    dblp.all_reduce(last := np.ones(3))  # refused calls cost nothing
    assert last.tolist() == [world_size] * 3
    dblp.destroy_process_group()


def disagreement(rank, world_size, folder, port):
    """The last rank was started with another world size: both sides name both."""
    size = world_size + 1 if rank == world_size - 1 else world_size
    os.environ["WORLD_SIZE"] = str(size)
    try:
        _init(rank, size, port)
    except dblp.HandshakeError as error:
        text = str(error)
    assert f"world_size {world_size}" in text and f"world_size {world_size + 1}" in text, text
