"""Hosts: whose turn it is to send. Flows with something to send wait in a ring, one a class, and send a packet each in turn."""

from __future__ import annotations

from dblp.sim.fabric.kernel.access import flows, meta, nodes, paths, rings, transports
from dblp.sim.fabric.kernel.compiled import compiled, inlined
from dblp.sim.fabric.kernel.heap import set_timer
from dblp.sim.fabric.kernel.ports import cramped
from dblp.sim.fabric.kernel.sender import (
    BURST_BYTES,
    first_repair,
    has_work,
    pace,
    part,
    path_of,
    room_of,
    send_chunk,
    sendable,
    window_full,
)
from dblp.sim.fabric.kernel.state import EVENTS, NONE, PACE, RINGS, TRAIN_BURSTS, TURN, WAITING, World


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
        f.srtt, f.rttvar, f.order = p.srtt, p.rttvar, p.order


@compiled
def keep(w: World, flow: int) -> None:
    """For the other flows between the same hosts."""
    f, p = flows(w)[flow], paths(w)[path_of(w, flow)]
    p.window, p.slow_start, p.last_cut = f.window, f.slow_start, f.last_cut
    p.srtt, p.rttvar, p.order = f.srtt, f.rttvar, f.order


@compiled
def join_message(w: World, flow: int) -> None:
    """A part of a message has something to send, if only repairs: those go first."""
    f = flows(w)[flow]
    m = flows(w)[f.message]
    f.in_parts = 1
    if m.part_head == NONE:
        m.part_head = m.part_tail = flow
        f.part_next = NONE
    elif first_repair(w, flow) != NONE:
        f.part_next = m.part_head
        m.part_head = flow
    else:
        flows(w)[m.part_tail].part_next = flow
        m.part_tail = flow
        f.part_next = NONE


@inlined
def next_part(w: World, message: int) -> int:
    """The part of a message that sends next, or NONE; those that have nothing to send any more leave it."""
    m = flows(w)[message]
    while m.part_head != NONE and not has_work(w, m.part_head):
        f = flows(w)[m.part_head]
        m.offered -= f.chunks - f.next_new  # of one that was stopped
        f.next_new = f.chunks
        f.in_parts = 0
        m.part_head = f.part_next
    return int(m.part_head)


@compiled
def may_send(w: World, message: int) -> bool:
    """Whether a message has something to send: less than a portion waits while more is to come."""
    flow, m = next_part(w, message), flows(w)[message]
    if flow == NONE:
        return False
    return bool(first_repair(w, flow) != NONE or m.state != WAITING or m.offered >= m.portion)


@compiled
def join_path(w: World, message: int) -> None:
    """A message that has something to send joins its path, last."""
    m, p = flows(w)[message], paths(w)[path_of(w, message)]
    if m.on_ring or not may_send(w, message):
        return
    m.on_ring = 1
    m.ring_next = NONE
    if p.head == NONE:
        p.head = message
    else:
        flows(w)[p.tail].ring_next = message
    p.tail = message


@compiled
def first_of_path(w: World, place: int) -> int:
    """The oldest message of a path that has something to send, or NONE; those that have not leave it."""
    p = paths(w)[place]
    while p.head != NONE and not may_send(w, p.head):
        flows(w)[p.head].on_ring = 0
        p.head = flows(w)[p.head].ring_next
    return int(p.head)


@compiled
def alone(w: World, message: int) -> bool:
    """Whether no other message of a path has something to send behind this one."""
    other = flows(w)[message].ring_next
    while other != NONE and not may_send(w, other):
        other = flows(w)[other].ring_next
    return bool(other == NONE)


@compiled
def wait_for_pace(w: World, place: int) -> None:
    """A timer for when the next may leave."""
    p = paths(w)[place]
    if not p.pace_armed:
        p.pace_armed = 1
        set_timer(w, p.next_at, place * EVENTS + PACE)


@compiled
def asks(w: World, flow: int, count: int) -> bool:
    """Whether what leaves asks for an answer: not the end of a message, which is answered all the same, where nothing else waits
    and nothing was lost."""
    f = flows(w)[flow]
    m = flows(w)[f.message]
    if f.lost or m.lost or f.need < f.chunks or count < m.offered or m.state == WAITING:
        return True
    return not alone(w, f.message)


@compiled
def send_turn(w: World, now: int, place: int) -> bool:
    """A burst of a path's oldest message, or a train of full ones, into the card's queue; False if nothing may leave. Where the
    window has no room for as much again, the last packet of each burst asks for an answer."""
    message = first_of_path(w, place)
    if message == NONE:
        return False
    if paths(w)[place].next_at > now:
        wait_for_pace(w, place)
        return False
    first, m = next_part(w, message), flows(w)[message]
    recall(w, first)
    if window_full(w, first):
        return False
    f = flows(w)[first]
    burst = BURST_BYTES // transports(w)[f.transport].packet
    room = max(min(part(w, first), room_of(w, first)), 1.0)
    bursts = min(int(room) // burst, m.offered // burst, TRAIN_BURSTS)
    count = whole = bursts * burst
    if bursts < 2:
        count, whole = min(int(room), burst, m.offered), burst
    asking = room - count < min(float(whole), f.window / 2.0) and asks(w, first, count)
    if first_repair(w, first) != NONE:
        count, asking = 1, True
    pace(w, now, first, count)
    for left in range(count - 1, -1, -1):
        flow = next_part(w, message)
        recall(w, flow)
        fresh = flows(w)[flow].next_new
        send_chunk(w, now, flow, 1 if asking and left % burst == 0 else 0)
        m.offered -= flows(w)[flow].next_new - fresh
        keep(w, flow)
    return True


@inlined
def turn_again(w: World, now: int, host: int) -> None:
    """A host goes on when all else that is due now is done."""
    if not nodes(w)[host].turn_armed:
        nodes(w)[host].turn_armed = 1
        set_timer(w, now, host * EVENTS + TURN)


@compiled
def take_turns(w: World, now: int, host: int) -> None:
    """All that the windows of a host's paths let go, a burst or train to each peer in turn."""
    n, idle = nodes(w)[host], 0
    while idle < meta(w).hosts:
        if cramped(w):
            turn_again(w, now, host)
            return
        place = host * meta(w).hosts + n.peer
        n.peer = n.peer + 1 if n.peer + 1 < meta(w).hosts else 0
        if paths(w)[place].head != NONE and send_turn(w, now, place):
            idle = 0
        else:
            idle += 1


@compiled
def on_turn(w: World, now: int, host: int) -> None:
    """What starts at one time has started."""
    nodes(w)[host].turn_armed = 0
    take_turns(w, now, host)


@compiled
def on_pace(w: World, now: int, place: int) -> None:
    """The next of a path that is paced may leave."""
    paths(w)[place].pace_armed = 0
    take_turns(w, now, place // meta(w).hosts)


@compiled
def join(w: World, now: int, flow: int) -> None:
    """A flow in portions starts: it leaves when all others have joined that start now."""
    f = flows(w)[flow]
    flows(w)[f.message].offered += f.chunks
    join_message(w, flow)
    join_path(w, f.message)
    turn_again(w, now, f.source)


@compiled
def wake(w: World, now: int, flow: int) -> None:
    """Something about a flow has changed."""
    f = flows(w)[flow]
    t = transports(w)[f.transport]
    if t.portions:
        if not f.in_parts and has_work(w, flow):
            join_message(w, flow)
        join_path(w, f.message)
        take_turns(w, now, f.source)
        return
    if t.card:
        while sendable(w, flow) and not cramped(w):  # the next answer wakes it again
            send_chunk(w, now, flow, 1)
        return
    if not f.on_ring and sendable(w, flow):
        add_turn(w, flow)
    pump(w, now, f.source)
