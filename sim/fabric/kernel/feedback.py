"""The sender's side of answers and timeouts, and the start of a flow."""

from __future__ import annotations

from dblp.sim.fabric.kernel.access import (
    chunks,
    flows,
    links,
    meta,
    nodes,
    packets,
    paths,
    transports,
    ups,
)
from dblp.sim.fabric.kernel.compiled import compiled, inlined
from dblp.sim.fabric.kernel.control import on_acked, on_lost, on_path_acked, on_timeout, take_sample
from dblp.sim.fabric.kernel.draw import below
from dblp.sim.fabric.kernel.heap import set_timer
from dblp.sim.fabric.kernel.hosts import join, keep, recall, wake
from dblp.sim.fabric.kernel.sender import (
    acknowledge,
    arm_timeout,
    last_sample,
    lose,
    overdue,
    pass_over,
    path_of,
    probe,
    set_part,
    timeout,
)
from dblp.sim.fabric.kernel.state import (
    ACK,
    ACTIVE,
    BITMAP,
    BY_ORDER,
    BY_PASSES,
    DONE,
    EVENTS,
    NACK,
    NONE,
    OUTSTANDING,
    PULL_PACED,
    REPS,
    RTO,
    WAITING,
    World,
)
from dblp.sim.fabric.kernel.tasks import complete, fail
from dblp.sim.fabric.kernel.ways import remember

SETTLED_PS = 10_000_000_000
"""From the handshake to the first round (``dblp.sim.fabric.exact.SETTLED_S``)."""
FIRST_LIFE_PS = 50_000_000_000
"""How long the least round trip that it measured holds (``dblp.transport.congestion.round_trip.FIRST_LIFE_S``)."""


@inlined
def measure(w: World, flow: int, rtt: int) -> None:
    """RFC 6298, section 2."""
    f = flows(w)[flow]
    if f.srtt == 0.0:
        f.srtt = float(rtt)
        f.rttvar = rtt / 2.0
        return
    f.rttvar += 0.25 * (abs(f.srtt - rtt) - f.rttvar)
    f.srtt += 0.125 * (rtt - f.srtt)


@compiled
def start(w: World, now: int, flow: int) -> None:
    """A flow begins; a task is over."""
    f = flows(w)[flow]
    if f.state != WAITING:
        return
    f.start_at = now
    if f.chunks == 0:
        complete(w, now, flow)
        return
    f.state = ACTIVE
    t = transports(w)[f.transport]
    packet_ps = t.packet * links(w)[ups(w)[nodes(w)[f.source].up_first]].ps_per_byte
    window = t.first_window / t.packet if t.first_window else f.base_rtt / packet_ps
    f.window = max(window, 1.0)
    f.credits = int(f.window + 0.999)
    if t.portions:
        if not paths(w)[path_of(w, flow)].window:  # the handshake has measured it
            measure(w, flow, f.base_rtt)
            take_sample(w, flow, f.base_rtt)
            p = paths(w)[path_of(w, flow)]
            p.least, p.least_at, p.life = f.base_rtt, now - SETTLED_PS, FIRST_LIFE_PS
            keep(w, flow)
            set_part(w, flow)
        join(w, now, flow)
        return
    wake(w, now, flow)


@compiled
def give_up(w: World, flow: int, chunk: int) -> None:
    """A chunk is taken for lost, if it is still waited for."""
    c = chunks(w)[flows(w)[flow].first_chunk + chunk]
    if c.state == OUTSTANDING:
        order = c.order
        lose(w, flow, chunk)
        on_lost(w, flow, order)


@inlined
def find_lost(w: World, flow: int) -> None:
    """Give up what is overdue. By order, a chunk that has left again is not: that its repeat is lost, duplicates do not tell
    (RFC 6675, section 4: IsLost), only a timeout does."""
    f = flows(w)[flow]
    by_order = transports(w)[f.transport].recovery == BY_ORDER
    chunk = f.out_head
    while chunk != NONE and overdue(w, flow, chunk):
        following = chunks(w)[f.first_chunk + chunk].next
        if not (by_order and chunks(w)[f.first_chunk + chunk].again):
            give_up(w, flow, chunk)
        chunk = following


@inlined
def on_ack(w: World, now: int, packet: int) -> None:
    """An acknowledgement: round trip, window, and what must be lost since this came before it."""
    p = packets(w)[packet]
    f = flows(w)[p.flow]
    measure(w, p.flow, now - p.sent)
    f.highest = max(f.highest, p.order)
    f.newest_sent = max(f.newest_sent, p.sent)
    if acknowledge(w, p.flow, p.chunk):
        on_acked(w, now, p.flow, now - p.sent, p.marked)
    if meta(w).policy == REPS and not p.marked:
        remember(w, p.flow, p.path)
    find_lost(w, p.flow)


@compiled
def acknowledge_path(w: World, now: int, flow: int, order: int, message: int, rtt: int) -> None:
    """An answer tells of all that came of a path, up to a packet; the receiver's last word, of all of a message."""
    p = paths(w)[path_of(w, flow)]
    acked = marked = 0
    one, before = p.air_head, NONE
    while one != NONE:
        f = flows(w)[one]
        chunk = f.out_head if message == NONE or f.message == message else NONE
        while chunk != NONE and (message != NONE or chunks(w)[f.first_chunk + chunk].order <= order):
            c = chunks(w)[f.first_chunk + chunk]
            following = c.next
            if (c.got or f.state == DONE) and acknowledge(w, one, chunk):
                acked += 1
                marked += c.marked
            chunk = following
        f.rto_at = max(f.rto_at, now + timeout(w, flow))
        if f.acked == f.chunks:
            f.sender_done = 1
        following = f.air_next
        if f.out_head != NONE:
            before = one
        else:
            f.on_air = 0
            if before == NONE:
                p.air_head = following
            else:
                flows(w)[before].air_next = following
        one = following
    on_path_acked(w, now, flow, rtt, acked, marked)


@compiled
def on_path_answer(w: World, now: int, packet: int) -> None:
    """The same where flows share a path's window. A message's end comes first, and measures nothing."""
    p = packets(w)[packet]
    f = flows(w)[p.flow]
    if p.stop:
        f.sender_done = 1
        if f.message == p.flow or not p.asks:
            acknowledge_path(w, now, p.flow, 0, f.message, int(last_sample(w, p.flow)))
    if p.asks:
        measure(w, p.flow, now - p.sent)
        f.highest = max(f.highest, p.order)
        f.newest_sent = max(f.newest_sent, p.sent)
        acknowledge_path(w, now, p.flow, p.order, NONE, now - p.sent)
        if not f.sender_done:
            find_lost(w, p.flow)


@compiled
def on_bitmap(w: World, flow: int, order: int) -> None:
    """The pass is over: what the bitmap lacks of what left before the probe is repaired."""
    f = flows(w)[flow]
    f.repair_open = 1
    while f.out_head != NONE and chunks(w)[f.first_chunk + f.out_head].order < order:
        if chunks(w)[f.first_chunk + f.out_head].got:
            acknowledge(w, flow, f.out_head)
        else:
            lose(w, flow, f.out_head)
    repair = f.repair_head
    while repair != NONE:  # what was taken for lost and was only late
        if chunks(w)[f.first_chunk + repair].got:
            acknowledge(w, flow, repair)
        repair = chunks(w)[f.first_chunk + repair].next


@compiled
def on_answer(w: World, now: int, packet: int) -> None:
    """A control packet has reached a sender."""
    p = packets(w)[packet]
    flow = p.flow
    f = flows(w)[flow]
    portions = transports(w)[f.transport].portions
    if portions and (p.kind == ACK or p.stop):
        recall(w, flow)
        f.timeouts = 0
        on_path_answer(w, now, packet)
        keep(w, flow)
        wake(w, now, flow)
        return
    if f.sender_done:
        return
    if p.stop:
        f.sender_done = 1
        return
    f.timeouts = 0
    if p.kind == ACK:
        on_ack(w, now, packet)
    elif p.kind == NACK:
        if chunks(w)[f.first_chunk + p.chunk].order == p.order:
            give_up(w, flow, p.chunk)
    elif p.kind == BITMAP:
        on_bitmap(w, flow, p.order)
    else:
        f.credits += 1
    if f.acked == f.chunks:
        f.sender_done = 1
        if portions:
            wake(w, now, flow)
        return
    f.rto_at = now + timeout(w, flow)
    wake(w, now, flow)


@compiled
def try_again(w: World, now: int, flow: int) -> None:
    """After a timeout all that is outstanding is lost; all but those of TCP's kind leave the path, REPS holds to good ones. The
    endpoint asks first: in portions, what is lost the answer to that tells."""
    f = flows(w)[flow]
    t = transports(w)[f.transport]
    if t.portions:
        probe(w, now, flow)
        return
    while f.out_head != NONE:
        lose(w, flow, f.out_head)
    on_timeout(w, now, flow)
    f.freeze_until = now + meta(w).freeze
    if t.recovery != BY_ORDER and meta(w).paths > 1:  # any other: not all that were on it to the same one
        f.path = (f.path + 1 + below(w, meta(w).paths - 1)) % meta(w).paths
    if t.control == PULL_PACED:
        f.credits = max(f.credits, 1)
    if t.recovery == BY_PASSES and pass_over(w, flow):
        probe(w, now, flow)
    arm_timeout(w, now, flow)
    wake(w, now, flow)


@compiled
def on_rto(w: World, now: int, flow: int) -> None:
    """A timer: the timeout has passed, or it was moved meanwhile. A flow that waits for its turn alone has no timeout."""
    f = flows(w)[flow]
    f.rto_armed = 0
    if f.sender_done:
        return
    if (f.on_ring or f.in_parts) and f.inflight == 0:
        f.rto_at = now + timeout(w, flow)
    if now < f.rto_at:
        f.rto_armed = 1
        set_timer(w, f.rto_at, flow * EVENTS + RTO)
        return
    f.timeouts += 1
    if f.timeouts > transports(w)[f.transport].max_timeouts:
        fail(w, now, flow)
    else:
        try_again(w, now, flow)
