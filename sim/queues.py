"""The egress port of a simulated switch: a rate, a shared buffer, four classes, congestion marks.

Theory of operation. What arrives is a ``Parcel``: datagrams of one burst, of which runs are admitted, marked, pushed out and
served; nothing here loops over datagrams. Runs wait in one queue a class, numbered in order of arrival, so that first-in
first-out and strict priority differ only in which head is served next. The port serves portions of a run, about
``portion_s`` of its rate at once and never less than a datagram; a portion in service counts as waiting until it has left
and cannot be pushed out. Sans-IO: the caller tells the time and asks again at ``next_at``.

Marking is DCTCP's (RFC 8257, section 3.1; RFC 3168): a datagram that asks for marks (ECT) is marked when it arrives at a
backlog above ``mark_bytes``; or DCQCN's (Zhu et al., SIGCOMM 2015): with a probability that rises from there. A step is fair
only among flows that send alike: one that sends in bursts sees the queue that it has just let drain, the others its mean.
Class thresholds are those of MLT's and DLCP's switches (DSCP-selected drop thresholds of commodity switches); push-out is the
ideal that they approximate.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from dblp.errors import ConfigError
from dblp.transport.port import CLASSES, Ecn
from dblp.units import KIB

T = TypeVar("T")

ORDERS = ("fifo", "priority")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchPort:
    """One egress port of a switch; all that leaves by it shares its rate and its buffer."""

    rate_bps: float
    """Bits per second of UDP payload."""
    queue_bytes: int = 256 * KIB
    """The buffer: bytes that may wait, what is in service included."""
    mark_bytes: int = 0
    """Backlog above which arriving datagrams that ask for it are marked (DCTCP's K); 0: no marks."""
    mark_full_bytes: int = 0
    """Backlog from which all of them are marked: their share rises linearly from ``mark_bytes`` on (RED's and DCQCN's ramp). 0: a
    step at ``mark_bytes``."""
    order: str = "fifo"
    """What leaves first: ``fifo``, or ``priority``: the lowest class number that waits."""
    class_shares: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    """Share of the buffer up to which datagrams of class 0 to 3 are admitted: thresholds by DSCP."""
    push_out: bool = False
    """A full buffer drops what waits of the highest class number, newest first, before it drops an arrival of a lower one."""

    def __post_init__(self) -> None:
        if not self.rate_bps > 0.0 or self.queue_bytes < 1 or self.mark_bytes < 0:
            raise ConfigError(
                f"{self}: a switch port needs a rate above 0 bit/s, a buffer of 1 byte or more, and mark_bytes of 0 or more"
            )
        if self.mark_full_bytes and not 0 < self.mark_bytes < self.mark_full_bytes:
            raise ConfigError(
                f"mark_full_bytes={self.mark_full_bytes}: must lie above mark_bytes={self.mark_bytes}, which must not be 0"
            )
        if self.order not in ORDERS:
            raise ConfigError(f"order={self.order!r}: use one of {', '.join(map(repr, ORDERS))}")
        if len(self.class_shares) != CLASSES or not all(0.0 <= share <= 1.0 for share in self.class_shares):
            raise ConfigError(f"class_shares={self.class_shares!r}: four shares in [0, 1], one a class")


class Parcel(Generic[T]):
    """Consecutive datagrams of one burst: ``count`` of ``segment`` bytes, the last one ``last``."""

    __slots__ = ("cls", "count", "ecn", "first", "last", "segment", "what")

    def __init__(self, what: T, first: int, count: int, segment: int, last: int, cls: int, ecn: Ecn) -> None:
        self.what = what  # the caller's
        self.first = first  # index, in the caller's burst, of the first datagram
        self.count = count
        self.segment = segment
        self.last = last
        self.cls = cls
        self.ecn = ecn

    @property
    def nbytes(self) -> int:
        """Bytes of UDP payload."""
        return (self.count - 1) * self.segment + self.last if self.count else 0

    def cut(self, count: int) -> Parcel[T]:
        """Take the first ``count`` datagrams off, as a parcel of their own."""
        whole = count == self.count
        last = self.last if whole else self.segment
        front = Parcel(self.what, self.first, count, self.segment, last, self.cls, self.ecn)
        self.first += count
        self.count -= count
        return front


class SwitchQueue(Generic[T]):
    """A switch port in use."""

    def __init__(self, spec: SwitchPort, rng: np.random.Generator, *, portion_s: float = 50e-6) -> None:
        self.spec = spec
        self._rng = rng
        self.dropped: Counter[int] = Counter()
        """Datagrams dropped on arrival or pushed out, by class."""
        self.marked = 0
        """Datagrams marked."""
        self.peak_bytes = 0
        """Largest backlog."""
        self.byte_seconds = 0.0
        """Integral of the backlog over time: over a span of time, its mean."""
        self._portion_s = portion_s
        self._portion = max(int(spec.rate_bps * portion_s / 8.0), 1)
        self._queues: list[deque[tuple[int, Parcel[T]]]] = [deque() for _ in range(CLASSES)]
        self._arrivals = 0
        self._waiting = 0  # bytes, without those in service
        self._serving: Parcel[T] | None = None
        self._leaves_at = float("inf")
        self._seen_at = 0.0

    @property
    def next_at(self) -> float:
        """When the portion in service has left; infinity when nothing waits."""
        return self._leaves_at

    def set_rate(self, rate_bps: float) -> None:
        """Change the port's rate; a portion in service leaves when it was to."""
        self.spec = replace(self.spec, rate_bps=rate_bps)
        self._portion = max(int(rate_bps * self._portion_s / 8.0), 1)

    def backlog(self, now: float) -> float:
        """Bytes that wait or are in service."""
        if self._serving is None:
            return float(self._waiting)
        return self._waiting + min((self._leaves_at - now) * self.spec.rate_bps / 8.0, self._serving.nbytes)

    def offer(self, parcel: Parcel[T], now: float) -> None:
        """A parcel arrives."""
        self._account(now)
        limit = self.spec.class_shares[parcel.cls] * self.spec.queue_bytes
        backlog = self.backlog(now)
        if self.spec.push_out and backlog + parcel.nbytes > limit:
            backlog -= self._push_out(parcel.cls, backlog + parcel.nbytes - limit)
        fits = parcel.count
        if backlog + parcel.nbytes > limit:
            fits = max(min(int((limit - backlog) // parcel.segment), parcel.count - 1), 0)
        admitted = parcel.cut(fits) if fits < parcel.count else parcel
        if admitted is not parcel:
            self.dropped[parcel.cls] += parcel.count
        if admitted.count:
            self._admit(admitted, backlog)
            self.peak_bytes = max(self.peak_bytes, int(backlog + admitted.nbytes))
            if self._serving is None:
                self._serve(now)

    def leave(self, now: float) -> Parcel[T]:
        """The portion whose time has come; the next goes into service."""
        parcel = self._serving
        assert parcel is not None, "nothing is in service: wait for next_at"
        self._account(now)
        self._serving, self._leaves_at = None, float("inf")
        self._serve(now)
        return parcel

    def _admit(self, parcel: Parcel[T], backlog: float) -> None:
        """Queue a parcel, as two runs where its end is marked."""
        marks = self._marks(parcel, backlog) if parcel.ecn is not Ecn.NOT_ECT else 0
        if marks:
            if marks < parcel.count:
                self._append(parcel.cut(parcel.count - marks))
            parcel.ecn = Ecn.CE
            self.marked += marks
        self._append(parcel)

    def _marks(self, parcel: Parcel[T], backlog: float) -> int:
        """How many of a parcel's datagrams are marked, if all were ECT."""
        spec = self.spec
        if not spec.mark_bytes or backlog + parcel.nbytes <= spec.mark_bytes:
            return 0
        if not spec.mark_full_bytes:
            spared = max(int((spec.mark_bytes - backlog) // parcel.segment) + 1, 0)
            return max(parcel.count - spared, 0)
        middle = backlog + (parcel.nbytes - parcel.segment) / 2.0
        share = (middle - spec.mark_bytes) / (spec.mark_full_bytes - spec.mark_bytes)
        return int(self._rng.binomial(parcel.count, min(max(share, 0.0), 1.0)))

    def _append(self, parcel: Parcel[T]) -> None:
        self._arrivals += 1
        self._waiting += parcel.nbytes
        self._queues[parcel.cls].append((self._arrivals, parcel))

    def _push_out(self, cls: int, excess: float) -> int:
        """Drop waiting datagrams of higher class numbers, newest first, until ``excess`` bytes are free; returns the bytes."""
        freed = 0
        for victim in range(CLASSES - 1, cls, -1):
            queue = self._queues[victim]
            while queue and freed < excess:
                number, parcel = queue.pop()
                keep = max(int((parcel.nbytes - (excess - freed)) // parcel.segment), 0)
                before = parcel.nbytes
                if 0 < keep < parcel.count:
                    kept = parcel.cut(keep)
                    queue.append((number, kept))
                    before -= kept.nbytes
                freed += before
                self.dropped[victim] += parcel.count
        self._waiting -= freed
        return freed

    def _serve(self, now: float) -> None:
        heads = [queue for queue in self._queues if queue]
        if not heads:
            return
        queue = heads[0] if self.spec.order == "priority" else min(heads, key=_number)
        parcel = queue[0][1]
        count = min(max(self._portion // parcel.segment, 1), parcel.count)
        if count == parcel.count:
            queue.popleft()
        else:
            parcel = parcel.cut(count)
        self._waiting -= parcel.nbytes
        self._serving = parcel
        self._leaves_at = now + parcel.nbytes * 8.0 / self.spec.rate_bps

    def _account(self, now: float) -> None:
        """Add to the integral of the backlog: what is in service falls linearly."""
        span = now - self._seen_at
        if span > 0.0:
            self.byte_seconds += span * (self.backlog(self._seen_at) + self.backlog(now)) / 2.0
            self._seen_at = now


def _number(queue: deque[tuple[int, Parcel[T]]]) -> int:
    return queue[0][0]
