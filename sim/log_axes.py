"""Logarithmic axes of pictures, with numbers that people read."""

from __future__ import annotations

from typing import Any

import numpy as np

_DECADES = ((0.8, (1, 1.5, 2, 3, 4, 5, 6, 8)), (1.3, (1, 2, 3, 5)), (2.2, (1, 2, 5)))
"""Up to so many decades, the leading digits that are written; 1 alone beyond."""


def plain_numbers(*axes: Any, low: bool = False) -> None:
    """Write 0.5, 20, 100 rather than powers: the fewer decades an axis shows, the more numbers. matplotlib's axes, after all
    has been drawn on them; ``low``: panels are too low for more than 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for axis in axes:
        least, most_shown = sorted(axis.get_view_interval())
        decades = np.log10(most_shown / least) if least > 0 else np.inf
        digits = next((digits for most, digits in _DECADES[2 * low :] if decades <= most), (1,))
        axis.set_major_locator(LogLocator(subs=digits, numticks=50))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
        if len(digits) > 1:
            axis.set_minor_locator(NullLocator())
