"""Handshake: cookies, proof of addresses, disagreements that both sides hear of."""

from __future__ import annotations

import itertools
from typing import Any

import msgpack
import numpy as np
import pytest

from dblp.errors import HandshakeError, VersionError
from dblp.transport import wire
from dblp.transport.config import HEADER_BYTES, TransportConfig
from dblp.transport.drop import Drop
from dblp.transport.handshake import HELLO_BYTES, Handshake, Identity
from dblp.transport.port import Address
from dblp.transport.wire import Type
from tests.transport.cores import SESSION, Cores, address, deliver_all, make_core, slab_of, split

IDENTITY: dict[str, Any] = {
    "rank": 0, "world_size": 2, "generation": 0, "paths": 1, "datagram_bytes": 1464, "window_bytes": 65_536,
}  # fmt: skip


def side(rank: int, **changes: Any) -> Handshake:
    identity = Identity(**(IDENTITY | {"rank": rank} | changes))
    addresses = [
        [address(peer, path) for path in range(identity.paths)] for peer in range(identity.world_size)
    ]
    nonces = [bytes([rank, index] * 4) for index in range(rank * identity.paths)]
    return Handshake(identity, addresses, secret=bytes([rank]) * 32, nonces=nonces, now=0.0)


def header(rank: int, type_: Type, payload: bytes, path: int = 0) -> wire.Header:
    return wire.Header(wire.VERSION, type_, 0, path, 1, 0, rank, SESSION, 0, 0, 0, 0, 0, 0, 0, len(payload))


def hand(target: Handshake, rank: int, reply: Any, source: Address | None = None) -> list[Any]:
    what = header(rank, reply.type, reply.payload, reply.path)
    return target.on_datagram(what, reply.payload, source or address(rank), 1.0)


def test_the_whole_exchange():
    low, high = side(0), side(1)
    assert low.hellos(0.0) == [], "the higher rank begins"
    (hello,) = high.hellos(0.0)
    (retry,) = hand(low, 1, hello)
    assert retry.type is Type.RETRY and low.missing() == [1]
    (again,) = hand(high, 0, retry)
    assert again.type is Type.HELLO
    (welcome,) = hand(low, 1, again)
    assert welcome.type is Type.WELCOME and low.missing() == []
    assert hand(high, 0, welcome) == [] and high.missing() == []
    assert low.addresses[1, 0] == address(1) and high.addresses[0, 0] == address(0)
    assert high.next_timeout() == float("inf")


def test_no_state_is_held_before_the_cookie_comes_back():
    low = side(0)
    (hello,) = side(1).hellos(0.0)
    before = {name: repr(value) for name, value in vars(low).items()}
    for port in range(2000):
        hand(low, 1, hello, Address("192.0.2.1", port))
    assert {name: repr(value) for name, value in vars(low).items()} == before


def test_a_cookie_is_worth_nothing_from_another_address_or_with_another_nonce():
    low, high = side(0), side(1)
    (retry,) = hand(low, 1, high.hellos(0.0)[0])
    (hello,) = hand(high, 0, retry)
    (reply,) = hand(low, 1, hello, Address("10.9.9.9", 9000))
    assert reply.type is Type.RETRY
    other = side(1)
    other._attempts[0, 0].nonce = b"elsewise"
    other._attempts[0, 0].cookie = msgpack.unpackb(retry.payload)["cookie"]
    (reply,) = hand(low, 1, other.hellos(0.0)[0])
    assert reply.type is Type.RETRY
    assert low.missing() == [1] and low.bad_cookies == 2


@pytest.mark.parametrize("nonce", [b"", b"x" * 16])
@pytest.mark.parametrize("size", [1, 100, 399, 400, 1000])
def test_no_more_bytes_out_than_in_before_the_address_is_proved(size, nonce):
    low = side(0)
    body: dict[str, Any] = {"nonce": nonce, "cookie": b"", "pad": b""}
    body["pad"] = bytes(max(0, size - len(msgpack.packb(body)) - 3))
    payload = msgpack.packb(body)
    replies = low.on_datagram(header(1, Type.HELLO, payload), payload, address(1), 0.0)
    assert all(len(reply.payload) <= len(payload) for reply in replies)
    assert bool(replies) == (len(payload) >= HELLO_BYTES)


def test_a_hello_is_long_enough_for_every_answer():
    low, high = side(0), side(1)
    (hello,) = high.hellos(0.0)
    assert len(hello.payload) >= HELLO_BYTES
    (retry,) = hand(low, 1, hello)
    (again,) = hand(high, 0, retry)
    (welcome,) = hand(low, 1, again)
    assert max(len(retry.payload), len(welcome.payload)) <= len(hello.payload)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"world_size": 3}, "world_size is 3 on rank 1 and 2 on rank 0"),
        ({"generation": 4}, "generation is 4 on rank 1 and 0 on rank 0"),
        ({"paths": 2}, "paths is 2 on rank 1 and 1 on rank 0"),
        ({"datagram_bytes": 8952}, "datagram_bytes is 8952 on rank 1 and 1464 on rank 0"),
    ],
)
def test_both_sides_hear_of_a_disagreement(change, what):
    low, high = side(0), side(1, **change)
    (retry,) = hand(low, 1, high.hellos(0.0)[0])
    (hello, *_) = hand(high, 0, retry)
    (refuse,) = hand(low, 1, hello)
    assert refuse.type is Type.REFUSE
    hand(high, 0, refuse)
    for at, peer in ((low, 1), (high, 0)):
        assert isinstance(at.error, HandshakeError)
        assert at.error.ranks == (peer,)
        assert what in str(at.error)


def test_a_welcome_that_disagrees_is_refused_too():
    high = side(1)
    (hello,) = high.hellos(0.0)
    body = Identity(**(IDENTITY | {"world_size": 5})).to_map() | {"nonce": high._attempts[0, 0].nonce}
    payload = msgpack.packb(body)
    high.on_datagram(header(0, Type.WELCOME, payload), payload, address(0), 0.0)
    assert "world_size is 5 on rank 0" in str(high.error)
    assert hello.path == 0


def test_unknown_keys_are_ignored():
    low, high = side(0), side(1)
    (retry,) = hand(low, 1, high.hellos(0.0)[0])
    (hello,) = hand(high, 0, retry)
    payload = msgpack.packb(msgpack.unpackb(hello.payload) | {"colour": "green", "minor": 9})
    (welcome,) = low.on_datagram(header(1, Type.HELLO, payload), payload, address(1), 0.0)
    assert welcome.type is Type.WELCOME and low.error is None


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x01", b"\x80", b"\x81\xa5nonce\x01", b"\x81\x01\x02", bytes(500), b"\xde\xff\xff"],
)
@pytest.mark.parametrize("type_", [Type.HELLO, Type.RETRY, Type.WELCOME])
@pytest.mark.parametrize("rank", [0, 1])
def test_garbage_changes_nothing(rank, type_, payload):
    at = side(1 - rank)
    proved, error = set(at.proved), at.error
    replies = at.on_datagram(header(rank, type_, payload), payload, address(rank), 0.0)
    assert replies == [] and (at.proved, at.error) == (proved, error) and at.ignored == 1


def test_a_hello_that_lies_about_its_length_of_nonce_is_ignored():
    low = side(0)
    payload = msgpack.packb({"nonce": bytes(1000), "cookie": b""})
    assert low.on_datagram(header(1, Type.HELLO, payload), payload, address(1), 0.0) == []


def test_a_refusal_of_a_stranger_to_the_attempt_is_ignored():
    low = side(0)
    payload = msgpack.packb({"why": "no"})
    low.on_datagram(header(1, Type.REFUSE, payload), payload, address(1), 0.0)
    assert low.error is None


# --- as cores do it


@pytest.mark.parametrize("loss", [0.0, 0.5])
@pytest.mark.parametrize("paths", [1, 3])
def test_all_ranks_find_each_other(paths, loss):
    cores = Cores(4, connect=False, config=TransportConfig(paths=paths))
    rng = np.random.default_rng(5)
    cores.tamper = lambda header, datagram, target: [] if rng.random() < loss else [(0.0, datagram)]
    cores.run(until=30.0)
    for core in cores.cores:
        assert core.handshake.missing() == []
        assert len(core.handshake.proved) == 3 * paths


@pytest.mark.parametrize("newer", [0, 1])
def test_another_version_is_an_error_on_both_sides(newer):
    cores = Cores(connect=False)
    other = 1 - newer

    def as_version_2(header: wire.Header, datagram: bytes, target: int) -> list[tuple[float, bytes]]:
        # Both see a foreign version in all that they get, as they would if theirs were 1 and 2.
        return [(0.0, bytes([2]) + datagram[1:])]

    cores.tamper = as_version_2
    cores.run(until=3.0)
    for rank, peer in ((newer, other), (other, newer)):
        error = cores.cores[rank].handshake.error
        assert isinstance(error, VersionError) and error.ranks == (peer,)
        assert "version 2" in str(error) and "install the same dblp" in str(error)
        assert cores.cores[rank].drops[Drop.VERSION] >= 1


def test_a_short_hello_of_another_version_gets_no_longer_answer():
    core = make_core(0, 2)
    short = wire.encode_header(header(1, Type.HELLO, b"")._replace(version=9))
    core.receive_burst([slab_of([short])], now=0.0)
    out = [datagram for burst in core.bursts_to_send(now=0.0) for datagram in split(burst)]
    assert out == []
    long = short + bytes(HELLO_BYTES)
    core.receive_burst([slab_of([long])], now=0.0)
    out = [datagram for burst in core.bursts_to_send(now=0.0) for datagram in split(burst)]
    assert len(out) == 1 and HEADER_BYTES < len(out[0]) <= len(long)


def test_a_job_of_another_size_is_an_error_on_both_sides():
    cores = Cores(connect=False)
    cores.cores[1] = make_core(1, 3)
    cores.run(until=3.0)
    for rank in (0, 1):
        assert isinstance(cores.cores[rank].handshake.error, HandshakeError)
        assert "world_size is 3 on rank 1 and 2 on rank 0" in str(cores.cores[rank].handshake.error)


def test_a_job_of_another_session_is_ignored():
    """Two jobs on one port: neither disturbs the other."""
    cores = Cores(connect=False)
    cores.cores[1] = make_core(1, 2, session=SESSION + 1)
    cores.run(until=3.0)
    for core in cores.cores:
        assert core.handshake.error is None and len(core.handshake.missing()) == 1
    assert cores.cores[0].drops[Drop.SESSION] > 0
    assert cores.cores[0].drops.keys() == {Drop.SESSION}


def test_late_repeats_of_the_handshake_do_no_harm():
    cores = Cores(connect=False)
    cores.run(until=1.0)
    handshake = [(target, datagram) for target, _, datagram in cores.sent]
    for target, datagram in handshake:
        cores.inject(target, [datagram], source=address(1 - target))
    cores.run(until=2.0)
    assert all(core.handshake.error is None and not core.handshake.missing() for core in cores.cores)
    cores.begin()
    assert cores.tamper is deliver_all


def test_hellos_are_repeated_at_growing_distances():
    cores = Cores(connect=False)
    cores.tamper = lambda header, datagram, target: []
    times = []
    for step in range(400):
        cores.run(until=step * 0.01)
        times += [step * 0.01] * len(cores.sent)
        cores.sent.clear()
    gaps = np.diff(times)
    assert gaps[0] == pytest.approx(0.05, abs=0.011)
    assert gaps[-1] == pytest.approx(0.5, abs=0.011)
    assert all(later >= earlier - 0.011 for earlier, later in itertools.pairwise(gaps))
