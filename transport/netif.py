"""Which interface and address this rank uses: the one on the route to the master, unless ``DBLP_IFNAME`` says
otherwise.

No packet is sent: connecting a UDP socket makes the kernel look up the route and pick the source address. A
loopback address is chosen only when the master itself is one, since no other host could reach it.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from dblp.errors import ConfigError
from dblp.transport import libc
from dblp.transport.libc import Interface

IPV4_OVERHEAD_BYTES = 28
"""IPv4 header without options (RFC 791) and UDP header (RFC 768)."""
IPV6_OVERHEAD_BYTES = 48
"""IPv6 header (RFC 8200) and UDP header."""
SIOCGIFMTU = 0x8921
DISCARD_PORT = 9
"""A port for route look-ups; nothing is sent to it."""
OUTSIDE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Documentation addresses (RFC 5737, RFC 3849): the route to them is the default route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The interface and address that a rank's sockets are bound to."""

    host: str
    """Numeric address, with ``%interface`` where link-local."""
    ifname: str
    mtu: int
    """Largest IP packet of the interface, bytes."""
    family: socket.AddressFamily
    why: str
    """A sentence for people."""

    def max_datagram_bytes(self, wanted: int) -> int:
        """Largest UDP payload, at most ``wanted``, that leaves the interface in one piece."""
        overhead = IPV6_OVERHEAD_BYTES if self.family == socket.AF_INET6 else IPV4_OVERHEAD_BYTES
        return min(wanted, self.mtu - overhead)


def choose(pattern: str = "", *, master: str | None = None, host: str | None = None) -> Choice:
    """Choose by, in this order: ``host`` (a local address), ``pattern`` (``config.ifname``), the route to
    ``master``.

    With none of the three: loopback, as nobody else is to be reached. Raises ConfigError.
    """
    interfaces = libc.interfaces()
    if host is not None:
        return _by_host(host, interfaces)
    targets = resolve(master) if master is not None else []
    if pattern:
        return _by_pattern(pattern, targets, interfaces)
    if master is None:
        return _choice(_owner("127.0.0.1", interfaces), "no master was given, so only this host is reached")
    return _by_route(master, targets, interfaces)


def choose_all(
    pattern: str, paths: int, *, master: str | None = None, host: str | None = None
) -> list[Choice]:
    """The interface and address of each path: where ``pattern`` lists several with commas, those that are up take turns in its
    order; else all paths have the one that ``choose`` finds. Raises ConfigError."""
    first = choose(pattern, master=master, host=host)
    if host is not None or paths == 1 or pattern.startswith("^") or len(_names(pattern)) < 2:
        return [first] * paths
    interfaces = libc.interfaces()
    exact = "=" if pattern.startswith("=") else ""
    found: dict[str, Choice] = {}
    for name in _names(pattern):
        fit = [item for item in _named(exact + name, interfaces) if _usable(item, first.family)]
        for item in fit:
            if is_loopback(item.host) and not is_loopback(first.host):
                continue
            found.setdefault(item.host, _choice(item, f"DBLP_IFNAME={pattern} lists it"))
    choices = list(found.values())
    return [choices[path % len(choices)] for path in range(paths)]


def resolve(master: str) -> list[str]:
    """Numeric addresses of a host, in the resolver's order. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(master, DISCARD_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"the master {master!r} cannot be resolved ({reason}): "
            f"check MASTER_ADDR, /etc/hosts and DNS on this host"
        ) from None
    hosts = [libc.with_scope(str(info[4][0]), int(info[4][3]) if len(info[4]) > 3 else 0) for info in found]
    return list(dict.fromkeys(hosts))


def route_source(target: str) -> str | None:
    """The local address from which the kernel would send to ``target`` (numeric); None without a route."""
    family = family_of(target)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(sockaddr(target, DISCARD_PORT, family))
            name = sock.getsockname()
    except OSError:
        return None
    return libc.with_scope(name[0], name[3] if len(name) > 3 else 0)


def matches(pattern: str, name: str) -> bool:
    """Whether ``DBLP_IFNAME`` takes an interface by name: a comma-separated list of prefixes; ``=`` in front: exact
    names; ``^`` in front: all but these (the rules of NCCL_SOCKET_IFNAME)."""
    exclude = pattern.startswith("^")
    exact = pattern.removeprefix("^").startswith("=")
    names = _names(pattern)
    hit = name in names if exact else any(name.startswith(part) for part in names)
    return hit is not exclude


def _names(pattern: str) -> list[str]:
    """What the pattern lists."""
    listed = pattern.removeprefix("^").removeprefix("=").split(",")
    return [part.strip() for part in listed if part.strip()]


def _named(pattern: str, interfaces: Sequence[Interface]) -> list[Interface]:
    """Interfaces that ``DBLP_IFNAME`` takes, by name or, each by itself, by a numeric address of theirs."""
    by_name = [interface for interface in interfaces if matches(pattern, interface.name)]
    if pattern.startswith("^"):
        return by_name
    return [*by_name, *(_owner(name, interfaces) for name in _names(pattern) if _is_address(name))]


def _is_address(text: str) -> bool:
    try:
        ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a numeric address never leaves the host."""
    return ip_address(host.partition("%")[0]).is_loopback


def family_of(host: str) -> socket.AddressFamily:
    """Family of a numeric address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def sockaddr(host: str, port: int, family: int) -> tuple[str, int] | tuple[str, int, int, int]:
    """What Python's socket calls want for a numeric address (the scope as an index)."""
    bare, _, scope = host.partition("%")
    if family != socket.AF_INET6:
        return (bare, port)
    return (bare, port, 0, libc.scope_index(scope))


def mtu_of(ifname: str) -> int:
    """MTU of an interface, bytes (SIOCGIFMTU). Raises ConfigError if it does not exist."""
    request = struct.pack("16si12x", ifname.encode(), 0)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            answer = fcntl.ioctl(sock, SIOCGIFMTU, request)
    except OSError as error:
        raise ConfigError(f"the MTU of interface {ifname!r} cannot be read: {error.strerror}") from None
    return int(struct.unpack("16si12x", answer)[1])


def describe(interfaces: Sequence[Interface]) -> str:
    """Interfaces with their addresses, for error messages: ``eth0 (192.0.2.2, fd00::2), lo (127.0.0.1)``."""
    table: dict[str, list[str]] = {}
    for interface in interfaces:
        table.setdefault(interface.name, []).extend([interface.host] if interface.host else [])
    return ", ".join(f"{name} ({', '.join(hosts) or 'no address'})" for name, hosts in table.items())


def _by_host(host: str, interfaces: Sequence[Interface]) -> Choice:
    if not _is_address(host):
        raise ConfigError(f"{host!r} is no numeric address; this host has {describe(interfaces)}")
    return _choice(_owner(host, interfaces), f"the address {host} was asked for")


def _by_route(master: str, targets: Sequence[str], interfaces: Sequence[Interface]) -> Choice:
    for target in targets:
        source = route_source(target)
        if source is None:
            continue
        if is_loopback(target) and not _says_loopback(master):
            return _own_name(master, target, interfaces)
        shown = master if target == master else f"{master} ({target})"
        return _choice(_owner(source, interfaces), f"it is on the route to the master {shown}")
    raise ConfigError(
        f"no route leads to the master {master} ({', '.join(targets)}); this host has "
        f"{describe(interfaces)}. Check MASTER_ADDR, or name an interface in DBLP_IFNAME"
    )


def _own_name(master: str, target: str, interfaces: Sequence[Interface]) -> Choice:
    """The master's name leads to loopback: on Debian /etc/hosts maps a host's own name to 127.0.1.1, and only
    there."""
    outside = route_source(OUTSIDE[family_of(target)])
    if outside is None or is_loopback(outside):
        return _choice(
            _owner(target, interfaces), f"{master} is this host ({target}), which has no way outside"
        )
    why = f"{master} is this host's own name ({target}): other hosts reach it on the default route"
    return _choice(_owner(outside, interfaces), why)


def _by_pattern(pattern: str, targets: Sequence[str], interfaces: Sequence[Interface]) -> Choice:
    named = _named(pattern, interfaces)
    if not named:
        raise ConfigError(
            f"DBLP_IFNAME={pattern!r} fits no interface of this host: it has {describe(interfaces)}"
        )
    families = [family_of(target) for target in targets] or [socket.AF_INET, socket.AF_INET6]
    fit = [item for family in dict.fromkeys(families) for item in named if _usable(item, family)]
    if not fit:
        wanted = " or ".join(
            "IPv6" if item == socket.AF_INET6 else "IPv4" for item in dict.fromkeys(families)
        )
        raise ConfigError(
            f"DBLP_IFNAME={pattern!r} fits {describe(named)}, but none is up with an {wanted} address, "
            f"which reaching the master needs"
        )
    fit = [
        item for item in fit if not is_loopback(item.host)
    ] or fit  # loopback only if nothing else is named
    if is_loopback(fit[0].host) and targets and not any(is_loopback(target) for target in targets):
        raise ConfigError(
            f"DBLP_IFNAME={pattern!r} names a loopback interface ({fit[0].name}), "
            f"but the master {targets[0]} is another host"
        )
    routed = {route_source(target) for target in targets}
    best = next((item for item in fit if item.host in routed), fit[0])
    return _choice(best, f"DBLP_IFNAME={pattern} names it")


def _usable(interface: Interface, family: int) -> bool:
    return interface.up and bool(interface.host) and family_of(interface.host) == family


def _owner(host: str, interfaces: Sequence[Interface]) -> Interface:
    """The interface that has ``host``; for 127.0.0.0/8 the loopback interface, which answers to all of it."""
    for interface in interfaces:
        if host in (interface.host, interface.host.partition("%")[0]):
            return interface
    for interface in interfaces:
        if _usable(interface, family_of(host)) and is_loopback(host) and is_loopback(interface.host):
            return Interface(interface.name, host, interface.up)
    raise ConfigError(f"{host} is no address of this host: it has {describe(interfaces)}")


def _says_loopback(master: str) -> bool:
    """Whether the master was written as loopback by someone who means one host."""
    try:
        return is_loopback(master)
    except ValueError:
        return master.rstrip(".").lower() in ("localhost", "ip6-localhost", "localhost.localdomain")


def _choice(interface: Interface, why: str) -> Choice:
    family = family_of(interface.host)
    return Choice(
        host=interface.host, ifname=interface.name, mtu=mtu_of(interface.name), family=family, why=why
    )
