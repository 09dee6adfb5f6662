"""Capturing what a host sends and gets while an experiment runs: tcpdump in its namespace."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from dblp.errors import LocalError
from dblp.sim.lab import namespaces
from dblp.sim.lab.hosts import Host
from dblp.sim.lab.network import LabNetwork
from dblp.sim.lab.tools import LabError, find

SNAPLEN = 1600
"""Bytes that are kept of a packet: all of one for an MTU of 1500."""
_BUFFER_KIB = 65_536
"""tcpdump's buffer in the kernel: what comes while it writes."""
_READY_S = 10.0


@contextlib.contextmanager
def sniffing(net: LabNetwork, host: Host, path: str) -> Iterator[None]:
    """Write the host's UDP to ``path`` while the block runs, datagram by datagram: its card joins none meanwhile. Raises LabError
    without tcpdump, LocalError for a path that cannot be written."""
    try:
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).touch()
    except OSError as error:
        raise LocalError(f"capture {path}: cannot be written: {error.strerror}") from None
    tcpdump = find("tcpdump")
    if tcpdump is None:
        raise LabError("a capture needs tcpdump: apt install tcpdump, or your system's package of that name")
    argv = [
        tcpdump,
        "-i",
        host.interface,
        "-s",
        str(SNAPLEN),
        "-B",
        str(_BUFFER_KIB),
        "-U",
        "-Z",
        "root",
        "-w",
        path,
        "udp",
    ]
    _join(host, "off")
    child = net.popen(host, argv, stdout=DEVNULL, stderr=PIPE)
    try:
        _wait_until_ready(child)
        yield
    finally:
        time.sleep(0.2)  # what the kernel still holds
        child.terminate()
        child.communicate()
        _join(host, "on")


def _join(host: Host, onoff: str) -> None:
    namespaces.run_in(host.namespace, ["ethtool", "-K", host.interface, "gro", onoff])


def _wait_until_ready(child: Popen[Any]) -> None:
    """tcpdump says that it listens."""
    assert child.stderr is not None
    deadline = time.monotonic() + _READY_S
    said = b""
    while time.monotonic() < deadline:
        line = child.stderr.readline()
        said += line
        if b"listening on" in line:
            return
        if not line:
            break
    raise LabError(f"tcpdump did not begin: {said.decode(errors='replace').strip() or 'it said nothing'}")
