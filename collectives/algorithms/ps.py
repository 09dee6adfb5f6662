"""All-reduce by parameter servers: workers push to the servers, which reduce, and pull the result.

The array is cut into as many shards as there are servers, one each. Servers train as well (their own contribution needs no
push), or only serve (``serve_only``): then they contribute nothing, an average is one over the workers, and what stood in
their arrays is overwritten by the result; but what they carry from earlier rounds is added. Sums start with the server's own
contribution and go on by ascending ranks; chunks are pushed back as soon as they are reduced, see ``flow``; with ``whole`` only
when the whole shard is, as servers that reduce and then broadcast do.

With one server that serves only and ``whole``, this is DBLP's set-up (arXiv 2605.01989: three workers and a server, central
reduce, then broadcast) and LTP's (arXiv 2305.04279: lossy push, and with ``Consistency.EXACT`` its reliable broadcast); with
all ranks as servers, the messages are those of ``direct``.

Under a bound, a contribution crosses one hop: the push may miss the reduce leg's budget, the pull the gather leg's own; under
``AGREED`` each of the N - 1 pulls may miss an (N - 1)th of it, which bounds the union of their holes.

Many workers push to one server: it admits as many at once as ``incast`` says.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from dblp.collectives.algorithms.flow import Flow
from dblp.collectives.algorithms.hops import Keep
from dblp.collectives.algorithms.incast import LEAST_PEERS
from dblp.collectives.reduction import Reducer
from dblp.collectives.round import Round
from dblp.errors import ConfigError
from dblp.transport.policy import Policy

_PUSH, _PULL, _TELL = range(3)


def check_servers(servers: tuple[int, ...], serve_only: bool, size: int) -> None:
    """Raise ConfigError unless ``servers`` are different ranks of a group of ``size``, and somebody contributes."""
    if not servers or len(set(servers)) != len(servers) or not all(0 <= rank < size for rank in servers):
        raise ConfigError(f"servers={servers}: one or more different ranks in 0..{size - 1} are needed")
    if serve_only and len(servers) == size:
        raise ConfigError(f"serve_only with servers={servers}: no rank of the {size} is left to contribute")


def post(
    round_: Round,
    buffer: npt.NDArray[Any],
    reducer: Reducer,
    policy: Policy,
    *,
    keep: Keep | None = None,
    servers: tuple[int, ...] = (0,),
    serve_only: bool = False,
    whole: bool = False,
) -> None:
    """Post the all-reduce of the 1-D ``buffer``, in place; done when all receives of the round have ended. ``keep`` is told
    what no result has (see ``Keep``)."""
    size = round_.world_size
    workers = [rank for rank in range(size) if not (serve_only and rank in servers)]
    if len(workers) < size:
        reducer = Reducer(reducer.dtype, reducer.op, len(workers))
    pushers = len(workers) - (not serve_only)
    flow = Flow(
        round_,
        buffer,
        reducer,
        policy,
        shards=len(servers),
        reduce_hops=1,
        gather_hops=1,
        keep=keep,
        tell_step=_TELL if pushers >= LEAST_PEERS else 0,
    )
    declare(flow, round_.rank, size, servers, workers, carries=keep is not None, whole=whole)
    flow.post()


def declare(
    flow: Flow,
    rank: int,
    size: int,
    servers: tuple[int, ...],
    workers: list[int],
    *,
    carries: bool = False,
    whole: bool = False,
) -> None:
    """This rank's hops. ``carries``: what stands in a server's array counts, though it serves only; ``whole``: results leave
    together."""
    shards = dict(zip(servers, flow.all.cut(len(servers)), strict=True))
    turns = sorted(servers, key=lambda server: (server <= rank, server))  # not all turn to the same one first
    pushing = [worker for worker in workers if worker != rank]
    if rank in workers:
        for server in turns:
            if server != rank:
                flow.send(server, _PUSH, shards[server], weigh=True)
    if rank in shards:
        for place, worker in enumerate(pushing, start=1):
            fresh = place == 1 and rank not in workers and not carries
            flow.add(worker, _PUSH, shards[rank], final=place == len(pushing), fresh=fresh, weigh=True)
        for step in range(1, size):
            flow.send((rank + step) % size, _PULL, shards[rank], gather=True, whole=whole)
    for server in turns:
        if server != rank:
            flow.copy(server, _PULL, shards[server], made=True)
