"""Congestion controls on a simulated bottleneck: what each gets, how flows share, how many senders meet at one receiver.

``python -m tests.benchmarks.congestion`` prints the whole table, with longer runs.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dblp.errors import ConfigError
from dblp.sim.loop import run
from dblp.sim.port import HostSpec, Link, Network, SwitchPort
from dblp.sim.tcp import TcpFlow
from dblp.transport.port import Burst
from tests.sim.flows import BUSY, LAN, SHALLOW, WAN, Setting, beside_tcp, incast, lossy, two

CONTROLS = ["delay", "bbr", "dctcp"]


@pytest.mark.parametrize("control", CONTROLS)
def test_random_loss_leaves_nine_tenths_of_the_link(control):
    share = lossy(control, LAN, warm_up_s=0.03, seconds=0.05)
    assert share.total >= 0.9
    assert share.lost > 0.004, "1 % of the datagrams with chunks, none of the others"


@pytest.mark.slow
@pytest.mark.parametrize("control", ["delay", "bbr"])
def test_random_loss_on_a_long_path_leaves_nine_tenths_of_the_link(control):
    assert lossy(control, WAN, warm_up_s=0.5, seconds=1.5).total >= 0.9


@pytest.mark.parametrize("control", ["delay", "bbr"])
def test_hosts_that_read_late_fill_the_link(control):
    """What the hosts take of a round trip is bridged by the window: without that, a fifth of the link was taken, by ``bbr`` a
    sixteenth."""
    share = lossy(control, BUSY, warm_up_s=0.5, seconds=0.3, loss=0.0)
    assert share.total >= 0.75


@pytest.mark.parametrize(("setting", "least"), [(BUSY, 0.7), (SHALLOW, 0.75)])
def test_random_loss_of_a_tenth_is_not_taken_for_an_overrun_buffer(setting, least):
    """Beside a queue that hosts make, or that comes and goes: a third of the first link and 45 % of the second were taken."""
    assert lossy("delay", setting, warm_up_s=0.3, seconds=0.3, loss=0.1).total >= least


def test_a_buffer_that_is_soon_full_is_not_overrun():
    """Windows leave in bursts, so most round trips are long and some are not: three fifths were lost, unheeded."""
    share = lossy("delay", SHALLOW, warm_up_s=0.5, seconds=0.3, loss=0.0)
    assert share.total >= 0.85
    assert share.lost <= 0.06


def test_many_that_overrun_a_small_buffer_together_shrink_together():
    """Each of them loses as much when it alone has shrunk: if they took that for another's loss, half would be lost for good."""
    share = incast("delay", Setting(queue_bytes=64 * 1024), senders=4, warm_up_s=0.1, seconds=0.1)
    assert share.total >= 0.9
    assert share.lost <= 0.15


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS)
def test_two_flows_share_fairly(control):
    share = two(control, LAN, warm_up_s=0.3, seconds=0.5, apart_s=0.1)
    assert share.jain >= 0.95 and share.total >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS)
def test_sixteen_senders_to_one_receiver_do_not_collapse(control):
    share = incast(control, LAN, senders=16, warm_up_s=0.02, seconds=0.4)
    assert share.total >= 0.8


@pytest.mark.parametrize("control", CONTROLS)
def test_many_senders_to_one_receiver_soon_fill_the_link(control):
    """From the first millisecond on: with the overload of all initial windows at once, and the repair of it."""
    share = incast(control, LAN, senders=8, warm_up_s=0.01, seconds=0.03)
    assert share.total >= 0.8
    assert min(share.shares) > 0.02, "none starves"


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS)
def test_a_tcp_like_flow_beside_it_lives_and_lets_live(control):
    share = beside_tcp(control, LAN, kind="cubic", warm_up_s=0.3, seconds=0.7)
    assert share.tcp > 0.02 and share.total > 0.02
    assert share.tcp + share.total >= 0.9


# --- switch ports and the TCP-like flow in the network


def test_a_named_switch_port_is_shared_by_the_links_that_lead_through_it():
    """Two links of a gigabit each into a port of 8 Mb/s: what leaves it is a datagram a millisecond."""

    async def main():
        network = Network(asyncio.get_running_loop(), link=Link(rate_bps=1e9))
        network.set_switch_port("trunk", SwitchPort(rate_bps=8e6, queue_bytes=10_000))
        times: list[tuple[float, str]] = []
        senders = {}
        for name in ("a", "b"):
            network.set_link(name, f"to {name}", Link(rate_bps=1e9, via="trunk"), one_way=True)
            receiver = network.port(f"to {name}")

            def note(slabs, name=name):
                times.extend(
                    (asyncio.get_running_loop().time(), name) for slab in slabs for _ in slab.parts()
                )

            receiver.open(note, lambda: None)
            senders[name] = network.port(name), receiver.addresses[0]
        for _ in range(3):
            for port, to in senders.values():
                port.send(Burst(np.zeros(1000, np.uint8), 1000, 0, 0, to))
        await asyncio.sleep(1.0)
        gaps = np.diff([at for at, _ in times])
        assert len(times) == 6 and gaps == pytest.approx([1e-3] * 5)
        assert {name for _, name in times} == {"a", "b"}
        with pytest.raises(ConfigError, match="nowhere"):
            network.switch_queue("nowhere")

    run(main())


def test_a_hosts_switch_port_drops_low_classes_first():
    async def main():
        host = HostSpec(switch=SwitchPort(rate_bps=8e6, queue_bytes=8_000, push_out=True))
        network = Network(asyncio.get_running_loop())
        network.set_host("target", host)
        receiver, sender = network.port("target"), network.port("source")
        got: list[int] = []

        def note(slabs):
            for slab in slabs:
                got.extend(int(part.datagram(i)[0]) for part in slab.parts() for i in range(part.count))

        receiver.open(note, lambda: None)
        for cls in (3, 2, 3, 1, 0):
            sender.send(Burst(np.full(3000, cls, np.uint8), 1000, 0, cls, receiver.addresses[0]))
        await asyncio.sleep(1.0)
        assert got.count(0) == got.count(1) == 3 and got.count(3) == 1, "the first was in service"
        assert network.lost()["queue"] == 15 - len(got) == 7
        assert network.switch_queue("target").dropped == {3: 5, 2: 2}

    run(main())


@pytest.mark.parametrize(("kind", "least"), [("reno", 0.9), ("cubic", 0.9)])
def test_a_tcp_like_flow_fills_a_link_and_backs_off_when_it_loses(kind, least):
    async def main():
        network = Network(asyncio.get_running_loop())
        network.set_switch_port("trunk", SwitchPort(rate_bps=1e8, queue_bytes=50_000))
        network.set_link("a", "b", Link(latency_s=1e-3, via="trunk"), one_way=True)
        flow = TcpFlow(network, "a", "b", kind=kind)
        flow.start()
        await asyncio.sleep(0.3)
        before, window = flow.delivered_bytes, flow.control.window
        await asyncio.sleep(0.5)
        share = (flow.delivered_bytes - before) * 8 / 0.5 / 1e8
        flow.stop()
        assert least <= share <= 1.0
        assert network.lost()["queue"] > 0, "it finds the buffer's end"
        product = (1e8 / 8 * 2e-3 + 50_000) / 1448
        assert window < 1.5 * product

    run(main())


def test_two_tcp_like_flows_share():
    async def main():
        network = Network(asyncio.get_running_loop())
        network.set_switch_port("trunk", SwitchPort(rate_bps=1e8, queue_bytes=50_000))
        flows = []
        for name in ("a", "b"):
            network.set_link(name, f"to {name}", Link(latency_s=1e-3, via="trunk"), one_way=True)
            flows.append(TcpFlow(network, name, f"to {name}", kind="reno"))
            flows[-1].start()
        await asyncio.sleep(1.0)
        rates = [flow.delivered_bytes for flow in flows]
        for flow in flows:
            flow.stop()
        assert min(rates) > 0.4 * max(rates)
        with pytest.raises(ConfigError, match="vegas"):
            TcpFlow(network, "a", "to a", kind="vegas")

    run(main())
