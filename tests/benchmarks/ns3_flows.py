"""TCP flows in ns-3, for ``fabric_ns3``: read a plan as JSON, print each flow's completion time. Needs only the package
``ns3``.

A flow is complete when its receiver has all bytes. Links are point to point, their queues drop-tail in bytes (a host's own
drops nothing), without a queueing discipline above them; TCP is NewReno with SACK, an acknowledgement for each segment, and no
other change. Each destination has one route.
"""

import json
import sys
import time
from typing import Any

from ns import ns

HOST_QUEUE = 1 << 30
"""Bytes of a host's own queue, which drops nothing, as in the packet engine."""
HEADER = 54
"""PPP 2, IPv4 20, TCP with timestamps 32."""


_WATCH = """
namespace watched {
std::vector<ns3::Ptr<ns3::PacketSink>> sinks;
std::vector<uint64_t> sizes;
std::vector<double> starts, finished;
void add(ns3::Ptr<ns3::PacketSink> sink, uint64_t size, double start) {
  sinks.push_back(sink); sizes.push_back(size); starts.push_back(start); finished.push_back(-1.0);
}
void look(double tick, double until) {
  double now = ns3::Simulator::Now().GetSeconds();
  bool left = false;
  for (size_t i = 0; i < sinks.size(); i++) {
    if (finished[i] < 0 && sinks[i]->GetTotalRx() >= sizes[i]) finished[i] = now - starts[i];
    left = left || finished[i] < 0;
  }
  if (left && now < until) ns3::Simulator::Schedule(ns3::Seconds(tick), &look, tick, until);
  else ns3::Simulator::Stop();
}
}
"""


def main() -> None:
    plan = json.load(sys.stdin)
    configure(plan)
    nodes = ns.NodeContainer()
    nodes.Create(plan["nodes"])
    ns.InternetStackHelper().Install(nodes)
    addresses = connect(plan, nodes)
    for node, target, via in plan["routes"]:
        add_route(
            nodes.Get(node), addresses["host"][target], addresses["next"][via], addresses["interface"][via]
        )
    sinks = start(plan, nodes, addresses["host"])
    finished = watch(plan, sinks)
    began = time.perf_counter()
    ns.Simulator.Run()
    wall_s = time.perf_counter() - began
    events = int(ns.Simulator.GetEventCount())
    json.dump({"finished": [float(t) for t in finished], "wall_s": wall_s, "events": events}, sys.stdout)


def configure(plan: dict[str, Any]) -> None:
    """Segments, windows, timeouts as the plan has them."""
    default = ns.Config.SetDefault
    default("ns3::TcpL4Protocol::SocketType", ns.StringValue("ns3::TcpLinuxReno"))
    default("ns3::TcpSocket::SegmentSize", ns.UintegerValue(plan["payload"]))
    default("ns3::TcpSocket::InitialCwnd", ns.UintegerValue(10))
    default("ns3::TcpSocket::DelAckCount", ns.UintegerValue(1))
    default("ns3::TcpSocket::SndBufSize", ns.UintegerValue(1 << 26))
    default("ns3::TcpSocket::RcvBufSize", ns.UintegerValue(1 << 26))
    default("ns3::TcpSocketBase::MinRto", ns.TimeValue(ns.MilliSeconds(200)))


def connect(plan: dict[str, Any], nodes: "ns.NodeContainer") -> dict[str, Any]:
    """Cables, addresses; for each directed link (a, b): the address of b and a's interface."""
    found: dict[str, dict[Any, Any]] = {"host": {}, "next": {}, "interface": {}}
    for number, (a, b, rate, delay, queue) in enumerate(plan["cables"]):
        helper = ns.PointToPointHelper()
        helper.SetDeviceAttribute("DataRate", ns.StringValue(f"{int(rate)}bps"))
        helper.SetChannelAttribute("Delay", ns.StringValue(f"{round(delay * 1e12)}ps"))
        helper.SetQueue("ns3::DropTailQueue", "MaxSize", ns.QueueSizeValue(ns.QueueSize(f"{queue}B")))
        devices = helper.Install(nodes.Get(a), nodes.Get(b))
        base = ns.Ipv4AddressHelper(
            ns.Ipv4Address(f"10.{number // 250}.{number % 250}.0"), ns.Ipv4Mask("255.255.255.0")
        )
        interfaces = base.Assign(devices)
        ns.TrafficControlHelper().Uninstall(devices)
        if a < plan["hosts"]:
            devices.Get(0).GetObject[ns.PointToPointNetDevice]().GetQueue().SetMaxSize(
                ns.QueueSize(f"{HOST_QUEUE}B")
            )
        ends = ((a, b, 0, 1), (b, a, 1, 0))
        for here, there, mine, other in ends:
            found["next"][f"{here}-{there}"] = interfaces.GetAddress(other)
            found["interface"][f"{here}-{there}"] = interfaces.Get(mine).second
        if a < plan["hosts"]:
            found["host"][a] = interfaces.GetAddress(0)
    return found


def add_route(node: "ns.Node", target: "ns.Ipv4Address", hop: "ns.Ipv4Address", interface: int) -> None:
    """A host route."""
    helper = ns.Ipv4StaticRoutingHelper()
    table = helper.GetStaticRouting(node.GetObject[ns.Ipv4]())
    table.AddHostRouteTo(target, hop, interface)


def start(plan: dict[str, Any], nodes: "ns.NodeContainer", hosts: dict[int, Any]) -> list[Any]:
    """A bulk sender and a sink for each flow, on a port of its own."""
    sinks = []
    for number, (source, target, nbytes, at) in enumerate(plan["flows"]):
        port = 10_000 + number
        sink = ns.PacketSinkHelper(
            "ns3::TcpSocketFactory", ns.InetSocketAddress(ns.Ipv4Address.GetAny(), port).ConvertTo()
        )
        applications = sink.Install(nodes.Get(target))
        sinks.append(applications.Get(0).GetObject[ns.PacketSink]())
        bulk = ns.BulkSendHelper(
            "ns3::TcpSocketFactory", ns.InetSocketAddress(hosts[target], port).ConvertTo()
        )
        bulk.SetAttribute("MaxBytes", ns.UintegerValue(nbytes))
        bulk.Install(nodes.Get(source)).Start(ns.Seconds(at))
    return sinks


def watch(plan: dict[str, Any], sinks: list[Any]) -> "ns.cppyy.gbl.std.vector":
    """Look every ``tick`` seconds which sinks have all; that is the precision of the times. -1: not done."""
    ns.cppyy.cppdef(_WATCH)
    watched = ns.cppyy.gbl.watched
    for sink, (_, _, nbytes, start) in zip(sinks, plan["flows"], strict=True):
        watched.add(sink, nbytes, start)
    watched.look(plan["tick"], plan["until"])
    return watched.finished


if __name__ == "__main__":
    main()
