"""``ethereal``: one path a flow, and as few flows split as it takes to load all paths equally.

Addanki, Goyal, Marinos, "Challenging the Need for Packet Spraying in Large-Scale Distributed Training" (arXiv 2407.00550), and
Ethereal, its second version. Of n flows of one size that start together towards one leaf switch, over s paths: n - r whole flows
go round-robin, r = n mod s; each of the last r is split into s / gcd(r, s) equal parts, which go round-robin too. Each path then
carries (n - r) / s whole flows and r / gcd(r, s) parts of gcd(r, s) / s: n / s flows, exactly as if every byte were sprayed.

A flow is a message here. Messages to the ranks of one group of destinations (``TransportConfig.leaf_ranks`` ranks in a row; 1:
each peer alone) that begin before the next of them leaves form a batch, to which the rule applies; the next batch goes on
where the round-robin stopped.

Differences from the paper:
- A part is every k-th stripe of a message, not one range of it: a receiver that grants chunk by chunk, and rounds that pass
  chunks on, need all parts to advance together. A stripe is a train of bursts at most; parts are equal but for a chunk a stripe.
- A batch is what one turn of the event loop starts, not what 100 ns bring; and where sizes differ it takes them for equal.
- A message of fewer chunks than the rule wants parts is not split.
- Repairs take the path of their part while it is alive and has room, else any: they are not part of the load.
- A path that is left is taken out, and the rule is applied again to the messages under way (the paper: for new flows), until it
  answers (the paper: for a fixed time). The first path is drawn at random, the start is not jittered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd

from dblp.transport.burst import TRAIN_BURSTS
from dblp.transport.outgoing import Outgoing
from dblp.transport.paths.base import PathChoice, Usable


def parts_of_flows(flows: int, paths: int) -> list[int]:
    """In how many equal parts each of ``flows`` flows goes over ``paths`` paths: 1, or s / gcd(r, s) for the last r."""
    rest = flows % paths
    parts = paths // gcd(rest, paths) if rest else 1
    return [1] * (flows - rest) + [parts] * rest


def spread(parts: Sequence[int], paths: int, first: int = 0) -> list[tuple[int, ...]]:
    """The paths of the parts of each flow, round-robin from ``first`` on."""
    routes, turn = [], first
    for count in parts:
        routes.append(tuple((turn + part) % paths for part in range(count)))
        turn += count
    return routes


def path_loads(routes: Sequence[Sequence[int]], paths: int) -> list[Fraction]:
    """What each path carries, in flows."""
    loads = [Fraction(0)] * paths
    for route in routes:
        for path in route:
            loads[path] += Fraction(1, len(route))
    return loads


@dataclass(frozen=True, slots=True)
class Route:
    """Where the chunks of one message go: stripe i of ``stripe`` chunks takes ``paths[i % len(paths)]``."""

    paths: tuple[int, ...]
    stripe: int

    def path_of(self, chunk: int) -> int:
        """The path of a chunk."""
        return self.paths[chunk // self.stripe % len(self.paths)]


def stripe_chunks(chunks: int, parts: int, most: int) -> int:
    """The size of a stripe, at most ``most`` chunks, such that each part has as many stripes."""
    turns = -(-chunks // (parts * most))
    return max(1, -(-chunks // (parts * turns)))


class Leaf:
    """The paths towards one group of destinations."""

    def __init__(self, paths: int, first: int) -> None:
        self._paths = paths
        self._turn = first % paths
        self._left: list[int] = [0] * paths  # by path: peers that it does not reach
        self._fresh: list[Outgoing] = []
        self._flows: dict[Outgoing, Route | None] = {}

    def add(self, message: Outgoing) -> None:
        """A message begins; it is routed together with those that begin before it is asked for."""
        self._flows[message] = None
        self._fresh.append(message)

    def remove(self, message: Outgoing) -> None:
        """A message is over."""
        self._flows.pop(message, None)
        if message in self._fresh:
            self._fresh.remove(message)

    def set_left(self, path: int, left: bool) -> None:
        """The path reaches one peer less, or one more: messages under way are routed anew."""
        self._left[path] += 1 if left else -1
        self._fresh = list(self._flows)

    def route(self, message: Outgoing) -> Route | None:
        """The way of a message; None if all paths are left."""
        if self._fresh:
            self._assign()
        return self._flows.get(message)

    def _assign(self) -> None:
        healthy = [path for path, left in enumerate(self._left) if not left]
        if not healthy:
            return
        batch, self._fresh = self._fresh, []
        parts = [
            count if message.spec.chunks >= count else 1
            for message, count in zip(batch, parts_of_flows(len(batch), len(healthy)), strict=True)
        ]
        for message, route in zip(batch, spread(parts, len(healthy), self._turn), strict=True):
            most = TRAIN_BURSTS * message.per_burst
            stripe = stripe_chunks(message.spec.chunks, len(route), most)
            self._flows[message] = Route(tuple(healthy[path] for path in route), stripe)
        self._turn = (self._turn + sum(parts)) % len(healthy)


class EtherealChoice(PathChoice):
    """One peer's view of its leaf."""

    pinned = True

    def __init__(self, leaf: Leaf, paths: int, most_chunks: int = 0) -> None:
        super().__init__(paths, most_chunks)
        self._leaf = leaf
        self._turn = 0

    def pick(self, message: Outgoing, usable: Usable, now: float) -> tuple[int, int] | None:
        """The path of the first stripe that has one with room; the message's queue then starts with it."""
        route = self._leaf.route(message)
        if route is None:
            return None
        if message.repairable:
            return self._repair(route.path_of(int(message.lost[0])), usable)
        for first, count in stripes(message.queue, route.stripe, message.limit, len(route.paths)):
            path = route.path_of(first)
            if usable(path):
                bring_forward(message.queue, first, count)
                return path, min(count, self.most_chunks)
        return None

    def on_started(self, message: Outgoing) -> None:
        """See ``PathChoice``."""
        if message.spec.chunks:
            self._leaf.add(message)

    def on_ended(self, message: Outgoing) -> None:
        """See ``PathChoice``."""
        self._leaf.remove(message)

    def on_left(self, path: int, *, now: float) -> None:
        """See ``PathChoice``."""
        self._leaf.set_left(path, True)

    def on_back(self, path: int, *, now: float) -> None:
        """See ``PathChoice``."""
        self._leaf.set_left(path, False)

    def _repair(self, own: int, usable: Usable) -> tuple[int, int] | None:
        count = len(self.paths)
        others = ((self._turn + step) % count for step in range(count))
        path = own if usable(own) else next(filter(usable, others), None)
        if path is None:
            return None
        self._turn = path + 1
        return path, self.most_chunks


def stripes(queue: deque[list[int]], stripe: int, limit: int, most: int) -> Iterator[tuple[int, int]]:
    """The next stripes of a message's queue of [first, count] runs below ``limit``, as (first, count): as many that one of each
    path is among them, two turns of ``most`` at most."""
    left = 2 * most
    for first, count in queue:
        stop = min(first + count, limit)
        while first < stop and left:
            end = min(stop, (first // stripe + 1) * stripe)
            yield first, end - first
            first, left = end, left - 1


def bring_forward(queue: deque[list[int]], first: int, count: int) -> None:
    """Let a queue of [first, count] runs begin with the chunks first..first+count-1, which one of its runs holds.

    What stood before it stays in its order, so the queue's head is below the limit as long as any run is.
    """
    index = next(at for at, run in enumerate(queue) if run[0] <= first < run[0] + run[1])
    start, length = queue[index]
    if not index and start == first:  # the head; ``count`` bounds what is taken of it
        return
    del queue[index]
    stop = first + count
    if stop < start + length:
        queue.insert(index, [stop, start + length - stop])
    if start < first:
        queue.insert(index, [start, first - start])
    queue.appendleft([first, count])
