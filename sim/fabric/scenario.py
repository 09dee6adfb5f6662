"""A scenario: a fabric, who sends what over it, and what goes wrong. The value that both engines run."""

from __future__ import annotations

from dataclasses import dataclass, field

from dblp.collectives.compression.registry import parse_compression
from dblp.sim.fabric.spec import FailureSpec, RoutingSpec, SwitchSpec, TopologySpec, check, check_choice
from dblp.sim.fabric.transports import TransportSpec, transport
from dblp.units import MIB, BitsPerSecond, ByteCount, Seconds

ALGORITHMS = ("ring", "direct", "halving_doubling", "double_tree", "hierarchical", "ps")
SEGMENTED = ("ring", "direct")
"""Algorithms whose shards may go on in parts."""
WORKLOADS = ("all_reduce", "training", "flows", "incast", "permutation")
SIZES = ("fixed", "websearch", "burst")
ON_OFF = "onoff"
"""Background of the exact engine: each host sends to the next, at twice the load for 100 ms on average, and is silent as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """What is timed."""

    kind: str = "all_reduce"
    """``all_reduce``: rounds of one. ``training``: steps of a model, computing and reducing. ``flows``: random flows
    (``load``). ``incast``: all to host 0. ``permutation``: each host to another."""
    algorithm: str = "ring"
    """all_reduce, training: how it goes."""
    size: ByteCount = ByteCount(1 * MIB)
    """Bytes of the gradient of one host (all_reduce), or of one flow."""
    ranks: int = 0
    """Hosts that take part, the first of the fabric; 0: all."""
    rounds: int = 1
    """all_reduce, incast, permutation: so many, one after another."""
    servers: int = 1
    """ps: ranks that are servers, each with a share of the gradient: at equal distances, rank 0 among them."""
    segment: ByteCount = ByteCount(0)
    """ring, direct: parts of a shard that go on as soon as they have come; the collectives' are a chunk each, of which the
    endpoint makes bursts. 0: a shard goes on as a whole."""
    group: int = 0
    """hierarchical: ranks of a group; 0: those under one leaf."""
    model: str = "resnet50"
    """training: a trace in the package (``dblp sim list``) or a JSON file of one."""
    steps: int = 2
    """training: steps; the second meets the first's parameters."""
    bucket: ByteCount = ByteCount(25 * MIB)
    """training: layers are reduced together up to this size (DDP's bucket_cap_mb)."""
    overlap: bool = True
    """training: a bucket leaves as soon as its gradients are there, else after the whole backward pass."""
    layer_classes: bool = False
    """training: buckets of the first layers, which the next step needs first, have lower class numbers."""
    bytes_scale: float = 1.0
    """training: factor on all sizes, such as a compression's."""
    load: float = 0.5
    """flows: share of the hosts' rate that arrives."""
    flows: int = 1000
    """flows: how many."""
    fan_in: int = 1
    """flows: so many arrive together, from as many hosts to one, as gradients do at a server; ``load`` is of all."""
    sizes: str = "fixed"
    """flows: ``fixed``: ``size``. ``websearch``: that of the DCTCP paper. ``burst``: microbursts."""
    tail: float = 1.0
    """P99 over P50 of a log-normal latency before each flow, as OptiReduce's environments have; 1: none."""
    latency: Seconds = Seconds(0.0)
    """Its median."""
    compression: str = ""
    """all_reduce, exact engine: a method with its arguments (docs/compression.md), such as ``topk(0.1)``, which
    also says how its rounds exchange: ``algorithm`` is not asked; empty: none."""
    compute: Seconds = Seconds(0.0)
    """all_reduce, exact engine: what each rank computes before a round; rounds are timed with it."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, WORKLOADS)
        check_choice("algorithm", self.algorithm, ALGORITHMS)
        check_choice("sizes", self.sizes, SIZES)
        for name in ("size", "rounds", "servers", "steps", "bucket", "flows", "fan_in"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "1 or more is needed")
        for name in ("ranks", "group", "segment"):
            check(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative")
        if self.compression:
            parse_compression(self.compression)
        check(self.ranks != 1, "ranks", self.ranks, "one rank has nobody to send to")
        check(0 < self.load <= 1, "load", self.load, "must lie in (0, 1]")
        check(self.tail >= 1, "tail", self.tail, "P99 is at least P50")
        check(self.tail == 1 or self.latency > 0, "tail", self.tail, "it is of a latency, which is 0")
        parts = self.kind in ("all_reduce", "training") and self.algorithm in SEGMENTED
        check(
            not self.segment or parts,
            "segment",
            self.segment,
            f"only an all-reduce by {' or '.join(SEGMENTED)} goes on with parts of a shard",
        )
        check(self.bytes_scale > 0, "bytes_scale", self.bytes_scale, "must be above 0")
        for name in ("latency", "compute"):
            check(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSpec:
    """A change of the hosts' rate, both ways, in the exact engine: so all arms meet it in the same round."""

    round: int
    """It comes before this one; the first is 0."""
    rate: BitsPerSecond
    """What all hosts' links have from then on."""

    def __post_init__(self) -> None:
        check(self.round >= 0, "round", self.round, "must not be negative")
        check(self.rate > 0, "rate", self.rate, "a rate above 0 bit/s is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundSpec:
    """Traffic of others, between random hosts; not timed."""

    load: float = 0.0
    """Share of each host's rate; 0: none."""
    sizes: str = "websearch"
    """Distribution of flow sizes: as in a workload of flows; or, in the exact engine, ``onoff``."""
    size: ByteCount = ByteCount(1 * MIB)
    """Of ``sizes="fixed"``."""
    until: Seconds = Seconds(0.01)
    """Last start."""
    cls: int = 3
    """Class of its packets."""
    transport: TransportSpec = field(default_factory=lambda: transport("dctcp"))
    """Its transport."""

    def __post_init__(self) -> None:
        check(0 <= self.load < 1, "load", self.load, "must lie in [0, 1)")
        check_choice("sizes", self.sizes, (*SIZES, ON_OFF))
        check(0 <= self.cls <= 3, "cls", self.cls, "classes are 0 to 3")
        check(self.size >= 1, "size", self.size, "1 byte or more is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstSpec:
    """Microbursts: some hosts send at line rate to one for a moment. Over 70 % of bursts last at most tens of us (Zhang et
    al., IMC 2017); here their length is exponential."""

    rate_hz: float = 0.0
    """Bursts a second, over the fabric; 0: none."""
    senders: int = 8
    """Hosts that take part in each."""
    mean: Seconds = Seconds(40e-6)
    """Mean length: how long a sender needs for its part."""
    until: Seconds = Seconds(0.01)
    """Last start."""

    def __post_init__(self) -> None:
        check(self.rate_hz >= 0, "rate_hz", self.rate_hz, "must not be negative")
        check(self.senders >= 1, "senders", self.senders, "1 or more is needed")
        check(self.mean > 0, "mean", self.mean, "a time above 0 is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run of either engine, but for its seed."""

    topology: TopologySpec
    """Hosts, switches, links."""
    switch: SwitchSpec = SwitchSpec()
    """All switches."""
    transport: TransportSpec = TransportSpec()
    """Of the workload's flows."""
    pull_transport: TransportSpec | None = None
    """Of its second leg (gather, parameters to workers); none: the same."""
    routing: RoutingSpec = RoutingSpec()
    """Path choice."""
    workload: WorkloadSpec = WorkloadSpec()
    """What is timed."""
    background: BackgroundSpec = BackgroundSpec()
    """Traffic of others."""
    bursts: BurstSpec = BurstSpec()
    """Microbursts of others."""
    failures: tuple[FailureSpec, ...] = ()
    """Cut and grey links."""
    rates: tuple[RateSpec, ...] = ()
    """Changes of the hosts' rate."""
    jitter: Seconds = Seconds(50e-9)
    """Each flow starts up to so much late: what is exactly equal in time would favour one of them for ever."""
    until: Seconds = Seconds(100.0)
    """Simulated time at which a run ends, done or not."""

    def __post_init__(self) -> None:
        hosts, load = self.topology.host_count, self.workload
        check(load.ranks <= hosts, "workload.ranks", load.ranks, f"the fabric has {hosts} hosts")
        check(
            load.algorithm != "ps" or load.servers < self.ranks,
            "workload.servers",
            load.servers,
            "workers are needed too",
        )
        check(
            load.fan_in < max(self.ranks, 2), "workload.fan_in", load.fan_in, f"{self.ranks} hosts take part"
        )
        few = not self.bursts.rate_hz or self.bursts.senders < hosts
        check(few, "bursts.senders", self.bursts.senders, f"the fabric has {hosts} hosts")
        check(self.jitter >= 0, "jitter", self.jitter, "must not be negative")
        check(self.until > 0, "until", self.until, "a time above 0 is needed")
        for number, change in enumerate(self.rates):
            late = f"there are {load.rounds} rounds, from 0"
            check(change.round < load.rounds, f"rates[{number}].round", change.round, late)
        self._check_switch()

    def _check_switch(self) -> None:
        """What the transports in use need of the switches."""
        used = {"transport": self.transport}
        if self.pull_transport is not None:
            used["pull_transport"] = self.pull_transport
        if self.background.load:
            used["background.transport"] = self.background.transport
        for name, spec in used.items():
            trims = spec.recovery == "trim"
            check(
                not trims or self.switch.trim,
                "switch.trim",
                self.switch.trim,
                f"{name} repairs by trims: it needs it",
            )
            self._check_room(name, spec)
            many = spec.priority != "remaining" or self.switch.queues > 1
            check(many, "switch.queues", self.switch.queues, f"{name}.priority='remaining' needs 2 or more")

    def _check_room(self, name: str, spec: TransportSpec) -> None:
        """A queue that cannot hold one packet passes none, and the run would wait for its end. Trimmed headers have as much room
        again."""
        switch = self.switch
        room = switch.buffer * (min(switch.alpha, 1.0) if switch.shared else 1.0)
        of_shared = f", in alpha={switch.alpha:g} of it" if switch.shared and switch.alpha < 1 else ""
        check(
            room >= spec.packet,
            "switch.buffer",
            switch.buffer,
            f"room for a packet of {name} is needed, {spec.packet} bytes on the wire{of_shared}",
        )

    @property
    def ranks(self) -> int:
        """Hosts that take part in the workload."""
        return self.workload.ranks or self.topology.host_count

    @property
    def second_leg(self) -> TransportSpec:
        """Transport of the gather leg."""
        return self.pull_transport or self.transport
