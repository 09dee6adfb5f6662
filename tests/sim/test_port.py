"""The simulated network: exact times, finite buffers, faults at any instant, and replay from a seed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from dblp.errors import ConfigError
from dblp.sim.loop import run
from dblp.sim.port import HostSpec, Link, Network, SimPort, truesize
from dblp.transport.impair import ImpairedPort, Impairer, parse_impair
from dblp.transport.port import Address, Burst, Slab


class Inbox:
    """What one port received: (time, path, source, datagram), and the shapes of the slabs."""

    def __init__(self, port: SimPort, loop: asyncio.AbstractEventLoop) -> None:
        self.port = port
        self.loop = loop
        self.got: list[tuple[float, int, Address, bytes]] = []
        self.received_at: list[float] = []
        self.shapes: list[tuple[int, bool]] = []
        self.kept: list[Slab] = []
        self.batches = 0
        self.writable = 0
        port.open(self._on_batch, self._on_writable)

    def _on_batch(self, slabs: Any) -> None:
        self.batches += 1
        for slab in itertools.chain.from_iterable(stack.parts() for stack in slabs):
            self.shapes.append((slab.count, slab.stride == slab.size))
            self.received_at.append(slab.received_at)
            self.kept.append(slab)
            for i in range(slab.count):
                self.got.append((self.loop.time(), slab.path, slab.source(i), slab.datagram(i)))

    def _on_writable(self) -> None:
        self.writable += 1

    @property
    def datagrams(self) -> list[bytes]:
        return [datagram for *_, datagram in self.got]

    @property
    def times(self) -> list[float]:
        return [at for at, *_ in self.got]


def _burst(to: SimPort, count: int = 3, size: int = 1000, last: int | None = None, fill: int = 0) -> Burst:
    """``count`` datagrams; datagram i is filled with ``fill + i``."""
    data = np.repeat(np.arange(fill, fill + count, dtype=np.uint8), size)
    return Burst(data[: (count - 1) * size + (last or size)], size, 0, 0, to.addresses[0])


def _datagrams(burst: Burst) -> list[bytes]:
    raw = burst.data.tobytes()
    return [raw[i : i + burst.segment] for i in range(0, len(raw), burst.segment)]


Scenario = Callable[[Network, Inbox, Inbox], Coroutine[Any, Any, Any]]


def _play(scenario: Scenario, seed: int = 1, **options: Any) -> Any:
    """Run a scenario between hosts a and b."""

    async def main() -> Any:
        loop = asyncio.get_running_loop()
        network = Network(loop, seed, **options)
        return await scenario(network, Inbox(network.port("a"), loop), Inbox(network.port("b"), loop))

    return run(main())


def test_a_burst_goes_through_whole_after_exactly_the_latency():
    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        burst = _burst(b.port, 44, 1464, last=100)
        sent = _datagrams(burst)
        await asyncio.sleep(1.0)
        assert a.port.send(burst)
        burst.data[:] = 255  # the core reuses its memory at once
        await asyncio.sleep(1.0)
        assert b.datagrams == sent
        assert set(b.times) == {1.0 + 0.003}
        assert b.received_at == [1.0 + 0.003]
        assert b.shapes == [(44, True)]
        assert {source for _, _, source, _ in b.got} == {a.port.addresses[0]}
        assert network.counters == {"sent": 44, "delivered": 44}

    _play(scenario, link=Link(latency_s=0.003))


def test_slabs_are_junk_after_the_callback():
    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        a.port.send(_burst(b.port, 3, 8, fill=1))
        await asyncio.sleep(1.0)
        assert b.kept[0].datagram(0) == b"\xa5" * 8

    _play(scenario)


def test_bursts_that_arrive_at_one_instant_come_in_one_batch_in_the_order_of_sending():
    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        for fill in (0, 10, 20):
            a.port.send(_burst(b.port, 2, 8, fill=fill))
        b.port.send(_burst(b.port, 1, 8, fill=30))
        await asyncio.sleep(1.0)
        assert [datagram[0] for datagram in b.datagrams] == [0, 1, 10, 11, 20, 21, 30]
        assert b.batches == 1

    _play(scenario)


def test_rate_spaces_a_burst_and_received_at_is_the_first_arrival():
    """1000-byte datagrams at 8 Mb/s take 1 ms each; within interrupt_s they come together, with the last."""

    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        a.port.send(_burst(b.port, 5, 1000))
        await asyncio.sleep(1.0)
        assert b.times == pytest.approx([0.012, 0.012, 0.014, 0.014, 0.015])
        assert b.received_at == pytest.approx([0.011, 0.013, 0.015])

    _play(scenario, link=Link(latency_s=0.01, rate_bps=8e6), interrupt_s=1.5e-3)


def test_without_interrupt_moderation_every_datagram_has_its_own_time():
    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        a.port.send(_burst(b.port, 5, 1000))
        await asyncio.sleep(1.0)
        assert b.times == pytest.approx([0.011, 0.012, 0.013, 0.014, 0.015], abs=1e-12)

    _play(scenario, link=Link(latency_s=0.01, rate_bps=8e6), interrupt_s=0.0)


def test_the_queue_of_a_link_is_finite():
    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        a.port.send(_burst(b.port, 10, 1000))
        await asyncio.sleep(1.0)
        assert [datagram[0] for datagram in b.datagrams] == [0, 1, 2, 3]
        assert network.lost() == {"rate": 6}
        assert network.network_loss == 0.6

    _play(scenario, link=Link(rate_bps=8e6, queue_bytes=4000))


def test_links_have_settings_of_their_own_in_each_direction():
    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        network.set_link("a", "b", Link(latency_s=0.5), one_way=True)
        a.port.send(_burst(b.port, 1))
        b.port.send(_burst(a.port, 1))
        await asyncio.sleep(1.0)
        assert (b.times, a.times) == ([0.5], [0.25])

    _play(scenario, link=Link(latency_s=0.25))


def test_senders_share_the_ingress_of_a_host():
    """Incast: two bursts of 4 ms of work meet in one queue."""

    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        network.set_host("b", HostSpec(ingress="rate(8mbit,queue=6000B)"))
        c = network.port("c")
        a.port.send(_burst(b.port, 4, 1000))
        c.send(_burst(b.port, 4, 1000, fill=10))
        await asyncio.sleep(1.0)
        assert [datagram[0] for datagram in b.datagrams] == [0, 1, 2, 3, 10, 11]
        assert b.times == pytest.approx([0.001, 0.002, 0.003, 0.004, 0.005, 0.006])
        assert network.lost() == {"rate": 2}

    _play(scenario, link=Link(latency_s=0.0))


def test_a_slow_card_blocks_and_calls_back():
    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        burst = _burst(b.port, 10, 1000)
        assert a.port.send(burst)
        assert a.port.send(burst)
        assert not a.port.send(burst)
        assert not a.port.send(burst)
        assert network.counters["sent"] == 20
        await asyncio.sleep(0.0099)
        assert a.writable == 0
        await asyncio.sleep(0.0002)
        assert a.writable == 1  # half of the buffer is free after 10 ms
        assert a.port.send(burst)
        await asyncio.sleep(1.0)
        assert len(b.datagrams) == 30
        assert network.lost().total() == 0

    _play(scenario, host=HostSpec(egress_bps=8e6, send_buffer_bytes=20_000), link=Link(latency_s=0.0))


def test_losses_of_a_link_leave_one_shorter_burst():
    async def scenario(network: Network, a: Inbox, b: Inbox) -> list[int]:
        a.port.send(_burst(b.port, 40, 100))
        await asyncio.sleep(1.0)
        assert len(b.datagrams) + network.lost()["loss"] == 40
        assert b.shapes == [(len(b.datagrams), True)]
        return [datagram[0] for datagram in b.datagrams]

    first = _play(scenario, link=Link(impair="loss(0.3)"))
    assert 10 < len(first) < 40
    assert first == sorted(first)
    assert first == _play(scenario, link=Link(impair="loss(0.3)"))
    assert first != _play(scenario, link=Link(impair="loss(0.3)"), seed=2)
    assert first != _play(scenario, link=Link(impair="loss(0.3),seed(9)"))


def test_corruption_is_delivered_on_request():
    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        burst = _burst(b.port, 10, 100, last=30)
        a.port.send(burst)
        await asyncio.sleep(1.0)
        for sent, got in zip(_datagrams(burst), b.datagrams, strict=True):
            wrong = np.unpackbits(np.frombuffer(sent, np.uint8) ^ np.frombuffer(got, np.uint8)).sum()
            assert wrong == 1

    _play(scenario, link=Link(impair="corrupt(1,deliver=true)"))


def test_the_receive_buffer_overflows_by_truesize():
    """Linux's default of 212,992 bytes holds 92 datagrams of 1464 bytes while the host does not read."""

    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        for _ in range(3):
            a.port.send(_burst(b.port, 40, 1464))
        await asyncio.sleep(0.009)
        assert b.datagrams == []
        await asyncio.sleep(0.002)
        assert len(b.datagrams) == 92
        assert network.counters == {"sent": 120, "delivered": 92, "buffer": 28}
        a.port.send(_burst(b.port, 40, 1464))
        await asyncio.sleep(0.02)
        assert len(b.datagrams) == 132

    _play(
        scenario,
        host=HostSpec(receive_buffer_bytes=212_992, processing_s=0.01),
        link=Link(latency_s=0.0),
    )


@pytest.mark.parametrize(("payload", "charge"), [(0, 768), (48, 768), (1464, 2304), (8952, 16_640)])
def test_truesize(payload, charge):
    assert truesize(payload) == charge


def test_each_path_has_a_buffer_and_an_address():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        network = Network(loop, host=HostSpec(receive_buffer_bytes=8 * 2304, processing_s=0.001))
        sender, inbox = network.port("a", paths=2), Inbox(network.port("b", paths=2), loop)
        for path, address in enumerate(inbox.port.addresses):
            data = np.full(10 * 1464, path, np.uint8)
            sender.send(Burst(data, 1464, path, 0, address))
        await asyncio.sleep(1.0)
        assert [(path, datagram[0]) for _, path, _, datagram in inbox.got] == [(0, 0)] * 8 + [(1, 1)] * 8
        assert [source for _, _, source, _ in inbox.got] == [sender.addresses[0]] * 8 + [
            sender.addresses[1]
        ] * 8
        assert network.lost() == {"buffer": 4}

    run(main())


def test_processing_delays_each_read_of_a_host():
    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        a.port.send(_burst(b.port, 1))
        await asyncio.sleep(0.012)
        a.port.send(_burst(b.port, 1))
        await asyncio.sleep(0.003)
        a.port.send(_burst(b.port, 1))
        await asyncio.sleep(1.0)
        assert b.times == pytest.approx([0.01, 0.022, 0.022])

    _play(scenario, host=HostSpec(processing_s=0.01), link=Link(latency_s=0.0))


def test_a_killed_host_neither_sends_nor_receives_until_it_is_revived():
    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        a.port.send(_burst(b.port, 1, fill=1))
        await asyncio.sleep(0.005)
        network.kill("b")  # the datagram is on its way
        assert b.port.send(_burst(a.port, 2))
        await asyncio.sleep(1.0)
        assert a.got == b.got == []
        assert network.lost() == {"dead": 3}
        network.revive("b")
        a.port.send(_burst(b.port, 1, fill=7))
        await asyncio.sleep(1.0)
        assert [datagram[0] for datagram in b.datagrams] == [7]

    _play(scenario, link=Link(latency_s=0.01))


def test_killing_a_host_loses_what_waits_in_its_buffers():
    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        a.port.send(_burst(b.port, 3))
        await asyncio.sleep(0.01)
        network.kill("b")
        await asyncio.sleep(10.0)
        assert b.got == []
        assert network.counters == {"sent": 3, "delivered": 0, "dead": 3}

    _play(scenario, host=HostSpec(processing_s=1.0))


def test_a_paused_host_reads_nothing_until_it_resumes():
    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        network.pause("b")
        for _ in range(5):
            a.port.send(_burst(b.port, 2, 1464))
        assert not b.port.send(_burst(a.port, 1))
        await asyncio.sleep(5.0)
        assert b.got == []
        assert b.writable == 0
        network.resume("b")
        await asyncio.sleep(1.0)
        assert set(b.times) == {5.0}
        assert len(b.datagrams) == 4
        assert network.lost() == {"buffer": 6}
        assert b.writable == 1
        assert b.port.send(_burst(a.port, 1))
        await asyncio.sleep(1.0)
        assert len(a.datagrams) == 1

    _play(scenario, host=HostSpec(receive_buffer_bytes=4 * 2304))


@pytest.mark.parametrize("one_way", [True, False])
def test_partition_and_heal(one_way):
    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        network.partition("a", "b", one_way=one_way)
        a.port.send(_burst(b.port, 2))
        b.port.send(_burst(a.port, 3))
        await asyncio.sleep(1.0)
        assert b.got == []
        assert len(a.got) == (3 if one_way else 0)
        assert network.lost() == {"cut": 2 if one_way else 5}
        network.heal("a", "b")
        a.port.send(_burst(b.port, 2))
        b.port.send(_burst(a.port, 3))
        await asyncio.sleep(1.0)
        assert (len(b.got), len(a.got)) == (2, 6 if one_way else 3)

    _play(scenario)


def test_a_partition_loses_what_is_on_its_way():
    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        a.port.send(_burst(b.port, 2))
        await asyncio.sleep(0.5)
        network.partition("a", "b")
        await asyncio.sleep(0.6)
        network.heal()
        await asyncio.sleep(5.0)
        assert b.got == []

    _play(scenario, link=Link(latency_s=1.0))


def test_unreachable_and_oversize_datagrams_are_counted():
    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        a.port.send(Burst(np.zeros(10, np.uint8), 10, 0, 0, Address("nowhere", 1)))
        a.port.send(_burst(b.port, 2, 1473))
        b.port.close()
        b.port.close()
        a.port.send(_burst(b.port, 1))
        await asyncio.sleep(1.0)
        assert network.lost() == {"unreachable": 2, "oversize": 2}
        with pytest.raises(ConfigError, match="closed"):
            b.port.send(_burst(a.port, 1))

    _play(scenario)


def test_an_address_may_be_used_again_only_after_close():
    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        with pytest.raises(ConfigError, match="in use"):
            SimPort(network, b.port.addresses)
        b.port.close()
        SimPort(network, b.port.addresses).close()
        with pytest.raises(ConfigError, match="one host"):
            SimPort(network, [Address("x", 1), Address("y", 1)])

    _play(scenario)


@pytest.mark.parametrize("count", [0, 65])
def test_a_burst_that_no_system_call_takes_is_refused(count):
    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        with pytest.raises(ConfigError, match="one system call takes"):
            a.port.send(Burst(np.zeros(count * 10, np.uint8), 10, 0, 0, b.port.addresses[0]))
        with pytest.raises(ConfigError, match=r"paths 0\.\.0"):
            a.port.send(Burst(np.zeros(10, np.uint8), 10, 1, 0, b.port.addresses[0]))

    _play(scenario)


def test_random_blocking_refuses_and_calls_back_each_time():
    async def scenario(network: Network, a: Inbox, b: Inbox) -> None:
        refused = 0
        for _ in range(200):
            if not a.port.send(_burst(b.port, 1)):
                refused += 1
                await asyncio.sleep(0.01)
            assert a.writable == refused
        assert 30 < refused < 90
        assert len(b.datagrams) + refused <= 200

    _play(scenario, block=0.3)


async def _traffic(network: Network, a: Inbox, b: Inbox) -> tuple[str, list[bytes], list[tuple[int, bool]]]:
    """A mix of sizes, gaps and directions."""
    rng = np.random.default_rng(5)
    for step in range(150):
        port, to = ((a.port, b.port), (b.port, a.port))[step % 2]
        count, size = int(rng.integers(1, 64)), int(rng.integers(1, 1000))
        port.send(_burst(to, count, size, last=int(rng.integers(1, size + 1)), fill=step))
        await asyncio.sleep(float(rng.exponential(1e-4)))
    await asyncio.sleep(1.0)
    lost, counters = network.lost().total(), network.counters
    assert counters["sent"] + network.duplicated == counters["delivered"] + lost
    assert counters["delivered"] == len(a.got) + len(b.got)
    return network.trace_digest(), a.datagrams + b.datagrams, a.shapes + b.shapes


_ROUGH = Link(
    latency_s=1e-4,
    rate_bps=1e9,
    queue_bytes=100_000,
    impair="ge(0.02,0.2),duplicate(0.05),corrupt(0.02,deliver=true),jitter(200us),reorder(0.05,by=1ms)",
)


def test_a_run_replays_bit_for_bit_from_its_seed():
    options: dict[str, Any] = {"link": _ROUGH, "regroup": 0.5, "block": 0.1}
    options["host"] = HostSpec(receive_buffer_bytes=150_000, processing_s=2e-4, egress_bps=2e9)
    first = _play(_traffic, **options)
    assert first == _play(_traffic, **options)
    assert first[0] != _play(_traffic, seed=2, **options)[0]


def test_the_digest_sees_one_bit():
    def digest(bit: int) -> str:
        async def scenario(network: Network, a: Inbox, b: Inbox) -> str:
            burst = _burst(b.port, 3, 333)
            burst.data[700] ^= bit
            a.port.send(burst)
            await asyncio.sleep(1.0)
            return network.trace_digest()

        result: str = _play(scenario)
        return result

    assert digest(1) == digest(1) != digest(2)


def test_regrouping_changes_the_slabs_and_nothing_else():
    plain = _play(_traffic)
    mixed = _play(_traffic, regroup=0.7)
    assert plain[:2] == mixed[:2]
    assert all(coalesced for count, coalesced in plain[2] if count > 1)
    assert len(mixed[2]) > 1.3 * len(plain[2])
    assert any(not coalesced and count > 1 for count, coalesced in mixed[2])


def test_an_impaired_port_works_on_a_simulated_network():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        network = Network(loop, link=Link(latency_s=0.25))
        impairer = Impairer(parse_impair("loss(0.5),delay(0.5s)"))
        port = ImpairedPort(network.port("a"), impairer, loop)
        inbox = Inbox(network.port("b"), loop)
        port.send(_burst(inbox.port, 40))
        await asyncio.sleep(2.0)
        assert set(inbox.times) == {0.75}
        assert len(inbox.datagrams) == impairer.counters.delivered == 40 - impairer.counters.total_lost
        assert 5 < len(inbox.datagrams) < 35

    run(main())


def test_wrong_impairments_of_a_link_are_refused_at_once():
    with pytest.raises(ConfigError, match="known are"):
        _play(_traffic, link=Link(impair="lose(1)"))
    with pytest.raises(ConfigError, match="rate stands more than once"):
        _play(_traffic, link=Link(impair="rate(1gbit)", rate_bps=1e9))
