"""Ports that keep what they send, and captures made of it: pcap files of simulated networks."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dblp.collectives.group import Group
from dblp.sim.loop import run as run_virtual
from dblp.sim.port import Link, Network
from dblp.transport.capture import UdpDatagram
from dblp.transport.config import TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.policy import Bounded, Exact
from dblp.transport.port import Address, Burst, PortFacts, Slab

ELEMENTS = 20_000
SESSION = 0x0102_0304_0506_0708


class RecordingPort:
    """Passes everything on to ``port`` and keeps each datagram that it took."""

    def __init__(self, port: Any, kept: list[UdpDatagram]) -> None:
        self._port = port
        self._kept = kept

    @property
    def addresses(self) -> Sequence[Address]:
        addresses: Sequence[Address] = self._port.addresses
        return addresses

    @property
    def facts(self) -> PortFacts:
        facts: PortFacts = self._port.facts
        return facts

    def open(self, on_batch: Callable[[Sequence[Slab]], None], on_writable: Callable[[], None]) -> None:
        self._port.open(on_batch, on_writable)

    def send(self, burst: Burst) -> bool:
        data = burst.data.tobytes()
        taken: bool = self._port.send(burst)
        if taken:
            now, source = asyncio.get_running_loop().time(), self.addresses[burst.path]
            for at in range(0, len(data), burst.segment):
                payload = data[at : at + burst.segment]
                self._kept.append(UdpDatagram(now, source, burst.address, payload, len(payload)))
        return taken

    def close(self) -> None:
        self._port.close()


def recorded_rounds(
    *, world_size: int = 2, budget: float = 0.0, impair: str = "", rounds: int = 2, session: int = SESSION
):
    """The datagrams that the ranks sent in some all-reduces on a simulated network, and the reports of all ranks."""
    kept: list[UdpDatagram] = []

    async def main():
        network = Network(asyncio.get_running_loop(), 5, link=Link(latency_s=50e-6, impair=impair))
        ports = [RecordingPort(network.port(f"10.0.0.{rank + 1}"), kept) for rank in range(world_size)]
        peers = [list(port.addresses) for port in ports]
        endpoints = await asyncio.gather(
            *(
                Endpoint.connect(
                    port,
                    rank=rank,
                    world_size=world_size,
                    config=TransportConfig(),
                    session=session,
                    peers=peers,
                )
                for rank, port in enumerate(ports)
            )
        )
        reports = await asyncio.gather(*(member(endpoint, budget, rounds) for endpoint in endpoints))
        await asyncio.gather(*(endpoint.close(linger_s=1.0) for endpoint in endpoints))
        return reports

    return kept, run_virtual(main())


async def member(endpoint, budget, rounds):
    group = Group(endpoint, timeout_s=60.0)
    policy = Bounded(budget, consistency="exact") if budget else Exact()
    array = np.random.default_rng(endpoint.rank).standard_normal(ELEMENTS).astype(np.float32)
    reports = [
        await group.all_reduce(array.copy(), "sum", policy=policy, algorithm="direct") for _ in range(rounds)
    ]
    group.close()
    return reports


def write_pcap(path: Path, datagrams: Sequence[UdpDatagram], *, snaplen: int = 65_535) -> None:
    """A capture (classic pcap, IPv4 over Ethernet) of these datagrams; ``snaplen`` cuts the frames."""
    with path.open("wb") as file:
        file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, snaplen, 1))
        for datagram in datagrams:
            frame = _frame(datagram)
            sec, usec = divmod(round(datagram.time * 1e6), 1_000_000)
            file.write(
                struct.pack("<IIII", sec, usec, min(snaplen, len(frame)), len(frame)) + frame[:snaplen]
            )


def _frame(datagram: UdpDatagram) -> bytes:
    """Ethernet, IPv4 (RFC 791) and UDP (RFC 768, no checksum)."""
    (host, port), (peer, peer_port) = datagram.source, datagram.target
    udp = struct.pack(">HHHH", port, peer_port, 8 + len(datagram.payload), 0) + datagram.payload
    ends = socket.inet_aton(host) + socket.inet_aton(peer)
    ip = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0) + ends
    return bytes((2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0)) + ip + udp
