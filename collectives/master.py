"""Rendezvous over UDP on the master's port, for jobs without torch's store (``dblp.init_process_group``).

Rank 0 listens on MASTER_ADDR:MASTER_PORT for as long as the group lives; all others ask it (``registrar.py``
has the exchange). The sockets are plain asyncio datagram endpoints: this is no hot path.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

from dblp.collectives.registrar import (
    HELLO_BYTES,
    Registrar,
    pack_datagram,
    unpack_datagram,
    unpack_roster,
)
from dblp.collectives.rendezvous import Member, Roster, absent_error
from dblp.errors import DblpError, HandshakeError, VersionError
from dblp.transport.port import Address
from dblp.transport.wire import VERSION

ASK_SECONDS = 0.1
"""Interval between HELLOs: some ten a second and rank, and the most that a lost answer delays a start."""
LINGER_SECONDS = 1.0
"""After a failure rank 0 goes on telling the reason this long before it raises, so that every rank learns
it."""


class MasterRendezvous:
    """One group's meeting at ``master``. ``job`` tells jobs apart that were given one port by mistake."""

    def __init__(self, master: Address, *, job: str = "", timeout_s: float = 60.0) -> None:
        self._master = master
        self._job = job
        self._timeout_s = timeout_s
        self._place = f"{master.host}:{master.port}"
        self._transport: asyncio.DatagramTransport | None = None

    async def join(self, member: Member) -> Roster:
        """Meet the other ranks. Rank 0 must ``close`` when its group ends.

        Raises HandshakeError (unreachable master, foreign job or port in use, rank taken, world sizes
        differ), VersionError, or DeadlineError that lists the ranks that have not come.
        """
        if member.rank == 0:
            return await self._serve(member)
        return await self._ask(member)

    def close(self) -> None:
        """Stop answering; idempotent."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    async def _serve(self, member: Member) -> Roster:
        loop = asyncio.get_running_loop()
        registrar = Registrar(member, job=self._job, secret=secrets.token_bytes(32))
        settled = asyncio.Event()
        protocol = _Answering(registrar, loop.time, settled)
        self._transport = await self._bind(protocol)
        try:
            if registrar.roster is None and registrar.failure is None:
                await self._wait(registrar, settled, member)
            if registrar.failure is not None:
                await asyncio.sleep(LINGER_SECONDS)
                raise registrar.failure
        except BaseException:
            self.close()
            raise
        assert registrar.roster is not None
        return registrar.roster

    async def _wait(self, registrar: Registrar, settled: asyncio.Event, member: Member) -> None:
        try:
            await asyncio.wait_for(settled.wait(), self._timeout_s)
        except TimeoutError:
            registrar.failure = absent_error(
                registrar.absent, member.world_size, self._place, self._timeout_s
            )

    async def _bind(self, protocol: asyncio.DatagramProtocol) -> asyncio.DatagramTransport:
        host, family = await self._resolve()
        try:
            sock = socket.socket(family, socket.SOCK_DGRAM)
            sock.setblocking(False)
            try:
                sock.bind(host)
                transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
                    lambda: protocol, sock=sock
                )
            except BaseException:
                sock.close()
                raise
            return transport
        except OSError as error:
            raise self._bind_error(error) from error

    def _bind_error(self, error: OSError) -> HandshakeError:
        if error.errno == errno.EADDRINUSE:
            return HandshakeError(
                f"rank 0 cannot listen on {self._place}: UDP port {self._master.port} is in use, probably by "
                "another "
                "job; give this one its own MASTER_PORT",
                [0],
            )
        if error.errno == errno.EADDRNOTAVAIL:
            return HandshakeError(
                f"rank 0 cannot listen on {self._place}: {self._master.host} is no address of this host "
                f"({socket.gethostname()}); set MASTER_ADDR to an address of the host that runs rank 0",
                [0],
            )
        return HandshakeError(f"rank 0 cannot listen on {self._place}: {os.strerror(error.errno or 0)}", [0])

    async def _ask(self, member: Member) -> Roster:
        host, _ = await self._resolve()
        loop = asyncio.get_running_loop()
        asking = _Asking(member, self._job)
        transport, _protocol = await loop.create_datagram_endpoint(lambda: asking, remote_addr=host[:2])
        deadline = loop.time() + self._timeout_s
        try:
            while asking.result is None and asking.failure is None:
                if loop.time() >= deadline:
                    raise self._late(asking, member)
                transport.sendto(asking.hello())
                await asking.pause(ASK_SECONDS)
        finally:
            transport.close()
        if asking.failure is not None:
            code, text = asking.failure
            raise self._refused(code, text)
        return unpack_roster(asking.result or b"")

    async def _resolve(self) -> tuple[Any, socket.AddressFamily]:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                self._master.host, self._master.port, type=socket.SOCK_DGRAM
            )
        except OSError as error:
            raise HandshakeError(
                f"MASTER_ADDR={self._master.host!r} cannot be resolved ({error.strerror}); use an address or "
                "name that "
                "every host knows",
                [0],
            ) from None
        family, _, _, _, address = found[0]
        return address, socket.AddressFamily(family)

    def _late(self, asking: _Asking, member: Member) -> DblpError:
        if asking.answers:
            return absent_error(asking.absent or {0}, member.world_size, self._place, self._timeout_s)
        hint = (
            "the host refuses the port: nothing listens there" if asking.refused else "no answer of any kind"
        )
        return HandshakeError(
            f"rank {member.rank} cannot reach the master at {self._place} within {self._timeout_s:g} s "
            f"({hint}); is "
            "rank 0 started, are MASTER_ADDR and MASTER_PORT right, is UDP on that port open?",
            [0],
        )

    def _refused(self, code: str, text: str) -> DblpError:
        message = f"the master at {self._place} refuses this rank: {text}"
        return VersionError(message, [0]) if code == VersionError.code else HandshakeError(message, [0])


class _Answering(asyncio.DatagramProtocol):
    def __init__(self, registrar: Registrar, clock: Callable[[], float], settled: asyncio.Event) -> None:
        self._registrar = registrar
        self._clock = clock
        self._settled = settled
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        answer = self._registrar.handle(data, Address(addr[0], addr[1]), now=self._clock())
        if answer is not None and self._transport is not None:
            self._transport.sendto(answer, addr)
        if self._registrar.roster is not None or self._registrar.failure is not None:
            self._settled.set()

    def error_received(self, exc: Exception) -> None:
        pass  # a rank that has gone; it is missed at the deadline


class _Asking(asyncio.DatagramProtocol):
    """The asking side: which HELLO to send next, and what has come of it."""

    def __init__(self, member: Member, job: str) -> None:
        self.result: bytes | None = None
        self.failure: tuple[str, str] | None = None
        self.absent: set[int] = set()
        self.answers = 0
        self.refused = 0
        self.dropped = 0
        self._member = member
        self._nonce = secrets.token_bytes(16)
        self._job = job
        self._cookie = b""
        self._parts: list[bytes] = []
        self._answered = asyncio.Event()

    def hello(self) -> bytes:
        """The HELLO to send now."""
        table = {
            "type": "hello",
            "version": VERSION,
            "rank": self._member.rank,
            "job": self._job,
            "nonce": self._nonce,
            "cookie": self._cookie,
            "part": len(self._parts),
            "member": self._member.encode(),
        }
        return pack_datagram(table, HELLO_BYTES)

    async def pause(self, seconds: float) -> None:
        """Wait for an answer that calls for another HELLO at once, or for ``seconds``."""
        self._answered.clear()
        try:
            await asyncio.wait_for(self._answered.wait(), seconds)
        except TimeoutError:
            return

    def datagram_received(self, data: bytes, addr: Any) -> None:
        table = unpack_datagram(data)
        handler = {"cookie": self._on_cookie, "wait": self._on_wait}
        handler |= {"welcome": self._on_welcome, "refuse": self._on_refuse}
        kind = table.get("type") if table is not None else None
        if table is None or table.get("nonce") != self._nonce or kind not in handler:
            self.dropped += 1
            return
        self.answers += 1
        handler[kind](table)

    def error_received(self, exc: Exception) -> None:
        if isinstance(exc, ConnectionRefusedError):
            self.refused += 1

    def _on_cookie(self, table: dict[str, Any]) -> None:
        cookie = table.get("cookie")
        if isinstance(cookie, bytes) and cookie != self._cookie:
            self._cookie = cookie
            self._answered.set()

    def _on_wait(self, table: dict[str, Any]) -> None:
        absent = table.get("absent")
        if isinstance(absent, list):
            self.absent = {rank for rank in absent if isinstance(rank, int)}

    def _on_welcome(self, table: dict[str, Any]) -> None:
        part, parts, piece = table.get("part"), table.get("parts"), table.get("data")
        if part != len(self._parts) or not isinstance(parts, int) or not isinstance(piece, bytes):
            return
        self._parts.append(piece)
        if len(self._parts) == parts:
            self.result = b"".join(self._parts)
        self._answered.set()

    def _on_refuse(self, table: dict[str, Any]) -> None:
        self.failure = (str(table.get("code")), str(table.get("text")))
        self._answered.set()
