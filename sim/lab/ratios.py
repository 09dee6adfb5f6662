"""How many times faster one arm is than another of the same run: what claims are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dblp.sim.lab.arms import GLOO
from dblp.sim.lab.run import Block, Run

Record = Mapping[str, Any]
_FIELDS = {"p50": "p50_s", "p90": "p90_s", "p99": "p99_s", "burst_p50": "burst_p50_s"}
"""Fields of a ratio, and of the records that it is of."""


def ratios_of(run: Run, records: Sequence[Record]) -> list[dict[str, Any]]:
    """For each arm of dblp and each of gloo, by size: gloo's time over dblp's, so that above 1 dblp is faster.

    ``paired``: the median, over the blocks in order, of the ratio of the blocks' medians: less open to a drift of the host.
    ``wall``: of training runs.
    """
    return [_ratio(run, ours, theirs) for ours, theirs in _pairs(records)]


def _pairs(records: Sequence[Record]) -> Iterator[tuple[Record, Record]]:
    for ours in (record for record in records if not record["arm"].startswith(GLOO)):
        for theirs in (record for record in records if record["arm"].startswith(GLOO)):
            if ours["bytes"] == theirs["bytes"]:
                yield ours, theirs


def _ratio(run: Run, ours: Record, theirs: Record) -> dict[str, Any]:
    training = ours["bytes"] is None
    return {
        "arm": ours["arm"],
        "bytes": ours["bytes"],
        "than": theirs["arm"],
        **{name: _over(theirs[field], ours[field]) for name, field in _FIELDS.items()},
        "paired": None if training else paired(_blocks(run, theirs), _blocks(run, ours)),
        "wall": _over(theirs["wall_s"], ours["wall_s"]) if training else None,
    }


def _over(theirs: float | None, ours: float | None) -> float | None:
    return theirs / ours if theirs and ours else None


def _blocks(run: Run, record: Record) -> list[Block]:
    return [block for block in run.blocks if (block.arm, block.nbytes) == (record["arm"], record["bytes"])]


def paired(theirs: Sequence[Block], ours: Sequence[Block]) -> float:
    """The median ratio of the medians of blocks that were each other's neighbours."""
    pairs = zip(theirs, ours, strict=False)
    return float(np.median([np.median(left.seconds) / np.median(right.seconds) for left, right in pairs]))
