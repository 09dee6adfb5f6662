"""Which elements of a gradient are the largest: exactly, or by a threshold that a sample gives.

A full sort of 25 million elements takes seconds; two passes in blocks that stay in the cache take tens of milliseconds.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]

SAMPLE_SHARE = 0.01
"""Of the elements that a threshold is estimated from (DGC's released code)."""
LEAST_SAMPLE = 4096
"""Elements that a threshold is estimated from at least, if there are as many: it costs nothing and spares refinements."""
LOWEST = 0.8
"""A threshold will do if it selects so many times the target; of what is above the target the largest are taken."""
REFINEMENTS = 10
"""Times that a threshold is lowered (DGC's released code)."""
_BLOCK = 1 << 15
"""Elements of a pass: 128 KiB of float32 and as much scratch stay in a core's second-level cache."""
_SMALL = 1 << 16
"""Elements up to which a partition of all is as quick as a sample."""
_EXACT_SAMPLE = 1 << 15
"""Sampled elements for an exact selection: the bound that they give is safe in nearly all cases, and checked in all."""


def above(values: Array, threshold: float) -> Indices:
    """Indices, ascending, of the elements other than zero whose magnitude is at least ``threshold``."""
    least = max(threshold, float(np.finfo(values.dtype).smallest_subnormal))
    bound = values.dtype.type(least)
    magnitudes, mask = np.empty(_BLOCK, values.dtype), np.empty(_BLOCK, np.bool_)
    found = []
    for low in range(0, values.size, _BLOCK):
        block = values[low : low + _BLOCK]
        count = block.size
        np.abs(block, out=magnitudes[:count])
        np.greater_equal(magnitudes[:count], bound, out=mask[:count])
        found.append(np.flatnonzero(mask[:count]) + low)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def largest(values: Array, count: int) -> Indices:
    """Indices, ascending, of the ``count`` elements with the largest magnitudes; fewer if more would be zeros.

    Exact. A bound is taken from a sample so that about twice as many lie above it; if at least ``count`` do, they hold the
    largest, and only they are partitioned.
    """
    if count <= 0:
        return np.empty(0, np.int64)
    if values.size > _SMALL and count < values.size // 4:
        sample = np.abs(values[:: values.size // _EXACT_SAMPLE])
        rank = min(ceil(2 * count * sample.size / values.size) + 8, sample.size)
        candidates = above(values, float(np.partition(sample, sample.size - rank)[sample.size - rank]))
        if candidates.size >= count:
            return best_of(values, candidates, count)
    return best_of(values, above(values, 0.0), count)


def sampled(values: Array, count: int, rng: np.random.Generator, *, share: float = SAMPLE_SHARE) -> Indices:
    """Indices, ascending, of about ``count`` elements with large magnitudes, never more (Lin et al., arXiv 1712.01887, and the
    released code).

    The threshold is what selects as large a share of a strided sample from a random start: ``share`` of the elements, so many
    that two of them are expected to be selected, or ``LEAST_SAMPLE``. While it selects fewer than ``LOWEST`` times ``count``, it
    is lowered by that factor, up to ``REFINEMENTS`` times; where it selects too many, the largest of them are taken.
    """
    if count <= 0 or count >= values.size:
        return above(values, 0.0) if count > 0 else np.empty(0, np.int64)
    wanted = max(ceil(values.size * share), ceil(2 * values.size / count), LEAST_SAMPLE)
    stride = max(values.size // wanted, 1)
    sample = np.abs(values[rng.integers(stride) :: stride])
    rank = max(min(ceil(sample.size * count / values.size), sample.size), 1)
    threshold = float(np.partition(sample, sample.size - rank)[sample.size - rank])
    found = above(values, threshold)
    for _ in range(REFINEMENTS):
        if found.size >= LOWEST * count or threshold == 0.0:
            break
        threshold *= LOWEST
        found = above(values, threshold)
    return best_of(values, found, count)


def best_of(values: Array, candidates: Indices, count: int) -> Indices:
    """The ``count`` largest of the candidates, ascending."""
    if candidates.size <= count:
        return candidates
    order = np.argpartition(np.abs(values[candidates]), candidates.size - count)
    return np.sort(candidates[order[candidates.size - count :]])
