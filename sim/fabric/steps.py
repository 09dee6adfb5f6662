"""Rounds of the exact engine: what each rank reduces, plainly or compressed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dblp.collectives.compression.base import Bucket, Part
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.compression.rounds import Compression, Totals
from dblp.collectives.group import Group
from dblp.collectives.report import Report
from dblp.errors import DblpError
from dblp.sim.fabric.scenario import WorkloadSpec
from dblp.transport.policy import Policy

WIDTH = 256
"""Columns of the matrix that a compressed gradient is."""


class Rounds:
    """One group's rounds, one after another. Gradients are normal random numbers; computing costs the virtual time that the
    workload says, compressing none."""

    def __init__(
        self, load: WorkloadSpec, groups: Sequence[Group], policy: Policy, seed: int, timeout_s: float
    ) -> None:
        self._load, self._groups, self._policy = load, groups, policy
        self._seed, self._timeout_s = seed, timeout_s
        self._bucket = Bucket([Part("weight", (max(load.size // 4 // WIDTH, 1), WIDTH))])
        method = parse_compression(load.compression) if load.compression else None
        self._compressions = [Compression(method, seed=seed) for _ in groups] if method else []
        self._sent = Totals()
        self.ratios: list[float] = []
        """Share of the gradient's bytes that a rank put into each round, indices included; 1: all; NaN of one that failed."""
        self._missing, self._chunks = 0, 0  # of all messages, as their receivers report them
        self._failed = False

    async def run(self, number: int) -> float:
        """One round on all ranks, and its time; NaN if it failed."""
        loop = asyncio.get_running_loop()
        data = self._gradients(number)
        began = loop.time()
        await asyncio.sleep(self._load.compute)
        calls = [self._call(rank, values, number) for rank, values in enumerate(data)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, DblpError):
                raise result
            if isinstance(result, Report):
                self._missing += result.missing_chunks
                self._chunks += result.chunks_received + result.missing_chunks
        if self._compressions:
            self.ratios.append(self._share())
        failed = any(isinstance(result, DblpError) for result in results)
        self._failed |= failed
        return math.nan if failed else loop.time() - began

    def _gradients(self, number: int) -> list[npt.NDArray[np.float32]]:
        rng = np.random.default_rng([self._seed, number])
        size = self._bucket.size if self._compressions else self._load.size // 4
        return [rng.standard_normal(size, np.float32) for _ in self._groups]

    @property
    def missing_share(self) -> float:
        """Share of the chunks that ranks went on without; NaN if a round failed: what had come of it, nobody reports."""
        return math.nan if self._failed else self._missing / max(self._chunks, 1)

    async def _call(self, rank: int, values: npt.NDArray[np.float32], number: int) -> Report:
        if not self._compressions:
            return await self._groups[rank].all_reduce(values, "sum", policy=self._policy)
        return await self._compressions[rank].all_reduce(
            self._groups[rank], values, self._bucket, timeout_s=self._timeout_s, iteration=number
        )

    def _share(self) -> float:
        """Of the last round; NaN if it failed."""
        before, self._sent = self._sent, self._compressions[0].totals
        dense = self._sent.dense_bytes - before.dense_bytes
        return (self._sent.payload_bytes - before.payload_bytes) / dense if dense else math.nan
