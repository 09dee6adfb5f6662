"""Scenarios: mismatches, deaths, exits. What every rank must see is asserted on every rank."""

# mypy: disable-error-code="attr-defined, union-attr, arg-type, index"
# torch.distributed's stubs miss names that it exports, and call every group and work optional.

import contextlib
import json
import logging
import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from dblp.collectives.torch import work

TIMEOUT_S = 3.0


def _init(rank, world_size, folder, timeout_s=TIMEOUT_S):
    dist.init_process_group(
        "dblp",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def _failure(call):
    """The error of ``call`` and how long it took."""
    start = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("an error was expected")


def mismatch(rank, world_size, folder):
    _init(rank, world_size, folder, timeout_s=20)
    text, seconds = _failure(lambda: dist.all_reduce(torch.ones(100 + rank)))
    assert seconds < 10, seconds
    assert "all_reduce" in text and "100 " in text and "101 " in text, text
    text, _ = _failure(lambda: dist.all_reduce(torch.ones(3)))
    assert "failed before" in text, text  # the group is poisoned, and says why
    dist.destroy_process_group()


def timeouts(rank, world_size, folder):
    _init(rank, world_size, folder, timeout_s=30)
    if rank == 0:
        tensor = torch.ones(5)
        text, seconds = _failure(lambda: dist.all_reduce(tensor, async_op=True).wait(timedelta(seconds=0.2)))
        assert "Timed out" in text and seconds < 2, (text, seconds)
        dist.group.WORLD.set_timeout(timedelta(seconds=1))
        text, seconds = _failure(dist.barrier)
        assert "rank 1" in text and 0.8 < seconds < 3, (text, seconds)
        assert re.search(" (Timed out|closed|timeout) ", text), text  # as scripts tell timeouts of gloo
    else:
        time.sleep(3)
    dist.destroy_process_group()


def own_timeouts(rank, world_size, folder):
    """A call's own timeout holds for several tensors at once too: above the group's, and below it."""
    _init(rank, world_size, folder, timeout_s=30)
    work.GRACE_SECONDS = 0.2
    group = dist.group.WORLD

    def reduce(seconds):
        options = c10d.AllreduceCoalescedOptions()
        options.timeout = timedelta(seconds=seconds)
        group.allreduce_coalesced(tensors := [torch.ones(5), torch.ones(7)], options).wait()
        return tensors

    def gather(seconds):
        outputs = [[torch.zeros(3) for _ in range(world_size)] for _ in range(2)]
        options = c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=seconds)
        group.allgather(outputs, [torch.ones(3), torch.ones(3)], options).wait()

    group.set_timeout(timedelta(seconds=0.5))
    if rank:
        time.sleep(1.5)
    assert all((tensor == world_size).all() for tensor in reduce(20))
    if rank:
        time.sleep(1.5)
    gather(20)
    group.set_timeout(timedelta(seconds=30))
    if rank == 0:
        text, seconds = _failure(lambda: reduce(1))
        assert "all_reduce_coalesced" in text and "rank 1" in text, text
        assert "Timed out waiting 1000ms" in text and 0.8 < seconds < 3, (text, seconds)
    else:
        time.sleep(3)
    dist.destroy_process_group()


def monitored(rank, world_size, folder):
    _init(rank, world_size, folder, timeout_s=20)
    group = dist.group.WORLD
    late = world_size - 1
    if rank == 0:
        text, _ = _failure(lambda: group.monitored_barrier(timedelta(seconds=0.5)))
        assert f"Rank {late} failed to pass monitoredBarrier in 500 ms" in text, text
    elif rank != late:
        text, _ = _failure(lambda: group.monitored_barrier(timedelta(seconds=5)))
        assert f"Rank {late} failed to pass" in text, text
        assert f"Rank {rank} successfully reached monitoredBarrier, but received errors" in text, text
    else:
        time.sleep(1.0)
        group._barriers += 1
    group.monitored_barrier(timedelta(seconds=10), wait_all_ranks=True)
    if rank == 0:
        text, _ = _failure(lambda: group.monitored_barrier(timedelta(0)))
        assert "Rank 0 timed out in monitoredBarrier" in text, text
        text, _ = _failure(lambda: group.monitored_barrier(timedelta(milliseconds=1), wait_all_ranks=True))
        assert f"Ranks {', '.join(map(str, range(1, world_size)))} failed to pass" in text, text
    dist.all_reduce(tensor := torch.ones(2))  # the group is as good as before
    assert tensor.tolist() == [world_size] * 2
    dist.destroy_process_group()


def backward_error(rank, world_size, folder):
    """A rank leaves between two steps: the others' backward raises, it does not hang or crash."""
    _init(rank, world_size, folder)
    model = DistributedDataParallel(torch.nn.Linear(50, 50))
    model(torch.ones(2, 50)).sum().backward()
    if rank == world_size - 1:
        dist.destroy_process_group()
        return
    text, seconds = _failure(lambda: model(torch.ones(2, 50)).sum().backward())
    assert f"rank {world_size - 1}" in text, text
    assert seconds < TIMEOUT_S + 2, seconds
    dist.destroy_process_group()


def hook_error(rank, world_size, folder):
    import dblp

    _init(rank, world_size, folder)
    model = DistributedDataParallel(torch.nn.Linear(50, 50))
    dblp.attach(model, dblp.Bounded(0.1))
    model(torch.ones(2, 50)).sum().backward()
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    text, seconds = _failure(lambda: model(torch.ones(2, 50)).sum().backward())
    assert f"rank {world_size - 1}" in text, text
    assert seconds < TIMEOUT_S + 2, seconds


def again(rank, world_size, folder):
    """destroy and init on one store, as under a launcher whose store outlives the group; each has its own gloo group."""
    store = dist.FileStore(f"{folder}/store", world_size)
    for round_ in range(3):
        dist.init_process_group("dblp", store=store, rank=rank, world_size=world_size)
        dist.all_reduce(tensor := torch.full((1000,), float(rank + round_)))
        assert tensor[0].item() == sum(peer + round_ for peer in range(world_size))
        gathered = torch.zeros(world_size)
        torch.ops._c10d_functional.all_gather_into_tensor_out(
            torch.tensor([float(rank)]), world_size, dist.group.WORLD.group_name, out=gathered
        )
        torch.ops._c10d_functional.wait_tensor(gathered)
        assert gathered.tolist() == list(range(world_size))
        dist.destroy_process_group()
    assert not [thread for thread in threading.enumerate() if thread.name == "dblp-engine"]


def falls_through(rank, world_size, folder):
    """What torch calls in C++ only goes over gloo: nothing connects before, and the first such call is warned of, once."""
    _init(rank, world_size, folder, timeout_s=20)
    told = []

    def note(record):
        told.append(record.getMessage())
        return True

    logging.getLogger("dblp.torch").addFilter(note)
    groups = [dist.group.WORLD, dist.new_group()]
    for group in groups:
        dist.all_reduce(torch.ones(10), group=group)
        dist.all_gather_into_tensor(torch.zeros(world_size), torch.ones(1), group=group)
        dist.barrier(group)
    DistributedDataParallel(torch.nn.Linear(5, 5))(torch.ones(2, 5)).sum().backward()
    before = _tcp_connections()
    assert told == []
    for group in groups:
        gathered = torch.zeros(world_size)
        torch.ops._c10d_functional.all_gather_into_tensor_out(
            torch.tensor([float(rank)]), world_size, group.group_name, out=gathered
        )
        torch.ops._c10d_functional.wait_tensor(gathered)
        assert gathered.tolist() == list(range(world_size))
    (text,) = told
    assert "over gloo" in text and "all_gather_into_tensor_out" in text and "bucket_all_gathers_fx" in text
    assert before == 0 and _tcp_connections() > 0, "and there is no other way to it"
    dist.barrier()  # a rank that leaves takes its connections along
    dist.destroy_process_group()


def _tcp_connections():
    """Of this process; the store is a file."""
    states = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    established = {f"socket:[{fields[9]}]" for fields in states if fields[3] == "01"}
    return len(established & set(_links("/proc/self/fd")))


def _links(folder):
    for path in Path(folder).iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            yield str(path.readlink())


def debug_detail(rank, world_size, folder):
    """Under TORCH_DISTRIBUTED_DEBUG=DETAIL training goes on as ever, and a call of different shapes is named."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    _init(rank, world_size, folder, timeout_s=20)
    model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.module.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((1, 4), rank + 1.0)).sum().backward()
        optimizer.step()
    mean = (world_size + 1) / 2
    torch.testing.assert_close(model.module.weight.detach(), before - 2 * 0.5 * mean)
    dist.all_reduce(tensor := torch.ones(10))
    assert tensor.tolist() == [world_size] * 10
    text, seconds = _failure(lambda: dist.all_reduce(torch.ones(100 + rank)))
    assert "all_reduce" in text and "100 " in text and "101 " in text and seconds < 10, (text, seconds)
    dist.destroy_process_group()


def unnamed_timeout(rank, world_size, folder):
    """Where nobody passes a timeout, DBLP_TIMEOUT_S takes the place of torch's half hour; who passes one has it."""
    os.environ["DBLP_TIMEOUT_S"] = "1.5"
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("dblp", store=store, rank=rank, world_size=world_size)
    named = dist.new_group(timeout=timedelta(seconds=77))
    assert named._timeout == timedelta(seconds=77)
    if rank == 0:
        text, seconds = _failure(lambda: dist.all_reduce(torch.ones(10)))
        assert "rank 1" in text and 1.0 < seconds < 20.0, (text, seconds)
    else:
        time.sleep(4.0)
        _failure(lambda: dist.all_reduce(torch.ones(10)))


def _dumps(folder, count=2):
    """The JSON dumps below a folder, once there are so many files."""
    deadline = time.monotonic() + 20
    while len(found := sorted(Path(folder, "flights").glob("*.*"))) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)  # a file that is there may still be written
    assert [path.suffix for path in found] == [".json", ".txt"] * (len(found) // 2), found
    return [(json.loads(path.read_text()), path.with_suffix(".txt").read_text()) for path in found[::2]]


def dumped(rank, world_size, folder):
    """A round that passes its deadline leaves text and JSON that say what was missing."""
    os.environ["DBLP_FLIGHT_DIR"] = f"{folder}/flights"
    _init(rank, world_size, folder, timeout_s=20)
    dist.all_reduce(torch.ones(10))
    if rank == 0:
        dist.group.WORLD.set_timeout(timedelta(seconds=0.5))
        _failure(lambda: dist.all_reduce(torch.ones(1000)))
        ((told, text),) = _dumps(folder)
        assert [round_["state"] for round_ in told["rounds"]][-1] == "failed"
        assert told["rounds"][-1]["lacks_ranks"] == [1] and told["rounds"][0]["state"] == "done"
        assert "DeadlineError" in told["reason"] and "from rank 1, step 0: 0 of" in text, text
        assert dist.group.WORLD.flight_recorder.report()["rounds"][-1]["error"] in text
    else:
        time.sleep(2)
    dist.destroy_process_group()


def signalled(rank, world_size, folder):
    """A rank that waits in the backward pass, in C++, is asked by a signal what for; it goes on as if nothing had been."""
    os.environ |= {"DBLP_FLIGHT_DIR": f"{folder}/flights", "DBLP_FLIGHT_SIGNAL": "SIGUSR1"}
    before = signal.getsignal(signal.SIGUSR1)
    _init(rank, world_size, folder, timeout_s=40)
    model = DistributedDataParallel(torch.nn.Linear(50, 50))
    pids = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    output = model(torch.ones(2, 50)).sum()
    if rank == 1:
        time.sleep(0.5)
        os.kill(pids[0], signal.SIGUSR1)
        ((told, text),) = _dumps(folder)
        assert told["reason"] == "asked for by SIGUSR1" and told["rank"] == 0
        (running,) = [round_ for round_ in told["rounds"] if round_["state"] == "running"]
        assert running["call"] == "all_reduce" and running["lacks_ranks"] == [1]
        assert "running after" in text
    output.backward()
    dist.all_reduce(tensor := torch.ones(3))
    assert tensor.tolist() == [world_size] * 3
    dist.destroy_process_group()
    assert signal.getsignal(signal.SIGUSR1) == before and signal.set_wakeup_fd(-1) == -1


def exit_without_destroy(rank, world_size, folder):
    _init(rank, world_size, folder, timeout_s=20)
    dist.all_reduce(tensor := torch.ones(200_000))
    assert tensor[0].item() == world_size


def killed_before(rank, world_size, folder):
    """Killed after the group was made, before its first collective."""
    _init(rank, world_size, folder)
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    text, seconds = _failure(lambda: dist.all_reduce(torch.ones(300_000)))
    assert f"rank {world_size - 1}" in text, text
    assert seconds < TIMEOUT_S + 2, seconds


def killed_during(rank, world_size, folder):
    """Killed from another thread, at no particular point of a long series of collectives."""
    _init(rank, world_size, folder)
    tensor = torch.ones(500_000)
    dist.all_reduce(tensor)
    if rank == world_size - 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    last = [time.monotonic()]

    def work():
        while True:
            last[0] = time.monotonic()
            dist.all_reduce(tensor.fill_(1.0))

    text, _ = _failure(work)
    assert f"rank {world_size - 1}" in text, text
    assert time.monotonic() - last[0] < TIMEOUT_S + 2


def absent(rank, world_size, folder):
    """A rank never comes: the others name it when the rendezvous ends."""
    os.environ["DBLP_CONNECT_TIMEOUT_S"] = "1.5"
    if rank == world_size - 1:
        return
    try:
        _init(rank, world_size, folder)
    except Exception as error:
        text = str(error)
    assert f"rank {world_size - 1} of {world_size} has not come to the rendezvous" in text, text
