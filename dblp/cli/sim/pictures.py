"""Pictures of an experiment: queues over time, loads of links, completion times, a time line of one run."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dblp.cli.sim.palette import COLOURS, point_text, titled, whole_numbers
from dblp.cli.sim.rounds_picture import draw_rounds, rows_of
from dblp.sim.fabric.experiment import Experiment
from dblp.sim.fabric.sweep import SHOWN_HOSTS, CaseResult, row_at
from dblp.sim.log_axes import plain_numbers
from dblp.units import format_count

_DECADES = 10.0
"""Ratio of times from which their axis is logarithmic."""
_FLOW_COLUMNS = ("source", "leg", "start_s", "finish_s")
_SEEN_SHARE = 0.003
"""Of the time line: least width of what is drawn there."""
_SMALL = 8
"""Points of the small letters: legends, names on axes."""
_MOST_VALUES = 24
"""Bars that have room for their values."""
_MOST_NAMES = 8
"""Of switches, along a side of the heat map."""


def draw(
    experiment: Experiment, rows: Sequence[dict[str, Any]], results: Sequence[CaseResult], form: str = "png"
) -> bytes:
    """One row of completion, then for each arm that has a picture its queues, loads and time line, of one run, which is told;
    or, of rounds that compress, what was sent in each. ``form``: of matplotlib's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    order = {arm.policy: number for number, arm in enumerate(experiment.arms)}
    compressing = any(r.rounds for r in results)
    pictured = sorted((r for r in results if r.picture and not compressing), key=lambda r: order[r.policy])
    below = rows_of(experiment) if compressing else len(pictured)
    figure = plt.figure(figsize=(15, 4.2 + 3.2 * below), layout="constrained")
    grid = figure.add_gridspec(1 + below, 3)
    if compressing:
        draw_rounds(figure, grid, 1, experiment, results)
    _completion(figure.add_subplot(grid[0, 0]), experiment, results)
    _bars(figure.add_subplot(grid[0, 1:]), experiment, rows)
    longest = max((_span(result) for result in pictured), default=0.0) or 1.0
    for number, result in enumerate(pictured, 1):
        _queues(figure.add_subplot(grid[number, 0]), result, longest)
        _loads(figure.add_subplot(grid[number, 1]), result)
        _time_line(figure.add_subplot(grid[number, 2]), result, longest)
    figure.suptitle("\n".join([experiment.title, *_below(pictured)]))
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=90)
    plt.close(figure)
    return buffer.getvalue()


def _below(pictured: Sequence[CaseResult]) -> list[str]:
    """Which point and seed the rows below the first show: one of them, where the first has all."""
    runs = {(r.point, r.seed): None for r in pictured}
    return [f"below: {titled('one run of each arm', point)}, seed {seed}" for point, seed in runs]


def _name(result: CaseResult) -> str:
    return result.policy + ("" if result.ended == "done" else " (not finished)")


def _note(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color="#555555")


def _completion(axes: Any, experiment: Experiment, results: Sequence[CaseResult]) -> None:
    """Share of the times of each arm, at the last point, up to a time."""
    last = list(experiment.points())[-1]
    shown: list[float] = []
    for number, arm in enumerate(experiment.arms):
        mine = (r.times_s for r in results if r.policy == arm.policy and r.point == last)
        times = np.sort([t for times in mine for t in times if not math.isnan(t)])
        if len(times):
            shown += [times[0] * 1e3, times[-1] * 1e3]
            axes.step(
                np.concatenate([times[:1], times]) * 1e3,
                np.linspace(0.0, 1.0, len(times) + 1),
                where="post",
                color=COLOURS[number % len(COLOURS)],
                linestyle="-" if number < len(COLOURS) else "--",
                label=arm.policy,
            )
    axes.set(xlabel="completion (ms)", ylabel="share of rounds or flows", title=titled("completion", last))
    if shown and max(shown) > _DECADES * min(shown):  # within less, logarithmic labels lie over each other
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
    else:
        axes.ticklabel_format(axis="x", useOffset=False)
        axes.locator_params(axis="x", nbins=5)
    axes.grid(alpha=0.3)


def _bars(axes: Any, experiment: Experiment, rows: Sequence[dict[str, Any]]) -> None:
    """Mean completion of each arm at each point, over the first arm's."""
    points = list(experiment.points())
    width = 0.8 / len(experiment.arms)
    for number, arm in enumerate(experiment.arms):
        heights = [_over_first(rows, experiment, arm.policy, point) for point in points]
        places = np.arange(len(points)) + (number - (len(experiment.arms) - 1) / 2) * width
        open_runs = sum(row["unfinished"] for row in rows if row["policy"] == arm.policy)
        label = arm.policy + (f": {format_count(open_runs, 'run')} not finished" if open_runs else "")
        axes.bar(places, heights, width, color=COLOURS[number % len(COLOURS)], label=label)
        for place, height in zip(places, heights, strict=True):
            if math.isnan(height):
                axes.text(
                    place, 0.02, "no time", transform=axes.get_xaxis_transform(), rotation=90, ha="center", fontsize=_SMALL,
                    color="#555555",
                )  # fmt: skip
            elif len(points) * len(experiment.arms) <= _MOST_VALUES:
                axes.annotate(
                    f"{height:.2f}", (place, height), (0, 2), textcoords="offset points", ha="center", fontsize=_SMALL
                )  # fmt: skip
    axes.set_xticks(
        range(len(points) if points[0] else 0),
        [point_text(point, "\n") for point in points if point],
        fontsize=_SMALL,
    )
    axes.set_xlim(-0.5, len(points) - 0.5)
    axes.set(ylabel=f"mean over {experiment.arms[0].policy}'s", title="mean completion")
    axes.axhline(1.0, color="#888888", linewidth=0.8)
    axes.margins(y=0.12)
    _legend(axes)  # of the completions beside it, too


def _over_first(rows: Sequence[dict[str, Any]], experiment: Experiment, policy: str, point: Any) -> float:
    found = [row_at(experiment, rows, name, point) for name in (experiment.arms[0].policy, policy)]
    first, mine = (row["completion_s"] if row is not None else None for row in found)
    return mine / first if first and mine else math.nan


def _queues(axes: Any, result: CaseResult, longest: float) -> None:
    """Backlog of the busiest ports, of those that had one: over time, up to the end of the longest run, so that runs compare by
    eye; or the largest where no samples were taken."""
    if result.picture["unsampled"]:
        _peaks(axes, result)
        return
    times = np.array(result.picture["series_s"]) * 1e3
    busy = {name: backlog for name, backlog in result.picture["series"].items() if any(backlog)}
    for number, (name, backlog) in enumerate(busy.items()):
        axes.plot(
            times, np.array(backlog) / 1e3, color=COLOURS[number % len(COLOURS)], linewidth=0.9, label=name
        )
    axes.set(xlabel="time (ms)", ylabel="backlog (kB)", title=f"{_name(result)}: busiest ports")
    axes.set_ylim(bottom=0.0)
    axes.set_xlim(0.0, longest * 1e3 * 1.02)
    if busy:
        _legend(axes)
    else:
        _note(axes, "no port had a queue")
    axes.grid(alpha=0.3)


def _peaks(axes: Any, result: CaseResult) -> None:
    busy = {name: peak for name, peak in result.picture["peaks"].items() if peak}
    axes.barh(range(len(busy)), [peak / 1e3 for peak in busy.values()], color=COLOURS[0])
    axes.set_yticks(range(len(busy)), list(busy), fontsize=_SMALL)
    axes.invert_yaxis()
    axes.set(
        xlabel=f"largest backlog (kB); {result.picture['unsampled']}", title=f"{_name(result)}: busiest ports"
    )
    axes.grid(alpha=0.3)


def _legend(axes: Any) -> None:
    """A legend beside the axes, where nothing lies under it."""
    axes.legend(
        fontsize=_SMALL, loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.3, frameon=False
    )


def _loads(axes: Any, result: CaseResult) -> None:
    """Bytes of data on each link between switches, over their mean: a row for each source. Where there are none, as in a star,
    of the hosts' links."""
    # The exact engine counts what it sends by link, whatever it is.
    title = f"{_name(result)}: link loads" + (", all datagrams" if result.picture["no_flows"] else "")
    if not any(result.picture["loads"].values()):
        _note(axes, "no traffic")
        axes.set(title=title, xticks=[], yticks=[])
        return
    links = [name.split(">") for name in result.picture["loads"]]
    inner = [(a, b) for a, b in links if not _is_host(a) and not _is_host(b)]
    if not inner:
        _host_loads(axes, result, title)
        return
    sources, targets = (sorted(set(column), key=_by_number) for column in zip(*inner, strict=True))
    table = np.full((len(sources), len(targets)), np.nan)
    for a, b in inner:
        table[sources.index(a), targets.index(b)] = result.picture["loads"][f"{a}>{b}"]
    mean = float(np.nanmean(table))
    if not mean:
        _note(axes, "no traffic between switches")
        axes.set(title=title, xticks=[], yticks=[])
        return
    image = axes.imshow(table / mean, aspect="auto", cmap="viridis", vmin=0.0, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label="bytes over the mean link's")
    for axis, names in ((axes.xaxis, targets), (axes.yaxis, sources)):
        every = -(-len(names) // _MOST_NAMES)
        axis.set_ticks(range(0, len(names), every), names[::every], fontsize=_SMALL)
    axes.set(xlabel="to", ylabel="from", title=title)


def _host_loads(axes: Any, result: CaseResult, title: str) -> None:
    """Bytes of data that went to each host and that came from it, over the mean of all these links."""
    directions: dict[str, dict[int, float]] = {"to the host": {}, "from the host": {}}
    for name, nbytes in result.picture["loads"].items():
        source, target = name.split(">")
        for direction, host in zip(directions, (target, source), strict=True):
            if _is_host(host) and int(host[1:]) < SHOWN_HOSTS:
                directions[direction][int(host[1:])] = nbytes
    mean = float(np.mean([nbytes for loads in directions.values() for nbytes in loads.values()])) or 1.0
    for number, (direction, loads) in enumerate(directions.items()):
        places = np.array(list(loads)) + 0.4 * (number - 0.5)
        axes.bar(places, np.array(list(loads.values())) / mean, 0.4, color=COLOURS[number], label=direction)
    whole_numbers(axes.xaxis)
    axes.set(xlabel="host", ylabel="bytes over the mean link's", title=title)
    _legend(axes)


def _by_number(name: str) -> tuple[str, int]:
    """``leaf10`` comes after ``leaf9``."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def _is_host(name: str) -> bool:
    return name[0] == "h" and name[1:].isdigit()


def _time_line(axes: Any, result: CaseResult, longest: float) -> None:
    """When each host was sending: the first leg in the upper half of its row, the second in the lower."""
    flows = result.picture["flows"]
    if result.picture["no_flows"]:
        _note(axes, result.picture["no_flows"])
        axes.set(title=f"{_name(result)}: when hosts send", xticks=[], yticks=[])
        return
    seen = longest * _SEEN_SHARE
    bars: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for source, leg, start, finish in zip(*(flows[name] for name in _FLOW_COLUMNS), strict=True):
        if source < SHOWN_HOSTS and start is not None and finish is not None and not math.isnan(finish):
            bars.setdefault((source, leg % 2), []).append((start * 1e3, max(finish - start, seen) * 1e3))
    if not bars:
        _note(axes, "no flow ended")
    halves = 0.4 if any(leg for _, leg in bars) else 0.8
    for (source, leg), spans in bars.items():
        axes.broken_barh(spans, (source - leg * halves, halves), facecolors=COLOURS[leg])
    title = "first leg blue, second red" if halves < 0.8 else "when hosts send"
    axes.set(xlabel="time (ms)", ylabel="sender", title=f"{_name(result)}: {title}")
    axes.set_xlim(0.0, longest * 1e3 * 1.02)
    whole_numbers(axes.yaxis)


def _span(result: CaseResult) -> float:
    """When its last flow ended, or the last of its shown queues was empty; 0 if there were none."""
    ends = [t for t in result.picture["flows"]["finish_s"] if t is not None and not math.isnan(t)]
    for backlog in result.picture["series"].values():
        ends += [t for t, waiting in zip(result.picture["series_s"], backlog, strict=True) if waiting][-1:]
    return max(ends, default=0.0)
