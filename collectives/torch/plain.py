"""Policies as plain values, for checkpoints that ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any

from dblp.errors import ConfigError
from dblp.transport.policy import Policy


def plain_policy(policy: Policy) -> dict[str, Any]:
    """A policy as a dict of numbers, strings and dicts."""
    return {field.name: _plain(getattr(policy, field.name)) for field in dataclasses.fields(policy)}


def policy_from_plain(values: Mapping[str, Any]) -> Policy:
    """The policy that ``plain_policy`` took apart; fields that are missing have their defaults.

    Raises ConfigError for values that make no policy.
    """
    try:
        return Policy(**_typed(Policy, values))
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"these values make no policy: {error}") from None


def differences(one: Policy, other: Policy) -> tuple[str, str]:
    """Two policies as text, by those of their fields that differ: ``("budget=0.1", "budget=0.3")``."""
    plain = plain_policy(one), plain_policy(other)
    names = [name for name in plain[0] if plain[0][name] != plain[1][name]]
    texts = [", ".join(f"{name}={_text(values[name])}" for name in names) for values in plain]
    return texts[0], texts[1]


def _text(value: Any) -> str:
    """0.91, not 0.9099999999999999."""
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def _typed(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise TypeError(f"{kind.__name__} has no {', '.join(unknown)}")
    return {name: _value(hints[name], value) for name, value in values.items()}


def _value(hint: Any, value: Any) -> Any:
    """``value`` as its field's type: ``hint`` is a class, or a union of one with None."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return hint(**_typed(hint, value))
    return hint(value)
