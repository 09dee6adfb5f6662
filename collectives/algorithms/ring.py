"""All-reduce by a ring: N - 1 steps that reduce, N - 1 that gather; each rank talks to its two neighbours only.

Step s of the reduction sends shard r - s to the right and adds what comes from the left into shard r - s - 1;
after it rank r owns shard r + 1, complete (Patarasuk and Yuan, 2009, bandwidth optimal all-reduce). Pipelined by runs
of chunks, see ``flow``.

The order of the sum is that of the ring, starting at a different rank for each shard: fixed, so repeatable bit for bit, but
not the bits of ``direct``. Half types are rounded at each hop, which is why ``auto`` does not choose a ring for them.

Under a bound, a contribution crosses up to N - 1 hops, so each may miss budget / (N - 1), and a lost chunk is a partial sum of
up to N - 1 ranks: at equal loss on the wire the error is larger than that of ``direct``. A hole of the gather leg goes on
around the ring; each hop may miss the gather budget / (N - 1), which bounds what a shard misses at its last rank.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from dblp.collectives.algorithms.flow import Flow
from dblp.collectives.algorithms.hops import Keep
from dblp.collectives.reduction import Reducer
from dblp.collectives.round import Round
from dblp.transport.policy import Policy


def post(
    round_: Round, buffer: npt.NDArray[Any], reducer: Reducer, policy: Policy, *, keep: Keep | None = None
) -> None:
    """Post the all-reduce of the 1-D ``buffer``, in place; done when all receives of the round have ended. ``keep`` is told
    what no result has (see ``Keep``)."""
    size = round_.world_size
    flow = Flow(
        round_, buffer, reducer, policy, shards=size, reduce_hops=size - 1, gather_hops=size - 1, keep=keep
    )
    declare(flow, round_.rank, size)
    flow.post()


def declare(flow: Flow, rank: int, size: int) -> None:
    """This rank's hops."""
    shards = flow.all.cut(size)
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        flow.send(right, step, shards[(rank - step) % size], ranks=step + 1, weigh=step == 0)
        flow.add(left, step, shards[(rank - step - 1) % size], final=step == size - 2, weigh=step == 0)
    for step in range(size - 1):
        flow.send(right, size - 1 + step, shards[(rank + 1 - step) % size], gather=True)
        flow.copy(left, size - 1 + step, shards[(rank - step) % size])
