"""The registrar: rank 0's side of the rendezvous over UDP, without sockets or clocks.

Theory of operation. A rank sends HELLO: a msgpack map with its ``Member`` record, padded to 1,200 bytes. The
first answer is a cookie, an HMAC of the sender's address, with nothing stored (as QUIC's Retry, RFC 9000
section 8.1.2); a HELLO that brings the cookie back has proved its address, and only such a one is judged,
kept or held against the group. It is answered with WAIT (and who is absent) until all ranks have come, then
with the part of the roster that it asks for. Every answer is shorter than the HELLO that caused it, so a
forged address gains nothing. The registrar goes on answering for as long as its group lives: a lost answer is
asked for again, and a late job learns that the port is taken.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgpack

from dblp.collectives.rendezvous import Member, Roster, make_roster
from dblp.errors import DblpError, HandshakeError, VersionError
from dblp.transport.port import Address
from dblp.transport.wire import VERSION

MAGIC = b"dblp-rdv"
"""First bytes of every rendezvous datagram; what starts otherwise is a stranger's."""
HELLO_BYTES = 1200
"""Least length of a HELLO; the most that is answered without IP fragmentation anywhere (RFC 9000 section
14)."""
PART_BYTES = 1000
"""Bytes of the roster in one WELCOME; with its map around it still shorter than a HELLO."""
COOKIE_SECONDS = 60.0
"""A cookie holds for this slot of time and the next."""
STALE_SECONDS = 3.0
"""A rank that was silent for so long before the group is complete may be replaced (its process was
restarted)."""
_TEXT_BYTES = 900
"""Longest text of a refusal."""


def pack_datagram(table: dict[str, Any], least: int = 0) -> bytes:
    """A rendezvous datagram: the magic and a msgpack map, padded to at least ``least`` bytes."""
    data: bytes = MAGIC + msgpack.packb(table)
    if len(data) < least:
        data = MAGIC + msgpack.packb({**table, "pad": bytes(least - len(data))})
    return data


def unpack_datagram(data: bytes) -> dict[str, Any] | None:
    """The map in a rendezvous datagram, or None for garbage."""
    if not data.startswith(MAGIC):
        return None
    try:
        table = msgpack.unpackb(data[len(MAGIC) :])
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    return table if isinstance(table, dict) else None


def pack_roster(roster: Roster) -> bytes:
    """The roster as bytes, to be sent in parts."""
    table = {
        "session": roster.session,
        "generation": roster.generation,
        "datagram_bytes": roster.datagram_bytes,
        "peers": roster.peers,
        "processors": roster.processors,
    }
    data: bytes = msgpack.packb(table)
    return data


def unpack_roster(data: bytes) -> Roster:
    """Inverse of ``pack_roster``; raises HandshakeError."""
    try:
        table = msgpack.unpackb(data)
        peers = tuple(tuple(Address(host, port) for host, port in paths) for paths in table["peers"])
        return Roster(
            session=table["session"],
            generation=table["generation"],
            datagram_bytes=table["datagram_bytes"],
            peers=peers,
            processors=tuple(map(str, table["processors"])),
        )
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise HandshakeError(f"the master's list of ranks cannot be read ({error!r})") from None


@dataclass(slots=True)
class _Entry:
    member: Member
    nonce: bytes
    source: Address
    heard_at: float


class Registrar:
    """Answers HELLOs; ``roster`` is there once all ranks have come, ``failure`` if they cannot form a
    group."""

    def __init__(self, own: Member, *, job: str, secret: bytes) -> None:
        self.roster: Roster | None = None
        self.failure: DblpError | None = None
        self.dropped: Counter[str] = Counter()
        """Datagrams that were ignored or refused, by reason."""
        self._own = own
        self._job = job
        self._secret = secret
        self._others: dict[int, _Entry] = {}
        self._packed = b""
        self._complete_if_all()

    @property
    def absent(self) -> set[int]:
        """Ranks that have not come."""
        return set(range(1, self._own.world_size)) - self._others.keys()

    def handle(self, data: bytes, source: Address, *, now: float) -> bytes | None:
        """The answer to one datagram, or None. ``now``: seconds, monotonic."""
        table = unpack_datagram(data)
        if table is None or len(data) < HELLO_BYTES or table.get("type") != "hello":
            self.dropped["garbage"] += 1
            return None
        nonce, cookie = table.get("nonce"), table.get("cookie")
        if not isinstance(nonce, bytes) or len(nonce) != 16:
            self.dropped["garbage"] += 1
            return None
        slot = int(now // COOKIE_SECONDS)
        if not self._proved(cookie, source, nonce, slot):
            return self._answer("cookie", nonce, cookie=self._cookie(source, nonce, slot))
        return self._judge(table, nonce, source, now)

    def _judge(self, table: dict[str, Any], nonce: bytes, source: Address, now: float) -> bytes:
        """Answer a HELLO whose sender's address is proved."""
        job = table.get("job")
        if job != self._job:
            return self._refuse(
                "job",
                nonce,
                f"this port serves job {self._job!r} of {self._own.world_size} ranks, not job {job!r}; "
                "give each job its own MASTER_PORT",
            )
        if (version := table.get("version")) != VERSION:
            return self._fail(nonce, self._version_error(table.get("rank"), version))
        try:
            member = Member.decode(table["member"])
        except (HandshakeError, KeyError) as error:
            return self._refuse("garbage", nonce, f"the HELLO's record cannot be read: {error}")
        return self._admit(member, nonce, source, now, table.get("part", 0))

    def _admit(self, member: Member, nonce: bytes, source: Address, now: float, part: object) -> bytes:
        if member.generation > self._own.generation:
            return self._answer("wait", nonce, absent=[0])  # rank 0 has yet to make that group
        if member.generation < self._own.generation:
            text = f"rank 0 makes its group number {self._own.generation}, rank {member.rank} its number "
            return self._refuse("generation", nonce, f"{text}{member.generation}; restart all ranks together")
        if self.failure is not None:
            return self._refuse("failed", nonce, str(self.failure))
        if member.world_size != self._own.world_size:
            return self._fail(nonce, self._size_error(member, source))
        if not 1 <= member.rank < self._own.world_size:
            return self._refuse("rank", nonce, f"rank {member.rank} is outside 1..{self._own.world_size - 1}")
        if not self._take_place(member, nonce, source, now):
            other = self._others[member.rank].source
            text = (
                f"rank {member.rank} is taken by a process at {other.host}; give every process its own RANK"
            )
            return self._refuse("taken", nonce, text)
        self._complete_if_all()
        if self.failure is not None:
            return self._refuse("failed", nonce, str(self.failure))
        return self._welcome(nonce, part)

    def _take_place(self, member: Member, nonce: bytes, source: Address, now: float) -> bool:
        entry = self._others.get(member.rank)
        if entry is None or (self.roster is None and now - entry.heard_at > STALE_SECONDS):
            self._others[member.rank] = _Entry(member, nonce, source, now)
            return True
        if entry.nonce != nonce:
            return False
        entry.heard_at = now
        return True

    def _complete_if_all(self) -> None:
        if self.roster is not None or self.absent:
            return
        members = [self._own, *(self._others[rank].member for rank in sorted(self._others))]
        try:
            self.roster = make_roster(members)
            self._packed = pack_roster(self.roster)
        except DblpError as error:
            self.failure = error

    def _welcome(self, nonce: bytes, part: object) -> bytes:
        if self.roster is None:
            return self._answer("wait", nonce, absent=sorted(self.absent)[:64])
        parts = -(-len(self._packed) // PART_BYTES)
        index = part if isinstance(part, int) and 0 <= part < parts else 0
        piece = self._packed[index * PART_BYTES : (index + 1) * PART_BYTES]
        return self._answer("welcome", nonce, part=index, parts=parts, data=piece)

    def _answer(self, kind: str, nonce: bytes, **values: object) -> bytes:
        return pack_datagram({"type": kind, "version": VERSION, "nonce": nonce, **values})

    def _refuse(self, code: str, nonce: bytes, text: str) -> bytes:
        self.dropped[code] += 1
        clipped = text.encode()[:_TEXT_BYTES].decode(errors="ignore")
        return self._answer("refuse", nonce, code=code, text=clipped)

    def _fail(self, nonce: bytes, error: DblpError) -> bytes:
        if self.roster is None and self.failure is None:
            self.failure = error
        return self._refuse(error.code, nonce, str(error))

    def _version_error(self, rank: object, version: object) -> VersionError:
        return VersionError(
            f"rank 0 speaks version {VERSION} of dblp's protocol, rank {rank} version {version}; "
            "install the same dblp on all hosts",
            [rank] if isinstance(rank, int) else [],
        )

    def _size_error(self, member: Member, source: Address) -> HandshakeError:
        return HandshakeError(
            f"rank 0 was started with world_size {self._own.world_size}, rank {member.rank} at {source.host} "
            "with "
            f"world_size {member.world_size}; start all ranks with the same number, each job on its own "
            "MASTER_PORT",
            [member.rank],
        )

    def _cookie(self, source: Address, nonce: bytes, slot: int) -> bytes:
        text = f"{source.host}|{source.port}|{slot}|".encode()
        return hmac.new(self._secret, text + nonce, hashlib.sha256).digest()[:16]

    def _proved(self, cookie: object, source: Address, nonce: bytes, slot: int) -> bool:
        if not isinstance(cookie, bytes):
            return False
        valid = (self._cookie(source, nonce, slot), self._cookie(source, nonce, slot - 1))
        return any(hmac.compare_digest(cookie, each) for each in valid)
