"""Compression of a DDP model over another backend's process group, such as gloo's: to compare, and where UDP can't go.

The rounds are ``collectives/compression``'s own, with torch.distributed's collectives below them. They run on a process group of
their own, on an event loop on a thread of its own, in the order in which DDP's hook is called: the same on all ranks. Gradients
on a device are staged as the backend ``dblp`` stages them (``staging.py``): a round begins when its copy out has ended. What a
backend does not tell (bytes on the wire, delays of the network) is not known here either: adaptive methods sense from the times
of rounds.
"""

# No ``from __future__ import annotations``: DDP compares the hook's annotations with the types themselves.

import asyncio
import functools
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dblp.collectives.compression.base import Method
from dblp.collectives.report import Report
from dblp.collectives.torch.backend import DblpProcessGroup
from dblp.collectives.torch.buckets import Layouts
from dblp.collectives.torch.compression import (
    BucketParts,
    CompressedModel,
    check_alike,
    check_optimizer,
    check_real,
    method_of,
)
from dblp.collectives.torch.copied import LeftBehind, forget_copied, hooks_of
from dblp.collectives.torch.staging import take_departures
from dblp.collectives.torch.tensors import restore_all, stage
from dblp.collectives.torch.turns import Turns
from dblp.collectives.torch.work import DblpWork
from dblp.errors import ConfigError, DeadlineError, PeerError, UnsupportedError

Array = npt.NDArray[Any]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
"""gloo has no average: sums are divided here."""


class BorrowedGroup:
    """What ``compression.link.Link`` asks of a group, by torch.distributed. Called on the loop of its thread."""

    max_chunk_bytes = 0
    """Nothing is cut into chunks here: only rounds that may lose ask for it."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._rounds = 0
        self.rank, self.world_size = group.rank(), group.size()
        self.failure: BaseException | None = None

    def least_delay_s(self) -> float:
        """0: the backend does not tell."""
        return 0.0

    def fail(self, error: BaseException) -> None:
        """Later rounds raise it; the peers wait for theirs until their timeout, as the backend has no way to tell them."""
        self.failure = self.failure or error

    def all_reduce(
        self, array: Array, op: str = "sum", *, dtype: str | None = None, timeout_s: float | None = None
    ) -> asyncio.Task[Report]:
        """Reduce ``array`` (1-D) in place."""
        tensor = _tensor(array, dtype)
        if self.world_size == 1 or not array.size:
            return self._start("all_reduce", array.nbytes, None, _nothing)
        work = dist.all_reduce(tensor, _OPS[op], group=self._group, async_op=True)

        def finish() -> None:
            if op == "avg":
                tensor.div_(self.world_size)

        return self._start("all_reduce", array.nbytes, work, finish)

    def all_gather(
        self, output: Array | Sequence[Array], input: Array, *, timeout_s: float | None = None
    ) -> asyncio.Task[Report]:
        """Every rank's ``input``; where their lengths differ, all are sent as long as the longest."""
        outputs = np.split(output, self.world_size) if isinstance(output, np.ndarray) else list(output)
        most = max(part.size for part in outputs)
        if not most:
            return self._start("all_gather", 0, None, _nothing)
        padded = np.zeros(most, input.dtype)
        padded[: input.size] = input
        rooms = [np.empty(most, input.dtype) for _ in outputs]
        work = dist.all_gather(
            [torch.from_numpy(room) for room in rooms],
            torch.from_numpy(padded),
            group=self._group,
            async_op=True,
        )

        def finish() -> None:
            for part, room in zip(outputs, rooms, strict=True):
                part[...] = room[: part.size]

        return self._start("all_gather", input.nbytes, work, finish)

    def _start(
        self, collective: str, nbytes: int, work: Any, finish: Callable[[], None]
    ) -> asyncio.Task[Report]:
        self._rounds += 1
        number, loop = self._rounds, asyncio.get_running_loop()
        began = loop.time()

        async def run() -> Report:
            if self.failure is not None:
                raise self.failure
            if work is not None:
                await self._ended(work, collective)
            finish()
            return Report(
                round=number,
                collective=collective,
                algorithm=str(dist.get_backend(self._group)),
                reason="another backend's process group",
                nbytes=nbytes,
                world_size=self.world_size,
                duration_s=loop.time() - began,
            )

        return loop.create_task(run())

    async def _ended(self, work: Any, collective: str) -> None:
        """Wait for a backend's work without holding the loop up."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def tell(future: Future[Any]) -> None:
            try:
                future.value()
                error = None
            except RuntimeError as raised:
                error = self._failed(collective, raised)
            loop.call_soon_threadsafe(_settle, done, error)

        work.get_future().add_done_callback(tell)
        try:
            await asyncio.wait_for(done, self._timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"rank {self.rank}: {collective} of a compressed gradient did not end within {self._timeout_s:g} s; does every "
                "rank run, with the same model and method?",
                [rank for rank in range(self.world_size) if rank != self.rank],
            ) from None

    def _failed(self, collective: str, error: RuntimeError) -> PeerError:
        """The backend's own words name no rank; when a peer is silent they may come before this side's timeout."""
        backend = dist.get_backend(self._group)
        return PeerError(
            f"rank {self.rank}: {collective} of a compressed gradient failed in {backend}: {error}. Does every rank run, with "
            "the same model and method, told the same epochs?",
            [rank for rank in range(self.world_size) if rank != self.rank],
        )


class BorrowedCompression(LeftBehind, CompressedModel):
    """The compression of one model's gradients over another backend: what ``compress_ddp`` returns."""

    def __init__(
        self, model: DistributedDataParallel, method: Method, group: dist.ProcessGroup, timeout_s: float
    ) -> None:
        super().__init__(method)
        self._group = BorrowedGroup(group, timeout_s)
        self._timeout_s = timeout_s
        self._layouts = Layouts(model.module)
        self._sizes = self._layouts.sizes
        self._parts = BucketParts()
        self._turns = Turns()
        self._iterations, self._launched_all = 0, True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dblp-borrowed", daemon=True)
        self._thread.start()
        self._close = weakref.finalize(self, _stop, self._loop, self._thread)

    def close(self) -> None:
        """End its thread; the model's hook can't be called any more. Idempotent."""
        self._close()

    def start(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Called by the hook: average a bucket, in place."""
        if not self._close.alive:
            raise ConfigError("this compression was closed; wrap the model anew to train it further")
        if self._launched_all:
            self._iterations += 1
        self._launched_all = bucket.is_last()
        tensor, iteration = bucket.buffer(), self._iterations - 1
        parts = self._parts.of(bucket, self._layouts.of(bucket))
        item = stage(tensor, arithmetic=True)
        departures = take_departures()  # of this thread: the copy that has just been queued, if there is one
        work = DblpWork(
            "compressed all_reduce of a gradient",
            self._timeout_s,
            [tensor],
            functools.partial(restore_all, [item]) if item.copied else None,
        )

        def reduce() -> Awaitable[Report]:
            return self._compression.all_reduce(
                self._group,
                item.array,
                parts,
                timeout_s=self._timeout_s,
                iteration=iteration,
                dtype=item.dtype,
            )

        async def run() -> None:
            try:
                work.finish(await self._turns.start(departures, reduce), None)
            except Exception as error:
                work.finish(None, error)

        future: Future[torch.Tensor] = work.get_future().then(_only)
        asyncio.run_coroutine_threadsafe(run(), self._loop)
        return future


def compress_ddp(
    model: DistributedDataParallel,
    compression: Method | str,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = 300.0,
    optimizer: torch.optim.Optimizer | None = None,
) -> BorrowedCompression:
    """Compress the gradients of a DDP model whose process group is another backend's (gloo's), by a method or a string such as
    ``"netsense"``; ``dblp.attach`` is for dblp's own.

    Call it once, after wrapping the model and before the first backward pass, on all ranks alike, in the same order.
    ``process_group``: for the rounds, used by nothing else; by default a new one of the model's backend. ``timeout_s``: of each
    bucket, after which the backward pass raises. ``optimizer``: checked to have no momentum where the method brings it (``dgc``).
    Raises UnsupportedError for a model that is not wrapped, is on dblp's backend,
    or has a parameter whose gradient is not real and floating-point; ConfigError for what is no method, one that follows phases,
    a model that has a hook, or an optimiser that does not go with the method; MismatchError if ranks give different methods.
    """
    if not (isinstance(timeout_s, (int, float)) and 0.0 < timeout_s < float("inf")):
        raise ConfigError(f"timeout_s={timeout_s!r}: seconds above 0 are expected")
    if not isinstance(model, DistributedDataParallel):
        raise UnsupportedError(
            f"compress_ddp takes a model wrapped in DistributedDataParallel, not {type(model).__name__}"
        )
    if isinstance(model.process_group, DblpProcessGroup):
        raise UnsupportedError("this model is on the backend 'dblp': use dblp.attach(model, compression=...)")
    method = method_of(compression)
    check_optimizer(method, optimizer)
    if method.follows_phases:
        raise ConfigError(
            f"compression {method.name!r} follows phases, which dblp.attach decides: it runs on the backend 'dblp' only"
        )
    if hooks_of(model):
        raise ConfigError("this model has a communication hook, and DDP takes one: wrap it anew")
    check_real(model.module)
    group = process_group or _new_group(model.process_group, timeout_s)
    check_alike(method, group.rank(), group.size(), lambda vector: _agree(vector, group))
    borrowed = BorrowedCompression(model, method, group, timeout_s)
    forget_copied(model)
    model.register_comm_hook(borrowed, _hook)
    return borrowed


def _hook(state: BorrowedCompression, bucket: GradBucket) -> Future[torch.Tensor]:
    """DDP's hook; DDP requires the parameter's name."""
    return state.start(bucket)


def _only(future: Future[list[torch.Tensor]]) -> torch.Tensor:
    (tensor,) = future.value()
    return tensor


def _new_group(group: dist.ProcessGroup, timeout_s: float) -> dist.ProcessGroup:
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timedelta(seconds=timeout_s),
        backend=dist.get_backend(group),
        use_local_synchronization=True,
    )
    return made


def _agree(vector: npt.NDArray[np.float64], group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.from_numpy(vector), dist.ReduceOp.MAX, group=group)


def _tensor(array: Array, dtype: str | None) -> torch.Tensor:
    """A tensor on the array's memory."""
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _settle(done: asyncio.Future[None], error: BaseException | None) -> None:
    if not done.done():
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


def _nothing() -> None:
    pass


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(5.0)
    loop.close()
