"""A network without protocol, in virtual time: a round takes its delay and its bytes over the rate.

For experiments of thousands of rounds, where only the order of the times matters; ``tests.benchmarks.netsense`` runs the same
methods over real endpoints. An all-gather takes m + (N - 1) P / B, for the least delay m, payloads of P bytes and links of B; an
all-reduce of S bytes 2 m + 2 (N - 1) / N S / B. Headers are counted in B. Rounds begin when the last rank has come, and their
data leave one round after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.reduction import Op, Reducer, dtype_of, parse_op
from dblp.collectives.report import Report

Array = npt.NDArray[Any]

HEADERS = 1464 / 1400
"""Bytes on the wire over payload."""


class IdealNetwork:
    """The ranks' meeting place. ``rate_bps`` may be changed between rounds."""

    def __init__(self, ranks: int, rate_bps: float, delay_s: float) -> None:
        self.ranks, self.rate_bps, self.delay_s = ranks, rate_bps, delay_s
        self.groups = [IdealGroup(self, rank) for rank in range(ranks)]
        self._meetings: dict[int, list[tuple[int, Any, asyncio.Future[None]]]] = {}
        self._free_at = 0.0

    async def meet(self, number: int, rank: int, what: Any, crossings: int, nbytes: float) -> list[Any]:
        """Wait for all ranks and for the round's time; what they brought, by rank."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        guests = self._meetings.setdefault(number, [])
        guests.append((rank, what, done))
        if len(guests) == self.ranks:
            del self._meetings[number]
            moving_s = 8.0 * HEADERS * nbytes / self.rate_bps
            self._free_at = max(self._free_at, loop.time()) + moving_s
            at = self._free_at + crossings * self.delay_s
            for _, _, future in guests:
                loop.call_at(at, future.set_result, None)
        await done
        return [thing for _, thing, _ in sorted(guests, key=lambda guest: guest[0])]


class IdealGroup:
    """What ``link.Link`` asks of a group, for one rank."""

    def __init__(self, network: IdealNetwork, rank: int) -> None:
        self._network = network
        self.rank, self.world_size = rank, network.ranks
        self._rounds = 0
        self.max_chunk_bytes = 1408

    def least_delay_s(self) -> float:
        """As the network is."""
        return self._network.delay_s

    def fail(self, error: Exception) -> None:
        """There is nobody to tell: the experiment ends."""

    def all_reduce(
        self, array: Array, op: str | Op = "sum", *, dtype: str | None = None, timeout_s: float | None = None
    ) -> asyncio.Task[Report]:
        """Reduce in place, in rank order."""
        kind = dtype_of(array, dtype)
        reducer = Reducer(kind, parse_op(op), self.world_size)

        async def run(number: int) -> Report:
            share = 2.0 * (self.world_size - 1) / self.world_size
            parts = await self._network.meet(number, self.rank, array.copy(), 2, share * array.nbytes)
            total = parts[0].copy()
            for part in parts[1:]:
                reducer.accumulate(total, part, final=False)
            reducer.finish(total)
            array[...] = total
            return self._report(number, "all_reduce", array.nbytes)

        return self._start(run)

    def all_gather(
        self, output: Array | Sequence[Array], input: Array, *, timeout_s: float | None = None
    ) -> asyncio.Task[Report]:
        """Collect all ranks' arrays."""

        outputs = output.reshape(self.world_size, -1) if isinstance(output, np.ndarray) else output

        async def run(number: int) -> Report:
            most = max(out.nbytes for out in outputs)
            copied = input.copy()
            parts = await self._network.meet(number, self.rank, copied, 1, (self.world_size - 1) * most)
            for out, part in zip(outputs, parts, strict=True):
                out[...] = part
            return self._report(number, "all_gather", input.nbytes)

        return self._start(run)

    def _start(self, run: Any) -> asyncio.Task[Report]:
        self._rounds += 1
        task: asyncio.Task[Report] = asyncio.get_running_loop().create_task(run(self._rounds))
        return task

    def _report(self, number: int, collective: str, nbytes: int) -> Report:
        return Report(
            round=number,
            collective=collective,
            algorithm="ideal",
            reason="no protocol",
            nbytes=nbytes,
            world_size=self.world_size,
            duration_s=0.0,
        )
