"""Arrays of the packet engine: what a packet, a flow, a link are. Times are picoseconds, windows are packets.

Lists (queues, packets under way, free packets, chunks that are lost or outstanding, flows that wait for a turn) are linked by
index; NONE ends them. A flow may also be a task that sends nothing: a computation, or a point where several meet.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
NONE = -1

# Kinds of events: ``value = index * EVENTS + kind``.
ARRIVE, PORT_FREE, START, RTO, STALL, DEADLINE, PULL, LINK_CHANGE, SAMPLE, TURN, PACE, REPORT, EVENTS = range(
    13
)
# Kinds of packets.
DATA, ACK, NACK, PULLED, PROBE, BITMAP = range(6)
# States of flows, and of chunks at the sender.
WAITING, ACTIVE, DONE, FAILED = range(4)
NEW, OUTSTANDING, LOST, ACKED = range(4)
# Why ``run`` came back.
ALL_DONE, NOTHING_LEFT, TIME_OVER, MORE_PACKETS, MORE_TIMERS, PAUSED = range(6)
# Counters: two of each, of data and of control packets.
SENT, DELIVERED, TRIMMED, NO_BUFFER, BY_CLASS, PUSHED_OUT, LINK_LOSS, LINK_DOWN, COUNTERS = range(9)
COUNTER_NAMES = (
    "sent", "delivered", "trimmed", "no_buffer", "by_class", "pushed_out", "link_loss", "link_down",
)  # fmt: skip

POLICY_CODES = {"ecmp": 0, "ethereal": 1, "spray": 2, "random": 3, "reps": 4, "adaptive": 5}
ECMP, ETHEREAL, SPRAY, RANDOM, REPS, ADAPTIVE = range(6)
CONTROL_CODES = {"none": 0, "window": 1, "reno": 2, "cubic": 3, "dctcp": 4, "delay": 5, "pull": 6}
UNLIMITED, WINDOW, RENO, CUBIC, DCTCP, DELAY, PULL_PACED = range(7)
RECOVERY_CODES = {"order": 0, "time": 1, "passes": 2, "trim": 3, "never": 4}
BY_ORDER, BY_TIME, BY_PASSES, BY_TRIM, NEVER = range(5)
STOP_CODES = {"all": 0, "eager": 1, "stall": 2, "deadline": 3}
STOP_ALL, STOP_EAGER, STOP_STALL, STOP_DEADLINE = range(4)

TWINS = 4
"""A class's number and this: its droppable packets."""
RINGS = 4
"""Rings of a host, one a class: flows with something to send take turns, lower classes first."""
CACHED_PATHS = 8
"""REPS: entropies that a flow remembers (its artifact's circular buffer)."""
SAMPLES_KEPT = 8
"""Round trips, the least of which counts (``dblp.transport.congestion.delay.FILTER_SAMPLES``)."""
TRAIN_BURSTS = 32
"""Most bursts that leave together (``dblp.transport.burst.TRAIN_BURSTS``)."""
MARGIN = 64
"""Free packets that one event may take, where none sends a whole window."""


def _struct(**fields: str) -> np.dtype[Any]:
    """A structure; each value is a type and the names of its fields."""
    kinds = {"time": "i8", "float": "f8", "int": "i4", "flag": "u1"}
    return np.dtype(
        [(name, kinds[kind]) for kind, names in fields.items() for name in names.split()], align=True
    )


PACKET = _struct(
    time="sent arrives",
    int="flow chunk order size path next prev target",
    flag="kind cls queue ecn marked stop trimmed asks",
)
"""``asks``: the last of a portion, whose round trip counts.
``sent``: when it left its host. ``arrives``: at the end of the link that it is on. ``next``, ``prev``: in the list that it
is in."""
FLOW = _struct(
    time="""first_chunk rto_at stall_at ready_at start_at finished_at base_rtt latency first_successor last_cut
        newest_sent cubic_epoch freeze_until bytes""",
    float="window threshold srtt rttvar alpha cubic_max",
    int="""source target chunks need critical droppable next_new inflight acked received
        critical_received repair_head repair_tail out_head out_tail order highest recover window_end
        window_acked window_marked path turn credits pulls pull_next ring_next successors waiting timeouts lost
        cached cached_first wire_packets detour message portion offered part_head part_tail part_next
        air_next""",
    flag="""kind transport cls state timed on_ring rto_armed stall_armed sender_done repair_open
        slow_start on_pull_ring on_air in_parts""",
)  # fmt: skip
"""One direction of one message or of a part of it, or (``chunks`` 0) a task. ``need``: chunks that must arrive. ``waiting``:
predecessors that are not done. ``message``: the last part of the message, itself of one that is whole. In that one's row:
``portion``: packets that leave together at least while more are to come; ``offered``: packets that may leave; ``part_head``: the
first part that they are of. ``air_next``: see PATH."""
CHUNK = _struct(time="sent", int="order next prev", flag="state got again marked")
"""A packet's worth of a flow; ``got``: the receiver has it; ``again``: it has left more than once; ``marked``: it came
with a mark."""
LINK = _struct(
    time="free_at delay data_bytes backlog peak",
    float="ps_per_byte loss",
    int="source target fly_head fly_tail",
    flag="scheduled up known unlimited spare_control",
)
"""One direction of a cable and the port that feeds it. ``known``: routing takes it for usable. ``unlimited``: a host's, which
holds back."""
QUEUE = _struct(int="head tail")
"""One priority of a port."""
NODE = _struct(
    time="used pull_at",
    int="up_first up_count stride waiting pull_head pull_tail turn peer",
    flag="pull_armed turn_armed",
)
"""A host or switch. ``used``: bytes in its buffer. ``waiting``: data packets at a host's ports. ``turn``: path that its next flow
from a dead one takes. ``peer``: the host to which it turns next, if it sends in portions."""
CLASS = _struct(time="mark_min mark_max drop", float="mark_share", int="queue")
"""See ClassSpec; index: class, or class + TWINS."""
TRANSPORT = _struct(
    time="min_rto target deadline first_window flow_target",
    float="target_rtts stall_rtts",
    int="packet payload ack max_timeouts control recovery stop by_remaining ecn portions card",
)
"""See TransportSpec."""
PATH = _struct(
    time="last_cut next_at due_at heard_sent heard_at least_at life probe_until",
    float="window srtt rttvar least before_probe",
    int="samples inflight head tail order air_head heard_order heard_flow",
    flag="slow_start whole pace_armed due_armed",
)
"""What the endpoint keeps of a path for longer than a message: of flows in portions from one host to another. ``window`` 0: none
yet. ``samples``: round trips so far, of which the last ``SAMPLES_KEPT`` are in an array of their own. ``head``, ``tail``:
messages that have something to send, the oldest first. ``air_head``: flows with something in flight, in any order. ``least``: the
least round trip, last seen or probed for at ``least_at``, good for ``life``; while it is probed for, until ``probe_until``,
``before_probe`` has the window that was. ``whole``: all that the window lets go leaves at once. ``next_at``: when the next may
leave, if it is paced. ``due_at``: when the receiver reports what it was not asked about, 0: nothing is. ``heard_...``: of what
came last."""
EVENT = _struct(time="at sequence value")
CHANGE = _struct(time="at", float="loss", int="link", flag="action down spare_control")
"""A change of a link. ``action``: 0 the link itself, 1 what routing knows."""
META = _struct(
    time="""now sequence heap timers free_count free_head hops events timed_left timed_failed buffer seed sample_every
        sample_row freeze""",
    float="alpha",
    int="hosts queues policy header paths known_down planes max_fan most_packets timers_room series_rows link_count",
    flag="shared push_out trim handled",
)
"""One row: clock, sizes of the heaps, settings. ``max_fan``, ``most_packets``: timers and packets that one event may take, if
those that send much look at ``cramped`` meanwhile. ``handled``: the first of the links' heap is the event that is being
handled."""


World = int
"""Where the addresses of the arrays below are, in their order (``access`` has the functions that lead from it to them): one word,
as twenty arrays as arguments of every call would cost more than most calls do."""


class Arrays(NamedTuple):
    """All state of a run."""

    meta: Array
    """META (1)."""
    packets: Array
    """PACKET; grows."""
    flows: Array
    """FLOW (F)."""
    chunks: Array
    """CHUNK, those of a flow in a row."""
    links: Array
    """LINK (L)."""
    queues: Array
    """QUEUE (L * queues)."""
    nodes: Array
    """NODE (N)."""
    rings: Array
    """QUEUE (H * RINGS), of flows."""
    classes: Array
    """CLASS (2 * TWINS)."""
    transports: Array
    """TRANSPORT."""
    heap: Array
    """EVENT: arrivals and free ports, two a link at most."""
    timers: Array
    """EVENT: all others; grows."""
    changes: Array
    """CHANGE."""
    ups: Array
    """int32, see Fabric."""
    down: Array
    """int32 (S, H), see Fabric."""
    successors: Array
    """int32: flows, those of a flow in a row."""
    cached: Array
    """int32 (F or 1, CACHED_PATHS): REPS; rows after one another, as all here."""
    counts: Array
    """int64 (COUNTERS, 2): data, control."""
    random: Array
    """uint64 (1): state of the generator."""
    series: Array
    """int32 (rows, L): backlogs at equal intervals."""
    paths: Array
    """PATH (H * H or 1), of the host that sends and the one that receives."""
    samples: Array
    """float64 (H * H or 1, SAMPLES_KEPT): their round trips, picoseconds, the oldest overwritten first."""
    addresses: Array
    """int64: of the arrays above."""

    def world(self) -> World:
        """Where their addresses are; good while the arrays live, and until it is called again."""
        self.meta["timers_room"] = len(self.timers)
        assert all(array.flags.c_contiguous for array in self)
        self.addresses[:] = [array.ctypes.data for array in self[:-1]]
        return int(self.addresses.ctypes.data)
