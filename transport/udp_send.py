"""Sending bursts on one UDP socket: one system call a burst, with fallbacks that are found at run time.

Theory of operation. A *template* is a block of memory that holds everything a sendmsg needs for one (address,
class, segment): msghdr, iovec, sockaddr and control messages, so a burst only patches the iovec. Three ways
exist, tried in this order and left for good when the kernel refuses one:

    GSO       one sendmsg with UDP_SEGMENT: the kernel (or the NIC) cuts the burst into datagrams
    SENDMMSG  one sendmmsg of as many msghdrs as there are datagrams
    SENDTO    one sendmsg a datagram, in a Python loop: only where sendmmsg is missing

A GSO probe that passes proves little: a device without checksum offload refuses with EIO at the first real
burst.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import logging
import socket
import struct

import numpy as np

from dblp.errors import ClosedError, ConfigError
from dblp.transport import libc
from dblp.transport.burst import TRAIN_BURSTS, Train
from dblp.transport.libc import MSG_DONTWAIT
from dblp.transport.port import Address, Burst, Ecn

logger = logging.getLogger(__name__)

MAX_SEGMENTS = 64
"""Datagrams a system call: UDP_MAX_SEGMENTS of kernels before 6.9, and the rows of our sendmmsg array."""
MAX_TEMPLATES = 4096
"""Templates kept (about 400 bytes each); beyond that, all are made anew. 128 peers x 4 classes x 8 sizes
fit."""

DSCP = (48, 34, 18, 8)
"""DSCP of class 0 to 3: CS6 (network control: critical chunks and feedback), AF41, AF21, CS1 (lower effort,
lost first where switches look). RFC 4594, RFC 8622. The ECN bits beside it are the congestion control's choice."""

GSO_REFUSED = frozenset({errno.EIO, errno.EINVAL, errno.EMSGSIZE, errno.ENOPROTOOPT, errno.EOPNOTSUPP})
MMSG_REFUSED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP})
BLOCKED = frozenset({errno.EAGAIN, errno.EWOULDBLOCK})
REFUSED = frozenset(
    {
        errno.ECONNREFUSED,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.ENETDOWN,
        errno.EPROTO,
        errno.ENOPROTOOPT,
        errno.EACCES,
        errno.EPERM,
        errno.EMSGSIZE,
        errno.EADDRNOTAVAIL,
    }
)
"""What ICMP, routing or a packet filter may answer. None is fatal: the peer may not be up yet, or come
back."""

_NAME_AT, _CONTROL_AT, _TEMPLATE_BYTES = 80, 112, 160
_MSGHDR = struct.Struct("=QIxxxxQQQQixxxx")
_PATCH = struct.Struct("=QQ").pack_into
_IOV_AT = 64


class Way(enum.IntEnum):
    """How bursts leave; larger is faster."""

    SENDTO = 0
    SENDMMSG = 1
    GSO = 2


class Outcome(enum.Enum):
    """What stopped a burst."""

    BLOCKED = "blocked"
    """The socket's send buffer is full: wait until it is writable."""
    NO_BUFFERS = "no buffers"
    """The device's queue is full (ENOBUFS): no event tells when it drains, so a timer must."""
    ERROR = "error"
    """The kernel reported a refusal (ICMP, routing, filter), most often of an earlier burst; nothing was
    taken."""
    HELD = "held"
    """Part of it left, the rest was copied and goes first at the next ``flush``: for the caller, it was
    taken."""


class Template:
    """A prepared sendmsg for one (address, class, segment); ``segment`` 0 is without UDP_SEGMENT."""

    __slots__ = ("block", "control", "control_bytes", "name", "name_bytes", "pointer")

    def __init__(self, address: Address, cls: int, segment: int, family: int, ecn: Ecn) -> None:
        name = libc.encode_sockaddr(address, family)
        control = encode_control(cls, segment, family, ecn)
        self.block = bytearray(_TEMPLATE_BYTES)
        self.pointer = ctypes.addressof(ctypes.c_char.from_buffer(self.block))
        self.name, self.name_bytes = self.pointer + _NAME_AT, len(name)
        self.control, self.control_bytes = self.pointer + _CONTROL_AT, len(control)
        self.block[_NAME_AT : _NAME_AT + len(name)] = name
        self.block[_CONTROL_AT : _CONTROL_AT + len(control)] = control
        iov = self.pointer + _IOV_AT
        _MSGHDR.pack_into(self.block, 0, self.name, len(name), iov, 1, self.control, len(control), 0)


class TrainTemplate:
    """A prepared sendmmsg for trains of one (address, class, segment) whose iovecs always lie at the same place."""

    __slots__ = ("chunks", "pointer", "template", "words")

    def __init__(self, template: Template, train: Train) -> None:
        self.template = template  # owns the address and the control messages
        self.chunks = train.chunks
        rows = np.arange(TRAIN_BURSTS, dtype=np.uint64)
        self.words = libc.aligned(TRAIN_BURSTS * libc.MMSGHDR_BYTES).view(np.uint64).reshape(TRAIN_BURSTS, -1)
        self.words[:, libc.WORD_NAME] = template.name
        self.words[:, libc.WORD_NAMELEN] = template.name_bytes
        self.words[:, libc.WORD_IOV] = train.iov_pointer + rows * np.uint64(self.chunks * 32)
        self.words[:, libc.WORD_IOVLEN] = 2 * self.chunks
        self.words[:, libc.WORD_CONTROL] = template.control
        self.words[:, libc.WORD_CONTROLLEN] = template.control_bytes
        self.pointer = libc.address_of(self.words)


def encode_control(cls: int, segment: int, family: int, ecn: Ecn = Ecn.NOT_ECT) -> bytes:
    """Control messages of a burst: the class's DSCP and the ECN bits, and UDP_SEGMENT if ``segment`` is not 0 (48 bytes at
    most)."""
    tos = (DSCP[cls] << 2 | ecn).to_bytes(4, "little")
    if family == socket.AF_INET6:
        control = libc.encode_cmsg(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, tos)
    else:
        control = libc.encode_cmsg(socket.IPPROTO_IP, socket.IP_TOS, tos)
    if segment:
        control = libc.encode_cmsg(libc.SOL_UDP, libc.UDP_SEGMENT, segment.to_bytes(2, "little")) + control
    return control


class Sender:
    """Sends bursts on one socket. ``way`` only ever falls; ``fallbacks`` counts the calls given up. ``ecn``: of all that it
    sends."""

    def __init__(self, sock: socket.socket, way: Way, calls: libc.Calls, ecn: Ecn = Ecn.NOT_ECT) -> None:
        self._ecn = ecn
        self._fd = sock.fileno()
        self._family = sock.family
        self._sendmsg, self._sendmmsg = calls.sendmsg, calls.sendmmsg
        self._gso = way is Way.GSO
        self._mmsg = way is not Way.SENDTO
        self._templates: dict[tuple[Address, int, int], Template] = {}
        self._trains: dict[tuple[Address, int, int, int], TrainTemplate] = {}
        self._many: _Many | None = None
        self._rest: Burst | None = None
        self.datagrams = 0
        self.bytes = 0
        self.syscalls = 0
        self.fallbacks = 0
        self.errno = 0  # of the last outcome that is not None

    @property
    def way(self) -> Way:
        """The fastest way that the kernel has not refused."""
        if self._gso:
            return Way.GSO
        return Way.SENDMMSG if self._mmsg else Way.SENDTO

    def send(self, burst: Burst) -> Outcome | None:
        """Send a burst; None if it left, else what stopped it. Raises ClosedError, ConfigError, OSError."""
        if self._rest is not None:
            return Outcome.BLOCKED
        nbytes = len(burst.data)
        segment = burst.segment if nbytes > burst.segment else 0
        if segment and not self._gso:
            return self._send_many(burst)
        template = self._templates.get((burst.address, burst.cls, segment)) or self._template(burst, segment)
        _PATCH(template.block, _IOV_AT, burst.pointer or libc.address_of(burst.data), nbytes)
        self.syscalls += 1
        if self._sendmsg(self._fd, template.pointer, MSG_DONTWAIT) < 0:
            return self._stopped(burst, segment)
        self.bytes += nbytes
        self.datagrams += -(-nbytes // segment) if segment else 1
        return None

    def send_train(self, train: Train) -> int:
        """Send a train by one sendmmsg; returns how many of its bursts left, -1 if this socket does not send by GSO (any more).
        If not all did, ``errno`` says why."""
        if not self._gso or self._rest is not None:
            self.errno = errno.EAGAIN if self._gso else 0
            return 0 if self._gso else -1
        key = (train.address, train.cls, train.segment, train.iov_pointer)
        ready = self._trains.get(key)
        if ready is None:
            if len(self._trains) >= MAX_TEMPLATES:
                self._trains.clear()
            template = Template(train.address, train.cls, train.segment, self._family, self._ecn)
            ready = self._trains[key] = TrainTemplate(template, train)
        self.syscalls += 1
        count = self._sendmmsg(self._fd, ready.pointer, train.bursts, MSG_DONTWAIT)
        if count < train.bursts:
            self.errno = ctypes.get_errno() if count < 0 else errno.EAGAIN
            count = max(count, 0)
        self.datagrams += count * ready.chunks
        self.bytes += count * ready.chunks * train.segment
        return count

    def flush(self) -> Outcome | None:
        """Send what an earlier, partly taken burst left over; None if nothing is left, else as ``send``."""
        if self._rest is None:
            return None
        burst, self._rest = self._rest, None
        outcome = self.send(burst)
        if outcome is None or outcome is Outcome.HELD:
            return outcome
        self._rest = burst
        return outcome

    def drop(self) -> int:
        """Forget the rest of a partly taken burst; how many datagrams that loses."""
        burst, self._rest = self._rest, None
        return burst.count if burst is not None else 0

    def close(self) -> None:
        """Later sends raise ClosedError, whoever got the descriptor's number by then."""
        self._fd = -1

    def _template(self, burst: Burst, segment: int) -> Template:
        if len(self._templates) >= MAX_TEMPLATES:
            self._templates.clear()
        template = Template(burst.address, burst.cls, segment, self._family, self._ecn)
        self._templates[burst.address, burst.cls, segment] = template
        return template

    def _stopped(self, burst: Burst, segment: int) -> Outcome | None:
        code = ctypes.get_errno()
        if segment and code in GSO_REFUSED:
            return self._without_gso(burst, code)
        return self._outcome(code, burst)

    def _without_gso(self, burst: Burst, code: int) -> Outcome | None:
        """The kernel refused a super-packet. Only if the same datagrams pass one by one was GSO at fault."""
        outcome = self._send_many(burst)
        if outcome is None and burst.count <= MAX_SEGMENTS:
            self._gso = False
            self._give_up("UDP_SEGMENT", code)
        return outcome

    def _give_up(self, call: str, code: int) -> None:
        self.fallbacks += 1
        name = errno.errorcode.get(code, str(code))
        logger.warning("%s is refused here (%s): bursts now leave by %s", call, name, self.way.name)

    def _send_many(self, burst: Burst) -> Outcome | None:
        template = self._templates.get((burst.address, burst.cls, 0)) or self._template(burst, 0)
        done, nbytes = 0, len(burst.data)
        pointer = burst.pointer or libc.address_of(burst.data)
        while done < nbytes:
            part = min(nbytes - done, MAX_SEGMENTS * burst.segment)
            taken = self._send_part(template, pointer + done, part, burst.segment)
            done += taken
            if taken < part:
                return self._partly(burst, done, ctypes.get_errno())
        return None

    def _send_part(self, template: Template, pointer: int, nbytes: int, segment: int) -> int:
        """Send up to 64 datagrams; bytes taken. Where fewer than all were, errno says why."""
        if self._many is None:
            self._many = _Many()
        count = self._many.fill(template, pointer, nbytes, segment)
        taken = 0
        while (
            taken < count
        ):  # the kernel reports an error only where it is a call's first datagram: so ask again
            more = self._call_many(self._many.pointer + taken * libc.MMSGHDR_BYTES, count - taken)
            if more < 0:
                break
            taken += more
        sent = min(nbytes, taken * segment)
        self.datagrams += taken
        self.bytes += sent
        return sent

    def _call_many(self, pointer: int, count: int) -> int:
        """Datagrams taken of those in ``count`` mmsghdrs, or -1 and errno."""
        if self._mmsg:
            self.syscalls += 1
            taken = int(self._sendmmsg(self._fd, pointer, count, MSG_DONTWAIT))
            if taken >= 0 or ctypes.get_errno() not in MMSG_REFUSED:
                return taken
            self._mmsg = False
            self._give_up("sendmmsg", ctypes.get_errno())
        for index in range(count):  # the last resort, off the hot path
            self.syscalls += 1
            if self._sendmsg(self._fd, pointer + index * libc.MMSGHDR_BYTES, MSG_DONTWAIT) < 0:
                return index or -1
        return count

    def _partly(self, burst: Burst, done: int, code: int) -> Outcome | None:
        """A burst of which ``done`` bytes left: the rest is copied and goes first, so that nothing leaves
        twice."""
        outcome = self._outcome(code, burst)
        if not done:
            return outcome
        self._rest = Burst(burst.data[done:].copy(), burst.segment, burst.path, burst.cls, burst.address)
        return Outcome.HELD

    def _outcome(self, code: int, burst: Burst) -> Outcome:
        self.errno = code
        if code in BLOCKED:
            return Outcome.BLOCKED
        if code == errno.ENOBUFS:
            return Outcome.NO_BUFFERS
        if code in REFUSED:
            return Outcome.ERROR
        if self._fd < 0:
            raise ClosedError("this UDP port is closed: nothing can be sent on it")
        raise OSError(
            code, f"{errno.errorcode.get(code, code)} on sending {len(burst.data)} bytes to {burst.address}"
        )


class _Many:
    """The arrays of one sendmmsg: up to 64 datagrams of one template."""

    def __init__(self) -> None:
        self._iovecs = libc.aligned(MAX_SEGMENTS * 16).view(np.uint64).reshape(MAX_SEGMENTS, 2)
        self._headers = (
            libc.aligned(MAX_SEGMENTS * libc.MMSGHDR_BYTES).view(np.uint64).reshape(MAX_SEGMENTS, 8)
        )
        self.pointer = libc.address_of(self._headers.view(np.uint8).reshape(-1))
        rows = np.arange(MAX_SEGMENTS, dtype=np.uint64)
        iovecs = libc.address_of(self._iovecs.view(np.uint8).reshape(-1))
        self._headers[:, libc.WORD_IOV] = iovecs + rows * np.uint64(16)
        self._headers[:, libc.WORD_IOVLEN] = 1
        self._rows = rows
        self._template: Template | None = None

    def fill(self, template: Template, pointer: int, nbytes: int, segment: int) -> int:
        """Point the rows at the datagrams of a burst; the number of datagrams (at most 64)."""
        if nbytes > MAX_SEGMENTS * segment:
            raise ConfigError(
                f"a part of {nbytes} bytes in datagrams of {segment} is more than {MAX_SEGMENTS} datagrams"
            )
        if template is not self._template:
            self._aim(template)
        count = -(-nbytes // segment)
        np.multiply(self._rows, segment, out=self._iovecs[:, 0])
        self._iovecs[:, 0] += np.uint64(pointer)
        self._iovecs[:, 1] = segment
        self._iovecs[count - 1, 1] = nbytes - (count - 1) * segment
        return count

    def _aim(self, template: Template) -> None:
        words = self._headers
        words[:, libc.WORD_NAME], words[:, libc.WORD_NAMELEN] = template.name, template.name_bytes
        words[:, libc.WORD_CONTROL], words[:, libc.WORD_CONTROLLEN] = template.control, template.control_bytes
        self._template = template
