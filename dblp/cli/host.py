"""Facts about this host that figures depend on, and the one JSON shape of all commands."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from dblp.cli.output import write_file

_TCP_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_CPU_INFO = Path("/proc/cpuinfo")


def host_facts() -> dict[str, Any]:
    """What a reader must know of the host to compare figures."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu_model(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": _torch_version(),
        "tcp_congestion_control": loopback_congestion_control(),
    }


def document(command: str, records: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """The JSON object of a command: ``command``, ``version``, ``host``, flat ``records``, and ``more``."""
    return {
        "command": command,
        "version": metadata.version("dblp"),
        "host": host_facts(),
        **more,
        "records": [dict(record) for record in records],
    }


def write_json(path: Path, content: Mapping[str, Any], option: str = "--json") -> None:
    """Write a JSON file, with its folder by ``dblp.cli.output``'s rule; raises LocalError that names option and path."""
    write_file(option, path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def cpu_model() -> str:
    """The processor's name, as the kernel tells it; the machine's type where it tells none."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def loopback_congestion_control() -> str:
    """TCP's congestion control between local processes: the route's ``congctl`` attribute, else the sysctl.

    gloo's times depend on it (bbr paces on loopback, cubic does not).
    """
    on_route = _route_congestion_control()
    if on_route:
        return f"{on_route} (route)"
    try:
        return _TCP_CONTROL.read_text().strip()
    except OSError:
        return "unknown"


def _route_congestion_control() -> str:
    ip = shutil.which("ip", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if ip is None:
        return ""
    words = subprocess.run(
        [ip, "route", "get", "127.0.0.1"], capture_output=True, text=True, check=False
    ).stdout.split()
    return words[words.index("congctl") + 1] if "congctl" in words else ""


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed"
