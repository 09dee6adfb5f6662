"""The description of impairments: frozen elements, and the one string that a person writes for them.

``parse_impair("ge(p=0.002,r=0.05,bad=0.8),delay(2ms),seed(7)")`` gives an ImpairSpec; ``str(spec)`` gives a
string that parses to an equal one. docs/impairments.md has the table of elements; ``impair.py`` acts by them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, NoReturn, TypeVar

from dblp.errors import ConfigError
from dblp.units import KIB, parse_bps, parse_bytes, parse_seconds

E = TypeVar("E", bound="Element")

MAX_SEED = 2**63 - 1
MAX_SECONDS = 1e9
"""Longest time of an element: 30 years; beyond it sums of float seconds lose the microsecond."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: how it is read, checked and written."""

    what: str
    """What is expected, for errors."""
    parse: Callable[[str], Any]
    """Raises ValueError (ConfigError is one) or OverflowError."""
    valid: Callable[[Any], bool]
    write: Callable[[Any], str]


def _parse_share(text: str) -> float:
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def _parse_shares(text: str) -> tuple[float, float]:
    low, dots, high = text.partition("..")
    return _parse_share(low), _parse_share(high if dots else low)


def _parse_seed(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0.0 <= value <= 1.0


def _is_shares(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(_is_share(share) for share in value)
        and bool(value[0] <= value[1])
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and 1 <= value <= 2**50


def _between(low: float, high: float) -> Callable[[Any], bool]:
    """Accept numbers in (low, high]."""
    return lambda value: isinstance(value, (int, float)) and low < value <= high


SHARE = Kind(
    "a share in 0..1 (or a percentage such as 5%)", _parse_share, _is_share, lambda v: repr(float(v))
)
SHARES = Kind(
    "a share in 0..1, or a range such as 0.6..0.9",
    _parse_shares,
    _is_shares,
    lambda v: repr(float(v[0])) if v[0] == v[1] else f"{float(v[0])!r}..{float(v[1])!r}",
)
TIME = Kind(
    "a time such as 2ms, not negative",
    parse_seconds,
    lambda value: isinstance(value, (int, float)) and 0.0 <= value <= MAX_SECONDS,
    lambda value: f"{float(value)!r}s",
)
SPAN = Kind(
    "a time above 0 such as 2ms", parse_seconds, _between(0.0, MAX_SECONDS), lambda v: f"{float(v)!r}s"
)
RATE = Kind("a rate above 0 such as 100mbit", parse_bps, _between(0.0, 1e15), lambda v: f"{float(v)!r}bit")
SIZE = Kind("a size of at least 1 byte such as 256KB", parse_bytes, _is_size, lambda v: f"{v}B")
SEED = Kind(
    "a whole number that is not negative",
    _parse_seed,
    lambda value: isinstance(value, int) and 0 <= value <= MAX_SEED,
    str,
)
FLAG = Kind(
    "true or false",
    lambda text: {"true": True, "false": False}.get(text.lower(), text),
    lambda value: isinstance(value, bool),
    lambda value: str(value).lower(),
)


def _choice(*names: str) -> Kind:
    return Kind(" or ".join(names), str, lambda value: value in names, str)


def _arg(name: str, kind: Kind, **default: Any) -> Any:
    """A field of an element that is written as ``name=...`` in the string."""
    return field(metadata={"name": name, "kind": kind}, **default)


@dataclass(frozen=True, slots=True)
class Element:
    """One impairment. Raises ConfigError if a value is out of its range."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for spec in fields(self):
            kind: Kind = spec.metadata["kind"]
            if not kind.valid(getattr(self, spec.name)):
                raise ConfigError(f"{self.name}: {spec.name}={getattr(self, spec.name)!r}: needs {kind.what}")

    def __str__(self) -> str:
        values = (
            f"{s.metadata['name']}={s.metadata['kind'].write(getattr(self, s.name))}" for s in fields(self)
        )
        return f"{self.name}({','.join(values)})"


@dataclass(frozen=True, slots=True)
class Loss(Element):
    """Each datagram is lost with probability ``p``, independently."""

    name: ClassVar[str] = "loss"
    p: float = _arg("p", SHARE)


@dataclass(frozen=True, slots=True)
class GilbertElliott(Element):
    """Two states that change by the datagram (Gilbert 1960, Elliott 1963; in the notation of Hasslinger and
    Hohlfeld 2008 ``bad`` is 1-h and ``good`` is 1-k). In the long run the loss is
    good * r/(p+r) + bad * p/(p+r); a bad run lasts 1/r datagrams on average."""

    name: ClassVar[str] = "ge"
    p: float = _arg("p", SHARE)
    """Probability to turn bad, for each datagram in the good state."""
    r: float = _arg("r", SHARE)
    """Probability to turn good, for each datagram in the bad state."""
    bad: float = _arg("bad", SHARE, default=1.0)
    """Loss in the bad state."""
    good: float = _arg("good", SHARE, default=0.0)
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
    burst_s: float = _arg("burst", SPAN)
    """Mean length of a bad time, seconds."""
    gap_s: float = _arg("gap", SPAN)
    """Mean length of a good time, seconds."""
    bad: float = _arg("bad", SHARE, default=1.0)
    """Loss in a bad time."""
    good: float = _arg("good", SHARE, default=0.0)
    """Loss in a good time."""


@dataclass(frozen=True, slots=True)
class Bursts(Element):
    """Scheduled bursts: burst k covers [start + k*every, start + k*every + length). Its loss is drawn once,
    uniform over the range, by the seed and k only: all that share a seed and a clock share the bursts."""

    name: ClassVar[str] = "bursts"
    loss: tuple[float, float] = _arg("loss", SHARES)
    """Range of the loss within a burst; equal ends for one value."""
    length_s: float = _arg("length", SPAN)
    """Length of each burst, seconds."""
    every_s: float = _arg("every", SPAN)
    """Time from start to start, seconds."""
    start_s: float = _arg("start", TIME, default=0.0)
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
    p: float = _arg("p", SHARE)


@dataclass(frozen=True, slots=True)
class Rate(Element):
    """A link of ``bps`` behind a first-in first-out queue of ``queue_bytes`` that drops at its tail. UDP
    payload counts, what is left of the datagram in service too; one larger than the queue is always lost."""

    name: ClassVar[str] = "rate"
    bps: float = _arg("rate", RATE)
    """Bits per second."""
    queue_bytes: int = _arg("queue", SIZE, default=256 * KIB)
    """Bytes that may wait."""


@dataclass(frozen=True, slots=True)
class Corrupt(Element):
    """Each datagram is damaged with probability ``p``. The kernel would drop it by its UDP checksum, so it is
    lost, unless ``deliver`` is set: then one bit is flipped (to test parsers)."""

    name: ClassVar[str] = "corrupt"
    p: float = _arg("p", SHARE)
    deliver: bool = _arg("deliver", FLAG, default=False)


@dataclass(frozen=True, slots=True)
class Delay(Element):
    """Every datagram is ``delay_s`` seconds late."""

    name: ClassVar[str] = "delay"
    delay_s: float = _arg("time", TIME)


@dataclass(frozen=True, slots=True)
class Jitter(Element):
    """The delay varies: uniform over delay -/+ ``jitter_s``, or normal with that standard deviation; never
    below 0. Like any jitter that is drawn for each datagram, it reorders."""

    name: ClassVar[str] = "jitter"
    jitter_s: float = _arg("time", TIME)
    dist: str = _arg("dist", _choice("uniform", "normal"), default="uniform")


@dataclass(frozen=True, slots=True)
class Reorder(Element):
    """Each datagram is held back by ``by_s`` seconds with probability ``p``, so that later ones pass it."""

    name: ClassVar[str] = "reorder"
    p: float = _arg("p", SHARE)
    by_s: float = _arg("by", SPAN)


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


_TOKEN = re.compile(r"[^\s,()=]+")
_SPACE = re.compile(r"\s*")


class _Parser:
    """Recursive descent over ``name(value,name=value,...),...``; ``at`` is the position of the next token."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.skip_space()

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

    def take_element(self, start: int, cls: type[Element]) -> Element:
        self.take("(", f"'(' after {cls.name!r}: {_usage(cls)}")
        specs = {spec.metadata["name"]: spec for spec in fields(cls)}
        values: dict[str, Any] = {}
        while not self.text.startswith(")", self.at):
            if values:
                self.take(",", f"',' or ')' in {_usage(cls)}")
            spec = self.take_name(cls, specs, values)
            values[spec.name] = self.take_value(spec.metadata["name"], spec.metadata["kind"])
        missing = [name for name, spec in specs.items() if spec.name not in values and _required(spec)]
        if missing:
            self.fail(self.at, f"{cls.name} lacks {' and '.join(missing)}: {_usage(cls)}")
        self.take(")", "')'")
        try:
            return cls(**values)
        except ConfigError as error:
            self.fail(start, str(error))

    def take_name(
        self, cls: type[Element], specs: Mapping[str, Field[Any]], values: Mapping[str, Any]
    ) -> Field[Any]:
        """Read ``name=`` where it stands; else the value belongs to the next field that has none."""
        start = self.at
        match = _TOKEN.match(self.text, start)
        after = _SPACE.match(self.text, match.end()).end() if match else start  # type: ignore[union-attr]
        if match and self.text.startswith("=", after):
            if match[0] not in specs:
                self.fail(start, f"{cls.name} has no {match[0]!r}: {_usage(cls)}")
            spec = specs[match[0]]
            if spec.name in values:
                self.fail(start, f"{match[0]} is given twice")
            self.at = after
            self.take("=", "'='")
            return spec
        free = [spec for spec in specs.values() if spec.name not in values]
        if not free:
            self.fail(start, f"too many values: {_usage(cls)}")
        return free[0]

    def take_value(self, name: str, kind: Kind) -> Any:
        start = self.at
        word = self.take_word(f"{name}: {kind.what}")
        try:
            value = kind.parse(word)
        except (ValueError, OverflowError):
            value = None
        if value is None or not kind.valid(value):
            self.fail(start, f"{name}={word} will not do: {kind.what} is expected")
        return value

    def take_word(self, expected: str) -> str:
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            self.fail(self.at, f"expected {expected}, found {self.found()}")
        self.at = match.end()
        self.skip_space()
        return match[0]

    def take(self, char: str, expected: str) -> None:
        if not self.text.startswith(char, self.at):
            self.fail(self.at, f"expected {expected}, found {self.found()}")
        self.at += 1
        self.skip_space()

    def skip_space(self) -> None:
        self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches nothing, too

    def found(self) -> str:
        return repr(self.text[self.at]) if self.at < len(self.text) else "the end"

    def fail(self, at: int, problem: str) -> NoReturn:
        # A tab or newline would put the caret elsewhere than the fault.
        line = "".join(char if char.isprintable() else " " for char in self.text)
        raise ConfigError(f"impairments, column {at + 1}: {problem}\n  {line}\n  {' ' * at}^")


def _required(spec: Field[Any]) -> bool:
    return spec.default is MISSING


def _usage(cls: type[Element]) -> str:
    """How an element is written: ``delay(time)``, optional values in brackets."""
    names = (
        spec.metadata["name"]
        if _required(spec)
        else f"[{spec.metadata['name']}={spec.metadata['kind'].write(spec.default)}]"
        for spec in fields(cls)
    )
    return f"{cls.name}({', '.join(names)})"


def _known() -> str:
    return ", ".join((*ELEMENTS, "seed"))
