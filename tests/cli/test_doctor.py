"""``dblp doctor``: this host as it is, and hosts that lack things, by replacing what the checks look at."""

from __future__ import annotations

import configparser
import errno
import gzip
import io
import json
import os
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from dblp.cli import checks, doctor, lab_checks
from dblp.cli.checks import Check, Status
from dblp.installed import pip_line
from dblp.transport import libc, netif, udp_socket
from dblp.transport.config import TransportConfig
from dblp.transport.udp_socket import Features

CONFIG = TransportConfig()
ALL = Features(gso=True, gro=True, timestamps=True, drop_counter=True)
NONE = Features(gso=False, gro=False, timestamps=False, drop_counter=False)

app = typer.Typer()
app.command()(doctor.doctor)


def by_name(found: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in found}


@pytest.mark.sockets
def test_report_of_this_host():
    rows = doctor.report("127.0.0.1")
    names = [check.name for check in rows]
    assert len(set(names)) == len(names)
    assert {"GSO", "GRO", "recvmmsg", "timestamps", "receive buffer", "send buffer", "interface", "tc netem",
            "nftables", "namespaces", "root", "torch", "uvloop", "cores", "TCP control"} <= set(names)  # fmt: skip
    assert not any(check.fatal for check in rows)
    for check in rows:
        assert check.found
        assert (check.status is Status.OK) or check.remedy or check.costs, check
    assert by_name(rows)["torch"].found == metadata.version("torch")
    assert "127.0.0.1" in by_name(rows)["interface"].found


@pytest.mark.sockets
def test_command_writes_json_and_ends_well(tmp_path):
    path = tmp_path / "report" / "doctor.json"
    result = CliRunner().invoke(app, ["--master", "127.0.0.1", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "dblp works here" in result.output
    document = json.loads(path.read_text())
    assert document["command"] == "doctor"
    assert document["version"] == metadata.version("dblp")
    assert document["host"]["cores"] >= 1
    assert {record["name"] for record in document["records"]} >= {"GSO", "interface", "torch"}
    assert {record["status"] for record in document["records"]} <= {status.value for status in Status}


@pytest.mark.sockets
def test_an_essential_lack_ends_with_1(monkeypatch):
    monkeypatch.setattr(udp_socket, "probe", lambda sock: NONE)
    result = CliRunner().invoke(app, ["--master", "127.0.0.1"])
    assert result.exit_code == 1
    assert "dblp cannot work here: timestamps" in result.output


def test_an_unreachable_master_is_essential():
    check = checks.interface_check(CONFIG, "nosuch.invalid")
    assert check.fatal
    assert "nosuch.invalid" in check.costs and "MASTER_ADDR" in check.remedy


def test_a_small_mtu_is_less_not_missing(monkeypatch):
    monkeypatch.setattr(netif, "mtu_of", lambda name: 1400)
    check = checks.interface_check(CONFIG, "127.0.0.1")
    assert check.status is Status.LESS and not check.fatal
    assert "1372 of the 1464 bytes" in check.costs
    assert check.remedy.endswith("ip link set dev lo mtu 1492")


@pytest.mark.sockets
def test_offloads_that_are_missing_say_what_they_cost():
    assert checks.gso_check(ALL).status is checks.gro_check(ALL).status is Status.OK
    for check in (checks.gso_check(NONE), checks.gro_check(NONE)):
        assert check.status is Status.LESS
        assert "times the CPU time" in check.costs and "Linux" in check.remedy
    assert checks.timestamp_check(NONE).fatal


@pytest.mark.sockets
def test_a_clamped_buffer_gives_the_sysctl_line(monkeypatch):
    monkeypatch.setattr(libc, "SO_RCVBUFFORCE", 9999)  # as without CAP_NET_ADMIN
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        check = checks.buffer_check(sock, socket.SO_RCVBUF, 1 << 30)
        plenty = checks.buffer_check(sock, socket.SO_SNDBUF, 65_536)
    assert check.status is Status.LESS
    assert check.remedy == "sysctl -w net.core.rmem_max=1073741824"
    assert "datagrams" in check.costs
    assert plenty.status is Status.OK


@pytest.mark.sockets
def test_recvmmsg_that_is_refused_is_essential(monkeypatch):
    def refused(*arguments: object) -> int:
        return -1

    assert checks.recvmmsg_check().status is Status.OK
    monkeypatch.setattr(libc, "load", lambda: libc.Calls(refused, refused, refused))
    assert checks.recvmmsg_check().fatal


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.7", Status.OK), ("2.13.0+cpu", Status.OK), ("3.0rc1", Status.OK), ("2.6.1", Status.LESS)],
)
def test_package_versions(monkeypatch, version, status):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    check = checks.package_check("torch", "2.7", "the backend", "torch")
    assert check.status is status
    assert version in check.found


def test_a_missing_package_names_the_pip_line():
    check = checks.package_check("no-such-package-here", "1", "much", "torch")
    assert check.status is Status.MISSING and not check.fatal
    assert check.remedy == pip_line("torch")


def test_every_extra_is_looked_for():
    """All packages of setup.cfg's extras, at their least versions, but for those that only dblp's developers and nobody's
    commands need."""
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    extras = {
        extra: dict(re.sub(r"\[.*\]", "", line).split(">=") for line in lines.split())
        for extra, lines in setup["options.extras_require"].items()
        if extra not in ("dev", "crypto")
    }
    known = {package: (least, extra) for package, least, _, extra in checks.PACKAGES if extra}
    assert set(known) == {package for packages in extras.values() for package in packages}
    assert all(extras[extra][package] == least for package, (least, extra) in known.items())


@pytest.mark.parametrize(
    ("package", "words"), [("numba", "dblp sim run"), ("matplotlib", "--picture"), ("ray", "--ray")]
)
def test_a_missing_extra_says_what_it_costs(monkeypatch, package, words):
    version = metadata.version

    def without(name: str) -> str:
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)
    check = by_name(checks.python_checks())[package]
    assert check.status is Status.MISSING and not check.fatal
    assert words in check.costs and check.remedy.startswith("python -m pip install ")


def test_without_root_the_answer_is_honest(monkeypatch, tmp_path):
    monkeypatch.setattr(lab_checks, "PROC_MODULES", tmp_path / "modules")
    monkeypatch.setattr(lab_checks, "MODULE_ROOT", tmp_path / "lib")
    monkeypatch.setattr(lab_checks, "CONFIGS", (tmp_path / "config.gz",))
    monkeypatch.setattr(lab_checks, "find_tool", lambda name: f"/sbin/{name}")
    assert lab_checks.netem_check(False).status is Status.UNKNOWN
    assert "unknown without root" in lab_checks.netem_check(False).found

    (tmp_path / "config.gz").write_bytes(gzip.compress(b"# CONFIG_NET_SCH_NETEM is not set\n"))
    assert lab_checks.netem_check(False).status is Status.MISSING
    (tmp_path / "modules").write_text("sch_netem 28672 0 - Live 0x0\n")
    assert lab_checks.netem_check(False).status is Status.OK
    assert lab_checks.root_check(False).remedy == "sudo dblp doctor"
    assert lab_checks.namespace_check(False).status is Status.UNKNOWN


def test_modules_that_may_be_loaded_count(monkeypatch, tmp_path):
    folder = tmp_path / os.uname().release
    (folder / "kernel").mkdir(parents=True)
    (folder / "kernel" / "sch_netem.ko.xz").touch()
    (folder / "modules.builtin").write_text("kernel/net/netfilter/nf_tables.ko\n")
    monkeypatch.setattr(lab_checks, "PROC_MODULES", tmp_path / "modules")
    monkeypatch.setattr(lab_checks, "MODULE_ROOT", tmp_path)
    assert lab_checks.kernel_has("sch_netem", "CONFIG_NET_SCH_NETEM") is True
    assert lab_checks.kernel_has("nf_tables", "CONFIG_NF_TABLES") is True
    assert lab_checks.kernel_has("sch_prio", "CONFIG_NET_SCH_PRIO") is False


def test_as_root_the_kernels_refusal_is_told(monkeypatch):
    commands: list[tuple[str, ...]] = []

    def refuse(*command: str) -> tuple[bool, str]:
        commands.append(command)
        return False, "Error: Specified qdisc kind is unknown."

    monkeypatch.setattr(lab_checks, "find_tool", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(lab_checks, "runs", refuse)
    check = lab_checks.netem_check(True)
    assert check.status is Status.MISSING
    assert check.found == "the kernel refuses it: Specified qdisc kind is unknown."
    assert commands[0][:2] == ("/sbin/unshare", "--net")  # nothing is tried outside a namespace


def test_a_missing_tool_names_its_package(monkeypatch):
    monkeypatch.setattr(lab_checks, "find_tool", lambda name: None)
    assert "iproute2" in lab_checks.netem_check(True).remedy
    assert "nftables" in lab_checks.nftables_check(True).remedy


def test_runs_reports_failure_and_never_raises():
    assert checks.runs(sys.executable, "-c", "print('a'); print('b')") == (True, "b")
    assert checks.runs(sys.executable, "-c", "raise SystemExit('why')") == (False, "why")
    assert checks.runs("/no/such/command")[0] is False

    def too_slow(*arguments: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("it", 10)

    assert checks.runs("it", run=too_slow) == (False, "Command 'it' timed out after 10 seconds")


@pytest.mark.sockets
def test_super_packet_trial(monkeypatch):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        assert checks.super_packet_comes_back() is udp_socket.probe(sock).gso

    def refuse(*arguments: object) -> None:
        raise OSError(errno.EIO, "no checksum offload")

    monkeypatch.setattr(socket.socket, "sendmsg", refuse)
    assert checks.super_packet_comes_back() is False
    assert checks.gso_check(ALL).status is Status.LESS


def test_remedies_are_printed_whole_on_a_narrow_screen():
    """A line to type must not be broken, and nothing may be cut off."""
    line = "sysctl -w net.core.rmem_max=4194304 && " + "x" * 100
    row = Check(
        name="buffer", group="transport", status=Status.LESS, found="small", costs="loss", remedy=line
    )
    screen = io.StringIO()
    console = Console(width=60, file=screen)
    doctor.show([row], console)
    assert line in screen.getvalue()
