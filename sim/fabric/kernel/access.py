"""From a World, the addresses of its arrays, to the arrays: views without bounds, made in place and without reference counts.

``links(w)[3].free_at`` compiles to one load of an address and one of the field. Arrays of several dimensions are flat here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dblp.sim.fabric.kernel.compiled import rows, single
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
    PATH,
    QUEUE,
    TRANSPORT,
    World,
)

View = Callable[[World], Any]

meta: View = single(0, META)
packets: View = rows(1, PACKET)
flows: View = rows(2, FLOW)
chunks: View = rows(3, CHUNK)
links: View = rows(4, LINK)
queues: View = rows(5, QUEUE)
nodes: View = rows(6, NODE)
rings: View = rows(7, QUEUE)
classes: View = rows(8, CLASS)
transports: View = rows(9, TRANSPORT)
heap: View = rows(10, EVENT)
timers: View = rows(11, EVENT)
changes: View = rows(12, CHANGE)
ups: View = rows(13, np.dtype(np.int32))
down: View = rows(14, np.dtype(np.int32))
successors: View = rows(15, np.dtype(np.int32))
cached: View = rows(16, np.dtype(np.int32))
counts: View = rows(17, np.dtype(np.int64))
random: View = rows(18, np.dtype(np.uint64))
series: View = rows(19, np.dtype(np.int32))
paths: View = rows(20, PATH)
samples: View = rows(21, np.dtype(np.float64))
