"""How soon a change of the network's rate shows in what a method sends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

SHOWS = 1.5
"""Factor by which the ratio must have changed (as ``tests/benchmarks/netsense.py`` measures it)."""
BEFORE = 10
"""Rounds before a change whose mean is what it is measured against."""


def reactions(ratios: Sequence[float], rates_bps: Sequence[float]) -> list[float]:
    """For each change of the rate, the rounds, its own the first, until the ratio is half as much again as before, or two thirds
    of it; NaN where it never is before the next change. Both are of the same rounds."""
    sent, rates = np.asarray(ratios, float), np.asarray(rates_bps, float)
    changes = (np.flatnonzero(np.diff(rates)) + 1).tolist()
    ends = [*changes[1:], len(rates)][: len(changes)]
    return [_reaction(sent, rates, at, end) for at, end in zip(changes, ends, strict=True)]


def _reaction(sent: np.ndarray, rates: np.ndarray, at: int, end: int) -> float:
    before = sent[max(at - BEFORE, 0) : at].mean()
    up = rates[at] > rates[at - 1]
    there = np.flatnonzero(sent[at:end] >= SHOWS * before if up else sent[at:end] <= before / SHOWS)
    return float(there[0] + 1) if len(there) else math.nan
