"""A large exact all-reduce of a device tensor, cut into segments: copies out, rounds and copies back run beside each other.

Every rank cuts alike, by the tensor's size, so a segment is a round of its own. Only exact reductions may be cut: a budget
applies to what a rank sends in a whole round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dblp.collectives.group import Group
from dblp.collectives.report import Report
from dblp.collectives.torch import staging
from dblp.collectives.torch.operations import op_name, stage_operand
from dblp.collectives.torch.staging import Accelerator, Arrival, Departure, take_departures
from dblp.collectives.torch.tensors import Staged
from dblp.collectives.torch.turns import departed


class SegmentedReduction:
    """The segments of one tensor on their way. Made on the caller's thread, which it does not hold up."""

    def __init__(self, accelerator: Accelerator, tensor: torch.Tensor, op: Any) -> None:
        """Queue the copies out. Raises UnsupportedError for what cannot be reduced."""
        self._op = op_name(op)
        self._tensor = tensor.detach()
        self._dense = accelerator.dense(tensor)
        self._accelerator = accelerator
        self._before = take_departures()
        self._items: list[tuple[Staged, Sequence[Departure]]] = []
        for segment in torch.split(self._dense.view(-1), staging.SEGMENT_BYTES // tensor.element_size()):
            item = stage_operand(segment, op)
            self._items.append((item, take_departures()))
        self._arrival: Arrival | None = None
        self._error: Exception | None = None

    async def begin(self, group: Group, timeout_s: float) -> Awaitable[Report]:
        """Begin each segment's round when it is there; what ends with the last of them."""
        await departed(self._before)
        rounds: list[asyncio.Task[Report]] = []
        for item, departures in self._items:
            await departed(departures)
            round_ = group.all_reduce(item.array, self._op, timeout_s=timeout_s, dtype=item.dtype)
            round_.add_done_callback(partial(self._copy_back, item))
            rounds.append(round_)
        return _joined(rounds)

    def restored(self) -> list[Arrival]:
        """The last copy back, once all rounds have ended; raises what went wrong in one."""
        if self._error is not None:
            raise self._error
        if self._dense.data_ptr() != self._tensor.data_ptr():
            self._arrival = Arrival(self._accelerator, self._accelerator.copy_back(self._tensor, self._dense))
        return [self._arrival] if self._arrival is not None else []

    def _copy_back(self, item: Staged, round_: asyncio.Task[Report]) -> None:
        if round_.cancelled() or round_.exception() is not None:
            return
        try:
            self._arrival = item.restore()
        except Exception as error:  # in a callback, which has no caller
            self._error = error


async def _joined(rounds: Sequence[asyncio.Task[Report]]) -> Report:
    """All rounds as one report: sums, and the time from the begin of the last to the end of all."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    reports = await asyncio.gather(*rounds)
    sums = {
        name: sum(getattr(report, name) for report in reports)
        for name in (
            "nbytes",
            "chunks_sent",
            "chunks_resent",
            "chunks_received",
            "chunks_duplicate",
            "bytes_sent",
        )
    }
    longest = max(report.duration_s for report in reports)
    return replace(reports[0], duration_s=max(loop.time() - begun, longest), **sums)
