"""Endpoints on a simulated network, in virtual time: joining, leaving, disagreeing, ports that block."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from dblp.collectives.group import Group
from dblp.errors import ClosedError, DeadlineError, HandshakeError, MismatchError, PeerError
from dblp.sim.loop import run
from dblp.sim.port import HostSpec, Link, Network
from dblp.transport.config import TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.impair import ImpairedPort, Impairer, parse_impair
from dblp.transport.message import MessageSpec, message_id
from dblp.transport.port import Address
from tests.transport.cores import RecordingSink, numbers, spec_of

SESSION = 5


def ports_of(network: Network, count: int) -> list[Any]:
    return [network.port(f"10.0.0.{rank + 1}") for rank in range(count)]


async def join(network: Network, world_size: int = 2, **settings: Any) -> list[Endpoint]:
    return await join_ports(ports_of(network, world_size), **settings)


async def join_ports(ports: list[Any], **settings: Any) -> list[Endpoint]:
    peers = [list(port.addresses) for port in ports]
    config = TransportConfig(**({"timeout_s": 5.0, "connect_timeout_s": 5.0} | settings))
    return await asyncio.gather(
        *(
            Endpoint.connect(
                port, rank=rank, world_size=len(ports), config=config, session=SESSION, peers=peers
            )
            for rank, port in enumerate(ports)
        )
    )


def network(**options: Any) -> Network:
    return Network(asyncio.get_running_loop(), 3, **options)


async def leave(endpoints: list[Endpoint]) -> None:
    await asyncio.gather(*(endpoint.close(linger_s=0.5) for endpoint in endpoints))


@pytest.mark.parametrize(
    "options",
    [{}, {"block": 0.5}, {"regroup": 1.0, "host": HostSpec(egress_bps=1e8, send_buffer_bytes=70_000)}],
)
def test_large_messages_both_ways(options):
    """Also through a port that often blocks in the middle of a train."""

    async def main() -> None:
        endpoints = await join(network(**options))
        data = numbers(1000)
        sinks: list[RecordingSink] = []
        waits: list[asyncio.Future[Any]] = []
        for endpoint in endpoints:
            peer = 1 - endpoint.rank
            endpoint.begin_round(0, b"s", lambda text: text.hex())
            sink = RecordingSink(spec_of(data), data.dtype)
            sinks.append(sink)
            waits.append(endpoint.receive(peer, 0, spec_of(data), sink).done)
            waits.append(endpoint.send(peer, 0, data.view(np.uint8), spec_of(data)).done)
        await asyncio.gather(*waits)
        for sink in sinks:
            assert (sink.array == data).all() and (sink.times == 1).all()
        await leave(endpoints)

    run(main())


@pytest.mark.parametrize("nbytes", [800, 8000], ids=["with its OPEN", "chunks"])
def test_what_is_offered_when_another_message_has_ended_leaves_at_once(nbytes):
    """A hop of a union: it answers what it learns from a message's end, which is told when all that was due has been sent. It
    used to leave with whatever came next, a feedback after 4 ms at the latest."""

    async def main() -> None:
        endpoints = await join(network(link=Link(latency_s=1e-3)))
        asked, answer = np.ones(100, np.uint8), np.ones(nbytes, np.uint8)
        sizes = [MessageSpec(nbytes=array.nbytes, chunk_bytes=1408) for array in (asked, answer)]
        for endpoint in endpoints:
            endpoint.begin_round(0, b"s", lambda text: text.hex())
        first, second = endpoints
        reply = second.send(0, 1, answer, sizes[1], offered=False)
        question = second.receive(0, 0, sizes[0], RecordingSink(sizes[0], asked.dtype))
        question.done.add_done_callback(lambda _: reply.offer(0, sizes[1].chunks))
        answered = first.receive(1, 1, sizes[1], RecordingSink(sizes[1], answer.dtype))
        await asyncio.sleep(0.1)  # nothing else is on its way
        start = first.time()
        first.send(1, 0, asked, sizes[0])
        await answered.done
        assert first.time() - start < 2.5e-3
        await leave(endpoints)

    run(main())


@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_different_calls_raise_on_every_rank_and_name_both(delay_s):
    async def main() -> None:
        endpoints = await join(network(), 2)
        groups = [Group(endpoint) for endpoint in endpoints]

        async def call(rank: int) -> None:
            await asyncio.sleep(delay_s * rank)
            array = np.zeros(5000 if rank else 3000, np.float32)
            await groups[rank].all_reduce(array)

        errors = await asyncio.gather(call(0), call(1), return_exceptions=True)
        for error in errors:
            assert isinstance(error, MismatchError), error
            assert error.ranks == (0, 1)
            assert "3000" in str(error) and "5000" in str(error)
        with pytest.raises(ClosedError):
            await groups[0].barrier()
        await leave(endpoints)

    run(main())


def test_a_rank_that_leaves_while_another_waits_is_named():
    async def main() -> None:
        endpoints = await join(network(), 2)
        waiting = asyncio.ensure_future(Group(endpoints[1]).barrier())
        await asyncio.sleep(0.1)
        await endpoints[0].close(linger_s=0.1)
        with pytest.raises(PeerError, match="rank 0 closed its group") as caught:
            await waiting
        assert caught.value.ranks == (0,)
        await endpoints[1].close(linger_s=0.1)
        await endpoints[1].close()

    run(main())


def test_closing_lingers_until_the_peer_has_everything():
    """The round is over for the sender, whose last words are lost again and again."""

    async def main() -> None:
        net = network(link=Link(impair="loss(0.5)"))
        endpoints = await join(net, connect_timeout_s=60.0)
        data = numbers(20)
        first, second = endpoints
        for endpoint in endpoints:
            endpoint.begin_round(0, b"s", lambda text: text.hex())
        sink = RecordingSink(spec_of(data), data.dtype)
        done = second.receive(0, 0, spec_of(data), sink).done
        sending = first.send(1, 0, data.view(np.uint8), spec_of(data))
        assert sending.detach()
        first.end_round(0)
        data[:] = 0
        await first.close(linger_s=30.0)
        await done
        assert (sink.array == numbers(20)).all()
        await second.close(linger_s=0.1)

    run(main())


@pytest.mark.parametrize("delay", ["100ms", "400ms"])
def test_what_an_impaired_port_delays_still_leaves(delay, caplog):
    """Else who leaves takes its last acknowledgements with it, and the other waits for them and warns."""

    async def main() -> list[float]:
        net = network()
        loop = asyncio.get_running_loop()
        spec = parse_impair(f"delay({delay})")
        ports = [
            ImpairedPort(port, Impairer(spec, np.random.default_rng(seed)), loop)
            for seed, port in enumerate(ports_of(net, 2))
        ]
        endpoints = await join_ports(ports)
        groups = [Group(endpoint) for endpoint in endpoints]
        for _ in range(2):
            await asyncio.gather(*(group.all_reduce(np.ones(1000, np.float32)) for group in groups))

        async def timed(endpoint: Endpoint) -> float:
            start = loop.time()
            await endpoint.close(linger_s=2.0)
            return loop.time() - start

        return await asyncio.gather(*map(timed, endpoints))

    assert max(run(main())) < 2.0
    assert not caplog.records


async def connect_all(net: Network, world_size: int, then: Any) -> list[Any]:
    """Each rank connects by itself and calls ``then(endpoint)`` at once; results and errors, by rank."""
    ports = ports_of(net, world_size)
    peers = [list(port.addresses) for port in ports]
    config = TransportConfig(timeout_s=20.0, connect_timeout_s=60.0)

    async def member(rank: int, port: Any) -> Any:
        endpoint = await Endpoint.connect(
            port, rank=rank, world_size=world_size, config=config, session=SESSION, peers=peers
        )
        return await then(endpoint)

    return await asyncio.gather(*map(member, range(world_size), ports), return_exceptions=True)


def test_who_closes_at_once_leaves_nobody_behind_in_the_handshake():
    """The lower rank's WELCOME may be lost: it has done its part, and says it again until it hears of the higher one."""

    async def main(seed: int) -> None:
        net = Network(asyncio.get_running_loop(), seed, link=Link(impair="loss(0.5),delay(5ms)"))
        assert await connect_all(net, 3, lambda endpoint: endpoint.close(linger_s=2.0)) == [None] * 3

    for seed in range(40):
        run(main(seed))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (None, "rank 0 left before rank 1 had finished its handshake with it"),
        (MismatchError("this does not fit", [0]), "rank 0 gave up: this does not fit"),  # unless that is lost
    ],
)
def test_whose_peer_is_gone_before_the_handshake_is_over_hears_so_at_once(error, words):
    """A crash behind ``init_process_group``: no connect timeout is waited for."""

    async def leave_at_once(endpoint: Endpoint) -> None:
        if error is not None and endpoint.rank == 0:
            endpoint.fail(error)
        await endpoint.close(linger_s=0.0)

    async def main(seed: int) -> list[Any]:
        loop = asyncio.get_running_loop()
        net = Network(loop, seed, link=Link(impair="loss(0.4)"))
        results = await connect_all(net, 2, leave_at_once)
        assert loop.time() < 10.0
        return results

    told = []
    for seed in range(24):
        first, second = run(main(seed))
        assert first is None, "the lower rank has done its part before"
        if second is not None:
            assert isinstance(second, PeerError | MismatchError), second
            told.append(str(second))
    assert all("rank 0 left" in text or words in text for text in told)
    assert sum(words in text for text in told) > 4


def test_who_does_not_answer_is_named():
    async def main() -> None:
        net = network()
        ports = ports_of(net, 3)
        peers = [list(port.addresses) for port in ports]
        config = TransportConfig(connect_timeout_s=2.0)
        attempts = [
            Endpoint.connect(
                ports[rank], rank=rank, world_size=3, config=config, session=SESSION, peers=peers
            )
            for rank in (0, 2)
        ]
        errors = await asyncio.gather(*attempts, return_exceptions=True)
        for error in errors:
            assert isinstance(error, DeadlineError) and error.ranks == (1,)
            assert "rank 1 at 10.0.0.2:10000" in str(error) and "firewall" in str(error)
        assert ports[0]._closed and ports[2]._closed

    run(main())


def test_a_job_of_another_size_fails_at_once_on_both_sides():
    async def main() -> None:
        net = network()
        ports = ports_of(net, 2)
        peers = [list(port.addresses) for port in ports] + [[Address("10.0.0.9", 10_000)]]
        attempts = [
            Endpoint.connect(
                ports[rank],
                rank=rank,
                world_size=2 + rank,
                config=TransportConfig(),
                session=SESSION,
                peers=peers,
            )
            for rank in (0, 1)
        ]
        errors = await asyncio.gather(*attempts, return_exceptions=True)
        for error in errors:
            assert isinstance(error, HandshakeError) and "world_size" in str(error)
        assert asyncio.get_running_loop().time() < 1.0

    run(main())


def test_a_group_of_one_needs_nobody():
    async def main() -> None:
        (endpoint,) = await join(network(), 1)
        array = np.arange(5.0)
        await Group(endpoint).all_reduce(array)
        assert array.tolist() == [0, 1, 2, 3, 4]
        await endpoint.close()

    run(main())


def test_after_a_failure_every_call_says_so():
    async def main() -> None:
        endpoints = await join(network(), 2)
        endpoints[0].fail(PeerError("rank 1 is on fire", [1]))
        spec = MessageSpec(nbytes=16, chunk_bytes=16)
        with pytest.raises(ClosedError, match="rank 1 is on fire"):
            endpoints[0].begin_round(0, b"", lambda text: "")
        with pytest.raises(ClosedError, match="rank 1 is on fire"):
            endpoints[0].send(1, message_id(0, 0, 0), np.zeros(16, np.uint8), spec)
        await asyncio.sleep(0.1)
        with pytest.raises(ClosedError, match="rank 0 gave up: rank 1 is on fire"):
            endpoints[1].begin_round(0, b"", lambda text: "")
        await leave(endpoints)

    run(main())


def test_a_report_counts_duplicates_and_repairs():
    async def main() -> None:
        endpoints = await join(network(link=Link(impair="duplicate(0.3),loss(0.05)")), 2)
        groups = [Group(endpoint) for endpoint in endpoints]

        async def call(rank: int) -> Any:
            return await groups[rank].all_reduce(np.ones(200_000, np.float32))

        reports = await asyncio.gather(call(0), call(1))
        for report in reports:
            assert 0.1 * report.chunks_received < report.chunks_duplicate < report.chunks_received
            assert report.chunks_resent > 0
        await leave(endpoints)

    run(main())


def test_silence_ends_with_a_sign_of_life():
    async def main() -> None:
        endpoints = await join(network(), 2)
        await asyncio.sleep(3.0)
        assert endpoints[0].silence(1) > 2.5
        endpoints[0].ping([1])
        await asyncio.sleep(0.1)
        assert endpoints[0].silence(1) < 0.2
        await leave(endpoints)

    run(main())
