"""What the pictures of experiments share: colours, and how a point of the axes is written."""

from __future__ import annotations

from typing import Any

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito's palette: told apart with any kind of colour vision."""


def point_text(point: Any) -> str:
    """A point of the axes, with the last part of each name."""
    return ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in point)


def titled(what: str, point: Any) -> str:
    """A title, with the point that it is of."""
    return ", ".join(filter(None, (what, point_text(point))))
