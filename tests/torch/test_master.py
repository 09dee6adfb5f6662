"""The rendezvous over UDP: the registrar with literal times, and the whole exchange on loopback sockets."""

import asyncio
import socket
from dataclasses import replace

import pytest

from dblp.collectives.master import MasterRendezvous
from dblp.collectives.registrar import (
    HELLO_BYTES,
    MAGIC,
    Registrar,
    pack_datagram,
    unpack_datagram,
    unpack_roster,
)
from dblp.collectives.rendezvous import new_member
from dblp.errors import DeadlineError, HandshakeError, VersionError
from dblp.transport.port import Address

PEER = Address("10.0.0.2", 5000)


def member(rank, world_size=2, generation=1, paths=1, **changes):
    addresses = [Address(f"10.0.0.{rank + 1}", 4000 + path) for path in range(paths)]
    return replace(new_member(rank, world_size, addresses, 1464, generation), **changes)


def registrar(world_size=2, job="a", generation=1):
    return Registrar(member(0, world_size, generation), job=job, secret=b"secret of this test")


def hello(record, nonce=b"n" * 16, cookie=b"", **changes):
    table = {
        "type": "hello",
        "version": 1,
        "rank": record.rank,
        "job": "a",
        "nonce": nonce,
        "cookie": cookie,
        "part": 0,
        "member": record.encode(),
    }
    return pack_datagram({**table, **changes}, HELLO_BYTES)


def read(data):
    table = unpack_datagram(data)
    assert table is not None
    return table


def ask(server, record, *, source=PEER, nonce=b"n" * 16, now=0.0, **changes):
    """HELLO, take the cookie, HELLO again; the map of the second answer."""
    first = read(server.handle(hello(record, nonce, **changes), source, now=now))
    assert first["type"] == "cookie"
    answer = server.handle(hello(record, nonce, first["cookie"], **changes), source, now=now)
    return read(answer)


def test_a_rank_is_welcomed_with_the_roster_once_all_are_there():
    server = registrar(3)
    assert ask(server, member(1, 3))["absent"] == [2]
    answer = ask(server, member(2, 3), source=Address("10.0.0.3", 1), nonce=b"m" * 16)
    assert answer["type"] == "welcome"
    assert answer["parts"] == 1
    roster = unpack_roster(answer["data"])
    assert roster == server.roster
    assert [paths[0].host for paths in roster.peers] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


def test_nothing_is_kept_and_little_is_sent_before_the_address_is_proved():
    server = registrar()
    for port in range(200):
        data = hello(member(1))
        answer = server.handle(data, Address("10.9.9.9", port), now=0.0)
        assert read(answer)["type"] == "cookie"
        assert len(answer) < len(data)
    assert server.absent == {1}
    assert server._others == {}


def test_a_cookie_is_bound_to_address_and_time():
    server = registrar()
    cookie = read(server.handle(hello(member(1)), PEER, now=0.0))["cookie"]
    for source, now in [(Address("10.0.0.2", 5001), 0.0), (PEER, 180.0)]:
        answer = server.handle(hello(member(1), cookie=cookie), source, now=now)
        assert read(answer)["type"] == "cookie"
    assert read(server.handle(hello(member(1), cookie=cookie), PEER, now=70.0))["type"] == "welcome"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 1300,
        MAGIC + b"\xc1" * 1300,
        MAGIC + b"\x01",
        pack_datagram({"type": "hello"}),
        bytes(1464),
    ],
)
def test_garbage_is_counted_and_not_answered(data):
    server = registrar()
    assert server.handle(data, PEER, now=0.0) is None
    assert server.dropped == {"garbage": 1}


def test_a_short_hello_is_not_answered():
    """An answer to it could be longer than what was sent: an amplifier."""
    server = registrar()
    table = {"type": "hello", "nonce": b"n" * 16, "cookie": b""}
    assert server.handle(pack_datagram(table), PEER, now=0.0) is None


def test_every_answer_is_shorter_than_the_hello():
    server = registrar(world_size=200)
    for rank in range(1, 200):
        source, nonce = Address("10.0.0.7", rank), rank.to_bytes(16, "big")
        record = member(rank, 200)
        first = read(server.handle(hello(record, nonce), source, now=0.0))
        data = hello(record, nonce, first["cookie"])
        assert len(server.handle(data, source, now=0.0)) < len(data)
    assert server.roster is not None


def test_a_long_roster_comes_in_parts():
    server = registrar(world_size=120)
    for rank in range(1, 120):
        ask_as(server, rank)
    answer = ask_as(server, 119)
    pieces = [ask_as(server, 119, part=part)["data"] for part in range(answer["parts"])]
    assert len(pieces) > 1
    assert unpack_roster(b"".join(pieces)) == server.roster


def ask_as(server, rank, **changes):
    source, nonce = Address("10.0.0.7", rank), rank.to_bytes(16, "big")
    return ask(server, member(rank, 120), source=source, nonce=nonce, **changes)


def test_a_foreign_job_is_refused_and_does_not_hurt():
    server = registrar()
    answer = ask(server, member(1), job="b")
    assert answer["type"] == "refuse"
    assert answer["code"] == "job"
    assert "'a'" in answer["text"] and "'b'" in answer["text"]
    assert server.failure is None


def test_world_sizes_that_differ_fail_both_sides():
    server = registrar(world_size=2)
    answer = ask(server, member(3, world_size=4))
    assert "world_size 2" in answer["text"] and "world_size 4" in answer["text"]
    assert isinstance(server.failure, HandshakeError)
    assert ask(server, member(1), nonce=b"o" * 16)["type"] == "refuse"  # the others learn it too


def test_another_version_fails_both_sides():
    server = registrar()
    answer = ask(server, member(1), version=7)
    assert answer["code"] == "version"
    assert "version 1" in answer["text"] and "version 7" in answer["text"]
    assert isinstance(server.failure, VersionError)


def test_a_rank_that_is_taken_is_refused_unless_its_holder_is_silent():
    server = registrar(3)
    ask(server, member(1, 3), now=0.0)
    answer = ask(server, member(1, 3), source=Address("10.0.0.8", 1), nonce=b"o" * 16, now=1.0)
    assert answer["code"] == "taken"
    assert "rank 1" in answer["text"] and "10.0.0.2" in answer["text"]
    restarted = ask(server, member(1, 3), source=Address("10.0.0.8", 1), nonce=b"o" * 16, now=9.0)
    assert restarted["type"] == "wait"


@pytest.mark.parametrize("rank", [0, 2, -1, 99])
def test_a_rank_outside_the_group_is_refused(rank):
    assert ask(registrar(), member(rank))["code"] == "rank"


def test_generations_are_told_apart():
    server = registrar(generation=2)
    assert ask(server, member(1, generation=3))["type"] == "wait"  # rank 0 has yet to make that group
    assert "restart all ranks" in ask(server, member(1, generation=1), nonce=b"o" * 16)["text"]


# The whole exchange, on sockets.


def free_port():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def local(rank, world_size):
    return new_member(rank, world_size, [Address("127.0.0.1", 4000 + rank)], 1464, 1)


@pytest.mark.sockets
@pytest.mark.parametrize("world_size", [1, 2, 5, 40])
def test_ranks_meet_over_udp(world_size):
    async def run():
        place = Address("127.0.0.1", free_port())
        meetings = [MasterRendezvous(place, job="j", timeout_s=20) for _ in range(world_size)]
        rosters = await asyncio.gather(
            *(each.join(local(rank, world_size)) for rank, each in reversed(list(enumerate(meetings))))
        )
        assert len({roster.session for roster in rosters}) == 1
        assert len(rosters[0].peers) == world_size
        meetings[0].close()

    asyncio.run(run())


@pytest.mark.sockets
def test_garbage_on_the_master_port_changes_nothing():
    async def run():
        place = Address("127.0.0.1", free_port())
        server, client = MasterRendezvous(place, timeout_s=20), MasterRendezvous(place, timeout_s=20)
        meeting = asyncio.create_task(server.join(local(0, 2)))
        await asyncio.sleep(0.01)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for size in (0, 1, 1200, 1464, 9000):
                sock.sendto(b"\xff" * size, place)
        roster = await client.join(local(1, 2))
        assert roster == await meeting
        server.close()

    asyncio.run(run())


@pytest.mark.sockets
def test_an_unreachable_master_is_named():
    port = free_port()
    with pytest.raises(
        HandshakeError, match=rf"cannot reach the master at 127\.0\.0\.1:{port} .*nothing listens"
    ):
        asyncio.run(MasterRendezvous(Address("127.0.0.1", port), timeout_s=0.3).join(local(1, 2)))


@pytest.mark.sockets
def test_an_unresolvable_master_is_named():
    with pytest.raises(HandshakeError, match=r"no-such-host\.invalid"):
        asyncio.run(MasterRendezvous(Address("no-such-host.invalid", 1), timeout_s=0.3).join(local(1, 2)))


@pytest.mark.sockets
def test_absent_ranks_are_named_on_both_sides():
    async def run():
        place = Address("127.0.0.1", free_port())
        server = MasterRendezvous(place, timeout_s=0.6)
        client = MasterRendezvous(place, timeout_s=0.4)
        outcomes = await asyncio.gather(
            server.join(local(0, 3)), client.join(local(1, 3)), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [DeadlineError, DeadlineError]
        assert [getattr(outcome, "ranks", ()) for outcome in outcomes] == [(2,), (2,)]
        server.close()

    asyncio.run(run())


@pytest.mark.sockets
def test_a_second_job_on_the_port_is_refused_at_rank_0_and_elsewhere():
    async def run():
        place = Address("127.0.0.1", free_port())
        server = MasterRendezvous(place, job="first", timeout_s=5)
        await server.join(local(0, 1))
        with pytest.raises(HandshakeError, match=f"UDP port {place.port} is in use"):
            await MasterRendezvous(place, job="second", timeout_s=5).join(local(0, 2))
        with pytest.raises(HandshakeError, match="serves job 'first'"):
            await MasterRendezvous(place, job="second", timeout_s=5).join(local(1, 2))
        server.close()

    asyncio.run(run())


@pytest.mark.sockets
def test_a_master_address_of_another_host_is_named_at_rank_0():
    with pytest.raises(HandshakeError, match="no address of this host"):
        asyncio.run(MasterRendezvous(Address("192.0.2.1", 29500), timeout_s=5).join(local(0, 1)))


@pytest.mark.sockets
def test_a_failed_rendezvous_tells_every_rank_why():
    async def run():
        place = Address("127.0.0.1", free_port())
        server = MasterRendezvous(place, timeout_s=5)
        other = MasterRendezvous(place, timeout_s=5)
        third = MasterRendezvous(place, timeout_s=5)
        errors = await asyncio.gather(
            server.join(local(0, 3)),
            other.join(local(1, 4)),
            third.join(local(2, 3)),
            return_exceptions=True,
        )
        for error in errors:
            assert isinstance(error, HandshakeError)
            assert "world_size 3" in str(error) and "world_size 4" in str(error)

    asyncio.run(run())
