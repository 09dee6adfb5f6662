"""What ``dblp doctor`` looks at: one check a feature of this host, with what its lack costs and the
remedy."""

from __future__ import annotations

import enum
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from dblp.cli.host import cpu_model, loopback_congestion_control
from dblp.errors import DblpError
from dblp.installed import pip_line
from dblp.transport import libc, netif, udp_socket
from dblp.transport.config import TransportConfig
from dblp.units import format_bytes

RMEM_MAX = Path("/proc/sys/net/core/rmem_max")
WMEM_MAX = Path("/proc/sys/net/core/wmem_max")

PACKAGES = (
    ("torch", "2.7", "the torch backend, attach() and dblp train; numpy arrays work", "torch"),
    ("uvloop", "0.19", "plain asyncio runs the engine: some 10 us more a wake-up", ""),
    (
        "matplotlib",
        "3.8",
        "dblp train, whose picture it draws, --picture and --report of all commands",
        "train",
    ),
    ("scikit-learn", "1.4", "dblp train's digits, its default data", "train"),
    ("numba", "0.60", "dblp sim run, whose engine it compiles", "sim"),
    ("pyroute2", "0.7", "dblp lab: networks of namespaces on this host", "lab"),
    ("scapy", "2.5", "dblp pcap, which reads captures", "lab"),
    ("accelerate", "1.0", "training under Accelerate (docs/frameworks.md)", "frameworks"),
    ("lightning", "2.4", "training under Lightning (docs/frameworks.md)", "frameworks"),
    ("ray", "2.40", "training under Ray Train, and dblp sim run --ray", "ray"),
)
"""Name, least version, what one goes without, and the extra that brings it (setup.cfg); no extra: it comes with dblp."""


class Status(enum.Enum):
    """How a check ended; the value is what JSON says."""

    OK = "ok"
    LESS = "less"
    """It works, but slower or smaller than it could."""
    MISSING = "missing"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row of the report."""

    name: str
    group: str
    """``transport``, ``python`` or ``lab``."""
    status: Status
    found: str
    """What is there, for people."""
    costs: str = ""
    """What is lost without it; empty if nothing is missing."""
    remedy: str = ""
    """A command to type, or a sentence."""
    essential: bool = False
    """Whether dblp cannot work without it."""

    @property
    def fatal(self) -> bool:
        """True if dblp cannot work here because of this check."""
        return self.essential and self.status is Status.MISSING

    def record(self) -> dict[str, Any]:
        """A flat JSON object."""
        return {**asdict(self), "status": self.status.value}


def transport_checks(config: TransportConfig, master: str | None) -> list[Check]:
    """The data path: system calls, offloads, buffers, interface."""
    checks = [platform_check(), interface_check(config, master)]
    try:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    except OSError as error:
        found = f"no UDP socket can be made: {error.strerror}"
        return [
            *checks,
            Check(name="UDP", group="transport", status=Status.MISSING, found=found, essential=True),
        ]
    with sock:
        features = udp_socket.probe(sock)
        receive = buffer_check(sock, socket.SO_RCVBUF, config.receive_buffer_bytes)
        send = buffer_check(sock, socket.SO_SNDBUF, config.send_buffer_bytes)
    return [
        *checks,
        gso_check(features),
        gro_check(features),
        recvmmsg_check(),
        timestamp_check(features),
        receive,
        send,
        tcp_check(),
        cores_check(),
    ]


def platform_check() -> Check:
    """64-bit little-endian Linux, which the layouts of the batch calls assume."""
    name, found = "platform", f"{os.uname().sysname} {os.uname().release}, {os.uname().machine}"
    try:
        libc.require_linux64()
    except DblpError as error:
        return Check(
            name=name, group="transport", status=Status.MISSING, found=found, costs=str(error), essential=True
        )
    return Check(name=name, group="transport", status=Status.OK, found=found, essential=True)


def interface_check(config: TransportConfig, master: str | None) -> Check:
    """The interface that this rank would use, its MTU, and why."""
    try:
        choice = netif.choose(config.ifname, master=master)
    except DblpError as error:
        return Check(
            name="interface",
            group="transport",
            status=Status.MISSING,
            found="none can be chosen",
            costs=str(error),
            remedy="Set MASTER_ADDR to an address that this host reaches, or DBLP_IFNAME to an interface.",
            essential=True,
        )
    datagram = choice.max_datagram_bytes(config.datagram_bytes)
    found = f"{choice.ifname}, {choice.host}, MTU {choice.mtu}: {choice.why}. Datagrams of {datagram} bytes"
    if datagram < config.datagram_bytes:
        return Check(
            name="interface",
            group="transport",
            status=Status.LESS,
            found=found,
            costs=f"the MTU allows {datagram} of the {config.datagram_bytes} bytes a datagram that are configured; "
            f"all ranks agree on the least",
            remedy="Nothing to do, unless the network carries more: ip link set dev "
            f"{choice.ifname} mtu {config.datagram_bytes + choice.mtu - choice.max_datagram_bytes(1 << 16)}",
        )
    return Check(name="interface", group="transport", status=Status.OK, found=found, essential=True)


def gso_check(features: udp_socket.Features) -> Check:
    """UDP_SEGMENT: one system call sends a whole burst."""
    if features.gso:
        came = super_packet_comes_back()
        found = "UDP_SEGMENT: one call sends a burst" + (
            "" if came else ", but a trial burst did not come back"
        )
        if came:
            return Check(name="GSO", group="transport", status=Status.OK, found=found)
    else:
        found = "no UDP_SEGMENT"
    return Check(
        name="GSO",
        group="transport",
        status=Status.LESS,
        found=found,
        costs="bursts leave by sendmmsg: sending costs some 10 times the CPU time",
        remedy="Linux 4.18 or newer, and checksum offload on the interface: ethtool -K IFNAME tx on",
    )


def gro_check(features: udp_socket.Features) -> Check:
    """UDP_GRO: one message of recvmmsg brings a whole burst."""
    if features.gro:
        return Check(
            name="GRO",
            group="transport",
            status=Status.OK,
            found="UDP_GRO: a burst is received as one message",
        )
    return Check(
        name="GRO",
        group="transport",
        status=Status.LESS,
        found="no UDP_GRO",
        costs="datagrams are received one by one, 64 a call: some 7 times the CPU time",
        remedy="Linux 5.0 or newer.",
    )


def recvmmsg_check() -> Check:
    """recvmmsg in libc, and allowed by the sandbox if there is one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = libc.load().recvmmsg(sock.fileno(), 0, 0, libc.MSG_DONTWAIT, None)
        except (AttributeError, DblpError):
            answer = -1
    if answer >= 0:
        return Check(
            name="recvmmsg",
            group="transport",
            status=Status.OK,
            found="64 datagrams a call, from any senders",
            essential=True,
        )
    return Check(
        name="recvmmsg",
        group="transport",
        status=Status.MISSING,
        found="libc or the kernel refuses it",
        costs="dblp cannot receive",
        remedy="Linux 2.6.33 or newer; in a container, a seccomp profile that allows recvmmsg.",
        essential=True,
    )


def timestamp_check(features: udp_socket.Features) -> Check:
    """SO_TIMESTAMPNS: when the kernel got a datagram, however late Python reads it."""
    if features.timestamps:
        found = "SO_TIMESTAMPNS: the kernel's time of receipt, in nanoseconds"
        return Check(name="timestamps", group="transport", status=Status.OK, found=found, essential=True)
    return Check(
        name="timestamps",
        group="transport",
        status=Status.MISSING,
        found="no SO_TIMESTAMPNS",
        costs="delay cannot be told from a slow interpreter: dblp does not run without it",
        remedy="Linux 2.6.22 or newer; in a sandbox (gVisor), run on the host's kernel.",
        essential=True,
    )


def buffer_check(sock: socket.socket, option: int, asked: int) -> Check:
    """What SO_RCVBUF or SO_SNDBUF gives of what the configuration asks for."""
    receive = option == socket.SO_RCVBUF
    name, path = ("receive buffer", RMEM_MAX) if receive else ("send buffer", WMEM_MAX)
    given = udp_socket.set_buffer(sock, option, asked) // 2
    found = f"{format_bytes(given)} of the {format_bytes(asked)} asked for ({path.name} {_read(path)})"
    if given >= asked:
        return Check(name=name, group="transport", status=Status.OK, found=found)
    datagrams = given * 2 // 2304  # the kernel charges 2304 bytes for a datagram of 1464
    costs = (
        f"room for {datagrams} datagrams that come one by one: bursts of several peers overflow it and are repaired"
        if receive
        else "sending waits more often"
    )
    return Check(
        name=name,
        group="transport",
        status=Status.LESS,
        found=found,
        costs=costs,
        remedy=udp_socket.sysctl_line(option, asked),
    )


def tcp_check() -> Check:
    """What gloo runs on: figures against it mean nothing without this."""
    name = loopback_congestion_control()
    found = f"{name}: what gloo's TCP uses on this host; say it beside every comparison"
    return Check(name="TCP control", group="transport", status=Status.OK, found=found)


def cores_check() -> Check:
    """Cores that this process may use: the engine's thread wants one beside the training."""
    cores = len(os.sched_getaffinity(0))
    found = f"{cores} ({cpu_model()})"
    if cores > 1:
        return Check(name="cores", group="transport", status=Status.OK, found=found)
    return Check(
        name="cores",
        group="transport",
        status=Status.LESS,
        found=found,
        costs="the engine's thread shares the core with the training: no overlap",
        remedy="Give each rank two cores (cgroup, taskset, or --cpus of a container).",
    )


def python_checks() -> list[Check]:
    """Packages, by their metadata: nothing is imported, so this works where torch does not."""
    return [package_check(*package) for package in PACKAGES]


def package_check(package: str, least: str, without: str, extra: str) -> Check:
    """Whether a package is there and new enough."""
    line = pip_line(extra) if extra else f"python -m pip install '{package}>={least}'"
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        costs = f"without it: {without}" if package == "uvloop" else f"you go without {without}"
        return Check(
            name=package,
            group="python",
            status=Status.LESS if package == "uvloop" else Status.MISSING,
            found="not installed",
            costs=costs,
            remedy=line,
        )
    if _numbers(version) >= _numbers(least):
        return Check(name=package, group="python", status=Status.OK, found=version)
    return Check(
        name=package,
        group="python",
        status=Status.LESS,
        found=f"{version}, older than {least}",
        costs="not tested with dblp",
        remedy=line,
    )


def super_packet_comes_back() -> bool:
    """Send two datagrams as one super-packet over loopback; whether both arrive."""
    segment = libc.encode_cmsg(libc.SOL_UDP, libc.UDP_SEGMENT, (8).to_bytes(2, "little"))[16:18]
    try:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
        ):
            receiver.bind(("127.0.0.1", 0))
            receiver.settimeout(1.0)
            sender.sendmsg(
                [bytes(16)], [(libc.SOL_UDP, libc.UDP_SEGMENT, segment)], 0, receiver.getsockname()
            )
            return [len(receiver.recv(100)) for _ in range(2)] == [8, 8]
    except OSError:
        return False


def find_tool(name: str) -> str | None:
    """Path of a command, also where only root's PATH has it."""
    return shutil.which(name, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")


def runs(*command: str, run: Callable[..., Any] = subprocess.run) -> tuple[bool, str]:
    """Whether a command succeeds within 10 seconds, and the last line that it said."""
    try:
        done = run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    lines = (done.stderr or done.stdout).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


def _numbers(version: str) -> tuple[int, ...]:
    """``"2.13.0+cpu"`` is (2, 13, 0); what is no number ends it."""
    parts = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)
