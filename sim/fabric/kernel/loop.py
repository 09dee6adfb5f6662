"""The loop: the earliest event of both heaps, again and again."""

from __future__ import annotations

from dblp.sim.fabric.kernel.access import changes, heap, links, meta, packets, series, timers
from dblp.sim.fabric.kernel.compiled import compiled, inlined
from dblp.sim.fabric.kernel.draw import unit
from dblp.sim.fabric.kernel.feedback import on_answer, on_rto, start
from dblp.sim.fabric.kernel.heap import earlier, pop, set_timer, settle
from dblp.sim.fabric.kernel.hosts import on_pace, on_turn, pump
from dblp.sim.fabric.kernel.ports import count, drop, enqueue, free_packet, land, transmit
from dblp.sim.fabric.kernel.receiver import on_deadline, on_packet, on_pull, on_report, on_stall
from dblp.sim.fabric.kernel.state import (
    ALL_DONE,
    ARRIVE,
    DATA,
    DEADLINE,
    DELIVERED,
    EVENTS,
    LINK_CHANGE,
    LINK_DOWN,
    LINK_LOSS,
    MORE_PACKETS,
    MORE_TIMERS,
    NOTHING_LEFT,
    PACE,
    PAUSED,
    PROBE,
    PULL,
    REPORT,
    RTO,
    SAMPLE,
    STALL,
    START,
    TIME_OVER,
    TURN,
    World,
)
from dblp.sim.fabric.kernel.ways import next_link


@inlined
def arrive(w: World, now: int, link: int) -> None:
    """A packet comes to the end of a link: into the next port, or to its host."""
    packet = land(w, link)
    p, line = packets(w)[packet], links(w)[link]
    if not line.up:
        drop(w, packet, LINK_DOWN)
        return
    if line.loss > 0.0 and not (line.spare_control and p.kind != DATA) and unit(w) < line.loss:
        drop(w, packet, LINK_LOSS)
        return
    if line.target != p.target:
        enqueue(w, now, next_link(w, line.target, p.target, p.path), packet)
        return
    count(w, DELIVERED, packet)
    if p.kind == DATA or p.kind == PROBE:
        on_packet(w, now, packet)
    else:
        on_answer(w, now, packet)
        free_packet(w, packet)


@inlined
def on_link(w: World, now: int, value: int) -> None:
    """An event of a link."""
    link = value // EVENTS
    if value % EVENTS == ARRIVE:
        arrive(w, now, link)
        return
    line = links(w)[link]
    line.scheduled = 0
    if line.backlog > 0:
        transmit(w, now, link)
    if line.unlimited:
        pump(w, now, line.source)


@compiled
def change(w: World, index: int) -> None:
    """A link goes down, comes up, gets grey; or routing learns of it."""
    c = changes(w)[index]
    line = links(w)[c.link]
    if c.action == 0:
        line.up = 1 - c.down
        line.loss = c.loss
        line.spare_control = c.spare_control
    elif line.known == c.down:
        line.known = 1 - c.down
        meta(w).known_down += 1 if c.down else -1


@compiled
def sample(w: World, now: int) -> None:
    """Note all backlogs; when the rows are full, every other one is kept and the interval doubles."""
    m = meta(w)
    if m.sample_row == meta(w).series_rows:
        m.sample_row = meta(w).series_rows // 2
        for row in range(m.sample_row):
            for link in range(m.link_count):
                series(w)[row * m.link_count + link] = series(w)[(2 * row + 1) * m.link_count + link]
        set_timer(w, now + m.sample_every, SAMPLE)  # this one lies between two of the longer interval
        m.sample_every *= 2
        return
    for link in range(meta(w).link_count):
        series(w)[m.sample_row * m.link_count + link] = links(w)[link].backlog
    m.sample_row += 1
    if m.heap + m.timers > 0:  # else nothing can happen any more
        set_timer(w, now + m.sample_every, SAMPLE)


@inlined
def on_timer(w: World, now: int, value: int) -> None:
    """Any other event."""
    index, kind = value // EVENTS, value % EVENTS
    if kind == START:
        start(w, now, index)
    elif kind == RTO:
        on_rto(w, now, index)
    elif kind == STALL:
        on_stall(w, now, index)
    elif kind == DEADLINE:
        on_deadline(w, now, index)
    elif kind == PULL:
        on_pull(w, now, index)
    elif kind == TURN:
        on_turn(w, now, index)
    elif kind == PACE:
        on_pace(w, now, index)
    elif kind == REPORT:
        on_report(w, now, index)
    elif kind == LINK_CHANGE:
        change(w, index)
    elif kind == SAMPLE:
        sample(w, now)


@compiled
def run(w: World, until: int, events: int) -> int:
    """Handle up to ``events`` events, none after ``until``; returns why it came back."""
    m = meta(w)
    for _ in range(events):
        if m.timed_left == 0:
            return ALL_DONE
        if m.heap + m.timers == 0:
            return NOTHING_LEFT
        if m.free_count < m.most_packets:
            return MORE_PACKETS
        if meta(w).timers_room - m.timers < m.max_fan:
            return MORE_TIMERS
        of_link = m.timers == 0
        if m.heap and m.timers:
            of_link = earlier(heap(w), 0, timers(w)[0].at, timers(w)[0].sequence)
        first = heap(w)[0] if of_link else timers(w)[0]
        at, value = first.at, first.value
        if at > until:
            m.now = until
            return TIME_OVER
        m.now = at
        m.events += 1
        if of_link:
            m.handled = 1
            on_link(w, at, value)
            settle(w)
        else:
            pop(timers(w), m.timers)
            m.timers -= 1
            on_timer(w, at, value)
    return PAUSED
