"""Tasks: what waits for what. A flow or task that is done releases those that wait for it alone."""

from __future__ import annotations

from dblp.sim.fabric.kernel.access import flows, meta, successors, transports
from dblp.sim.fabric.kernel.compiled import compiled
from dblp.sim.fabric.kernel.heap import set_timer
from dblp.sim.fabric.kernel.state import ACTIVE, DEADLINE, DONE, EVENTS, FAILED, START, WAITING, World


@compiled
def release(w: World, now: int, flow: int) -> None:
    """All that a flow waited for is done: it starts after its latency."""
    f = flows(w)[flow]
    f.ready_at = now
    set_timer(w, now + f.latency, flow * EVENTS + START)
    deadline = transports(w)[f.transport].deadline
    if deadline and f.chunks:
        set_timer(w, now + deadline, flow * EVENTS + DEADLINE)


@compiled
def complete(w: World, now: int, flow: int) -> None:
    """A flow's receiver has what it waits for, or a task is over."""
    f = flows(w)[flow]
    f.state = DONE
    f.finished_at = now
    meta(w).timed_left -= f.timed
    for place in range(f.first_successor, f.first_successor + f.successors):
        follower = successors(w)[place]
        flows(w)[follower].waiting -= 1
        if flows(w)[follower].waiting == 0:
            release(w, now, follower)


@compiled
def fail(w: World, now: int, flow: int) -> None:
    """A sender gives up; what waits for the flow never starts."""
    f = flows(w)[flow]
    f.sender_done = 1
    if f.state == ACTIVE or f.state == WAITING:
        f.state = FAILED
        f.finished_at = now
        meta(w).timed_left -= f.timed
        meta(w).timed_failed += f.timed
