"""The report of an experiment: one HTML file with everything in it, made from the JSON alone."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dblp.sim.lab.figures import Document, pictures
from dblp.sim.lab.means import in_words
from dblp.units import format_bytes, format_seconds

_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 2em auto; padding: 0 1.2em; color: #1c1c1c }}
h1 {{ font-size: 1.5em; margin-bottom: 0 }} h2 {{ font-size: 1.1em; margin: 1.8em 0 .4em }}
.about {{ color: #555; margin-top: .2em }}
table {{ border-collapse: collapse; font-size: .92em }}
td, th {{ padding: .25em .8em .25em 0; text-align: right; border-bottom: 1px solid #e4e4e4; white-space: nowrap }}
td:first-child, th:first-child {{ text-align: left }} th {{ font-weight: 600 }}
.failed {{ background: #fdecea; border-left: 4px solid #c0392b; padding: .6em 1em }}
.facts td {{ text-align: left; border: 0; padding-bottom: 0 }} .facts td:first-child {{ color: #555 }}
svg {{ max-width: 100%; height: auto }}
</style></head><body>
<h1>{title}</h1><p class="about">{about}</p>
{body}
</body></html>
"""

FEW_ROUNDS = 100
"""With fewer, the 99th percentile lies between the two slowest."""

Column = tuple[str, Callable[[Mapping[str, Any]], str]]


def _time(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda record: "" if record[name] is None else format_seconds(record[name])


def _share(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda record: "" if record[name] is None else f"{record[name]:.2%}"


_COLUMNS: Sequence[Column] = (
    ("arm", lambda record: record["arm"]),
    ("size", lambda record: "" if record["bytes"] is None else format_bytes(record["bytes"])),
    ("rounds", lambda record: str(record["rounds"])),
    ("p50", _time("p50_s")),
    ("p90", _time("p90_s")),
    ("p99", _time("p99_s")),
    ("p99.9", _time("p999_s")),
    ("p99/p50", lambda record: f"{record['tail_ratio']:.2f}"),
    ("p50 in bursts", _time("burst_p50_s")),
    ("dropped", _share("offered_loss")),
    ("queue drops", _share("queue_loss")),
    ("sent again", _share("repaired_share")),
    ("missing", _share("missing_share")),
    ("CPU s/GB", lambda record: "" if record["cpu_s_per_gb"] is None else f"{record['cpu_s_per_gb']:.2f}"),
    ("accuracy", _share("test_accuracy")),
    ("wall", _time("wall_s")),
)


def page(document: Document) -> str:
    """The HTML of a document as ``dblp lab run --json`` writes it."""
    experiment = document["experiment"]
    parts = [_failed(document), _facts(document), "<h2>Results</h2>", _table(document), _ratios(document)]
    parts += [f"<h2>{heading}</h2>\n{_inline(svg)}" for heading, svg in pictures(document)]
    parts.append(f"<p class='about'>{_NOTES}</p>")
    if any(record["rounds"] < FEW_ROUNDS for record in document["records"]):
        parts.append(f"<p class='about'>{_FEW}</p>")
    return _PAGE.format(
        title=html.escape(experiment["title"]),
        about=html.escape(experiment["about"]),
        body="\n".join(filter(None, parts)),
    )


def _failed(document: Document) -> str:
    if not document["failed"]:
        return ""
    return f"<p class='failed'><b>This run proves nothing:</b> {html.escape(document['failed'])}</p>"


def _facts(document: Document) -> str:
    """What a reader must know of network and host."""
    experiment, host = document["experiment"], document["host"]
    topology = experiment["topology"]
    rows = {
        "network": f"{topology['kind']}, {topology['hosts']} hosts",
        "each host's link": _link(topology, ""),
        **({} if topology["kind"] == "star" else {"core links": _link(topology, "core_")}),
        **({} if topology["discipline"] == "fifo" else {"queues": topology["discipline"]}),
        "impairments": document["means"].get("schedule") or "none",
        "done by": in_words(document["means"]),
        "algorithm": experiment["algorithm"],
        "host": f"{host['cpu']}, {host['cores']} cores, Linux {host['kernel']}, torch {host['torch']}",
        "dblp": document["version"],
    }
    if experiment["traffic"]:
        rows["cross traffic"] = experiment["traffic"]
    if experiment["slow"]:
        slow = experiment["slow"]
        rows["slow rank"] = f"rank {slow['rank']}, by {format_seconds(slow['by_s'])}"
    cells = "".join(
        f"<tr><td>{key}</td><td>{html.escape(str(value))}</td></tr>" for key, value in rows.items()
    )
    return f"<table class='facts'>{cells}</table>"


def _link(topology: Mapping[str, Any], of: str) -> str:
    """Rate, queue and delay of links; ``of``: what their fields begin with."""
    rate, delay = topology[f"{of}rate_bps"], topology[f"{of}delay_s"]
    queue = f"{rate / 1e6:g} Mb/s, queue {format_bytes(topology[f'{of}queue_bytes'])}" if rate else "no limit"
    return f"{queue}, {format_seconds(delay)} one way" if delay else queue


def _table(document: Document) -> str:
    """Records; columns that are empty everywhere are left out."""
    records = document["records"]
    columns = [(name, cell) for name, cell in _COLUMNS if any(cell(record) for record in records)]
    head = "".join(f"<th>{name}</th>" for name, _ in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell(record))}</td>" for _, cell in columns) + "</tr>"
        for record in records
    )
    return f"<table class='results'><tr>{head}</tr>{body}</table>"


def _ratios(document: Document) -> str:
    """How many times faster than gloo: what a reader looks for."""
    head, rows = ratio_rows(document["ratios"])
    if not rows:
        return ""
    lines = [
        "<tr>" + "".join(f"<t{kind}>{html.escape(cell)}</t{kind}>" for cell in row) + "</tr>"
        for kind, row in (("h", head), *(("d", row) for row in rows))
    ]
    return f"<h2>Faster than gloo by a factor of</h2><table class='ratios'>{''.join(lines)}</table>"


def ratio_rows(ratios: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the ratios; columns that are empty everywhere are left out."""
    columns = [
        (name, field) for name, field in _RATIOS.items() if any(ratio[field] is not None for ratio in ratios)
    ]
    sized = any(ratio["bytes"] is not None for ratio in ratios)
    rows = []
    for ratio in ratios:
        size = [format_bytes(ratio["bytes"])] if sized else []
        values = ["" if ratio[field] is None else f"{ratio[field]:.2f}" for _, field in columns]
        rows.append([ratio["arm"], *size, ratio["than"], *values])
    return ["arm", *(["size"] if sized else []), "than", *(name for name, _ in columns)], rows


_RATIOS = {"p50": "p50", "paired": "paired", "p99": "p99", "in bursts": "burst_p50", "wall": "wall"}
"""Headings, and fields of a ratio."""


def _inline(svg: bytes) -> str:
    """An SVG as part of an HTML page: without its XML head."""
    text = svg.decode()
    return re.sub(r"^.*?(?=<svg)", "", text, count=1, flags=re.DOTALL)


_NOTES = (
    "A round is timed from its first rank's start to its last rank's end. Dropped: share of the packets that the model dropped, "
    "by the kernel's counters. Sent again: repeats over first transmissions, TCP segments for gloo, chunks for dblp. Missing: "
    "chunks that receivers did without. CPU: processor time of all ranks over the bytes that they put in."
)
_FEW = (
    f"Some arms have fewer than {FEW_ROUNDS} rounds: their p99 is little less than the slowest round, their p99.9 is that round, "
    "and ratios of either rest on one round each."
)
