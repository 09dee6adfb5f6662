"""From a World, the addresses of its arrays, to the arrays: views without bounds, which the compiler sees through."""

from __future__ import annotations

from typing import Any

import numpy as np

from dblp.sim.fabric.kernel.compiled import compiled, view
from dblp.sim.fabric.kernel.state import (
    CHANGE,
    CHUNK,
    CLASS,
    EVENT,
    FLOW,
    LINK,
    META,
    NODE,
    PACKET,
    QUEUE,
    TRANSPORT,
    Array,
    World,
)


@compiled
def meta(w: World) -> Any:
    """The one row of META."""
    return view(w[0], META)[0]


@compiled
def packets(w: World) -> Array:
    """``Arrays.packets``."""
    return view(w[1], PACKET)


@compiled
def flows(w: World) -> Array:
    """``Arrays.flows``."""
    return view(w[2], FLOW)


@compiled
def chunks(w: World) -> Array:
    """``Arrays.chunks``."""
    return view(w[3], CHUNK)


@compiled
def links(w: World) -> Array:
    """``Arrays.links``."""
    return view(w[4], LINK)


@compiled
def queues(w: World) -> Array:
    """``Arrays.queues``."""
    return view(w[5], QUEUE)


@compiled
def nodes(w: World) -> Array:
    """``Arrays.nodes``."""
    return view(w[6], NODE)


@compiled
def rings(w: World) -> Array:
    """``Arrays.rings``."""
    return view(w[7], QUEUE)


@compiled
def classes(w: World) -> Array:
    """``Arrays.classes``."""
    return view(w[8], CLASS)


@compiled
def transports(w: World) -> Array:
    """``Arrays.transports``."""
    return view(w[9], TRANSPORT)


@compiled
def heap(w: World) -> Array:
    """``Arrays.heap``."""
    return view(w[10], EVENT)


@compiled
def timers(w: World) -> Array:
    """``Arrays.timers``."""
    return view(w[11], EVENT)


@compiled
def changes(w: World) -> Array:
    """``Arrays.changes``."""
    return view(w[12], CHANGE)


@compiled
def ups(w: World) -> Array:
    """``Arrays.ups``."""
    return view(w[13], np.int32)


@compiled
def down(w: World) -> Array:
    """``Arrays.down``, flat."""
    return view(w[14], np.int32)


@compiled
def successors(w: World) -> Array:
    """``Arrays.successors``."""
    return view(w[15], np.int32)


@compiled
def cached(w: World) -> Array:
    """``Arrays.cached``, flat."""
    return view(w[16], np.int32)


@compiled
def counts(w: World) -> Array:
    """``Arrays.counts``, flat."""
    return view(w[17], np.int64)


@compiled
def random(w: World) -> Array:
    """``Arrays.random``."""
    return view(w[18], np.uint64)


@compiled
def series(w: World) -> Array:
    """``Arrays.series``, flat."""
    return view(w[19], np.int32)
