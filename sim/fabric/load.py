"""Scenarios from TOML: tables into frozen values, units read by the field's type, errors with the field's full name.

With ``units``, as experiments read their TOML, rates and times need one: 0 alone is the same in all. Tables made in Python may
have seconds and bits per second as they are.
"""

from __future__ import annotations

import difflib
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from dblp.errors import ConfigError
from dblp.sim.fabric.scenario import Scenario
from dblp.sim.fabric.transports import TransportSpec, transport
from dblp.units import BitsPerSecond, ByteCount, Seconds, parse_bps, parse_bytes, parse_seconds

T = TypeVar("T")

_UNITS: Mapping[Any, tuple[Callable[[str], float], type]] = {
    ByteCount: (parse_bytes, int),
    Seconds: (parse_seconds, float),
    BitsPerSecond: (parse_bps, float),
}
_EXAMPLES: Mapping[Any, tuple[str, str]] = {Seconds: ("us", "s"), BitsPerSecond: ("gbit", "bit")}
"""Units that are told where one is missing: what may be meant, and what was read without."""


def scenario(table: Mapping[str, Any], *, units: bool = False) -> Scenario:
    """A scenario from a TOML table; raises ConfigError that names the field. ``units``: rates and times need one."""
    return build(Scenario, table, units=units)


def build(cls: type[T], table: Mapping[str, Any], place: str = "", *, units: bool = False) -> T:
    """An instance of a description's class from a table; ``place``: dotted name of the table, for errors."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{place}={table!r}: a table is expected")
    hints = _hints(cls)  # type: ignore[arg-type]
    for name in table:
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            meant = f"; did you mean {near[0]}?" if near else "."
            raise ConfigError(f"{_join(place, name)}: no such field{meant} Known are {', '.join(hints)}")
    values = {name: _value(hints[name], value, _join(place, name), units) for name, value in table.items()}
    missing = [spec.name for spec in fields(cls) if _required(spec) and spec.name not in values]  # type: ignore[arg-type]
    if missing:
        raise ConfigError(f"{_join(place, missing[0])} is missing")
    try:
        if cls is TransportSpec:
            return typing.cast(T, transport(values.pop("model", "dblp"), **values))
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(_join(place, str(error))) from None


def _required(spec: Any) -> bool:
    return spec.default is MISSING and spec.default_factory is MISSING


def _value(hint: Any, value: Any, place: str, units: bool) -> Any:
    """One field's value."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{place}={value!r}: an array is expected")
        item = typing.get_args(hint)[0]
        return tuple(_value(item, part, f"{place}[{number}]", units) for number, part in enumerate(value))
    if is_dataclass(hint):
        return build(typing.cast(type, hint), value, place, units=units)
    if units and hint in _EXAMPLES:
        _check_unit(hint, value, place)
    return _scalar(hint, value, place)


def _check_unit(hint: Any, value: Any, place: str) -> None:
    """Raise ConfigError for a number other than 0 that has no unit, a text or not."""
    try:
        bare = not isinstance(value, bool) and float(value) != 0.0
    except (TypeError, ValueError):  # with a unit, or what is not even a number
        return
    meant, plain = _EXAMPLES[hint]
    if bare:
        raise ConfigError(f"{place}={value!r}: a unit is needed: '{value}{meant}', or '{value}{plain}'")


def _scalar(hint: Any, value: Any, place: str) -> Any:
    if hint in _UNITS:
        parse, plain = _UNITS[hint]
        if isinstance(value, str):
            try:
                return plain(parse(value))
            except ValueError as error:
                raise ConfigError(f"{place}: {error}") from None
        hint = plain
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{place}={value!r}: {hint.__name__} is expected")
    return value


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
