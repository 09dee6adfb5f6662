"""Algorithms by name, with their options in brackets: ``hierarchical(columns=4)``, ``ps(servers=0+1,serve_only)``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from dblp.collectives.algorithms.hierarchical import check_columns
from dblp.collectives.algorithms.ps import check_servers
from dblp.errors import ConfigError

_FORM = re.compile(r"\s*([a-z_]+)\s*(?:\((.*)\))?\s*")


def _number(text: str) -> int:
    return int(text)


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(int(rank) for rank in text.split("+"))


def _flag(text: str) -> bool:
    if text:
        raise ValueError
    return True


OPTIONS: Mapping[str, Mapping[str, Callable[[str], Any]]] = {
    "hierarchical": {"columns": _number},
    "ps": {"servers": _ranks, "serve_only": _flag, "whole": _flag},
}
"""The options of each algorithm that has any, and how their values are read."""


def parse_algorithm(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the options of ``text``. Raises ConfigError if it is not of that form or an option is unknown; names are
    not looked up."""
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"algorithm={text!r}: a name, or name(option=value, ...), is expected")
    name, inside = match[1], match[2] or ""
    known, options = OPTIONS.get(name, {}), {}
    for part in filter(None, (part.strip() for part in inside.split(","))):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in known:
            offered = ", ".join(known) or "none"
            raise ConfigError(f"algorithm={text!r}: no option {key!r}; those of {name} are: {offered}")
        try:
            options[key] = known[key](value)
        except ValueError:
            raise ConfigError(
                f"algorithm={text!r}: {key} needs a number, ranks joined by '+', or no value if it is a flag"
            ) from None
    return name, options


def format_algorithm(name: str, options: Mapping[str, Any]) -> str:
    """The text of an algorithm with its options, in the one form that all ranks compare."""
    if not options:
        return name
    parts = []
    for key in sorted(options):
        value = options[key]
        text = "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
        parts.append(key if value is True else f"{key}={text}")
    return f"{name}({','.join(parts)})"


def check_options(name: str, options: Mapping[str, Any], world_size: int) -> None:
    """Raise ConfigError where options do not fit a group of ``world_size`` ranks."""
    if name == "ps":
        check_servers(options.get("servers", (0,)), options.get("serve_only", False), world_size)
    elif name == "hierarchical" and "columns" in options:
        check_columns(options["columns"], world_size)
