"""Things that a person writes as one string, ``name(value,name=value,...)``: impairments, compression methods.

Each is a frozen dataclass whose fields are made by ``arg``, which says how a field is written, read and checked. ``Parser`` reads
such strings and names the column of a fault; ``str`` of an element gives a string that parses to an equal one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, NoReturn, TypeVar

from dblp.errors import ConfigError
from dblp.units import parse_bps, parse_bytes, parse_seconds

E = TypeVar("E", bound="Element")

MAX_SEED = 2**63 - 1
MAX_SECONDS = 1e9
"""Longest time of an element: 30 years; beyond it sums of float seconds lose the microsecond."""
_TOKEN = re.compile(r"[^\s,()=]+")
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: how it is read, checked and written."""

    what: str
    """What is expected, for errors."""
    parse: Callable[[str], Any]
    """Raises ValueError (ConfigError is one) or OverflowError."""
    valid: Callable[[Any], bool]
    write: Callable[[Any], str]
    example: str = ""
    """As a person writes one, for errors."""


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


def _unit(
    parse: Callable[[str], float], plain: str, *units: str, fractions: bool = True
) -> Callable[[Any], str]:
    """Writes a value as a person would, in the largest of the units in which it has few digits; it parses to the same value."""

    def write(value: Any) -> str:
        for unit in units:
            text = f"{round(value / parse(f'1{unit}'), 3):g}{unit}"
            if value >= parse(f"1{unit}") and parse(text) == value and (fractions or "." not in text):
                return text
        return f"{repr(value).removesuffix('.0')}{plain}"

    return write


_write_time = _unit(parse_seconds, "s", "s", "ms", "us")


def _between(low: float, high: float) -> Callable[[Any], bool]:
    """Accept numbers in (low, high]."""
    return lambda value: isinstance(value, (int, float)) and low < value <= high


SHARE = Kind(
    "a share in 0..1 (or a percentage such as 5%)", _parse_share, _is_share, lambda v: repr(float(v)), "0.1"
)
SHARES = Kind(
    "a share in 0..1, or a range such as 0.6..0.9",
    _parse_shares,
    _is_shares,
    lambda v: repr(float(v[0])) if v[0] == v[1] else f"{float(v[0])!r}..{float(v[1])!r}",
    "0.8",
)
TIME = Kind(
    "a time such as 2ms, not negative",
    parse_seconds,
    lambda value: isinstance(value, (int, float)) and 0.0 <= value <= MAX_SECONDS,
    _write_time,
    "2ms",
)
SPAN = Kind("a time above 0 such as 2ms", parse_seconds, _between(0.0, MAX_SECONDS), _write_time, "2ms")
RATE = Kind(
    "a rate above 0 such as 100mbit",
    parse_bps,
    _between(0.0, 1e15),
    _unit(parse_bps, "bit", "gbit", "mbit", "kbit", "bit"),
    "100mbit",
)
SIZE = Kind(
    "a size of at least 1 byte such as 256KB",
    parse_bytes,
    _is_size,
    _unit(parse_bytes, "B", "MB", "KB", fractions=False),
    "256KB",
)
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


def choice(*names: str) -> Kind:
    """One of several words."""
    return Kind(" or ".join(names), str, lambda value: value in names, str)


def arg(name: str, kind: Kind, **default: Any) -> Any:
    """A field of an element that is written as ``name=...`` in the string."""
    return field(metadata={"name": name, "kind": kind}, **default)


@dataclass(frozen=True, slots=True)
class Element:
    """One of them, by its ``name``. Raises ConfigError if a value is out of its range."""

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


class Parser:
    """Recursive descent; ``at`` is the position of the next token, ``what`` begins every error."""

    def __init__(self, text: str, what: str) -> None:
        self.text = text
        self.what = what
        self.at = 0
        self.skip_space()

    @property
    def done(self) -> bool:
        """Nothing is left to read."""
        return self.at == len(self.text)

    def take_element(self, start: int, cls: type[E], *, bare: bool = False) -> E:
        """The values of an element whose name stood at ``start``; ``bare``: brackets may be left out where all have defaults."""
        if bare and not self.text.startswith("(", self.at) and not any(map(_required, fields(cls))):
            return cls()
        self.take("(", f"'(' after {cls.name!r}: {_usage(cls)}{_as_in(cls)}")
        specs = {spec.metadata["name"]: spec for spec in fields(cls)}
        values: dict[str, Any] = {}
        while not self.text.startswith(")", self.at):
            if values:
                self.take(",", f"',' or ')' in {_usage(cls)}")
            spec = self.take_name(cls, specs, values)
            values[spec.name] = self.take_value(spec.metadata["name"], spec.metadata["kind"])
        missing = [name for name, spec in specs.items() if spec.name not in values and _required(spec)]
        if missing:
            self.fail(self.at, f"{cls.name} lacks {' and '.join(missing)}: {_usage(cls)}{_as_in(cls)}")
        self.take(")", "')'")
        try:
            return cls(**values)
        except ConfigError as error:
            self.fail(start, str(error))

    def take_name(
        self, cls: type[E], specs: Mapping[str, Field[Any]], values: Mapping[str, Any]
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
        """A value of a kind; ``name`` is for errors."""
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
        """The next word; ``expected`` is for errors."""
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            self.fail(self.at, f"expected {expected}, found {self.found()}")
        self.at = match.end()
        self.skip_space()
        return match[0]

    def take(self, char: str, expected: str) -> None:
        """Pass over a character; ``expected`` is for errors."""
        if not self.text.startswith(char, self.at):
            self.fail(self.at, f"expected {expected}, found {self.found()}")
        self.at += 1
        self.skip_space()

    def skip_space(self) -> None:
        """Pass over white space."""
        self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches nothing, too

    def found(self) -> str:
        """What stands here, for errors."""
        return repr(self.text[self.at]) if self.at < len(self.text) else "the end"

    def fail(self, at: int, problem: str) -> NoReturn:
        """Raise ConfigError with the column, the text and a caret below the fault."""
        if not self.text.strip():  # nothing to point at
            raise ConfigError(f"{self.what}, column {at + 1}: {problem}")
        # A tab or newline would put the caret elsewhere than the fault.
        line = "".join(char if char.isprintable() else " " for char in self.text)
        raise ConfigError(f"{self.what}, column {at + 1}: {problem}\n  {line}\n  {' ' * at}^")


def _required(spec: Field[Any]) -> bool:
    return spec.default is MISSING


def _as_in(cls: type[Element]) -> str:
    """An example with what cannot be left out: ``, as in topk(ratio=0.01)``; nothing where a kind has none."""
    needed = [
        (spec.metadata["name"], spec.metadata["kind"].example) for spec in fields(cls) if _required(spec)
    ]
    if not needed or not all(example for _, example in needed):
        return ""
    return f", as in {cls.name}({','.join(f'{name}={example}' for name, example in needed)})"


def _usage(cls: type[Element]) -> str:
    """How an element is written: ``delay(time)``, optional values in brackets."""
    names = (
        spec.metadata["name"]
        if _required(spec)
        else f"[{spec.metadata['name']}={spec.metadata['kind'].write(spec.default)}]"
        for spec in fields(cls)
    )
    return f"{cls.name}({', '.join(names)})"
