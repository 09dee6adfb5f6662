"""The exact engine: the unmodified endpoint and collectives over the same description, in virtual time.

Theory of operation. ``dblp.sim.port.Network`` carries bursts from host to host; here each burst goes from switch port to
switch port (``dblp.sim.queues.SwitchQueue``, one a link) on the path that its source port names, as source routing does;
with ``ecmp``, on the one that switches make of both ends' addresses and ports. Sizes are bytes of UDP payload: give the
packet engine a ``packet`` of a datagram and a ``header`` of dblp's own to compare. Some 64 hosts are as many as is sensible.

What it does not have, ``check_exact`` refuses: shared buffers, trimming, adaptive routing, planes, transports other than
``dblp``, ``mlt`` and ``dctcp``, settings that the endpoint chooses itself, workloads other than an all-reduce by an algorithm
that the collectives have. What it has alone: rounds that compress, hosts' rates that change between them, and others' traffic
that is on and off. It notes no flows and no backlogs over time, only the largest.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from dblp.collectives.group import Group
from dblp.sim.fabric.fit import check_fit, failed_links, group_of
from dblp.sim.fabric.graph import Floats
from dblp.sim.fabric.others import background
from dblp.sim.fabric.outcome import Outcome
from dblp.sim.fabric.packet import FLOW_FIELDS
from dblp.sim.fabric.scenario import ON_OFF, BackgroundSpec, Scenario
from dblp.sim.fabric.spec import CLASSES, FailureSpec, RoutingSpec, SwitchSpec, check
from dblp.sim.fabric.splitting import HashedPaths
from dblp.sim.fabric.steps import Rounds
from dblp.sim.fabric.topology import Fabric, make_fabric
from dblp.sim.fabric.transports import transport
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
REPAIRS = {"time": "evidence", "passes": "passes"}
"""``TransportConfig.repair`` for each recovery."""
TOLD = ("model", "control", "recovery", "stop", "ecn", "loss_bound", "packet")
"""Fields of a transport that the endpoint is told."""
ALGORITHMS = ("ring", "direct", "halving_doubling", "hierarchical", "ps")
Row = tuple[bool, str, object, str]
"""Whether a field's value is there, the field, its value, and what there is."""


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
        self.hashed = HashedPaths(fabric, seed) if scenario.routing.policy == "ecmp" else None
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

    def path_of(self, source: Address, target: Address) -> int:
        """A datagram's source port names its path, or switches hash it."""
        shift = source.port - FIRST_PORT
        if self.hashed is None:
            return shift % self.fabric.paths
        return self.hashed.of(_host(source), _host(target), shift + target.port - FIRST_PORT)

    def _end_of_link(self, arrival: Arrival, target: Address) -> None:
        """The first switch; the host's own link is behind it."""
        first = self.fabric.next_link(
            _host(arrival.source), _host(target), self.path_of(arrival.source, target)
        )
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
        onward = self.fabric.next_link(node, _host(target), self.path_of(arrival.source, target))
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
    """Raise ConfigError that names what the exact engine has not, its value and what there is; or what does not fit together."""
    load, bound = scenario.workload, scenario.transport.loss_bound or scenario.second_leg.loss_bound
    busy = scenario.background.load > 0
    default = {spec.name: spec.default for spec in fields(Scenario)}
    place = "workload.ranks" if load.ranks else "topology"
    rows = [
        (scenario.ranks <= MAX_HOSTS, place, f"{scenario.ranks} hosts", f"{MAX_HOSTS} at most"),
        (scenario.topology.planes == 1, "topology.planes", scenario.topology.planes, "1"),
        (scenario.routing.policy in CHOICES, "routing.policy", scenario.routing.policy, ", ".join(CHOICES)),
        (load.kind == "all_reduce", "workload.kind", load.kind, "all_reduce"),
        (load.algorithm in ALGORITHMS, "workload.algorithm", load.algorithm, ", ".join(ALGORITHMS)),
        (not load.segment, "workload.segment", load.segment, "the collectives' own segments"),
        (not load.latency, "workload.latency", load.latency, "none"),
        (
            not load.compression or not bound,
            "workload.compression",
            load.compression,
            "it without a loss_bound",
        ),
        (not scenario.bursts.rate_hz, "bursts.rate_hz", scenario.bursts.rate_hz, "none"),
        (
            not busy or scenario.background.sizes == ON_OFF,
            "background.sizes",
            scenario.background.sizes,
            ON_OFF,
        ),
        (scenario.jitter in (0.0, default["jitter"]), "jitter", scenario.jitter, "none"),
        (
            scenario.until == default["until"],
            "until",
            scenario.until,
            f"a timeout of {TIMEOUT_S:g} s a round",
        ),
    ]
    rows += [
        (not cut.data_only, f"failures[{n}].data_only", cut.data_only, "false")
        for n, cut in enumerate(scenario.failures)
    ]
    for name in ("detect", "freeze"):
        told = getattr(scenario.routing, name)
        switches = name == "detect" and scenario.routing.policy == "ecmp"
        rows.append(
            (
                switches or told == getattr(RoutingSpec(), name),
                f"routing.{name}",
                told,
                "the endpoint's own times: leave it out",
            )
        )
    for name in ("size", "until", "transport"):
        told, plain = getattr(scenario.background, name), getattr(BackgroundSpec(), name)
        rows.append((not busy or told == plain, f"background.{name}", told, f"{ON_OFF} alone: leave it out"))
    for good, field, value, there in [*rows, *_of_switches(scenario.switch), *_of_transports(scenario)]:
        check(good, field, value, f"the exact engine has {there}; for more use the packet engine")
    check_fit(scenario)


def _of_switches(switch: SwitchSpec) -> Iterator[Row]:
    """What their ports in ``dblp.sim.queues`` have: marks for all classes alike, a class a queue or all in one."""
    yield not switch.shared, "switch.shared", switch.shared, "a buffer for each port"
    yield not switch.trim, "switch.trim", switch.trim, "no trimming"
    yield not switch.droppable, "switch.droppable", len(switch.droppable), "no such packets"
    first = switch.of_class(0)
    for number in range(CLASSES):
        row, place = switch.of_class(number), f"switch.classes[{min(number, len(switch.classes) - 1)}]"
        for name in ("mark_min", "mark_max"):
            told = getattr(row, name)
            yield (
                told == getattr(first, name),
                f"{place}.{name}",
                told,
                f"the marks of class 0, {getattr(first, name)}",
            )
        yield row.mark_share == 1.0, f"{place}.mark_share", row.mark_share, "1.0"
        alone = switch.queues == 1 or row.queue == number
        yield alone, f"{place}.queue", row.queue, f"one queue, or class {number} in queue {number}"


def _of_transports(scenario: Scenario) -> Iterator[Row]:
    """The endpoint has one setting for both legs, but for their bounds, and its own for what is not in ``TOLD``."""
    own, second = scenario.transport, scenario.second_leg
    plain, dctcp = transport(own.model), own.control == "dctcp"
    yield own.control in CONTROLS, "transport.control", own.control, ", ".join(CONTROLS)
    yield own.recovery in REPAIRS, "transport.recovery", own.recovery, ", ".join(REPAIRS)
    yield own.stop != "deadline", "transport.stop", own.stop, "all, eager, stall"
    yield own.ecn == dctcp, "transport.ecn", own.ecn, f"{dctcp} with control={own.control!r}"
    for spec in fields(own):
        told, name = getattr(own, spec.name), spec.name
        yield (
            name in TOLD or told == getattr(plain, name),
            f"transport.{name}",
            told,
            "the endpoint's own: leave it out",
        )
        both = name == "loss_bound" or getattr(second, name) == told
        yield both, f"pull_transport.{name}", getattr(second, name), f"the first leg's, {told}"


def run_exact(scenario: Scenario, seed: int = 0) -> Outcome:
    """Run a scenario's all-reduce rounds on real endpoints. Raises ConfigError for what this engine has not."""
    check_exact(scenario)
    fabric = make_fabric(scenario.topology)
    began = time.perf_counter()
    times, network, now, rounds, missing_share = run_virtual(_main(scenario, fabric, seed))
    ended = "failed" if np.isnan(times).any() else "done"
    lost = network.lost()
    return Outcome(
        engine="exact",
        seed=seed,
        ended=ended,
        times_s=times,
        flows=np.zeros(0, FLOW_FIELDS),
        missing_share=missing_share,
        link_names=tuple(fabric.name(link) for link in range(len(fabric.sources))),
        link_bytes=network.link_bytes,
        link_peak=np.array([queue.peak_bytes for queue in network.queues]),
        max_load_ratio=float("nan"),
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
) -> tuple[Floats, FabricNetwork, float, dict[str, tuple[float, ...]], float]:
    loop = asyncio.get_running_loop()
    network = FabricNetwork(loop, scenario, fabric, seed)
    endpoints = await _connect(scenario, network, seed)
    groups = [Group(endpoint, timeout_s=TIMEOUT_S) for endpoint in endpoints]
    rounds = Rounds(scenario.workload, groups, _policy(scenario, fabric), seed, TIMEOUT_S)
    datagram = scenario.transport.packet
    async with background(
        network, scenario.background, scenario.ranks, datagram, lambda: network.rate_bps, seed
    ):
        await asyncio.sleep(SETTLED_S)
        for failure, links in zip(scenario.failures, failed_links(scenario, fabric), strict=True):
            _schedule_failure(network, failure, links, scenario.routing.detect)
        times, rates = await _rounds(scenario, network, rounds)
    now = loop.time()
    await asyncio.gather(*(endpoint.close(linger_s=1.0) for endpoint in endpoints))
    told = {"rate_bps": tuple(rates), "ratio": tuple(rounds.ratios)} if rounds.ratios else {}
    return np.array(times), network, now, told, rounds.missing_share


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


def _schedule_failure(
    network: FabricNetwork, failure: FailureSpec, links: list[int], detect_s: float
) -> None:
    """Its times count from now, the start of the first round. Switches that hash learn of a cut later."""

    def at(delay_s: float, then: Callable[[], None]) -> None:
        if delay_s > 0:
            network.loop.call_later(delay_s, then)
        else:
            then()

    def set_loss(share: float) -> None:
        network.loss[links] = share

    at(failure.at, functools.partial(set_loss, failure.loss))
    if failure.until:
        at(failure.until, functools.partial(set_loss, 0.0))
    if network.hashed is not None and failure.down:
        known_at = failure.at + detect_s if failure.at else 0.0
        at(known_at, functools.partial(network.hashed.mark, links, dead=True))
        if failure.until:
            at(failure.until + detect_s, functools.partial(network.hashed.mark, links, dead=False))


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
        repair=REPAIRS[scenario.transport.recovery],
    )
    ports = [network.port(f"h{rank}", paths, ecn=control == "dctcp") for rank in range(scenario.ranks)]
    peers = [list(port.addresses) for port in ports]
    connects = [
        Endpoint.connect(port, rank=rank, world_size=len(ports), config=config, session=seed + 1, peers=peers)
        for rank, port in enumerate(ports)
    ]
    return list(await asyncio.gather(*connects))


def _policy(scenario: Scenario, fabric: Fabric) -> Policy:
    own, second = scenario.transport, scenario.second_leg
    end_to_end = 1.0 - (1.0 - own.loss_bound) * (1.0 - second.loss_bound)
    settings: dict[str, Any] = {}
    if end_to_end:
        settings = {"budget": end_to_end, "gather_budget": second.loss_bound}
        settings["stop"] = Stop.EAGER if own.stop == "eager" else Stop.STALL
    return Policy(algorithm=_algorithm(scenario, fabric), **settings)


def _algorithm(scenario: Scenario, fabric: Fabric) -> str:
    """The collectives' name of the workload's algorithm, with what the packet engine has by default."""
    load, ranks = scenario.workload, scenario.ranks
    if load.algorithm == "hierarchical":
        return f"hierarchical(columns={group_of(scenario, fabric)})"
    if load.algorithm == "ps":
        servers = [n * ranks // load.servers for n in range(load.servers)]
        return f"ps(servers={'+'.join(map(str, servers))},serve_only)"
    return load.algorithm
