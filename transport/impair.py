"""Impairments on a port: what a rank sends meets a bad network, seeded, with no privilege needed.

``ImpairedPort`` wraps any port. Datagrams that are due at once leave at once, as one burst without the lost
ones; late ones are copied and leave when their time has come. Data and control are treated alike.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dblp.transport.burst import Train
from dblp.transport.endpoint import clock_of
from dblp.transport.impair_model import Bools, Fate, ImpairCounters, Impairer, Ints
from dblp.transport.impair_spec import ImpairSpec, parse_impair
from dblp.transport.port import Address, Burst, Bytes, Port, PortFacts, Slab
from dblp.units import MIB

__all__ = [
    "Fate",
    "ImpairCounters",
    "ImpairSpec",
    "ImpairedPort",
    "Impairer",
    "gather",
    "parse_impair",
    "sizes_of",
]

MAX_BURST_DATAGRAMS = 64
"""Segments that one UDP_SEGMENT call takes (UDP_MAX_SEGMENTS of Linux before 6.9)."""
MAX_BURST_BYTES = 65_507
"""Bytes that one UDP_SEGMENT call takes: the largest UDP payload over IPv4."""
BACKLOG_BYTES = 64 * MIB
"""Late datagrams that are held; 64 MiB are 0.5 s at 1 Gb/s."""


class ImpairedPort:
    """A port whose sent datagrams meet impairments before they reach ``port``.

    ``loop`` gives the time and the timers. Late datagrams beyond ``backlog_bytes`` are lost, with the reason
    ``backlog``. What the port did stands in ``impairer.counters``.
    """

    def __init__(
        self,
        port: Port,
        impairer: Impairer,
        loop: asyncio.AbstractEventLoop,
        *,
        backlog_bytes: int = BACKLOG_BYTES,
    ) -> None:
        self.impairer = impairer
        self._port = port
        self._loop = loop
        self._now = clock_of(loop)
        self._backlog_bytes = backlog_bytes
        self._held_bytes = 0
        self._late: list[_Late] = []  # a heap
        self._order = 0
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0  # uvloop returns a handle without a time if that has passed
        self._blocked = False  # the inner port said so and has not called back yet
        self._stuck: deque[Burst] = deque()  # the rest of what was on its way when it did
        self._refused = False  # our caller waits for on_writable
        self._on_writable: Callable[[], None] = lambda: None
        self._inner_train: Callable[[Train], int] | None = getattr(port, "send_train", None)

    @property
    def addresses(self) -> Sequence[Address]:
        """Local addresses of the inner port."""
        return self._port.addresses

    @property
    def facts(self) -> PortFacts:
        """Facts of the inner port."""
        return replace(self._port.facts, whole_bursts=False)

    def open(self, on_batch: Callable[[Sequence[Slab]], None], on_writable: Callable[[], None]) -> None:
        """Open the inner port; received datagrams pass through untouched."""
        self._on_writable = on_writable
        self._port.open(on_batch, self._writable)

    def send(self, burst: Burst) -> bool:
        """Decide the burst's fate and send what is due; False, nothing decided, if the inner port blocks."""
        now = self._now()
        if self._idle(now):
            if self._port.send(burst):
                self.impairer.pass_by(burst.count)
                return True
            self._blocked = self._refused = True
            return False
        self._send_due(now)
        if self._blocked:
            self._refused = True
            return False
        fate = self.impairer.apply(sizes_of(burst), now)
        due = int(np.searchsorted(fate.at, now, "right"))
        if due:
            self._pass(burst, fate.index[:due], fate.corrupt[:due])
        if due < len(fate.index):
            self._hold(burst, fate, due)
        return True

    def send_train(self, train: Train) -> int:
        """Pass a train on while nothing befalls it; returns how many of its bursts have left, and takes none otherwise: they
        come one by one then."""
        if self._inner_train is None or not self._idle(self._now()):
            return 0
        taken = self._inner_train(train)
        self.impairer.pass_by(taken * train.chunks)
        return taken

    def _idle(self, now: float) -> bool:
        """Nothing befalls what leaves now, and nothing waits that should leave before it."""
        return not (self._late or self._stuck or self._blocked) and self.impairer.quiet(now)

    @property
    def late_until(self) -> float:
        """When the last of what is late will have left, seconds on the loop's clock; minus infinity if nothing is."""
        return max((float(late.fate.at[-1]) for late in self._late), default=float("-inf"))

    def close(self) -> None:
        """Forget what is late and close the inner port; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._late.clear()
        self._stuck.clear()
        self._held_bytes = 0
        self._port.close()

    def _hold(self, burst: Burst, fate: Fate, first: int) -> None:
        if self._held_bytes + len(burst.data) > self._backlog_bytes:
            self.impairer.lose("backlog", len(fate.index) - first)
            return
        self._held_bytes += len(burst.data)
        self._order += 1
        copy = Burst(burst.data.copy(), burst.segment, burst.path, burst.cls, burst.address)
        heapq.heappush(self._late, _Late(float(fate.at[first]), self._order, copy, fate, first))
        self._arm()

    def _arm(self) -> None:
        """Keep one timer, for the earliest late datagram."""
        if self._timer is not None:
            if self._late and self._timer_at <= self._late[0].at:
                return
            self._timer.cancel()
            self._timer = None
        if self._late:
            self._timer_at = self._late[0].at
            self._timer = self._loop.call_at(self._timer_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        # Loops with coarse timers call early, by half a millisecond; to wait for the rest would spin.
        self._send_due(max(self._now(), self._timer_at))

    def _send_due(self, now: float) -> None:
        """Send all that is due, in the order of its time; while the inner port blocks it stays."""
        while self._late and self._late[0].at <= now and not self._blocked:
            late = heapq.heappop(self._late)
            end = int(np.searchsorted(late.fate.at, now, "right"))
            self._pass(late.burst, late.fate.index[late.first : end], late.fate.corrupt[late.first : end])
            if end < len(late.fate.at):
                heapq.heappush(
                    self._late, _Late(float(late.fate.at[end]), late.order, late.burst, late.fate, end)
                )
            else:
                self._held_bytes -= len(late.burst.data)
        if self._late and not self._blocked:
            self._arm()

    def _pass(self, burst: Burst, index: Ints, corrupt: Bools) -> None:
        """Send datagrams ``index`` of a burst now; what the inner port does not take waits until it does."""
        flipped = self.impairer if corrupt.any() else None
        for piece in gather(burst.data, burst.segment, index, corrupt, flipped):
            whole = piece is burst.data
            out = burst if whole else Burst(piece, burst.segment, burst.path, burst.cls, burst.address)
            if self._blocked or not self._port.send(out):
                self._blocked = True
                self._stuck.append(_own(out) if whole else out)

    def _writable(self) -> None:
        self._blocked = False
        while self._stuck:
            if not self._port.send(self._stuck[0]):
                self._blocked = True
                return
            self._stuck.popleft()
        self._send_due(self._now())
        if self._refused and not self._blocked:
            self._refused = False
            self._on_writable()


@dataclass(order=True, slots=True)
class _Late:
    """A copied burst of which ``fate.index[first:]`` has not left yet; the next datagram leaves at ``at``."""

    at: float
    order: int
    burst: Burst = field(compare=False)
    fate: Fate = field(compare=False)
    first: int = field(compare=False)


def sizes_of(burst: Burst) -> Ints:
    """Sizes of a burst's datagrams, bytes (n,)."""
    count = burst.count
    sizes = np.full(count, burst.segment)
    if count:
        sizes[-1] = len(burst.data) - (count - 1) * burst.segment
    return sizes


def gather(
    data: Bytes, segment: int, index: Ints, corrupt: Bools | None = None, impairer: Impairer | None = None
) -> list[Bytes]:
    """Datagrams ``index`` of a burst, in that order, as bursts that a port takes.

    ``data``: the burst, ``segment`` bytes a datagram, the last perhaps shorter. The whole burst comes back
    as ``data`` itself, anything else as copies. ``impairer`` damages those datagrams that ``corrupt`` marks.
    """
    count = -(-len(data) // segment)
    whole = len(index) == count and bool((index == np.arange(count)).all())
    if whole and impairer is None:
        return [data]
    tail = len(data) - (count - 1) * segment
    # A datagram shorter than the segment can only stand last: cut after each copy of it, and at the limits.
    cuts = np.flatnonzero(index == count - 1) + 1 if tail < segment else np.zeros(0, np.int64)
    limit = min(MAX_BURST_DATAGRAMS, MAX_BURST_BYTES // segment)
    pieces = []
    start = 0
    while start < len(index):
        cut = (
            int(cuts[np.searchsorted(cuts, start, "right")]) if len(cuts) and start < cuts[-1] else len(index)
        )
        end = min(cut, start + limit)
        piece = _copy_rows(data, segment, index[start:end])
        if impairer is not None and corrupt is not None:
            _damage(impairer, piece, segment, np.flatnonzero(corrupt[start:end]))
        pieces.append(piece)
        start = end
    return pieces


def _copy_rows(data: Bytes, segment: int, index: Ints) -> Bytes:
    """Datagrams ``index`` back to back; only the last of them may be the burst's short one."""
    full = len(data) // segment
    rows = data[: full * segment].reshape(full, segment)
    if index[-1] < full:
        return rows[index].reshape(-1)
    return np.concatenate((rows[index[:-1]].reshape(-1), data[full * segment :]))


def _damage(impairer: Impairer, piece: Bytes, segment: int, hit: Ints) -> None:
    starts = hit * segment
    impairer.damage(piece, starts, np.minimum(segment, len(piece) - starts))


def _own(burst: Burst) -> Burst:
    return Burst(burst.data.copy(), burst.segment, burst.path, burst.cls, burst.address)
