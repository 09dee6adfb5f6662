"""The UDP port: one non-blocking socket a path on the running asyncio loop, one system call a burst.

Theory of operation. ``udp_send`` and ``udp_receive`` make the calls; this module owns the sockets and their
options, waits on the loop (plain asyncio or uvloop), and turns what the kernel reports into counters.
Waiting: EAGAIN ends when the socket is writable, ENOBUFS only by a timer. ICMP errors are asked for
(IP_RECVERR), as a peer that is not up yet or died shows there first; they are counted by address and never
fatal. Times are ``time.monotonic()`` seconds: the clock of asyncio's loop, and of uvloop's, which rounds it
to milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dblp.errors import ClosedError, LocalError
from dblp.transport import libc, netif
from dblp.transport.burst import Train
from dblp.transport.config import TransportConfig
from dblp.transport.congestion import REGISTRY
from dblp.transport.port import Address, Burst, Ecn, PortFacts, Slab
from dblp.transport.udp_receive import Receiver
from dblp.transport.udp_send import BLOCKED, REFUSED, Outcome, Sender, Way
from dblp.transport.udp_socket import bind, probe, snmp_receive_errors, socket_drops

logger = logging.getLogger(__name__)

DRAIN_CALLS = 4
"""recvmmsg calls a callback: at most 4 MiB of super-packets, under a millisecond, before other work gets its
turn."""
NO_BUFFERS_RETRY_S = 0.001
"""Wait after ENOBUFS: the finest that the loop's timers offer; a full 1000-packet queue drains 125 KB in it
at 1 Gb/s."""
MAX_REFUSED = 4096
"""Addresses whose refusals are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortCounters:
    """What a port has done so far."""

    datagrams_sent: int
    """Datagrams that the kernel took."""
    datagrams_received: int
    """Datagrams that were handed over."""
    bytes_sent: int
    """UDP payload bytes of ``datagrams_sent``."""
    bytes_received: int
    """UDP payload bytes of ``datagrams_received``."""
    send_syscalls: int
    receive_syscalls: int
    kernel_drops: int
    """Datagrams (or super-packets) that found the receive buffer full; the kernel counts them."""
    refused: int
    """ICMP errors that came back: port, host or network unreachable."""
    lost_on_send: int
    """Datagrams that the kernel would not send (no route, a filter, too long): lost, as on a network."""
    blocked: int
    """Bursts that met a full send buffer (EAGAIN)."""
    no_buffers: int
    """Bursts that met a full device queue (ENOBUFS)."""
    dropped_length: int
    """Received datagrams that were empty or longer than ``datagram_bytes``: dropped."""
    fallbacks: int
    """How often GSO or sendmmsg was given up for a slower way."""


@dataclass(frozen=True, slots=True)
class Refusals:
    """ICMP errors for one address."""

    count: int = 0
    last: float = 0.0
    """When the last one was read, ``time.monotonic()``; 0: never."""


class _Path:
    """One socket and what is known of it."""

    __slots__ = ("blocked", "fd", "index", "sender", "sock", "waiting")

    def __init__(self, sock: socket.socket, index: int, sender: Sender) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.index = index
        self.sender = sender
        self.waiting = False  # for writability or for the ENOBUFS timer
        self.blocked = False  # a send returned False since


class UdpPort:
    """``transport.port.Port`` on UDP sockets, one a path. All have addresses of one family."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        choices: Sequence[netif.Choice],
        config: TransportConfig,
        way: Way,
        calls: libc.Calls,
    ) -> None:
        self.choices = tuple(choices)
        self._family = choices[0].family
        ecn = REGISTRY[config.congestion].ecn
        senders = [Sender(sock, way, calls, Ecn.ECT if ecn else Ecn.NOT_ECT) for sock in sockets]
        self._paths = [_Path(sock, index, senders[index]) for index, sock in enumerate(sockets)]
        self._senders = [path.sender for path in self._paths]
        self._receiver = Receiver(self._family, calls, config.datagram_bytes, marks=ecn)
        self._addresses = tuple(_address(sock) for sock in sockets)
        self._facts = PortFacts(
            receive_buffer_bytes=min(
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) for sock in sockets
            ),
            max_datagram_bytes=min(choice.max_datagram_bytes(config.datagram_bytes) for choice in choices),
            whole_bursts=way is Way.GSO and probe(sockets[0]).gro,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timers: set[asyncio.TimerHandle] = set()
        self._on_batch: Callable[[Sequence[Slab]], None] = _ignore
        self._on_writable: Callable[[], None] = _nothing
        self._refused: dict[Address, Refusals] = {}
        self._refused_total = self._lost_on_send = self._blocked = self._no_buffers = 0
        self._snmp_drops = snmp_receive_errors()
        self._closed_drops = 0
        self._closed = False

    @property
    def addresses(self) -> Sequence[Address]:
        """Local addresses as peers reach them, indexed by path."""
        return self._addresses

    @property
    def facts(self) -> PortFacts:
        """Buffer and datagram limits."""
        return self._facts

    @property
    def way(self) -> Way:
        """The slowest way that a path sends by."""
        return min(sender.way for sender in self._senders)

    def open(self, on_batch: Callable[[Sequence[Slab]], None], on_writable: Callable[[], None]) -> None:
        """Start to receive on the running loop. Raises ClosedError after ``close``, LocalError if open
        already."""
        if self._closed:
            raise ClosedError("this UDP port is closed; make a new one with open_port")
        if self._loop is not None:
            raise LocalError("this UDP port is open already; one port serves one endpoint")
        self._loop = asyncio.get_running_loop()
        self._on_batch, self._on_writable = on_batch, on_writable
        for path in self._paths:
            self._loop.add_reader(path.fd, self._readable, path)

    def send(self, burst: Burst) -> bool:
        """Send a burst; False if it would block: ``on_writable`` follows. What the network refuses counts as
        sent (and lost). Raises ClosedError after ``close``, ConfigError for an address of another family."""
        outcome = self._senders[burst.path].send(burst)
        return True if outcome is None else self._stopped(self._paths[burst.path], burst, outcome)

    def send_train(self, train: Train) -> int:
        """Send a train; returns how many of its bursts were taken. If not all were, try ``send`` with the others: it says
        whether they would block, and does without GSO where the kernel refuses it."""
        return max(self._senders[train.path].send_train(train), 0)

    def refused(self, address: Address) -> Refusals:
        """ICMP errors that came back from ``address``; ``Refusals()`` if none did."""
        return self._refused.get(address, _NO_REFUSALS)

    def counters(self) -> PortCounters:
        """A snapshot; reads the kernel's drop counts (one system call a path)."""
        senders, receiver = self._senders, self._receiver
        return PortCounters(
            datagrams_sent=sum(sender.datagrams for sender in senders),
            datagrams_received=receiver.datagrams,
            bytes_sent=sum(sender.bytes for sender in senders),
            bytes_received=receiver.bytes,
            send_syscalls=sum(sender.syscalls for sender in senders),
            receive_syscalls=receiver.syscalls,
            kernel_drops=self._kernel_drops(),
            refused=self._refused_total,
            lost_on_send=self._lost_on_send,
            blocked=self._blocked,
            no_buffers=self._no_buffers,
            dropped_length=receiver.dropped_length,
            fallbacks=sum(sender.fallbacks for sender in senders),
        )

    def close(self) -> None:
        """Stop and free the sockets; idempotent. Counters stay readable."""
        if self._closed:
            return
        self._closed_drops = self._kernel_drops()
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        for path in self._paths:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(path.fd)
                self._loop.remove_writer(path.fd)
            path.sender.close()
            path.sock.close()

    # Receiving

    def _readable(self, path: _Path) -> None:
        offset = time.time() - time.monotonic()
        for call in range(DRAIN_CALLS):
            received = self._receiver.receive(path.fd, path.index, offset)
            if received is None:
                if call == 0 or ctypes.get_errno() not in BLOCKED:
                    self._drain_errors(path)  # woken for an error, or for nothing: see _drain_errors
                return
            slabs, more = received
            if slabs:
                self._on_batch(slabs)
            if not more or self._closed:
                return

    def _drain_errors(self, path: _Path) -> None:
        """Read the socket's error queue: it tells which address an ICMP error is about, and fills the receive
        buffer.

        libuv stops to watch a descriptor that had an error (EPOLLERR) without a word, so the reader is set
        anew.
        """
        now = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            while True:
                raw = path.sock.recvmsg(0, 0, libc.MSG_ERRQUEUE)[3]
                self._count_refusal(raw, now)
        if self._loop is not None and not self._closed:
            self._loop.remove_reader(path.fd)
            self._loop.add_reader(path.fd, self._readable, path)
            if path.waiting:
                self._loop.remove_writer(path.fd)
                self._loop.add_writer(path.fd, self._writable, path)

    def _count_refusal(self, raw: tuple[str, int] | tuple[str, int, int, int] | None, now: float) -> None:
        self._refused_total += 1
        if not raw:  # a local error (EMSGSIZE) names nobody
            return
        address = Address(libc.with_scope(raw[0], raw[3] if len(raw) > 3 else 0), raw[1])
        if len(self._refused) >= MAX_REFUSED:
            self._refused.clear()
        self._refused[address] = Refusals(self.refused(address).count + 1, now)

    def _kernel_drops(self) -> int:
        if self._closed:
            return self._closed_drops
        drops = [socket_drops(path.sock) for path in self._paths]
        if None in drops:
            return snmp_receive_errors() - self._snmp_drops
        return sum(drop for drop in drops if drop is not None)

    # Sending, off the hot path

    def _stopped(self, path: _Path, burst: Burst, outcome: Outcome) -> bool:
        """A burst did not simply leave: wait, retry once after a reported error, or count it as lost."""
        if outcome is Outcome.HELD:
            if path.sender.errno not in REFUSED or not self._flush(path):
                self._wait(path)
            return True
        if outcome is Outcome.ERROR:
            return self._retry(path, burst)
        self._wait(path)
        path.blocked = True
        return False

    def _retry(self, path: _Path, burst: Burst) -> bool:
        """The error was most likely that of an earlier burst, which the kernel reports on the next call: try
        again."""
        self._drain_errors(path)
        outcome = path.sender.send(burst)
        if outcome is Outcome.ERROR:
            self._lose(burst.count, path.sender.errno)
            return True
        return True if outcome is None else self._stopped(path, burst, outcome)

    def _lose(self, count: int, code: int) -> None:
        if not self._lost_on_send:
            logger.warning(
                "the kernel refuses to send (%s): counted as lost", errno.errorcode.get(code, code)
            )
        self._lost_on_send += count

    def _wait(self, path: _Path) -> None:
        """Have ``_writable`` called when it is worth to try again."""
        if path.sender.errno == errno.ENOBUFS:
            self._no_buffers += 1
        else:
            self._blocked += 1
        if path.waiting:
            return
        if self._loop is None:
            raise LocalError("a burst would block before open(): open the port on a running loop first")
        path.waiting = True
        if path.sender.errno in BLOCKED:
            self._loop.add_writer(path.fd, self._writable, path)
        else:
            self._later(path)

    def _later(self, path: _Path) -> None:
        assert self._loop is not None

        def fire() -> None:
            self._timers.discard(timer)
            self._writable(path)

        timer = self._loop.call_later(NO_BUFFERS_RETRY_S, fire)
        self._timers.add(timer)

    def _writable(self, path: _Path) -> None:
        """Send what is held back; if all of it left, let the core go on."""
        assert self._loop is not None
        self._loop.remove_writer(path.fd)
        path.waiting = False
        if not self._flush(path):
            self._wait(path)
        elif path.blocked:
            path.blocked = False
            self._on_writable()

    def _flush(self, path: _Path) -> bool:
        """Send the rest of a partly taken burst; True if nothing is left. Refused twice is lost."""
        outcome = path.sender.flush()
        if outcome is None or path.sender.errno not in REFUSED:
            return outcome is None
        self._drain_errors(path)
        outcome = path.sender.flush()
        if outcome is not None and path.sender.errno in REFUSED:
            self._lose(path.sender.drop(), path.sender.errno)
            return True
        return outcome is None


_NO_REFUSALS = Refusals()


def open_port(
    config: TransportConfig,
    *,
    master: Address | None = None,
    host: str | None = None,
    way: Way = Way.GSO,
    calls: libc.Calls | None = None,
) -> UdpPort:
    """Open ``config.paths`` sockets on the interface that leads to ``master``, or on those that ``config.ifname`` lists, or
    on ``host`` where it is given.

    ``way``: the fastest way of sending to use where the kernel has it; ``calls``: libc as ``libc.load`` binds
    it. Raises ConfigError (interface, address, family).
    """
    calls = calls or libc.load()
    target = master.host if master else None
    choices = netif.choose_all(config.ifname, config.paths, master=target, host=host)
    sockets: list[socket.socket] = []
    try:
        for choice in choices:
            sockets.append(bind(choice, config))
        if way is Way.GSO and not probe(sockets[0]).gso:
            logger.warning(
                "this kernel has no UDP_SEGMENT (Linux 4.18): bursts leave by sendmmsg, several times dearer"
            )
            way = Way.SENDMMSG
        return UdpPort(sockets, choices, config, way, calls)
    except BaseException:
        for sock in sockets:
            sock.close()
        raise


def _address(sock: socket.socket) -> Address:
    name = sock.getsockname()
    return Address(libc.with_scope(name[0], name[3] if len(name) > 3 else 0), name[1])


def _ignore(slabs: Sequence[Slab]) -> None:
    """Nobody listens yet."""


def _nothing() -> None:
    """Nobody waits yet."""
