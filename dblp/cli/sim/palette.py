"""What the pictures and tables of experiments share: colours, axes of numbers, and how a point of the axes is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito's palette: told apart with any kind of colour vision."""


def axis_names(names: Iterable[str]) -> dict[str, str]:
    """What to call fields of a scenario: ``failures.0.loss`` is ``loss``, or as much of it as sets it apart from the others."""
    names = list(names)
    short = {}
    for name in names:
        parts = name.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        short[name] = next(
            (end for end in ends if sum(f".{other}".endswith(f".{end}") for other in names) == 1), name
        )
    return short


def point_text(point: Any, between: str = ", ") -> str:
    """A point of the axes, with short names."""
    short = axis_names(name for name, _ in point)
    return between.join(f"{short[name]} {value}" for name, value in point)


def titled(what: str, point: Any) -> str:
    """A title, with the point that it is of."""
    return ", ".join(filter(None, (what, point_text(point))))


def whole_numbers(axis: Any) -> None:
    """Keep an axis of counts from fractions."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.MaxNLocator(integer=True))
