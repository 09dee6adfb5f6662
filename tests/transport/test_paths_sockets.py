"""Several paths on real sockets: over two addresses, with paths that stop in mid-run and come back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest
import uvloop

from dblp.collectives.group import Group
from dblp.transport.burst import Train
from dblp.transport.config import TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.policy import Bounded, Exact, Policy
from dblp.transport.port import Address, Burst, PortFacts
from dblp.transport.udp import UdpPort, open_port

pytestmark = pytest.mark.sockets

HOSTS = ("127.0.0.1", "127.0.0.2")
PATHS = 4


class LeakyPort:
    """A UDP port that loses what is sent on the paths in ``dead``."""

    def __init__(self, port: UdpPort) -> None:
        self.port = port
        self.dead: set[int] = set()
        self.lost: Counter[int] = Counter()
        self.open = port.open
        self.close = port.close

    @property
    def addresses(self) -> Sequence[Address]:
        return self.port.addresses

    @property
    def facts(self) -> PortFacts:
        return self.port.facts

    def send(self, burst: Burst) -> bool:
        if burst.path not in self.dead:
            return self.port.send(burst)
        self.lost[burst.path] += burst.count
        return True

    def send_train(self, train: Train) -> int:
        if train.path not in self.dead:
            return self.port.send_train(train)
        self.lost[train.path] += train.bursts * train.chunks
        return train.bursts


def contribution(rank: int, round_: int, elements: int) -> np.ndarray:
    return np.random.default_rng([rank, round_]).integers(-8, 9, elements).astype(np.float32)


class Pair:
    """Two ranks in one loop."""

    def __init__(self, ports: list[LeakyPort], endpoints: list[Endpoint]) -> None:
        self.ports = ports
        self.endpoints = endpoints
        self.groups = [Group(endpoint, timeout_s=30.0) for endpoint in endpoints]
        self.round = 0

    async def reduce(self, elements: int = 500_000, policy: Policy | None = None) -> None:
        """One all-reduce; its result is checked if nothing may be lost."""
        arrays = [contribution(rank, self.round, elements) for rank in range(2)]
        total = arrays[0] + arrays[1]
        self.round += 1
        await asyncio.gather(
            *(
                group.all_reduce(array, policy=policy)
                for group, array in zip(self.groups, arrays, strict=True)
            )
        )
        if policy is None or policy == Exact():
            np.testing.assert_array_equal(arrays[0], total)
        np.testing.assert_array_equal(arrays[0], arrays[1])

    def alive(self, rank: int) -> list[int]:
        return [state.path for state in self.endpoints[rank].path_states(1 - rank) if state.alive]

    async def until(self, alive: list[int], seconds: float = 20.0) -> None:
        """Go on reducing until both ranks hold these paths for alive."""
        async with asyncio.timeout(seconds):
            while [self.alive(0), self.alive(1)] != [alive, alive]:
                await self.reduce(20_000)
                await asyncio.sleep(5e-3)


def play(script: Callable[[Pair], Awaitable[None]], choice: str, dead: set[int] | None = None) -> None:
    """Run ``script`` on two ranks with four paths over two loopback addresses; paths in ``dead`` are so from the start."""

    async def main() -> None:
        config = TransportConfig(
            paths=PATHS, ifname=",".join(HOSTS), path_choice=choice, timeout_s=30.0, connect_timeout_s=30.0
        )
        ports = [LeakyPort(open_port(config)) for _ in range(2)]
        for port in ports:
            assert [address.host for address in port.addresses] == [*HOSTS, *HOSTS]
            port.dead |= dead or set()
        peers = [list(port.addresses) for port in ports]
        endpoints = await asyncio.gather(
            *(
                Endpoint.connect(port, rank=rank, world_size=2, config=config, session=7, peers=peers)
                for rank, port in enumerate(ports)
            )
        )
        pair = Pair(ports, list(endpoints))
        try:
            await script(pair)
        finally:
            await asyncio.gather(*(endpoint.close(linger_s=0.2) for endpoint in endpoints))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("choice", ["spray", "reps", "ethereal"])
def test_every_path_carries_chunks_and_sums_are_exact(choice):
    async def script(pair: Pair) -> None:
        for _ in range(4):
            await pair.reduce()
        for rank in range(2):
            sent = [state.bytes_sent for state in pair.endpoints[rank].path_states(1 - rank)]
            assert min(sent) > 20_000, sent

    play(script, choice)


@pytest.mark.parametrize("policy", [Exact(), Bounded(0.1)])
@pytest.mark.parametrize("choice", ["spray", "reps", "ethereal"])
def test_rounds_go_on_when_a_path_dies_in_mid_run_and_use_it_when_it_lives(choice, policy):
    async def script(pair: Pair) -> None:
        loop = asyncio.get_running_loop()
        await pair.reduce(policy=policy)
        for port in pair.ports:
            loop.call_later(1e-3, port.dead.add, 2)
        for _ in range(3):
            await pair.reduce(2_000_000, policy=policy)
        await pair.until([0, 1, 3])
        assert pair.ports[0].lost[2] and pair.ports[1].lost[2]
        for port in pair.ports:
            port.dead.clear()
        await pair.until([0, 1, 2, 3])
        before = pair.endpoints[0].path_states(1)[2].bytes_sent
        for _ in range(40):  # ``reps`` draws at random: how soon depends on what else the host does
            await pair.reduce(policy=policy)
            if pair.endpoints[0].path_states(1)[2].bytes_sent > before + 20_000:
                break
        else:
            raise AssertionError(f"path 2 is not used again: {pair.endpoints[0].path_states(1)}")

    play(script, choice)


def test_an_address_that_is_dead_from_the_start_takes_its_paths_with_it():
    async def script(pair: Pair) -> None:
        for rank in range(2):
            assert pair.alive(rank) == [0, 2]
            assert [state.proved for state in pair.endpoints[rank].path_states(1 - rank)] == [True, False] * 2
        await pair.reduce()
        for port in pair.ports:
            port.dead.clear()
        await pair.until([0, 1, 2, 3])
        await pair.reduce()

    play(script, "spray", dead={1, 3})


def test_a_single_path_pays_no_attention_to_the_others():
    async def script(pair: Pair) -> None:
        pair.ports[0].dead |= {0, 2, 3}
        pair.ports[1].dead |= {0, 2, 3}
        for _ in range(3):
            await pair.reduce()
        assert not pair.ports[0].lost and not pair.ports[1].lost
        sent = [state.bytes_sent for state in pair.endpoints[0].path_states(1)]
        assert sent[1] > 1_000_000 and max(sent[0], sent[2], sent[3]) < 200  # a question when it was proved

    play(script, "single")
