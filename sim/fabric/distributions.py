"""Sizes of flows: distributions that clusters were found to have."""

from __future__ import annotations

import itertools

import numpy as np

from dblp.sim.fabric.graph import Ints

WEBSEARCH = (
    (0, 0.0), (10_000, 0.15), (20_000, 0.2), (30_000, 0.3), (50_000, 0.4), (80_000, 0.53), (200_000, 0.6),
    (1_000_000, 0.7), (2_000_000, 0.8), (5_000_000, 0.9), (10_000_000, 0.97), (30_000_000, 1.0),
)  # fmt: skip
"""Flow sizes of a web search cluster, bytes and share up to there (Alizadeh et al., DCTCP, SIGCOMM 2010), in the points that
later simulations of it use; linear in between."""
BURST_BYTES = ((1_500, 0.0), (15_000, 0.5), (60_000, 0.7), (500_000, 1.0))
"""Microbursts: over 70 % last at most tens of us (Zhang et al., IMC 2017), that is 60 kB at 10 Gb/s."""
DISTRIBUTIONS = {"websearch": WEBSEARCH, "burst": BURST_BYTES}


def mean_size(sizes: str, fixed: int) -> float:
    """Mean of a distribution of flow sizes, bytes."""
    if sizes == "fixed":
        return float(fixed)
    points = DISTRIBUTIONS[sizes]
    pairs = itertools.pairwise(points)
    return float(sum((high - low) * (small + large) / 2.0 for (small, low), (large, high) in pairs))


def draw_sizes(sizes: str, fixed: int, count: int, rng: np.random.Generator) -> Ints:
    """Flow sizes from a distribution, bytes."""
    if sizes == "fixed":
        return np.full(count, fixed)
    nbytes, shares = np.array(DISTRIBUTIONS[sizes]).T
    drawn: Ints = np.maximum(np.interp(rng.random(count), shares, nbytes), 1).astype(np.int64)
    return drawn
