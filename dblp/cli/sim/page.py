"""The HTML page of an experiment: one file, with its tables and its picture inside."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dblp.cli.host import document
from dblp.cli.output import write_file
from dblp.cli.sim.command import cells, claim_at, headings, unfinished
from dblp.cli.sim.palette import axis_names
from dblp.sim.fabric.experiment import Experiment
from dblp.sim.fabric.sweep import CaseResult, runs
from dblp.units import format_seconds

_STYLE = (
    "body{font:15px sans-serif;margin:2em auto;max-width:75em;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;border-bottom:1px solid #ccc;text-align:right}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}"
)

_CLAIM = ("policy", "against", "measure")


def write_page(
    path: Path,
    experiment: Experiment,
    rows: Sequence[dict[str, Any]],
    found: Sequence[dict[str, Any]],
    results: Sequence[CaseResult],
    image: bytes,
) -> None:
    """Write the page, with all that it takes to run the experiment again; raises LocalError that names the path."""
    axes, shown = axis_names(name for name in rows[0] if "." in name), headings(rows)
    heads = ["policy", *axes.values(), *shown]
    body = [[row["policy"], *(str(row[name]) for name in axes), *cells(row, shown)] for row in rows]
    parts = [
        f"<h1>{html.escape(experiment.title)}</h1>",
        _table(heads, body),
        *(f"<p>{html.escape(note)}</p>" for note in (unfinished(results),) if note),
        _claims(found),
        *(f"<p>{html.escape(note)}</p>" for note in (experiment.paper, experiment.why) if note),
        f'<img alt="queues, loads, completion, time line" src="data:image/png;base64,{base64.b64encode(image).decode()}">',
    ]
    parts += [_runs(experiment, results), _setting(experiment, results)]
    head = f'<meta charset="utf-8"><title>{html.escape(experiment.name)}</title><style>{_STYLE}</style>'
    text = f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>\n"
    write_file("--report", path, text.encode())


def _runs(experiment: Experiment, results: Sequence[CaseResult]) -> str:
    """Each seed's figures."""
    rows = runs(experiment, results)
    names = axis_names(name for name in rows[0] if "." in name)
    body = [
        [row["policy"], *(str(row[name]) for name in names), str(row["seed"]), row["ended"]]
        + ["-" if row[name] is None else format_seconds(row[name]) for name in ("completion_s", "p99_s")]
        + ["-" if row["missing_share"] is None else f"{row['missing_share']:.2%}"]
        for row in rows
    ]
    heads = ["policy", *names.values(), "seed", "ended", "mean", "p99", "missing"]
    return f"<details><summary>Each run</summary>{_table(heads, body)}</details>"


def _setting(experiment: Experiment, results: Sequence[CaseResult]) -> str:
    """What ran, where and when."""
    about = document("", [])
    host = ", ".join(f"{name} {value}" for name, value in about["host"].items())
    seeds = ", ".join(map(str, sorted({result.seed for result in results})))
    told = (
        f"{experiment.engine} engine, seeds {seeds}; dblp {about['version']}, code {experiment.setting['code']}; "
        f"{datetime.now(UTC):%d %B %Y, %H:%M} UTC; {host}"
    )
    table = html.escape(json.dumps(experiment.setting, indent=1))
    head = f"<h2>How it was run</h2><p>{html.escape(told)}</p>"
    return f"{head}<details><summary>Scenario, arms, axes</summary><pre>{table}</pre></details>"


def _claims(found: Sequence[dict[str, Any]]) -> str:
    if not found:
        return ""
    body = [[*(claim[name] for name in _CLAIM), claim_at(claim), *_shares(claim)] for claim in found]
    return "<h2>The paper's figures, and ours</h2>" + _table([*_CLAIM, "at", "paper", "ours"], body)


def _shares(claim: dict[str, Any]) -> list[str]:
    return [f"{claim['paper']:+.1%}", "-" if claim["ours"] is None else f"{claim['ours']:+.1%}"]


def _table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [_row(heads, "th"), *(_row(cells, "td") for cells in body)]
    return f"<table>{''.join(lines)}</table>"


def _row(texts: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"
