"""Fields of the frozen dataclasses that users fill in: of the type of their default, or a ConfigError that says so at once.

Python checks no types, and a wrong one would speak up late and elsewhere: in a round, on one rank.
"""

from __future__ import annotations

import enum
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar

from dblp.errors import ConfigError

_Kind = TypeVar("_Kind", bound=enum.Enum)

_TYPES: tuple[tuple[type, type, str], ...] = (
    (bool, bool, "True or False"),
    (int, Integral, "a whole number"),
    (float, Real, "a number"),
    (str, str, "a text"),
)
"""Type of the default, what is taken (numpy's numbers too), and that in words; bool stands first, since it is an int as well."""


def check_fields(instance: Any) -> None:
    """Raise ConfigError for a field of the dataclass ``instance`` that has not the type of its default. Values of an enumeration
    become its members, so that users may write ``stop="eager"``, and other packages' numbers Python's own."""
    for spec in fields(instance):
        value = getattr(instance, spec.name)
        if isinstance(spec.default, enum.Enum):
            object.__setattr__(instance, spec.name, named(type(spec.default), spec.name, value))
            continue
        for kind, taken, words in _TYPES:
            if isinstance(spec.default, kind):
                if not isinstance(value, taken) or (isinstance(value, bool) and kind is not bool):
                    raise ConfigError(f"{spec.name}={value!r}: {words} is needed")
                if kind in (int, float) and type(value) not in (int, float):
                    number: Any = value
                    object.__setattr__(instance, spec.name, kind(number))
                break


def is_whole(value: object) -> TypeGuard[int]:
    """True for a whole number, numpy's too; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def whole(name: str, value: object, least: int, most: int, *, what: str = "a whole number") -> int:
    """A whole number of ``least``..``most`` as Python's own; raises ConfigError."""
    if not is_whole(value):
        raise ConfigError(f"{name}={value!r}: {what} is needed, not {type(value).__name__}")
    number = int(value)
    if not least <= number <= most:
        raise ConfigError(f"{name}={number}: must lie in {least}..{most}")
    return number


def is_number(value: object) -> TypeGuard[float]:
    """True for a real number, numpy's too; a bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def named(kind: type[_Kind], field: str, value: _Kind | str) -> _Kind:
    """The member of an enumeration, given as such or by its value; raises ConfigError that lists them."""
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(repr(member.value) for member in kind)
        raise ConfigError(f"{field}={value!r}: use one of {names}") from None
