"""Random-k: elements that are drawn anew in each round, the same on all ranks (Stich et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dblp.collectives.compression.base import Array, Job, Summed, mean_of
from dblp.collectives.compression.entries import Indices
from dblp.collectives.compression.sparse import RATIO, share_of
from dblp.transport.spec import arg


@dataclass(frozen=True, slots=True)
class RandomK(Summed):
    """All ranks draw the same elements, so no index is sent, and the values are summed by an all-reduce."""

    name: ClassVar[str] = "randomk"
    ratio: float = arg("ratio", RATIO)
    """Share of a bucket's elements that is sent."""

    @property
    def withholds(self) -> bool:
        """What is not drawn."""
        return True

    def lanes(self, job: Job) -> tuple[int, str]:
        """The values, in the residual's type."""
        return share_of(job.bucket.size, self.ratio), job.memory.dtype.name

    def encode(self, job: Job) -> Array:
        """The drawn values."""
        indices = self._indices(job)
        lanes: Array = job.values[indices]
        job.values[indices] = 0
        return lanes

    def decode(self, job: Job, lanes: Array, ranks: int) -> Array:
        """The means at the drawn elements, zero elsewhere."""
        out = job.zeros()
        out[self._indices(job)] = mean_of(lanes.copy(), ranks)
        return out

    def _indices(self, job: Job) -> Indices:
        if "indices" not in job.notes:
            size, count = job.bucket.size, share_of(job.bucket.size, self.ratio)
            drawn = job.shared_rng().choice(size, count, replace=False, shuffle=False) if size else ()
            job.notes["indices"] = np.sort(np.asarray(drawn, np.int64))
        indices: Indices = job.notes["indices"]
        return indices
