"""The exact engine: the unmodified endpoint and collectives over the same description, in virtual time.

Theory of operation. ``dblp.sim.port.Network`` carries bursts from host to host; here each burst goes from switch port to
switch port (``dblp.sim.queues.SwitchQueue``, one a link) on the path that its source port names, as source routing does.
Sizes are bytes of UDP payload: give the packet engine a ``packet`` of a datagram and a ``header`` of dblp's own to compare.
Some 64 hosts are as many as is sensible.

What it does not have, and refuses: shared buffers, trimming, adaptive routing, planes, transports other than ``dblp``,
``mlt`` and ``dctcp``, workloads other than an all-reduce by an algorithm that the collectives have. What it has alone: rounds
that compress, hosts' rates that change between them, and others' traffic that is on and off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dblp.collectives.group import Group
from dblp.errors import ConfigError
from dblp.sim.fabric.graph import Floats
from dblp.sim.fabric.others import background
from dblp.sim.fabric.outcome import Outcome
from dblp.sim.fabric.packet import FLOW_FIELDS
from dblp.sim.fabric.scenario import ON_OFF, Scenario
from dblp.sim.fabric.spec import FailureSpec
from dblp.sim.fabric.steps import Rounds
from dblp.sim.fabric.topology import Fabric, make_fabric
from dblp.sim.links import HostSpec, Link
from dblp.sim.loop import run as run_virtual
from dblp.sim.port import FIRST_PORT, Network
from dblp.sim.queues import SwitchPort, SwitchQueue
from dblp.sim.slabs import Arrival
from dblp.transport.config import MAX_PATHS, TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.policy import Policy, Stop
from dblp.transport.port import Address

MAX_HOSTS = 64
PORTION_PACKETS = 1
"""Datagrams that a port serves, and a card hands over, in one go: with more a run is quicker, and each hop's delay longer."""
SETTLED_S = 10e-3
"""From the handshake, whose last answers would order what leaves first, to the first round."""
TIMEOUT_S = 60.0
CONTROLS = {"delay": "delay", "dctcp": "dctcp"}
CHOICES = {"ecmp": "single", "spray": "spray", "random": "random", "reps": "reps", "ethereal": "ethereal"}
ALGORITHMS = ("ring", "direct", "halving_doubling", "hierarchical", "ps")


class FabricNetwork(Network):
    """A network whose bursts pass the ports of a fabric's switches."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, scenario: Scenario, fabric: Fabric, seed: int
    ) -> None:
        self._portion_s = PORTION_PACKETS * 8.0 * scenario.transport.packet / scenario.topology.host_link.rate
        super().__init__(
            loop,
            seed,
            link=Link(latency_s=scenario.topology.host_link.delay),
            host=HostSpec(egress_bps=scenario.topology.host_link.rate),
            interrupt_s=self._portion_s * (PORTION_PACKETS - 1) / PORTION_PACKETS,
        )
        self.fabric = fabric
        self.rate_bps = float(scenario.topology.host_link.rate)
        self.link_bytes = np.zeros(len(fabric.sources), np.int64)
        self.loss = np.zeros(len(fabric.sources))
        self.queues: list[SwitchQueue[tuple[Arrival, Address]]] = [
            SwitchQueue(_port_spec(scenario, rate), self.rng, portion_s=self._portion_s)
            for rate in fabric.rates
        ]
        self._beyond = [self._forward(link) for link in range(len(fabric.sources))]

    def set_rate(self, rate_bps: float) -> None:
        """Change the rate of all hosts' links, both ways."""
        self.rate_bps = rate_bps
        for host in range(self.fabric.hosts):
            self.set_host(f"h{host}", HostSpec(egress_bps=rate_bps))
        for link in np.flatnonzero(self.fabric.targets < self.fabric.hosts).tolist():
            self.queues[link].set_rate(rate_bps)

    def path_of(self, source: Address) -> int:
        """A datagram's source port names its path."""
        return (source.port - FIRST_PORT) % self.fabric.paths

    def _end_of_link(self, arrival: Arrival, target: Address) -> None:
        """The first switch; the host's own link is behind it."""
        first = self.fabric.next_link(_host(arrival.source), _host(target), self.path_of(arrival.source))
        self._leave_link(first, arrival, target)

    def _leave_link(self, link: int, arrival: Arrival, target: Address) -> None:
        """Datagrams come to the end of a link, those that it does not lose: into the next port, or to their host."""
        self.link_bytes[link] += len(arrival.data)
        if self.loss[link] and self.rng.random() < self.loss[link]:  # all of a portion, or none
            self.counters["cut"] += arrival.count
            return
        node = int(self.fabric.targets[link])
        if node < self.fabric.hosts:
            arrival.at = self.loop.time()  # not when it left the port: round trips are measured by it
            self._arrive(arrival, target)
            return
        onward = self.fabric.next_link(node, _host(target), self.path_of(arrival.source))
        self._queue(self.queues[onward], arrival, target, self._beyond[onward])

    def _forward(self, link: int) -> Callable[[Arrival, Address], None]:
        """What becomes of datagrams that have left the port of a link: they propagate."""

        def leave(arrival: Arrival, target: Address) -> None:
            at = self.loop.time() + float(self.fabric.delays[link])
            self.loop.call_at(at, self._leave_link, link, arrival, target)

        return leave


def _host(address: Address) -> int:
    return int(address.host[1:])


def _port_spec(scenario: Scenario, rate: float) -> SwitchPort:
    switch = scenario.switch
    plain = switch.of_class(0)
    shares = [_share(switch.of_class(number).drop, switch.buffer) for number in range(4)]
    return SwitchPort(
        rate_bps=rate,
        queue_bytes=switch.buffer,
        mark_bytes=plain.mark_min,
        mark_full_bytes=plain.mark_max if plain.mark_max > plain.mark_min else 0,
        order="priority" if switch.queues > 1 else "fifo",
        class_shares=(shares[0], shares[1], shares[2], shares[3]),
        push_out=switch.push_out,
    )


def _share(drop: int, buffer: int) -> float:
    return min(drop / buffer, 1.0) if drop else 1.0


def check_exact(scenario: Scenario) -> None:
    """Raise ConfigError that names what the exact engine has not."""
    wanted = {
        "switch.shared": not scenario.switch.shared,
        "switch.trim": not scenario.switch.trim,
        "routing.policy": scenario.routing.policy in CHOICES,
        "topology.planes": scenario.topology.planes == 1,
        "transport.control": scenario.transport.control in CONTROLS,
        "workload.kind": scenario.workload.kind == "all_reduce",
        "workload.algorithm": scenario.workload.algorithm in ALGORITHMS,
        "workload.latency": not scenario.workload.latency,
        "background.sizes": not scenario.background.load or scenario.background.sizes == ON_OFF,
        "workload.compression": not scenario.workload.compression
        or not (scenario.transport.loss_bound or scenario.second_leg.loss_bound),
        "bursts.rate_hz": not scenario.bursts.rate_hz,
        "topology": scenario.ranks <= MAX_HOSTS,
    }
    for field, good in wanted.items():
        if not good:
            raise ConfigError(
                f"{field}: the exact engine has no such thing, or not as much: use the packet engine"
            )


def run_exact(scenario: Scenario, seed: int = 0) -> Outcome:
    """Run a scenario's all-reduce rounds on real endpoints. Raises ConfigError for what this engine has not."""
    check_exact(scenario)
    fabric = make_fabric(scenario.topology)
    began = time.perf_counter()
    times, network, now, rounds = run_virtual(_main(scenario, fabric, seed))
    inner = fabric.fabric_links()
    ended = "failed" if np.isnan(times).any() else "done"
    loads = network.link_bytes[inner]
    lost = network.lost()
    return Outcome(
        engine="exact",
        seed=seed,
        ended=ended,
        times_s=times,
        flows=np.zeros(0, FLOW_FIELDS),
        link_names=tuple(fabric.name(link) for link in range(len(fabric.sources))),
        link_bytes=network.link_bytes,
        link_peak=np.array([queue.peak_bytes for queue in network.queues]),
        max_load_ratio=float(loads.max() / loads.mean()) if loads.any() else float("nan"),
        counts={
            "sent": (network.counters["sent"], 0),
            "delivered": (network.counters["delivered"], 0),
            "dropped": (lost.total(), 0),
        },
        queued=(0, 0),
        hops=0,
        events=0,
        simulated_s=now,
        wall_s=time.perf_counter() - began,
        series_s=np.zeros(0),
        series=np.zeros((0, len(fabric.sources)), np.int32),
        rounds=rounds,
    )


async def _main(
    scenario: Scenario, fabric: Fabric, seed: int
) -> tuple[Floats, FabricNetwork, float, dict[str, tuple[float, ...]]]:
    loop = asyncio.get_running_loop()
    network = FabricNetwork(loop, scenario, fabric, seed)
    for failure in scenario.failures:
        _schedule_failure(network, failure)
    endpoints = await _connect(scenario, network, seed)
    groups = [Group(endpoint, timeout_s=TIMEOUT_S) for endpoint in endpoints]
    rounds = Rounds(scenario.workload, groups, _policy(scenario), seed, TIMEOUT_S)
    datagram = scenario.transport.packet
    async with background(
        network, scenario.background, scenario.ranks, datagram, lambda: network.rate_bps, seed
    ):
        await asyncio.sleep(SETTLED_S)
        times, rates = await _rounds(scenario, network, rounds)
    now = loop.time()
    await asyncio.gather(*(endpoint.close(linger_s=1.0) for endpoint in endpoints))
    told = {"rate_bps": tuple(rates), "ratio": tuple(rounds.ratios)} if rounds.ratios else {}
    return np.array(times), network, now, told


async def _rounds(
    scenario: Scenario, network: FabricNetwork, rounds: Rounds
) -> tuple[list[float], list[float]]:
    """All rounds: the time of each, and the hosts' rate."""
    changes = {change.round: float(change.rate) for change in scenario.rates}
    times, rates = [], []
    for number in range(scenario.workload.rounds):
        if number in changes:
            network.set_rate(changes[number])
        times.append(await rounds.run(number))
        rates.append(network.rate_bps)
    return times, rates


def _schedule_failure(network: FabricNetwork, failure: FailureSpec) -> None:
    links = network.fabric.links_of(failure.link, one_way=failure.one_way)

    def set_loss(share: float) -> None:
        network.loss[links] = share

    network.loop.call_at(failure.at, set_loss, failure.loss)
    if failure.until:
        network.loop.call_at(failure.until, set_loss, 0.0)


async def _connect(scenario: Scenario, network: FabricNetwork, seed: int) -> list[Endpoint]:
    single = scenario.routing.policy == "ecmp"
    paths = 1 if single else min(network.fabric.paths, MAX_PATHS)
    control = CONTROLS[scenario.transport.control]
    config = TransportConfig(
        seed=seed,
        datagram_bytes=scenario.transport.packet,
        paths=paths,
        path_choice=CHOICES[scenario.routing.policy],
        path_chunks=1 if scenario.routing.policy in ("spray", "random", "reps") else 0,
        congestion=control,
    )
    ports = [network.port(f"h{rank}", paths, ecn=control == "dctcp") for rank in range(scenario.ranks)]
    peers = [list(port.addresses) for port in ports]
    connects = [
        Endpoint.connect(port, rank=rank, world_size=len(ports), config=config, session=seed + 1, peers=peers)
        for rank, port in enumerate(ports)
    ]
    return list(await asyncio.gather(*connects))


def _policy(scenario: Scenario) -> Policy:
    own, second = scenario.transport, scenario.second_leg
    end_to_end = 1.0 - (1.0 - own.loss_bound) * (1.0 - second.loss_bound)
    settings: dict[str, Any] = {}
    if end_to_end:
        settings = {"budget": end_to_end, "gather_budget": second.loss_bound}
        settings["stop"] = Stop.EAGER if own.stop == "eager" else Stop.STALL
    return Policy(algorithm=_algorithm(scenario), **settings)


def _algorithm(scenario: Scenario) -> str:
    load = scenario.workload
    return (
        f"hierarchical(group={load.group})"
        if load.algorithm == "hierarchical" and load.group
        else load.algorithm
    )
