"""How soon a change of the network's rate shows in what a method sends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

BEFORE = 10
"""Rounds before a change whose mean is what it is measured against."""


def reactions(ratios: Sequence[float], rates_bps: Sequence[float]) -> list[float]:
    """For each change of the rate, the rounds, its own the first, until the ratio has come half way, in the logarithm, of the
    factor by which the rate changed; NaN where it never does before the next change. Both are of the same rounds."""
    sent, rates = np.asarray(ratios, float), np.asarray(rates_bps, float)
    changes = (np.flatnonzero(np.diff(rates)) + 1).tolist()
    ends = [*changes[1:], len(rates)]
    return [_reaction(sent, rates, at, end) for at, end in zip(changes, ends, strict=True)]


def _reaction(sent: np.ndarray, rates: np.ndarray, at: int, end: int) -> float:
    factor = rates[at] / rates[at - 1]
    moved = np.log(sent[at:end] / sent[max(at - BEFORE, 0) : at].mean()) / math.log(factor)
    there = np.flatnonzero(moved >= 0.5)
    return float(there[0] + 1) if len(there) else math.nan
