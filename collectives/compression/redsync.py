"""RedSync: the largest elements of each parameter, by a threshold between the mean and the largest magnitude (Fang, Fu, Yang and
Hsieh, "RedSync: Reducing Synchronization Traffic for Distributed Deep Learning", arXiv 1808.04357, algorithm 3).

Differences from the paper: what a threshold selects beyond the target is cut by magnitude, so that all ranks' payloads have one
length, where the paper sends up to twice as many; a threshold is not kept for later rounds; values are sent as they are, not as
their mean with one sign; small parameters are selected from like all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dblp.collectives.compression.base import Job
from dblp.collectives.compression.entries import Indices
from dblp.collectives.compression.selection import above, best_of, largest
from dblp.collectives.compression.sparse import INDICES, RATIO, VALUES, Sparse, share_of
from dblp.transport.spec import arg

_HALVINGS = 20
"""Of the interval between mean and largest magnitude, at most: float32 tells apart no more thresholds that matter."""
_MOST = 2
"""A threshold will do if it selects at most so many times the target (algorithm 3: between k and 2k)."""


@dataclass(frozen=True, slots=True)
class RedSync(Sparse):
    """Top-k of each parameter without a sort."""

    name: ClassVar[str] = "redsync"
    ratio: float = arg("ratio", RATIO)
    """Share of each parameter's elements that is sent."""
    values: str = arg("values", VALUES, default="full")
    indices: str = arg("indices", INDICES, default="plain")

    def target(self, job: Job) -> int:
        """The sum over the parameters."""
        return sum(share_of(part.size, self.ratio) for part in job.bucket.parts)

    def select(self, job: Job) -> Indices:
        """The largest of each."""
        found = [np.empty(0, np.int64)]
        cuts = zip(job.bucket.parts, job.bucket.bounds.tolist(), job.bucket.cut(job.values), strict=False)
        for part, low, flat in cuts:
            found.append(by_bisection(flat, share_of(part.size, self.ratio)) + low)
        return np.concatenate(found)


def by_bisection(values: npt.NDArray[Any], count: int) -> Indices:
    """Indices, ascending, of the ``count`` elements with the largest magnitudes; fewer if more would be zeros.

    The threshold is searched for by halving between the mean and the largest magnitude until it selects ``count`` to
    ``_MOST * count``; where the mean selects fewer (more than half of the magnitudes lie below it), the selection is exact.
    """
    if count <= 0 or not values.size:
        return np.empty(0, np.int64)
    magnitudes = np.abs(values)
    mean, most = float(magnitudes.mean(dtype=np.float64)), float(magnitudes.max())
    low, high, threshold = 0.0, 1.0, mean
    if np.count_nonzero(magnitudes >= values.dtype.type(mean)) < count:
        return largest(values, count)
    for _ in range(_HALVINGS):
        middle = low + (high - low) / 2
        selected = np.count_nonzero(magnitudes >= values.dtype.type(mean + middle * (most - mean)))
        if selected < count:
            high = middle
            continue
        low, threshold = middle, mean + middle * (most - mean)
        if selected <= _MOST * count:
            break
    return best_of(values, above(values, threshold), count)
