"""The rounds that one bucket needs, on a group: their bytes, and one deadline for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.group import Group
from dblp.collectives.report import Report
from dblp.errors import MismatchError

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

_LEAST_SECONDS = 1e-3
"""What a round gets whose deadline has passed: it ends with an error that names the ranks it waits for."""


class Link:
    """What a method may call while it exchanges one bucket. All rounds are exact; each is posted by the call itself."""

    def __init__(self, group: Group, timeout_s: float) -> None:
        """``timeout_s``: for all rounds together, from now on."""
        self._group = group
        self._clock = asyncio.get_running_loop().time
        self.began = self._clock()
        self._deadline = self.began + timeout_s
        self.reports: list[Report] = []
        """Of the rounds that have ended."""
        self.payload_bytes = 0
        """What this rank put into its rounds, as a paper counts the size of a gradient."""

    @property
    def rank(self) -> int:
        """This rank."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self._group.world_size

    @property
    def now_s(self) -> float:
        """The loop's clock."""
        return self._clock()

    def least_delay_s(self) -> float:
        """Least round trip of the network to the rank that is farthest off; 0 where the transport does not know it."""
        return self._group.least_delay_s()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the link was made."""
        return self._clock() - self.began

    def sum(self, array: Array, op: str = "sum", dtype: str | None = None) -> Awaitable[Array]:
        """Reduce ``array`` (1-D) in place over all ranks; the result is the array. ``dtype``: as in ``Group.all_reduce``."""
        task = self._group.all_reduce(array, op, dtype=dtype, timeout_s=self._left())
        return self._ended(task, array.nbytes, lambda: array)

    def gather(self, payload: Bytes) -> Awaitable[list[Bytes]]:
        """The payloads of all ranks, by rank; they are equally long on all of them."""
        return self._gather(payload, [payload.size] * self.world_size)

    async def gather_uneven(self, payload: Bytes, least: int, most: int) -> Awaitable[list[Bytes]]:
        """The same where the ranks' payloads differ in length, which is told first: await once to post, again for the result.
        ``least``, ``most``: bytes that a payload can have; raises MismatchError that names a rank with another number, before
        memory is taken."""
        sizes = np.empty(self.world_size, np.int64)
        task = self._group.all_gather(sizes, np.array([payload.size], np.int64), timeout_s=self._left())
        await self._ended(task, 8, lambda: sizes)
        for rank in np.flatnonzero((sizes < least) | (sizes > most)):
            raise MismatchError(
                f"rank {rank} announces {sizes[rank]} bytes of a compressed gradient, {least} to {most} make sense: "
                "use one method, with the same options, on all ranks",
                [int(rank)],
            )
        return self._gather(payload, sizes.tolist())

    @staticmethod
    def collect(*results: Awaitable[Any]) -> Awaitable[list[Any]]:
        """Several results as one list."""
        return asyncio.gather(*results)

    def _gather(self, payload: Bytes, sizes: list[int]) -> Awaitable[list[Bytes]]:
        outputs = [np.empty(size, np.uint8) for size in sizes]
        task = self._group.all_gather(outputs, payload, timeout_s=self._left())
        return self._ended(task, payload.nbytes, lambda: outputs)

    def _ended(self, task: asyncio.Task[Report], nbytes: int, result: Callable[[], Any]) -> Awaitable[Any]:
        self.payload_bytes += nbytes

        async def ended() -> Any:
            self.reports.append(await task)
            return result()

        # Where an earlier round of the bucket fails, nobody waits for this one: its error is no news then.
        result_task = asyncio.get_running_loop().create_task(ended())
        result_task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return result_task

    def _left(self) -> float:
        return max(self._deadline - self._clock(), _LEAST_SECONDS)
