"""Random numbers: splitmix64 (Steele, Lea, Flood, OOPSLA 2014), one state a world."""

from __future__ import annotations

import numpy as np

from dblp.sim.fabric.kernel.access import random
from dblp.sim.fabric.kernel.compiled import inlined
from dblp.sim.fabric.kernel.state import World

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)
_UNIT = 1.0 / (1 << 53)


@inlined
def mixed(value: np.uint64) -> np.uint64:
    """Spread the bits of a number over all others: splitmix64's finaliser, a hash."""
    value = (value ^ (value >> _S30)) * _FIRST
    value = (value ^ (value >> _S27)) * _SECOND
    return value ^ (value >> _S31)


@inlined
def unit(w: World) -> float:
    """Uniform in [0, 1)."""
    random(w)[0] += _STEP
    return float(mixed(random(w)[0]) >> _S11) * _UNIT


@inlined
def below(w: World, bound: int) -> int:
    """Uniform integer in [0, bound)."""
    return int(unit(w) * bound)
