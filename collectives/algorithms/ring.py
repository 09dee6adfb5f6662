"""All-reduce by a ring: N - 1 steps that reduce, N - 1 that gather; each rank talks to its two neighbours only.

Step s of the reduction sends shard r - s to the right and adds what comes from the left into shard r - s - 1;
after it rank r owns shard r + 1, complete (Patarasuk and Yuan, 2009, bandwidth optimal all-reduce). Pipelined by runs
of chunks: what has been added or placed is offered to the next step at once. Exact only: a lost chunk here would be a
partial sum of many ranks.

The order of the sum is that of the ring, starting at a different rank for each shard: fixed, so repeatable bit for bit, but
not the bits of ``direct``. Half types are rounded at each hop, which is why ``auto`` does not choose a ring for them.

In place: the final value of a chunk can come back only after it has gone round the whole ring, so the right neighbour has
placed what this rank sent of that chunk, and drops further copies.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from dblp.collectives.algorithms.grid import chunk_bytes, cut, spec
from dblp.collectives.algorithms.sinks import AddSink, CopySink
from dblp.collectives.reduction import Reducer
from dblp.collectives.round import Round
from dblp.transport.interface import Sending
from dblp.transport.message import Sink
from dblp.transport.policy import Policy


def post(round_: Round, buffer: npt.NDArray[Any], reducer: Reducer, policy: Policy) -> None:
    """Post the all-reduce of the 1-D ``buffer``, in place; done when all receives of the round have ended."""
    chunk = chunk_bytes(buffer.nbytes, round_.endpoint.max_chunk_bytes, policy)
    size, rank = round_.world_size, round_.rank
    shards = cut(buffer, size, chunk)
    right, left = (rank + 1) % size, (rank - 1) % size
    last_reduce, last = size - 2, 2 * size - 3
    sendings: dict[int, Sending] = {}
    for step in range(last + 1):  # step s sends what step s - 1 received
        shard = shards[(rank - step) % size]
        if shard.size:
            sendings[step] = round_.send(right, step, shard, spec(shard.nbytes, chunk), offered=step == 0)
    for step in range(last + 1):
        shard = shards[(rank - step - 1) % size]
        if not shard.size:
            continue
        sink: Sink = CopySink(shard, chunk)
        if step <= last_reduce:
            sink = AddSink(shard, chunk, reducer, final=step == last_reduce)
        following = sendings[step + 1].offer if step < last else None
        round_.receive(left, step, spec(shard.nbytes, chunk), sink, on_chunks=following)
