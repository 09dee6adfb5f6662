"""``ethereal``: one path a flow, and as few flows split as it takes to load all paths equally.

Addanki, Goyal, Marinos, "Challenging the Need for Packet Spraying in Large-Scale Distributed Training" (arXiv 2407.00550), and
Ethereal, its second version. Of n flows of one size that start together towards one leaf switch, over s paths: n - r whole flows
go round-robin, r = n mod s; each of the last r is split into s / gcd(r, s) equal parts, which go round-robin too. Each path then
carries (n - r) / s whole flows and r / gcd(r, s) parts of gcd(r, s) / s: n / s flows, exactly as if every byte were sprayed.

A flow is a message here. Messages to the ranks of one group of destinations (``TransportConfig.leaf_ranks`` ranks in a row; 1:
each peer alone) that begin before the next of them leaves form a batch, to which the rule applies; the next batch goes on
where the round-robin stopped.

Differences from the paper:
- A part is no range of the message but a share of its chunks: of those that leave next, the part with most to go gets the first.
  So all parts advance together, as receivers that grant chunk by chunk and rounds that pass chunks on need it, and chunks
  may leave in order of class. Parts are equal but for one chunk.
- A batch is what one turn of the event loop starts, not what 100 ns bring; and where sizes differ it takes them for equal.
- A message of fewer chunks than the rule wants parts is not split.
- Repairs take any path: they are not part of the load.
- A path that is left is taken out, and the rule is applied again to what has not left of the messages under way (the paper: to
  new flows), until it answers (the paper: for a fixed time). The first path is drawn at random, the start is not jittered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import gcd

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
    shares: list[Counter[int]] = [
        Counter() for _ in range(paths)
    ]  # by path: in how many parts the flows of its parts are split
    for route in routes:
        for path in route:
            shares[path][len(route)] += 1
    return [sum((Fraction(parts, split) for split, parts in share.items()), Fraction(0)) for share in shares]


class Route:
    """The parts of one message that are still to leave."""

    __slots__ = ("_last", "_seen", "paths", "to_go")

    def __init__(self, paths: tuple[int, ...], chunks: int, sent: int) -> None:
        """One part a path, equal shares of ``chunks``; ``sent``: chunks of the message that have left before."""
        self.paths = paths
        self.to_go = [(chunks + part) // len(paths) for part in range(len(paths))]
        self._last = 0
        self._seen = sent

    def next(self, usable: Usable, sent: int) -> tuple[int, int] | None:
        """The usable path whose part has most chunks to go, and how many; ``sent``: chunks that have left by now, those since
        the last call on the path that it named."""
        self.to_go[self._last] -= sent - self._seen
        self._seen = sent
        for part in sorted(range(len(self.paths)), key=self.to_go.__getitem__, reverse=True):
            if self.to_go[part] <= 0:
                break
            if usable(self.paths[part]):
                self._last = part
                return self.paths[part], self.to_go[part]
        return None


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
        self._fresh = [message for message in self._flows if message.chunks_sent < message.spec.chunks]

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
        to_go = [message.spec.chunks - message.chunks_sent for message in batch]
        parts = [
            count if chunks >= count else 1
            for chunks, count in zip(to_go, parts_of_flows(len(batch), len(healthy)), strict=True)
        ]
        routes = spread(parts, len(healthy), self._turn)
        for message, route, chunks in zip(batch, routes, to_go, strict=True):
            paths = tuple(healthy[path] for path in route)
            self._flows[message] = Route(paths, chunks, message.chunks_sent)
        self._turn = (self._turn + sum(parts)) % len(healthy)


class EtherealChoice(PathChoice):
    """One peer's view of its leaf."""

    pinned = True

    def __init__(self, leaf: Leaf, paths: int, most_chunks: int = 0) -> None:
        super().__init__(paths, most_chunks)
        self._leaf = leaf
        self._turn = 0

    def pick(self, message: Outgoing, usable: Usable, now: float) -> tuple[int, int] | None:
        """The path whose part of the message has most to go."""
        if message.repairable or not message.fresh:  # repairs, and copies
            return self._repair(usable)
        route = self._leaf.route(message)
        picked = route.next(usable, message.chunks_sent) if route is not None else None
        return None if picked is None else (picked[0], min(picked[1], self.most_chunks))

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

    def _repair(self, usable: Usable) -> tuple[int, int] | None:
        count = len(self.paths)
        turns = ((self._turn + step) % count for step in range(count))
        path = next(filter(usable, turns), None)
        if path is None:
            return None
        self._turn = path + 1
        return path, self.most_chunks
