"""What happened to the packets, by the kernel's own counters: passed, dropped by the model, dropped by a full queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class LinkCounters:
    """Packets of one link and one way. ``a - b`` is what happened from b to a."""

    forwarded: int = 0
    """Passed on (what waits in a queue at this instant counts too)."""
    dropped_by_model: int = 0
    """Dropped because an impairment said so."""
    dropped_by_queue: int = 0
    """Dropped because the queue before the link was full."""

    @property
    def offered(self) -> int:
        """All that came."""
        return self.forwarded + self.dropped_by_model + self.dropped_by_queue

    @property
    def loss(self) -> float:
        """Share that the model dropped."""
        return self.dropped_by_model / self.offered if self.offered else 0.0

    def __add__(self, other: LinkCounters) -> LinkCounters:
        return LinkCounters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: LinkCounters) -> LinkCounters:
        return LinkCounters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Counters:
    """Of a whole network, and by point (``h0_down``, ``h0_up``, ``core_up``, ...). ``a - b`` is what happened from b to a."""

    points: Mapping[str, LinkCounters] = field(default_factory=dict)
    last_hops: frozenset[str] = frozenset()
    """Points that each packet between hosts passes last and once: the hosts' ``down``."""

    @property
    def forwarded(self) -> int:
        """Packets that reached a host."""
        return sum(at.forwarded for name, at in self.points.items() if name in self.last_hops)

    @property
    def dropped_by_model(self) -> int:
        """At all points."""
        return sum(at.dropped_by_model for at in self.points.values())

    @property
    def dropped_by_queue(self) -> int:
        """At all points."""
        return sum(at.dropped_by_queue for at in self.points.values())

    @property
    def offered(self) -> int:
        """Packets that hosts sent to each other: each was forwarded or dropped once."""
        return self.forwarded + self.dropped_by_model + self.dropped_by_queue

    @property
    def loss(self) -> float:
        """Share of the offered packets that the model dropped."""
        return self.dropped_by_model / self.offered if self.offered else 0.0

    def link(self, name: str, way: str = "both") -> LinkCounters:
        """One way of a link (``down``, ``up``), or both together."""
        ways = ("down", "up") if way == "both" else (way,)
        return sum((self.points.get(f"{name}_{way}", LinkCounters()) for way in ways), LinkCounters())

    def __sub__(self, other: Counters) -> Counters:
        zero = LinkCounters()
        points = {name: at - other.points.get(name, zero) for name, at in self.points.items()}
        return Counters(points, self.last_hops)
