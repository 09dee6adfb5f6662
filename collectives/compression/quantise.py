"""int8 and int4: each block of elements as whole multiples of a step, rounded at random (QSGD: Alistarh et al., arXiv 1610.02132,
section 3.1), and summed without decompression where that can be (THC: Li et al., arXiv 2302.08545).

Stochastic rounding. With L levels and a block's scale s, the step is s / L, and x becomes floor(x L / s + u) for a u drawn from
[0, 1): its mean is x L / s.

Two exchanges. ``gather``: each rank has scales of its own and all L = 2^(bits-1) - 1 levels; everybody gathers everybody's codes.
``sum``: ranks first agree on the largest scale of each block (MAX), then an all-reduce adds up the codes as they are. So that N
codes fit a lane, L is 127 // N for int8, and 7 // N for int4, where a byte is a + 16 b of two signed codes: its sum is that of
their sums, which come apart again as long as they lie in -7..7. A contribution that is lost adds zero to both.
``auto`` takes the sum where that leaves at least ``LEAST_LEVELS``.

Differences from QSGD: a block's scale is its largest magnitude, not its L2 norm, so that levels do not depend on the block's
length; codes have a fixed length; and what rounding took away is kept (``feedback=false``: discarded, as in the paper). Kept, it
is at most a step of each element. Differences from THC: no Hadamard rotation (``block`` bounds what one large element does to
the others' steps), no table of levels that are not evenly spaced, and the sum has as many bits as a code.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from dblp.collectives.compression.base import Array, Coded, Gathered, Job, mean_of, note_lost
from dblp.collectives.compression.link import Bytes, Link
from dblp.errors import ConfigError
from dblp.transport.spec import FLAG, Kind, arg, choice

Codes = npt.NDArray[np.int16]

LEAST_LEVELS = 7
"""Levels on each side of zero that ``auto`` wants of a sum: those of int4."""
_SLAB = 1 << 18
"""Elements that are worked on at a time, so that temporary arrays stay in the cache."""
BLOCK = Kind(
    "2 to 2^24 elements",
    int,
    lambda value: isinstance(value, int) and 2 <= value <= 2**24,
    str,
)


@dataclass(frozen=True, slots=True)
class _Quantised(Coded):
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
    def pack(self, codes: Codes) -> Bytes:
        """Codes in -L..L as bytes."""

    @abstractmethod
    def unpack(self, packed: Bytes, size: int) -> Codes:
        """Codes, or their sum, of bytes or of the sum of bytes."""

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
        return self.pack(self._codes(job, self.sum_levels(job.world_size)))

    async def exchange(self, job: Job, sent: Array, link: Link) -> Awaitable[list[Array]]:
        """An all-reduce of the codes, or an all-gather."""
        if self.sums(job.world_size):
            return link.collect(link.sum(sent.view(np.int8), lost=note_lost(job)))
        return await Gathered.exchange(self, job, sent, link)

    def decompress(self, job: Job, received: list[Array]) -> Array:
        """The sum of the codes, times the step."""
        if not self.sums(job.world_size):
            return Gathered.decompress(self, job, received)
        out = job.zeros()
        if job.spoiled:
            out.fill(np.nan)
            return out
        self._add_sum(job, received[0].view(np.uint8), out)
        return mean_of(out, job.world_size)

    def own_part(self, job: Job, sent: Array) -> Array:
        """Its codes, times the step."""
        if not self.sums(job.world_size) or job.spoiled:
            return Gathered.own_part(self, job, sent)
        out = job.zeros()
        self._add_sum(job, sent, out)
        return out

    def uncounted(self, job: Job, sent: Array) -> Array | None:
        """Codes that were not counted, times the step. Any sum of different ranks' codes fits their lane."""
        if not self.sums(job.world_size):
            return Gathered.uncounted(self, job, sent)
        if "lost" not in job.notes or job.spoiled:
            return None
        out = job.zeros()
        self._add_sum(job, job.notes["lost"].astype(np.int8).view(np.uint8), out)
        return out

    def encode(self, job: Job) -> Bytes:
        """Scales and codes."""
        scales: Array = job.notes["scales"]
        codes = self.pack(self._codes(job, self.own_levels))
        return np.concatenate([scales.view(np.uint8), codes])

    def decode(self, job: Job, body: Bytes, rank: int, out: Array) -> None:
        """Codes times the rank's own steps."""
        scale_bytes = self.head_bytes(job)
        scales = body[:scale_bytes].view(job.memory.dtype)
        codes = self.unpack(body[scale_bytes:], job.bucket.size)
        _add_scaled(out, codes, scales / self.own_levels, self.block)

    def room(self, job: Job) -> int:
        """Scales and codes of all elements."""
        return self.head_bytes(job) + -(-job.bucket.size * self.code_bits // 8)

    def head_bytes(self, job: Job) -> int:
        """The scales."""
        return _rows(job.bucket.size, self.block) * job.memory.dtype.itemsize

    def most(self, job: Job) -> int:
        """The same."""
        return self.room(job)

    def _add_sum(self, job: Job, lanes: Bytes, out: Array) -> None:
        levels = self.sum_levels(job.world_size)
        codes = self.unpack(lanes, job.bucket.size)
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
    code_bits: ClassVar[int] = 8

    def sum_levels(self, ranks: int) -> int:
        """Sums lie in -127..127."""
        return 127 // ranks

    def pack(self, codes: Codes) -> Bytes:
        """As int8."""
        return codes.astype(np.int8).view(np.uint8)

    def unpack(self, packed: Bytes, size: int) -> Codes:
        """From int8."""
        return packed[:size].view(np.int8).astype(np.int16)


@dataclass(frozen=True, slots=True)
class Int4(_Quantised):
    """Two elements a byte."""

    name: ClassVar[str] = "int4"
    own_levels: ClassVar[int] = 7
    code_bits: ClassVar[int] = 4

    def sum_levels(self, ranks: int) -> int:
        """Sums lie in -7..7."""
        return 7 // ranks

    def pack(self, codes: Codes) -> Bytes:
        """a + 16 b of two codes, as int8: in -119..119."""
        padded = np.zeros(codes.size + codes.size % 2, np.int8)
        padded[: codes.size] = codes
        packed: Bytes = (padded[::2] + np.int8(16) * padded[1::2]).view(np.uint8)
        return packed

    def unpack(self, packed: Bytes, size: int) -> Codes:
        """a is the low half with its sign, b what is left of the byte without it."""
        codes = np.empty((packed.size, 2), np.int16)
        both = packed.view(np.int8).astype(np.int16)
        codes[:, 0] = ((both + 8) & 15) - 8
        codes[:, 1] = (both - codes[:, 0]) >> 4
        return codes.reshape(-1)[:size]


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
