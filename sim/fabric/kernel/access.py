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
    World,
)


@compiled
def meta(w: World) -> Any:
    """The one row of META."""
    return view(w[0], META)[0]


@compiled
def packets(w: World) -> Any:
    """``Arrays.packets``."""
    return view(w[1], PACKET)


@compiled
def flows(w: World) -> Any:
    """``Arrays.flows``."""
    return view(w[2], FLOW)


@compiled
def chunks(w: World) -> Any:
    """``Arrays.chunks``."""
    return view(w[3], CHUNK)


@compiled
def links(w: World) -> Any:
    """``Arrays.links``."""
    return view(w[4], LINK)


@compiled
def queues(w: World) -> Any:
    """``Arrays.queues``."""
    return view(w[5], QUEUE)


@compiled
def nodes(w: World) -> Any:
    """``Arrays.nodes``."""
    return view(w[6], NODE)


@compiled
def rings(w: World) -> Any:
    """``Arrays.rings``."""
    return view(w[7], QUEUE)


@compiled
def classes(w: World) -> Any:
    """``Arrays.classes``."""
    return view(w[8], CLASS)


@compiled
def transports(w: World) -> Any:
    """``Arrays.transports``."""
    return view(w[9], TRANSPORT)


@compiled
def heap(w: World) -> Any:
    """``Arrays.heap``."""
    return view(w[10], EVENT)


@compiled
def timers(w: World) -> Any:
    """``Arrays.timers``."""
    return view(w[11], EVENT)


@compiled
def changes(w: World) -> Any:
    """``Arrays.changes``."""
    return view(w[12], CHANGE)


@compiled
def ups(w: World) -> Any:
    """``Arrays.ups``."""
    return view(w[13], np.int32)


@compiled
def down(w: World) -> Any:
    """``Arrays.down``, flat."""
    return view(w[14], np.int32)


@compiled
def successors(w: World) -> Any:
    """``Arrays.successors``."""
    return view(w[15], np.int32)


@compiled
def cached(w: World) -> Any:
    """``Arrays.cached``, flat."""
    return view(w[16], np.int32)


@compiled
def counts(w: World) -> Any:
    """``Arrays.counts``, flat."""
    return view(w[17], np.int64)


@compiled
def random(w: World) -> Any:
    """``Arrays.random``."""
    return view(w[18], np.uint64)


@compiled
def series(w: World) -> Any:
    """``Arrays.series``, flat."""
    return view(w[19], np.int32)
