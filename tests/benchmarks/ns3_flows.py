"""TCP flows in ns-3, for ``fabric_ns3``: read a plan as JSON, print each flow's completion time. Needs only the package ``ns3``.

A flow is complete when its receiver has all bytes. Links are point to point, their queues drop-tail in bytes, without a queueing
discipline above them; TCP is NewReno with SACK, an acknowledgement for each segment, and no other change. Each destination has one route.
"""

import json
import sys

from ns import ns

HEADER = 54
"""PPP 2, IPv4 20, TCP with timestamps 32."""


def main() -> None:
    plan = json.load(sys.stdin)
    configure(plan)
    nodes = ns.NodeContainer()
    nodes.Create(plan["nodes"])
    ns.InternetStackHelper().Install(nodes)
    addresses = connect(plan, nodes)
    for node, target, via in plan["routes"]:
        add_route(nodes.Get(node), addresses["host"][target], addresses["next"][via], addresses["interface"][via])
    sinks = start(plan, nodes, addresses["host"])
    finished = watch(plan, sinks)
    ns.Simulator.Run()
    sys.stdout.write(json.dumps(finished))


def configure(plan: dict) -> None:
    """Segments, windows, timeouts as the plan has them."""
    default = ns.Config.SetDefault
    default("ns3::TcpL4Protocol::SocketType", ns.StringValue("ns3::TcpLinuxReno"))
    default("ns3::TcpSocket::SegmentSize", ns.UintegerValue(plan["payload"]))
    default("ns3::TcpSocket::InitialCwnd", ns.UintegerValue(10))
    default("ns3::TcpSocket::DelAckCount", ns.UintegerValue(1))
    default("ns3::TcpSocket::SndBufSize", ns.UintegerValue(1 << 26))
    default("ns3::TcpSocket::RcvBufSize", ns.UintegerValue(1 << 26))
    default("ns3::TcpSocketBase::MinRto", ns.TimeValue(ns.MilliSeconds(200)))


def connect(plan: dict, nodes: "ns.NodeContainer") -> dict:
    """Cables, addresses; for each directed link (a, b): the address of b and a's interface."""
    found = {"host": {}, "next": {}, "interface": {}}
    for number, (a, b, rate, delay, queue) in enumerate(plan["cables"]):
        helper = ns.PointToPointHelper()
        helper.SetDeviceAttribute("DataRate", ns.StringValue(f"{int(rate)}bps"))
        helper.SetChannelAttribute("Delay", ns.StringValue(f"{int(round(delay * 1e12))}ps"))
        helper.SetQueue("ns3::DropTailQueue", "MaxSize", ns.QueueSizeValue(ns.QueueSize(f"{queue}B")))
        pair = ns.NodeContainer(nodes.Get(a), nodes.Get(b))
        devices = helper.Install(pair)
        base = ns.Ipv4AddressHelper(ns.Ipv4Address(f"10.{number // 250}.{number % 250}.0"), ns.Ipv4Mask("255.255.255.0"))
        interfaces = base.Assign(devices)
        ns.TrafficControlHelper().Uninstall(devices)
        ends = ((a, b, 0, 1), (b, a, 1, 0))
        for here, there, mine, other in ends:
            found["next"][f"{here}-{there}"] = interfaces.GetAddress(other)
            found["interface"][f"{here}-{there}"] = interfaces.Get(mine).second
        found["host"].setdefault(a, interfaces.GetAddress(0)) if a < plan["hosts"] else None
    return found


def add_route(node: "ns.Node", target: "ns.Ipv4Address", hop: "ns.Ipv4Address", interface: int) -> None:
    """A host route."""
    helper = ns.Ipv4StaticRoutingHelper()
    table = helper.GetStaticRouting(node.GetObject[ns.Ipv4]())
    table.AddHostRouteTo(target, hop, interface)


def start(plan: dict, nodes: "ns.NodeContainer", hosts: dict) -> list:
    """A bulk sender and a sink for each flow, on a port of its own."""
    sinks = []
    for number, (source, target, nbytes, at) in enumerate(plan["flows"]):
        port = 10_000 + number
        sink = ns.PacketSinkHelper("ns3::TcpSocketFactory", ns.InetSocketAddress(ns.Ipv4Address.GetAny(), port).ConvertTo())
        applications = sink.Install(nodes.Get(target))
        sinks.append(applications.Get(0).GetObject[ns.PacketSink]())
        bulk = ns.BulkSendHelper("ns3::TcpSocketFactory", ns.InetSocketAddress(hosts[target], port).ConvertTo())
        bulk.SetAttribute("MaxBytes", ns.UintegerValue(nbytes))
        bulk.Install(nodes.Get(source)).Start(ns.Seconds(at))
    return sinks


def watch(plan: dict, sinks: list) -> list:
    """Look every ``tick`` seconds which sinks have all; that is the precision of the times."""
    finished = [None] * len(sinks)

    def look() -> None:
        now = ns.Simulator.Now().GetSeconds()
        for number, (sink, flow) in enumerate(zip(sinks, plan["flows"])):
            if finished[number] is None and sink.GetTotalRx() >= flow[2]:
                finished[number] = now - flow[3]
        if any(done is None for done in finished) and now < plan["until"]:
            ns.Simulator.Schedule(ns.Seconds(plan["tick"]), event)
        else:
            ns.Simulator.Stop()

    ns.cppyy.cppdef("using namespace ns3; void dblp_tick(std::function<void()> f) { f(); }")
    event = ns.pythonMakeEvent(look) if hasattr(ns, "pythonMakeEvent") else look
    ns.Simulator.Schedule(ns.Seconds(plan["tick"]), event)
    return finished


if __name__ == "__main__":
    main()
