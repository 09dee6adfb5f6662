"""Ways: the path of a packet at its host, and the link that it takes at a node."""

from __future__ import annotations

from dblp.sim.fabric.kernel.access import cached, down, flows, links, meta, nodes, ups
from dblp.sim.fabric.kernel.compiled import compiled, inlined
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


@inlined
def uplink(w: World, node: int, path: int) -> int:
    """The uplink that a path's digit names."""
    n = nodes(w)[node]
    if n.up_count == 1:  # of most hosts; two divisions less
        return int(ups(w)[n.up_first])
    return int(ups(w)[n.up_first + path // n.stride % n.up_count])


@inlined
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
def usable_from(w: World, source: int, target: int, path: int) -> int:
    """The path itself, or the next that is usable; itself again if none is."""
    paths = meta(w).paths
    for step in range(paths):
        candidate = (path + step) % paths
        if usable(w, source, target, candidate):
            return int(candidate)
    return path


@compiled
def any_usable(w: World, source: int, target: int) -> int:
    """A usable path, each as likely; any path if none is."""
    paths = meta(w).paths
    count = 0
    for path in range(paths):
        count += usable(w, source, target, path)
    if count == 0:
        return below(w, paths)
    place = below(w, count)
    for path in range(paths):
        if usable(w, source, target, path):
            if place == 0:
                return int(path)
            place -= 1
    return 0


@compiled
def unless_down(w: World, source: int, target: int, path: int) -> int:
    """The path, or any other if routing knows that it is down: what was on it spreads over all that are left."""
    if meta(w).known_down == 0 or usable(w, source, target, path):
        return path
    return any_usable(w, source, target)


@compiled
def detour(w: World, flow: int) -> int:
    """The fixed path of a flow; while that is down, one that the flow keeps: any (a hash over those that are left), or, of
    Ethereal, the next in its host's turn."""
    f = flows(w)[flow]
    if meta(w).known_down == 0 or usable(w, f.source, f.target, f.path):
        f.detour = NONE
        return int(f.path)
    if f.detour == NONE or not usable(w, f.source, f.target, f.detour):
        if meta(w).policy == ETHEREAL:
            n = nodes(w)[f.source]
            f.detour = usable_from(w, f.source, f.target, n.turn % meta(w).paths)
            n.turn = f.detour + 1
        else:
            f.detour = any_usable(w, f.source, f.target)
    return int(f.detour)


@compiled
def sprayed(w: World, flow: int) -> int:
    """The next path in turn; those that are down have no turn. A flow that would begin on one of them begins on any: short flows
    would all begin on the next."""
    f = flows(w)[flow]
    f.turn = (f.turn + 1) % meta(w).paths
    if f.wire_packets == 0:
        f.turn = unless_down(w, f.source, f.target, f.turn)
    elif meta(w).known_down > 0:
        f.turn = usable_from(w, f.source, f.target, f.turn)
    return int(f.turn)


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
def recycled_usable(w: World, now: int, flow: int) -> int:
    """REPS: as ``recycled``, but for cached paths that are down."""
    f = flows(w)[flow]
    path = recycled(w, now, flow)
    looks = 0
    while looks < f.cached and meta(w).known_down > 0 and not usable(w, f.source, f.target, path):
        path = recycled(w, now, flow)
        looks += 1
    return unless_down(w, f.source, f.target, path)


@compiled
def pick_path(w: World, now: int, flow: int) -> int:
    """The path of a flow's next packet."""
    f = flows(w)[flow]
    policy, paths = meta(w).policy, meta(w).paths
    if paths == 1:
        return 0
    if policy in (ECMP, ETHEREAL):
        return detour(w, flow)
    if policy == SPRAY:
        return sprayed(w, flow)
    if policy == REPS:
        return recycled_usable(w, now, flow)
    return unless_down(w, f.source, f.target, below(w, paths))


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
    """The usable uplink with the least backlog; of equals, each as likely; the first if none is usable."""
    n = nodes(w)[node]
    best, least, equals = ups(w)[n.up_first], -1, 0
    for place in range(n.up_first, n.up_first + n.up_count):
        link = ups(w)[place]
        backlog = links(w)[link].backlog
        if not links(w)[link].known or (least >= 0 and backlog > least):
            continue
        beyond = down_link(w, links(w)[link].target, target)
        if beyond != NONE and not links(w)[beyond].known:
            continue
        equals = equals + 1 if backlog == least else 1
        if equals == 1 or below(w, equals) == 0:
            best, least = link, backlog
    return int(best)


@inlined
def next_link(w: World, node: int, target: int, path: int) -> int:
    """The link that a packet takes from a node."""
    link = down_link(w, node, target)
    if link != NONE:
        return link
    if meta(w).policy == ADAPTIVE and node >= meta(w).hosts:
        return shortest(w, node, target)
    return uplink(w, node, path)
