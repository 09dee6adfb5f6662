"""Worlds to run groups in: endpoints in memory, or real endpoints on the simulated network. Both in virtual time."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from dblp.collectives.group import Group
from dblp.sim.loop import run as run_virtual
from dblp.sim.port import Link, Network
from dblp.transport.config import TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.interface import EndpointLike
from tests.collectives.fake import FakeNet

T = TypeVar("T")
Member = Callable[[Group], Awaitable[T]]


def run_memory(
    member: Member[T], world_size: int, *, seed: int = 0, timeout_s: float = 60.0, **settings: Any
) -> list[T]:
    """Run ``member`` on a group of each rank of a FakeNet; results by rank."""

    async def main() -> list[T]:
        net = FakeNet(world_size, seed=seed, **settings)
        return await run_members(net.endpoints, member, timeout_s)

    return run_virtual(main())


def run_network(
    member: Member[T],
    world_size: int,
    *,
    seed: int = 0,
    timeout_s: float = 60.0,
    impair: str = "",
    **settings: Any,
) -> list[T]:
    """Run ``member`` on a group of each rank of real endpoints on a simulated network."""

    async def main() -> list[T]:
        endpoints = await connect_network(world_size, seed=seed, impair=impair, **settings)
        try:
            return await run_members(endpoints, member, timeout_s)
        finally:
            await asyncio.gather(*(endpoint.close(linger_s=1.0) for endpoint in endpoints))

    return run_virtual(main())


async def connect_network(
    world_size: int, *, seed: int = 0, impair: str = "", **settings: Any
) -> list[Endpoint]:
    """Real endpoints on a simulated network, one a rank, within a virtual loop."""
    loop = asyncio.get_running_loop()
    loop.virtual = True  # type: ignore[attr-defined]
    network = Network(loop, seed, link=Link(latency_s=50e-6, impair=impair))
    config = TransportConfig(seed=seed, **settings)
    ports = [network.port(f"h{rank}") for rank in range(world_size)]
    addresses = [list(port.addresses) for port in ports]
    connects = [
        Endpoint.connect(
            port,
            rank=rank,
            world_size=world_size,
            config=config,
            session=0x1234_5678 + seed,
            peers=addresses,
        )
        for rank, port in enumerate(ports)
    ]
    return await asyncio.gather(*connects)


async def run_members(endpoints: Sequence[EndpointLike], member: Member[T], timeout_s: float) -> list[T]:
    groups = [Group(endpoint, timeout_s=timeout_s) for endpoint in endpoints]
    results = await asyncio.gather(*(member(group) for group in groups), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    for group in groups:
        group.close()
    return results  # type: ignore[return-value]  # no exception is left in it


def values(rank: int, count: int, dtype: str, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random elements of a rank: small integers, so that sums are exact in every order; bfloat16 as bits."""
    rng = np.random.default_rng([seed, rank, count])
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if dtype == "bfloat16":
        return (rng.integers(-4, 5, count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype.startswith("uint"):
        return rng.integers(0, 5, count).astype(dtype)
    plain = rng.integers(-4, 5, count)
    if dtype.startswith("complex"):
        return (plain + 1j * rng.integers(-4, 5, count)).astype(dtype)
    return plain.astype(dtype)


def total(parts: Iterable[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Sum of arrays in their order."""
    return functools.reduce(np.add, parts)
