"""Building a plan with pyroute2: namespaces, veth pairs, bridges, addresses, routes. All within namespaces of the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dblp.sim.lab import namespaces
from dblp.sim.lab.plan import End, Neighbour, Plan, Role, Route, Wire
from dblp.sim.lab.tools import LabError

BRIDGE = "br0"
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_PERMANENT = 0x80  # NUD_PERMANENT
_STATIC = 0x40  # NUD_NOARP: an address behind a port; "permanent" would be one of the bridge itself
_BY_BRIDGE = 0x04  # NTF_MASTER: the bridge's table, not the device's own
_SPLIT = ("tso", "off", "gso", "off", "tx-udp-segmentation", "off")
"""Else a super-packet of up to 64 datagrams crosses the network as one packet, dropped or kept whole."""
_QUIET = (
    ("net/ipv6/conf/all/disable_ipv6", "1"),
    ("net/ipv6/conf/default/disable_ipv6", "1"),
    ("net/ipv4/conf/all/rp_filter", "0"),
    ("net/ipv4/conf/default/rp_filter", "0"),
    ("net/ipv4/tcp_no_metrics_save", "1"),
)
"""No packets of the kernel's own; asymmetric paths; no memory of earlier connections."""
_ROUTING = (("net/ipv4/ip_forward", "1"), ("net/ipv4/fib_multipath_hash_policy", "1"))
"""ECMP by addresses and ports."""


class Wiring:
    """Builds a plan; ``names`` maps each node to its namespace. Raises LabError with what the kernel refused."""

    def __init__(self, plan: Plan, names: Mapping[str, str]) -> None:
        self._plan = plan
        self._names = names

    def build(self) -> None:
        """All of it; what was made before a failure is left for the caller to remove."""
        for node in self._plan.nodes:
            namespaces.create(self._names[node.name])
            routing = _ROUTING if node.role is Role.ROUTER else ()
            namespaces.write_settings(self._names[node.name], (*_QUIET, *routing))
        for node in self._plan.nodes:
            self._inside(node.name, self._add_devices)
        for node in self._plan.nodes:
            self._inside(node.name, self._connect)
        self._split_packets()

    def set_congestion(self, name: str) -> None:
        """Put TCP's congestion control on the hosts' routes."""
        for route in self._plan.routes:
            if self._role(route.node) is Role.HOST:
                self._inside(route.node, lambda links, r=route: links.set_route(r, metrics={"cc_algo": name}))  # type: ignore[misc]

    def _inside(self, node: str, work: Callable[[_Links], None]) -> None:
        """Do some work through a netlink socket of a node."""
        package = namespaces.pyroute2()

        def there() -> None:
            with package.IPRoute() as handle:
                work(_Links(handle, node))

        try:
            namespaces.within(self._names[node], there)
        except package.NetlinkError as error:
            raise LabError(f"the kernel refuses a part of {node}: {error}") from None

    def _add_devices(self, links: _Links) -> None:
        """The bridge of a switch, and the wires that begin here."""
        if self._role(links.node) is Role.SWITCH:
            # Without snooping and spanning tree, the bridge sends nothing of its own and forwards at once.
            links.handle.link("add", ifname=BRIDGE, kind="bridge", br_stp_state=0, br_mcast_snooping=0)
        for wire in self._plan.wires:
            if wire.a.node == links.node:
                self._add_wire(links, wire)

    def _add_wire(self, links: _Links, wire: Wire) -> None:
        """A veth pair whose other end appears in the other namespace at once."""
        mtu = self._plan.topology.mtu
        with namespaces.path_of(self._names[wire.b.node]).open("rb") as there:
            peer = {"ifname": wire.b.device, "address": wire.b.mac, "mtu": mtu, "net_ns_fd": there.fileno()}
            links.handle.link(
                "add", ifname=wire.a.device, kind="veth", address=wire.a.mac, mtu=mtu, peer=peer
            )

    def _connect(self, links: _Links) -> None:
        """Addresses, and whom this node knows."""
        links.set_up("lo")
        bridged = self._role(links.node) is Role.SWITCH
        if bridged:
            links.set_up(BRIDGE)
        for end in self._ends():
            if end.node == links.node:
                links.attach(end, bridged)
        for switch, port, mac in self._plan.fdb:
            if switch == links.node:
                links.know(port, mac)
        for entry in self._plan.neighbours:
            if entry.node == links.node:
                links.set_neighbour(entry)
        for route in self._plan.routes:
            if route.node == links.node:
                links.set_route(route)

    def _ends(self) -> Iterator[End]:
        for wire in self._plan.wires:
            yield from (wire.a, wire.b)

    def _role(self, node: str) -> Role:
        return next(found.role for found in self._plan.nodes if found.name == node)

    def _split_packets(self) -> None:
        """Each datagram crosses the network alone. A host's card joins what has come, as those of real hosts do (generic receive
        offload): whatever loses or delays has then been passed."""
        for end in self._ends():
            joins = "on" if self._role(end.node) is Role.HOST else "off"
            namespaces.run_in(self._names[end.node], ["ethtool", "-K", end.device, *_SPLIT, "gro", joins])


class _Links:
    """The devices of one node, through a netlink socket within its namespace."""

    def __init__(self, handle: Any, node: str) -> None:
        self.handle = handle
        self.node = node
        self._indices: dict[str, int] = {}

    def attach(self, end: End, bridged: bool) -> None:
        """Give an end its bridge or address, and set it up."""
        if bridged:
            self.handle.link("set", index=self._index(end.device), master=self._index(BRIDGE))
        if end.address:
            length = int(end.address.partition("/")[2])
            self.handle.addr("add", index=self._index(end.device), address=end.ip, prefixlen=length)
        self.set_up(end.device)

    def know(self, port: str, mac: str) -> None:
        """Tell the bridge which port an address is behind, so that it never floods."""
        self.handle.fdb("replace", ifindex=self._index(port), lladdr=mac, state=_STATIC, flags=_BY_BRIDGE)

    def set_neighbour(self, entry: Neighbour) -> None:
        """Fix the hardware address of an IP address."""
        self.handle.neigh(
            "replace",
            dst=entry.ip,
            lladdr=entry.mac,
            ifindex=self._index(entry.device),
            state=_PERMANENT,
        )

    def set_route(self, route: Route, **more: Any) -> None:
        """Put a route in place of an earlier one to the same subnet."""
        where: dict[str, Any] = {}
        if len(route.gateways) > 1:
            where["multipath"] = [{"gateway": gateway} for gateway in route.gateways]
        elif route.gateways:
            where["gateway"] = route.gateways[0]
        if route.device:
            where["oif"] = self._index(route.device)
        if route.source:
            where["prefsrc"] = route.source
        self.handle.route("replace", dst=route.dst, **where, **more)

    def set_up(self, device: str) -> None:
        """Let a device work."""
        self.handle.link("set", index=self._index(device), state="up")

    def _index(self, device: str) -> int:
        if device not in self._indices:
            found = self.handle.link_lookup(ifname=device)
            if not found:
                raise LabError(f"{self.node} has no device {device}")
            self._indices[device] = int(found[0])
        return self._indices[device]


def available_congestion(namespace: str) -> list[str]:
    """TCP congestion controls that a namespace may use."""
    return namespaces.within(namespace, lambda: _CONGESTION.read_text().split())
