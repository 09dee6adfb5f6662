"""What experiments look like: short names of axes, tables that no column is cut off of, pictures without empty panels."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from dblp.cli.sim.command import headings, records_table, unfinished
from dblp.cli.sim.palette import axis_names, point_text, whole_numbers
from dblp.cli.sim.pictures import draw
from dblp.cli.whole import print_whole
from dblp.sim.fabric import packet
from dblp.sim.fabric.experiment import load_experiment, read_experiment
from dblp.sim.fabric.packet import run_packet
from dblp.sim.fabric.sweep import CaseResult, records, run_case

STAR = """
title = "star"
[scenario]
topology = {kind = "star", hosts = 4}
workload = {algorithm = "direct", size = "64K"}
failures = [{link = "hosts", loss = 0.0}]
[[arms]]
policy = "netsense-x"
[[arms]]
policy = "reps"
[axes]
"workload.size" = ["64K", "1M"]
"transport.min_rto" = ["1ms", "10ms"]
"failures.0.loss" = [0.0, 0.01]
"""


def results(experiment, ended="done"):
    """A result for each case, the last with a picture of a star: host 0 serves, and of its ports one had a backlog."""
    loads = {f"switch>h{n}": 3e6 if n == 0 else 1e6 for n in range(4)} | {
        f"h{n}>switch": 1e6 for n in range(4)
    }
    picture = {
        "unsampled": "", "no_flows": "", "peaks": {},
        "series_s": [0.0, 1e-3], "series": {"switch>h0": [0.0, 5e4], "switch>h1": [0.0, 0.0]}, "loads": loads,
        "flows": {"source": [0, 1], "leg": [0, 1], "start_s": [0.0, 1e-4], "finish_s": [1e-3, 2e-3]},
    }  # fmt: skip
    cases = experiment.cases([0])
    return [
        CaseResult(
            key=case.key, policy=case.policy, point=case.point, seed=0, hosts=4, ended=ended, times_s=(1.234e-3, 0.0121),
            max_load_ratio=1.0, missing_share=0.1, counts={}, hops=1, wall_s=1.0,
            picture=picture if case.point == cases[-1].point else {},
        )
        for case in cases
    ]  # fmt: skip


def test_names_of_axes_are_as_short_as_they_stay_apart():
    assert axis_names(["workload.size", "failures.0.loss"]) == {
        "workload.size": "size",
        "failures.0.loss": "loss",
    }
    assert axis_names(["failures.0.loss", "failures.1.loss", "background.size", "size"]) == {
        "failures.0.loss": "0.loss",
        "failures.1.loss": "1.loss",
        "background.size": "background.size",
        "size": "size",
    }
    assert point_text((("workload.size", "1M"), ("failures.0.loss", 0.1))) == "size 1M, loss 0.1"


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("terminal", [True, False])
def test_no_column_of_a_table_is_cut(width, terminal):
    experiment = read_experiment("star", STAR)
    screen = io.StringIO()
    rows = records(experiment, results(experiment))
    print_whole(
        Console(file=screen, width=width, force_terminal=terminal, color_system=None), records_table(rows)
    )
    shown = screen.getvalue()
    assert "…" not in shown
    assert width < 80 or "netsense-x   64K      1ms   0.0      4  6.67 ms  12 ms" in shown, shown
    assert terminal or "  6.67 ms  12 ms" in shown, "a file has no width"


def test_unfinished_runs_have_a_column_where_there_are_some():
    experiment = read_experiment("star", STAR)
    assert "unfinished" not in headings(records(experiment, results(experiment)))
    assert "unfinished" in headings(records(experiment, results(experiment, "failed")))


def test_the_largest_load_of_all_seeds_is_told_beside_means():
    experiment = read_experiment("star", STAR.split("[axes]")[0])
    cases = experiment.cases([0])[:1]
    (first,) = [r for r in results(experiment) if r.policy == cases[0].policy]
    other = replace(first, seed=1, max_load_ratio=3.0, missing_share=0.3)
    (row,) = records(experiment, [first, other])
    assert (row["max_link_load_ratio"], row["missing_share"]) == (3.0, pytest.approx(0.2))
    (row,) = records(experiment, [first, replace(other, max_load_ratio=math.nan, missing_share=math.nan)])
    assert (row["max_link_load_ratio"], row["missing_share"]) == (1.0, None)
    (row,) = records(experiment, [run_case(cases[0])])
    assert row["max_link_load_ratio"] is None, "a star has no links between switches"


def test_why_runs_did_not_finish_is_told_by_arm():
    experiment = read_experiment("star", STAR)
    done, late = results(experiment), results(experiment, "until")
    assert unfinished(done) == ""
    late = [r for r in late if r.policy == "reps"]
    mixed = [*late, replace(late[0], ended="failed"), *(r for r in done if r.policy != "reps")]
    assert unfinished(mixed) == (
        "unfinished: 9 of 17 runs: reps (8 stopped at the scenario's `until`), "
        "reps (1 failed: a flow or a round was given up)"
    )


def test_a_star_shows_the_loads_of_its_hosts_links(monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    experiment = read_experiment("star", STAR)
    found = results(experiment)
    assert draw(experiment, records(experiment, found), found).startswith(b"\x89PNG")
    (figure,) = figures
    panels = {axes.get_title(): axes for axes in figure.axes}
    loads = panels["reps: link loads"]
    assert not loads.images, "no heat map of one row"
    assert [bar.get_height() for bar in loads.patches] == pytest.approx([2.4, 0.8, 0.8, 0.8] + [0.8] * 4)
    ports = panels["reps: busiest ports"]
    assert [line.get_label() for line in ports.lines] == ["switch>h0"], "the other had no backlog"
    for axis in (loads.xaxis, panels["reps: first leg blue, second red"].yaxis):
        assert all(float(place).is_integer() for place in axis.get_ticklocs())
    assert figure.get_suptitle() == (
        "star\nbelow: one run of each arm, size 1M, min_rto 10ms, loss 0.01, seed 0"
    )
    figure.canvas.draw()
    for name in ("mean completion", "reps: busiest ports", "reps: link loads"):
        axes = panels[name]
        assert axes.get_legend().get_window_extent().x0 >= axes.get_window_extent().x1, "beside, not over"
    spans = {axes.get_xlim() for name, axes in panels.items() if name.endswith(("ports", "second red"))}
    assert len(spans) == 1, "one time axis for all arms, of queues and of flows"
    labels = [label.get_text() for label in panels["mean completion"].get_xticklabels()]
    assert labels[0] == "size 64K\nmin_rto 1ms\nloss 0.0"


def test_a_time_line_shows_both_legs_of_a_run_of_many_flows():
    """Each host has 2 x 3 x 747 flows of a chunk here; those of a leg that overlap are one bar."""
    table = STAR.replace('size = "64K"', 'size = "4M", segment = "1.4K"')
    case = read_experiment("star", table.split("[axes]")[0]).cases([0])[0]
    flows = run_case(case, pictured=True).picture["flows"]
    assert set(zip(flows["source"], flows["leg"], strict=True)) == {
        (host, leg) for host in range(4) for leg in (0, 1)
    }
    assert len(flows["source"]) < 100
    assert max(flows["finish_s"]) == pytest.approx(run_case(case).times_s[0], rel=0.01)


def test_a_flow_whose_deadline_was_over_before_it_could_start_has_no_bar():
    """One in a hundred of OptiReduce's second leg, at a tail of 3: they were drawn from 0 on."""
    experiment = load_experiment("optireduce")
    case = next(
        c for c in experiment.cases([0]) if c.policy == "optireduce" and c.point == (("workload.tail", 3.0),)
    )
    table = run_packet(case.scenario).flows
    assert np.any((table["leg"] == 1) & (table["start_s"] == 0.0)), "there are such"
    flows = run_case(case, pictured=True).picture["flows"]
    first = min(table["finish_s"][table["leg"] == 0])
    starts = [start for leg, start in zip(flows["leg"], flows["start_s"], strict=True) if leg == 1]
    assert starts and min(starts) > first, "the second leg comes after the first"


@pytest.mark.parametrize("engine", ["exact", "packet"])
def test_pictures_without_samples_show_the_largest_backlogs_and_say_so(engine, monkeypatch):
    """The exact engine takes none and notes no flows, the packet engine none of large fabrics."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    monkeypatch.setattr(packet, "MOST_SAMPLED_LINKS", 0)
    text = STAR.split("[axes]")[0].replace("failures =", "# ")
    experiment = read_experiment("star", f'engine = "{engine}"\n{text}')
    found = [run_case(case, pictured=True) for case in experiment.cases([0])]
    draw(experiment, records(experiment, found), found)
    panels = {axes.get_title(): axes for axes in figures[0].axes}
    ports = panels["reps: busiest ports"]
    assert len(ports.patches) == 4 and min(bar.get_width() for bar in ports.patches) > 0
    assert ("exact engine" if engine == "exact" else "not sampled") in ports.get_xlabel()
    if engine == "exact":
        assert [text.get_text() for text in panels["reps: when hosts send"].texts] == [
            "the exact engine notes no flows"
        ]
        assert "reps: link loads, all datagrams" in panels
    else:
        assert panels["reps: first leg blue, second red"].collections


def test_pictures_of_runs_that_did_not_end_say_so_and_have_no_scale_of_nothing(monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    spines = "kind = 'leaf_spine', leaves = 2, spines = 2, hosts_per_leaf = 2"
    text = STAR.split("[[arms]]")[0].replace('kind = "star", hosts = 4', spines)
    text = text.replace("[scenario]", "[scenario]\nuntil = '1ms'")
    arms = "[[arms]]\npolicy = 'whole'\n[[arms]]\npolicy = 'cut'\nset = {'failures.0.loss' = 1.0}"
    experiment = read_experiment("cut", text + arms)
    found = [run_case(case, pictured=True) for case in experiment.cases([3])]
    assert [result.ended for result in found] == ["done", "until"]
    draw(experiment, records(experiment, found), found)
    panels = {axes.get_title(): axes for axes in figures[0].axes}
    loads = panels["cut (not finished): link loads"]
    assert not loads.images and [text.get_text() for text in loads.texts] == ["no traffic between switches"]
    assert {"cut (not finished): busiest ports", "cut (not finished): when hosts send"} < set(panels)
    bars = panels["mean completion"]
    assert [text.get_text() for text in bars.get_legend().get_texts()] == ["whole", "cut: 1 run not finished"]
    assert [text.get_text() for text in bars.texts] == ["1.00", "no time"]
    assert figures[0].get_suptitle() == "star\nbelow: one run of each arm, seed 3"
    whole = panels["whole: first leg blue, second red"]
    assert whole.get_xlim()[1] < 1.0, "ms: what did not end has no length"
    assert [text.get_text() for text in panels["cut (not finished): when hosts send"].texts] == [
        "no flow ended"
    ]


def test_axes_of_counts_have_whole_numbers():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, axes = pyplot.subplots()
    try:
        axes.plot([0, 1, 2], [3.0, 30.0, 160.0])
        whole_numbers(axes.xaxis)
        figure.canvas.draw()
        assert all(place.is_integer() for place in axes.get_xticks().tolist())
    finally:
        pyplot.close(figure)
