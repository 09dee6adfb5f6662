"""Bulk flows of real endpoints over a simulated bottleneck, and what each of them gets of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dblp.sim.loop import run
from dblp.sim.port import HostSpec, Link, Network, SwitchPort
from dblp.sim.tcp import TcpFlow
from dblp.transport.config import TransportConfig
from dblp.transport.congestion import REGISTRY
from dblp.transport.endpoint import Endpoint
from dblp.transport.message import MessageSpec, message_id

BOTTLENECK = "bottleneck"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A bottleneck and the way to it."""

    rate_bps: float = 1e9
    """Of the bottleneck, bits per second of UDP payload; network cards are four times as fast."""
    latency_s: float = 50e-6
    """One way."""
    queue_bytes: int = 256 * 1024
    mark_bytes: int = 32 * 1024
    """Where marking begins, for what asks for marks."""
    mark_full_bytes: int = 128 * 1024
    """Where all is marked."""
    impair: str = ""
    """Of the senders' links."""
    noise: str = "jitter(50us)"
    """Of the way back, as of the hosts' schedulers: without any, flows that are clocked by each other's departures lock into
    a pattern (Floyd and Jacobson, "On Traffic Phase Effects in Packet-Switched Gateways", 1992)."""

    processing_s: float = 0.0
    """Time from a datagram's arrival to its read, on all hosts: their processors have other work."""

    def switch_port(self) -> SwitchPort:
        return SwitchPort(
            rate_bps=self.rate_bps,
            queue_bytes=self.queue_bytes,
            mark_bytes=self.mark_bytes,
            mark_full_bytes=self.mark_full_bytes,
        )


LAN = Setting()
WAN = Setting(
    rate_bps=2e8,
    latency_s=10e-3,
    queue_bytes=512 * 1024,
    mark_bytes=128 * 1024,
    mark_full_bytes=384 * 1024,
)
"""Marks begin above a seventh of what is in flight, 71 KB: below it DCTCP leaves the link idle (Alizadeh et al., SIGCOMM 2010,
section 3.3); with 64 KiB it was seen to take 56 %."""


BUSY = Setting(rate_bps=3e8, queue_bytes=512 * 1024, processing_s=4e-3)
"""Hosts with other work, which read every 4 ms."""
SHALLOW = Setting(queue_bytes=128 * 1024, processing_s=0.5e-3)
"""Hosts that read in time, as far as interpreters do, and a small buffer: it is full before a round trip is long."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What was seen in the measured part of a run."""

    shares: tuple[float, ...]
    """Of the link's rate, a flow each: payload of chunks that arrived, each once, without headers."""
    tcp: float
    """The same of the TCP-like flow; 0 without one."""
    queue_delay_s: float
    """Mean wait at the bottleneck."""
    peak_delay_s: float
    lost: float
    """Share of all datagrams that the network lost."""

    @property
    def total(self) -> float:
        return sum(self.shares)

    @property
    def jain(self) -> float:
        """Jain's fairness index: 1 if all flows get the same, 1/n if one gets all."""
        return sum(self.shares) ** 2 / (len(self.shares) * sum(x * x for x in self.shares))


class CountingSink:
    """Takes chunks and counts their bytes."""

    dtype = np.dtype(np.uint64)

    def __init__(self) -> None:
        self.nbytes = 0

    def place(self, first: int, rows: np.ndarray) -> None:
        self.nbytes += rows.nbytes


class World:
    """Hosts around one bottleneck. Flows are added, then measured."""

    def __init__(self, setting: Setting, congestion: str, seed: int = 0) -> None:
        self.setting = setting
        self.seed = seed
        self.config = TransportConfig(
            congestion=congestion, seed=seed, rate_bps=setting.rate_bps * (congestion == "fixed")
        )
        self.host = HostSpec(
            egress_bps=4.0 * setting.rate_bps, send_buffer_bytes=256 * 1024, processing_s=setting.processing_s
        )
        self.network = Network(
            asyncio.get_running_loop(), seed, link=Link(latency_s=setting.latency_s), host=self.host
        )
        self.network.set_switch_port(BOTTLENECK, setting.switch_port())
        self.sinks: list[CountingSink] = []
        self.tcp: list[TcpFlow] = []
        self.endpoints: list[Endpoint] = []

    async def connect(self, hosts: Sequence[str]) -> list[Endpoint]:
        """Endpoints of one group; all but the first send to the first."""
        for source in hosts[1:]:
            self.lead(source, hosts[0])
        ecn = REGISTRY[self.config.congestion].ecn
        ports = [self.network.port(host, ecn=ecn) for host in hosts]
        peers = [list(port.addresses) for port in ports]
        options: dict[str, Any] = {"world_size": len(hosts), "config": self.config, "peers": peers}
        session = 0x1000 + len(self.endpoints)
        connects = [
            Endpoint.connect(port, rank=rank, session=session, **options) for rank, port in enumerate(ports)
        ]
        endpoints = await asyncio.gather(*connects)
        self.endpoints += endpoints
        return endpoints

    def lead(self, source: str, target: str) -> None:
        """Let the link from one host to another lead through the bottleneck."""
        link = Link(latency_s=self.setting.latency_s, impair=self.setting.impair, via=BOTTLENECK)
        self.network.set_link(source, target, link, one_way=True)
        back = Link(latency_s=self.setting.latency_s, impair=self.setting.noise)
        self.network.set_link(target, source, back, one_way=True)

    def send(self, endpoints: Sequence[Endpoint], seconds: float) -> None:
        """Every other endpoint sends to the first, as much as the link takes in ``seconds``."""
        nbytes = int(self.setting.rate_bps / 8 * seconds)
        spec = MessageSpec(nbytes=nbytes, chunk_bytes=endpoints[0].max_chunk_bytes)
        data = np.zeros(nbytes, np.uint8)
        for endpoint in endpoints:
            endpoint.begin_round(1, b"flow", repr)
        for rank, endpoint in enumerate(endpoints[1:], 1):
            sink = CountingSink()
            self.sinks.append(sink)
            message = message_id(0, 1, rank)
            endpoints[0].receive(rank, message, spec, sink)
            endpoint.send(0, message, data, spec)

    async def pair(self, index: int, seconds: float) -> None:
        """One flow between two hosts of its own."""
        self.send(await self.connect([f"r{index}", f"s{index}"]), seconds)

    def compete(self, kind: str) -> None:
        """A TCP-like flow between two hosts of its own."""
        self.lead("tcp-s", "tcp-r")
        flow = TcpFlow(self.network, "tcp-s", "tcp-r", kind=kind)
        flow.start()
        self.tcp.append(flow)

    async def measure(self, warm_up_s: float, seconds: float) -> Share:
        """Let ``warm_up_s`` pass, then look for ``seconds``; everything ends."""
        await asyncio.sleep(warm_up_s)
        queue = self.network.switch_queue(BOTTLENECK)
        before = [sink.nbytes for sink in self.sinks]
        tcp_before = sum(flow.delivered_bytes for flow in self.tcp)
        area, queue.peak_bytes = queue.byte_seconds, 0
        await asyncio.sleep(seconds)
        bits = 8.0 / (seconds * self.setting.rate_bps)
        shares = tuple((sink.nbytes - start) * bits for sink, start in zip(self.sinks, before, strict=True))
        tcp = (sum(flow.delivered_bytes for flow in self.tcp) - tcp_before) * bits
        drain = 8.0 / self.setting.rate_bps
        for flow in self.tcp:
            flow.stop()
        for endpoint in self.endpoints:
            endpoint.fail(RuntimeError("the measurement is over"))
        await asyncio.gather(*(endpoint.close(linger_s=0.0) for endpoint in self.endpoints))
        return Share(
            shares=shares,
            tcp=tcp,
            queue_delay_s=(queue.byte_seconds - area) / seconds * drain,
            peak_delay_s=queue.peak_bytes * drain,
            lost=self.network.network_loss,
        )


def play(main: Callable[[], Coroutine[Any, Any, Share]]) -> Share:
    """Run a scenario in virtual time."""
    return run(main(), until_s=600.0)


def lossy(
    congestion: str, setting: Setting, *, warm_up_s: float, seconds: float, loss: float = 0.01
) -> Share:
    """One flow whose datagrams are lost at random."""

    async def main() -> Share:
        world = World(replace(setting, impair=f"loss({loss})" if loss else ""), congestion)
        await world.pair(0, warm_up_s + seconds)
        return await world.measure(warm_up_s, seconds)

    return play(main)


def two(congestion: str, setting: Setting, *, warm_up_s: float, seconds: float, apart_s: float) -> Share:
    """Two flows; the second begins ``apart_s`` later."""

    async def main() -> Share:
        world = World(setting, congestion)
        total = apart_s + warm_up_s + seconds
        await world.pair(0, total)
        await asyncio.sleep(apart_s)
        await world.pair(1, total)
        return await world.measure(warm_up_s, seconds)

    return play(main)


def incast(congestion: str, setting: Setting, *, senders: int, warm_up_s: float, seconds: float) -> Share:
    """Many send to one at once."""

    async def main() -> Share:
        world = World(setting, congestion)
        endpoints = await world.connect([f"h{rank}" for rank in range(senders + 1)])
        world.send(endpoints, warm_up_s + seconds)
        return await world.measure(warm_up_s, seconds)

    return play(main)


def beside_tcp(congestion: str, setting: Setting, *, kind: str, warm_up_s: float, seconds: float) -> Share:
    """One flow and one TCP-like flow, begun together."""

    async def main() -> Share:
        world = World(setting, congestion)
        await world.pair(0, warm_up_s + seconds)
        world.compete(kind)
        return await world.measure(warm_up_s, seconds)

    return play(main)
