"""Numbers on logarithmic axes: some in each picture, however few decades it shows, and not too many."""

from __future__ import annotations

import pytest

from dblp.sim.log_axes import plain_numbers


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(
    ("least", "most"), [(52, 140), (130, 480), (0.0012, 0.0041), (1.6, 100), (1, 9_000), (0.01, 1e6)]
)
def test_an_axis_has_some_numbers_and_no_powers(least, most, low):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, axes = pyplot.subplots()
    try:
        axes.plot([least, most], [0, 1])
        axes.set_xscale("log")
        plain_numbers(axes.xaxis, low=low)
        figure.canvas.draw()
        shown = axes.get_xlim()
        labels = [
            float(tick.label1.get_text())  # "$10^2$" would be none
            for tick in axes.xaxis.get_major_ticks()
            if shown[0] <= tick.get_loc() <= shown[1]
        ]
        assert 2 <= len(labels) <= 10
    finally:
        pyplot.close(figure)
