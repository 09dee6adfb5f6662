"""UDP sockets of a port: their options, buffers and drop counts, and what the kernel offers."""

from __future__ import annotations

import logging
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from dblp.errors import ConfigError
from dblp.transport import libc, netif
from dblp.transport.config import TransportConfig
from dblp.transport.congestion import REGISTRY

logger = logging.getLogger(__name__)

SNMP = Path("/proc/net/snmp")

_CLAMPED = (
    "the kernel gives a %s buffer of %d bytes where %d were asked for: bursts may be lost or have to wait. "
    "As root: %s"
)
_clamped_warned: set[int] = set()  # socket options that this process has already warned about


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What the kernel offers a UDP socket, as a probe saw it (``dblp doctor`` prints it)."""

    gso: bool
    gro: bool
    timestamps: bool
    drop_counter: bool


def probe(sock: socket.socket) -> Features:
    """What the kernel offers. Leaves UDP_GRO and SO_TIMESTAMPNS on, UDP_SEGMENT off."""
    return Features(
        gso=_try(sock, libc.SOL_UDP, libc.UDP_SEGMENT, 0),
        gro=_try(sock, libc.SOL_UDP, libc.UDP_GRO, 1),
        timestamps=_try(sock, socket.SOL_SOCKET, libc.SO_TIMESTAMPNS, 1),
        drop_counter=socket_drops(sock) is not None,
    )


def set_buffer(sock: socket.socket, option: int, asked: int) -> int:
    """Ask for ``asked`` bytes of SO_RCVBUF or SO_SNDBUF; what the kernel gives (it doubles the figure for
    overhead)."""
    force = libc.SO_RCVBUFFORCE if option == socket.SO_RCVBUF else libc.SO_SNDBUFFORCE
    if not _try(sock, socket.SOL_SOCKET, force, asked):  # needs CAP_NET_ADMIN
        sock.setsockopt(socket.SOL_SOCKET, option, asked)
    return sock.getsockopt(socket.SOL_SOCKET, option)


def sysctl_line(option: int, asked: int) -> str:
    """The line that a person with root types so that ``asked`` bytes are given."""
    name = "rmem_max" if option == socket.SO_RCVBUF else "wmem_max"
    return f"sysctl -w net.core.{name}={asked}"


def bind(choice: netif.Choice, config: TransportConfig) -> socket.socket:
    sock = socket.socket(choice.family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if choice.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        _set_path_options(sock)
        _set_buffers(sock, config)
        if not (_try(sock, socket.SOL_SOCKET, libc.SO_TIMESTAMPNS, 1)):
            raise ConfigError(
                "this kernel gives no receive timestamps (SO_TIMESTAMPNS), which the transport needs"
            )
        if REGISTRY[config.congestion].ecn:
            _report_marks(sock)
        _try(sock, libc.SOL_UDP, libc.UDP_GRO, 1)  # without it, single datagrams take the same path
        sock.bind(netif.sockaddr(choice.host, 0, choice.family))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot bind a UDP socket to {choice.host} ({choice.ifname}): {error.strerror}"
        ) from error
    except BaseException:
        sock.close()
        raise
    return sock


def _set_path_options(sock: socket.socket) -> None:
    """Never fragment, and report ICMP errors: a fragment's loss costs the whole datagram and no switch hashes
    its ports."""
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, libc.IPV6_MTU_DISCOVER, libc.PMTUDISC_DO)
        sock.setsockopt(socket.IPPROTO_IPV6, libc.IPV6_RECVERR, 1)
    else:
        sock.setsockopt(socket.IPPROTO_IP, libc.IP_MTU_DISCOVER, libc.PMTUDISC_DO)
        sock.setsockopt(socket.IPPROTO_IP, libc.IP_RECVERR, 1)


def _report_marks(sock: socket.socket) -> None:
    """Have each received message come with the ECN bits of its datagrams (GRO joins only those that have the same)."""
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, libc.IPV6_RECVTCLASS, 1)
    else:
        sock.setsockopt(socket.IPPROTO_IP, libc.IP_RECVTOS, 1)


def _set_buffers(sock: socket.socket, config: TransportConfig) -> None:
    wanted = {socket.SO_RCVBUF: config.receive_buffer_bytes, socket.SO_SNDBUF: config.send_buffer_bytes}
    for option, asked in wanted.items():
        given = set_buffer(sock, option, asked) // 2
        if given < asked and option not in _clamped_warned:
            _clamped_warned.add(option)
            what = "receive" if option == socket.SO_RCVBUF else "send"
            logger.warning(_CLAMPED, what, given, asked, sysctl_line(option, asked))


def _try(sock: socket.socket, level: int, option: int, value: int) -> bool:
    try:
        sock.setsockopt(level, option, value)
    except OSError:
        return False
    return True


def socket_drops(sock: socket.socket) -> int | None:
    """Datagrams that found this socket's receive buffer full; None before Linux 4.12."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, libc.SO_MEMINFO, 36)
    except OSError:
        return None
    words = struct.unpack(f"={len(raw) // 4}I", raw)
    return words[libc.SK_MEMINFO_DROPS] if len(words) > libc.SK_MEMINFO_DROPS else None


def snmp_receive_errors() -> int:
    """RcvbufErrors of all UDP sockets of this network namespace; 0 where it cannot be read."""
    try:
        names, values = (line.split() for line in SNMP.read_text().splitlines() if line.startswith("Udp:"))
        return int(values[names.index("RcvbufErrors")])
    except (OSError, ValueError):
        return 0
