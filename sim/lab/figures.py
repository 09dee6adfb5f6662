"""Pictures of an experiment, made from its JSON alone: distributions, time lines with the bursts shaded, losses."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dblp.errors import LocalError
from dblp.installed import pip_line
from dblp.sim.log_axes import plain_numbers
from dblp.units import format_bytes

COLOURS = ("#8c8c8c", "#4d4d4d", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Greys for TCP, then Okabe and Ito's palette: told apart with any kind of colour vision. By the order of the arms."""
_BURST = "#fbe3c0"
_STYLE = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#ececec",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "dblp",
}
_FEW_ROUNDS = 20
"""Up to so many, each round is a dot."""
_MOST_LETTERS = 120
"""Of a line of a heading."""
_HEADING_POINTS = 11
_MOST_BURSTS = 400
"""Shaded in a panel; more would be a grey wall."""

Document = Mapping[str, Any]


def colours(document: Document) -> dict[str, str]:
    """A colour for each arm: greys for gloo, others for dblp."""
    arms = list(document["experiment"]["arms"])
    gloo = [arm for arm in arms if arm.startswith("gloo-")]
    rest = [arm for arm in arms if arm not in gloo]
    chosen = {arm: COLOURS[index % 2] for index, arm in enumerate(gloo)}
    return chosen | {arm: COLOURS[2 + index % (len(COLOURS) - 2)] for index, arm in enumerate(rest)}


@contextmanager
def _figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[Any]:
    """Axes (rows, columns) of a new figure in our style."""
    try:
        import matplotlib
    except ImportError:
        raise LocalError(f"pictures need matplotlib; install with: {pip_line('lab')}") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.style.context(_STYLE):
        figure, axes = pyplot.subplots(
            rows, columns, figsize=(width, height), layout="constrained", squeeze=False, **options
        )
        try:
            yield figure, axes
        finally:
            pyplot.close(figure)


def distributions(document: Document, form: str = "svg", heading: str = "") -> bytes:
    """For each size: the share of rounds that take t or longer, both axes logarithmic, so that the tail is seen."""
    sizes = _sizes(document)
    with _figure(5.6 * len(sizes) + 1.6, 3.6 + _heading_inches(heading), 1, len(sizes)) as (figure, axes):
        for panel, nbytes in zip(axes[0], sizes, strict=True):
            for arm, entry in _of_size(document, nbytes):
                times = np.sort(np.asarray(entry["seconds"])) * 1e3
                slower = 100 * (1 - np.arange(len(times)) / len(times))
                panel.step(
                    times,
                    slower,
                    where="post",
                    color=colours(document)[arm],
                    label=arm,
                    linewidth=1.8,
                    marker="o" if len(times) <= _FEW_ROUNDS else None,  # one round alone would have no line
                    markersize=4,
                )
            panel.set(
                xscale="log",
                yscale="log",
                xlabel="t (ms)",
                ylabel="rounds of t or longer (%)",
                ylim=(None, 130),
            )
            panel.set_title(format_bytes(nbytes))
            plain_numbers(panel.xaxis, panel.yaxis)
        _legend(figure, axes[0, 0], heading)
        return _bytes(figure, form)


def time_lines(document: Document, form: str = "svg") -> bytes:
    """For each arm and size, every round's duration over the time at which it began; bursts are shaded."""
    sizes = _sizes(document)
    arms = [arm for arm in document["experiment"]["arms"] if any(e["arm"] == arm for e in document["rounds"])]
    with _figure(
        11.5, 1.25 * len(arms) * len(sizes) + 0.9, len(arms) * len(sizes), 1, sharex=len(sizes) == 1
    ) as (figure, axes):
        panels = iter(axes[:, 0])
        for nbytes in sizes:
            top = max(max(entry["seconds"]) for _, entry in _of_size(document, nbytes))
            least = min(min(entry["seconds"]) for _, entry in _of_size(document, nbytes))
            begin = min(min(entry["start_s"]) for _, entry in _of_size(document, nbytes))
            end = max(
                max(np.add(entry["start_s"], entry["seconds"])) for _, entry in _of_size(document, nbytes)
            )
            edge = 0.01 * (end - begin)
            for arm, entry in _of_size(document, nbytes):
                panel = next(panels)
                _shade(panel, document, entry)
                _dots(panel, entry, colours(document)[arm])
                panel.set(yscale="log", ylim=(1e3 * least / 1.3, 1e3 * top * 1.3), ylabel="ms")
                panel.set_xlim(begin - edge, end + edge)  # one time line for all arms, which took turns
                panel.set_title(f"{arm}, {format_bytes(nbytes)}", fontsize=9.5, fontweight="normal")
                plain_numbers(panel.yaxis, low=True)
            bursts = "; shaded: bursts; a full dot: a burst lay over the round" if document["bursts"] else ""
            panel.set_xlabel(f"time (s); a dot and its line: a round, at its duration{bursts}")
        for panel in panels:  # of what a run that ended early did not come to
            panel.set_visible(False)
        return _bytes(figure, form)


def losses(document: Document, form: str = "svg") -> bytes:
    """For each arm: what the network dropped, what was sent again, what was left missing (per cent)."""
    names = {
        "offered_loss": ("dropped by the model", "#999999"),
        "queue_loss": ("dropped by full queues", "#56B4E9"),
        "repaired_share": ("sent again", "#0072B2"),
        "missing_share": ("left missing", "#D55E00"),
    }
    records = document["records"]
    with _figure(11.5, 0.32 * len(records) * len(names) / 2 + 1.4) as (figure, axes):
        panel, height = axes[0, 0], 0.8 / len(names)
        places = np.arange(len(records))
        for index, (name, (label, colour)) in enumerate(names.items()):
            values = [100 * (record[name] or 0.0) for record in records]
            bars = panel.barh(places + (index - 1.5) * height, values, height, color=colour, label=label)
            panel.bar_label(
                bars, [f"{v:.2f}" if v else "0" for v in values], padding=3, fontsize=7.5, color="#555555"
            )
        panel.set_yticks(places, [_name(record) for record in records])
        panel.invert_yaxis()
        panel.set_xlabel("% of packets (dropped), of transmissions (sent again), of chunks (left missing)")
        panel.grid(axis="y", visible=False)
        panel.margins(x=0.08)
        _legend(figure, panel)
        return _bytes(figure, form)


def training(document: Document, form: str = "svg", heading: str = "") -> bytes:
    """Wall time and accuracy of each arm's training."""
    records = document["records"]
    with _figure(11.5, 0.42 * len(records) + 1.2 + _heading_inches(heading), 1, 2) as (figure, axes):
        if heading:
            figure.suptitle(_shortened(heading), x=0.01, ha="left", fontsize=_HEADING_POINTS)
        for panel, name, title, factor in (
            (axes[0, 0], "wall_s", "Wall time (s)", 1.0),
            (axes[0, 1], "test_accuracy", "Test accuracy (%)", 100.0),
        ):
            values = [factor * record[name] for record in records]
            bars = panel.barh(
                [record["arm"] for record in records],
                values,
                color=[colours(document)[record["arm"]] for record in records],
            )
            panel.bar_label(bars, [f"{value:.1f}" for value in values], padding=3)
            panel.set_title(title)
            panel.invert_yaxis()
            panel.margins(x=0.12)
            panel.grid(axis="y", visible=False)
        least = min(record["test_accuracy"] for record in records)
        axes[0, 1].set_xlim(max(0.0, 100 * least - 10), None)
        return _bytes(figure, form)


def overview(document: Document, form: str = "png") -> bytes:
    """One picture for a slide or a chat: distributions, or wall time and accuracy of a training; with what it is of, and that it
    proves nothing where the run failed. ``form``: of matplotlib's."""
    experiment = document["experiment"]
    heading = f"{experiment['title']}: {experiment['topology']['hosts']} hosts, {document['host']['cpu']}"
    if document["failed"]:
        heading += f"\nTHIS RUN PROVES NOTHING: {document['failed'].splitlines()[0]}"
    draw = training if experiment["train"] else distributions
    return draw(document, form, heading)


def _heading_inches(heading: str) -> float:
    return 0.25 * len(heading.splitlines())


def _shortened(heading: str) -> str:
    return "\n".join(textwrap.shorten(line, _MOST_LETTERS) for line in heading.splitlines())


def _sizes(document: Document) -> list[int]:
    return list(dict.fromkeys(entry["bytes"] for entry in document["rounds"]))


def _of_size(document: Document, nbytes: int) -> list[tuple[str, Mapping[str, Any]]]:
    return [(entry["arm"], entry) for entry in document["rounds"] if entry["bytes"] == nbytes]


def _shade(panel: Any, document: Document, entry: Mapping[str, Any]) -> None:
    """Bursts within the time of an arm's rounds."""
    first, last = min(entry["start_s"]), max(np.add(entry["start_s"], entry["seconds"]))
    within = [(start, end) for start, end in document["bursts"] if start < last and end > first]
    for start, end in within[:_MOST_BURSTS]:
        panel.axvspan(start, end, color=_BURST, linewidth=0, zorder=0)


def _dots(panel: Any, entry: Mapping[str, Any], colour: str) -> None:
    starts, times, hit = (np.asarray(entry[name]) for name in ("start_s", "seconds", "hit"))
    panel.hlines(1e3 * times, starts, starts + times, color=colour, linewidth=1.2)
    for which, face in ((hit, colour), (~hit, "white")):
        panel.scatter(
            starts[which],
            1e3 * times[which],
            s=12,
            facecolors=face,
            edgecolors=colour,
            linewidths=0.9,
            zorder=3,
        )


def _name(record: Mapping[str, Any]) -> str:
    return record["arm"] if record["bytes"] is None else f"{record['arm']}, {format_bytes(record['bytes'])}"


def _legend(figure: Any, axes: Any, heading: str = "") -> None:
    """The legend above the panels, below a heading."""
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside upper left", ncols=5, fontsize=9, title=_shortened(heading),
        title_fontsize=_HEADING_POINTS, alignment="left",
    )  # fmt: skip


def _bytes(figure: Any, form: str) -> bytes:
    out = io.BytesIO()
    metadata = {"Date": None} if form == "svg" else None  # the same run gives the same bytes
    figure.savefig(out, format=form, dpi=150, metadata=metadata)
    return out.getvalue()


def pictures(document: Document) -> Sequence[tuple[str, bytes]]:
    """All SVG pictures of a report, with their headings."""
    if document["experiment"]["train"]:
        return [("Wall time and accuracy", training(document)), ("Losses", losses(document))]
    return [
        ("Distributions", distributions(document)),
        ("Time lines", time_lines(document)),
        ("Losses", losses(document)),
    ]
