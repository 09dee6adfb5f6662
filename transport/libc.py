"""The C library's batch calls for UDP: constants, memory layouts and socket addresses, through ctypes.

Theory of operation. A burst costs one system call, so what Python adds to it must stay near a microsecond.
Three things make that so: the call's structures live in memory that is laid out once and only patched; their
addresses are plain integers that were computed once (``ndarray.ctypes.data`` alone costs 1.4 us); and the
calls are made through ``ctypes.PyDLL``, which keeps the GIL. Keeping it is right because every socket here is
non-blocking and a call lasts microseconds, while giving it up costs a whole switch interval at each call
beside a busy main thread.

Layouts are those of 64-bit Linux (glibc and musl agree on a little-endian machine); ``require_linux64``
checks.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dblp.errors import ConfigError, UnsupportedError
from dblp.transport.port import Address, Bytes

# Linux socket options that Python's socket module does not name (include/uapi/linux/udp.h,
# asm-generic/socket.h, in.h).
SOL_UDP = 17
UDP_SEGMENT = 103
UDP_GRO = 104
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33
SO_TIMESTAMPNS = 35
SO_MEMINFO = 55
SK_MEMINFO_DROPS = 8
"""Index of the socket's drop count in what SO_MEMINFO returns (nine uint32)."""
IP_MTU_DISCOVER = 10
IP_RECVERR = 11
IP_RECVTOS = 13
IPV6_MTU_DISCOVER = 23
IPV6_RECVERR = 25
IPV6_RECVTCLASS = 66
PMTUDISC_DO = 2
"""Never fragment; same value for IPv4 and IPv6."""
MSG_DONTWAIT = 0x40
MSG_ERRQUEUE = 0x2000

MMSGHDR_BYTES = 64
"""struct mmsghdr: a msghdr (name*, namelen, (pad), iov*, iovlen, control*, controllen, flags, (pad)), then
msg_len and padding: eight 64-bit words, which is how the arrays here see it."""
WORD_NAME, WORD_NAMELEN, WORD_IOV, WORD_IOVLEN, WORD_CONTROL, WORD_CONTROLLEN, WORD_FLAGS, WORD_LEN = range(8)
CMSG_HEADER_BYTES = 16
"""struct cmsghdr: len (8), level (4), type (4); data follows, padded to 8 bytes."""
SOCKADDR_BYTES = {socket.AF_INET: 16, socket.AF_INET6: 28}
PAGE_BYTES = 4096
_MAPPED_BYTES = 1 << 20
"""From here on memory is the kernel's own: a mapping costs two system calls and fresh pages."""

HOLD_GIL = True
"""Call libc without releasing the GIL; False releases it around each call (tests/benchmarks/udp_port.py
measures both)."""

_SOCKADDR_IN = struct.Struct("=H2s4s8x")
_SOCKADDR_IN6 = struct.Struct("=H2s4x16sI")
_CMSG = struct.Struct("=Qii")


class Calls(NamedTuple):
    """libc's functions, as ctypes sees them: each returns -1 and leaves the reason in
    ``ctypes.get_errno()``."""

    sendmsg: Callable[[int, int, int], int]
    """(fd, address of a msghdr, flags) -> bytes"""
    sendmmsg: Callable[[int, int, int, int], int]
    """(fd, address of mmsghdrs, how many, flags) -> datagrams"""
    recvmmsg: Callable[[int, int, int, int, int | None], int]
    """(fd, address of mmsghdrs, how many, flags, timeout) -> datagrams"""


def load(*, hold_gil: bool = HOLD_GIL) -> Calls:
    """Bind the functions. Raises UnsupportedError where this module's layouts don't hold."""
    require_linux64()
    lib = (ctypes.PyDLL if hold_gil else ctypes.CDLL)(None, use_errno=True)
    sendmsg, sendmmsg, recvmmsg = lib.sendmsg, lib.sendmmsg, lib.recvmmsg
    sendmsg.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    sendmsg.restype = ctypes.c_ssize_t
    sendmmsg.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int]
    recvmmsg.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p]
    return Calls(sendmsg, sendmmsg, recvmmsg)


def require_linux64() -> None:
    """Raise UnsupportedError where the layouts of this module don't hold."""
    if sys.platform != "linux" or struct.calcsize("P") != 8 or sys.byteorder != "little":
        raise UnsupportedError(
            f"the UDP transport needs 64-bit little-endian Linux; this is {sys.platform}, "
            f"{8 * struct.calcsize('P')} bits, {sys.byteorder}-endian"
        )


def aligned(nbytes: int) -> Bytes:
    """Zeroed memory (uint8, 1-D) that starts at a page; pages are touched only when used.

    Alignment is worth a lot: on a CPU whose kernel copies by ``rep movsb`` (erms) a 64 KB super-packet took
    37 us to receive at numpy's own alignment (16 bytes past a page) and 4 us at a multiple of 64.
    """
    if nbytes >= _MAPPED_BYTES:
        return _mapped(nbytes)
    raw = np.zeros(nbytes + PAGE_BYTES, np.uint8)
    start = -address_of(raw) % PAGE_BYTES
    return raw[start : start + nbytes]


def _mapped(nbytes: int) -> Bytes:
    """Memory of the kernel's own, given back when the array goes. malloc keeps so much for its next caller from the first time
    that it is freed, and then clears all of it for each: 17 MB of memory touched for every group that is made."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if advice := getattr(mmap, "MADV_HUGEPAGE", None):  # as numpy asks for its own large arrays
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(advice)
    return np.frombuffer(memory, np.uint8)


def address_of(array: npt.NDArray[Any]) -> int:
    """Address of an array's first byte: 0.5 us (1.4 us for one that cannot be written), so keep it where you
    can."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except (TypeError, ValueError):  # read-only, or empty
        return int(array.ctypes.data)


def encode_cmsg(level: int, kind: int, data: bytes) -> bytes:
    """One control message, padded so that another can follow."""
    padding = -len(data) % 8
    return _CMSG.pack(CMSG_HEADER_BYTES + len(data), level, kind) + data + bytes(padding)


def encode_sockaddr(address: Address, family: int) -> bytes:
    """The kernel's form of an address. Raises ConfigError for one of another family, or port 0."""
    if not 0 < address.port < 65_536:
        raise ConfigError(f"{address}: port {address.port} cannot be sent to; ports are 1..65535")
    host, _, scope = address.host.partition("%")
    try:
        packed = socket.inet_pton(family, host)
        index = scope_index(scope)
    except (OSError, ValueError):
        name = "IPv6" if family == socket.AF_INET6 else "IPv4"
        raise ConfigError(
            f"{address.host!r} is no numeric {name} address, and this rank's sockets are {name}: "
            f"all ranks must use one family"
        ) from None
    port = address.port.to_bytes(2, "big")
    if family == socket.AF_INET:
        return _SOCKADDR_IN.pack(family, port, packed)
    return _SOCKADDR_IN6.pack(family, port, packed, index)


def decode_sockaddr(raw: bytes) -> Address:
    """The address in a struct sockaddr_in or sockaddr_in6 (trailing bytes are ignored)."""
    family = int.from_bytes(raw[:2], sys.byteorder)
    if family == socket.AF_INET:
        _, port, packed = _SOCKADDR_IN.unpack_from(raw)
        return Address(socket.inet_ntop(family, packed), int.from_bytes(port, "big"))
    _, port, packed, index = _SOCKADDR_IN6.unpack_from(raw)
    host = with_scope(socket.inet_ntop(socket.AF_INET6, packed), index)
    return Address(host, int.from_bytes(port, "big"))


def with_scope(host: str, index: int) -> str:
    """``host`` with ``%interface`` where it is link-local; other addresses need no scope to be reached."""
    if not index or "%" in host or not host.lower().startswith("fe80"):
        return host
    try:
        return f"{host}%{socket.if_indextoname(index)}"
    except OSError:  # the interface went away
        return f"{host}%{index}"


def scope_index(scope: str) -> int:
    """Index of an interface named after ``%``; 0 for an empty scope. Raises OSError for an unknown one."""
    if not scope:
        return 0
    return int(scope) if scope.isdigit() else socket.if_nametoindex(scope)


class Interface(NamedTuple):
    """One address of a network interface; ``host`` is empty for an interface that has none."""

    name: str
    host: str
    up: bool


class _Ifaddrs(ctypes.Structure):
    """struct ifaddrs of getifaddrs(3), up to the last field that is read."""

    next: ctypes.c_void_p
    name: bytes
    flags: int
    addr: int | None


_Ifaddrs._fields_ = [
    ("next", ctypes.c_void_p),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("addr", ctypes.c_void_p),
]
IFF_UP = 1


def interfaces() -> list[Interface]:
    """Every IPv4 and IPv6 address of this host's interfaces, and those that have none. Raises OSError."""
    lib = ctypes.CDLL(None, use_errno=True)
    head = ctypes.c_void_p()
    if lib.getifaddrs(ctypes.byref(head)) < 0:
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    try:
        found = list(_walk(head.value))
    finally:
        lib.freeifaddrs(head)
    named = {item.name for item in found if item.host}
    return [item for item in found if item.host or item.name not in named]


def _walk(pointer: int | None) -> Iterator[Interface]:
    bare: set[str] = set()
    while pointer:
        entry = _Ifaddrs.from_address(pointer)
        name, up = entry.name.decode(), bool(entry.flags & IFF_UP)
        family = ctypes.c_uint16.from_address(entry.addr).value if entry.addr else 0
        if entry.addr and family in (socket.AF_INET, socket.AF_INET6):
            size = SOCKADDR_BYTES[socket.AddressFamily(family)]
            yield Interface(name, decode_sockaddr(ctypes.string_at(entry.addr, size)).host, up)
        elif name not in bare:
            bare.add(name)
            yield Interface(name, "", up)
        pointer = entry.next  # type: ignore[assignment]  # ctypes reads a c_void_p as int or None
