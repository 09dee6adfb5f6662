"""The rounds that one bucket needs, on a group: their bytes, and one deadline for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dblp.collectives.blocks import Blocks
from dblp.collectives.compression.lossy import of_sums
from dblp.collectives.group import Group
from dblp.collectives.report import Report
from dblp.collectives.uncounted import Uncounted
from dblp.errors import MismatchError
from dblp.transport.config import CHUNK_ALIGN_BYTES
from dblp.transport.policy import Policy

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]
OnLost = Callable[[Array], None]
"""``lost(values)``: lanes that no result has, (lanes,), in the sum before division, float32 or float64."""

_LEAST_SECONDS = 1e-3
"""What a round gets whose deadline has passed: it ends with an error that names the ranks it waits for."""


class ExactRounds(Protocol):
    """What compression asks of a group while nothing may be lost; ``Group`` is one, and so is whoever stands in for it."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """Ranks of the group."""

    @property
    def max_chunk_bytes(self) -> int:
        """The largest chunk of its messages, in bytes; 0 where nothing is cut."""

    def least_delay_s(self) -> float:
        """Least round trip of the network; 0: not known."""

    def fail(self, error: Exception) -> None:
        """The rounds that follow raise ``error``."""

    def all_reduce(
        self, array: Array, op: str = "sum", *, dtype: str | None = None, timeout_s: float | None = None
    ) -> asyncio.Task[Report]:
        """Reduce ``array`` in place, see ``Group.all_reduce``."""

    def all_gather(
        self, output: Array | Sequence[Array], input: Array, *, timeout_s: float | None = None
    ) -> asyncio.Task[Report]:
        """Every rank's ``input``, see ``Group.all_gather``."""


class Link:
    """What a method may call while it exchanges one bucket; each round is posted by the call itself. All rounds are exact but
    sums with ``lost`` and gathers of blocks, where there is a policy."""

    def __init__(self, group: ExactRounds, timeout_s: float, policy: Policy | None = None) -> None:
        """``timeout_s``: for all rounds together, from now on; ``policy``: one that loses, or None."""
        self._group = group
        self._policy = policy
        self._clock = asyncio.get_running_loop().time
        self.began = self._clock()
        self._deadline = self.began + timeout_s
        self.reports: list[Report] = []
        """Of the rounds that have ended."""
        self.payload_bytes = 0
        """What this rank put into its rounds, as a paper counts the size of a gradient."""

    @property
    def _lossy(self) -> Group:
        """The group, where a policy lets its rounds lose something: ``Compression`` has checked that it can."""
        assert isinstance(self._group, Group)
        return self._group

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

    def sum(
        self, array: Array, op: str = "sum", dtype: str | None = None, *, lost: OnLost | None = None
    ) -> Awaitable[Array]:
        """Reduce ``array`` (1-D) in place over all ranks; the result is the array. ``dtype``: as in ``Group.all_reduce``.
        ``lost``: the round may lose chunks, and is told at its end what of this rank was not counted; integers are codes then."""
        if lost is None or self._policy is None:
            task = self._group.all_reduce(array, op, dtype=dtype, timeout_s=self._left())
            return self._ended(task, array.nbytes, lambda: array)
        told, uncounted = lost, Uncounted(array.size, np.float64 if array.dtype == np.float64 else np.float32)

        def result() -> Array:
            if uncounted.values is not None:
                told(uncounted.values)
            return array

        policy = of_sums(self._policy)
        task = self._lossy.all_reduce(
            array, op, policy=policy, carry=uncounted, dtype=dtype, codes=True, timeout_s=self._left()
        )
        return self._ended(task, array.nbytes, result)

    async def tell_blocks(self, own: Blocks, most: int) -> list[Blocks]:
        """How the payloads of all ranks lie, by rank. ``most``: bytes that one can have; raises MismatchError that names a rank
        whose payload makes no sense, before memory is taken."""
        told = np.empty((self.world_size, 3), np.int64)
        numbers = np.array([own.count, own.chunk_bytes, own.head_bytes], np.int64)
        task = self._group.all_gather(told, numbers, timeout_s=self._left())
        await self._ended(task, numbers.nbytes, lambda: told)
        for rank, (count, chunk, head) in enumerate(told.tolist()):
            fits = 0 < chunk <= self._group.max_chunk_bytes and chunk % CHUNK_ALIGN_BYTES == 0
            if not fits or not (0 <= count <= most and 0 < head <= most and count * chunk + head <= most):
                raise MismatchError(
                    f"rank {rank} announces {count} blocks of {chunk} bytes and {head} more of a compressed gradient, which make "
                    "no sense: use one method, with the same options, on all ranks",
                    [rank],
                )
        return [Blocks(*row) for row in told.tolist()]

    def gather_blocks(
        self, payload: Bytes, layouts: Sequence[Blocks]
    ) -> Awaitable[tuple[list[Bytes], list[Bools]]]:
        """The payloads of all ranks, by rank, and which chunks of each count: (chunks,), the same on all ranks; where
        those of the heads do not, the round was skipped."""
        assert self._policy is not None
        outputs = [np.zeros(layout.nbytes, np.uint8) for layout in layouts]
        task = self._lossy.gather_blocks(outputs, payload, layouts, self._policy, timeout_s=self._left())

        def result() -> tuple[list[Bytes], list[Bools]]:
            counted = [np.ones(layout.chunks, np.bool_) for layout in layouts]
            for rank, chunks in task.result().uncounted.items():
                counted[rank][chunks] = False
            return outputs, counted

        return self._ended(task, payload.nbytes, result)

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
