"""Playing a schedule: changes at their times, by the monotonic clock, with a record of when each took effect."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Event
from typing import Generic, Protocol, TypeVar

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


class Plays(Protocol[C]):
    """A schedule: what holds between spans, and the spans."""

    @property
    def base(self) -> C: ...

    def spans(self) -> Iterator[Span[C]]: ...


class Takes(Protocol[C_contra]):
    """What conditions can be applied to."""

    def apply(self, conditions: C_contra) -> object: ...


def run_spans(
    self: Plays[C], net: Takes[C], stop: Event, record: list[Applied] | None = None
) -> list[Applied]:
    """Play the schedule on a network until its end, or until ``stop`` is set; what held when, also in ``record`` as it happens.

    ``base`` is applied first and last. A span whose time passed while another was changed is left out. Meant for a thread.
    """
    done = record if record is not None else []
    net.apply(self.base)
    origin = time.monotonic()
    try:
        for span in self.spans():
            if stop.wait(max(0.0, origin + span.start_s - time.monotonic())):
                break
            if time.monotonic() < origin + span.end_s:
                done.append(_hold(self.base, span, net, stop, origin))
    finally:
        net.apply(self.base)
    return done


def _hold(base: C, span: Span[C], net: Takes[C], stop: Event, origin: float) -> Applied:
    start = time.monotonic()
    net.apply(span.what)
    full = time.monotonic()
    stop.wait(max(0.0, origin + span.end_s - time.monotonic()))
    clear = time.monotonic()
    net.apply(base)
    return Applied(start, full, clear, time.monotonic(), str(span.what))
