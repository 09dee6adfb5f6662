"""Ports: admission, marks, strict priorities, transmission; and the list of what is under way on a link."""

from __future__ import annotations

from dblp.sim.fabric.kernel.access import classes, counts, links, meta, nodes, packets, queues
from dblp.sim.fabric.kernel.compiled import compiled, inlined
from dblp.sim.fabric.kernel.draw import unit
from dblp.sim.fabric.kernel.heap import schedule
from dblp.sim.fabric.kernel.state import (
    ARRIVE,
    BY_CLASS,
    DATA,
    EVENTS,
    NO_BUFFER,
    NONE,
    PORT_FREE,
    PUSHED_OUT,
    TRIMMED,
    World,
)


@inlined
def take_packet(w: World) -> int:
    """A free packet; the loop sees to it that there is one."""
    m = meta(w)
    packet = m.free_head
    m.free_head = packets(w)[packet].next
    m.free_count -= 1
    return int(packet)


@inlined
def cramped(w: World) -> bool:
    """Packets or timers are running out: the loop makes room before the next event, so what can wait until then should."""
    m = meta(w)
    return bool(m.free_count < m.most_packets or m.timers_room - m.timers < m.max_fan)


@inlined
def free_packet(w: World, packet: int) -> None:
    """Give a packet back."""
    m = meta(w)
    packets(w)[packet].next = m.free_head
    m.free_head = packet
    m.free_count += 1


@inlined
def count(w: World, what: int, packet: int) -> None:
    """Count something that happened to a packet."""
    counts(w)[2 * what + (0 if packets(w)[packet].kind == DATA else 1)] += 1


@compiled
def drop(w: World, packet: int, why: int) -> None:
    """A packet is lost."""
    count(w, why, packet)
    free_packet(w, packet)


@inlined
def append(w: World, queue: int, packet: int) -> None:
    """Put a packet last in a queue."""
    tail = queues(w)[queue].tail
    packets(w)[packet].next = NONE
    packets(w)[packet].prev = tail
    if tail == NONE:
        queues(w)[queue].head = packet
    else:
        packets(w)[tail].next = packet
    queues(w)[queue].tail = packet


@inlined
def unlink(w: World, queue: int, packet: int) -> None:
    """Take a packet out of a queue."""
    following, before = packets(w)[packet].next, packets(w)[packet].prev
    if before == NONE:
        queues(w)[queue].head = following
    else:
        packets(w)[before].next = following
    if following == NONE:
        queues(w)[queue].tail = before
    else:
        packets(w)[following].prev = before


@inlined
def take_first(w: World, queue: int) -> int:
    """Take the first packet out of the first queue from ``queue`` on that has one."""
    while queues(w)[queue].head == NONE:
        queue += 1
    q = queues(w)[queue]
    packet = q.head
    q.head = packets(w)[packet].next
    if q.head == NONE:
        q.tail = NONE
    else:
        packets(w)[q.head].prev = NONE
    return int(packet)


@inlined
def charge(w: World, link: int, size: int) -> None:
    """Bytes come into a port's backlog, or leave it (negative)."""
    line = links(w)[link]
    line.backlog += size
    line.peak = max(line.peak, line.backlog)
    nodes(w)[line.source].used += size


@inlined
def room(w: World, link: int) -> float:
    """Bytes that a port's backlog may have now. Of a shared buffer, alpha times what is free, and not more than is free."""
    m = meta(w)
    if not m.shared:
        return float(m.buffer)
    free = m.buffer - nodes(w)[links(w)[link].source].used
    return float(min(m.alpha * free, links(w)[link].backlog + free))


@compiled
def push_out(w: World, link: int, packet: int) -> bool:
    """Make room by dropping what came last of lower priority; whether it was enough."""
    size, mine, many = packets(w)[packet].size, packets(w)[packet].queue, meta(w).queues
    for number in range(many - 1, mine, -1):
        queue = link * many + number
        while links(w)[link].backlog + size > room(w, link) and queues(w)[queue].tail != NONE:
            victim = queues(w)[queue].tail
            unlink(w, queue, victim)
            charge(w, link, -packets(w)[victim].size)
            drop(w, victim, PUSHED_OUT)
    return bool(links(w)[link].backlog + size <= room(w, link))


@compiled
def trim(w: World, link: int, packet: int) -> bool:
    """Cut a packet's payload off; whether its header may enter: headers have as much room again as whole packets."""
    m, p = meta(w), packets(w)[packet]
    if not m.trim or p.kind != DATA or p.trimmed:
        return bool(links(w)[link].backlog + p.size <= 2.0 * room(w, link) and m.trim)
    p.size = m.header
    p.trimmed = 1
    p.queue = 0
    count(w, TRIMMED, packet)
    return bool(links(w)[link].backlog + p.size <= 2.0 * room(w, link))


@compiled
def mark(w: World, link: int, packet: int) -> None:
    """RED on the backlog at arrival (Floyd and Jacobson 1993, without averaging, as DCTCP and DCQCN use it)."""
    p = packets(w)[packet]
    kind = classes(w)[p.cls]
    backlog = links(w)[link].backlog + p.size
    if kind.mark_min == 0 or backlog <= kind.mark_min:
        return
    if backlog > kind.mark_max:
        p.marked = 1
        return
    share = kind.mark_share * (backlog - kind.mark_min) / (kind.mark_max - kind.mark_min)
    if unit(w) < share:
        p.marked = 1


@compiled
def admitted(w: World, link: int, packet: int) -> bool:
    """Whether a switch's port takes a packet; one that it does not take is gone."""
    p = packets(w)[packet]
    limit = classes(w)[p.cls].drop
    if limit and links(w)[link].backlog + p.size > limit:
        drop(w, packet, BY_CLASS)
        return False
    if links(w)[link].backlog + p.size > room(w, link):
        made = push_out(w, link, packet) if meta(w).push_out else trim(w, link, packet)
        if not made:
            drop(w, packet, NO_BUFFER)
            return False
    if p.ecn:
        mark(w, link, packet)
    return True


@inlined
def fly(w: World, link: int, packet: int, arrives: int) -> None:
    """A packet is under way on a link; those of one link arrive in order, so only the first has an event."""
    line = links(w)[link]
    packets(w)[packet].arrives = arrives
    packets(w)[packet].next = NONE
    if line.fly_head == NONE:
        line.fly_head = packet
        schedule(w, arrives, link * EVENTS + ARRIVE)
    else:
        packets(w)[line.fly_tail].next = packet
    line.fly_tail = packet


@compiled
def transmit(w: World, now: int, link: int) -> None:
    """The first packet of the first queue goes on the wire."""
    line = links(w)[link]
    packet = take_first(w, link * meta(w).queues)
    size, kind = packets(w)[packet].size, packets(w)[packet].kind
    charge(w, link, -size)
    if line.unlimited and kind == DATA:
        nodes(w)[line.source].waiting -= 1
    line.free_at = now + int(size * line.ps_per_byte + 0.5)
    if kind == DATA:
        line.data_bytes += size
    meta(w).hops += 1
    fly(w, link, packet, line.free_at + line.delay)
    if line.backlog > 0:
        line.scheduled = 1
        schedule(w, line.free_at, link * EVENTS + PORT_FREE)


@compiled
def enqueue(w: World, now: int, link: int, packet: int) -> None:
    """A packet comes to a port."""
    line = links(w)[link]
    if not line.unlimited and not admitted(w, link, packet):
        return
    append(w, link * meta(w).queues + packets(w)[packet].queue, packet)
    charge(w, link, packets(w)[packet].size)
    if line.unlimited and packets(w)[packet].kind == DATA:
        nodes(w)[line.source].waiting += 1
    if line.scheduled:
        return
    if line.free_at > now:
        line.scheduled = 1
        schedule(w, line.free_at, link * EVENTS + PORT_FREE)
    else:
        transmit(w, now, link)


@inlined
def land(w: World, link: int) -> int:
    """The packet that has arrived at the end of a link; the next one's arrival is scheduled."""
    line = links(w)[link]
    packet = line.fly_head
    line.fly_head = packets(w)[packet].next
    if line.fly_head != NONE:
        schedule(w, packets(w)[line.fly_head].arrives, link * EVENTS + ARRIVE)
    return int(packet)
