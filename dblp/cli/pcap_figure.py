"""The time-sequence picture of ``dblp pcap``: chunk over time for each pair of ranks, repairs and stops marked.

After Stevens' and Jacobson's plots of TCP's sequence numbers: a line is a message on its way, its slope the rate; repairs stand
out below it, and what FINAL leaves out is a bar at its end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dblp.cli.output import make_folder
from dblp.errors import LocalError
from dblp.transport.capture_summary import MessageTrace

MOST_FLOWS = 6
"""Panels; the flows with the most datagrams are shown."""
_SENT, _REPAIR, _FINAL, _MISSING = "#0072B2", "#D55E00", "#009E73", "#000000"
"""Of Okabe and Ito's palette."""


def draw(messages: Sequence[MessageTrace], path: Path, *, title: str) -> None:
    """Draw the flows; raises LocalError if the picture cannot be written, or there is nothing to draw."""
    flows = _flows(messages)
    if not flows:
        raise LocalError("--picture: the capture holds no message to draw")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(2, len(flows))
    rows = -(-len(flows) // columns)
    figure, axes = pyplot.subplots(
        rows,
        columns,
        figsize=(6.5 * columns, 2.8 * rows + 0.8),
        layout="constrained",
        squeeze=False,
        sharex=True,
    )
    try:
        for panel, (name, of_flow) in zip(axes.flat, flows, strict=False):
            _draw_flow(panel, name, of_flow)
        for panel in axes.flat[len(flows) :]:
            panel.set_axis_off()
        for panel in axes[-1]:
            panel.set_xlabel("time (ms)")
        figure.suptitle(f"{title}: chunks over time", x=0.01, ha="left", fontsize=11, fontweight="bold")
        figure.legend(
            *axes[0, 0].get_legend_handles_labels(), loc="upper right", ncols=4, frameon=False, fontsize=9
        )
        make_folder("--picture", path)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise LocalError(f"--picture {path}: cannot be written: {error}") from None
    finally:
        pyplot.close(figure)


def _flows(messages: Sequence[MessageTrace]) -> list[tuple[str, list[MessageTrace]]]:
    """The pairs of ranks with the most data, by name, their messages in order of time."""
    flows: dict[tuple[int, int | None], list[MessageTrace]] = defaultdict(list)
    for message in messages:
        if len(message.chunk):
            flows[message.sender, message.receiver].append(message)
    largest = sorted(flows, key=lambda flow: -sum(len(message.chunk) for message in flows[flow]))[:MOST_FLOWS]
    names = {flow: f"rank {flow[0]} to {'?' if flow[1] is None else flow[1]}" for flow in largest}
    return [(names[flow], flows[flow]) for flow in sorted(largest, key=names.__getitem__)]


def _draw_flow(axes: Any, name: str, messages: Sequence[MessageTrace]) -> None:
    """All messages of a flow, stacked by chunk."""
    base = 0
    for number, message in enumerate(messages):
        times, places = 1e3 * message.times, base + message.chunk.astype(np.int64)
        label = number == 0
        for which, colour, what, size in (
            (~message.repair, _SENT, "first transmission", 3),
            (message.repair, _REPAIR, "repair", 9),
        ):
            axes.scatter(
                times[which],
                places[which],
                s=size,
                color=colour,
                linewidths=0,
                label=what if label else None,
                rasterized=True,
            )
        _draw_end(axes, message, base, label)
        base += message.chunks or int(message.chunk.max(initial=0)) + 1
    axes.set_title(name, loc="left", fontsize=10)
    axes.set_ylabel("chunk")
    axes.grid(color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_end(axes: Any, message: MessageTrace, base: int, label: bool) -> None:
    """FINAL as a line over the message's chunks, and what it leaves out as ticks on it."""
    if message.final_s is None:
        return
    at, chunks = 1e3 * message.final_s, message.chunks or 1
    axes.plot(
        [at, at], [base, base + chunks], color=_FINAL, linewidth=1, label="FINAL" if label else None, zorder=1
    )
    missing = message.missing if message.missing is not None else np.empty(0, np.uint32)
    axes.scatter(
        np.full(len(missing), at),
        base + missing.astype(np.int64),
        marker="_",
        s=30,
        color=_MISSING,
        linewidths=0.8,
        label="missing" if label else None,
    )
