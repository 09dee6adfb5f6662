"""Half types: each element in two bytes, averaged as such."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from dblp.collectives.compression.base import Array, Job, Summed
from dblp.collectives.compression.entries import to_half
from dblp.collectives.reduction import narrow_bfloat16, widen_bfloat16
from dblp.transport.spec import FLAG, arg


@dataclass(frozen=True, slots=True)
class _Half(Summed):
    """Ranks send the rounded values and keep what rounding took away; sums are made in float32 and rounded once."""

    op: ClassVar[str] = "avg"
    dtype: ClassVar[str]
    feedback: bool = arg("feedback", FLAG, default=True)
    """Keep what rounding takes away; false spares a float32 array of the gradient's size."""

    @property
    def keeps(self) -> bool:
        """As the field says."""
        return self.feedback

    def lanes(self, job: Job) -> tuple[int, str]:
        """One a value."""
        return job.bucket.size, self.dtype

    def encode(self, job: Job) -> Array:
        """The rounded values."""
        lanes = self.narrow(job.values)
        job.values -= self.widen(lanes)
        return lanes

    def decode(self, job: Job, lanes: Array, ranks: int) -> Array:
        """They are an average already."""
        return self.widen(lanes).astype(job.memory.dtype)

    def decode_lost(self, job: Job, lanes: Array) -> Array:
        """They are wide already."""
        return lanes.astype(job.memory.dtype, copy=False)

    @abstractmethod
    def narrow(self, values: Array) -> Array:
        """Round to the nearest finite value of the type."""

    @abstractmethod
    def widen(self, lanes: Array) -> Array:
        """float32; exact."""


@dataclass(frozen=True, slots=True)
class Float16(_Half):
    """IEEE half precision: 11 bits, up to 65504. What lies beyond is sent over several rounds."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[str] = "float16"

    def narrow(self, values: Array) -> Array:
        """To nearest even, cut off at the largest."""
        return to_half(values)

    def widen(self, lanes: Array) -> Array:
        """By numpy."""
        wide: Array = lanes.astype("float32")
        return wide


@dataclass(frozen=True, slots=True)
class BFloat16(_Half):
    """8 bits with float32's range."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[str] = "bfloat16"

    def narrow(self, values: Array) -> Array:
        """To nearest even, cut off at the largest."""
        most = 3.3895313892515355e38  # rounding would give infinity above it
        return narrow_bfloat16(values.clip(-most, most).astype("float32"))

    def widen(self, lanes: Array) -> Array:
        """By their bits."""
        return widen_bfloat16(lanes)
