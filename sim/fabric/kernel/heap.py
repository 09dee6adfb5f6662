"""The event queues: binary heaps in arrays, ordered by time and, at equal times, by the order of scheduling.

Links have a heap of their own. What travels on a link arrives in order, so that only the first of it needs an event: the heap
has two entries a link at most and stays in the processor's cache. Timers, of which a big collective has millions, are in the
other heap.

Most events of a link schedule another at once (the next arrival, the next departure). So the one that is being handled stays
where it is, first, until another takes its place, which is one way through the heap instead of two.
"""

from __future__ import annotations

from dblp.sim.fabric.kernel.access import heap, meta, timers
from dblp.sim.fabric.kernel.compiled import compiled, inlined
from dblp.sim.fabric.kernel.state import Array, World


@inlined
def earlier(heap: Array, one: int, at: int, sequence: int) -> bool:
    """Whether an entry comes before (at, sequence)."""
    e = heap[one]
    # No jumps: nothing could predict them.
    return bool((e.at < at) | ((e.at == at) & (e.sequence < sequence)))


@inlined
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
def replace(heap: Array, count: int, at: int, sequence: int, value: int) -> None:
    """Put an entry in the place of the first, of a heap of ``count``."""
    place, child = 0, 1
    while child < count:
        if child + 1 < count:
            child += earlier(heap, child + 1, heap[child].at, heap[child].sequence)
        if not earlier(heap, child, at, sequence):
            break
        put(heap, place, heap[child].at, heap[child].sequence, heap[child].value)
        place, child = child, 2 * child + 1
    put(heap, place, at, sequence, value)


@inlined
def pop(heap: Array, count: int) -> None:
    """Take the first entry off a heap of ``count``."""
    e = heap[count - 1]
    replace(heap, count - 1, e.at, e.sequence, e.value)


@compiled
def schedule(w: World, at: int, value: int) -> None:
    """An event of a link."""
    m = meta(w)
    m.sequence += 1
    if m.handled:
        m.handled = 0
        replace(heap(w), m.heap, at, m.sequence, value)
        return
    push(heap(w), m.heap, at, m.sequence, value)
    m.heap += 1


@inlined
def settle(w: World) -> None:
    """The event of a link that was handled leaves the heap, if no other has taken its place."""
    m = meta(w)
    if m.handled:
        m.handled = 0
        pop(heap(w), m.heap)
        m.heap -= 1


@compiled
def set_timer(w: World, at: int, value: int) -> None:
    """Any other event."""
    m = meta(w)
    m.sequence += 1
    push(timers(w), m.timers, at, m.sequence, value)
    m.timers += 1
