"""The receiver: what has arrived, when it is enough, what it answers, and the pulls of the receiver-paced model."""

from __future__ import annotations

from dblp.sim.fabric.kernel.access import (
    chunks,
    counts,
    flows,
    links,
    nodes,
    packets,
    paths,
    transports,
    ups,
)
from dblp.sim.fabric.kernel.compiled import compiled, inlined
from dblp.sim.fabric.kernel.heap import set_timer
from dblp.sim.fabric.kernel.ports import count, enqueue, free_packet
from dblp.sim.fabric.kernel.sender import make_packet, path_of
from dblp.sim.fabric.kernel.state import (
    ACK,
    ACTIVE,
    BITMAP,
    DATA,
    EVENTS,
    NACK,
    NEVER,
    NONE,
    PROBE,
    PULL,
    PULL_PACED,
    PULLED,
    REPORT,
    SENT,
    STALL,
    STOP_EAGER,
    STOP_STALL,
    World,
)
from dblp.sim.fabric.kernel.tasks import complete
from dblp.sim.fabric.kernel.ways import next_link, unless_down

REPORT_PS = 4_000_000_000
"""How long what did not ask waits to be told of (``dblp.transport.feedback.FEEDBACK_DELAY_S``)."""


@compiled
def send_control(w: World, now: int, packet: int, source: int) -> None:
    """A control packet leaves a host: class 0, first queue, never marked."""
    p = packets(w)[packet]
    p.cls, p.ecn, p.trimmed = 0, 0, 0
    p.queue = 0
    p.path = unless_down(w, source, p.target, p.path)
    count(w, SENT, packet)
    enqueue(w, now, next_link(w, source, p.target, p.path), packet)


@inlined
def answer(w: World, now: int, packet: int, kind: int) -> None:
    """A packet goes back as its own answer, over the path that it came by."""
    p = packets(w)[packet]
    f = flows(w)[p.flow]
    p.kind, p.target, p.size = kind, f.source, transports(w)[f.transport].ack
    p.stop = 1 if f.state != ACTIVE else 0
    send_control(w, now, packet, f.target)


@inlined
def take(w: World, now: int, flow: int, chunk: int, marked: int) -> None:
    """A chunk has arrived."""
    f = flows(w)[flow]
    c = chunks(w)[f.first_chunk + chunk]
    if c.got or f.state != ACTIVE:
        return
    c.got, c.marked = 1, marked
    f.received += 1
    if chunk < f.critical:
        f.critical_received += 1
    stop = transports(w)[f.transport].stop
    enough = f.received >= f.need and f.critical_received == f.critical
    if f.received == f.chunks or (stop == STOP_EAGER and enough):
        complete(w, now, flow)
    elif stop == STOP_STALL and enough:
        f.stall_at = now + int(transports(w)[f.transport].stall_rtts * f.base_rtt)
        if not f.stall_armed:
            f.stall_armed = 1
            set_timer(w, f.stall_at, flow * EVENTS + STALL)


@compiled
def join_pulls(w: World, flow: int) -> None:
    """A flow joins its receiver's ring of pulls."""
    f = flows(w)[flow]
    n = nodes(w)[f.target]
    f.on_pull_ring = 1
    f.pull_next = NONE
    if n.pull_head == NONE:
        n.pull_head = flow
    else:
        flows(w)[n.pull_tail].pull_next = flow
    n.pull_tail = flow


@compiled
def add_pull(w: World, now: int, flow: int) -> None:
    """Each packet that came, whole or trimmed, is worth one more: it is asked for in turn, at the rate of the host's link."""
    f = flows(w)[flow]
    n = nodes(w)[f.target]
    f.pulls += 1
    if not f.on_pull_ring:
        join_pulls(w, flow)
    if not n.pull_armed:
        n.pull_armed = 1
        set_timer(w, max(now, n.pull_at), f.target * EVENTS + PULL)


@inlined
def hear(w: World, now: int, packet: int) -> None:
    """A packet of a path has come: it is answered if it asks, else told of later."""
    p = packets(w)[packet]
    place = path_of(w, p.flow)
    path = paths(w)[place]
    path.heard_flow, path.heard_order, path.heard_sent, path.heard_at = p.flow, p.order, p.sent, now
    if p.asks:
        path.due_at = 0
    elif path.due_at == 0:
        path.due_at = now + REPORT_PS
        if not path.due_armed:
            path.due_armed = 1
            set_timer(w, path.due_at, place * EVENTS + REPORT)


@inlined
def on_packet(w: World, now: int, packet: int) -> None:
    """A data packet or a probe has reached its host."""
    p = packets(w)[packet]
    flow = p.flow
    t = transports(w)[flows(w)[flow].transport]
    if p.kind == DATA and not p.trimmed:
        take(w, now, flow, p.chunk, p.marked)
    if t.recovery == NEVER:
        free_packet(w, packet)
        return
    if t.control == PULL_PACED and flows(w)[flow].state == ACTIVE:
        add_pull(w, now, flow)
    if t.portions:
        hear(w, now, packet)
        if not p.asks and (flows(w)[flow].state == ACTIVE or flows(w)[flow].message != flow):
            free_packet(w, packet)
            return
    kind = BITMAP if p.kind == PROBE else NACK if p.trimmed else ACK
    answer(w, now, packet, kind)


@compiled
def tell(w: World, now: int, flow: int, kind: int) -> None:
    """A control packet from a flow's receiver, of its own accord."""
    f = flows(w)[flow]
    packet = make_packet(w, now, flow, kind, 0)
    counts(w)[2 * SENT + 1] -= 1  # it is counted when it leaves
    p = packets(w)[packet]
    p.target, p.asks = f.source, 0
    p.stop = 1 if f.state != ACTIVE else 0
    send_control(w, now, packet, f.target)


@compiled
def on_report(w: World, now: int, place: int) -> None:
    """What came on a path and did not ask is told of after a while; the round trip is without that."""
    path = paths(w)[place]
    path.due_armed = 0
    if path.due_at == 0:
        return
    if now < path.due_at:
        path.due_armed = 1
        set_timer(w, path.due_at, place * EVENTS + REPORT)
        return
    path.due_at = 0
    flow = path.heard_flow
    packet = make_packet(w, now, flow, ACK, 0)
    counts(w)[2 * SENT + 1] -= 1  # it is counted when it leaves
    p = packets(w)[packet]
    p.target, p.order, p.sent = flows(w)[flow].source, path.heard_order, path.heard_sent + now - path.heard_at
    send_control(w, now, packet, flows(w)[flow].target)


@compiled
def on_stall(w: World, now: int, flow: int) -> None:
    """Nothing has come for a while: done, if that is so."""
    f = flows(w)[flow]
    f.stall_armed = 0
    if f.state != ACTIVE:
        return
    if now < f.stall_at:
        f.stall_armed = 1
        set_timer(w, f.stall_at, flow * EVENTS + STALL)
        return
    complete(w, now, flow)
    tell(w, now, flow, ACK)


@compiled
def on_deadline(w: World, now: int, flow: int) -> None:
    """The receiver's time is over: it goes on with what there is."""
    if flows(w)[flow].state > ACTIVE:
        return
    complete(w, now, flow)
    tell(w, now, flow, ACK)


@compiled
def on_pull(w: World, now: int, host: int) -> None:
    """The next flow of the ring gets its pull."""
    n = nodes(w)[host]
    n.pull_armed = 0
    flow = n.pull_head
    f = flows(w)[flow]
    n.pull_head = f.pull_next
    f.on_pull_ring = 0
    f.pulls -= 1
    if f.state != ACTIVE:
        f.pulls = 0
    else:
        tell(w, now, flow, PULLED)
        interval = transports(w)[f.transport].packet * links(w)[ups(w)[n.up_first]].ps_per_byte / n.up_count
        n.pull_at = now + int(interval)
    if f.pulls > 0:
        join_pulls(w, flow)
    if n.pull_head != NONE:
        n.pull_armed = 1
        set_timer(w, max(now, n.pull_at), host * EVENTS + PULL)
