"""The sender's lists: what is outstanding, in order of leaving, and what is lost and waits for repair. And the sending of a
chunk."""

from __future__ import annotations

from dblp.sim.fabric.kernel.access import chunks, classes, flows, meta, packets, paths, samples, transports
from dblp.sim.fabric.kernel.compiled import compiled, inlined
from dblp.sim.fabric.kernel.heap import set_timer
from dblp.sim.fabric.kernel.ports import count, enqueue, take_packet
from dblp.sim.fabric.kernel.state import (
    ACKED,
    BY_ORDER,
    BY_PASSES,
    BY_TIME,
    DATA,
    EVENTS,
    LOST,
    NEVER,
    NONE,
    OUTSTANDING,
    PROBE,
    PULL_PACED,
    RTO,
    SAMPLES_KEPT,
    SENT,
    STOP_STALL,
    TRAIN_BURSTS,
    TWINS,
    UNLIMITED,
    World,
)
from dblp.sim.fabric.kernel.tasks import complete
from dblp.sim.fabric.kernel.ways import next_link, pick_path

DUPLICATES = 3
"""Later packets that must have arrived before one is lost (RFC 5681)."""
BURST_BYTES = 65_507
"""Most that leaves in one call (a UDP datagram's limit, which segmentation offload inherits)."""
LARGE_BYTES = 256 * 1024
"""Windows from here on leave whole (``dblp.transport.congestion.delay.SMALL_WINDOW_BYTES``)."""
LONG_RTT_PS = 2e9
"""Round trips from here on have it in parts all the same, and paced (``dblp.transport.congestion.delay.PACED_RTT_S``)."""
PACING_GAIN = 1.25
"""How much sooner than in a round trip a paced window leaves (``dblp.transport.congestion.delay.PACING_GAIN``)."""
SLOW_START_GAIN = 2.0
CATCH_UP_BYTES = 65_536
"""What leaves at once where pacing is late (``dblp.transport.departure.CATCH_UP_BYTES``)."""
TICK_PS = 1e9
"""Most that it is late (``dblp.transport.departure.TICK_S``)."""
MOST_BACKOFF = 6
"""A timeout doubles so many times at most."""


@compiled
def timeout(w: World, flow: int) -> int:
    """RFC 6298's timeout, with backoff, picoseconds."""
    f = flows(w)[flow]
    measured = f.srtt + 4.0 * f.rttvar if f.srtt > 0.0 else 3.0 * f.base_rtt
    return int(int(max(float(transports(w)[f.transport].min_rto), measured)) << min(f.timeouts, MOST_BACKOFF))


@compiled
def arm_timeout(w: World, now: int, flow: int) -> None:
    """The timeout starts anew."""
    f = flows(w)[flow]
    f.rto_at = now + timeout(w, flow)
    if not f.rto_armed:
        f.rto_armed = 1
        set_timer(w, f.rto_at, flow * EVENTS + RTO)


@inlined
def bound_met(w: World, flow: int) -> bool:
    """Whether the sender knows that what is missing may be missing: nothing but critical chunks is repaired then."""
    f = flows(w)[flow]
    return bool(transports(w)[f.transport].stop == STOP_STALL and f.acked >= f.need)


@inlined
def first_repair(w: World, flow: int) -> int:
    """The chunk to repair next, or NONE; what has arrived meanwhile, or need not, is taken off."""
    f = flows(w)[flow]
    met = bound_met(w, flow)
    while f.repair_head != NONE:
        chunk = f.repair_head
        if chunks(w)[f.first_chunk + chunk].state == LOST and not (met and chunk >= f.critical):
            break
        f.repair_head = chunks(w)[f.first_chunk + chunk].next
    if f.repair_head == NONE:
        f.repair_tail = NONE
    return int(f.repair_head)


@inlined
def path_of(w: World, flow: int) -> int:
    """The index of what is kept of the way from a flow's source to its target."""
    f = flows(w)[flow]
    return int(f.source * meta(w).hosts + f.target)


@inlined
def room_of(w: World, flow: int) -> float:
    """What the window of a path leaves: flows between two hosts share it."""
    return float(flows(w)[flow].window - paths(w)[path_of(w, flow)].inflight)


@compiled
def filtered(w: World, flow: int) -> float:
    """The least round trip of the last portions."""
    place = path_of(w, flow)
    least = samples(w)[place * SAMPLES_KEPT]
    for number in range(1, min(paths(w)[place].samples, SAMPLES_KEPT)):
        least = min(least, samples(w)[place * SAMPLES_KEPT + number])
    return float(least)


@compiled
def last_sample(w: World, flow: int) -> float:
    """The last round trip of a path."""
    place = path_of(w, flow)
    return float(samples(w)[place * SAMPLES_KEPT + (paths(w)[place].samples - 1) % SAMPLES_KEPT])


@compiled
def part(w: World, flow: int) -> float:
    """What leaves at once of a window in portions, packets: a part of it, or the whole."""
    f = flows(w)[flow]
    return float(
        f.window if paths(w)[path_of(w, flow)].whole else f.window / transports(w)[f.transport].portions
    )


@compiled
def set_part(w: World, flow: int) -> None:
    """The window has changed: a large one leaves whole, unless round trips are long."""
    f = flows(w)[flow]
    large = f.window * transports(w)[f.transport].packet >= LARGE_BYTES
    paths(w)[path_of(w, flow)].whole = large and filtered(w, flow) < LONG_RTT_PS


@compiled
def worth_sending(w: World, flow: int) -> float:
    """Room that a window in portions must have before anything leaves behind what is in flight."""
    f = flows(w)[flow]
    t = transports(w)[f.transport]
    if first_repair(w, flow) != NONE:
        return 1.0
    train = float(min(flows(w)[f.message].offered, TRAIN_BURSTS * (BURST_BYTES // t.packet)))
    return float(max(min(train, f.window / 2.0, part(w, flow)), 1.0))


@compiled
def pace(w: World, now: int, flow: int, count: int) -> None:
    """So many packets have left: where round trips are long, the next wait until a good part of one has passed."""
    f, p = flows(w)[flow], paths(w)[path_of(w, flow)]
    rtt = filtered(w, flow)
    if rtt < LONG_RTT_PS:
        return
    packet_ps = rtt / ((SLOW_START_GAIN if f.slow_start else PACING_GAIN) * f.window)
    together = max(CATCH_UP_BYTES / transports(w)[f.transport].packet, part(w, flow) / 2.0)
    late = int(TICK_PS if p.whole else min(TICK_PS, together * packet_ps))
    p.next_at = max(p.next_at, now - late) + int(count * packet_ps)


@compiled
def window_full(w: World, flow: int) -> bool:
    """Whether the window has no room for what would leave together."""
    f = flows(w)[flow]
    if transports(w)[f.transport].portions == 0:
        return bool(f.inflight >= max(f.window, 1.0))
    return bool(paths(w)[path_of(w, flow)].inflight > 0 and room_of(w, flow) < worth_sending(w, flow))


@inlined
def has_work(w: World, flow: int) -> bool:
    """Whether a flow has something to send."""
    f = flows(w)[flow]
    if f.sender_done:
        return False
    if f.next_new < f.chunks:
        return True
    passes = transports(w)[f.transport].recovery == BY_PASSES
    return bool(first_repair(w, flow) != NONE and (not passes or f.repair_open))


@compiled
def sendable(w: World, flow: int) -> bool:
    """Whether a flow may send a packet now."""
    f = flows(w)[flow]
    if f.sender_done:
        return False
    t = transports(w)[f.transport]
    if t.control == PULL_PACED:
        if f.credits == 0:
            return False
    elif t.control != UNLIMITED and window_full(w, flow):
        return False
    return has_work(w, flow)


@inlined
def take_chunk(w: World, flow: int) -> int:
    """The chunk that leaves next: a lost one before a new one."""
    f = flows(w)[flow]
    repair = first_repair(w, flow)
    if repair == NONE or (transports(w)[f.transport].recovery == BY_PASSES and not f.repair_open):
        f.next_new += 1
        return int(f.next_new - 1)
    f.repair_head = chunks(w)[f.first_chunk + repair].next
    return repair


@inlined
def count_inflight(w: World, flow: int, change: int) -> None:
    """Packets that are in flight, of a flow, and of the path if it has a window."""
    f = flows(w)[flow]
    f.inflight += change
    if transports(w)[f.transport].portions:
        paths(w)[path_of(w, flow)].inflight += change


@inlined
def join_outstanding(w: World, now: int, flow: int, chunk: int) -> None:
    """A chunk leaves."""
    f = flows(w)[flow]
    c = chunks(w)[f.first_chunk + chunk]
    c.state, c.sent, c.order = OUTSTANDING, now, f.order
    c.next, c.prev = NONE, f.out_tail
    if f.out_tail == NONE:
        f.out_head = chunk
    else:
        chunks(w)[f.first_chunk + f.out_tail].next = chunk
    f.out_tail = chunk
    f.order += 1
    count_inflight(w, flow, 1)
    if transports(w)[f.transport].portions and not f.on_air:
        p = paths(w)[path_of(w, flow)]
        f.on_air, f.air_next = 1, p.air_head
        p.air_head = flow


@inlined
def leave_outstanding(w: World, flow: int, chunk: int) -> None:
    """A chunk is acknowledged or lost."""
    f = flows(w)[flow]
    c = chunks(w)[f.first_chunk + chunk]
    if c.prev == NONE:
        f.out_head = c.next
    else:
        chunks(w)[f.first_chunk + c.prev].next = c.next
    if c.next == NONE:
        f.out_tail = c.prev
    else:
        chunks(w)[f.first_chunk + c.next].prev = c.prev
    count_inflight(w, flow, -1)


@compiled
def lose(w: World, flow: int, chunk: int) -> None:
    """An outstanding chunk is taken for lost."""
    leave_outstanding(w, flow, chunk)
    f = flows(w)[flow]
    c = chunks(w)[f.first_chunk + chunk]
    c.state, c.next, c.again = LOST, NONE, 1
    if f.repair_head == NONE:
        f.repair_head = chunk
    else:
        chunks(w)[f.first_chunk + f.repair_tail].next = chunk
    f.repair_tail = chunk
    f.lost += 1


@inlined
def acknowledge(w: World, flow: int, chunk: int) -> bool:
    """The receiver has a chunk; False if that is no news."""
    f = flows(w)[flow]
    c = chunks(w)[f.first_chunk + chunk]
    if c.state == ACKED:
        return False
    if c.state == OUTSTANDING:
        leave_outstanding(w, flow, chunk)
    c.state = ACKED
    f.acked += 1
    return True


@inlined
def overdue(w: World, flow: int, chunk: int) -> bool:
    """Whether an outstanding chunk is lost, judged by what has been acknowledged."""
    f = flows(w)[flow]
    c = chunks(w)[f.first_chunk + chunk]
    recovery = transports(w)[f.transport].recovery
    if recovery == BY_ORDER:
        return bool(c.order + DUPLICATES <= f.highest)
    if recovery in (BY_TIME, BY_PASSES):
        return bool(c.sent + max(f.srtt, f.base_rtt) < f.newest_sent)
    return False


@inlined
def queue_of(w: World, flow: int, cls: int) -> int:
    """The queue of a data packet: its class's, or one of the powers of four that the flow's remaining packets lie between."""
    f = flows(w)[flow]
    if not transports(w)[f.transport].by_remaining:
        return int(classes(w)[cls].queue)
    remaining, number = f.chunks - f.acked, 0
    while remaining > 4 and number < meta(w).queues - 1:
        remaining >>= 2
        number += 1
    return number


@inlined
def chunk_class(w: World, flow: int, chunk: int) -> int:
    """Class of a chunk: 0 for critical ones, the droppable twin for small gradients, which lie between the others evenly."""
    f = flows(w)[flow]
    if chunk < f.critical:
        return 0
    small = (chunk + 1) * f.droppable // f.chunks > chunk * f.droppable // f.chunks
    return int(f.cls + TWINS) if small else int(f.cls)


@compiled
def make_packet(w: World, now: int, flow: int, kind: int, cls: int) -> int:
    """A packet from a flow's source to its target."""
    packet = take_packet(w)
    p, f = packets(w)[packet], flows(w)[flow]
    t = transports(w)[f.transport]
    p.kind, p.flow, p.target, p.sent, p.cls = kind, flow, f.target, now, cls
    p.chunk, p.order, p.size = NONE, f.order, t.ack
    p.queue = queue_of(w, flow, cls)
    p.ecn, p.asks = t.ecn, 1
    p.marked = p.stop = p.trimmed = 0
    p.path = pick_path(w, now, flow)
    count(w, SENT, packet)
    return packet


@inlined
def pass_over(w: World, flow: int) -> bool:
    """Whether all of a pass have left: of the first, all chunks; of the others, what the last bitmap lacked."""
    f = flows(w)[flow]
    return bool(f.next_new == f.chunks and (not f.repair_open or first_repair(w, flow) == NONE))


@compiled
def probe(w: World, now: int, flow: int) -> None:
    """All have left: the receiver is asked for its bitmap, behind them in the same queue."""
    f = flows(w)[flow]
    f.repair_open = 0
    packet = make_packet(w, now, flow, PROBE, f.cls)
    enqueue(w, now, next_link(w, f.source, f.target, packets(w)[packet].path), packet)
    arm_timeout(w, now, flow)


@compiled
def send_chunk(w: World, now: int, flow: int, asks: int) -> None:
    """A flow sends a packet, the last of its portion or not; one that never repairs is done with the last."""
    f = flows(w)[flow]
    t = transports(w)[f.transport]
    chunk = take_chunk(w, flow)
    packet = make_packet(w, now, flow, DATA, chunk_class(w, flow, chunk))
    p = packets(w)[packet]
    p.chunk, p.asks = chunk, asks
    p.size = t.packet - t.payload + min(t.payload, f.bytes - chunk * t.payload)
    f.wire_packets += 1
    if t.control == PULL_PACED:
        f.credits -= 1
    enqueue(w, now, next_link(w, f.source, f.target, p.path), packet)
    if t.recovery == NEVER:
        if f.next_new == f.chunks:
            f.sender_done = 1
            complete(w, now, flow)
        return
    if f.inflight == 0 or not f.rto_armed:
        arm_timeout(w, now, flow)
    join_outstanding(w, now, flow, chunk)
    if t.recovery == BY_PASSES and pass_over(w, flow):
        probe(w, now, flow)
