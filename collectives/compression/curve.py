"""How a gradient's energy is spread: what its largest elements hold, from a sample. What a controller of ratios predicts with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dblp.collectives.compression.base import Array, Bucket

RATIOS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
"""Shares of a parameter's elements for which it is told, the largest first."""
_SAMPLE = 4096
"""Elements of a parameter that are looked at."""


def energy_curve(bucket: Bucket, values: Array) -> tuple[float, ...]:
    """For each of ``RATIOS``: the share of the energy of ``values`` ((size,)) that stays behind where so many of each parameter's
    largest elements go; 0.0 for zeros."""
    behind, total = np.zeros(len(RATIOS)), 0.0
    if not np.isfinite(values.sum(dtype=np.float64)):
        return (0.0,) * len(RATIOS)
    for part in bucket.cut(values):
        if part.size:
            squares = _sampled_squares(part)
            weight = part.size / squares.size
            total += weight * float(squares.sum())
            behind += weight * _tails(squares)
    if not 0.0 < total < np.inf:
        return (0.0,) * len(RATIOS)
    return tuple(np.clip(behind / total, 0.0, 1.0).tolist())


def _sampled_squares(part: Array) -> npt.NDArray[np.float64]:
    """Squares of evenly spaced elements, the largest first."""
    sample = part[:: max(part.size // _SAMPLE, 1)].astype(np.float64)
    squares: npt.NDArray[np.float64] = np.sort(sample * sample)[::-1]
    return squares


def _tails(squares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sums of what is left without the largest; between two elements of the sample, in proportion."""
    held = np.concatenate([[0.0], np.cumsum(squares)])
    places = np.array(RATIOS) * squares.size
    return np.asarray(held[-1] - np.interp(places, np.arange(held.size), held))
