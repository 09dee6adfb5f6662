"""Scenarios: tensors on a device, which is a stand-in (``standin``): the order of copies, rounds and what waits for them."""

# mypy: disable-error-code="attr-defined, union-attr, arg-type, index"
# torch.distributed's stubs miss names that it exports, and call every group and work optional.

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

import dblp
from dblp.collectives.torch import staging
from tests.torch.standin import StandIn, wait


def _init(rank, world_size, folder, **device):
    found = StandIn(**device)
    staging.accelerators = found
    dist.init_process_group(
        "dblp",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
    )
    return found


def device_order(rank, world_size, folder):
    """Calls return while the caller's stream still computes their tensors, begin in the order of the calls on every rank, and who
    waits sees the result, though the copy back takes its time."""
    device = _init(rank, world_size, folder, copy_s=0.02)
    gate = threading.Event()
    late, host = device.own(torch.zeros(1000)), torch.full((10,), float(rank))
    device.main.put("gate", lambda: wait(gate))
    device.main.put("gradient", lambda: late.fill_(rank + 1.0))
    works = [
        dist.all_reduce(late, async_op=True),
        dist.all_reduce(host, async_op=True),  # ready, but behind the first on all ranks
        dist.broadcast(second := torch.full((3,), float(rank)), 0, async_op=True),
    ]
    assert not any(work.is_completed() for work in works)
    gate.set()
    for work in works:
        work.wait()
    total = world_size * (world_size + 1) / 2
    assert device.read(late).tolist() == [total] * 1000
    assert host.tolist() == [total - world_size] * 10 and second.tolist() == [0.0] * 3
    assert device.log == [
        "main: gate",
        "main: gradient",
        "out: copy of 1000",
        "back: copy of 1000",
        "main: read",
    ]
    dist.all_reduce(host)  # nothing waits any more
    dist.destroy_process_group()


def device_kinds(rank, world_size, folder):
    """Every kind of call, and tensors that are not contiguous, of other types, and empty."""
    device = _init(rank, world_size, folder)
    total = world_size * (world_size + 1) / 2
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float64, torch.uint8):
        tensor = device.own(torch.full((50,), rank + 1).to(dtype))
        dist.all_reduce(tensor)
        assert (device.read(tensor) == total).all(), dtype
    turned = device.own(torch.full((6, 4), float(rank + 1))).t()
    dist.all_reduce(turned)
    assert (device.read(turned) == total).all()
    dist.all_reduce(device.own(torch.zeros(0)))
    parts = [device.own(torch.zeros(5)) for _ in range(world_size)]
    dist.all_gather(parts, device.own(torch.full((5,), float(rank))))
    assert [device.read(part)[0].item() for part in parts] == list(range(world_size))
    pieces = [device.own(torch.full((2,), float(rank + 1))) for _ in range(world_size)]
    dist.reduce_scatter(part := device.own(torch.zeros(2)), pieces)
    assert device.read(part).tolist() == [total] * 2
    tensor = device.own(torch.full((8,), float(rank)))
    dist.broadcast(tensor, 1)
    assert device.read(tensor).tolist() == [1.0] * 8
    if rank == 0:
        dist.send(device.own(torch.full((9,), 5.0)), 1)
    elif rank == 1:
        dist.recv(tensor := device.own(torch.zeros(9)), 0)
        assert device.read(tensor).tolist() == [5.0] * 9
    work = dist.group.WORLD.allreduce_lossy(
        tensor := device.own(torch.full((3000,), float(rank))), dblp.Bounded(0.1)
    )
    work.wait()
    assert work.report is not None and (device.read(tensor) == (world_size - 1) / 2).all()
    with dist._coalescing_manager(async_ops=True) as manager:
        for part in parts:
            dist.all_reduce(part)
    manager.wait()
    assert [device.read(part)[0].item() for part in parts] == [
        number * world_size for number in range(world_size)
    ]
    dist.destroy_process_group()


def device_coalesced(rank, world_size, folder):
    """Of two works that are waited for as one, the first begins last: its copy back is the last to be queued."""
    device = _init(rank, world_size, folder, copy_s=0.2)
    group = dist.group.WORLD
    early, late = (device.own(torch.full((number + 1,), float(rank))) for number in range(2))
    if rank == 0:
        dist.send(early, 1, tag=1)
        dist.barrier()  # the other has seen it end
        dist.send(late, 1, tag=2)
    else:
        group._start_coalescing(torch.device("cpu"))
        works = [group.recv([late], 0, 2), group.recv([early], 0, 1)]
        joined = group._end_coalescing(torch.device("cpu"))
        works[1].wait()
        dist.barrier()
        joined.wait()
        assert device.read(late).tolist() == [0.0] * 2 and device.read(early).tolist() == [0.0]
        backs = [what for what in device.log if what.startswith("back")]
        assert backs == ["back: copy of 1", "back: copy of 2"], backs
    dist.destroy_process_group()


def device_sparse(rank, world_size, folder):
    """The sum of sparse tensors comes by a copy that is queued like others; the new memory is kept for the stream that waits."""
    device = _init(rank, world_size, folder)
    gate = threading.Event()
    device.back.put("", lambda: wait(gate))
    rows = torch.arange(rank + 1).view(1, -1)
    tensor = torch.sparse_coo_tensor(rows, torch.full((rank + 1, 3), rank + 1.0), (10, 3)).coalesce()
    for part in (tensor.indices(), tensor.values()):
        device.own(part)
    expected = torch.zeros(10, 3)
    for peer in range(world_size):
        expected[: peer + 1] += peer + 1.0
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    gate.set()  # wait() has returned: the host waits for no copy back
    assert torch.equal(device.read(tensor).to_dense(), expected)
    assert [what for what in device.log if "copy of 30" in what] == ["back: copy of 30"]
    assert "main: keeps torch.sparse_coo" in device.log
    dist.destroy_process_group()


def device_sparse_coalesced(rank, world_size, folder):
    """Waiting for coalesced works has the current stream wait for a sparse sum's copy back, as for those of dense tensors."""
    device = _init(rank, world_size, folder)
    gate = threading.Event()
    device.back.put("", lambda: wait(gate))
    tensor = torch.sparse_coo_tensor(torch.arange(3).view(1, -1), torch.ones(3, 2), (10, 2)).coalesce()
    for part in (tensor.indices(), tensor.values()):
        device.own(part)
    group = dist.group.WORLD
    group._start_coalescing(torch.device("cpu"))
    group.allreduce([tensor])
    group._end_coalescing(torch.device("cpu")).wait()
    gate.set()  # wait() has returned: the host waits for no copy back
    expected = torch.zeros(10, 2)
    expected[:3] = world_size
    assert torch.equal(device.read(tensor).to_dense(), expected)
    dist.destroy_process_group()


def device_segments(rank, world_size, folder):
    """A large all-reduce is cut: the first copies back come before the last copies out; the result, strided or not, is whole."""
    device = _init(rank, world_size, folder, copy_s=0.05)
    staging.SEGMENT_BYTES = 40_000
    values = torch.arange(85_000, dtype=torch.float32) % 100
    for strided in (False, True):
        device.log.clear()
        tensor = device.own(values * (rank + 1))
        if strided:
            tensor = device.own(tensor.view(85, 1000)).t()
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        expected = values * (world_size * (world_size + 1) / 2)
        assert torch.equal(device.read(tensor), expected.view(85, 1000).t() if strided else expected)
        outs = [at for at, what in enumerate(device.log) if what.startswith("out")]
        backs = [at for at, what in enumerate(device.log) if what.startswith("back")]
        assert len(outs) == 9 and len(backs) == 9 + strided and backs[0] < outs[-1], device.log
        assert work.report.nbytes == 340_000 and work.report.chunks_received > 0
    dist.destroy_process_group()


def device_futures(rank, world_size, folder):
    """A future is completed with the stream of its copy back current, so torch has its callbacks' streams wait for it; a future
    of a work that has ended leaves the caller's stream as it is."""
    device = _init(rank, world_size, folder, copy_s=0.05)
    streams = []
    work = dist.all_reduce(tensor := device.own(torch.ones(100)), async_op=True)
    work.get_future().then(lambda _: streams.append(device.current.name)).wait()
    assert streams == ["back"], streams
    work.wait()
    assert work.get_future().wait()[0] is tensor and device.current.name == "main"
    assert device.read(tensor).tolist() == [world_size] * 100
    late = dist.all_reduce(tensor, async_op=True)
    late.wait()
    late.get_future().wait()
    assert device.current.name == "main"
    dist.destroy_process_group()


def device_fails(rank, world_size, folder):
    """What the device says when a copy out fails is the work's error; those behind it go on."""
    device = _init(rank, world_size, folder)
    dist.barrier()
    if rank == 0:
        device.fail_with = RuntimeError("an illegal memory access was encountered")
        work = dist.group.WORLD.send([device.own(torch.ones(10))], 1, 3)
        try:
            work.wait()
        except dist.DistBackendError as error:
            text = str(error)
        assert "illegal memory access" in text and "send to rank 1" in text, text
        device.fail_with = None
    dist.all_reduce(tensor := device.own(torch.ones(10)))
    assert device.read(tensor).tolist() == [world_size] * 10
    dist.destroy_process_group()


def device_exit(rank, world_size, folder):
    """A copy never ends, and the interpreter does, without a destroy."""
    device = _init(rank, world_size, folder)
    dist.barrier()
    device.main.put("never", lambda: wait(threading.Event()))
    dist.all_reduce(device.own(torch.ones(10)), async_op=True)
    dist.all_reduce(torch.ones(10), async_op=True)
