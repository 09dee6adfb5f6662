"""Playing a schedule: changes at their times, by the monotonic clock, with a record of when each took effect."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Event
from typing import Generic, Protocol, TypeVar

from dblp.sim.lab.counters import Counters

C = TypeVar("C")
C_contra = TypeVar("C_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Span(Generic[C]):
    """What holds from ``start_s`` to ``end_s``, seconds from the start of the run."""

    start_s: float
    end_s: float
    what: C


@dataclass(frozen=True, slots=True)
class Applied:
    """A span as it happened, seconds of CLOCK_MONOTONIC, which all processes of a host share."""

    start_s: float
    """The change began: from here on packets may meet it."""
    full_s: float
    """It held on all links."""
    clear_s: float
    """It began to be lifted."""
    end_s: float
    """It held nowhere any more."""
    what: str
    inside: Counters | None = None
    """What happened to packets while it held everywhere; None where nobody counted, or it was too short for that."""
    before: Counters | None = None
    """What happened to packets between the span before, or the beginning, and this one; None where nobody counted."""


class Plays(Protocol[C]):
    """A schedule: what holds between spans, and the spans."""

    @property
    def base(self) -> C: ...

    def spans(self) -> Iterator[Span[C]]: ...


class Takes(Protocol[C_contra]):
    """What conditions can be applied to."""

    def apply(self, conditions: C_contra) -> object: ...


_PART = 1 / 3
"""Of a span, which one reading may take."""


class _Meter:
    """Reads the counters at the edges of spans, early by what a reading takes, so that no edge comes late for it."""

    def __init__(self, count: Callable[[], Counters] | None, gaps: bool, stop: Event) -> None:
        self._count, self._stop = count, stop
        self._gap_count = count if gaps else None
        self._took_s = 0.0
        self._gap = self._read(count)

    def wait(self, until: float, *, read: bool) -> Counters | None:
        """Until a span ends; the counts at about its end."""
        return self._wait(until, self._count if read else None)

    def wait_between(self, until: float) -> Counters | None:
        """Until a span begins; what happened since the last one."""
        now = self._wait(until, self._gap_count)
        return now - self._gap if now is not None and self._gap is not None else None

    def begin(self, until: float) -> Counters | None:
        """A span holds everywhere; no counts where it ends before it could be read twice, which would make it longer."""
        if self._took_s > _PART * (until - time.monotonic()):
            self._took_s /= 2  # so that one in some is read on a busy host, too
            return None
        return self._read(self._count)

    def end(self) -> None:
        """A span holds nowhere any more."""
        self._gap = self._read(self._gap_count)

    def _wait(self, until: float, count: Callable[[], Counters] | None) -> Counters | None:
        if count is not None:
            self._stop.wait(max(0.0, until - self._took_s - time.monotonic()))
        found = self._read(count)
        self._stop.wait(max(0.0, until - time.monotonic()))
        return found

    def _read(self, count: Callable[[], Counters] | None) -> Counters | None:
        if count is None:
            return None
        start = time.monotonic()
        found = count()
        self._took_s = time.monotonic() - start
        return found


def run_spans(
    self: Plays[C],
    net: Takes[C],
    stop: Event,
    record: list[Applied] | None = None,
    *,
    count: Callable[[], Counters] | None = None,
    gaps: bool = False,
) -> list[Applied]:
    """Play the schedule on a network until its end, or until ``stop`` is set; what held when, also in ``record`` as it happens.

    ``base`` is applied first and last. A span whose time passed while another was changed is left out. ``count`` reads the
    network's counters: of each span, with ``gaps`` of the times between them too. Meant for a thread.
    """
    done = record if record is not None else []
    net.apply(self.base)
    origin = time.monotonic()
    meter = _Meter(count, gaps, stop)
    try:
        for span in self.spans():
            before = meter.wait_between(origin + span.start_s)
            if stop.is_set():
                break
            if time.monotonic() < origin + span.end_s:
                done.append(_hold(self.base, span, net, origin, meter, before))
    finally:
        net.apply(self.base)
    return done


def _hold(
    base: C, span: Span[C], net: Takes[C], origin: float, meter: _Meter, before: Counters | None
) -> Applied:
    start = time.monotonic()
    net.apply(span.what)
    full = time.monotonic()
    first = meter.begin(origin + span.end_s)
    last = meter.wait(origin + span.end_s, read=first is not None)
    clear = time.monotonic()
    net.apply(base)
    end = time.monotonic()
    meter.end()
    inside = last - first if first is not None and last is not None else None
    return Applied(start, full, clear, end, str(span.what), inside, before)
