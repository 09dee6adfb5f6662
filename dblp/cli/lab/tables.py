"""The tables of ``dblp lab``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dblp.sim.lab.compare import FAILED, LEAST_ROUNDS, TOO_FEW, Change
from dblp.sim.lab.experiment import Experiment
from dblp.sim.lab.preflight import Finding
from dblp.sim.lab.report import FEW_ROUNDS, ratio_rows
from dblp.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

_VERDICTS = {"faster": "green", "slower": "red", "same": "dim", TOO_FEW: "yellow", FAILED: "red"}


def headline(experiment: Experiment, command: str) -> str:
    """What will be done; ``command``: by which."""
    topology = experiment.topology
    sizes = ", ".join(map(format_bytes, experiment.sizes))
    rounds = f"{sizes}, {format_count(experiment.rounds, 'round')} an arm, blocks of {experiment.block}"
    what = "training" if experiment.train else rounds
    return (
        f"[bold]dblp {command} {escape(experiment.name)}[/]: {escape(experiment.title)}\n"
        f"{topology.kind} of {format_count(topology.hosts, 'host')}, {what}, {_arms(experiment)}"
    )


def _arms(experiment: Experiment) -> str:
    arms = format_count(len(experiment.arms), "arm")
    return f"{arms} in turn" if len(experiment.arms) > 1 else arms


def result_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Times and losses, a row a record."""
    training = any(record["test_accuracy"] is not None for record in records)
    bursts = any(record["burst_p50_s"] is not None for record in records)
    columns: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("arm", lambda r: r["arm"]),
        *([("size", lambda r: format_bytes(r["bytes"]))] if len({r["bytes"] for r in records}) > 1 else []),
        ("rounds", lambda r: str(r["rounds"])),
        ("p50", lambda r: format_seconds(r["p50_s"])),
        ("p99", lambda r: format_seconds(r["p99_s"])),
    ]
    if bursts:
        columns.append(("burst", lambda r: _time(r["burst_p50_s"])))
    columns += [
        ("lost", lambda r: f"{r['offered_loss']:.2%}"),
        ("again", lambda r: _share(r["repaired_share"])),
        ("missing", lambda r: _share(r["missing_share"])),
    ]
    if training:
        columns += [
            ("accuracy", lambda r: _share(r["test_accuracy"])),
            ("wall", lambda r: _time(r["wall_s"])),
        ]
    else:
        columns.append(("CPU s/GB", lambda r: f"{r['cpu_s_per_gb']:.2f}"))
    burst = "; burst: p50 of rounds that met one" if bursts else ""
    caption = f"lost: dropped by the model, by the kernel's counters{burst}"
    if any(record["rounds"] < FEW_ROUNDS for record in records):
        caption += f"; p99 of fewer than {FEW_ROUNDS} rounds is little less than the slowest"
    table = _table(caption, columns)
    for record in records:
        table.add_row(*(cell(record) for _, cell in columns))
    return table


def ratio_table(ratios: Sequence[Mapping[str, Any]]) -> Table:
    """gloo's time over dblp's."""
    head, rows = ratio_rows(ratios)
    paired = "; paired: median over neighbouring blocks" if "paired" in head else ""
    caption = f"gloo's time over dblp's: above 1, dblp is faster{paired}"
    table = _table(caption, [(name, None) for name in head])
    for row in rows:
        table.add_row(*row)
    return table


def experiment_table(experiments: Sequence[Experiment]) -> Table:
    """Those that ship."""
    table = _table("run one with: dblp lab run NAME", [(name, None) for name in ("name", "what", "hosts")])
    for experiment in experiments:
        table.add_row(experiment.name, experiment.title, str(experiment.topology.hosts))
    return table


def change_table(changes: Sequence[Change]) -> Table:
    """Two runs, arm by arm."""
    training = any(change.trained for change in changes)
    more = ("wall", "wall then", "wall ratio", "accuracy", "accuracy then") if training else ()
    table = _table(
        "ratio: the second's p50 over the first's, with its 95 % interval (bootstrap over the rounds)"
        + ("; wall: mean time of a training" if training else ""),
        [
            (name, None)
            for name in ("arm", "size", "p50", "then", "ratio", "interval", "p99", *more, "verdict")
        ],
    )
    for change in changes:
        table.add_row(
            change.arm,
            "" if change.bytes is None else format_bytes(change.bytes),
            format_seconds(change.before["p50_s"]),
            format_seconds(change.after["p50_s"]),
            f"{change.p50_ratio:.2f}",
            f"{change.low:.2f}-{change.high:.2f}" if change.enough else "-",
            f"{change.p99_ratio:.2f}",
            *(_trainings(change) if training else ()),
            Text(change.verdict, _VERDICTS[change.verdict]),
        )
    return table


def _trainings(change: Change) -> list[str]:
    """Wall times, their ratio and accuracies; blank where an arm was timed by rounds."""
    if change.wall_ratio is None:
        return [""] * 5
    before, after = change.before, change.after
    return [
        format_seconds(before["wall_s"]),
        format_seconds(after["wall_s"]),
        f"{change.wall_ratio:.2f}",
        f"{before['test_accuracy']:.2%}",
        f"{after['test_accuracy']:.2%}",
    ]


def too_few(changes: Sequence[Change]) -> str:
    """What is said below the table where rounds are lacking; empty if none are."""
    short = [change for change in changes if not change.enough]
    if not short:
        return ""
    least = min(min(change.before_rounds, change.after_rounds) for change in short)
    have = "no rounds' times, as of a training run," if not least else f"{format_count(least, 'round')} only"
    whose = "an arm has" if len(short) == 1 else f"{len(short)} of {len(changes)} have"
    return f"{TOO_FEW}: {whose} {have} in one of the files; {LEAST_ROUNDS} of each are needed to tell a change from chance"


def finding_table(findings: Sequence[Finding]) -> Table:
    """What the preflight found; below what is missing, what it costs and the remedy."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in findings:
        mark, style = ("✓", "green") if finding.ok else ("✗", "red" if finding.essential else "yellow")
        table.add_row(Text(mark, style), Text(finding.what, "bold"), finding.found)
        for text, colour in ((finding.consequence, ""), (finding.remedy, "green")):
            if text:
                table.add_row("", "", Text(text, colour))
    return table


def _table(caption: str, columns: Sequence[tuple[str, object]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, caption=caption, caption_justify="left")
    for name, _ in columns:
        left = name in ("arm", "than", "name", "what", "verdict")
        table.add_column(
            name, justify="left" if left else "right", no_wrap=name in ("arm", "name"), overflow="fold"
        )
    return table


def _time(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"
