"""``dblp pcap``: its tables, JSON, picture and dissector, and what it says of wrong use."""

from __future__ import annotations

import json

import pytest

from dblp.cli.main import run
from tests.transport.recording import SESSION, recorded_rounds, write_pcap

pytest.importorskip("scapy")


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    path = tmp_path_factory.mktemp("pcap") / "round.pcap"
    sent, reports = recorded_rounds(budget=0.2, impair="loss(0.1),seed(3)")
    write_pcap(path, sent)
    return path, reports


def test_json_holds_what_the_reports_say(capture, tmp_path, capsys):
    path, reports = capture
    figures = tmp_path / "pcap.json"
    assert run(["pcap", str(path), "--json", str(figures)]) == 0
    content = json.loads(figures.read_text())
    assert content["command"] == "pcap" and content["capture"]["faults"] == {}
    assert [record["round"] for record in content["records"]] == [0, 1]
    for record, of_round in zip(content["records"], zip(*reports, strict=True), strict=True):
        assert record["missing"] == sum(report.missing_chunks for report in of_round)
        assert record["data"] - record["repairs"] == sum(report.chunks_sent for report in of_round)
    assert sum(message["repairs"] for message in content["messages"]) == sum(
        record["repairs"] for record in content["records"]
    )
    said = capsys.readouterr().out
    assert "0:0" in said and "2 stall" in said and "repairs" in said


def test_rounds_of_two_sessions_are_told_apart(tmp_path, capsys):
    """As of two arms in one capture, which both count from 0."""
    first, _ = recorded_rounds(impair="loss(0.1),seed(3)")
    second, _ = recorded_rounds(impair="loss(0.1),seed(4)", session=SESSION - 1)
    later = [datagram._replace(time=datagram.time + 10.0) for datagram in second]
    write_pcap(tmp_path / "two.pcap", [*first, *later])
    assert run(["pcap", str(tmp_path / "two.pcap")]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("1/0:0", "1/0:1", "2/0:0", "2/0:1", "session/group:round"))


def test_pictures(capture, tmp_path):
    path, _ = capture
    assert run(["pcap", str(path), "--picture", str(tmp_path / "a" / "p.png"), "--limit", "1"]) == 0
    assert (tmp_path / "a" / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_dissector_needs_no_capture(tmp_path):
    assert run(["pcap", "--lua", str(tmp_path / "dblp.lua")]) == 0
    assert 'Proto("dblp"' in (tmp_path / "dblp.lua").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name a capture"),
        (["--picture", "x.png", "--lua", "x.lua"], "need a capture"),
        (["absent.pcap"], "absent.pcap: cannot be read as a capture"),
        (["absent.pcap", "--limit", "-1"], "--limit -1"),
        (["--lua", "/proc/none/x.lua"], "cannot be written"),
    ],
)
def test_wrong_use_is_told(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["pcap", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "x.lua").exists()
