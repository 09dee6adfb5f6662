"""A session: all that one group holds in this process (engine, port, endpoint, Group), from rendezvous to
close.

The torch backend and ``dblp.init_process_group`` both build on it; they differ in how the ranks meet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from dblp.collectives.engine import Done, Engine, acquire_engine, release_engine
from dblp.collectives.group import Group
from dblp.collectives.rendezvous import Member, Roster, new_member
from dblp.errors import DeadlineError
from dblp.transport.config import TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.impair import ImpairedPort, Impairer, parse_impair
from dblp.transport.port import Address, Port
from dblp.transport.udp import open_port

T = TypeVar("T")
Meet = Callable[[Engine, Callable[[int], Member]], Roster]
"""``meet(engine, member)``: bring the ranks together; ``member(generation)`` is this rank's record."""

BACKSTOP_SECONDS = 1.5
"""The engine ends a call this long after the group's own deadline should have: nothing may wait for ever."""
LINGER_SECONDS = 2.0
"""How long a closing group waits for its last data to be acknowledged."""
_log = logging.getLogger("dblp")


class Session:
    """One rank's membership in a group. Blocking; the collectives run on the engine."""

    def __init__(
        self,
        config: TransportConfig,
        meet: Meet,
        *,
        rank: int,
        world_size: int,
        master: Address | None = None,
        cleanup: Callable[[], None] | None = None,
    ) -> None:
        """Open a port, meet the other ranks and shake hands with each; ``cleanup()`` is called on the engine
        at the end.

        Raises HandshakeError, VersionError or DeadlineError, and ConfigError for an unusable interface.
        """
        self.rank = rank
        self.world_size = world_size
        self.engine = acquire_engine(switch_interval_s=config.switch_interval_s)
        self._cleanup = cleanup or _nothing
        self._closed = False
        self._groups: list[Group] = []
        self._token = 0
        try:
            port = self.engine.run(lambda: _open(config, master, rank))
            try:
                self._join(config, meet, port)
            except BaseException:
                if self.engine.alive:
                    self.engine.run(lambda: self._give_up(port))
                raise
        except BaseException:
            release_engine(self.engine)
            raise

    def submit(self, what: str, timeout_s: float, call: Callable[[Group], Awaitable[T]], done: Done) -> None:
        """Run ``call(group)`` on the engine, under a backstop behind its own deadline; ``done`` gets the
        outcome."""
        self.engine.submit(lambda: self._begin(what, timeout_s, call), done)

    def run(self, what: str, timeout_s: float, call: Callable[[Group], Awaitable[T]]) -> T:
        """The same, waiting for the result."""
        return self.engine.run(lambda: self._begin(what, timeout_s, call))

    def new_group(self) -> Group:
        """Another group of the same ranks, whose rounds are numbered by themselves; all ranks make theirs in the same order."""

        async def make() -> Group:
            self._groups.append(Group(self.endpoint, group_id=1 + len(self._groups)))
            return self._groups[-1]

        return self.engine.run(make)

    def close(self, linger_s: float = LINGER_SECONDS) -> None:
        """Leave the group: linger for what is not acknowledged, then free everything; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.engine.alive:
            self.engine.remove_closer(self._token)
            self.engine.run(lambda: self._leave(linger_s))
        release_engine(self.engine)

    def _join(self, config: TransportConfig, meet: Meet, port: Port) -> None:
        limit = min(config.datagram_bytes, port.facts.max_datagram_bytes)

        def member(generation: int) -> Member:
            return new_member(self.rank, self.world_size, port.addresses, limit, generation)

        roster = meet(self.engine, member)
        self.config = replace(config, datagram_bytes=roster.datagram_bytes)
        self.endpoint = self.engine.run(lambda: self._connect(port, roster))
        self.group = Group(self.endpoint)
        self._token = self.engine.add_closer(self._close_at_exit)
        _log.info("rank %d of %d on %s", self.rank, self.world_size, port.addresses[0].host)

    async def _connect(self, port: Port, roster: Roster) -> Endpoint:
        return await Endpoint.connect(
            port,
            rank=self.rank,
            world_size=self.world_size,
            config=self.config,
            session=roster.session,
            peers=roster.peers,
            generation=roster.generation,
        )

    def _begin(self, what: str, timeout_s: float, call: Callable[[Group], Awaitable[T]]) -> asyncio.Future[T]:
        future = asyncio.ensure_future(call(self.group))
        loop = self.engine.loop
        handle = loop.call_later(timeout_s + BACKSTOP_SECONDS, self._too_late, what, timeout_s, future)
        future.add_done_callback(lambda _: handle.cancel())
        return future

    def _too_late(self, what: str, timeout_s: float, future: asyncio.Future[Any]) -> None:
        text = f"{what} on rank {self.rank}: not complete within {timeout_s:g} s"
        self.endpoint.fail(DeadlineError(text))
        self.engine.loop.call_later(0.1, future.cancel)

    async def _leave(self, linger_s: float) -> None:
        for group in (self.group, *self._groups):
            group.close()
        await self.endpoint.close(linger_s=linger_s)
        self._cleanup()

    async def _close_at_exit(self) -> None:
        self._closed = True
        await self._leave(LINGER_SECONDS)

    async def _give_up(self, port: Port) -> None:
        port.close()
        self._cleanup()


async def _open(config: TransportConfig, master: Address | None, rank: int) -> Port:
    spec = parse_impair(config.impair)  # before a socket is opened: it may be malformed
    port: Port = open_port(config, master=master)
    if not config.impair:
        return port
    # Each rank draws its own fates; scheduled bursts hit all ranks of a host at the same instants.
    rng = np.random.default_rng([spec.seed, rank])
    return ImpairedPort(port, Impairer(spec, rng), asyncio.get_running_loop())


def _nothing() -> None:
    """Nothing to clean up."""
