"""What a method costs: processor time to encode and decode, bytes on the wire, and rounds at a rate."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.cli.bench.compression_net import CompressedRanks
from dblp.cli.bench.compression_plan import ROW, CompressionPlan
from dblp.collectives.compression.base import Bucket, Job, Method
from dblp.collectives.compression.link import Bytes, Link, OnLost
from dblp.collectives.compression.memory import Memory
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.reduction import DTYPES
from dblp.errors import LocalError

Array = npt.NDArray[Any]

REPEATS = 3
"""Times that encoding is timed; the median counts."""
NETWORK_ROUNDS = 2
"""Rounds at each rate, of which the last counts: the first one's congestion control starts from nothing."""
REFERENCE_SHARE, REFERENCE_RANK = 0.001, 4
"""Of ``torch.topk`` and of torch's PowerSGD hook."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """Processor time of one rank's round, in seconds."""

    compress_s: float
    """From the gradient to what is sent."""
    decompress_s: float
    """From what all ranks sent to the average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Rounds at one rate."""

    rate_bps: float
    round_s: float
    """Virtual seconds of the slowest rank, without processor time."""
    wire_bytes: int
    """What a rank sent, with dblp's headers and acknowledgements."""
    payload_bytes: int
    """What it put into its rounds, as papers count it."""


class _Mirror(Link):
    """A link of one rank that stands for several with the same gradient: exchanges cost nothing."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def sum(
        self, array: Array, op: str = "sum", dtype: str | None = None, *, lost: OnLost | None = None
    ) -> Awaitable[Array]:
        """As if all ranks had given the same."""
        if op == "sum" and array.dtype.kind == "f":
            array *= array.dtype.type(self._ranks)
        return _done(array)

    def gather(self, payload: Bytes) -> Awaitable[list[Bytes]]:
        """The same from all."""
        return _done([payload] * self._ranks)

    async def gather_uneven(self, payload: Bytes, least: int, most: int) -> Awaitable[list[Bytes]]:
        """The same."""
        return self.gather(payload)


async def _done(result: Any) -> Any:
    return result


def codec(text: str, plan: CompressionPlan) -> Codec:
    """Time a method's two ends, over exact rounds."""
    method, bucket = parse_compression(text), plan.bucket
    method.check(plan.ranks)
    memory, factors = Memory(bucket.size), dict[str, Array]()
    gradient = _gradient(bucket.size, 0)
    times: list[tuple[float, float]] = []
    for number in range(REPEATS + 1):  # the first warms up, and takes memory
        job = Job(
            bucket=bucket,
            memory=memory,
            gradient=gradient.copy(),
            kind=DTYPES["float32"],
            rank=0,
            world_size=plan.ranks,
            number=number,
            iteration=number,
            epoch=10**6,  # after every warm-up
            factors=factors,
        )
        times.append(asyncio.run(_timed(method, job, _Mirror(plan.ranks))))
    compress, decompress = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return Codec(compress_s=compress, decompress_s=decompress)


async def _timed(method: Method, job: Job, link: Link) -> tuple[float, float]:
    start = time.perf_counter()
    method.begin(job, job.gradient)
    await method.agree(job, link)
    sent = method.compress(job)
    compressed = time.perf_counter() - start
    received = await (await method.exchange(job, sent, link))
    start = time.perf_counter()
    method.decompress(job, received)
    return compressed, time.perf_counter() - start


def rounds(text: str, rate_bps: float, plan: CompressionPlan) -> Rounds:
    """Rounds of a method on the simulated star."""
    net = CompressedRanks(
        text,
        plan.policy,
        ranks=plan.ranks,
        rate_bps=rate_bps,
        delay_s=plan.delay_s,
        loss=plan.loss,
        seed=plan.seeds[0],
    )
    bucket, seconds, before, sent = plan.bucket, 0.0, net.totals, 0
    net.epoch(10**6)
    for number in range(NETWORK_ROUNDS):
        gradients = np.stack(
            [_gradient(bucket.size, plan.ranks * number + rank) for rank in range(plan.ranks)]
        )
        before, sent = net.totals, net.wire_bytes
        seconds, _ = net.average(gradients, bucket)
    totals, sent = net.totals, net.wire_bytes - sent
    net.close()
    return Rounds(
        rate_bps=rate_bps,
        round_s=seconds,
        wire_bytes=sent,
        payload_bytes=totals.payload_bytes - before.payload_bytes,
    )


def references(plan: CompressionPlan) -> dict[str, float]:
    """Seconds a million elements, of torch's own: ``topk`` of the magnitudes, and the PowerSGD hook with one rank."""
    import torch

    values = torch.from_numpy(_gradient(plan.bucket.size, 0))
    count = max(round(values.numel() * REFERENCE_SHARE), 1)
    topk = _median(lambda: torch.topk(values.abs(), count, sorted=False))
    return {
        f"torch.topk({REFERENCE_SHARE:g})": topk / values.numel() * 1e6,
        f"torch powerSGD_hook({REFERENCE_RANK})": _powersgd_hook(plan.bucket) / values.numel() * 1e6,
    }


def _median(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _powersgd_hook(bucket: Bucket) -> float:
    """Seconds of a call of torch's hook in a group of one rank: both its ends, and nothing on a network."""
    # In a process of its own, which ends without destructors: gloo's worker may hold the last reference to its group, and a
    # destructor that joins its own thread aborts.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_time_powersgd, args=(bucket, sender), daemon=True)
    child.start()
    sender.close()
    try:
        seconds: float = receiver.recv()
    except EOFError:
        raise LocalError(
            "the process that times torch's powerSGD_hook ended early; its message is above"
        ) from None
    finally:
        child.join()
    return seconds


def _time_powersgd(bucket: Bucket, sender: Connection) -> None:
    """In the process of its own."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    state = torchs.PowerSGDState(
        None, matrix_approximation_rank=REFERENCE_RANK, start_powerSGD_iter=2, min_compression_rate=1
    )
    state.iter = 2
    flat = torch.from_numpy(_gradient(bucket.size, 0))
    sender.send(_median(lambda: torchs.powerSGD_hook(state, _Bucket(flat.clone(), bucket)).wait()))
    os._exit(0)


class _Bucket:
    """What torch's hook asks of a bucket."""

    def __init__(self, flat: Any, bucket: Bucket) -> None:
        self._flat = flat
        pieces = flat.split([part.size for part in bucket.parts])
        self._parts = [piece.view(part.shape) for piece, part in zip(pieces, bucket.parts, strict=True)]

    def index(self) -> int:
        return 0

    def buffer(self) -> Any:
        return self._flat

    def gradients(self) -> list[Any]:
        return self._parts

    def is_last(self) -> bool:
        return False  # its counter of iterations need not go on


def _gradient(size: int, seed: int) -> npt.NDArray[np.float32]:
    """Heavy-tailed, as gradients are."""
    rng = np.random.default_rng([seed, size])
    values = rng.standard_normal(size, np.float32)
    values *= np.repeat(np.exp(rng.standard_normal(-(-size // ROW), np.float32)), ROW)[:size]
    values *= np.float32(0.003)  # about one in a hundred reaches the default list's threshold
    return values
