"""Moving without reducing: everyone sends each peer one message; and a broadcast that the receivers relay.

All messages are exact, and empty ones are sent too: they tell a peer that expects more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.algorithms.grid import chunk_bytes, cut, spec
from dblp.collectives.algorithms.sinks import CopySink
from dblp.collectives.round import Round
from dblp.transport.policy import Exact

Array = npt.NDArray[Any]

_STEP = 0
_RELAY_STEP = 1
_CALL_STEP = 2
RELAY_BYTES = 64 * 1024
"""Broadcasts above this size are relayed: the root then sends every byte once, not once a peer."""


def post_exchange(round_: Round, outgoing: Mapping[int, Array], incoming: Mapping[int, Array]) -> None:
    """Send each peer its 1-D array of ``outgoing``, receive each of ``incoming`` (by rank in the group; own left out)."""
    chunk = chunk_bytes(0, round_.endpoint.max_chunk_bytes, Exact())
    for peer in round_.peers():
        target = incoming.get(peer)
        if target is not None:
            round_.receive(peer, _STEP, spec(target.nbytes, chunk), CopySink(target, chunk))
    for peer in round_.peers():
        source = outgoing.get(peer)
        if source is not None:
            round_.send(peer, _STEP, source, spec(source.nbytes, chunk))


def post_call(round_: Round, root: int) -> None:
    """The root of a collective that sends it everything says that it takes part: two ranks that both take themselves for the
    root would else wait for each other's data."""
    nothing = np.empty(0, np.uint8)
    message = spec(0, chunk_bytes(0, round_.endpoint.max_chunk_bytes, Exact()))
    if round_.rank != root:
        round_.receive(root, _CALL_STEP, message, CopySink(nothing, message.chunk_bytes))
        return
    for peer in round_.peers():
        round_.send(peer, _CALL_STEP, nothing, message)


def post_broadcast(round_: Round, buffer: Array, root: int) -> None:
    """Post the broadcast of the 1-D ``buffer`` from rank ``root``."""
    if round_.world_size > 2 and buffer.nbytes > RELAY_BYTES:
        _post_relayed(round_, buffer, root)
    elif round_.rank == root:
        post_exchange(round_, dict.fromkeys(round_.peers(), buffer), {})
    else:
        post_exchange(round_, {}, {root: buffer})


def _post_relayed(round_: Round, buffer: Array, root: int) -> None:
    """The root sends each other rank one shard; each passes its own on to the rest, by runs of chunks as they come."""
    chunk = chunk_bytes(buffer.nbytes, round_.endpoint.max_chunk_bytes, Exact())
    relays = [rank for rank in range(round_.world_size) if rank != root]
    shards = dict(zip(relays, cut(buffer, len(relays), chunk), strict=True))
    if round_.rank == root:
        for peer in round_.peers():
            round_.send(peer, _STEP, shards[peer], spec(shards[peer].nbytes, chunk))
        return
    own = shards[round_.rank]
    others = [peer for peer in round_.peers() if peer != root]
    sendings = [
        round_.send(peer, _RELAY_STEP, own, spec(own.nbytes, chunk), offered=False) for peer in others
    ]

    def pass_on(first: int, count: int) -> None:
        for sending in sendings:
            sending.offer(first, count)

    for peer in others:
        shard = shards[peer]
        round_.receive(peer, _RELAY_STEP, spec(shard.nbytes, chunk), CopySink(shard, chunk))
    round_.receive(root, _STEP, spec(own.nbytes, chunk), CopySink(own, chunk), on_chunks=pass_on)
