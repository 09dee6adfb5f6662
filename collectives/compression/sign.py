"""Sign: one bit an element, with error feedback (EF-signSGD: Karimireddy et al., arXiv 1901.09847, algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dblp.collectives.compression.base import Array, Coded, Job
from dblp.collectives.compression.link import Bytes


@dataclass(frozen=True, slots=True)
class Sign(Coded):
    """Each parameter's gradient becomes its signs times its mean magnitude; a zero counts as positive.

    The residual is what makes it converge, so it cannot be switched off. Ranks' parts are averaged, not put to the vote.
    """

    name: ClassVar[str] = "sign"
    code_bits: ClassVar[int] = 1

    def room(self, job: Job) -> int:
        """A mean for each parameter, a bit for each element."""
        return self.head_bytes(job) + -(-job.bucket.size // 8)

    def head_bytes(self, job: Job) -> int:
        """The means."""
        return len(job.bucket.parts) * job.memory.dtype.itemsize

    def most(self, job: Job) -> int:
        """The same."""
        return self.room(job)

    def encode(self, job: Job) -> Bytes:
        """Means, then signs."""
        means = np.array(
            [
                np.abs(part).mean(dtype=np.float64) if part.size else 0.0
                for part in job.bucket.cut(job.values)
            ],
            job.memory.dtype,
        )
        positive = job.values >= 0
        job.values -= self._spread(job, means, positive)
        return np.concatenate([means.view(np.uint8), np.packbits(positive)])

    def decode(self, job: Job, body: Bytes, rank: int, out: Array) -> None:
        """Signs times means."""
        used = self.head_bytes(job)
        positive = np.unpackbits(body[used:], count=job.bucket.size).view(np.bool_)
        out += self._spread(job, body[:used].view(job.memory.dtype), positive)

    def _spread(self, job: Job, means: Array, positive: Array) -> Array:
        values = np.repeat(means, np.diff(job.bucket.bounds))
        np.negative(values, where=~positive, out=values)
        return values
