"""int8 and int4: each block of elements as whole multiples of a step, rounded at random (QSGD: Alistarh et al., arXiv 1610.02132,
section 3.1), and summed without decompression where that can be (THC: Li et al., arXiv 2302.08545).

Stochastic rounding. With L levels and a block's scale s, the step is s / L, and x becomes floor(x L / s + u) for a u drawn from
[0, 1): its mean is x L / s.

Two exchanges. ``gather``: each rank has scales of its own and all L = 2^(bits-1) - 1 levels; everybody gathers everybody's codes.
``sum``: ranks first agree on the largest scale of each block (MAX), then an all-reduce adds up the codes as they are. So that N
codes fit a lane, L is 127 // N for int8, and 15 // 2N for int4, where two lanes share a byte and none may carry into the other.
``auto`` takes the sum where that leaves at least ``LEAST_LEVELS``.

Differences from QSGD: a block's scale is its largest magnitude, not its L2 norm, so that levels do not depend on the block's
length; codes have a fixed length; and what rounding took away is kept (``feedback=false``: discarded, as in the paper). Kept, it
is at most a step of each element. Differences from THC: no Hadamard rotation (nearly the same is to be had by ``block``), no
table of levels that are not evenly spaced, and the sum has as many bits as a code.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from dblp.collectives.compression.base import Array, Gathered, Job, mean_of
from dblp.collectives.compression.link import Bytes, Link
from dblp.errors import ConfigError
from dblp.transport.spec import FLAG, Kind, arg, choice

Codes = npt.NDArray[np.int16]

LEAST_LEVELS = 7
"""Levels on each side of zero that ``auto`` wants of a sum: those of int4."""
_SLAB = 1 << 18
"""Elements that are worked on at a time, so that temporary arrays stay in the cache."""
BLOCK = Kind(
    "a whole number of at least 2 elements",
    int,
    lambda value: isinstance(value, int) and 2 <= value <= 2**24,
    str,
)


@dataclass(frozen=True, slots=True)
class _Quantised(Gathered):
    """Subclasses say how codes lie in bytes."""

    own_levels: ClassVar[int]
    """L where each rank has its own scales."""
    exchange_by: str = arg("exchange", choice("auto", "sum", "gather"), default="auto")
    block: int = arg("block", BLOCK, default=1024)
    """Elements with one scale."""
    feedback: bool = arg("feedback", FLAG, default=True)

    @property
    def keeps(self) -> bool:
        """As the field says."""
        return self.feedback

    @abstractmethod
    def sum_levels(self, ranks: int) -> int:
        """L where the codes of so many ranks are added up."""

    @abstractmethod
    def pack(self, codes: Codes, shift: int) -> Bytes:
        """Codes in -L..L as bytes; ``shift``: L of a sum."""

    @abstractmethod
    def unpack(self, packed: Bytes, size: int, shift: int) -> Codes:
        """Codes, or their sum; ``shift``: what ``pack`` has added to each, over all ranks."""

    def check(self, world_size: int) -> None:
        """A sum must leave a level."""
        if self.exchange_by == "sum" and self.sum_levels(world_size) < 1:
            raise ConfigError(
                f"{self.name}(exchange=sum): the codes of {world_size} ranks don't fit a lane; use exchange=gather"
            )

    def sums(self, world_size: int) -> bool:
        """True if the codes are added up as they are."""
        return self.exchange_by == "sum" or (
            self.exchange_by == "auto" and self.sum_levels(world_size) >= LEAST_LEVELS
        )

    async def agree(self, job: Job, link: Link) -> None:
        """The scale of each block: its own, or the largest of all ranks."""
        scales = _scales(job.values, self.block)
        if self.sums(job.world_size):
            if job.spoiled:
                scales.fill(np.nan)  # NaN wins in MAX: all ranks learn of it before they encode
            scales = await link.sum(scales, "max")
            job.spoiled |= not np.isfinite(scales).all()
        job.notes["scales"] = scales

    def compress(self, job: Job) -> Array:
        """Codes with a header and the rank's scales in front, or codes alone."""
        if not self.sums(job.world_size):
            return Gathered.compress(self, job)
        if job.spoiled:
            return np.empty(0, np.uint8)
        return self.pack(self._codes(job, self.sum_levels(job.world_size)), self.sum_levels(job.world_size))

    async def exchange(self, job: Job, sent: Array, link: Link) -> Awaitable[list[Array]]:
        """An all-reduce of the codes, or an all-gather."""
        if self.sums(job.world_size):
            return link.collect(link.sum(self._lanes(sent)))
        return link.gather(sent)

    def decompress(self, job: Job, received: list[Array]) -> Array:
        """The sum of the codes, times the step."""
        if not self.sums(job.world_size) or job.spoiled:
            return Gathered.decompress(self, job, received)
        out = job.zeros()
        self._add_sum(job, received[0], job.world_size, out)
        return mean_of(out, job.world_size)

    def own_part(self, job: Job, sent: Array) -> Array:
        """Its codes, times the step."""
        if not self.sums(job.world_size) or job.spoiled:
            return Gathered.own_part(self, job, sent)
        out = job.zeros()
        self._add_sum(job, sent, 1, out)
        return out

    def encode(self, job: Job) -> Bytes:
        """Scales and codes."""
        scales: Array = job.notes["scales"]
        codes = self.pack(self._codes(job, self.own_levels), 0)
        return np.concatenate([scales.view(np.uint8), codes])

    def decode(self, job: Job, body: Bytes, rank: int, out: Array) -> None:
        """Codes times the rank's own steps."""
        scale_bytes = _rows(job.bucket.size, self.block) * job.memory.dtype.itemsize
        scales = body[:scale_bytes].view(job.memory.dtype)
        codes = self.unpack(body[scale_bytes:], job.bucket.size, 0)
        _add_scaled(out, codes, scales / self.own_levels, self.block)

    def room(self, job: Job) -> int:
        """Scales and codes of all elements."""
        scales = _rows(job.bucket.size, self.block) * job.memory.dtype.itemsize
        return scales + self.code_bytes(job.bucket.size)

    def most(self, job: Job) -> int:
        """The same."""
        return self.room(job)

    @abstractmethod
    def code_bytes(self, size: int) -> int:
        """Bytes of so many codes."""

    def _lanes(self, packed: Bytes) -> Array:
        return packed

    def _add_sum(self, job: Job, lanes: Array, ranks: int, out: Array) -> None:
        levels = self.sum_levels(job.world_size)
        codes = self.unpack(lanes, job.bucket.size, ranks * levels)
        _add_scaled(out, codes, job.notes["scales"] / levels, self.block)

    def _codes(self, job: Job, levels: int) -> Codes:
        """Round at random; the values become what rounding took away."""
        codes = np.empty(job.bucket.size, np.int16)
        steps = job.notes["scales"] / levels
        rng, block = job.own_rng(), self.block
        rows = max(_SLAB // block, 1)
        for row in range(0, len(steps), rows):
            low, high = row * block, min((row + rows) * block, job.bucket.size)
            part = job.values[low:high]
            step = np.repeat(steps[row : row + rows], block)[: part.size]
            with np.errstate(all="ignore"):
                exact = part / step
            exact[step < np.finfo(step.dtype).tiny] = 0  # so small a block waits until it has grown
            exact += rng.random(part.size, dtype=np.float32)
            np.clip(np.floor(exact, out=exact), -levels, levels, out=exact)
            codes[low:high] = exact
            exact *= step
            part -= exact
        return codes


@dataclass(frozen=True, slots=True)
class Int8(_Quantised):
    """A byte an element."""

    name: ClassVar[str] = "int8"
    own_levels: ClassVar[int] = 127

    def sum_levels(self, ranks: int) -> int:
        """Sums lie in -127..127."""
        return 127 // ranks

    def code_bytes(self, size: int) -> int:
        """One each."""
        return size

    def pack(self, codes: Codes, shift: int) -> Bytes:
        """As int8."""
        return codes.astype(np.int8).view(np.uint8)

    def unpack(self, packed: Bytes, size: int, shift: int) -> Codes:
        """Sign included, so ``shift`` is of no use."""
        return packed[:size].view(np.int8).astype(np.int16)

    def _lanes(self, packed: Bytes) -> Array:
        return packed.view(np.int8)


@dataclass(frozen=True, slots=True)
class Int4(_Quantised):
    """Two elements a byte."""

    name: ClassVar[str] = "int4"
    own_levels: ClassVar[int] = 7

    def sum_levels(self, ranks: int) -> int:
        """Sums of codes from 0 on lie in 0..15."""
        return 15 // (2 * ranks)

    def code_bytes(self, size: int) -> int:
        """Half a byte each."""
        return -(-size // 2)

    def pack(self, codes: Codes, shift: int) -> Bytes:
        """From 0 on: own codes lie in 1..15 then, those of a sum in 0..2L."""
        padded = np.zeros(codes.size + codes.size % 2, np.uint8)
        padded[: codes.size] = codes + (shift or 8)
        packed: Bytes = padded[::2] | padded[1::2] << np.uint8(4)
        return packed

    def unpack(self, packed: Bytes, size: int, shift: int) -> Codes:
        """Both halves of each byte."""
        codes = np.empty((packed.size, 2), np.int16)
        codes[:, 0], codes[:, 1] = packed & 15, packed >> 4
        return codes.reshape(-1)[:size] - (shift or 8)


def _rows(size: int, block: int) -> int:
    return -(-size // block)


def _scales(values: Array, block: int) -> Array:
    """Largest magnitude of each block, the last one perhaps short."""
    if not values.size:
        return np.empty(0, values.dtype)
    starts = np.arange(0, values.size, block)
    scales: Array = np.maximum(np.maximum.reduceat(values, starts), -np.minimum.reduceat(values, starts))
    return scales


def _add_scaled(out: Array, codes: Codes, steps: Array, block: int) -> None:
    """``out += codes * step of their block``, in place."""
    rows = max(_SLAB // block, 1)
    for row in range(0, len(steps), rows):
        low, high = row * block, min((row + rows) * block, out.size)
        step = np.repeat(steps[row : row + rows], block)[: high - low]
        step *= codes[low:high]
        out[low:high] += step
