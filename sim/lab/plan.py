"""From a topology to what has to be built: namespaces, wires, addresses, routes, and the points where a link can be impaired.

Nothing here touches a kernel. A host's link has two points, both on the switch or router, a hop away from the sender's own
TCP, which would see a drop on its own device and hide it: ``down`` where packets leave towards the host, ``up`` where they
come in from it. A packet from host to host crosses just one ``down`` point, so a loss of p there is a loss of p end to end.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from dblp.sim.lab.topology import Topology

NIC_QUEUE_BYTES = 64 * 2**20
"""Queue before a host's own uplink. Socket buffers fill first and hold the sender back, as before a real card; nothing drops."""
_NET = "10.81"
_FABRIC = "10.82"


class Role(enum.Enum):
    """What a namespace does."""

    HOST = "host"
    SWITCH = "switch"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Node:
    """A namespace."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class End:
    """One end of a wire."""

    node: str
    device: str
    mac: str
    address: str = ""
    """``a.b.c.d/length``; empty on a switch."""

    @property
    def ip(self) -> str:
        """The address without its length."""
        return self.address.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Wire:
    """A veth pair."""

    link: str
    a: End
    b: End


@dataclass(frozen=True, slots=True)
class Point:
    """Where packets of one link and one way can be lost and counted."""

    link: str
    way: str
    """``down``: towards hosts; ``up``: away from them."""
    node: str
    device: str
    ingress: bool = False
    """Packets that come in through the device; else those that leave through it."""

    @property
    def name(self) -> str:
        """``h0_down``: for counters."""
        return f"{self.link}_{self.way}"


@dataclass(frozen=True, slots=True)
class Shaper:
    """A device with a rate and a delay."""

    link: str
    node: str
    device: str
    rate_bps: float
    queue_bytes: int
    delay_s: float
    card: bool = False
    """A host's own uplink: it holds the sender back instead of dropping."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route of a node; several gateways share the flows."""

    node: str
    dst: str
    gateways: tuple[str, ...] = ()
    """Empty: on the link."""
    device: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A fixed entry, so that no packet of the address resolution is ever lost."""

    node: str
    device: str
    ip: str
    mac: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that is built."""

    topology: Topology
    nodes: tuple[Node, ...]
    wires: tuple[Wire, ...]
    points: tuple[Point, ...]
    shapers: tuple[Shaper, ...]
    routes: tuple[Route, ...]
    neighbours: tuple[Neighbour, ...]
    fdb: tuple[tuple[str, str, str], ...] = ()
    """Switch, port, MAC address behind it."""

    @property
    def links(self) -> tuple[str, ...]:
        """Names of the links."""
        return tuple(dict.fromkeys(point.link for point in self.points))

    def host_end(self, name: str) -> End:
        """The end of a host's wire that is in the host."""
        return next(wire.a for wire in self.wires if wire.a.node == name)


@dataclass(slots=True)
class _Draft:
    nodes: list[Node] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    shapers: list[Shaper] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    neighbours: list[Neighbour] = field(default_factory=list)
    fdb: list[tuple[str, str, str]] = field(default_factory=list)

    def finish(self, topology: Topology) -> Plan:
        return Plan(
            topology=topology,
            nodes=tuple(self.nodes),
            wires=tuple(self.wires),
            points=tuple(self.points),
            shapers=tuple(self.shapers),
            routes=tuple(self.routes),
            neighbours=tuple(self.neighbours),
            fdb=tuple(self.fdb),
        )


def host_names(topology: Topology) -> tuple[str, ...]:
    """Hosts of ranks, then the cross pairs."""
    return (*rank_names(topology), *(name for pair in cross_names(topology) for name in pair))


def rank_names(topology: Topology) -> tuple[str, ...]:
    """Hosts that ranks run on."""
    return tuple(f"h{index}" for index in range(topology.hosts))


def cross_names(topology: Topology) -> tuple[tuple[str, str], ...]:
    """Pairs of cross hosts."""
    return tuple((f"x{index}", f"y{index}") for index in range(topology.cross))


def make_plan(topology: Topology) -> Plan:
    """What to build for a topology."""
    return _routed(topology) if topology.kind == "leaf-spine" else _bridged(topology)


def _mac(index: int) -> str:
    return f"02:db:1f:00:{index >> 8:02x}:{index & 255:02x}"


def _place(topology: Topology, name: str, index: int, places: int) -> int:
    """The switch or leaf of a host: hosts in even runs, x on the first, y on the last."""
    if name[0] == "h":
        return index * places // topology.hosts
    return 0 if name[0] == "x" else places - 1


def _host_link(draft: _Draft, topology: Topology, wire: Wire) -> None:
    """Both points of a host's link, and its shapers if it has a rate or a delay."""
    link, at = wire.link, wire.b
    draft.wires.append(wire)
    draft.points += [
        Point(link, "down", at.node, at.device),
        Point(link, "up", at.node, at.device, ingress=True),
    ]
    rate, queue = topology.rate_bps, topology.queue_bytes
    draft.shapers += [
        Shaper(link, at.node, at.device, rate, queue, topology.delay_s),
        Shaper(link, wire.a.node, wire.a.device, rate, NIC_QUEUE_BYTES, 0.0, card=True),
    ]


def _core_link(draft: _Draft, topology: Topology, wire: Wire) -> None:
    """A link between two switches or routers: impaired where packets leave either end; b is ``up``."""
    draft.wires.append(wire)
    rate, queue, delay = topology.core_rate_bps, topology.core_queue_bytes, topology.core_delay_s
    for end, way in ((wire.a, "up"), (wire.b, "down")):
        draft.points.append(Point(wire.link, way, end.node, end.device))
        draft.shapers.append(Shaper(wire.link, end.node, end.device, rate, queue, delay))


def _bridged(topology: Topology) -> Plan:
    """One subnet over one or two bridges."""
    draft = _Draft()
    switches = ("sw0",) if topology.kind == "star" else ("sw0", "sw1")
    names = host_names(topology)
    draft.nodes += [Node(name, Role.SWITCH) for name in switches]
    draft.nodes += [Node(name, Role.HOST) for name in names]
    if len(switches) == 2:
        ends = (End("sw0", "core", _mac(0xFF00)), End("sw1", "core", _mac(0xFF01)))
        _core_link(draft, topology, Wire("core", *ends))
    home: dict[str, str] = {}
    for index, name in enumerate(names):
        home[name] = switches[_place(topology, name, index, len(switches))]
        a = End(name, "eth0", _mac(index), f"{_NET}.0.{index + 1}/24")
        _host_link(draft, topology, Wire(name, a, End(home[name], f"p{name}", _mac(0x100 + index))))
    hosts = [wire.a for wire in draft.wires if wire.link in home]
    for end in hosts:
        draft.routes.append(Route(end.node, f"{_NET}.0.0/24", device=end.device, source=end.ip))
        draft.neighbours += [
            Neighbour(end.node, end.device, o.ip, o.mac) for o in hosts if o.node != end.node
        ]
        draft.fdb += [(s, f"p{end.node}" if home[end.node] == s else "core", end.mac) for s in switches]
    return draft.finish(topology)


def _routed(topology: Topology) -> Plan:
    """A subnet a host; leaves reach other leaves' hosts over all spines."""
    draft = _Draft()
    names = host_names(topology)
    leaves = [f"leaf{index}" for index in range(topology.leaves)]
    spines = [f"spine{index}" for index in range(topology.spines)]
    draft.nodes += [Node(name, Role.ROUTER) for name in (*leaves, *spines)]
    draft.nodes += [Node(name, Role.HOST) for name in names]
    for wire in _fabric(topology, leaves, spines):
        _core_link(draft, topology, wire)
        draft.neighbours += _each_other(wire)
    for index, name in enumerate(names):
        leaf = _place(topology, name, index, topology.leaves)
        a = End(name, "eth0", _mac(index), f"{_NET}.{index}.2/30")
        b = End(leaves[leaf], f"p{name}", _mac(0x100 + index), f"{_NET}.{index}.1/30")
        wire = Wire(name, a, b)
        _host_link(draft, topology, wire)
        draft.neighbours += _each_other(wire)
        draft.routes.append(Route(name, "0.0.0.0/0", (b.ip,), "eth0", a.ip))
        draft.routes += _routes_to(f"{_NET}.{index}.0/30", leaf, topology)
    return draft.finish(topology)


def _fabric(topology: Topology, leaves: list[str], spines: list[str]) -> Iterator[Wire]:
    for i, leaf in enumerate(leaves):
        for j, spine in enumerate(spines):
            number = 0xE000 + 2 * (i * len(spines) + j)
            a = End(leaf, f"s{j}", _mac(number), f"{_FABRIC}.{i}.{4 * j + 1}/30")
            yield Wire(f"l{i}s{j}", a, End(spine, f"l{i}", _mac(number + 1), f"{_FABRIC}.{i}.{4 * j + 2}/30"))


def _each_other(wire: Wire) -> list[Neighbour]:
    pairs = ((wire.a, wire.b), (wire.b, wire.a))
    return [Neighbour(end.node, end.device, other.ip, other.mac) for end, other in pairs]


def _routes_to(subnet: str, leaf: int, topology: Topology) -> list[Route]:
    """How the other leaves (over all spines) and the spines reach a host's subnet."""
    over = tuple(f"{_FABRIC}.{{}}.{4 * j + 2}" for j in range(topology.spines))
    others = [i for i in range(topology.leaves) if i != leaf]
    routes = [Route(f"leaf{i}", subnet, tuple(gateway.format(i) for gateway in over)) for i in others]
    return routes + [
        Route(f"spine{j}", subnet, (f"{_FABRIC}.{leaf}.{4 * j + 1}",)) for j in range(topology.spines)
    ]
