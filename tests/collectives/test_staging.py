"""The exact reduce leg's staging: a window of chunks that no row may leave before it has been reduced."""

from __future__ import annotations

import numpy as np
import pytest

from dblp.collectives.group import Group
from tests.collectives.worlds import run_network

CHUNK = 1408
EARLY_CHUNKS = 46
"""Of 64 KiB."""


@pytest.mark.parametrize("beyond", [0, 42, 43, 44, 45])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_comes_early_overwrites_no_row(beyond: int, seed: int) -> None:
    """A message that is a burst longer than what may come early leaves whole before it hears of the window. Two bursts were too
    short for it by up to a burst: its last chunks took the rows of the first ones, before a slower peer's had come."""
    size = (EARLY_CHUNKS + beyond) * CHUNK // 4

    async def member(group: Group) -> bool:
        whole = np.arange(group.world_size * size, dtype=np.float32) % 1021
        own = np.empty(size, np.float32)
        right = True
        for _ in range(2):
            await group.reduce_scatter(own, whole * (group.rank + 1))
            right &= bool((own == 6 * whole[group.rank * size : (group.rank + 1) * size]).all())
        return right

    settings = {"early_bytes": 65_536, "window_bytes": 65_536}
    assert run_network(member, 3, seed=seed, impair="loss(0.05),reorder(0.2,1ms)", **settings) == [True] * 3
