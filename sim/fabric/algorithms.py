"""All-reduce algorithms as graphs of flows.

Each takes the hosts of the ranks, the gradient's bytes and, for each rank, the task after which its gradient is there; it
returns, for each rank, the task after which the result is. Reducing takes no time. Sources: ring: Patarasuk and Yuan 2009;
direct: the transpose all-reduce of OptiReduce (arXiv 2310.06993), also called direct reduce-scatter and all-gather; halving
and doubling: Rabenseifner 2004; two binary trees: Sanders, Speck, Träff 2009, with parents as in an in-order numbering, the
second tree mirrored (or shifted by one).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dblp.errors import ConfigError
from dblp.sim.fabric.graph import Graph, Ints

Hosts = npt.NDArray[np.int64]
Algorithm = Callable[[Graph, Hosts, int, Ints, int], Ints]
Pipelined = Callable[[Graph, Hosts, int, Ints, int, int, int], Ints]
SEGMENTS = 8
"""Pieces in which each tree's half is pipelined."""


def ring(
    graph: Graph, hosts: Hosts, nbytes: int, starts: Ints, cls: int = 0, segment: int = 0, chunk: int = 1
) -> Ints:
    """2 (n - 1) steps; in each, every rank sends a shard to the next and waits for that of the one before. With ``segment``,
    bytes, each such part of a shard goes on when it has come, see ``_parts``."""
    count = len(hosts)
    ranks = np.arange(count)
    following = np.roll(hosts, -1)
    parts = _parts(nbytes, count, segment, chunk)
    before = [starts] * len(parts)
    for step in range(2 * (count - 1)):
        leg = int(step >= count - 1)
        batch = graph.next_batch()
        for number, sizes in enumerate(parts):
            flows = graph.flows(
                hosts, following, sizes[(ranks - step) % count], leg=leg, cls=cls, batch=batch, message=batch
            )
            graph.order(before[number], flows)
            if 0 < step < count - 1:
                graph.order(starts, flows)  # the own gradient is added at each step of the first leg
            before[number] = np.roll(flows, 1)
    ends = graph.tasks(hosts)
    for last in before:
        graph.order(last, ends)
    return ends


def direct(
    graph: Graph, hosts: Hosts, nbytes: int, starts: Ints, cls: int = 0, segment: int = 0, chunk: int = 1
) -> Ints:
    """Every rank sends each other its shard, adds what it gets, and sends every other the sum. With ``segment``, bytes, each such
    part of the sum leaves when it is there, see ``_parts``."""
    parts = _parts(nbytes, len(hosts), segment, chunk)
    batch = graph.next_batch()
    sums = [_exchange(graph, hosts, sizes, starts, cls, leg=0, batch=batch) for sizes in parts]
    batch = graph.next_batch()
    done = [
        _exchange(graph, hosts, sizes, middle, cls, leg=1, batch=batch)
        for sizes, middle in zip(parts, sums, strict=True)
    ]
    if len(done) == 1:
        return done[0]
    ends = graph.tasks(hosts)
    for each in done:
        graph.order(each, ends)
    return ends


def _parts(nbytes: int, count: int, segment: int, chunk: int) -> list[Ints]:
    """Bytes of each of ``count`` shards, in the parts in which they go on. ``segment`` 0: as a whole, and all are equal; else, as
    the collectives do, shards are cut between chunks."""
    if not segment:
        return [np.full(count, -(-nbytes // count))]
    chunks = -(-nbytes // chunk)
    ranks, largest = np.arange(count), -(-chunks // count)
    firsts, ends = (chunks // count * rank + np.minimum(rank, chunks % count) for rank in (ranks, ranks + 1))
    most = max(segment // chunk, 1)
    edges = np.minimum(np.arange(0, largest + most, most)[:, None] + firsts, ends)
    return list(np.diff(np.minimum(edges * chunk, nbytes), axis=0))


def _exchange(graph: Graph, hosts: Hosts, sizes: Ints, starts: Ints, cls: int, leg: int, batch: int) -> Ints:
    """Each to each other, the next one first: the peer's shard, of these ``sizes``, then the own."""
    ends = graph.tasks(hosts)
    graph.order(starts, ends)
    for step in range(1, len(hosts)):
        peers = np.roll(hosts, -step)
        nbytes = sizes if leg else np.roll(sizes, -step)
        flows = graph.flows(hosts, peers, nbytes, leg=leg, cls=cls, batch=batch, message=batch)
        graph.order(starts, flows)
        graph.order(flows, np.roll(ends, -step))
    return ends


def halving_doubling(graph: Graph, hosts: Hosts, nbytes: int, starts: Ints, cls: int = 0) -> Ints:
    """log2(n) exchanges of halves, quarters, ..., and back again. Raises ConfigError unless n is a power of two."""
    count = len(hosts)
    if count & (count - 1):
        raise ConfigError(f"workload.algorithm='halving_doubling': {count} ranks are no power of two")
    ranks = np.arange(count)
    distances = [count >> step for step in range(1, count.bit_length())]
    before = starts
    steps = [(0, distance) for distance in distances] + [(1, distance) for distance in reversed(distances)]
    for leg, distance in steps:
        partners = ranks ^ distance
        size = -(-nbytes * distance // count)
        flows = graph.flows(hosts, hosts[partners], size, leg=leg, cls=cls, batch=graph.next_batch())
        graph.order(before, flows)
        before = graph.tasks(hosts)
        graph.order(flows[partners], before)
        graph.order(flows, before)
    return before


def double_tree(graph: Graph, hosts: Hosts, nbytes: int, starts: Ints, cls: int = 0) -> Ints:
    """Two trees in which no rank is inner twice; each reduces half of the gradient to its root and spreads it, in segments."""
    ends = graph.tasks(hosts)
    size = -(-nbytes // (2 * SEGMENTS))
    for parents in trees(len(hosts)):
        for _ in range(SEGMENTS):
            graph.order(_tree(graph, hosts, parents, size, starts, cls), ends)
    return ends


def trees(count: int) -> tuple[Ints, Ints]:
    """The parents of both trees; -1 is the root's."""
    first = np.array([_parent(rank, count) for rank in range(count)])
    ranks = np.arange(count)
    other = count - 1 - ranks if count % 2 == 0 else (ranks + 1) % count
    inverse = np.argsort(other)
    second = np.where(first[other] < 0, -1, inverse[np.maximum(first[other], 0)])
    return first, second


def _parent(rank: int, count: int) -> int:
    """In-order numbering: a rank whose lowest set bit is b has its parent at distance b; rank 0 is the root."""
    if rank == 0:
        return -1
    bit = rank & -rank
    parent = (rank ^ bit) | (bit << 1)
    return parent if parent < count else rank ^ bit


def _tree(graph: Graph, hosts: Hosts, parents: Ints, size: int, starts: Ints, cls: int) -> Ints:
    """One segment up one tree and down again; returns what each rank ends with."""
    children = np.flatnonzero(parents >= 0)
    gathered, have = graph.tasks(hosts), graph.tasks(hosts)
    graph.order(starts, gathered)
    up = graph.flows(
        hosts[children], hosts[parents[children]], size, leg=0, cls=cls, batch=graph.next_batch()
    )
    graph.order(gathered[children], up)
    graph.order(up, gathered[parents[children]])
    root = int(np.flatnonzero(parents < 0)[0])
    graph.order(gathered[root], have[root])
    down = graph.flows(
        hosts[parents[children]], hosts[children], size, leg=1, cls=cls, batch=graph.next_batch()
    )
    graph.order(have[parents[children]], down)
    graph.order(down, have[children])
    return have


def hierarchical(graph: Graph, hosts: Hosts, nbytes: int, starts: Ints, cls: int, group: int) -> Ints:
    """Shards are reduced within groups of ``group`` ranks, by rings across the groups, and spread within them again."""
    count = len(hosts)
    if group < 1 or count % group:
        raise ConfigError(f"workload.group={group}: {count} ranks are no multiple of it")
    shard = -(-nbytes // group)
    places = np.arange(count).reshape(-1, group)
    middle = _in_groups(graph, hosts, shard, starts, cls, places, leg=0)
    if len(places) > 1:
        across = [ring(graph, hosts[column], shard, middle[column], cls) for column in places.T]
        middle[places.T] = np.array(across)
    return _in_groups(graph, hosts, shard, middle, cls, places, leg=1)


def _in_groups(
    graph: Graph, hosts: Hosts, shard: int, starts: Ints, cls: int, places: Ints, leg: int
) -> Ints:
    ends = np.empty(len(hosts), np.int64)
    for members in places:
        sizes = np.full(len(members), shard)
        ends[members] = _exchange(graph, hosts[members], sizes, starts[members], cls, leg, graph.next_batch())
    return ends


def ps(graph: Graph, hosts: Hosts, nbytes: int, starts: Ints, cls: int, servers: int) -> Ints:
    """Ranks at equal distances are servers with a share each: the others send them their gradients and get the sums."""
    share = -(-nbytes // servers)
    ends = graph.tasks(hosts)
    serving = np.arange(servers) * len(hosts) // servers  # not under one leaf, whose links all would meet in
    graph.order(starts[serving], ends[serving])
    batch = graph.next_batch()
    for turn, server in enumerate(serving.tolist()):
        workers = np.roll(np.setdiff1d(np.arange(len(hosts)), serving), -turn)
        push = graph.flows(hosts[workers], hosts[server], share, leg=0, cls=cls, batch=batch)
        graph.order(starts[workers], push)
        summed = graph.tasks(hosts[server])
        graph.order(push, summed)
        pull = graph.flows(hosts[server], hosts[workers], share, leg=1, cls=cls, batch=graph.next_batch())
        graph.order(summed, pull)
        graph.order(pull, ends[workers])
    return ends


PIPELINED: dict[str, Pipelined] = {"ring": ring, "direct": direct}
"""Those that may go on with parts of a shard."""
PLAIN: dict[str, Algorithm] = {
    "halving_doubling": halving_doubling,
    "double_tree": double_tree,
}
"""Others without settings of their own."""
