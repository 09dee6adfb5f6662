"""The port: the small interface between the protocol core and a network, real or simulated.

A port sends bursts and hands over received datagrams a batch at a time. It never looks into a header.
``udp.UdpPort`` is the one on sockets, ``sim.port.SimPort`` the one in virtual time, ``impair.ImpairedPort``
wraps either.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


CLASSES = 4
"""Classes of datagrams, 0 critical to 3 lost first."""


class Ecn(enum.IntEnum):
    """The ECN bits of an IP header (RFC 3168, section 5)."""

    NOT_ECT = 0
    """The sender does not react to marks: do not mark."""
    ECT = 2
    """ECT(0): mark rather than drop."""
    CE = 3
    """A switch had a queue."""


class Address(NamedTuple):
    """A UDP address: numeric host (IPv4 or IPv6, with ``%scope`` where link-local) and port."""

    host: str
    port: int


class Burst:
    """Datagrams of one message, path and class that leave in one system call.

    ``data`` (uint8, 1-D) holds them back to back; all are ``segment`` bytes long but the last, which may be
    shorter. The memory is the core's and is reused as soon as ``Port.send`` returns. ``pointer``: the memory
    address of ``data[0]`` where the core knows it, which spares a port on sockets half a microsecond; 0: not
    known.
    """

    __slots__ = ("address", "cls", "data", "path", "pointer", "segment")

    def __init__(
        self, data: Bytes, segment: int, path: int, cls: int, address: Address, pointer: int = 0
    ) -> None:
        self.data = data
        self.segment = segment
        self.path = path
        self.cls = cls
        self.address = address
        self.pointer = pointer

    @property
    def count(self) -> int:
        """Number of datagrams."""
        return -(-len(self.data) // self.segment)


class Slab:
    """Received datagrams of equal length but the last, laid out with one stride in ``arena``.

    Datagram i starts at ``offset + i * stride`` in ``arena`` (uint8, 1-D) and is ``size`` bytes long, the
    last one ``last`` bytes (<= size). A coalesced super-packet has stride == size; single datagrams that were
    read into slots have the slot's stride. A *stack* is ``supers`` super-packets of one shape, ``spacing``
    bytes apart: ``part(k)`` is the k-th of them, and all else here speaks of the first. Valid only until the
    receiving callback returns: the arena is reused. ``received_at``: seconds on the loop's clock at which the
    kernel (or simulator) got the first of them; ``arrival(i)`` says it of each single datagram, or
    super-packet of a stack. ``marked``: all of them carry a congestion mark (ECN's CE), else none does.
    """

    __slots__ = (
        "arena",
        "arrived",
        "count",
        "last",
        "marked",
        "offset",
        "path",
        "received_at",
        "size",
        "source",
        "spacing",
        "stride",
        "supers",
    )

    def __init__(
        self,
        arena: Bytes,
        offset: int,
        stride: int,
        size: int,
        count: int,
        last: int,
        path: int,
        received_at: float,
        source: Callable[[int], Address],
    ) -> None:
        self.arena = arena
        self.offset = offset
        self.stride = stride
        self.size = size
        self.count = count
        self.last = last
        self.path = path
        self.received_at = received_at
        self.arrived: Callable[[int], float] | None = None  # None: all arrived with the first
        self.source = source  # source(i) decodes the sender's address of datagram i, only when asked
        self.supers = 1
        self.spacing = 0
        self.marked = False

    def rows(self, start: int, count: int, skip: int, width: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """A (count, width) view of ``dtype`` over datagrams start.., ``skip`` bytes into each; no copy."""
        return np.ndarray(
            (count, width),
            dtype,
            self.arena,
            self.offset + start * self.stride + skip,
            (self.stride, dtype.itemsize),
        )

    def part(self, index: int) -> Slab:
        """One super-packet of a stack, as a slab of its own; its datagrams have the source of the stack's first."""
        part = Slab(
            self.arena,
            self.offset + index * self.spacing,
            self.stride,
            self.size,
            self.count,
            self.last,
            self.path,
            self.arrival(index),
            self.source if self.supers == 1 else lambda _, source=self.source: source(index * self.count),  # type: ignore[misc]
        )
        part.marked = self.marked
        return part

    def parts(self) -> list[Slab]:
        """The super-packets of a stack as slabs of their own; any other slab as it is."""
        return [self] if self.supers == 1 else [self.part(index) for index in range(self.supers)]

    def arrival(self, index: int) -> float:
        """Seconds on the loop's clock at which the kernel (or simulator) got message ``index``."""
        return self.arrived(index) if index and self.arrived is not None else self.received_at

    def datagram(self, index: int) -> bytes:
        """A copy of one whole datagram (tests and slow paths)."""
        start = self.offset + index * self.stride
        size = self.last if index == self.count - 1 else self.size
        return self.arena[start : start + size].tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFacts:
    """What the core must know of its port."""

    receive_buffer_bytes: int
    """Real size of the kernel's receive buffer of each path, as read back (the kernel charges truesize
    against it)."""
    max_datagram_bytes: int
    """Largest UDP payload that leaves the chosen interface unfragmented."""
    whole_bursts: bool = False
    """A burst to an address of this host waits in the receiver's buffer as one packet: the kernel charges its overhead once
    (832 bytes were read back for 44 datagrams), not for each datagram."""


class Port(Protocol):
    """One rank's attachment to a network: one local address for each path."""

    @property
    def addresses(self) -> Sequence[Address]:
        """Local addresses as peers reach them, indexed by path."""

    @property
    def facts(self) -> PortFacts:
        """Buffer and datagram limits."""

    def open(self, on_batch: Callable[[Sequence[Slab]], None], on_writable: Callable[[], None]) -> None:
        """Start to receive, on the running event loop. ``on_batch`` gets received datagrams, ``on_writable``
        is called once after a ``send`` that returned False as soon as sending may be tried again."""

    def send(self, burst: Burst) -> bool:
        """Hand over a burst; False when the network would block (nothing was taken: send it again later)."""

    def close(self) -> None:
        """Stop and free everything; idempotent."""
