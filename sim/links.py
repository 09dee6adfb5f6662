"""Links and hosts of a simulated network: their settings, their state, and what the kernel does with datagrams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dblp.sim.queues import SwitchPort, SwitchQueue
from dblp.sim.slabs import Arrival
from dblp.transport.impair import MAX_BURST_BYTES
from dblp.transport.impair_model import Impairer, Queue
from dblp.transport.impair_spec import ImpairSpec, Rate, parse_impair
from dblp.transport.port import Address, Bytes
from dblp.units import KIB, MIB

if TYPE_CHECKING:
    from dblp.sim.port import SimPort

SKB_OVERHEAD_BYTES = 412
"""Headroom, UDP and IP headers and skb_shared_info (320) that share an allocation with the payload."""
SKB_BYTES = 256
"""struct sk_buff itself."""
UNBOUNDED_BYTES = 1 << 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two hosts."""

    latency_s: float = 50e-6
    """Propagation, seconds; the default is that of a machine room."""
    rate_bps: float = 0.0
    """Bits per second of UDP payload; 0: unlimited."""
    queue_bytes: int = 256 * KIB
    """Bytes that may wait for the rate; what comes then is lost."""
    impair: ImpairSpec | str = ""
    """More impairments, as docs/impairments.md has them."""
    via: str = ""
    """Switch port behind the link (``Network.set_switch_port``), which other links may lead through too; empty: none."""

    def spec(self) -> ImpairSpec:
        """All but the latency as one spec; raises ConfigError if the impairments are wrong or limit the rate too."""
        spec = spec_of(self.impair)
        if not self.rate_bps:
            return spec
        return ImpairSpec((*spec.elements, Rate(self.rate_bps, self.queue_bytes)), spec.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """One host."""

    receive_buffer_bytes: int = 4 * MIB
    """Receive buffer of each path; datagrams are charged by ``truesize``. Linux's default is 212,992."""
    max_datagram_bytes: int = 1472
    """Largest UDP payload; a longer datagram is lost."""
    egress_bps: float = 0.0
    """Rate of its network card; 0: unlimited."""
    send_buffer_bytes: int = 4 * MIB
    """Bytes that may wait for the card before ``send`` blocks."""
    ingress: ImpairSpec | str = ""
    """Impairments of all that reaches it, in one shared queue: ``rate(1gbit,queue=128KB)`` makes incast."""
    switch: SwitchPort | None = None
    """Port of the switch that leads to it, behind ``ingress``: as ``rate`` there, with classes and congestion marks."""
    processing_s: float = 0.0
    """Time from a datagram's arrival to the read that hands it over; the buffer fills meanwhile."""


class Wire:
    """A link in use."""

    __slots__ = ("impairer", "latency_s", "via")

    def __init__(self, latency_s: float, impairer: Impairer, via: str) -> None:
        self.latency_s = latency_s
        self.impairer = impairer
        self.via = via


class Host:
    """A host in use."""

    def __init__(self, spec: HostSpec, ingress: Impairer, rng: np.random.Generator) -> None:
        self._rng = rng
        self.killed = False
        self.paused = False
        self.free_at = 0.0
        self.ports: list[SimPort] = []
        self.configure(spec, ingress)

    def configure(self, spec: HostSpec, ingress: Impairer) -> None:
        """Take over settings, with an idle network card."""
        self.spec = spec
        self.ingress = ingress
        self.card = Queue(Rate(spec.egress_bps, UNBOUNDED_BYTES)) if spec.egress_bps else None
        self.switch: SwitchQueue[tuple[Arrival, Address]] | None = (
            SwitchQueue(spec.switch, self._rng) if spec.switch else None
        )


def truesize(nbytes: int) -> int:
    """What Linux charges a receive buffer for one datagram of ``nbytes`` payload: 2304 for 1464, 768 for the smallest.

    The payload shares an allocation of a power of two with headers and skb_shared_info; sk_buff comes on top.
    """
    return SKB_BYTES + max(512, 1 << (nbytes + SKB_OVERHEAD_BYTES - 1).bit_length())


def charge(arrival: Arrival) -> int:
    last = len(arrival.data) - (arrival.count - 1) * arrival.segment
    return (arrival.count - 1) * truesize(arrival.segment) + truesize(last)


def spec_of(impair: ImpairSpec | str) -> ImpairSpec:
    return parse_impair(impair) if isinstance(impair, str) else impair


def together(at: npt.NDArray[np.float64], window_s: float) -> Iterator[tuple[int, int]]:
    """Cut ascending times into groups (first, end) that span at most ``window_s``."""
    first = 0
    while first < len(at):
        end = int(np.searchsorted(at, at[first] + window_s, "right"))
        yield first, end
        first = end


_WEIGHTS = np.random.default_rng(0).integers(1 << 63, size=MAX_BURST_BYTES // 8 + 1, dtype=np.uint64) * 2 + 1


def checksum(data: Bytes) -> bytes:
    """A position-dependent 64-bit sum of the words, and the odd bytes at the end: ten times quicker than a hash."""
    words = len(data) // 8
    total = np.dot(data[: words * 8].view(np.uint64), _WEIGHTS[:words])
    return bytes(np.uint64(total).tobytes() + data[words * 8 :].tobytes())
