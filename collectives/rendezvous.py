"""Rendezvous: how the ranks of a group learn each other's addresses, here through a key-value store.

Every rank publishes a ``Member`` (addresses, datagram limit, protocol version); from all of them each rank
derives the same ``Roster``: the session that rank 0 drew, the addresses of all, the least datagram size. The
store is duck typed (torch's Store: ``set``, ``get``, ``check``, ``add``). ``master.py`` does the same without
a store, over UDP.

Keys are prefixed with the group's size and a generation counter of the rank: a launcher's store outlives destroy and init within
one process, and the addresses of an earlier generation must not be read. Torch counts its groups anew then, so that one name may
stand for another group, of another size, whose ranks were not all in the first: each size has counters of its own.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import msgpack

from dblp.collectives.placement import processors_key
from dblp.errors import DeadlineError, HandshakeError, VersionError
from dblp.transport.port import Address
from dblp.transport.wire import VERSION

POLL_SECONDS = 0.01
"""First interval between looks into the store; doubled up to a quarter of a second."""
_POLL_MOST_SECONDS = 0.25
OTHER_SIZE_SECONDS = 10.0
"""How long a rank is waited for that has come with another world size, at most: what it left may be of an earlier group of this
name. Half of the timeout where that is less."""


class Store(Protocol):
    """What is needed of a key-value store that all ranks share."""

    def set(self, key: str, value: Any, /) -> Any:
        """Store bytes or text under a key."""

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""

    def check(self, keys: list[str], /) -> bool:
        """True if all keys are there; does not wait."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter; the new value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What one rank tells the others."""

    rank: int
    """Rank in the group."""
    world_size: int
    """Ranks that it expects in the group."""
    addresses: tuple[Address, ...]
    """Where it receives, one a path."""
    datagram_bytes: int
    """Largest UDP payload that it can send and receive."""
    session: int
    """64 random bits; those of rank 0 become the group's session."""
    generation: int
    """How many groups of this name the process has made, this one included."""
    version: int = VERSION
    """Major version of the protocol."""
    host: str = ""
    """Host name, for messages to people."""
    host_key: str = ""
    """Names the network stack: kernel boot and network namespace. Loopback addresses hold only within one."""
    processors: str = ""
    """Names the machine and the processors that the rank may use, see ``placement``; empty: not known."""
    pid: int = 0
    """Its process, for messages to people; 0: not known."""

    def encode(self) -> bytes:
        """As a msgpack map."""
        packed: bytes = msgpack.packb(asdict(self))
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Member:
        """Read a map; unknown keys are ignored. Raises HandshakeError if it is none or lacks a key."""
        try:
            table = msgpack.unpackb(data)
            values = {spec.name: table[spec.name] for spec in fields(cls) if spec.name in table}
            values["addresses"] = tuple(Address(str(host), int(port)) for host, port in table["addresses"])
            member = cls(**values)
            numbers = (member.rank, member.world_size, member.datagram_bytes, member.session)
            if not all(type(number) is int for number in (*numbers, member.generation, member.version)):
                raise ValueError("a number is expected")
            return member
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise HandshakeError(
                f"a rendezvous record cannot be read ({error!r}); does every rank run dblp?"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """What all ranks of a group know alike after the rendezvous."""

    session: int
    """64 random bits that every datagram of the group carries."""
    generation: int
    """Counts the groups of this name in rank 0's process."""
    peers: tuple[tuple[Address, ...], ...]
    """Addresses by rank and path."""
    datagram_bytes: int
    """Least datagram limit of all ranks."""
    processors: tuple[str, ...]
    """``Member.processors`` by rank."""


def new_member(
    rank: int, world_size: int, addresses: Sequence[Address], datagram_bytes: int, generation: int
) -> Member:
    """This rank's record, with a fresh session and this host's names."""
    return Member(
        rank=rank,
        world_size=world_size,
        addresses=tuple(addresses),
        datagram_bytes=datagram_bytes,
        session=secrets.randbits(64) or 1,
        generation=generation,
        host=socket.gethostname(),
        host_key=_host_key(),
        processors=processors_key(),
        pid=os.getpid(),
    )


def make_roster(members: Sequence[Member]) -> Roster:
    """The roster of all ranks' records, in rank order.

    Raises VersionError, or HandshakeError for ranks that disagree on the world size or the number of paths,
    and for a loopback address that another host would have to reach.
    """
    first = members[0]
    for member in members[1:]:
        _check_pair(first, member)
    _check_loopback(members)
    return Roster(
        session=first.session,
        generation=first.generation,
        peers=tuple(member.addresses for member in members),
        datagram_bytes=min(member.datagram_bytes for member in members),
        processors=tuple(member.processors for member in members),
    )


def rendezvous_by_store(
    store: Store,
    member: Callable[[int], Member],
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
    place: str = "the store",
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Roster:
    """Publish ``member(generation)`` and wait for all others; blocks the calling thread.

    Raises DeadlineError that lists the ranks that have not come within ``timeout_s`` seconds, and what
    ``make_roster`` raises. ``place`` names the store in messages ("10.0.0.1:29500").
    """
    generation = store.add(_counter(world_size, rank), 1)
    own = member(generation)
    store.set(_key(world_size, generation, rank), own.encode())
    store.set(_latest(rank), own.encode())
    absent = set(range(world_size))
    members: dict[int, Member] = {}
    begun, pause = clock(), POLL_SECONDS
    deadline, other_size_at = begun + timeout_s, begun + min(OTHER_SIZE_SECONDS, timeout_s / 2)
    while True:
        for peer in sorted(absent):
            if store.check([_key(world_size, generation, peer)]):
                members[peer] = Member.decode(bytes(store.get(_key(world_size, generation, peer))))
                _check_pair(own, members[peer])
                absent.remove(peer)
        if not absent:
            return make_roster([members[peer] for peer in range(world_size)])
        if clock() >= other_size_at:
            for peer in sorted(absent):
                _check_size(store, own, peer)
        if clock() >= deadline:
            raise absent_error(absent, world_size, place, timeout_s, _why(store, own, absent))
        sleep(pause)
        pause = min(2 * pause, _POLL_MOST_SECONDS)


def absent_error(
    absent: set[int], world_size: int, place: str, timeout_s: float, why: str = ""
) -> DeadlineError:
    """The error for ranks that did not come to the rendezvous; ``why``: what is known of the cause."""
    listed = list_ranks(absent)
    verb = "has" if len(absent) == 1 else "have"
    return DeadlineError(
        f"{listed} of {world_size} {verb} not come to the rendezvous at {place} within {timeout_s:g} s; "
        "are they started, with the same world size, and is the port open to them? "
        "(DBLP_CONNECT_TIMEOUT_S raises the limit)" + why,
        absent,
    )


def _why(store: Store, own: Member, absent: set[int]) -> str:
    """What the store tells of ranks that have not come: whether they came the time before, or this rank is there twice."""
    rank, generation = own.rank, own.generation
    size = own.world_size
    if store.add(_counter(size, rank), 0) != generation:
        return f". Another process has come as rank {rank} since: give each process a RANK of its own"
    lagging = {peer for peer in absent if generation > 1 and store.check([_key(size, generation - 1, peer)])}
    if lagging:
        return (
            f". {list_ranks(lagging).capitalize()} came the time before, and not again: if this rank alone was restarted, "
            "restart all ranks"
        )
    if generation == 1 or not store.check([_key(size, generation - 1, rank)]):
        return ""
    before = Member.decode(bytes(store.get(_key(size, generation - 1, rank))))
    if (before.host_key, before.pid) == (own.host_key, own.pid):
        return ""  # it tries again
    return (
        f". Process {before.pid} on {before.host} came as rank {rank} before this one, and met none of them either: was "
        f"RANK={rank} given to two processes, or is the store that of an earlier run?"
    )


def list_ranks(ranks: set[int] | Sequence[int], most: int = 16) -> str:
    """``"rank 3"`` or ``"ranks 1, 2, 5"``; long lists are cut after ``most`` and counted."""
    ordered = sorted(ranks)
    text = ", ".join(map(str, ordered[:most]))
    if len(ordered) > most:
        text += f" and {len(ordered) - most} more"
    return f"rank{'' if len(ordered) == 1 else 's'} {text}"


def _key(world_size: int, generation: int, rank: int) -> str:
    return f"dblp/{world_size}/{generation}/member/{rank}"


def _counter(world_size: int, rank: int) -> str:
    return f"dblp/{world_size}/generation/{rank}"


def _latest(rank: int) -> str:
    return f"dblp/latest/{rank}"


def _check_size(store: Store, own: Member, peer: int) -> None:
    """Raise HandshakeError if a rank that is awaited was last here with another world size: it waits for others."""
    if store.check([_latest(peer)]):
        other = Member.decode(bytes(store.get(_latest(peer))))
        if other.world_size != own.world_size:
            _check_pair(own, other)


def _check_pair(first: Member, other: Member) -> None:
    ranks = (first.rank, other.rank)
    if first.version != other.version:
        raise VersionError(
            f"rank {first.rank} speaks version {first.version} of dblp's protocol, rank {other.rank} version "
            f"{other.version}; install the same dblp on all hosts",
            ranks,
        )
    if first.world_size != other.world_size:
        raise HandshakeError(
            f"rank {first.rank} of the group was started with world_size {first.world_size}, its rank {other.rank} with "
            f"world_size {other.world_size}; start all ranks with the same number, and give new_group the same list on all",
            ranks,
        )
    if len(first.addresses) != len(other.addresses):
        raise HandshakeError(
            f"rank {first.rank} has {len(first.addresses)} paths, rank {other.rank} has "
            f"{len(other.addresses)}; "
            "set DBLP_PATHS alike on all ranks",
            ranks,
        )


def _check_loopback(members: Sequence[Member]) -> None:
    for member in members:
        if not any(_is_loopback(address.host) for address in member.addresses):
            continue
        for other in members:
            if other.host_key != member.host_key:
                raise HandshakeError(
                    f"rank {member.rank} on {member.host} offers the loopback address "
                    f"{member.addresses[0].host}, "
                    f"which rank {other.rank} on {other.host} cannot reach; set DBLP_IFNAME on {member.host} "
                    "to the "
                    "interface that faces the others, and MASTER_ADDR to an address that is not loopback",
                    (member.rank, other.rank),
                )


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def _host_key() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()
