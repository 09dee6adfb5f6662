"""A simulated network in virtual time, and its ports: the same interface as UDP sockets, replayed exactly from a seed.

Theory of operation: a burst that a host sends passes its network card (``HostSpec.egress_bps``; when that is
behind, ``send`` would block), the link to the other host (losses, queue, latency), a switch port that other links
lead through too (``Link.via``), the other host's ``ingress`` and ``switch`` (the port of a switch that all senders
share; the latter with classes and congestion marks), and the receive buffer of the path, which fills until the host
gets round to reading it. Datagrams of a burst that arrive within ``interrupt_s`` are handed over together, at the
time of the last, as network cards do. A burst through an untroubled link goes through whole, in a handful of Python
calls. All randomness comes from the network's seed and the names of the hosts; all events are timers of the loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dblp.errors import ConfigError
from dblp.sim.links import Host, HostSpec, Link, Wire, charge, checksum, spec_of, together, truesize
from dblp.sim.queues import Parcel, SwitchPort, SwitchQueue
from dblp.sim.slabs import Arrival, regroup, scribble, slabs_of
from dblp.transport.impair import MAX_BURST_BYTES, MAX_BURST_DATAGRAMS, gather, sizes_of
from dblp.transport.impair_model import Fate, Impairer
from dblp.transport.impair_spec import ImpairSpec
from dblp.transport.port import Address, Burst, Ecn, PortFacts, Slab

__all__ = ["HostSpec", "Link", "Network", "SimPort", "SwitchPort", "SwitchQueue", "truesize"]

FIRST_PORT = 10_000
"""Port number of a host's first path."""
RETRY_S = 100e-6
"""Time after which a port that blocked at random may send again."""


class Network:
    """Hosts and links on one event loop. ``loop``: a VirtualLoop for exact replay.

    ``link`` and ``host`` are the defaults for pairs and hosts without settings of their own. ``regroup``: share of
    the arrivals that are cut, scattered or joined before they are handed over; ``block``: share of the sends that
    block for no reason. Both exercise the slow paths of the core.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        seed: int = 0,
        *,
        link: Link | None = None,
        host: HostSpec | None = None,
        regroup: float = 0.0,
        block: float = 0.0,
        interrupt_s: float = 50e-6,
    ) -> None:
        self.loop = loop
        self.seed = seed
        self.regroup = regroup
        self.block = block
        self.interrupt_s = interrupt_s
        self.rng = np.random.default_rng([seed, zlib.crc32(b"network")])
        self.counters: Counter[str] = Counter()
        """Datagrams ``sent`` and ``delivered`` and, by reason, lost outside of the impairments: ``dead``, ``cut``,
        ``buffer``, ``oversize``, ``unreachable``, ``queue`` (of a switch port)."""
        self._link_default = link or Link()
        self._host_default = host or HostSpec()
        self._links: dict[tuple[str, str], Wire] = {}
        self._hosts: dict[str, Host] = {}
        self._switch_ports: dict[str, SwitchQueue[tuple[Arrival, Address]]] = {}
        self._ports: dict[Address, SimPort] = {}
        self._cuts: set[tuple[str, str]] = set()
        self._impairers: list[Impairer] = []
        self._made: Counter[tuple[str, ...]] = Counter()
        self._digest = hashlib.blake2b(digest_size=16)

    # Building.

    def set_link(self, source: str, target: str, link: Link, *, one_way: bool = False) -> None:
        """Give the link between two hosts (one direction if ``one_way``) its settings; its queue starts empty."""
        self._links[source, target] = self._wire(link, source, target)
        if not one_way:
            self._links[target, source] = self._wire(link, target, source)

    def set_host(self, host: str, spec: HostSpec) -> None:
        """Give a host its settings; its ports see new facts."""
        state = self._host(host)
        state.configure(spec, self._impairer(spec_of(spec.ingress), host, "ingress"))

    def set_switch_port(self, name: str, spec: SwitchPort) -> None:
        """Make a switch port that links lead through by its name (``Link.via``); its queue starts empty."""
        self._switch_ports[name] = SwitchQueue(
            spec, self._rng(name, "switch port"), portion_s=self.interrupt_s
        )

    def switch_queue(self, name: str) -> SwitchQueue[tuple[Arrival, Address]]:
        """The queue of a named switch port, or of the one that leads to a host. Raises ConfigError if there is none."""
        host = self._hosts.get(name)
        queue = self._switch_ports.get(name) or (host.switch if host is not None else None)
        if queue is None:
            raise ConfigError(f"no switch port {name!r}: make it with set_switch_port, or give the host one")
        return queue

    def port(self, host: str, paths: int = 1, *, ecn: bool = False) -> SimPort:
        """A port with ``paths`` free addresses on a host. ``ecn``: what it sends asks switches for marks."""
        numbers = (n for n in range(FIRST_PORT, 65_536) if Address(host, n) not in self._ports)
        return SimPort(self, [Address(host, next(numbers)) for _ in range(paths)], ecn=ecn)

    # Faults.

    def kill(self, host: str) -> None:
        """Nothing leaves or reaches the host any more. (Its tasks live on in the loop: cancel them.)"""
        state = self._host(host)
        state.killed = True
        for port in state.ports:
            port.discard("dead")

    def revive(self, host: str) -> None:
        """Undo ``kill``, as after a restart at the same address."""
        self._host(host).killed = False

    def pause(self, host: str) -> None:
        """The host reads and sends nothing, as under SIGSTOP; its buffers fill. (Its timers go on.)"""
        self._host(host).paused = True

    def resume(self, host: str) -> None:
        """Undo ``pause``: what waits in the buffers is handed over."""
        state = self._host(host)
        state.paused = False
        for port in state.ports:
            port.awake()

    def partition(self, source: str, target: str, *, one_way: bool = False) -> None:
        """Cut the link between two hosts (one direction if ``one_way``): what is sent or would arrive is lost."""
        self._cuts.add((source, target))
        if not one_way:
            self._cuts.add((target, source))

    def heal(self, source: str | None = None, target: str | None = None) -> None:
        """Undo the partitions between two hosts, both ways; without hosts, all of them."""
        if source is None or target is None:
            self._cuts.clear()
        else:
            self._cuts -= {(source, target), (target, source)}

    # Results.

    def trace_digest(self) -> str:
        """Hash over all datagrams that reached a buffer, with their times and addresses: equal for equal runs."""
        return self._digest.hexdigest()

    def lost(self) -> Counter[str]:
        """Datagrams lost so far, by reason, impairments included."""
        total = Counter({k: n for k, n in self.counters.items() if k not in ("sent", "delivered")})
        for impairer in self._impairers:
            total += impairer.counters.lost
        return total

    @property
    def duplicated(self) -> int:
        """Copies that the impairments made."""
        return sum(impairer.counters.duplicated for impairer in self._impairers)

    @property
    def network_loss(self) -> float:
        """Share of the datagrams on the network, copies included, that was lost."""
        return self.lost().total() / max(1, self.counters["sent"] + self.duplicated)

    # The way of a burst. Called by SimPort.

    def attach(self, port: SimPort) -> Host:
        """Register a port's addresses; raises ConfigError if one is taken, or they are not of one host."""
        if len({address.host for address in port.addresses}) != 1:
            raise ConfigError(f"addresses {port.addresses}: a port needs at least one, all on one host")
        for address in port.addresses:
            if address in self._ports:
                raise ConfigError(f"{address.host}:{address.port} is in use: close the other port first")
        self._ports.update(dict.fromkeys(port.addresses, port))
        host = self._host(port.addresses[0].host)
        host.ports.append(port)
        return host

    def detach(self, port: SimPort) -> None:
        """Forget a port's addresses."""
        for address in port.addresses:
            del self._ports[address]
        self._host(port.addresses[0].host).ports.remove(port)

    def carry(self, burst: Burst, source: Address, host: Host, ecn: Ecn) -> None:
        """Take a burst that a host sends now."""
        count = burst.count
        self.counters["sent"] += count
        reason = self._stopped(source.host, burst.address.host, host)
        if reason is None and burst.segment > host.spec.max_datagram_bytes:
            reason = "oversize"
        if reason is not None:
            self.counters[reason] += count
            return
        now = self.loop.time()
        wire = self._between(source.host, burst.address.host)
        if not wire.impairer.spec and host.card is None:
            arrival = Arrival(
                burst.data.copy(), burst.segment, source, 0, now + wire.latency_s, burst.cls, ecn
            )
            self.loop.call_at(arrival.at, self._end_of_link, arrival, burst.address)
            return
        at: float | npt.NDArray[np.float64] = now
        sizes = sizes_of(burst)
        if host.card is not None:
            _, at = host.card.admit(sizes, np.full(count, now))
        fate = wire.impairer.apply(sizes, at)
        sent = Arrival(burst.data, burst.segment, source, 0, now, burst.cls, ecn)
        self._schedule(sent, fate, burst.address, wire.impairer, wire.latency_s, self._end_of_link)

    def record(self, arrival: Arrival, target: Address) -> None:
        """Note datagrams that reached a buffer."""
        self.counters["delivered"] += arrival.count
        self._digest.update(
            struct.pack("<dHHI", self.loop.time(), arrival.source.port, target.port, arrival.segment)
            + f"{arrival.source.host}>{target.host}".encode()
            + checksum(arrival.data)
        )

    def _schedule(
        self,
        sent: Arrival,
        fate: Fate,
        target: Address,
        impairer: Impairer,
        latency_s: float,
        then: Callable[[Arrival, Address], None],
    ) -> None:
        """Have ``then`` called with each group of the datagrams ``sent`` when the last of it has come."""
        flipped = impairer if fate.corrupt.any() else None
        at = fate.at + latency_s
        for first, end in together(at, self.interrupt_s):
            index, corrupt = fate.index[first:end], fate.corrupt[first:end]
            for piece in gather(sent.data, sent.segment, index, corrupt, flipped):
                arrival = sent.like(piece.copy() if piece is sent.data else piece, at=float(at[first]))
                self.loop.call_at(float(at[end - 1]), then, arrival, target)

    def _end_of_link(self, arrival: Arrival, target: Address) -> None:
        """The end of the link: the switch port that it leads through, if any."""
        via = self._between(arrival.source.host, target.host).via
        if via:
            self._queue(self.switch_queue(via), arrival, target, self._arrive)
        else:
            self._arrive(arrival, target)

    def _arrive(self, arrival: Arrival, target: Address) -> None:
        """The target's ingress."""
        host = self._hosts.get(target.host)
        if host is None or not host.ingress.spec:
            self._enter(arrival, target)
            return
        fate = host.ingress.apply(
            sizes_of(Burst(arrival.data, arrival.segment, 0, 0, target)), self.loop.time()
        )
        self._schedule(arrival, fate, target, host.ingress, 0.0, self._enter)

    def _enter(self, arrival: Arrival, target: Address) -> None:
        """The port of the switch that leads to the target, if it has one."""
        host = self._hosts.get(target.host)
        if host is None or host.switch is None:
            self._deliver(arrival, target)
        else:
            self._queue(host.switch, arrival, target, self._deliver)

    def _queue(
        self,
        queue: SwitchQueue[tuple[Arrival, Address]],
        arrival: Arrival,
        target: Address,
        then: Callable[[Arrival, Address], None],
    ) -> None:
        """Put datagrams into a switch port's queue; ``then`` gets them as they leave."""
        idle, dropped = queue.next_at == float("inf"), queue.dropped.total()
        last = len(arrival.data) - (arrival.count - 1) * arrival.segment
        queue.offer(
            Parcel((arrival, target), 0, arrival.count, arrival.segment, last, arrival.cls, arrival.ecn),
            self.loop.time(),
        )
        dropped = queue.dropped.total() - dropped
        if dropped:
            self.counters["queue"] += dropped
        if idle and queue.next_at < float("inf"):
            self.loop.call_at(queue.next_at, self._leave, queue, then)

    def _leave(
        self, queue: SwitchQueue[tuple[Arrival, Address]], then: Callable[[Arrival, Address], None]
    ) -> None:
        """What a switch port has sent goes on."""
        now = self.loop.time()
        parcel = queue.leave(now)
        if queue.next_at < float("inf"):
            self.loop.call_at(queue.next_at, self._leave, queue, then)
        whole, target = parcel.what
        piece = whole.part(parcel.first, parcel.first + parcel.count)
        piece.at, piece.ecn = now, parcel.ecn
        then(piece, target)

    def _deliver(self, arrival: Arrival, target: Address) -> None:
        """The socket."""
        port = self._ports.get(target)
        reason = self._stopped(arrival.source.host, target.host, self._hosts.get(target.host))
        if reason is None and port is None:
            reason = "unreachable"
        if reason is not None or port is None:
            self.counters[reason or "unreachable"] += arrival.count
            return
        port.take(arrival, target)

    def _stopped(self, source: str, target: str, host: Host | None) -> str | None:
        if host is not None and host.killed:
            return "dead"
        return "cut" if (source, target) in self._cuts else None

    def _host(self, name: str) -> Host:
        if name not in self._hosts:
            spec = self._host_default
            ingress = self._impairer(spec_of(spec.ingress), name, "ingress")
            self._hosts[name] = Host(spec, ingress, self._rng(name, "switch"))
        return self._hosts[name]

    def _between(self, source: str, target: str) -> Wire:
        wire = self._links.get((source, target))
        if wire is None:
            wire = self._links[source, target] = self._wire(self._link_default, source, target)
        return wire

    def _wire(self, link: Link, source: str, target: str) -> Wire:
        return Wire(link.latency_s, self._impairer(link.spec(), source, target), link.via)

    def _rng(self, *names: str) -> np.random.Generator:
        """A random stream of its own for what bears these names."""
        return np.random.default_rng([self.seed, *(zlib.crc32(name.encode()) for name in names)])

    def _impairer(self, spec: ImpairSpec, *names: str) -> Impairer:
        """An impairer with a random stream of its own: by the names, and how many stood there before."""
        keys = [zlib.crc32(name.encode()) for name in names]
        rng = np.random.default_rng([self.seed, spec.seed, *keys, self._made[names]])
        self._made[names] += 1
        impairer = Impairer(spec, rng)
        self._impairers.append(impairer)
        return impairer


class SimPort:
    """A port on a simulated network: one address a path, all on one host. Raises ConfigError if one is taken."""

    def __init__(self, network: Network, addresses: Sequence[Address], *, ecn: bool = False) -> None:
        self.network = network
        self._ecn = Ecn.ECT if ecn else Ecn.NOT_ECT
        self._addresses = tuple(addresses)
        self._host = network.attach(self)
        self._waiting: list[Arrival] = []
        self._used = [0] * len(self._addresses)
        self._waking = False
        self._refused = False
        self._closed = False
        self._on_batch: Callable[[Sequence[Slab]], None] | None = None
        self._on_writable: Callable[[], None] = lambda: None

    @property
    def addresses(self) -> Sequence[Address]:
        """Local addresses, by path."""
        return self._addresses

    @property
    def facts(self) -> PortFacts:
        """As the host's spec says."""
        spec = self._host.spec
        return PortFacts(
            receive_buffer_bytes=spec.receive_buffer_bytes, max_datagram_bytes=spec.max_datagram_bytes
        )

    def open(self, on_batch: Callable[[Sequence[Slab]], None], on_writable: Callable[[], None]) -> None:
        """Start to receive; what came before is handed over."""
        self._on_batch = on_batch
        self._on_writable = on_writable
        self.awake()

    def send(self, burst: Burst) -> bool:
        """Send a burst; False while the host is paused, its card is behind, or at random (``Network.block``).

        Raises ConfigError if the burst is more than one system call takes, or the port is closed.
        """
        self._check(burst)
        wait = self._wait(len(burst.data))
        if wait is not None:
            self._refuse(wait)
            return False
        self.network.carry(burst, self._addresses[burst.path], self._host, self._ecn)
        return True

    def close(self) -> None:
        """Leave the network; what waits is lost. Idempotent."""
        if not self._closed:
            self._closed = True
            self.discard("unreachable")
            self.network.detach(self)

    # Called by the network.

    def take(self, arrival: Arrival, target: Address) -> None:
        """Put datagrams into the path's receive buffer, as many as it holds."""
        path = self._addresses.index(target)
        fits = self._fitting(arrival, path)
        if fits < arrival.count:
            self.network.counters["buffer"] += arrival.count - fits
        if not fits:
            return
        kept = arrival if fits == arrival.count else arrival.part(0, fits)
        self._used[path] += charge(kept)
        self.network.record(kept, target)
        kept.path = path
        self._waiting.append(kept)
        self._wake()

    def discard(self, reason: str) -> None:
        """Lose what waits in the buffers."""
        lost = sum(arrival.count for arrival in self._waiting)
        if not lost:
            return
        self.network.counters[reason] += lost
        self.network.counters["delivered"] -= lost
        self._waiting.clear()
        self._used = [0] * len(self._addresses)

    def awake(self) -> None:
        """Look again at what waits, after the host was paused."""
        if self._waiting:
            self._wake()
        if self._refused:
            self._retry()

    # Receiving.

    def _fitting(self, arrival: Arrival, path: int) -> int:
        """How many datagrams, from the first, the buffer of a path still holds."""
        free = self._host.spec.receive_buffer_bytes - self._used[path]
        if charge(arrival) <= free:
            return arrival.count
        return min(arrival.count - 1, max(0, free) // truesize(arrival.segment))

    def _wake(self) -> None:
        if self._waking or self._on_batch is None or self._host.paused:
            return
        self._waking = True
        loop, host = self.network.loop, self._host
        if host.spec.processing_s == 0.0:
            loop.call_soon(self._read)
            return
        # One processor a host: its ports' reads queue up behind each other.
        host.free_at = max(loop.time(), host.free_at) + host.spec.processing_s
        loop.call_at(host.free_at, self._read)

    def _read(self) -> None:
        """Hand over all that waits, in one batch."""
        self._waking = False
        if self._host.paused or self._closed or not self._waiting or self._on_batch is None:
            return
        arrivals, self._waiting = self._waiting, []
        self._used = [0] * len(self._addresses)
        network = self.network
        if network.regroup:
            arrivals = regroup(arrivals, network.rng, network.regroup)
        slabs = slabs_of(arrivals)
        self._on_batch(slabs)
        scribble(slabs)

    # Sending.

    def _check(self, burst: Burst) -> None:
        if self._closed:
            raise ConfigError("send on a closed port")
        if not 0 <= burst.path < len(self._addresses):
            raise ConfigError(f"path {burst.path}: this port has paths 0..{len(self._addresses) - 1}")
        if not 0 < burst.count <= MAX_BURST_DATAGRAMS or len(burst.data) > MAX_BURST_BYTES:
            raise ConfigError(
                f"burst of {burst.count} datagrams, {len(burst.data)} bytes: one system call takes "
                f"1..{MAX_BURST_DATAGRAMS} and {MAX_BURST_BYTES}"
            )

    def _wait(self, nbytes: int) -> float | None:
        """Seconds until a send of ``nbytes`` may be tried again; None: now; infinite: when the host resumes."""
        host, network = self._host, self.network
        if host.killed:
            return None
        if host.paused:
            return float("inf")
        if network.block and network.rng.random() < network.block:
            return RETRY_S
        if host.card is None:
            return None
        backlog = host.card.backlog(network.loop.time())
        if backlog == 0.0 or backlog + nbytes <= host.spec.send_buffer_bytes:
            return None
        # As the kernel: writable again when half of the buffer is free (and the burst at hand fits).
        target = max(0.0, min(host.spec.send_buffer_bytes / 2, host.spec.send_buffer_bytes - nbytes))
        # A byte more, or rounding could make it a time that does not move the clock.
        return (max(0.0, backlog - target) + 1.0) * 8 / host.card.bps

    def _refuse(self, wait_s: float) -> None:
        if not self._refused:
            self._refused = True
            if wait_s != float("inf"):
                self.network.loop.call_at(self.network.loop.time() + wait_s, self._retry)

    def _retry(self) -> None:
        if self._refused and not self._closed and not self._host.paused:
            self._refused = False
            self._on_writable()
