"""Picture of an experiment whose rounds compress: what was sent as the network's rate changed, and what each step took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dblp.cli.sim.palette import COLOURS, titled, whole_numbers
from dblp.sim.fabric.experiment import Experiment
from dblp.sim.fabric.sweep import CaseResult
from dblp.sim.log_axes import plain_numbers

MEGA = 1e6


def rows_of(experiment: Experiment) -> int:
    """Rows of the picture's grid."""
    return len(list(experiment.points()))


def draw_rounds(
    figure: Any, grid: Any, first: int, experiment: Experiment, results: Sequence[CaseResult]
) -> None:
    """For each point, from row ``first`` of the grid on: the share that each arm sends, under the rate, and the steps' times.
    Of the first seed."""
    seed = min(result.seed for result in results)
    for number, point in enumerate(experiment.points(), first):
        mine = {r.policy: r for r in results if r.point == point and r.seed == seed}
        axes = figure.add_subplot(grid[number, :2])
        _shares(axes, experiment, mine, point)
        _times(figure.add_subplot(grid[number, 2]), experiment, mine, point)


def _shares(axes: Any, experiment: Experiment, mine: dict[str, CaseResult], point: Any) -> None:
    rates: tuple[float, ...] = ()
    for colour, arm in zip(COLOURS, experiment.arms, strict=False):
        if arm.policy in mine:
            rounds = mine[arm.policy].rounds
            rates = rounds["rate_bps"]
            axes.plot(100 * np.array(rounds["ratio"]), color=colour, label=arm.policy)
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    whole_numbers(axes.xaxis)
    axes.set(xlabel="round", ylabel="elements sent (%)", title=titled("share that is sent", point))
    axes.legend(fontsize=7, loc="lower left")
    axes.grid(alpha=0.3)
    beside = axes.twinx()
    beside.step(range(len(rates)), np.array(rates) / MEGA, where="post", color="#888888", linestyle=":")
    beside.set(ylabel="rate of the links (Mb/s, dotted)", ylim=(0, 1.1 * max(rates) / MEGA))


def _times(axes: Any, experiment: Experiment, mine: dict[str, CaseResult], point: Any) -> None:
    for colour, arm in zip(COLOURS, experiment.arms, strict=False):
        if arm.policy in mine:
            axes.plot(np.array(mine[arm.policy].times_s) * 1e3, color=colour, label=arm.policy)
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    whole_numbers(axes.xaxis)
    axes.set(xlabel="round", ylabel="step (ms)", title=titled("time of each step", point))
    axes.grid(alpha=0.3)
