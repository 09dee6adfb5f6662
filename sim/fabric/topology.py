"""Nodes, links and the way between hosts, as arrays.

Theory of operation. Nodes are numbered: hosts first, then switches. A link is one direction of a cable. Routing is up and
down: at each switch a table has, for each host, the link that leads down to it (-1: it isn't below), and otherwise any uplink
will do. A path is a number whose digits, in a mixed radix, say which uplink to take: at the host (the plane), at its edge
switch, at the aggregation switch. Packet ``p`` of a node takes uplink ``p // stride % ups``. All paths of one number between
two hosts are the same length, and back again the same number leads over the same spine or core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.errors import ConfigError
from dblp.sim.fabric.spec import ALL_HOSTS, LinkSpec, TopologySpec

Ints = npt.NDArray[np.int32]
AnyInts = npt.NDArray[np.integer[Any]]
NO_LINK = -1
MAX_HOPS = 6
"""Links of the longest path: up to a core and down again."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fabric:
    """A topology in arrays; L links, S switches, H hosts, N = H + S nodes."""

    spec: TopologySpec
    """What it was made from."""
    names: tuple[str, ...]
    """Of the nodes (N)."""
    sources: Ints
    """Node that a link comes from (L)."""
    targets: Ints
    """Node that it leads to (L)."""
    rates: npt.NDArray[np.float64]
    """Bits per second (L)."""
    delays: npt.NDArray[np.float64]
    """Seconds (L)."""
    up_first: Ints
    """Index into ``ups`` of a node's first uplink (N)."""
    up_count: Ints
    """Its uplinks (N)."""
    ups: Ints
    """Links."""
    strides: Ints
    """Place value of the digit that a node reads of a path (N)."""
    down: Ints
    """Link from a switch down to a host, or NO_LINK (S, H)."""
    paths: int
    """Path numbers: 0 to this, less 1."""

    @property
    def hosts(self) -> int:
        """H."""
        return int(self.down.shape[1])

    def name(self, link: int) -> str:
        """A link's two ends: ``leaf0>spine1``."""
        return f"{self.names[self.sources[link]]}>{self.names[self.targets[link]]}"

    def link(self, source: str, target: str) -> int:
        """The link between two named nodes; raises ConfigError."""
        ends = list(zip(self.sources.tolist(), self.targets.tolist(), strict=True))
        index = {name: number for number, name in enumerate(self.names)}
        pair = (index.get(source, -1), index.get(target, -1))
        if pair not in ends:
            ends_named = f"{source}-{target}"
            raise ConfigError(f"link={ends_named!r}: no such link; nodes are {_shown(self.names)}")
        return ends.index(pair)

    def links_of(self, ends: str, *, one_way: bool) -> list[int]:
        """The links that a FailureSpec names; raises ConfigError."""
        if ends == ALL_HOSTS:
            from_hosts = self.sources < self.hosts
            both = from_hosts | (self.targets < self.hosts)
            return [int(link) for link in np.flatnonzero(from_hosts if one_way else both)]
        source, _, target = ends.partition("-")
        there = [self.link(source, target)]
        return there if one_way else [*there, self.link(target, source)]

    def route(self, source: int, target: int, path: int) -> list[int]:
        """The links of a path, in order."""
        links, node = [], source
        while node != target:
            links.append(self.next_link(node, target, path))
            node = int(self.targets[links[-1]])
        return links

    def next_link(self, node: int, target: int, path: int) -> int:
        """The link that a packet for a host takes from a node."""
        if node >= self.hosts:
            below = int(self.down[node - self.hosts, target])
            if below != NO_LINK:
                return below
        digit = path // int(self.strides[node]) % int(self.up_count[node])
        return int(self.ups[self.up_first[node] + digit])

    def routes(self, sources: AnyInts, targets: AnyInts, path: int) -> Ints:
        """The links of one path between many pairs of hosts (MAX_HOPS, pairs); NO_LINK where a route has ended."""
        steps = np.full((MAX_HOPS, len(sources)), NO_LINK, np.int32)
        nodes = sources.astype(np.int32)
        for links in steps:
            going = np.flatnonzero(nodes != targets)
            if not len(going):
                break
            links[going] = self._next_links(nodes[going], targets[going], path)
            nodes[going] = self.targets[links[going]]
        return steps

    def _next_links(self, nodes: AnyInts, targets: AnyInts, path: int) -> Ints:
        digits = path // self.strides[nodes] % np.maximum(self.up_count[nodes], 1)
        links = self.ups[np.minimum(self.up_first[nodes] + digits, len(self.ups) - 1)]
        at_switch = nodes >= self.hosts
        below = self.down[np.where(at_switch, nodes - self.hosts, 0), targets]
        return np.where(at_switch & (below != NO_LINK), below, links)

    def leaves(self) -> Ints:
        """The switch above each host, in the first plane (H)."""
        return self.targets[self.ups[self.up_first[: self.hosts]]]

    def fabric_links(self) -> npt.NDArray[np.bool_]:
        """Which links are between switches (L)."""
        return (self.sources >= self.hosts) & (self.targets >= self.hosts)

    def base_rtts(self, sources: AnyInts, targets: AnyInts, packet: int, ack: int) -> npt.NDArray[np.float64]:
        """Seconds for a full packet and its acknowledgement through an empty network, on path 0 (pairs)."""
        costs = np.append(self.delays + 8.0 * packet / self.rates, 0.0)
        back = np.append(self.delays + 8.0 * ack / self.rates, 0.0)  # NO_LINK is the last
        there = costs[self.routes(sources, targets, 0)].sum(axis=0)
        return np.asarray(there + back[self.routes(targets, sources, 0)].sum(axis=0))


def make_fabric(spec: TopologySpec) -> Fabric:
    """The nodes and links of a topology."""
    maker = _Maker(spec)
    for plane in range(spec.planes):
        _MAKERS[spec.kind](maker, plane)
    return maker.fabric()


class _Maker:
    """Collects nodes and cables."""

    def __init__(self, spec: TopologySpec) -> None:
        self.spec = spec
        self.hosts = spec.host_count
        self.names = [f"h{host}" for host in range(self.hosts)]
        self.links: list[tuple[int, int, LinkSpec]] = []
        self.ups: list[list[int]] = [[] for _ in range(self.hosts)]
        self.strides = [1] * self.hosts
        self.below: list[dict[int, int]] = []  # of each switch: host, link down

    def switch(self, name: str, plane: int, stride: int) -> int:
        """A new switch; ``stride``: place value of the digit that it reads."""
        self.names.append(f"p{plane}.{name}" if self.spec.planes > 1 else name)
        self.ups.append([])
        self.strides.append(stride)
        self.below.append({})
        return len(self.names) - 1

    def cable(self, lower: int, upper: int, link: LinkSpec) -> None:
        """Both directions; the upper end learns all hosts below the lower one."""
        self.ups[lower].append(len(self.links))
        self.links.append((lower, upper, link))
        self.sideways(upper, lower, link)

    def sideways(self, source: int, target: int, link: LinkSpec) -> None:
        """One direction, by which the source reaches what is below the target."""
        below = [target] if target < self.hosts else list(self.below[target - self.hosts])
        self.below[source - self.hosts].update(dict.fromkeys(below, len(self.links)))
        self.links.append((source, target, link))

    def fabric(self) -> Fabric:
        """Everything, as arrays."""
        down = np.full((len(self.below), self.hosts), NO_LINK, np.int32)
        for row, below in zip(down, self.below, strict=True):
            row[list(below)] = list(below.values())
        counts = np.array([len(ups) for ups in self.ups], np.int32)
        digits = {stride: int(count) for stride, count in zip(self.strides, counts, strict=True) if count}
        return Fabric(
            spec=self.spec,
            names=tuple(self.names),
            sources=np.array([link[0] for link in self.links], np.int32),
            targets=np.array([link[1] for link in self.links], np.int32),
            rates=np.array([link[2].rate for link in self.links]),
            delays=np.array([link[2].delay for link in self.links]),
            up_first=(np.cumsum(counts) - counts).astype(np.int32),
            up_count=counts,
            ups=np.array([up for ups in self.ups for up in ups], np.int32),
            strides=np.array(self.strides, np.int32),
            down=down,
            paths=int(np.prod(list(digits.values()))),
        )


def _star(maker: _Maker, plane: int) -> None:
    switch = maker.switch("switch", plane, maker.spec.planes)
    for host in range(maker.hosts):
        maker.cable(host, switch, maker.spec.host_link)


def _dumbbell(maker: _Maker, plane: int) -> None:
    spec, half = maker.spec, maker.hosts // 2
    left, right = (maker.switch(name, plane, spec.planes) for name in ("left", "right"))
    for host in range(maker.hosts):
        maker.cable(host, left if host < half else right, spec.host_link)
    back = list(maker.below[left - maker.hosts])
    maker.sideways(left, right, spec.fabric_link)
    maker.below[right - maker.hosts].update(dict.fromkeys(back, len(maker.links)))
    maker.links.append((right, left, spec.fabric_link))


def _leaf_spine(maker: _Maker, plane: int) -> None:
    spec = maker.spec
    _two_levels(maker, plane, spec.leaves, spec.spines, spec.hosts_per_leaf)


def _two_levels(maker: _Maker, plane: int, leaves: int, spines: int, under: int) -> None:
    spec = maker.spec
    lower = [maker.switch(f"leaf{number}", plane, spec.planes) for number in range(leaves)]
    upper = [maker.switch(f"spine{number}", plane, spec.planes * spines) for number in range(spines)]
    for host in range(maker.hosts):
        maker.cable(host, lower[host // under], spec.host_link)
    for leaf in lower:
        for spine in upper:
            maker.cable(leaf, spine, spec.fabric_link)


def _fat_tree(maker: _Maker, plane: int) -> None:
    spec, half = maker.spec, maker.spec.k // 2
    under = half * spec.oversubscription
    if spec.levels == 2:
        _two_levels(maker, plane, spec.k, half, under)
        return
    pods = range(spec.k)
    edges = [[maker.switch(f"edge{pod}.{n}", plane, spec.planes) for n in range(half)] for pod in pods]
    aggs = [[maker.switch(f"agg{pod}.{n}", plane, spec.planes * half) for n in range(half)] for pod in pods]
    cores = [maker.switch(f"core{n}", plane, spec.planes * half * half) for n in range(half * half)]
    for host in range(maker.hosts):
        pod, edge = divmod(host // under, half)
        maker.cable(host, edges[pod][edge], spec.host_link)
    for pod in pods:
        for edge in edges[pod]:
            for agg in aggs[pod]:
                maker.cable(edge, agg, spec.fabric_link)
        for number, agg in enumerate(aggs[pod]):
            for core in cores[number * half : (number + 1) * half]:
                maker.cable(agg, core, spec.fabric_link)


_MAKERS = {"star": _star, "dumbbell": _dumbbell, "leaf_spine": _leaf_spine, "fat_tree": _fat_tree}


def _shown(names: tuple[str, ...]) -> str:
    return ", ".join(names if len(names) <= 6 else (*names[:3], "...", *names[-3:]))
