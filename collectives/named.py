"""Policies as people write them: ``default``, ``default(leg=0.4)``, ``bounded(budget=0.1, stop=eager)``.

The name is a preset's, with its settings in brackets, or ``bounded`` with those of ``Bounded``. ``phase=tolerant`` takes the
policy of a tolerant phase, where the preset has phases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from dblp.collectives.presets import Preset, preset, presets
from dblp.errors import ConfigError, did_you_mean
from dblp.transport.policy import Bounded
from dblp.transport.spec import Parser

BOUNDED = "bounded"
OTHER_NAMES: Mapping[str, str] = MappingProxyType({"dblp-exact": "exact", "dblp-bounded": BOUNDED})
"""What comparisons call two of them beside other transports."""
_SETTINGS: Mapping[str, Callable[[str], Any]] = MappingProxyType({
    "budget": float,
    "stop": str,
    "stop_after_s": float,
    "consistency": str,
})  # fmt: skip
"""Of ``bounded``."""


def plain_name(name: str) -> str:
    """The one name of a policy that may have been called otherwise; any other name as it is."""
    return OTHER_NAMES.get(name, name)


def parse_policy(text: str, what: str = "policy", also: Sequence[str] = ()) -> Preset:
    """Read a policy; raises ConfigError that says ``what`` it is in, with the column of the fault. ``also``: what else is known
    there, for the error."""
    parser = Parser(text, what)
    start = parser.at
    name = parser.take_word(f"the name of {'an' if what[0] in 'aeiou' else 'a'} {what}")
    settings = _settings(parser) if not parser.done else {}
    if not parser.done:
        parser.fail(parser.at, f"expected the end, found {parser.found()}")
    try:
        return _preset(name, settings, also)
    except (ConfigError, ValueError) as error:
        parser.fail(start, str(error))


def _settings(parser: Parser) -> dict[str, str]:
    parser.take("(", "'(' or the end after the name")
    settings: dict[str, str] = {}
    while not parser.text.startswith(")", parser.at):
        if settings:
            parser.take(",", "',' or ')'")
        start = parser.at
        key = parser.take_word("the name of a setting")
        parser.take("=", f"'=' after {key}")
        if key in settings:
            parser.fail(start, f"{key} is given twice")
        settings[key] = parser.take_word(f"a value of {key}")
    parser.take(")", "')'")
    return settings


def _preset(name: str, settings: dict[str, str], also: Sequence[str]) -> Preset:
    plain = plain_name(name)
    if plain == BOUNDED:
        return _bounded(settings)
    known = (*also, BOUNDED, *presets())
    if plain not in known:
        near = did_you_mean(name, (*known, *OTHER_NAMES))
        raise ConfigError(f"{name!r} is none: known are {', '.join(known)}{near}")
    phase = settings.pop("phase", "critical")
    made = preset(plain, **{key: _number(key, value) for key, value in settings.items()})
    if phase == "critical":
        return made
    if phase != "tolerant" or made.tolerant is None:
        phases = "critical or tolerant" if made.tolerant is not None else "critical only, as it has no phases"
        raise ConfigError(f"phase={phase}: {name} knows {phases}")
    return replace(made, policy=made.tolerant, controller=None)


def _bounded(settings: Mapping[str, str]) -> Preset:
    unknown = [key for key in settings if key not in _SETTINGS]
    if unknown or "budget" not in settings:
        what = f"has no {unknown[0]!r}" if unknown else "lacks budget"
        raise ConfigError(f"bounded {what}: bounded(budget, {', '.join(list(_SETTINGS)[1:])})")
    values: dict[str, Any] = {
        key: _number(key, settings[key]) if kind is float else settings[key]
        for key, kind in _SETTINGS.items()
        if key in settings
    }
    return Preset(name=BOUNDED, policy=Bounded(**values), source="Bounded")


def _number(key: str, text: str) -> float:
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ConfigError(f"{key}={text}: a number is expected") from None
