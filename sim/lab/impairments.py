"""What a network does to packets: conditions that hold, and schedules that change them in time.

Written as DBLP_IMPAIR is (docs/impairments.md), with ``links(h2+h3)`` to restrict them:
``"loss(0.01),delay(2ms),links(h2)"``; a schedule may have bursts too: ``"bursts(loss=0.8,length=200ms,every=1s)"``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import ClassVar, TypeVar

import numpy as np

from dblp.errors import ConfigError
from dblp.sim.lab.schedule import Applied, Span, run_spans
from dblp.sim.lab.topology import LEAST_BPS, MOST_BPS, MOST_DELAY_S, MOST_QUEUE_BYTES, too_slow
from dblp.transport.impair_spec import (
    Bursts,
    Corrupt,
    Delay,
    Duplicate,
    GilbertElliott,
    GilbertElliottTime,
    ImpairSpec,
    Jitter,
    Loss,
    Rate,
    Reorder,
)
from dblp.transport.spec import SEED, SPAN, TIME, Element, Kind, Parser, arg, choice

__all__ = ["Applied", "Conditions", "Links", "Schedule", "Slot", "Span", "parse_conditions", "parse_schedule"]

E = TypeVar("E", bound=Element)

SHORTEST_S = 0.01
"""Shortest mean burst of a schedule, seconds: to change the kernel's rules takes a few milliseconds."""


@dataclass(frozen=True, slots=True)
class Links(Element):
    """The links that conditions hold on; else they hold on each host's link, towards the host."""

    name: ClassVar[str] = "links"
    links: tuple[str, ...] = arg(
        "links",
        Kind(
            "names of links such as h0+h2 or core",
            lambda text: tuple(text.split("+")),
            lambda value: isinstance(value, tuple) and all(name.isalnum() for name in value) and bool(value),
            "+".join,
        ),
    )
    way: str = arg("way", choice("both", "down", "up"), default="both")


@dataclass(frozen=True, slots=True)
class Slot(Element):
    """Packets wait for the next slot and leave together, as from a radio link that takes turns. From slot to slot it takes
    ``least_s`` to ``most_s``, uniform. DBLP_IMPAIR has no such thing."""

    name: ClassVar[str] = "slot"
    least_s: float = arg("min", SPAN)
    most_s: float = arg("max", TIME, default=0.0)
    """0: ``least_s``."""

    def __post_init__(self) -> None:
        Element.__post_init__(self)
        if self.most_s and self.most_s < self.least_s:
            raise ConfigError(f"slot: max={self.most_s:g}s is below min={self.least_s:g}s")

    @property
    def latest_s(self) -> float:
        """Longest wait."""
        return max(self.least_s, self.most_s)


LASTING: Mapping[str, type[Element]] = {
    cls.name: cls for cls in (Loss, GilbertElliott, Duplicate, Rate, Corrupt, Delay, Jitter, Reorder, Slot)
}
"""What may hold all the time, by name."""
CHANGING: Mapping[str, type[Element]] = {cls.name: cls for cls in (Bursts, GilbertElliottTime)}
"""What changes in time, by name."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What holds on some links, or on all, until something else is applied. The default is nothing.

    Raises ConfigError for elements that stand twice, exclude each other or change in time.
    """

    elements: tuple[Element, ...] = ()
    links: tuple[str, ...] = ()
    """Names; empty: each host's link, towards the host, so that a packet meets the conditions once."""
    way: str = "both"
    """Of named links: ``down`` (towards the host), ``up`` or ``both``."""

    def __post_init__(self) -> None:
        for element in self.elements:
            if element.name not in LASTING:
                raise ConfigError(f"{element.name} changes in time: it belongs in a schedule")
        slots = tuple(element for element in self.elements if isinstance(element, Slot))
        if len(slots) > 1:
            raise ConfigError("slot stands more than once: each impairment may stand once")
        rest = ImpairSpec(tuple(element for element in self.elements if element not in slots))
        object.__setattr__(self, "elements", (*rest.elements, *slots))
        _check(self)

    def __str__(self) -> str:
        where = (str(Links(self.links, self.way)),) if self.links else ()
        return ",".join((*map(str, self.elements), *where))

    def __bool__(self) -> bool:
        return bool(self.elements)

    def get(self, element: type[E]) -> E | None:
        """The element of a type, or None."""
        return next((found for found in self.elements if isinstance(found, element)), None)

    def with_loss(self, share: float) -> Conditions:
        """The same, with this loss in place of any other."""
        rest = tuple(e for e in self.elements if not isinstance(e, (Loss, GilbertElliott)))
        return replace(self, elements=(*rest, Loss(share)))

    @property
    def loss(self) -> float:
        """Share of packets that these drop in the long run (Gilbert-Elliott: its closed form)."""
        ge, loss = self.get(GilbertElliott), self.get(Loss)
        if ge is not None:
            return (ge.good * ge.r + ge.bad * ge.p) / (ge.p + ge.r)
        return loss.p if loss is not None else 0.0


def _check(conditions: Conditions) -> None:
    _check_sizes(conditions)
    corrupt, delay = conditions.get(Corrupt), conditions.get(Delay)
    if conditions.get(Loss) and conditions.get(GilbertElliott):
        raise ConfigError("loss and ge exclude each other: ge has a loss of its good state too (good=...)")
    if corrupt is not None and corrupt.deliver:
        raise ConfigError(
            "corrupt: deliver=true: a real kernel drops what fails its checksum; DBLP_IMPAIR can deliver it"
        )
    reorder, jitter = conditions.get(Reorder), conditions.get(Jitter)
    if reorder is not None and (jitter is not None or (delay is not None and delay.delay_s)):
        raise ConfigError(
            "reorder: netem sends what passes others at once, so it goes with neither delay nor jitter"
        )


def _check_sizes(conditions: Conditions) -> None:
    """What tc takes; it would say so itself, but in its own words and late."""
    rate, delay, jitter = conditions.get(Rate), conditions.get(Delay), conditions.get(Jitter)
    reorder, slot = conditions.get(Reorder), conditions.get(Slot)
    if rate is not None and rate.bps < LEAST_BPS:
        raise ConfigError(f"rate: {too_slow(rate.bps)}")
    if rate is not None and (rate.bps > MOST_BPS or rate.queue_bytes > MOST_QUEUE_BYTES):
        raise ConfigError(
            f"{rate}: at most {MOST_BPS / 1e9:g}gbit and a queue of {MOST_QUEUE_BYTES} bytes fit into the kernel's"
        )
    late = (
        delay and delay.delay_s,
        jitter and jitter.jitter_s,
        reorder and reorder.by_s,
        slot and slot.latest_s,
    )
    if max(seconds or 0.0 for seconds in late) > MOST_DELAY_S:
        raise ConfigError(f"{conditions}: a packet can be {MOST_DELAY_S:g} s late at most")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Conditions in time: ``base`` holds between the spans. Times count from the start of ``run``."""

    base: Conditions = field(default_factory=Conditions)
    listed: tuple[Span[Conditions], ...] = ()
    """Spans in order of time."""
    changing: Element | None = None
    """``bursts`` or ``ge_time``, in place of a list."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.listed and self.changing is not None:
            raise ConfigError("a schedule has a list of spans or one of bursts and ge_time, not both")
        if isinstance(self.changing, (Bursts, GilbertElliottTime)):
            length = self.changing.length_s if isinstance(self.changing, Bursts) else self.changing.burst_s
            if length < SHORTEST_S:
                raise ConfigError(
                    f"{self.changing.name}: bursts of {length:g} s are too short for a schedule, which needs {SHORTEST_S:g} s "
                    "to change the kernel's rules: use ge, which works by the packet"
                )
        ends = 0.0
        for span in self.listed:
            if not ends <= span.start_s < span.end_s:
                raise ConfigError(
                    f"schedule: the span from {span.start_s:g} s to {span.end_s:g} s "
                    "ends before it starts or overlaps the one before"
                )
            ends = span.end_s

    @classmethod
    def of(cls, spans: Sequence[tuple[float, float, Conditions]], base: Conditions | None = None) -> Schedule:
        """From (start, end, conditions), seconds; raises ConfigError where spans overlap."""
        return cls(base if base is not None else Conditions(), tuple(Span(*span) for span in spans))

    def __str__(self) -> str:
        parts = [str(self.base)] if str(self.base) else []
        parts += [str(self.changing)] if self.changing is not None else []
        parts += [f"seed({self.seed})"] if self.seed else []
        parts += [f"{span.start_s:g}s..{span.end_s:g}s: {span.what}" for span in self.listed]
        return ",".join(parts)

    def spans(self) -> Iterator[Span[Conditions]]:
        """All spans in order; endless for bursts and ge_time. The same seed gives the same spans."""
        if isinstance(self.changing, Bursts):
            return self._bursts(self.changing)
        if isinstance(self.changing, GilbertElliottTime):
            return self._exponential(self.changing)
        return iter(self.listed)

    @property
    def share(self) -> float:
        """Share of the time that bursts cover in the long run; 0 for a list."""
        if isinstance(self.changing, Bursts):
            return self.changing.length_s / self.changing.every_s
        if isinstance(self.changing, GilbertElliottTime):
            return self.changing.burst_s / (self.changing.burst_s + self.changing.gap_s)
        return 0.0

    run = run_spans

    def _bursts(self, element: Bursts) -> Iterator[Span[Conditions]]:
        low, high = element.loss
        for k in count():
            start = element.start_s + k * element.every_s
            # The draw of dblp's own bursts (transport/impair_model.py): the same seed gives the same levels.
            level = low + (high - low) * float(np.random.default_rng([self.seed, k]).random())
            yield Span(start, start + element.length_s, self.base.with_loss(level))

    def _exponential(self, element: GilbertElliottTime) -> Iterator[Span[Conditions]]:
        rng = np.random.default_rng(self.seed)
        at = 0.0
        while True:
            start = at + float(rng.exponential(element.gap_s))
            at = start + float(rng.exponential(element.burst_s))
            yield Span(start, at, self.base.with_loss(element.bad))


def parse_conditions(text: str) -> Conditions:
    """Read conditions; ``""`` is none. Raises ConfigError with the column of the fault and a caret below it."""
    found = _Parser(text, "conditions", LASTING).parse()
    return _conditions(found)


def parse_schedule(text: str) -> Schedule:
    """Read a schedule: conditions, and at most one of bursts and ge_time; ``seed(7)`` for what is drawn.

    Raises ConfigError with the column of the fault and a caret below it.
    """
    parser = _Parser(text, "schedule", {**LASTING, **CHANGING})
    found = parser.parse()
    changing = [found.pop(name) for name in CHANGING if name in found]
    if len(changing) > 1:
        raise ConfigError("schedule: bursts and ge_time exclude each other")
    base = _conditions(found)
    if changing and isinstance(changing[0], GilbertElliottTime) and changing[0].good:
        base = base.with_loss(changing[0].good)
    return Schedule(base, (), changing[0] if changing else None, parser.seed)


def _conditions(found: Mapping[str, Element]) -> Conditions:
    where = found.get(Links.name)
    elements = tuple(element for name, element in found.items() if name != Links.name)
    if isinstance(where, Links):
        return Conditions(elements, where.links, where.way)
    return Conditions(elements)


class _Parser(Parser):
    """Reads ``name(value,name=value,...),...``, each name once."""

    def __init__(self, text: str, what: str, known: Mapping[str, type[Element]]) -> None:
        super().__init__(text, what)
        self.known = {**known, Links.name: Links}
        self.seeded = len(known) > len(LASTING)
        self.seed = 0

    def parse(self) -> dict[str, Element]:
        found: dict[str, Element] = {}
        seen: set[str] = set()
        while not self.done:
            if seen:
                self.take(",", "',' or the end")
            start = self.at
            name = self.take_word(f"a name ({self._names()})")
            if name in seen:
                self.fail(start, f"{name} stands more than once")
            seen.add(name)
            if name == "seed" and self.seeded:
                self.take("(", "'(' after 'seed'")
                self.seed = self.take_value("seed", SEED)
                self.take(")", "')' after the seed")
            elif name in self.known:
                found[name] = self.take_element(start, self.known[name])
            elif name in CHANGING:
                self.fail(start, f"{name} changes in time: it belongs in a schedule")
            else:
                self.fail(start, f"{name!r} is none: known are {self._names()}")
        return found

    def _names(self) -> str:
        return ", ".join((*self.known, *(("seed",) if self.seeded else ())))
