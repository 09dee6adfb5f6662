"""Congestion marks on sockets: asked for by the control that heeds them, read with each received message, told to the sender.

No switch is needed: a sender may set the mark itself.
"""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest

from dblp.sim.port import Network
from dblp.transport import libc
from dblp.transport.config import TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.message import MessageSpec, message_id
from dblp.transport.port import Address, Burst, Ecn
from dblp.transport.udp import UdpPort, open_port
from dblp.transport.udp_send import DSCP, Way
from tests.sim.flows import CountingSink
from tests.transport.udp_inbox import SEGMENT, random_bytes

pytestmark = pytest.mark.sockets

CONFIG = TransportConfig(congestion="dctcp")
HOSTS = ["127.0.0.1", "::1"]


def set_mark(port: UdpPort, ecn: Ecn) -> UdpPort:
    """Have a port send all it sends with these ECN bits, as if a switch had set them."""
    for sender in port._senders:
        sender._ecn = ecn
    return port


def marked_datagrams(host: str, way: Way, *, opened_first: bool) -> list[tuple[bytes, bool]]:
    """What arrives of plain and marked bursts, super-packets and single datagrams in turn: (datagram, marked)."""
    seen: list[tuple[bytes, bool]] = []

    def on_batch(slabs):
        for slab in slabs:
            for part in slab.parts():
                seen.extend((part.datagram(index), part.marked) for index in range(part.count))

    async def main():
        receiver = open_port(CONFIG, host=host)
        plain = open_port(CONFIG, host=host, way=way)
        marked = set_mark(open_port(CONFIG, host=host, way=way), Ecn.CE)
        if opened_first:
            receiver.open(on_batch, lambda: None)
        for turn in range(6):
            for port in (plain, marked):
                data = random_bytes(SEGMENT * 3 if turn % 2 else 100, 2 * turn)
                data[::SEGMENT] = port is marked
                assert port.send(Burst(data, SEGMENT, 0, 1, receiver.addresses[0]))
                if opened_first:
                    await asyncio.sleep(0.002)
        if not opened_first:
            receiver.open(on_batch, lambda: None)
        async with asyncio.timeout(20):
            while len(seen) < 2 * (3 * 1 + 3 * 3):
                await asyncio.sleep(0.001)
        for port in (plain, marked, receiver):
            port.close()

    asyncio.run(main())
    return seen


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("way", [Way.GSO, Way.SENDMMSG])
@pytest.mark.parametrize("opened_first", [True, False], ids=["one by one", "in one batch"])
def test_each_slab_says_whether_its_datagrams_were_marked(host, way, opened_first):
    seen = marked_datagrams(host, way, opened_first=opened_first)
    assert [datagram[0] == 1 for datagram, _ in seen] == [marked for _, marked in seen]
    assert sum(marked for _, marked in seen) == 12


@pytest.mark.parametrize(("congestion", "bits"), [("dctcp", Ecn.ECT), ("delay", Ecn.NOT_ECT)])
@pytest.mark.parametrize("host", HOSTS)
def test_only_a_control_that_heeds_marks_asks_for_them(host, congestion, bits):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    level, kind, option = (
        (socket.IPPROTO_IPV6, socket.IPV6_TCLASS, libc.IPV6_RECVTCLASS)
        if family == socket.AF_INET6
        else (socket.IPPROTO_IP, socket.IP_TOS, libc.IP_RECVTOS)
    )

    async def main():
        port = open_port(TransportConfig(congestion=congestion), host=host)
        with socket.socket(family, socket.SOCK_DGRAM) as plain:
            plain.bind((host, 0))
            plain.setsockopt(level, option, 1)
            plain.settimeout(5)
            from_port = Address(host, plain.getsockname()[1])
            assert port.send(Burst(random_bytes(100), SEGMENT, 0, 2, from_port))
            _, control, _, _ = plain.recvmsg(2000, 64)
        port.close()
        (service,) = [data for at, what, data in control if (at, what) == (level, kind)]
        assert service[0] == DSCP[2] << 2 | bits

    asyncio.run(main())


def test_marks_reach_the_sender_and_shrink_its_window():
    async def main():
        config = TransportConfig(congestion="dctcp", timeout_s=20.0)
        ports = [open_port(config, host="127.0.0.1") for _ in range(2)]
        peers = [list(port.addresses) for port in ports]
        connects = [
            Endpoint.connect(port, rank=rank, world_size=2, config=config, session=5, peers=peers)
            for rank, port in enumerate(ports)
        ]
        endpoints = await asyncio.gather(*connects)
        congestion = endpoints[0].core.senders[1].paths[0].congestion
        await transfer(endpoints, 1)
        before = congestion.window_bytes
        assert before > 1 << 20, "no marks: slow start"
        for sender in ports[0]._senders:
            sender._templates.clear()
            sender._trains.clear()
        set_mark(ports[0], Ecn.CE)
        await transfer(endpoints, 2)
        assert congestion.window_bytes < 0.8 * before, "alpha is still near 1: the first mark nearly halves"
        await asyncio.gather(*(endpoint.close() for endpoint in endpoints))

    asyncio.run(main())


async def transfer(endpoints: list[Endpoint], round_: int) -> None:
    """4 MiB from rank 0 to rank 1."""
    spec = MessageSpec(nbytes=4 << 20, chunk_bytes=endpoints[0].max_chunk_bytes)
    for endpoint in endpoints:
        endpoint.begin_round(round_, b"marks", repr)
    message = message_id(0, round_, 1)
    receive = endpoints[1].receive(0, message, spec, CountingSink())
    sent = endpoints[0].send(1, message, np.zeros(spec.nbytes, np.uint8), spec)
    await asyncio.gather(receive.done, sent.done)
    for endpoint in endpoints:
        endpoint.end_round(round_)


def test_a_simulated_port_is_told_whether_to_ask_for_marks():
    async def main():
        network = Network(asyncio.get_running_loop())
        assert network.port("a", ecn=True)._ecn is Ecn.ECT
        assert network.port("a")._ecn is Ecn.NOT_ECT

    asyncio.run(main())
