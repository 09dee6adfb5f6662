"""The UDP port on real sockets: what leaves arrives, byte for byte, on both families and both loops."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import socket
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import uvloop

from dblp.errors import ClosedError, ConfigError, LocalError
from dblp.transport import libc, udp_socket
from dblp.transport.config import TransportConfig
from dblp.transport.port import Address, Burst, Port
from dblp.transport.udp import DRAIN_CALLS, UdpPort, open_port
from dblp.transport.udp_receive import SLOT_BYTES, SLOTS, SUPER_VLEN
from dblp.transport.udp_send import DSCP, Way
from tests.transport.udp_inbox import CONFIG, LOOPS, SEGMENT, Inbox, cut, random_bytes, run

pytestmark = pytest.mark.sockets

HOSTS = ["127.0.0.1", "::1"]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("way", list(Way))
def test_bursts_arrive_whole_and_in_order(loop, host, way):
    lengths = [SEGMENT * 44, SEGMENT * 44 - 100, SEGMENT, 16, SEGMENT * 3 + 1, SEGMENT * 2, SEGMENT * 2]
    bursts = [random_bytes(length, seed) for seed, length in enumerate(lengths)]

    async def main():
        with_ports = [open_port(CONFIG, host=host, way=way) for _ in range(2)]
        sender, receiver = with_ports
        inbox = Inbox(receiver)
        for data in bursts:
            assert sender.send(Burst(data, SEGMENT, 0, 1, receiver.addresses[0]))
        await inbox.count(sum(len(cut(data)) for data in bursts))
        assert inbox.payloads() == [piece for data in bursts for piece in cut(data)]
        assert {source for _, source, _ in inbox.datagrams} == {sender.addresses[0]}
        sent, got = sender.counters(), receiver.counters()
        assert sent.datagrams_sent == got.datagrams_received == len(inbox.datagrams)
        assert sent.bytes_sent == got.bytes_received == sum(lengths)
        assert sent.fallbacks == 0 and sender.way is way
        for port in with_ports:
            port.close()

    run(loop, main)


def test_a_super_packet_is_one_slab_and_singles_are_one_run():
    async def main():
        sender, receiver = open_port(CONFIG), open_port(CONFIG)
        if not udp_socket.probe(receiver._paths[0].sock).gro:
            pytest.skip("this kernel has no UDP_GRO")
        to = receiver.addresses[0]
        assert sender.send(Burst(random_bytes(SEGMENT * 5 + 7), SEGMENT, 0, 1, to))
        for seed in range(3):
            assert sender.send(Burst(random_bytes(200, seed), SEGMENT, 0, 1, to))
        assert sender.send(Burst(random_bytes(96), SEGMENT, 0, 1, to))
        inbox = Inbox(receiver)  # opened now, so that all wait in one queue
        await inbox.count(10)
        assert inbox.shapes == [(SEGMENT, 6, 7, SEGMENT), (200, 3, 200, SLOT_BYTES), (96, 1, 96, SLOT_BYTES)]
        assert receiver.counters().receive_syscalls == 1
        for port in (sender, receiver):
            port.close()

    run(asyncio.new_event_loop, main)


def test_rows_of_both_kinds_of_slab():
    """``Slab.rows`` sees the same payloads in a super-packet and in slots."""
    data = random_bytes(SEGMENT * 6)
    seen: list[np.ndarray] = []

    async def main(way):
        sender, receiver = open_port(CONFIG, way=way), open_port(CONFIG)
        rows: list[np.ndarray] = []
        receiver.open(
            lambda slabs: rows.extend(
                slab.rows(0, slab.count, 48, 352, np.dtype("<f4")).copy() for slab in slabs
            ),
            lambda: None,
        )
        assert sender.send(Burst(data, SEGMENT, 0, 1, receiver.addresses[0]))
        while sum(len(part) for part in rows) < 6:
            await asyncio.sleep(0.001)
        seen.append(np.concatenate(rows))
        for port in (sender, receiver):
            port.close()

    for way in (Way.GSO, Way.SENDMMSG):
        run(asyncio.new_event_loop, lambda way=way: main(way))
    expected = data.reshape(6, SEGMENT)[:, 48:]
    for rows in seen:
        assert rows.shape == (6, 352)
        assert (rows.view(np.uint8) == expected).all()


@pytest.mark.parametrize("host", HOSTS)
def test_interleaved_senders_are_told_apart(host):
    async def main():
        senders = [open_port(CONFIG, host=host) for _ in range(3)]
        receiver = open_port(CONFIG, host=host)
        to, expected = receiver.addresses[0], []
        for turn in range(30):
            sender = senders[turn % 3]
            data = random_bytes(100 if turn % 4 else SEGMENT * 2 + 1, turn)
            assert sender.send(Burst(data, SEGMENT, 0, 1, to))
            expected += [(0, sender.addresses[0], piece) for piece in cut(data)]
        inbox = Inbox(receiver)
        await inbox.count(len(expected))
        assert inbox.datagrams == expected
        for port in (*senders, receiver):
            port.close()

    run(uvloop.new_event_loop, main)


def test_paths_are_separate_sockets():
    async def main():
        config = TransportConfig(paths=3)
        sender, receiver = open_port(config), open_port(config)
        inbox = Inbox(receiver)
        assert len({address.port for address in receiver.addresses}) == 3
        for path, to in enumerate(receiver.addresses):
            assert sender.send(Burst(random_bytes(64, path), SEGMENT, path, 0, to))
        await inbox.count(3)
        got = sorted(inbox.datagrams)
        assert [(path, source) for path, source, _ in got] == list(enumerate(sender.addresses))
        for port in (sender, receiver):
            port.close()

    run(asyncio.new_event_loop, main)


def test_more_datagrams_than_one_drain():
    """A callback hands over at most DRAIN_CALLS batches; the rest comes by later ones, nothing is lost."""

    async def main():
        sender, receiver = open_port(CONFIG, way=Way.SENDMMSG), open_port(CONFIG)
        total = DRAIN_CALLS * SLOTS + 88
        for first in range(0, total, 43):
            count = min(43, total - first)
            data = np.repeat(np.arange(first, first + count, dtype=np.uint16), 8).view(np.uint8)
            assert sender.send(Burst(data, 16, 0, 1, receiver.addresses[0]))
        inbox = Inbox(receiver)
        await asyncio.sleep(0)
        await inbox.count(total)
        assert [int.from_bytes(payload[:2], "little") for payload in inbox.payloads()] == list(range(total))
        assert max(inbox.batches) <= SLOTS
        for port in (sender, receiver):
            port.close()

    run(asyncio.new_event_loop, main)


def test_bursts_of_more_than_64_datagrams():
    """Kernels before 6.9 refuse them in one super-packet; that must not cost GSO for good."""

    async def main():
        sender, receiver = open_port(CONFIG), open_port(CONFIG)
        inbox, data = Inbox(receiver), random_bytes(100 * 130 + 5)
        assert sender.send(Burst(data, 100, 0, 1, receiver.addresses[0]))
        await inbox.count(131)
        assert inbox.payloads() == cut(data, 100)
        assert sender.way is Way.GSO
        for port in (sender, receiver):
            port.close()

    run(asyncio.new_event_loop, main)


def test_pointer_and_read_only_data_send_the_same_bytes():
    async def main():
        sender, receiver = open_port(CONFIG), open_port(CONFIG)
        inbox, data = Inbox(receiver), random_bytes(SEGMENT * 4)
        to, frozen = receiver.addresses[0], data.copy()
        frozen.flags.writeable = False
        assert sender.send(Burst(data[SEGMENT:], SEGMENT, 0, 1, to, libc.address_of(data) + SEGMENT))
        assert sender.send(Burst(frozen[SEGMENT:], SEGMENT, 0, 1, to))
        await inbox.count(6)
        assert inbox.payloads() == 2 * cut(data[SEGMENT:])
        for port in (sender, receiver):
            port.close()

    run(asyncio.new_event_loop, main)


def test_empty_and_overlong_datagrams_are_dropped_and_counted():
    async def main():
        receiver = open_port(TransportConfig(datagram_bytes=1000))
        inbox = Inbox(receiver)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for nbytes in (0, 1001, 65_507, 1000):
                stranger.sendto(bytes(nbytes), receiver.addresses[0])
        await inbox.count(1)
        assert inbox.payloads() == [bytes(1000)]
        counters = receiver.counters()
        assert counters.dropped_length == 3
        assert counters.datagrams_received == 1 and counters.bytes_received == 1000
        receiver.close()

    run(asyncio.new_event_loop, main)


@pytest.mark.parametrize("host", HOSTS)
def test_dscp_of_each_class_is_on_the_wire(host):
    six = ":" in host
    level = socket.IPPROTO_IPV6 if six else socket.IPPROTO_IP
    option = socket.IPV6_RECVTCLASS if six else libc.IP_RECVTOS

    async def main():
        sender = open_port(CONFIG, host=host)
        with socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM) as plain:
            plain.settimeout(10)
            plain.setsockopt(level, option, 1)
            plain.bind((host, 0))
            to = Address(host, plain.getsockname()[1])
            for cls in range(4):
                assert sender.send(Burst(random_bytes(SEGMENT * 2), SEGMENT, 0, cls, to))
                for _ in range(2):
                    payload, ancillary, _, _ = plain.recvmsg(2000, 100)
                    [(_, _, value)] = ancillary
                    assert len(payload) == SEGMENT
                    assert value[0] == DSCP[cls] << 2
        sender.close()

    run(asyncio.new_event_loop, main)


def test_timestamps_are_of_arrival_not_of_reading():
    async def main():
        sender, receiver = open_port(CONFIG), open_port(CONFIG)
        before = time.monotonic()
        assert sender.send(Burst(random_bytes(64), SEGMENT, 0, 1, receiver.addresses[0]))
        assert sender.send(Burst(random_bytes(SEGMENT * 2), SEGMENT, 0, 1, receiver.addresses[0]))
        after = time.monotonic()
        time.sleep(0.05)
        inbox = Inbox(receiver)
        await inbox.count(3)
        slack = 1e-3  # the two clocks are read one after the other
        assert len(inbox.stamps) >= 2
        for stamp in inbox.stamps:
            assert before - slack <= stamp <= after + slack
        for port in (sender, receiver):
            port.close()

    run(asyncio.new_event_loop, main)


def refused_more_than(port: UdpPort, address: Address, count: int) -> bool:
    return port.refused(address).count > count


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("host", HOSTS)
def test_refusals_are_counted_by_address_and_not_fatal(loop, host):
    """After an ICMP error the port still sends and receives (libuv stops to watch a socket that had one)."""

    async def main():
        sender, receiver = open_port(CONFIG, host=host), open_port(CONFIG, host=host)
        gone = open_port(CONFIG, host=host)
        dead = gone.addresses[0]
        gone.close()
        inbox, answers = Inbox(receiver), Inbox(sender)
        for turn in range(3):
            assert sender.send(Burst(random_bytes(64), SEGMENT, 0, 1, dead))
            assert sender.send(Burst(random_bytes(64), SEGMENT, 0, 1, receiver.addresses[0]))
            await inbox.count(turn + 1)
            await inbox.until(partial(refused_more_than, sender, dead, turn))
            assert receiver.send(Burst(random_bytes(80), SEGMENT, 0, 1, sender.addresses[0]))
            await answers.count(turn + 1)
        refusals = sender.refused(dead)
        assert refusals.count == sender.counters().refused == 3
        assert 0 <= time.monotonic() - refusals.last < 60
        assert sender.refused(receiver.addresses[0]).count == 0
        assert sender.counters().lost_on_send == 0
        for port in (sender, receiver):
            port.close()

    run(loop, main)


def test_kernel_drops_are_counted():
    async def main():
        sender = open_port(CONFIG)
        receiver = open_port(TransportConfig(receive_buffer_bytes=65_536))
        for _ in range(40):
            assert sender.send(Burst(random_bytes(SEGMENT * 10), SEGMENT, 0, 1, receiver.addresses[0]))
        inbox = Inbox(receiver)
        await inbox.until(lambda: bool(inbox.datagrams))
        await asyncio.sleep(0.05)
        counters = receiver.counters()
        assert counters.kernel_drops > 0
        assert counters.datagrams_received < 400
        receiver.close()
        assert receiver.counters() == counters
        sender.close()

    run(asyncio.new_event_loop, main)


@pytest.mark.parametrize("host", HOSTS)
def test_close_is_idempotent_and_frees_everything(host):
    def descriptors() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    async def main():
        start = descriptors()
        ports = [open_port(TransportConfig(paths=4), host=host) for _ in range(2)]
        for port in ports:
            Inbox(port)
        to = ports[1].addresses[0]
        assert ports[0].send(Burst(random_bytes(64), SEGMENT, 0, 1, to))
        await asyncio.sleep(0.01)
        for port in ports * 2:
            port.close()
        assert descriptors() == start
        with pytest.raises(ClosedError, match="closed"):
            ports[0].send(Burst(random_bytes(64), SEGMENT, 0, 1, to))
        with pytest.raises(ClosedError, match="closed"):
            ports[0].open(lambda slabs: None, lambda: None)

    run(uvloop.new_event_loop, main)
    gc.collect()  # a socket that leaked would warn here, and warnings are errors


def test_a_callback_may_close_the_port():
    async def main():
        sender, receiver = open_port(CONFIG, way=Way.SENDMMSG), open_port(CONFIG)
        batches = []

        def on_batch(slabs):
            batches.append(sum(slab.count * slab.supers for slab in slabs))
            receiver.close()

        for _ in range(8):
            assert sender.send(Burst(random_bytes(16 * 40), 16, 0, 1, receiver.addresses[0]))
        receiver.open(on_batch, lambda: None)
        while not batches:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert batches == [SUPER_VLEN]
        sender.close()

    run(asyncio.new_event_loop, main)


def test_a_port_opens_once():
    async def main():
        port = open_port(CONFIG)
        port.open(lambda slabs: None, lambda: None)
        with pytest.raises(LocalError, match="open already"):
            port.open(lambda slabs: None, lambda: None)
        port.close()

    run(asyncio.new_event_loop, main)


@pytest.mark.parametrize(
    ("host", "to", "says"),
    [
        ("127.0.0.1", Address("::1", 5), "no numeric IPv4 address"),
        ("::1", Address("127.0.0.1", 5), "no numeric IPv6 address"),
        ("127.0.0.1", Address("node1", 5), "no numeric IPv4 address"),
        ("127.0.0.1", Address("127.0.0.1", 0), "port 0"),
        ("::1", Address("fe80::1%nosuch0", 5), "no numeric IPv6 address"),
    ],
)
def test_addresses_that_cannot_be_sent_to(host, to, says):
    port = open_port(CONFIG, host=host)
    with pytest.raises(ConfigError, match=says):
        port.send(Burst(random_bytes(64), SEGMENT, 0, 1, to))
    port.close()


def test_facts_are_what_the_socket_says():
    port: Port = open_port(TransportConfig(receive_buffer_bytes=131_072, datagram_bytes=65_507))
    assert isinstance(port, UdpPort)
    sock = port._paths[0].sock
    assert port.facts.receive_buffer_bytes == sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= 131_072
    assert port.facts.max_datagram_bytes == min(65_507, port.choices[0].mtu - 28)
    assert sock.getsockopt(socket.IPPROTO_IP, libc.IP_MTU_DISCOVER) == libc.PMTUDISC_DO
    port.close()


def test_a_clamped_buffer_is_said_once_with_the_remedy(monkeypatch, caplog):
    monkeypatch.setattr(libc, "SO_RCVBUFFORCE", 9999)  # as without CAP_NET_ADMIN
    monkeypatch.setattr(udp_socket, "_clamped_warned", set())
    config = TransportConfig(receive_buffer_bytes=1 << 30)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            open_port(config).close()
    [record] = [record for record in caplog.records if "receive buffer" in record.getMessage()]
    assert "sysctl -w net.core.rmem_max=1073741824" in record.getMessage()


def test_arena_is_aligned():
    """Alignment is worth a factor of 8 on receiving (see ``libc.aligned``)."""
    port = open_port(CONFIG)
    assert libc.address_of(port._receiver.arena) % libc.PAGE_BYTES == 0
    assert ctypes.sizeof(ctypes.c_void_p) == 8
    port.close()


def test_each_datagram_of_a_slab_has_its_own_time_of_arrival():
    """Single datagrams that waited together, as after a stall of the reader."""

    async def main():
        port = open_port(CONFIG)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for _ in range(3):
                sender.sendto(bytes(100), port.addresses[0])
                time.sleep(0.02)
        inbox = Inbox(port)
        await inbox.count(3)
        assert len(inbox.shapes) == 1
        assert np.diff(inbox.arrivals).min() >= 0.019
        port.close()

    run(asyncio.new_event_loop, main)


def _resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * libc.PAGE_BYTES


def test_a_receivers_arena_is_touched_by_what_arrives_and_goes_back_to_the_kernel():
    """malloc clears what it has had back before, all 16 MiB of it, for each receiver: by 60 groups a rank held 340 MiB."""
    nbytes = SLOTS * SLOT_BYTES
    least = _resident_bytes()
    for _ in range(3):
        arena = libc.aligned(nbytes)
        assert _resident_bytes() - least < nbytes // 4, "not touched yet"
        assert libc.address_of(arena) % libc.PAGE_BYTES == 0 and not arena[:: libc.PAGE_BYTES].any()
        arena[:] = 1
        assert _resident_bytes() - least > nbytes // 2
        del arena
        assert _resident_bytes() - least < nbytes // 4, "given back"
