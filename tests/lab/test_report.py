"""Reports hold the numbers of the JSON and nothing from elsewhere; comparisons tell chance from change."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from dblp.cli.lab.tables import result_table
from dblp.cli.main import run as dblp
from dblp.errors import ConfigError
from dblp.sim.lab import figures, report
from dblp.sim.lab.compare import compare, interval
from dblp.sim.lab.report import page
from dblp.units import format_seconds
from tests.lab.made import START, block, counted, document, run, span, trained

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def content():
    rng = np.random.default_rng(1)
    blocks = [
        block(
            "gloo-cubic", rng.uniform(0.09, 0.3, 40).tolist(), counters=counted(990, 10), sent=100, resent=3
        ),
        block(
            "default",
            rng.uniform(0.03, 0.05, 40).tolist(),
            at=START + 9,
            missing=1,
            bounded=100,
            sent=50,
            resent=2,
        ),
    ]
    bursts = "bursts(loss=0.8,length=200ms,every=1s)"
    return document(run(blocks, tuple(span(k, k + 0.2) for k in range(12)), impair=bursts))


@pytest.fixture(scope="module")
def html(content):
    return page(content)


def cells(html, table):
    """Rows of a table of the page."""
    body = re.search(rf"<table class='{table}'>(.*?)</table>", html, re.DOTALL)
    assert body is not None
    return [re.findall(r"<t[dh]>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", body[1])]


def test_the_page_holds_the_records(content, html):
    head, *rows = cells(html, "results")
    assert [row[0] for row in rows] == ["gloo-cubic", "default"]
    for row, record in zip(rows, content["records"], strict=True):
        shown = dict(zip(head, row, strict=True))
        for name, field in (
            ("p50", "p50_s"),
            ("p90", "p90_s"),
            ("p99", "p99_s"),
            ("p99.9", "p999_s"),
            ("p50 in bursts", "burst_p50_s"),
        ):
            assert shown[name] == format_seconds(record[field])
        assert (
            shown["missing"] == f"{record['missing_share']:.2%}"
            and shown["dropped"] == f"{record['offered_loss']:.2%}"
        )
        assert shown["CPU s/GB"] == f"{record['cpu_s_per_gb']:.2f}"
    head, ratio = cells(html, "ratios")
    gloo, ours = content["records"]
    assert head == ["arm", "size", "than", "p50", "paired", "p99", "in bursts"]
    expected = [f"{gloo[name] / ours[name]:.2f}" for name in ("p50_s", "p50_s", "p99_s", "burst_p50_s")]
    assert ratio == ["default", "1 MiB", "gloo-cubic", *expected]


def test_the_page_stands_alone(html):
    """No script, no file, no address outside but the names of SVG's own formats; three pictures that are well-formed."""
    assert "<script" not in html and "Made &lt;by hand&gt;" in html and "proves nothing" not in html
    addresses = set(re.findall(r"(?:https?:)?//[\w./-]+", html))
    assert all(
        re.search(r"w3\.org|purl\.org|creativecommons|matplotlib\.org", address) for address in addresses
    )
    pictures = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(pictures) == 3
    for picture in pictures:
        assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert "default" in pictures[0] and "shaded" in pictures[1] and "left missing" in pictures[2]


def test_the_same_json_gives_the_same_page(content, html):
    assert html == page(json.loads(json.dumps(content)))


def test_bursts_are_shaded_late_in_a_long_run_too():
    """Rounds that began after more bursts than a panel shades."""
    late = block("default", [0.1] * 3, at=START + 1000.05)
    bursts = tuple(span(k, k + 0.2) for k in range(1002))
    content = document(run([late], bursts, impair="bursts(loss=0.8,length=200ms,every=1s)", arms=["default"]))
    assert content["rounds"][0]["hit"] == [True, True, False]
    drawn = figures.time_lines(content).decode()
    assert drawn.count("#fbe3c0") == 1


def test_a_failed_run_says_so_first(content, monkeypatch):
    monkeypatch.setattr(report, "pictures", lambda document: [])
    html = page({**content, "failed": "default: a loss of 1 % was asked for"})
    assert html.index("This run proves nothing") < html.index("Results")


def test_the_facts_name_links_queues_and_means(content):
    experiment = content["experiment"]
    topology = {
        **experiment["topology"], "kind": "dumbbell", "rate_bps": 1e9, "core_rate_bps": 5e8, "core_queue_bytes": 131072,
        "core_delay_s": 0.03, "discipline": "red",
    }  # fmt: skip
    slow = {"rank": 1, "by_s": 0.02}
    means = {"loss": "nft", "rate": "tbf", "delay": "none", "why": "no <module>", "schedule": "loss(0.1)"}
    html = page({**content, "experiment": {**experiment, "topology": topology, "slow": slow}, "means": means})
    (facts,) = re.findall(r"<table class='facts'>(.*?)</table>", html, re.DOTALL)
    found = dict(re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td></tr>", facts))
    assert found["each host's link"] == "1000 Mb/s, queue 256 KiB"
    assert found["core links"] == "500 Mb/s, queue 128 KiB, 30 ms one way"
    assert (found["queues"], found["slow rank"]) == ("red", "rank 1, by 20 ms")
    assert (
        found["done by"]
        == "loss by nftables, rates by tbf, delays by nothing (netem is refused: no &lt;module&gt;)"
    )


def test_training_has_a_report_too():
    made = run([], train={"seeds": [0]})
    made.trained += [trained("gloo-cubic", 0, 10.0, 0.9), trained("default", 0, 5.0, 0.85)]
    head, gloo, ours = cells(page(document(made)), "results")
    assert (
        dict(zip(head, gloo, strict=True))["accuracy"] == "90.00%"
        and dict(zip(head, ours, strict=True))["wall"] == "5 s"
    )


def test_report_and_picture_from_a_file(content, tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(content))
    where = ["--report", str(tmp_path / "r" / "a.html"), "--picture", str(tmp_path / "a.png")]
    assert dblp(["lab", "report", str(tmp_path / "a.json"), *where]) == 0
    assert (tmp_path / "r" / "a.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert dblp(["lab", "report", str(tmp_path / "a.json")]) == 2
    assert "name --report" in capsys.readouterr().err


# --- comparisons


def test_a_change_is_told_from_chance():
    rng = np.random.default_rng(2)
    before = document(
        run(
            [
                block("gloo-cubic", rng.normal(0.1, 0.005, 60).tolist()),
                block("default", rng.normal(0.05, 0.005, 60).tolist()),
            ]
        )
    )
    after = document(
        run(
            [
                block("gloo-cubic", rng.normal(0.1, 0.005, 60).tolist()),
                block("default", rng.normal(0.04, 0.005, 60).tolist()),
            ]
        )
    )
    gloo, ours = compare(before, after)
    assert (gloo.verdict, ours.verdict) == ("same", "faster")
    assert ours.p50_ratio == after["records"][1]["p50_s"] / before["records"][1]["p50_s"]
    assert ours.low < 0.8 < ours.high < 1.0
    assert [change.verdict for change in compare(after, before)] == ["same", "slower"]


def test_the_interval_covers_the_true_ratio():
    """95 % of the intervals hold the ratio of the true medians, here 1."""
    rng = np.random.default_rng(3)
    held = [
        low <= 1.0 <= high for low, high in (interval(*rng.exponential(1.0, (2, 50))) for _ in range(100))
    ]
    assert sum(held) >= 88


def test_the_command_compares(content, tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(content))
    figures = tmp_path / "c.json"
    assert (
        dblp(["lab", "compare", str(tmp_path / "a.json"), str(tmp_path / "a.json"), "--json", str(figures)])
        == 0
    )
    records = json.loads(figures.read_text())["records"]
    assert [(r["arm"], r["p50_ratio"], r["verdict"]) for r in records] == [
        ("gloo-cubic", 1.0, "same"),
        ("default", 1.0, "same"),
    ]
    assert "same" in capsys.readouterr().out


def test_runs_of_different_experiments_are_called_so(content, tmp_path, capsys):
    other = document(
        run(
            [block("default", [0.1] * 8)],
            impair="loss(0.02)",
            topology={"kind": "star", "hosts": 3},
            title="Another",
        )
    )
    for name, made in (("a", content), ("b", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    assert dblp(["lab", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "a.json: made, Made <by hand>" in said and "b.json: made, Another" in said
    assert (
        "topology.hosts (2 and 3)" in said
        and "loss(0.02)" in said
        and "rounds" not in said.split("they differ")[0]
    )
    assert dblp(["lab", "compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0
    assert "they differ" not in capsys.readouterr().out


def test_percentiles_of_few_rounds_are_called_so(content, monkeypatch):
    monkeypatch.setattr(report, "pictures", lambda document: [])
    assert "rest on one round each" in page(content)
    assert "p99 of fewer than 100 rounds" in str(result_table(content["records"]).caption)
    many = document(run([block("default", [0.1] * 100)], arms=["default"]))
    assert "rest on one round each" not in page(many)
    assert "p99" not in str(result_table(many["records"]).caption)


def test_a_picture_alone_tells_what_it_is_of_and_whether_it_proves_anything(content):
    assert b"Made &lt;by hand&gt;: 2 hosts" in figures.overview(content, "svg")
    assert b"PROVES NOTHING" not in figures.overview(content, "svg")
    failed = figures.overview({**content, "failed": "no burst came\nmore"}, "svg")
    assert b"THIS RUN PROVES NOTHING: no burst came" in failed


@pytest.mark.parametrize(("rounds", "verdict"), [(1, "too few rounds"), (5, "too few rounds"), (6, "faster")])
def test_few_rounds_tell_nothing(rounds, verdict, tmp_path, capsys):
    """With n rounds the median lies between the least and the largest with a chance of 1 - 2**(1 - n): 95 % from 6 on."""
    seconds = np.linspace(0.1, 0.11, rounds)
    for name, factor in (("a", 1.0), ("b", 0.5)):
        made = document(run([block("default", (factor * seconds).tolist())], arms=["default"]))
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    arguments = [
        "lab",
        "compare",
        str(tmp_path / "a.json"),
        str(tmp_path / "b.json"),
        "--json",
        str(tmp_path / "c.json"),
    ]
    assert dblp(arguments) == 0
    (record,) = json.loads((tmp_path / "c.json").read_text())["records"]
    assert (record["verdict"], record["before_rounds"], record["after_rounds"]) == (verdict, rounds, rounds)
    said = capsys.readouterr().out
    count = "1 round only" if rounds == 1 else f"{rounds} rounds only"
    assert (f"an arm has {count} in one of the files; 6 of each are needed" in said) == (rounds < 6)


def test_trainings_have_no_rounds_to_tell_chance_by():
    made = run([], train={"seeds": [0]})
    made.trained += [trained("gloo-cubic", 0, 10.0, 0.9), trained("default", 0, 5.0, 0.85)]
    assert {change.verdict for change in compare(document(made), document(made))} == {"too few rounds"}


def test_trainings_are_compared_by_wall_time_and_accuracy(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for name, wall_s, accuracy in (("a", 10.0, 0.9), ("b", 8.0, 0.91)):
        made = run([], train={"seeds": [0]}, arms=["default"])
        made.trained.append(trained("default", 0, wall_s, accuracy))
        (tmp_path / f"{name}.json").write_text(json.dumps(document(made)))
    figures = tmp_path / "c.json"
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert dblp(["lab", "compare", *files, "--json", str(figures)]) == 0
    (record,) = json.loads(figures.read_text())["records"]
    assert record["wall_ratio"] == pytest.approx(0.8)
    assert (record["before_test_accuracy"], record["after_test_accuracy"]) == (0.9, 0.91)
    said = capsys.readouterr().out
    for cell in ("10 s", "8 s", "0.80", "90.00%", "91.00%"):
        assert cell in said


def test_a_failed_run_is_no_side_of_a_comparison(content, tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(content))
    (tmp_path / "b.json").write_text(json.dumps({**content, "failed": "no loss"}))
    files, figures = [str(tmp_path / "a.json"), str(tmp_path / "b.json")], tmp_path / "c.json"
    assert dblp(["lab", "compare", *files, "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())
    assert {record["verdict"] for record in found["records"]} == {"failed run"}
    line = f"{files[1]} is of a run that failed, and proves nothing: no loss"
    assert found["failed"] == [line] and line in capsys.readouterr().out
    assert {change.failed for change in compare(content, content)} == {False}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"command": "train"}', "x.json: a file of dblp lab run --json is expected, this one is of 'train'"),
        ("{}", "x.json: a file of dblp lab run --json is expected, this one names no command"),
        ('{"command": "lab run"}', "x.json: lacks experiment, records, rounds"),
        ("[]", "x.json: not the JSON of a dblp command"),
        (None, "x.json: cannot be read: No such file or directory"),
    ],
)
@pytest.mark.parametrize("command", ["compare", "report"])
def test_files_that_are_none_are_named(command, text, says, content, tmp_path, capsys):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    (tmp_path / "good.json").write_text(json.dumps(content))
    more = [str(tmp_path / "good.json")] if command == "compare" else ["--report", str(tmp_path / "r.html")]
    assert dblp(["lab", command, str(path), *more]) == 2
    assert f"{tmp_path}/{says}" in capsys.readouterr().err


def test_records_that_are_none_are_named(content):
    with pytest.raises(ConfigError, match=r"b\.json: its records are not those of dblp lab run"):
        compare(content, {**content, "records": [{"arm": "default"}]}, ("a.json", "b.json"))


def test_the_headline_counts_and_names_the_command():
    from dblp.cli.lab.tables import headline
    from tests.lab.made import experiment

    said = headline(experiment(rounds=1, arms=["default"]), "lab capture")
    assert said.startswith("[bold]dblp lab capture made[/]")
    assert "star of 2 hosts, 1 MiB, 1 round an arm, blocks of 10, 1 arm" in said and "in turn" not in said
    assert "2 arms in turn" in headline(experiment(), "lab run")


def test_progress_is_told_within_a_block_where_there_are_no_bars(monkeypatch):
    import io

    from rich.console import Console

    from dblp.cli.lab import progress
    from tests.lab.made import experiment

    now = [0.0]
    monkeypatch.setattr("dblp.cli.lab.progress.time.monotonic", lambda: now[0])
    out = io.StringIO()
    with progress.LabProgress(experiment(), Console(file=out, width=100)) as shown:
        shown.means({"loss": "nft", "rate": "tbf", "delay": "none", "why": "no [netem]", "schedule": ""})
        for now[0], done in ((1.0, 1), (11.0, 2), (12.0, 3), (22.0, 4)):
            shown.block("default", 2**20, done, 100)
    assert out.getvalue().splitlines() == [
        "loss by nftables, rates by tbf, delays by nothing (netem is refused: no [netem])",
        "default, 1 MiB: 2 of 100 rounds",
        "default, 1 MiB: 4 of 100 rounds",
    ]


def test_what_cannot_be_compared_is_told(content, tmp_path, capsys):
    with pytest.raises(ConfigError, match="share no arm and size"):
        compare(content, document(run([block("dblp-exact", [0.1])], arms=["dblp-exact"])))
    with pytest.raises(ConfigError, match="one is of 'train'"):
        compare(content, {**content, "command": "train"})
    (tmp_path / "x.json").write_text("{")
    assert dblp(["lab", "compare", str(tmp_path / "x.json"), str(tmp_path / "x.json")]) == 2
    assert "x.json: cannot be read as JSON" in capsys.readouterr().err
