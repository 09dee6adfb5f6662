"""All-reduce by direct exchange: each rank owns a shard, reduces it, and sends the result to all.

Every contribution crosses one hop, so a budget of p loses at most p. Two legs: the reduce leg, and the gather leg, whose chunks
leave as soon as they are reduced. Sums are in rank order, so that all ranks and all runs have the same bits.

Exact rounds. In place: the result of a chunk overwrites this rank's own contribution to it, which is sent from the same
memory. It may: both legs have one chunk grid, and the owner sends the result of a chunk only after this rank's
contribution to that chunk has been placed. From then on the owner drops every further copy of the chunk, so a retransmission
that is still under way, with whatever bytes, changes nothing.

Under a bound, each leg under its own, they are ``flow``s, with the same bits where nothing is lost: there the result of a chunk
also leaves when the owner has closed the contribution without it, and drops what comes later.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from dblp.collectives.algorithms.flow import Flow
from dblp.collectives.algorithms.grid import chunk_bytes, cut, spec
from dblp.collectives.algorithms.hops import Keep
from dblp.collectives.algorithms.incast import LEAST_PEERS
from dblp.collectives.algorithms.reduce_leg import post_reduce_leg
from dblp.collectives.algorithms.sinks import CopySink
from dblp.collectives.reduction import Reducer
from dblp.collectives.round import Round
from dblp.transport.policy import Policy

_REDUCE, _GATHER, _TELL = range(3)


def post(
    round_: Round, buffer: npt.NDArray[Any], reducer: Reducer, policy: Policy, *, keep: Keep | None = None
) -> None:
    """Post the all-reduce of the 1-D ``buffer``, in place; done when all receives of the round have ended. ``keep`` is told
    what no result has (see ``Keep``)."""
    if policy.lossy:
        _post_lossy(round_, buffer, reducer, policy, keep)
    else:
        _post_exact(round_, buffer, reducer, policy)


def _post_lossy(
    round_: Round, buffer: npt.NDArray[Any], reducer: Reducer, policy: Policy, keep: Keep | None
) -> None:
    size, rank = round_.world_size, round_.rank
    tell_step = _TELL if size > LEAST_PEERS else 0
    flow = Flow(
        round_,
        buffer,
        reducer,
        policy,
        shards=size,
        reduce_hops=1,
        gather_hops=1,
        keep=keep,
        tell_step=tell_step,
    )
    shards, peers = flow.all.cut(size), round_.peers()
    for peer in peers:
        flow.send(peer, _REDUCE, shards[peer], weigh=True)
    flow.fold(_REDUCE, shards[rank])
    for peer in peers:
        flow.send(peer, _GATHER, shards[rank], gather=True)
    for peer in peers:
        flow.copy(peer, _GATHER, shards[peer], made=True)
    flow.post()


def _post_exact(round_: Round, buffer: npt.NDArray[Any], reducer: Reducer, policy: Policy) -> None:
    chunk = chunk_bytes(-(-buffer.nbytes // round_.world_size), round_.endpoint.max_chunk_bytes, policy)
    shards = cut(buffer, round_.world_size, chunk)
    own = shards[round_.rank]
    gathers = [
        round_.send(peer, _GATHER, own, spec(own.nbytes, chunk), offered=False)
        for peer in round_.peers()
        if own.size
    ]

    def on_final(first: int, count: int) -> None:
        for sending in gathers:
            sending.offer(first, count)

    for peer in round_.peers():
        shard = shards[peer]
        if shard.size:
            round_.receive(peer, _GATHER, spec(shard.nbytes, chunk), CopySink(shard, chunk))
    contributions = {peer: shards[peer] for peer in round_.peers()}
    post_reduce_leg(round_, own, contributions, reducer, policy, chunk, on_final)
