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

from dblp.collectives.deadline import LATE_S
from dblp.collectives.engine import Done, Engine, acquire_engine, release_engine
from dblp.collectives.flight_signal import parse_signal, watch
from dblp.collectives.group import Group
from dblp.collectives.placement import engine_processors, usable
from dblp.collectives.recorder import open_flight_dir, write_dump
from dblp.collectives.rendezvous import Member, Roster, new_member
from dblp.errors import DeadlineError, PeerError
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
"""How long a closing group waits for a silent peer to acknowledge its last data; at exit, for any peer."""
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

        Raises HandshakeError, VersionError or DeadlineError, and ConfigError for an unusable interface, a folder of dumps that
        cannot be written to, or a signal that cannot be caught.
        """
        if config.flight_signal:
            parse_signal(config.flight_signal)  # before a socket is opened
        self._flights = open_flight_dir(config.flight_dir) if config.flight_dir else None
        self.rank = rank
        self.world_size = world_size
        self.engine = acquire_engine(switch_interval_s=config.switch_interval_s)
        self._cleanup = cleanup or _nothing
        self._closed = False
        self._groups: list[Group] = []
        self._token = 0
        self._dumps = 0
        self._failed = False
        self._unwatch: Callable[[], None] = _nothing
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
        if config.flight_signal:
            self._unwatch = watch(config.flight_signal, self.engine.loop, self.dump_flight)

    def dump_flight(self, reason: str) -> None:
        """Write the flight recorder's text and JSON, of all groups, into the configured folder, or what did not end well to the
        log."""
        recorder = self.group.flight_recorder
        if self._flights is None:
            _log.warning("%s", recorder.to_text(reason, brief=True))
            return
        self._dumps += 1
        try:
            plain, json = write_dump(recorder, self._flights, reason, self._dumps)
        except OSError as error:
            text = recorder.to_text(reason, brief=True)  # the folder went, or is full: the report is not lost
            _log.warning(
                "the flight recorder of rank %d could not be written: %s\n%s", self.rank, error, text
            )
            return
        _log.warning("the flight recorder of rank %d is in %s and %s (%s)", self.rank, plain, json, reason)

    def submit(self, what: str, timeout_s: float, call: Callable[[Group], Awaitable[T]], done: Done) -> None:
        """Run ``call(group)`` on the engine, under a backstop behind its own deadline; ``done`` gets the
        outcome."""
        self.engine.submit(lambda: self._begin(what, timeout_s, call), done)

    def run(self, what: str, timeout_s: float, call: Callable[[Group], Awaitable[T]]) -> T:
        """The same, waiting for the result."""
        return self.engine.run(lambda: self._begin(what, timeout_s, call))

    def new_group(self, name: str = "unnamed") -> Group:
        """Another group of the same ranks, whose rounds are numbered by themselves; all ranks make theirs in the same order.
        ``name``: what the flight recorder calls it, which tells of it together with the first."""

        async def make() -> Group:
            group = Group(self.endpoint, group_id=1 + len(self._groups), name=name)
            self.group.flight_recorder.include(group.flight_recorder)
            group.on_failure = self._on_failure
            self._groups.append(group)
            return group

        return self.engine.run(make)

    def close(self, linger_s: float = LINGER_SECONDS) -> None:
        """Leave the group: linger for what is not acknowledged (``Endpoint.close``), then free everything; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._unwatch()
        if self.engine.alive:
            self.engine.remove_closer(self._token)
            self.engine.run(lambda: self._leave(linger_s))
        elif self.engine.owned:  # its thread died: nothing runs there any more, but the sockets are open
            self.endpoint.port.close()
            self._cleanup()
        release_engine(self.engine)

    def _join(self, config: TransportConfig, meet: Meet, port: Port) -> None:
        limit = min(config.datagram_bytes, port.facts.max_datagram_bytes)

        def member(generation: int) -> Member:
            return new_member(self.rank, self.world_size, port.addresses, limit, generation)

        roster = meet(self.engine, member)
        processors, sharers = engine_processors(config.engine_cpus, self.rank, roster.processors, usable())
        if processors is not None:
            self.engine.bind(processors, sharers)
        self.config = replace(config, datagram_bytes=roster.datagram_bytes)
        self.endpoint = self.engine.run(lambda: self._connect(port, roster))
        self.group = Group(self.endpoint)
        self.group.on_failure = self._on_failure
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
        due = loop.time() + timeout_s + BACKSTOP_SECONDS
        handle = loop.call_at(due, self._too_late, what, timeout_s, future, due)
        future.add_done_callback(lambda _: handle.cancel())
        return future

    def _too_late(self, what: str, timeout_s: float, future: asyncio.Future[Any], due: float) -> None:
        loop = self.engine.loop
        if future.done():
            return
        if (
            loop.time() - due > LATE_S
        ):  # the process stood still: the group's own deadline comes first, and knows who is missing
            loop.call_later(BACKSTOP_SECONDS, self._too_late, what, timeout_s, future, float("inf"))
            return
        text = f"{what} on rank {self.rank}: not complete within {timeout_s:g} s"
        self.endpoint.fail(DeadlineError(text))
        loop.call_later(0.1, future.cancel)

    def _on_failure(self, error: BaseException) -> None:
        """The group's first failure: a rank that is late or gone is worth a dump, a call that disagrees names itself."""
        if isinstance(error, DeadlineError | PeerError) and not self._failed:
            self._failed = True  # the other groups of the endpoint fail with it
            try:
                self.dump_flight(f"{type(error).__name__}: {error}")
            except Exception:  # whatever it is, the peers must be told of the failure next
                _log.exception("the flight recorder of rank %d could not be dumped", self.rank)

    async def _leave(self, linger_s: float, most_s: float | None = None) -> None:
        for group in (self.group, *self._groups):
            group.close()
        await self.endpoint.close(linger_s=linger_s, most_s=most_s)
        self._cleanup()

    async def _close_at_exit(self) -> None:
        self._closed = True
        await self._leave(LINGER_SECONDS, LINGER_SECONDS)

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
