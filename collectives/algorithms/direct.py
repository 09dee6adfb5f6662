"""All-reduce by direct exchange: each rank owns a shard, reduces it, and sends the result to all.

Every contribution crosses one hop, so a budget of p loses at most p. Two legs: the reduce leg (bounded if the policy asks)
and the gather leg (exact: all ranks end with the same bits). A segment leaves on the gather leg as soon as it is reduced.

In place. The result of a chunk overwrites this rank's own contribution to it, which is sent from the same
memory. It may: both legs have one chunk grid, and the owner sends the result of a chunk only after this rank's
contribution to that chunk has been placed or its message closed without it. From then on the owner drops every
further copy of the chunk, so a retransmission that is still under way, with whatever bytes, changes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from dblp.collectives.algorithms.grid import chunk_bytes, cut, spec
from dblp.collectives.algorithms.reduce_leg import post_reduce_leg
from dblp.collectives.algorithms.sinks import CopySink
from dblp.collectives.reduction import Reducer
from dblp.collectives.round import Round
from dblp.transport.policy import Policy

_GATHER_STEP = 1


def post(round_: Round, buffer: npt.NDArray[Any], reducer: Reducer, policy: Policy) -> None:
    """Post the all-reduce of the 1-D ``buffer``, in place; done when all receives of the round have ended."""
    chunk = chunk_bytes(-(-buffer.nbytes // round_.world_size), round_.endpoint.max_chunk_bytes, policy)
    shards = cut(buffer, round_.world_size, chunk)
    own = shards[round_.rank]
    gathers = [
        round_.send(peer, _GATHER_STEP, own, spec(own.nbytes, chunk), offered=False)
        for peer in round_.peers()
        if own.size
    ]

    def on_final(first: int, count: int) -> None:
        for sending in gathers:
            sending.offer(first, count)

    for peer in round_.peers():
        shard = shards[peer]
        if shard.size:
            round_.receive(peer, _GATHER_STEP, spec(shard.nbytes, chunk), CopySink(shard, chunk))
    contributions = {peer: shards[peer] for peer in round_.peers()}
    post_reduce_leg(round_, own, contributions, reducer, policy, chunk, on_final)
