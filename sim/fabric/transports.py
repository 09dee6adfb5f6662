"""Transport models of the packet engine: one table of fields, a named row for each protocol.

Models, not the protocols themselves: no handshake, equal packets, an acknowledgement for each packet but for ``portions``.
Sources: TCP: RFC 5681, RFC 6298, RFC 6675, RFC 9438, with an acknowledgement for each packet. DCTCP: RFC 8257. NDP: Handley
et al., SIGCOMM 2017. pFabric: Alizadeh et al., SIGCOMM 2013 (here eight priorities by what remains, not one a byte). MLT,
DLCP and DBLP: docs/policies.md has what they are; their rate control is the delay-based kind of
``dblp.transport.congestion.delay``, with a target in base round trips.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dblp.errors import ConfigError
from dblp.sim.fabric.spec import check, check_choice
from dblp.units import ByteCount, Seconds

CONTROLS = ("none", "window", "reno", "cubic", "dctcp", "delay", "pull")
RECOVERIES = ("order", "time", "passes", "trim", "never")
STOPS = ("all", "eager", "stall", "deadline")
PRIORITIES = ("class", "remaining")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSpec:
    """How flows send, repair and end. The defaults are those of ``dblp``."""

    model: str = "dblp"
    """Whose fields are the defaults: ``dblp``, ``mlt``, ``dctcp``, ``tcp``, ``cubic``, ``ndp``, ``pfabric`` or ``open``."""
    control: str = "delay"
    """Congestion control: ``none`` (line rate), ``window`` (fixed), ``reno``, ``cubic``, ``dctcp``, ``delay``, ``pull`` (the
    receiver paces)."""
    recovery: str = "time"
    """What is lost: ``order``: three later packets have arrived (RFC 6675), but a repeat only after a timeout. ``time``: one has
    that left a round trip later (RFC 8985). ``passes``: what a bitmap lacks, asked for when all have left (MLT, DBLP). ``trim``:
    what a trimmed header says. A timeout always."""
    stop: str = "stall"
    """When a receiver is done: ``all``; ``eager``: the bound is met; ``stall``: it is, and nothing came for ``stall_rtts``;
    ``deadline``: all, or ``deadline`` is over (OptiReduce)."""
    loss_bound: float = 0.0
    """Share of a flow's packets that may be missing."""
    critical_share: float = 0.0
    """Share of them, the first, that may not: class 0."""
    droppable_share: float = 0.0
    """Share of them, evenly between the others, that switches may drop first: small gradients."""
    packet: ByteCount = ByteCount(1500)
    """Bytes of a full packet on the wire."""
    header: ByteCount = ByteCount(76)
    """Of which headers: IPv4, UDP and dblp's 48."""
    ack: ByteCount = ByteCount(64)
    """Bytes of a control packet on the wire."""
    initial_window: ByteCount = ByteCount(0)
    """First window; 0: what is under way at the host's rate in a base round trip."""
    min_rto: Seconds = Seconds(1e-3)
    """Least retransmission timeout."""
    max_timeouts: int = 20
    """So many in a row without an answer, each twice as long up to 64 times, and the flow has failed."""
    target_rtts: float = 1.5
    """delay: round trips that are tolerated, in base round trips; one more packet time a hop on top."""
    target: Seconds = Seconds(0.0)
    """delay: the same as a time; 0: ``target_rtts`` holds."""
    flow_target: Seconds = Seconds(0.0)
    """delay: most that Swift's flow scaling adds to the target of a small window (4 ms over the square root of its packets,
    none from 100 on); 0: none. The endpoint has 0.4 ms."""
    card: bool = False
    """False: a host sends a packet when its port is free, its flows in turn, acknowledgements before data that could not leave
    yet (as Linux's fair queueing and small queues). True: all that a window lets go waits in the card's queue at once, and what
    comes later behind it: as the endpoint sends, and ns-3's TCP."""
    portions: int = 0
    """With ``card``, as the endpoint sends: this part of a window (it has 4) at once, of 256 KB and more the whole while round
    trips are below 2 ms, in bursts of 64 KB, to each peer in turn; longer ones are paced. The last packet of each burst is
    answered, for all before it between the two hosts, and measures the round trip. Their flows share a window and a path, the
    oldest message first, and what is lost is asked for after a timeout (docs/fabric.md). 0: packet by packet."""
    stall_rtts: float = 2.0
    """stop="stall": base round trips of silence."""
    deadline: Seconds = Seconds(0.0)
    """stop="deadline": from when the flow could have left."""
    priority: str = "class"
    """Queue of a packet: by its ``class``, or by what of the flow is ``remaining`` (the switch needs several queues)."""
    ecn: bool = False
    """Packets ask to be marked instead of dropped."""

    def __post_init__(self) -> None:
        check_choice("model", self.model, tuple(MODELS))
        check_choice("control", self.control, CONTROLS)
        check_choice("recovery", self.recovery, RECOVERIES)
        check_choice("stop", self.stop, STOPS)
        check_choice("priority", self.priority, PRIORITIES)
        for field in ("loss_bound", "critical_share", "droppable_share"):
            check(0.0 <= getattr(self, field) <= 1.0, field, getattr(self, field), "must lie in [0, 1]")
        check(self.loss_bound < 1.0, "loss_bound", self.loss_bound, "must be below 1: something must arrive")
        waits = self.stop == "all" and self.loss_bound > 0
        check(
            not waits, "loss_bound", self.loss_bound, 'stop="all" waits for every packet: use eager or stall'
        )
        check(64 <= self.packet <= 65_535, "packet", self.packet, "must lie in 64..65535 bytes")
        check(
            0 <= self.header < self.packet, "header", self.header, f"must be less than packet={self.packet}"
        )
        check(0 < self.ack <= self.packet, "ack", self.ack, f"must lie in 1..packet={self.packet}")
        check(self.initial_window >= 0, "initial_window", self.initial_window, "must not be negative")
        check(self.min_rto > 0, "min_rto", self.min_rto, "a time above 0 is needed")
        check(self.max_timeouts >= 1, "max_timeouts", self.max_timeouts, "1 or more is needed")
        check(self.target_rtts >= 1, "target_rtts", self.target_rtts, "a base round trip at least is needed")
        check(self.target >= 0, "target", self.target, "must not be negative")
        check(self.flow_target >= 0, "flow_target", self.flow_target, "must not be negative")
        check(0 <= self.portions <= 64, "portions", self.portions, "must lie in 0..64")
        windowed = self.control not in ("none", "pull")
        check(
            not self.portions or windowed,
            "portions",
            self.portions,
            f"control={self.control!r} has no window",
        )
        check(self.stall_rtts > 0, "stall_rtts", self.stall_rtts, "must be above 0")
        deadline = self.stop == "deadline"
        check(
            (self.deadline > 0) == deadline, "deadline", self.deadline, 'goes with stop="deadline", above 0'
        )
        check(
            (self.control == "pull") == (self.recovery == "trim"),
            "control",
            self.control,
            "pull goes with trim",
        )

    @property
    def payload(self) -> int:
        """Bytes of a flow in a full packet."""
        return self.packet - self.header


_RELIABLE = {"stop": "all", "loss_bound": 0.0}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "dblp": {},
    "mlt": {"recovery": "passes", "stop": "eager", "loss_bound": 0.1},
    "dctcp": {"control": "dctcp", "recovery": "order", "ecn": True, **_RELIABLE},
    "tcp": {"control": "reno", "recovery": "order", "min_rto": 0.2, "initial_window": 14_600, **_RELIABLE},
    "cubic": {"control": "cubic", "recovery": "order", "min_rto": 0.2, "initial_window": 14_600, **_RELIABLE},
    "ndp": {"control": "pull", "recovery": "trim", **_RELIABLE},
    "pfabric": {
        "control": "window",
        "recovery": "time",
        "priority": "remaining",
        "min_rto": 60e-6,
        **_RELIABLE,
    },
    "open": {"control": "none", "recovery": "never", **_RELIABLE},
}
"""Fields of each model that differ from dblp's. Reno and CUBIC start with ten segments (RFC 6928) and Linux's least timeout;
pFabric times out after three round trips of about 20 us; ``open`` is traffic that nobody waits for."""


def transport(model: str, **fields: Any) -> TransportSpec:
    """A model with some fields changed; raises ConfigError."""
    if model not in MODELS:
        raise ConfigError(f"model={model!r}: known are {', '.join(MODELS)}")
    return TransportSpec(**{"model": model, **MODELS[model], **fields})
