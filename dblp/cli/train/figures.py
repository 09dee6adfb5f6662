"""The picture of ``dblp train``: how the arms learn, and how long their rounds take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dblp.cli.output import make_folder
from dblp.cli.train.outcome import Floats, Outcome
from dblp.cli.train.policies import BOUNDED, EXACT, GLOO
from dblp.errors import LocalError
from dblp.sim.log_axes import plain_numbers

_COLOURS = {GLOO: "#aaaaaa", EXACT: "#0072B2", BOUNDED: "#D55E00"}
"""Okabe and Ito's palette: told apart with any kind of colour vision."""
_OTHERS = (
    ("#009E73", "-"),
    ("#CC79A7", "-"),
    ("#E69F00", (0, (5, 1.5))),
    ("#56B4E9", (0, (5, 1.5))),
    ("#000000", (0, (1.5, 1.0))),
    ("#F0E442", "-"),
)
"""The rest of it, for the arms of named policies in their order: the faintest last. Dashes let a curve beneath be seen."""
_WIDTH, _GLOO_WIDTH = 1.8, 4.0
"""gloo and dblp-exact often give one curve: the wider shows behind the narrower."""
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "legend.frameon": False,
}


def draw(outcomes: Sequence[Outcome], path: Path, *, subtitle: str) -> None:
    """Draw training loss, test accuracy and the all-reduce times; raises LocalError if it cannot write."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed, none is looked for
    from matplotlib import pyplot

    with pyplot.style.context(_STYLE):
        figure, (loss, accuracy, times) = pyplot.subplots(1, 3, figsize=(13.5, 4.2), layout="constrained")
        _draw_curves(loss, outcomes)
        _draw_accuracy(accuracy, outcomes)
        _draw_times(times, outcomes)
        figure.suptitle(subtitle, fontsize=9.5, color="#555555", x=0.01, ha="left")
        try:
            make_folder("--picture", path)
            figure.savefig(path, dpi=150)
        except (OSError, ValueError) as error:  # ValueError: a suffix that matplotlib does not know
            raise LocalError(f"--picture {path}: cannot be written: {error}") from None
        finally:
            pyplot.close(figure)


def _draw_curves(axes: Any, outcomes: Sequence[Outcome]) -> None:
    for style, of_arm in _by_arm(outcomes):
        _draw_band(axes, style, np.stack([outcome.losses for outcome in of_arm]))
    axes.set(title="Training loss", xlabel="epoch", yscale="log")
    _whole_epochs(axes)
    axes.legend()
    plain_numbers(axes.yaxis)


def _draw_accuracy(axes: Any, outcomes: Sequence[Outcome]) -> None:
    for style, of_arm in _by_arm(outcomes):
        _draw_band(axes, style, 100 * np.stack([outcome.accuracies for outcome in of_arm]))
    lowest = min(float(outcome.accuracies[len(outcome.accuracies) // 4 :].min()) for outcome in outcomes)
    highest = max(float(outcome.accuracies.max()) for outcome in outcomes)
    limits = max(0.0, 100 * lowest - 2), min(100.0, 100 * highest + 2)
    axes.set(title="Test accuracy (%)", xlabel="epoch", ylim=limits)
    _whole_epochs(axes)


def _draw_band(axes: Any, style: dict[str, Any], values: Floats) -> None:
    """The mean over seeds (seeds, epochs) as a line, the range between them as a band."""
    epochs = np.arange(1, values.shape[1] + 1)
    marker = "o" if len(epochs) == 1 else None
    axes.plot(epochs, values.mean(axis=0), marker=marker, **style)
    if len(values) > 1:
        axes.fill_between(
            epochs, values.min(axis=0), values.max(axis=0), color=style["color"], alpha=0.15, linewidth=0
        )


def _draw_times(axes: Any, outcomes: Sequence[Outcome]) -> None:
    """The share of the rounds that took longer than a time: a log axis each way shows the tail."""
    for style, of_arm in _by_arm(outcomes):
        times = np.sort(np.concatenate([outcome.allreduce_s for outcome in of_arm])) * 1e3
        slower = 1 - np.arange(len(times)) / len(times)
        axes.step(times, 100 * slower, where="post", **style)
    axes.set(
        title="All-reduce: share of rounds slower than t (%)", xlabel="t (ms)", xscale="log", yscale="log"
    )
    axes.set_ylim(None, 130)
    plain_numbers(axes.xaxis, axes.yaxis)


def _whole_epochs(axes: Any) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def _by_arm(outcomes: Sequence[Outcome]) -> Iterator[tuple[dict[str, Any], list[Outcome]]]:
    """Each arm's line style, with its name as the label, and its outcomes."""
    others = itertools.cycle(_OTHERS)
    for arm in dict.fromkeys(outcome.arm for outcome in outcomes):
        colour, dashes = (_COLOURS[arm], "-") if arm in _COLOURS else next(others)
        style = {
            "label": arm,
            "color": colour,
            "linestyle": dashes,
            "linewidth": _GLOO_WIDTH if arm == GLOO else _WIDTH,
        }
        yield style, [outcome for outcome in outcomes if outcome.arm == arm]
