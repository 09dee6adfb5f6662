"""Scenarios: groups by the hundred, forks, and interpreters that end in the midst of something."""

# mypy: disable-error-code="attr-defined, union-attr, arg-type, index"
# torch.distributed's stubs miss names that it exports, and call every group and work optional.

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dblp
from dblp.collectives import engine
from tests.benchmarks.flatness import STEPS, Course, watch

LEAST_LEAK_BYTES = 32 * 1024
"""What each group may add to the resident memory: the allocator's noise over so few. A group that stays holds the arena of its
datagrams, a hundred times as much."""


def _init(rank, world_size, folder, timeout_s=20.0):
    faulthandler.enable()  # the stacks of one that hangs, when it is aborted
    dist.init_process_group(
        "dblp",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def many(rank, world_size, folder, kind, times):
    """``times`` groups made and destroyed, or rounds: nothing is left of them."""
    _init(rank, world_size, folder, timeout_s=60)
    # Not the last look: the peer may have left by then, and with it connections of the gloo group behind (torch 2.7 opens them).
    course = Course(kind, f"rank {rank}", watch(times, STEPS[kind])[:-1], 0.0)
    for what in ("descriptors", "threads"):
        least, most = course.spread(what)
        assert least == most, (what, course.looks)
    assert course.slope_bytes < LEAST_LEAK_BYTES, course.looks
    dist.destroy_process_group()


def forked(rank, world_size, folder):
    """A fork of a rank cannot use its group, and says so at once; the rank itself is none the worse, nor is the fork's end."""
    _init(rank, world_size, folder)
    dist.all_reduce(torch.ones(10))
    if pid := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        dist.all_reduce(tensor := torch.ones(10))
        assert tensor[0].item() == world_size
        dist.destroy_process_group()
        return
    faulthandler.dump_traceback_later(20, exit=True)  # a fork that hangs shows where
    try:
        dist.all_reduce(torch.ones(10))
    except dblp.ClosedError as error:
        text = str(error)
    assert f"process {os.getpid()} is a fork of it" in text and "after the fork" in text, text
    dist.destroy_process_group()
    dist.init_process_group("dblp", store=dist.HashStore(), rank=0, world_size=1)  # one of its own works
    dist.all_reduce(tensor := torch.ones(3))
    assert tensor.tolist() == [1.0] * 3
    faulthandler.cancel_dump_traceback_later()


def _late(rank):
    """Nobody meets this call."""
    return dist.all_reduce(torch.ones(100_000), async_op=True) if rank == 0 else None


def _chained(rank):
    if rank == 0:
        first = dist.all_reduce(torch.ones(1000), async_op=True).get_future()
        first.then(lambda _: dist.all_reduce(torch.ones(10)))


def _met(rank):
    return [dist.all_reduce(torch.ones(200_000), async_op=True) for _ in range(8)]


def _transfers(rank):
    peer = 1 - rank
    return [
        dist.irecv(torch.ones(100_000), peer),
        *(dist.isend(torch.ones(100_000), peer, tag=5) for _ in range(4)),
    ]


def _lossy(rank):
    works = [dist.group.WORLD.allreduce_lossy(torch.ones(100_000), dblp.Bounded(0.1)) for _ in range(4)]
    return [work.get_future().then(lambda _: time.sleep(0.01)) for work in works]


def _thread(rank):
    if rank == 0:
        threading.Thread(target=_quietly, args=(dist.barrier,), daemon=True).start()
        time.sleep(0.02)


def _backward(rank):
    model = DistributedDataParallel(torch.nn.Linear(300, 300))
    dblp.attach(model, dblp.Bounded(0.1))
    loss = model(torch.ones(2, 300)).sum()
    if rank == 0:
        threading.Thread(target=_quietly, args=(loss.backward,), daemon=True).start()
        time.sleep(0.02)
    return model


def _quietly(call):
    with contextlib.suppress(Exception):  # the interpreter ends, and takes the group with it
        call()


EXITS = (_late, _chained, _met, _transfers, _lossy, _thread, _backward)
"""What may be in flight when the interpreter ends."""


def _hogged():
    """From dblp's exit on nobody else gets the interpreter's lock: what dblp wakes then wakes in an interpreter that ends."""
    atexit.unregister(engine._stop_at_exit)
    atexit.register(sum, range(30_000_000))  # keeps the lock: a loop in C
    atexit.register(engine._stop_at_exit)  # runs before it


def _wait_at_last(works, said):
    """After dblp's own exit: an error, no hang. Then tells the other rank that it may leave."""
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            sys.stderr.write(f"{error}\n")
    said.touch()


def exit_waited_for(rank, world_size, folder):
    """A work that nobody meets is waited for when dblp has gone."""
    _init(rank, world_size, folder)
    dist.barrier()
    said = Path(folder, "said")
    if rank == 0:
        atexit.unregister(engine._stop_at_exit)
        works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(2)]
        atexit.register(_wait_at_last, works, said)
        atexit.register(engine._stop_at_exit)
    while rank == 1 and not said.exists():
        time.sleep(0.01)


def exit_in_flight(rank, world_size, folder, number, hogged=False):
    """The ``number``-th kind of work is in flight when the interpreter ends, at another moment on each rank."""
    _init(rank, world_size, folder)
    if hogged:
        _hogged()
    dist.barrier()
    left = EXITS[number % len(EXITS)](rank)
    time.sleep(0.003 * (number % 5) * (rank + 1))
    sys.modules[__name__ + ".left"] = left  # alive until the interpreter goes
