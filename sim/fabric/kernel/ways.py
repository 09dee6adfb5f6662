"""Ways: the path of a packet at its host, and the link that it takes at a node."""

from __future__ import annotations

from dblp.sim.fabric.kernel.access import cached, down, flows, links, meta, nodes, ups
from dblp.sim.fabric.kernel.compiled import compiled
from dblp.sim.fabric.kernel.draw import below
from dblp.sim.fabric.kernel.state import (
    ADAPTIVE,
    CACHED_PATHS,
    ECMP,
    ETHEREAL,
    NONE,
    REPS,
    SPRAY,
    World,
)


@compiled
def uplink(w: World, node: int, path: int) -> int:
    """The uplink that a path's digit names."""
    n = nodes(w)[node]
    return int(ups(w)[n.up_first + path // n.stride % n.up_count])


@compiled
def down_link(w: World, node: int, target: int) -> int:
    """The link down to a host, or NONE."""
    hosts = meta(w).hosts
    if node < hosts:
        return NONE
    return int(down(w)[(node - hosts) * hosts + target])


@compiled
def usable(w: World, source: int, target: int, path: int) -> bool:
    """Whether routing takes all links of a path for usable."""
    node = source
    while node != target:
        link = down_link(w, node, target)
        if link == NONE:
            link = uplink(w, node, path)
        if not links(w)[link].known:
            return False
        node = links(w)[link].target
    return True


@compiled
def next_usable(w: World, source: int, target: int, path: int) -> int:
    """The path itself, or the next that is usable; itself again if none is."""
    if meta(w).known_down == 0:
        return path
    paths = meta(w).paths
    for step in range(paths):
        candidate = (path + step) % paths
        if usable(w, source, target, candidate):
            return int(candidate)
    return path


@compiled
def recycled(w: World, now: int, flow: int) -> int:
    """REPS: the oldest cached path, each once; a random one if there is none. Frozen: cached ones again and again."""
    f = flows(w)[flow]
    if f.cached == 0:
        return below(w, meta(w).paths)
    path = cached(w)[flow * CACHED_PATHS + f.cached_first]
    f.cached_first = (f.cached_first + 1) % CACHED_PATHS
    if now < f.freeze_until:
        cached(w)[flow * CACHED_PATHS + (f.cached_first + f.cached - 1) % CACHED_PATHS] = path
    else:
        f.cached -= 1
    return int(path)


@compiled
def pick_path(w: World, now: int, flow: int) -> int:
    """The path of a flow's next packet."""
    f = flows(w)[flow]
    policy, paths = meta(w).policy, meta(w).paths
    if paths == 1:
        return 0
    if policy in (ECMP, ETHEREAL):
        path = f.path
    elif policy == SPRAY:
        f.turn = (f.turn + 1) % paths
        path = f.turn
    elif policy == REPS:
        path = recycled(w, now, flow)
    else:
        path = below(w, paths)
    return next_usable(w, f.source, f.target, path)


@compiled
def remember(w: World, flow: int, path: int) -> None:
    """REPS: a path acknowledged without a mark."""
    f = flows(w)[flow]
    if f.cached == CACHED_PATHS:
        return
    cached(w)[flow * CACHED_PATHS + (f.cached_first + f.cached) % CACHED_PATHS] = path
    f.cached += 1


@compiled
def shortest(w: World, node: int, target: int) -> int:
    """The usable uplink with the least backlog; of equals, a random one."""
    n = nodes(w)[node]
    first = below(w, n.up_count)
    best = ups(w)[n.up_first + first]
    least = -1
    for step in range(n.up_count):
        link = ups(w)[n.up_first + (first + step) % n.up_count]
        if links(w)[link].known and (least < 0 or links(w)[link].backlog < least):
            beyond = down_link(w, links(w)[link].target, target)
            if beyond == NONE or links(w)[beyond].known:
                best, least = link, links(w)[link].backlog
    return int(best)


@compiled
def next_link(w: World, node: int, target: int, path: int) -> int:
    """The link that a packet takes from a node."""
    link = down_link(w, node, target)
    if link != NONE:
        return link
    if meta(w).policy == ADAPTIVE and node >= meta(w).hosts:
        return shortest(w, node, target)
    return uplink(w, node, path)
