"""Hosts: whose turn it is to send. Flows with something to send wait in a ring, one a class, and send a packet each in turn."""

from __future__ import annotations

from dblp.sim.fabric.kernel.access import flows, meta, nodes, paths, rings, transports
from dblp.sim.fabric.kernel.compiled import compiled, inlined
from dblp.sim.fabric.kernel.sender import (
    BURST_BYTES,
    first_repair,
    has_work,
    path_of,
    portion,
    send_chunk,
    sendable,
)
from dblp.sim.fabric.kernel.state import NONE, RINGS, World


@inlined
def add_turn(w: World, flow: int) -> None:
    """A flow joins its ring, last."""
    f = flows(w)[flow]
    ring = rings(w)[f.source * RINGS + f.cls]
    f.on_ring = 1
    f.ring_next = NONE
    if ring.head == NONE:
        ring.head = flow
    else:
        flows(w)[ring.tail].ring_next = flow
    ring.tail = flow


@inlined
def take_turn(w: World, host: int) -> int:
    """The next flow that may send, or NONE; it leaves its ring."""
    for number in range(host * RINGS, host * RINGS + RINGS):
        ring = rings(w)[number]
        while ring.head != NONE:
            flow = ring.head
            ring.head = flows(w)[flow].ring_next
            flows(w)[flow].on_ring = 0
            if sendable(w, flow):
                return int(flow)
    return NONE


@compiled
def pump(w: World, now: int, host: int) -> None:
    """Send while a port has nothing waiting: so a packet's path and class are chosen when it leaves, and queues are not at
    hosts."""
    while nodes(w)[host].waiting < meta(w).planes:
        flow = take_turn(w, host)
        if flow == NONE:
            return
        send_chunk(w, now, flow, 1)
        if sendable(w, flow):
            add_turn(w, flow)


@compiled
def recall(w: World, flow: int) -> None:
    """The endpoint's window is of a path, not of a message: a flow goes on with what the others before and beside it know."""
    f, p = flows(w)[flow], paths(w)[path_of(w, flow)]
    if p.window:
        f.window, f.slow_start, f.last_cut = p.window, p.slow_start, p.last_cut
        f.srtt, f.rttvar = p.srtt, p.rttvar


@compiled
def keep(w: World, flow: int) -> None:
    """For the other flows between the same hosts."""
    f, p = flows(w)[flow], paths(w)[path_of(w, flow)]
    p.window, p.slow_start, p.last_cut = f.window, f.slow_start, f.last_cut
    p.srtt, p.rttvar = f.srtt, f.rttvar


@compiled
def join_path(w: World, flow: int) -> None:
    """A flow that has something to send joins its path, last."""
    f, p = flows(w)[flow], paths(w)[path_of(w, flow)]
    f.on_ring = 1
    f.ring_next = NONE
    if p.head == NONE:
        p.head = flow
    else:
        flows(w)[p.tail].ring_next = flow
    p.tail = flow
    p.waiting += f.chunks - f.next_new


@compiled
def leave_path(w: World, place: int) -> None:
    """The first flow of a path has nothing to send any more."""
    p = paths(w)[place]
    f = flows(w)[p.head]
    p.waiting -= f.chunks - f.next_new  # of one that was stopped
    p.head = f.ring_next
    f.on_ring = 0


@compiled
def send_run(w: World, now: int, flow: int, most: int) -> int:
    """At most so many packets of a flow leave; the last asks if they are as many, or nothing else waits for the path. Returns how
    many."""
    f, p = flows(w)[flow], paths(w)[path_of(w, flow)]
    repair = first_repair(w, flow) != NONE
    count = 1 if repair else min(most, f.chunks - f.next_new)
    asks = repair or count == most or count == p.waiting
    for left in range(count, 0, -1):
        send_chunk(w, now, flow, 1 if asks and left == 1 else 0)
    return int(count)


@compiled
def send_portions(w: World, now: int, flow: int) -> None:
    """All that the window of a path lets go, into the card's queue, where packets of other flows, and control, wait behind it: of
    the oldest flow first, and of no later one before it has sent all. Of each burst the last packet asks."""
    place = path_of(w, flow)
    p = paths(w)[place]
    if not flows(w)[flow].on_ring and has_work(w, flow):
        join_path(w, flow)
    together = burst = 0
    while p.head != NONE:
        first = p.head
        if not has_work(w, first):
            leave_path(w, place)
            continue
        if together == 0:
            recall(w, first)
            if not sendable(w, first):
                return
            together = portion(w, first)
            burst = 0
        if burst == 0:
            burst = min(together, BURST_BYTES // transports(w)[flows(w)[first].transport].packet)
        sent = send_run(w, now, first, burst)
        together, burst = max(together - sent, 0), max(burst - sent, 0)


@compiled
def wake(w: World, now: int, flow: int) -> None:
    """Something about a flow has changed."""
    t = transports(w)[flows(w)[flow].transport]
    if t.portions:
        send_portions(w, now, flow)
        return
    if t.card:
        while sendable(w, flow):
            send_chunk(w, now, flow, 1)
        return
    if not flows(w)[flow].on_ring and sendable(w, flow):
        add_turn(w, flow)
    pump(w, now, flows(w)[flow].source)
