"""Hosts: whose turn it is to send. Flows with something to send wait in a ring, one a class, and send a packet each in turn."""

from __future__ import annotations

from dblp.sim.fabric.kernel.access import flows, meta, nodes, rings, transports
from dblp.sim.fabric.kernel.compiled import compiled
from dblp.sim.fabric.kernel.sender import portion, send_chunk, sendable
from dblp.sim.fabric.kernel.state import NONE, RINGS, World


@compiled
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


@compiled
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
def send_portions(w: World, now: int, flow: int) -> None:
    """All that the window lets go, into the card's queue, where packets of other flows, and control, wait behind it."""
    while sendable(w, flow):
        count = portion(w, flow)
        for left in range(count, 0, -1):
            send_chunk(w, now, flow, 1 if left == 1 else 0)


@compiled
def wake(w: World, now: int, flow: int) -> None:
    """Something about a flow has changed."""
    if transports(w)[flows(w)[flow].transport].card:
        send_portions(w, now, flow)
        return
    if not flows(w)[flow].on_ring and sendable(w, flow):
        add_turn(w, flow)
    pump(w, now, flows(w)[flow].source)
