"""The failure drill, one cell: a group of three, its last rank fails in some way, a collective is called.

Each rank writes what came of it as a line of JSON to its output; the survivors then make a new group of their own in the same
processes. ``tests.benchmarks.drill`` runs all cells, and says which are as they should be.
"""

# mypy: disable-error-code="attr-defined, union-attr, arg-type, index"
# torch.distributed's stubs miss names that it exports, and call every group and work optional.

import faulthandler
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dblp
from dblp.transport.core import Core
from dblp.transport.impair import Impairer, parse_impair

RESULT = "result: "
"""Begins the line of a rank's output that tells what came of its call."""
TIMEOUT_S = 1.5
"""Of the calls."""
COUNT = 120_000
"""Elements: 480 kB, more than what a call may leave behind in the background."""


def _init(store, rank, world_size, *, connect_timeout_s=30.0, **config):
    dist.init_process_group(
        "dblp",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
        pg_options=dblp.TransportConfig(connect_timeout_s=connect_timeout_s, **config),
    )


# What is called: ``call(rank, world_size, async_op)`` returns a work or None.


def _parts(world_size, size=COUNT):
    return [torch.ones(size) for _ in range(world_size)]


CALLS = {
    "all_reduce": lambda rank, size, wait: dist.all_reduce(torch.ones(COUNT), async_op=wait),
    "all_reduce, bounded": lambda rank, size, wait: _lossy(wait),
    "reduce": lambda rank, size, wait: dist.reduce(torch.ones(COUNT), 0, async_op=wait),
    "reduce_scatter": lambda rank, size, wait: dist.reduce_scatter(
        torch.ones(COUNT), _parts(size), async_op=wait
    ),
    "all_gather": lambda rank, size, wait: dist.all_gather(_parts(size), torch.ones(COUNT), async_op=wait),
    "broadcast": lambda rank, size, wait: dist.broadcast(torch.ones(COUNT), size - 1, async_op=wait),
    "gather": lambda rank, size, wait: dist.gather(
        torch.ones(COUNT), _parts(size) if rank == 0 else None, 0, async_op=wait
    ),
    "scatter": lambda rank, size, wait: dist.scatter(
        torch.ones(COUNT), _parts(size) if rank == size - 1 else None, size - 1, async_op=wait
    ),
    "all_to_all": lambda rank, size, wait: dist.all_to_all(_parts(size), _parts(size), async_op=wait),
    "barrier": lambda rank, size, wait: dist.barrier(async_op=wait),
    "send": lambda rank, size, wait: _send(rank, size, wait),
    "recv": lambda rank, size, wait: _recv(rank, size, wait),
}
DDP_CALLS = {"DDP backward": None, "DDP backward, bounded": 0.1}
"""The budget under which the gradients are averaged; None: exact."""


GROUP_CALLS = ("a new group", "destroy", "init again")
"""What is done to groups when the fault is there: another one is made and used for the first time, the group is destroyed with a
round in flight, it is aborted and all ranks make it anew on the same store."""
_later = {"impair": "loss(0)"}
"""What this rank's ports do from now on; a rank that was cut off stays so in groups that it makes later."""


def _new_group(rank, size, store):
    config = dblp.TransportConfig(connect_timeout_s=TIMEOUT_S, **_later)
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S), pg_options=config)
    dist.all_reduce(tensor := torch.ones(COUNT), group=group)
    assert tensor[0].item() == size


def _destroy(rank, size, store):
    work = dist.all_reduce(torch.ones(COUNT), async_op=True)
    if store is None:  # the ranks are well: who leaves a round that goes on fails it
        work.wait()
    dist.destroy_process_group()
    work.wait()


def _init_again(rank, size, store):
    dist.group.WORLD.abort()
    dist.destroy_process_group()
    _init(store, rank, size, connect_timeout_s=TIMEOUT_S, **_later)
    dist.group.WORLD.set_timeout(timedelta(seconds=TIMEOUT_S))
    dist.all_reduce(tensor := torch.ones(COUNT))
    assert tensor[0].item() == size


_GROUP_CALLS = dict(zip(GROUP_CALLS, (_new_group, _destroy, _init_again), strict=True))


def _lossy(wait):
    work = dist.group.WORLD.allreduce_lossy(torch.ones(COUNT), dblp.Bounded(0.1))
    return work if wait else _finish(work)


def _send(rank, size, wait):
    """The others send to the last rank, which receives from all of them."""
    if rank < size - 1:
        return (dist.isend if wait else dist.send)(torch.ones(COUNT), size - 1)
    return _with_all(dist.irecv if wait else dist.recv, size)


def _recv(rank, size, wait):
    """The others receive from the last rank, which sends to all of them."""
    if rank < size - 1:
        return (dist.irecv if wait else dist.recv)(torch.ones(COUNT), size - 1)
    return _with_all(dist.isend if wait else dist.send, size)


def _with_all(call, size):
    for work in [call(torch.ones(COUNT), peer) for peer in range(size - 1)]:
        _finish(work)


def _prepare(call, store):
    """What is called when the fault is there: ``run(rank, world_size, wait)``."""
    if call in GROUP_CALLS:
        return lambda rank, size, wait: _GROUP_CALLS[call](rank, size, store)
    if call not in DDP_CALLS:
        return lambda rank, size, wait: _finish(CALLS[call](rank, size, wait))
    model = DistributedDataParallel(torch.nn.Linear(400, 300))
    if DDP_CALLS[call] is not None:
        dblp.attach(model, dblp.Bounded(DDP_CALLS[call]))
    model(torch.ones(2, 400)).sum().backward()
    output = model(torch.ones(2, 400)).sum()

    def run(rank, size, wait):
        output.backward()
        assert model is not None  # a graph does not keep its DDP alive, and without it nothing is reduced

    return run


def _finish(work):
    """Blocking calls have nothing to wait for: they return None, or a rank."""
    if hasattr(work, "wait"):
        work.wait()


# What goes wrong.


def _cut(*, out=False, into=False):
    """From now on nothing that this rank sends arrives, or nothing arrives here, or both."""
    session = dist.group.WORLD.session
    endpoint = session.endpoint

    async def cut():
        if out:
            endpoint.port.impairer = Impairer(parse_impair("loss(1)"), np.random.default_rng(0))
            _later["impair"] = "loss(1)"
        if into:
            Core.receive_burst = lambda self, batch, *, now: None  # type: ignore[method-assign]

    session.engine.run(cut)


def _die():
    """The engine's thread ends as it does where a callback runs out of memory: by what no caller of ours catches."""
    engine = dist.group.WORLD.session.engine

    async def die():
        raise SystemExit("the engine dies on purpose")

    engine.submit(die, lambda result, error: None)
    while engine.alive:
        time.sleep(0.001)


FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "cut off": lambda: _cut(out=True, into=True),
    "unheard": lambda: _cut(out=True),
    "deaf": lambda: _cut(into=True),
    "engine died": _die,
}
"""What the last rank does to itself: "unheard" is a one-way partition of what it sends, "deaf" of what it is sent."""
STORE_GONE = "store gone"
"""The process that serves the store is killed; the ranks are well."""


def _serve_store(folder, world_size):
    """Rank 0 starts the store in a process of its own."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    Path(folder, "port.part").write_text(str(store.port))
    Path(folder, "port.part").rename(Path(folder, "port"))
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(0)


def _store(folder, world_size):
    path = Path(folder, "port")
    while not path.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(path.read_text()), world_size, is_master=False)


def drill(rank, world_size, folder, call, fault, wait):
    """``call`` of ``CALLS``, ``DDP_CALLS`` or ``GROUP_CALLS``; ``fault`` of ``FAULTS`` or "store gone"; ``wait``: async."""
    faulthandler.enable()  # the stacks of a cell that hangs, when it is aborted
    victim = world_size - 1
    server = _serve_store(folder, world_size) if rank == 0 else 0
    store = _store(folder, world_size)
    _init(store, rank, world_size, **_later)
    run = _prepare(call, None if call == "destroy" and fault == STORE_GONE else store)
    pids = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    dist.group.WORLD.set_timeout(timedelta(seconds=TIMEOUT_S))
    if fault == STORE_GONE and rank == 0:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    if rank == victim and fault in FAULTS:
        time.sleep(0.1)
        FAULTS[fault]()
    else:
        time.sleep(0.3)
    outcome = _outcome(lambda: run(rank, world_size, wait))
    sys.stdout.write(f"{RESULT}{json.dumps(outcome)}\n")
    sys.stdout.flush()
    if not outcome["error"] and fault != STORE_GONE:
        time.sleep(2 * TIMEOUT_S)  # it needs nothing of the failed rank: it stays while others find out
    # A rank whose engine died makes a new one with its next group, and takes part again.
    all_well = fault in (STORE_GONE, "engine died")
    if rank != victim or all_well:
        failed = bool(outcome["error"]) or fault != STORE_GONE
        _again(rank, world_size if all_well else victim, folder, abort=failed)
    if rank == 0 and fault == "stopped":
        os.kill(pids[victim], signal.SIGKILL)
    if rank == 0 and fault != STORE_GONE:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    if rank == victim and not all_well and dist.is_initialized():
        dist.group.WORLD.abort()
    os._exit(0)  # how an interpreter ends is tested elsewhere, and costs more than the cell


def _outcome(run):
    begun = time.monotonic()
    try:
        run()
        text = ""
    except Exception as error:
        text = str(error) or type(error).__name__
    return {"error": text, "seconds": time.monotonic() - begun}


def _again(rank, world_size, folder, *, abort):
    """The survivors leave the broken group and go on in a new one, in the same processes. A healthy group is left without an
    abort, which would end what another rank is still in the midst of."""
    if dist.is_initialized():
        if abort:
            dist.group.WORLD.abort()
        dist.destroy_process_group()
    _init(dist.FileStore(f"{folder}/again", world_size), rank, world_size)
    dist.all_reduce(tensor := torch.full((1000,), float(rank + 1)))
    assert tensor[0].item() == world_size * (world_size + 1) / 2
    dist.destroy_process_group()
