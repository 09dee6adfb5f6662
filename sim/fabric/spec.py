"""The description of a fabric: links, switches, topologies, faults. Frozen values; each checks itself and names its field.

What reads them from TOML is ``dblp.sim.fabric.load``; what makes nodes and links of them, ``dblp.sim.fabric.topology``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dblp.errors import ConfigError
from dblp.units import KIB, BitsPerSecond, ByteCount, Seconds

KINDS = ("star", "dumbbell", "leaf_spine", "fat_tree")
MAX_QUEUES = 8
"""Strict priorities of a port; Ethernet has eight (IEEE 802.1Q)."""
CLASSES = 4
"""Classes of datagrams, 0 critical to 3 lost first; each has a droppable twin, as its switch settings may differ."""
MAX_HOSTS = 16_384
MAX_SWITCH_PORTS = 1_024


def check(good: bool, field: str, value: object, remedy: str) -> None:
    """Raise ConfigError that names a field, unless its value is good."""
    if not good:
        raise ConfigError(f"{field}={value!r}: {remedy}")


def check_choice(field: str, value: str, known: Sequence[str]) -> None:
    """Raise ConfigError unless a value is one of the known names."""
    check(value in known, field, value, f"known are {', '.join(known)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """Both directions of a cable."""

    rate: BitsPerSecond = BitsPerSecond(100e9)
    """Bits per second on the wire; a packet's size counts its headers."""
    delay: Seconds = Seconds(500e-9)
    """Propagation one way, and what the receiving end takes to act."""

    def __post_init__(self) -> None:
        check(self.rate > 0, "rate", self.rate, "a rate above 0 bit/s is needed")
        check(self.delay >= 0, "delay", self.delay, "a time of 0 or more is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSpec:
    """What the switches do with the packets of one class (by DSCP in a commodity switch)."""

    queue: int = 0
    """Strict priority: the lowest number that waits leaves first. Control packets are in queue 0."""
    mark_min: ByteCount = ByteCount(0)
    """Backlog of the port from which arrivals are marked (RED, DCTCP's K); 0: never."""
    mark_max: ByteCount = ByteCount(0)
    """Backlog from which all are marked; 0: the same as ``mark_min``, a step."""
    mark_share: float = 1.0
    """Share that is marked just below ``mark_max``; it rises linearly from 0 at ``mark_min``."""
    drop: ByteCount = ByteCount(0)
    """Backlog of the port from which arrivals are dropped: selective dropping (MLT, DLCP); 0: only for want of buffer."""

    def __post_init__(self) -> None:
        check(0 <= self.queue < MAX_QUEUES, "queue", self.queue, f"must lie in 0..{MAX_QUEUES - 1}")
        for field in ("mark_min", "mark_max", "drop"):
            check(getattr(self, field) >= 0, field, getattr(self, field), "0 bytes or more are needed")
        check(
            not self.mark_max or self.mark_max >= self.mark_min > 0,
            "mark_max",
            self.mark_max,
            f"must be at least mark_min={self.mark_min}, which must not be 0",
        )
        check(0.0 < self.mark_share <= 1.0, "mark_share", self.mark_share, "must lie in (0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchSpec:
    """All switches of a fabric."""

    buffer: ByteCount = ByteCount(256 * KIB)
    """Bytes that may wait: at each port, or in the whole switch if it is shared."""
    shared: bool = False
    """The buffer is the switch's: a queue may take ``alpha`` times what is free (Choudhury and Hahne's dynamic threshold)."""
    alpha: float = 1.0
    """Of a shared buffer."""
    queues: int = 1
    """Strict priority queues of each port."""
    push_out: bool = False
    """An arrival that finds no room drops what came last of lower priority (pFabric)."""
    trim: bool = False
    """An arrival that finds no room loses its payload, its header goes on in queue 0 (NDP, UET)."""
    header: ByteCount = ByteCount(64)
    """What is left of a trimmed packet, bytes."""
    classes: tuple[ClassSpec, ...] = (ClassSpec(),)
    """Classes 0, 1, 2, 3; the last one given stands for those after it."""
    droppable: tuple[ClassSpec, ...] = ()
    """The same for their packets that may be dropped first (small gradients); empty: as ``classes``."""

    def __post_init__(self) -> None:
        check(self.buffer > 0, "buffer", self.buffer, "1 byte or more is needed")
        check(self.alpha > 0, "alpha", self.alpha, "must be above 0")
        check(1 <= self.queues <= MAX_QUEUES, "queues", self.queues, f"must lie in 1..{MAX_QUEUES}")
        check(self.header > 0, "header", self.header, "1 byte or more is needed")
        for field in ("classes", "droppable"):
            rows = getattr(self, field)
            check(len(rows) <= CLASSES, field, len(rows), f"there are {CLASSES} classes")
            for number, row in enumerate(rows):
                place = f"{field}[{number}].queue"
                check(row.queue < self.queues, place, row.queue, f"the switch has queues={self.queues}")
        check(bool(self.classes), "classes", self.classes, "one class at least is needed")

    def of_class(self, number: int, *, droppable: bool = False) -> ClassSpec:
        """Settings of a class."""
        rows = (self.droppable or self.classes) if droppable else self.classes
        return rows[min(number, len(rows) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologySpec:
    """Where hosts and switches are. Each kind reads the fields that it names, and refuses the others."""

    kind: str = "star"
    """``star``: one switch. ``dumbbell``: two, a fabric link between them. ``leaf_spine``: each leaf to each spine.
    ``fat_tree``: of switches with ``k`` ports, in two or three levels."""
    hosts: int = 0
    """star, dumbbell (half on each side): hosts."""
    leaves: int = 0
    """leaf_spine: leaf switches."""
    spines: int = 0
    """leaf_spine: spine switches; several links to one spine count as as many spines."""
    hosts_per_leaf: int = 0
    """leaf_spine: hosts under each leaf."""
    k: int = 0
    """fat_tree: ports of a switch, an even number."""
    levels: int = 0
    """fat_tree: 2 (k leaves, k/2 spines) or 3 (k pods of k/2 edge and k/2 aggregation switches, k²/4 cores; Al-Fares 2008)."""
    oversubscription: int = 1
    """fat_tree: so many times k/2 hosts under each edge switch."""
    planes: int = 1
    """Copies of the whole fabric; each host has a link to each."""
    host_link: LinkSpec = LinkSpec()
    """Between a host and its switch."""
    fabric_link: LinkSpec = LinkSpec()
    """Between switches."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        needed = _FIELDS[self.kind]
        for field in ("hosts", "leaves", "spines", "hosts_per_leaf", "k", "levels"):
            value = getattr(self, field)
            if field in needed:
                check(value > 0, field, value, f"a {self.kind} needs it, 1 or more")
            else:
                check(not value, field, value, f"a {self.kind} has no such field; it has {', '.join(needed)}")
        check(self.planes >= 1, "planes", self.planes, "1 or more are needed")
        check(self.oversubscription >= 1, "oversubscription", self.oversubscription, "1 or more is needed")
        if self.kind == "fat_tree":
            check(self.k >= 2 and self.k % 2 == 0, "k", self.k, "an even number of ports is needed")
            check(self.levels in (2, 3), "levels", self.levels, "2 or 3")
        else:
            check(self.oversubscription == 1, "oversubscription", self.oversubscription, _NOT_FAT)
        if self.kind == "dumbbell":
            check(self.hosts % 2 == 0, "hosts", self.hosts, "an even number is needed, half on each side")
        for field in ("spines", "leaves", "hosts_per_leaf", "k"):
            ports = getattr(self, field)
            check(
                ports <= MAX_SWITCH_PORTS,
                field,
                ports,
                f"no switch has so many ports, {MAX_SWITCH_PORTS} at most",
            )
        last, count = needed[-1] if self.kind == "leaf_spine" else needed[0], self.host_count
        good = 2 <= count <= MAX_HOSTS
        check(
            good,
            last,
            getattr(self, last),
            f"hosts of the {self.kind}: {count}, where 2..{MAX_HOSTS} are needed",
        )

    @property
    def host_count(self) -> int:
        """Hosts of the fabric."""
        if self.kind == "leaf_spine":
            return self.leaves * self.hosts_per_leaf
        if self.kind == "fat_tree":
            edges = self.k if self.levels == 2 else self.k * self.k // 2
            return edges * self.oversubscription * self.k // 2
        return self.hosts


_FIELDS = {
    "star": ("hosts",),
    "dumbbell": ("hosts",),
    "leaf_spine": ("leaves", "spines", "hosts_per_leaf"),
    "fat_tree": ("k", "levels"),
}
_NOT_FAT = "only a fat_tree has it; elsewhere rates and counts make it"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSpec:
    """A cable that is cut, or grey: it looks well and loses packets. Both directions unless ``one_way``."""

    link: str
    """Its two ends: ``leaf3-spine1``, ``h0-leaf0``; with planes, ``p1.leaf3-p1.spine1``. ``hosts``: the links of all hosts,
    one way those from them."""
    at: Seconds = Seconds(0.0)
    """From when on."""
    until: Seconds = Seconds(0.0)
    """Until when; 0: for good."""
    loss: float = 1.0
    """Share of the packets that is lost. 1: the link is down, which routing learns (``RoutingSpec.detect``); less is grey,
    nobody does."""
    one_way: bool = False
    """Only from the first end to the second."""
    data_only: bool = False
    """Control packets pass: as where control has a channel of its own (DBLP's is TCP)."""

    def __post_init__(self) -> None:
        check(
            "-" in self.link or self.link == ALL_HOSTS,
            "link",
            self.link,
            "two ends, as in leaf3-spine1, are needed",
        )
        check(self.at >= 0, "at", self.at, "a time of 0 or more is needed")
        check(not self.until or self.until > self.at, "until", self.until, f"must come after at={self.at}")
        check(0.0 <= self.loss <= 1.0, "loss", self.loss, "must lie in [0, 1]")

    @property
    def down(self) -> bool:
        """The link is cut, as routing learns."""
        return self.loss == 1.0 and not self.data_only


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSpec:
    """Who chooses among equal paths, and how."""

    policy: str = "ecmp"
    """``ecmp``: a hash of the flow. ``spray``: each packet, in turn, from a random first path. ``random``: each packet, any
    path. ``reps``: each packet, paths whose acknowledgement bore no mark again (Bonato et al., arXiv 2407.21625).
    ``ethereal``: one path a flow, minimal splitting (arXiv 2407.00550). ``adaptive``: each switch the shortest queue, for
    each packet."""
    detect: Seconds = Seconds(100e-6)
    """Time after which hosts and switches know that a link is down, or up again."""
    freeze: Seconds = Seconds(10e-3)
    """reps: after a timeout only paths that were good are used for so long."""

    def __post_init__(self) -> None:
        check_choice("policy", self.policy, POLICIES)
        for field in ("detect", "freeze"):
            check(getattr(self, field) >= 0, field, getattr(self, field), "a time of 0 or more is needed")


ALL_HOSTS = "hosts"
"""Name of the links of all hosts."""
POLICIES = ("ecmp", "spray", "random", "reps", "ethereal", "adaptive")
