"""The description of impairments: frozen elements, and the one string that a person writes for them.

``parse_impair("ge(p=0.002,r=0.05,bad=0.8),delay(2ms),seed(7)")`` gives an ImpairSpec; ``str(spec)`` gives a
string that parses to an equal one. docs/impairments.md has the table of elements; ``impair.py`` acts by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from dblp.errors import ConfigError
from dblp.transport.spec import (
    FLAG,
    MAX_SEED,
    RATE,
    SEED,
    SHARE,
    SHARES,
    SIZE,
    SPAN,
    TIME,
    Element,
    Parser,
    arg,
    choice,
)
from dblp.units import KIB

E = TypeVar("E", bound=Element)


@dataclass(frozen=True, slots=True)
class Loss(Element):
    """Each datagram is lost with probability ``p``, independently."""

    name: ClassVar[str] = "loss"
    p: float = arg("p", SHARE)


@dataclass(frozen=True, slots=True)
class GilbertElliott(Element):
    """Two states that change by the datagram (Gilbert 1960, Elliott 1963; in the notation of Hasslinger and
    Hohlfeld 2008 ``bad`` is 1-h and ``good`` is 1-k). In the long run the loss is
    good * r/(p+r) + bad * p/(p+r); a bad run lasts 1/r datagrams on average."""

    name: ClassVar[str] = "ge"
    p: float = arg("p", SHARE)
    """Probability to turn bad, for each datagram in the good state."""
    r: float = arg("r", SHARE)
    """Probability to turn good, for each datagram in the bad state."""
    bad: float = arg("bad", SHARE, default=1.0)
    """Loss in the bad state."""
    good: float = arg("good", SHARE, default=0.0)
    """Loss in the good state."""

    def __post_init__(self) -> None:
        Element.__post_init__(self)
        if self.p + self.r <= 0.0:
            raise ConfigError("ge: p and r are both 0, so no state is ever left: give one of them")


@dataclass(frozen=True, slots=True)
class GilbertElliottTime(Element):
    """The same two states by time: both last an exponential time, ``gap_s`` and ``burst_s`` on average. In
    the long run the loss is (good * gap + bad * burst) / (gap + burst)."""

    name: ClassVar[str] = "ge_time"
    burst_s: float = arg("burst", SPAN)
    """Mean length of a bad time, seconds."""
    gap_s: float = arg("gap", SPAN)
    """Mean length of a good time, seconds."""
    bad: float = arg("bad", SHARE, default=1.0)
    """Loss in a bad time."""
    good: float = arg("good", SHARE, default=0.0)
    """Loss in a good time."""


@dataclass(frozen=True, slots=True)
class Bursts(Element):
    """Scheduled bursts: burst k covers [start + k*every, start + k*every + length). Its loss is drawn once,
    uniform over the range, by the seed and k only: all that share a seed and a clock share the bursts."""

    name: ClassVar[str] = "bursts"
    loss: tuple[float, float] = arg("loss", SHARES)
    """Range of the loss within a burst; equal ends for one value."""
    length_s: float = arg("length", SPAN)
    """Length of each burst, seconds."""
    every_s: float = arg("every", SPAN)
    """Time from start to start, seconds."""
    start_s: float = arg("start", TIME, default=0.0)
    """Start of the first burst, seconds on the impairer's clock."""

    def __post_init__(self) -> None:
        Element.__post_init__(self)
        if self.length_s > self.every_s:
            raise ConfigError(
                f"bursts: length={self.length_s:g}s is above every={self.every_s:g}s: bursts would overlap"
            )


@dataclass(frozen=True, slots=True)
class Duplicate(Element):
    """Each datagram is sent twice with probability ``p``; the copy follows it at once."""

    name: ClassVar[str] = "duplicate"
    p: float = arg("p", SHARE)


@dataclass(frozen=True, slots=True)
class Rate(Element):
    """A link of ``bps`` behind a first-in first-out queue of ``queue_bytes`` that drops at its tail. UDP
    payload counts, what is left of the datagram in service too; one larger than the queue is always lost."""

    name: ClassVar[str] = "rate"
    bps: float = arg("rate", RATE)
    """Bits per second."""
    queue_bytes: int = arg("queue", SIZE, default=256 * KIB)
    """Bytes that may wait."""


@dataclass(frozen=True, slots=True)
class Corrupt(Element):
    """Each datagram is damaged with probability ``p``. The kernel would drop it by its UDP checksum, so it is
    lost, unless ``deliver`` is set: then one bit is flipped (to test parsers)."""

    name: ClassVar[str] = "corrupt"
    p: float = arg("p", SHARE)
    deliver: bool = arg("deliver", FLAG, default=False)


@dataclass(frozen=True, slots=True)
class Delay(Element):
    """Every datagram is ``delay_s`` seconds late."""

    name: ClassVar[str] = "delay"
    delay_s: float = arg("time", TIME)


@dataclass(frozen=True, slots=True)
class Jitter(Element):
    """The delay varies: uniform over delay -/+ ``jitter_s``, or normal with that standard deviation; never
    below 0. Like any jitter that is drawn for each datagram, it reorders."""

    name: ClassVar[str] = "jitter"
    jitter_s: float = arg("time", TIME)
    dist: str = arg("dist", choice("uniform", "normal"), default="uniform")


@dataclass(frozen=True, slots=True)
class Reorder(Element):
    """Each datagram is held back by ``by_s`` seconds with probability ``p``, so that later ones pass it."""

    name: ClassVar[str] = "reorder"
    p: float = arg("p", SHARE)
    by_s: float = arg("by", SPAN)


ELEMENTS: Mapping[str, type[Element]] = {
    element.name: element
    for element in (
        *(Loss, GilbertElliott, GilbertElliottTime, Bursts),
        *(Duplicate, Rate, Corrupt, Delay, Jitter, Reorder),
    )
}
"""Elements by name, in the order in which they act on a datagram."""


@dataclass(frozen=True, slots=True)
class ImpairSpec:
    """What happens to datagrams on their way; the default is nothing.

    Each element may stand once; they act in the order of ELEMENTS, whatever the order they are written in.
    ``eval(repr(spec)) == spec == parse_impair(str(spec))``.
    """

    elements: tuple[Element, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if not SEED.valid(self.seed):
            raise ConfigError(f"seed={self.seed!r}: needs {SEED.what}, at most {MAX_SEED}")
        names = [element.name for element in self.elements]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"{twice} stands more than once: each impairment may stand once")
        order = list(ELEMENTS)
        object.__setattr__(self, "elements", tuple(sorted(self.elements, key=lambda e: order.index(e.name))))

    def __bool__(self) -> bool:
        """True if anything is impaired."""
        return bool(self.elements)

    def __str__(self) -> str:
        seed = (f"seed({self.seed})",) if self.seed else ()
        return ",".join((*map(str, self.elements), *seed))

    def get(self, element: type[E]) -> E | None:
        """The element of a type, or None."""
        return next((found for found in self.elements if isinstance(found, element)), None)


def parse_impair(text: str) -> ImpairSpec:
    """Read impairments such as ``"bursts(loss=0.6..0.9,length=200ms,every=1s),seed(7)"``; ``""`` is none.

    Raises ConfigError with the column of the fault, what was expected there, and a caret below it.
    """
    return _Parser(text).parse()


class _Parser(Parser):
    """Reads ``name(value,name=value,...),...``."""

    def __init__(self, text: str) -> None:
        super().__init__(text, "impairments")

    def parse(self) -> ImpairSpec:
        elements: list[Element] = []
        seen: set[str] = set()
        seed = 0
        while self.at < len(self.text):
            if seen:
                self.take(",", "',' or the end after an impairment")
            start = self.at
            name = self.take_word(f"the name of an impairment ({_known()})")
            if name not in ELEMENTS and name != "seed":
                self.fail(start, f"{name!r} is no impairment; known are {_known()}")
            if name in seen:
                self.fail(start, f"{name} stands more than once: each impairment may stand once")
            seen.add(name)
            if name == "seed":
                seed = self.take_seed()
            else:
                elements.append(self.take_element(start, ELEMENTS[name]))
        return ImpairSpec(tuple(elements), seed)

    def take_seed(self) -> int:
        self.take("(", "'(' after 'seed'")
        seed: int = self.take_value("seed", SEED)
        self.take(")", "')' after the seed")
        return seed


def _known() -> str:
    return ", ".join((*ELEMENTS, "seed"))
