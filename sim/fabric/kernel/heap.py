"""The event queues: binary heaps in arrays, ordered by time and, at equal times, by the order of scheduling.

Links have a heap of their own. What travels on a link arrives in order, so that only the first of it needs an event: the heap
has two entries a link at most and stays in the processor's cache. Timers, of which a big collective has millions, are in the
other heap.
"""

from __future__ import annotations

from dblp.sim.fabric.kernel.access import heap, meta, timers
from dblp.sim.fabric.kernel.compiled import compiled
from dblp.sim.fabric.kernel.state import Array, World


@compiled
def earlier(heap: Array, one: int, at: int, sequence: int) -> bool:
    """Whether an entry comes before (at, sequence)."""
    return bool(heap[one].at < at or (heap[one].at == at and heap[one].sequence < sequence))


@compiled
def put(heap: Array, place: int, at: int, sequence: int, value: int) -> None:
    """Overwrite an entry."""
    heap[place].at = at
    heap[place].sequence = sequence
    heap[place].value = value


@compiled
def push(heap: Array, count: int, at: int, sequence: int, value: int) -> None:
    """Add an entry to a heap of ``count``."""
    place = count
    while place > 0:
        parent = (place - 1) >> 1
        if earlier(heap, parent, at, sequence):
            break
        put(heap, place, heap[parent].at, heap[parent].sequence, heap[parent].value)
        place = parent
    put(heap, place, at, sequence, value)


@compiled
def pop(heap: Array, count: int) -> int:
    """Take the first entry off a heap of ``count``; returns its value."""
    value = heap[0].value
    last = count - 1
    at, sequence = heap[last].at, heap[last].sequence
    place = 0
    while True:
        child = 2 * place + 1
        if child >= last:
            break
        if child + 1 < last and earlier(heap, child + 1, heap[child].at, heap[child].sequence):
            child += 1
        if not earlier(heap, child, at, sequence):
            break
        put(heap, place, heap[child].at, heap[child].sequence, heap[child].value)
        place = child
    put(heap, place, at, sequence, heap[last].value)
    return int(value)


@compiled
def schedule(w: World, at: int, value: int) -> None:
    """An event of a link."""
    m = meta(w)
    m.sequence += 1
    push(heap(w), m.heap, at, m.sequence, value)
    m.heap += 1


@compiled
def set_timer(w: World, at: int, value: int) -> None:
    """Any other event."""
    m = meta(w)
    m.sequence += 1
    push(timers(w), m.timers, at, m.sequence, value)
    m.timers += 1
