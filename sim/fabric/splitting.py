"""Paths that are fixed before a flow leaves: ECMP's hash, and Ethereal's minimal splitting; and the loads that links get.

The splitting rule itself is the transport's (``dblp.transport.paths.ethereal``): of the n flows of one source that start
together towards one leaf, over s usable paths, n - r go whole, r = n mod s, and each of the others in s / gcd(r, s) parts.
The round-robin begins at a random path for each source, leaf and batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.sim.fabric.graph import Floats, Ints, Tasks
from dblp.sim.fabric.topology import MAX_HOPS, NO_LINK, Fabric
from dblp.transport.paths.ethereal import parts_of_flows, spread

NO_PATH = -1


def hashed_paths(tasks: Tasks, fabric: Fabric, rng: np.random.Generator) -> Ints:
    """ECMP: a random path a flow, as a good hash of its five-tuple gives (T)."""
    return rng.integers(fabric.paths, size=len(tasks.source))


def pair_hashes(fabric: Fabric, seed: int) -> Ints:
    """What switches make of the addresses of two hosts: a path, for the flow of their first ports (H, H)."""
    return np.random.default_rng([seed, 2]).integers(fabric.paths, size=(fabric.hosts, fabric.hosts))


class HashedPaths:
    """ECMP as switches have it: a path for each pair of ports, whatever is sent; what was on one that routing knows to be
    down is hashed over those that are left, and comes back when it is up again."""

    def __init__(self, fabric: Fabric, seed: int) -> None:
        self._fabric = fabric
        self._hashes = pair_hashes(fabric, seed)
        self._dead = np.zeros(len(fabric.sources), np.bool_)
        self._found: dict[tuple[int, int, int], int] = {}

    def mark(self, links: list[int], *, dead: bool) -> None:
        """Routing learns that links are down, or up again."""
        self._dead[links] = dead
        self._found.clear()

    def of(self, source: int, target: int, ports: int = 0) -> int:
        """The path between two hosts. ``ports``: tells their flows apart; 0 for the first of both."""
        key = (source, target, ports)
        if key not in self._found:
            path = (int(self._hashes[source, target]) + ports) % self._fabric.paths
            good = usable_paths(self._fabric, self._dead, source, target)
            self._found[key] = path if path in good else good[path % len(good)]
        return self._found[key]


def usable_paths(fabric: Fabric, dead: npt.NDArray[np.bool_], source: int, target: int) -> list[int]:
    """The paths between two hosts that avoid dead links; all of them if none does."""
    if not dead.any():
        return list(range(fabric.paths))
    good = [p for p in range(fabric.paths) if not dead[fabric.route(source, target, p)].any()]
    return good or list(range(fabric.paths))


def split(
    tasks: Tasks, fabric: Fabric, dead: npt.NDArray[np.bool_], least_bytes: int, rng: np.random.Generator
) -> tuple[Tasks, Ints]:
    """Ethereal: the graph with its flows split, and the path of each (T). A flow that is split becomes the task that its
    parts end in. ``dead``: links that are down from the start (L); ``least_bytes``: a part is never less."""
    paths = np.zeros(len(tasks.source), np.int64)
    leaves = fabric.leaves()
    crossing = (tasks.bytes > 0) & (leaves[tasks.source] != leaves[tasks.target])
    whole, routes = np.flatnonzero(crossing), []
    keys = np.stack([tasks.source[whole], leaves[tasks.target[whole]], tasks.batch[whole]])
    groups = np.unique(keys, axis=1, return_inverse=True)[1].ravel()
    order = np.argsort(groups, kind="stable")
    parents: list[int] = []
    for members in np.split(whole[order], np.flatnonzero(np.diff(groups[order])) + 1):
        if len(members):
            routes += _routes(tasks, fabric, dead, least_bytes, members, rng, paths, parents)
    if not parents:
        return tasks, paths
    return _with_parts(tasks, paths, np.array(parents), routes)


def _routes(
    tasks: Tasks,
    fabric: Fabric,
    dead: npt.NDArray[np.bool_],
    least_bytes: int,
    members: Ints,
    rng: np.random.Generator,
    paths: Ints,
    parents: list[int],
) -> list[list[int]]:
    """Route one batch: whole flows get their path in ``paths``, those that are split go to ``parents``; returns the
    latter's."""
    good = usable_paths(fabric, dead, int(tasks.source[members[0]]), int(tasks.target[members[0]]))
    parts = parts_of_flows(len(members), len(good))
    parts = [n if tasks.bytes[flow] >= n * least_bytes else 1 for n, flow in zip(parts, members, strict=True)]
    found = []
    for flow, turns in zip(members, spread(parts, len(good), int(rng.integers(len(good)))), strict=True):
        if len(turns) == 1:
            paths[flow] = good[turns[0]]
        else:
            parents.append(int(flow))
            found.append([good[turn] for turn in turns])
    return found


def _with_parts(tasks: Tasks, paths: Ints, parents: Ints, routes: list[list[int]]) -> tuple[Tasks, Ints]:
    """Add the parts: each waits for what its flow waited for, and the flow, now a task, for its parts."""
    counts = np.array([len(route) for route in routes])
    of_part = np.repeat(parents, counts)
    parts = np.arange(len(of_part)) + len(tasks.source)
    place = np.arange(len(of_part)) - np.repeat(np.cumsum(counts) - counts, counts)
    share = tasks.bytes[of_part] // np.repeat(counts, counts)
    last = place == np.repeat(counts - 1, counts)
    share = np.where(last, tasks.bytes[of_part] - share * place, share)
    nbytes = tasks.bytes.copy()
    nbytes[parents] = 0
    latency = tasks.latency_s.copy()
    latency[parents] = 0.0
    target = tasks.target.copy()
    before, after = _rewired(tasks, parents, counts, of_part, parts)
    columns: dict[str, Any] = {
        name: np.append(getattr(tasks, name), getattr(tasks, name)[of_part])
        for name in ("source", "cls", "leg", "batch", "message", "timed")
    }
    grown = replace(
        tasks,
        **columns,
        target=np.append(target, target[of_part]),
        bytes=np.append(nbytes, share),
        latency_s=np.append(latency, tasks.latency_s[of_part]),
        before=before,
        after=after,
    )
    return grown, np.append(paths, np.concatenate([np.array(route) for route in routes]))


def _rewired(tasks: Tasks, parents: Ints, counts: Ints, of_part: Ints, parts: Ints) -> tuple[Ints, Ints]:
    """Edges into flows that are split lead to their parts instead."""
    first = np.full(len(tasks.source), NO_PATH)
    first[parents] = np.cumsum(counts) - counts
    many = np.ones(len(tasks.source), np.int64)
    many[parents] = counts
    into = first[tasks.after] != NO_PATH
    repeat = np.where(into, many[tasks.after], 1)
    before = np.repeat(tasks.before, repeat)
    place = np.arange(len(before)) - np.repeat(np.cumsum(repeat) - repeat, repeat)
    after = np.repeat(tasks.after, repeat)
    split_edge = np.repeat(into, repeat)
    after[split_edge] = parts[first[after[split_edge]] + place[split_edge]]
    return np.append(before, parts), np.append(after, of_part)


def fixed_loads(tasks: Tasks, fabric: Fabric, paths: Ints) -> Ints:
    """Bytes that each link carries if each flow keeps to its path (L)."""
    loads = np.zeros(len(fabric.sources), np.int64)
    flows = np.flatnonzero(tasks.bytes > 0)
    for path in np.unique(paths[flows]):
        chosen = flows[paths[flows] == path]
        _add(loads, fabric.routes(tasks.source[chosen], tasks.target[chosen], int(path)), tasks.bytes[chosen])
    return loads


def sprayed_loads(tasks: Tasks, fabric: Fabric, dead: npt.NDArray[np.bool_]) -> Floats:
    """Bytes that each link carries if every flow is spread evenly over its usable paths (L)."""
    loads = np.zeros(len(fabric.sources))
    flows = np.flatnonzero(tasks.bytes > 0)
    pairs, sums = _pair_sums(tasks, flows, fabric.hosts)
    sources, targets = pairs // fabric.hosts, pairs % fabric.hosts
    routes = [fabric.routes(sources, targets, path) for path in range(fabric.paths)]
    lost = np.append(dead, False)
    good = np.array([~lost[route].any(axis=0) for route in routes])
    good |= ~good.any(axis=0)  # a pair without a usable path is as if all were
    shares = sums / good.sum(axis=0)
    for route, usable in zip(routes, good, strict=True):
        _add(loads, route, shares * usable)
    return loads


def _pair_sums(tasks: Tasks, flows: Ints, hosts: int) -> tuple[Ints, Floats]:
    """Pairs of hosts, as source * hosts + target, and the bytes between them."""
    keys = tasks.source[flows].astype(np.int64) * hosts + tasks.target[flows]
    pairs, place = np.unique(keys, return_inverse=True)
    sums = np.bincount(place.ravel(), weights=tasks.bytes[flows].astype(np.float64))
    return pairs.astype(np.int64), sums.astype(np.float64)


def _add(loads: npt.NDArray[np.float64] | Ints, routes: npt.NDArray[np.int32], nbytes: Floats | Ints) -> None:
    for links in routes[:MAX_HOPS]:
        there = links != NO_LINK
        np.add.at(loads, links[there], nbytes[there])
