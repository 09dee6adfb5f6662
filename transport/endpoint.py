"""The asyncio shell of the core: moves bursts between core and port, keeps one timer, resolves futures."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.errors import DeadlineError
from dblp.transport.burst import Train
from dblp.transport.config import TransportConfig
from dblp.transport.core import Core
from dblp.transport.incoming import Incoming
from dblp.transport.message import (
    MessageSpec,
    OnChunks,
    OnScattered,
    Received,
    RoundCounters,
    Sent,
    Sink,
)
from dblp.transport.outgoing import Outgoing
from dblp.transport.paths import PathState
from dblp.transport.port import Address, Burst, Bytes, Port, Slab
from dblp.transport.standing import Standing

logger = logging.getLogger(__name__)

TRAINS_A_TURN = 2
"""Trains (or single bursts) sent before the loop looks at its sockets again: 4 MiB, about a millisecond of work, at most."""
BLOCKED_RETRY_S = 1e-3
"""Distance between looks at the timers while the network does not take what is to be sent."""
CLOSE_REPEATS = 16
"""Times that CLOSE is said at most, ``CLOSE_GAP_S`` apart, to peers that have not acknowledged it: they may have left too."""
CLOSE_GAP_S = 2e-3
WELCOME_GAP_S = 0.05
"""Distance at which a closing rank repeats the last word of a handshake to peers that may lack it."""
LINGER_ASK_SHARE = 0.2
"""Share of ``linger_s`` after which a closing rank asks those that owe it an acknowledgement again: a few may be lost."""


class SendHandle:
    """An outgoing message (``interface.Sending``)."""

    __slots__ = ("_endpoint", "_out", "done")

    def __init__(self, endpoint: Endpoint, out: Outgoing, done: asyncio.Future[Sent]) -> None:
        self._endpoint = endpoint
        self._out = out
        self.done = done

    def offer(self, first: int, count: int) -> None:
        """See ``interface.Sending.offer``. It leaves soon, also where the offer follows from how another message ended, which is
        told when all that was due has been sent."""
        self._out.offer(first, count)
        self._endpoint.pump_soon()

    def offer_scattered(self, chunks: npt.NDArray[np.uint32]) -> None:
        """See ``interface.Sending.offer_scattered``; as ``offer``."""
        self._out.offer_scattered(chunks)
        self._endpoint.pump_soon()

    def detach(self) -> bool:
        """See ``interface.Sending.detach``."""
        return self._out.detach()

    @property
    def counts(self) -> tuple[int, int]:
        """Chunks sent first and sent again so far."""
        return self._out.chunks_sent, self._out.chunks_resent

    def missing(self) -> npt.NDArray[np.integer[Any]]:
        """Chunks that the peer is not known to have."""
        return np.flatnonzero(~self._out.acked)


class ReceiveHandle:
    """An incoming message (``interface.Receiving``)."""

    __slots__ = ("_endpoint", "_message", "_peer", "done")

    def __init__(
        self, endpoint: Endpoint, peer: int, message: Incoming, done: asyncio.Future[Received]
    ) -> None:
        self._endpoint = endpoint
        self._peer = peer
        self._message = message
        self.done = done

    def release(self, limit: int) -> None:
        """See ``interface.Receiving.release``."""
        self._endpoint._release(self._peer, self._message, limit)

    @property
    def progress(self) -> tuple[int, int]:
        """Chunks received and chunks in the message."""
        return self._message.got, len(self._message.have)

    def missing(self) -> npt.NDArray[np.integer[Any]]:
        """Chunks that have not been placed."""
        return np.flatnonzero(~self._message.have)


class Endpoint:
    """One rank's transport to its peers (``interface.EndpointLike``). Everything runs on one event loop."""

    def __init__(self, port: Port, core: Core, config: TransportConfig) -> None:
        self.port = port
        self.core = core
        self.config = config
        self.rank = core.rank
        self.world_size = core.world_size
        self._loop = asyncio.get_running_loop()
        self._now = clock_of(self._loop)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._soon = False
        self._busy = False
        self._unsent: deque[Burst] = deque()
        self._send_train: Callable[[Train], int] | None = getattr(port, "send_train", None)
        self._closed = False
        self._connected: asyncio.Future[None] | None = None
        self._started = self._now()

    @classmethod
    async def connect(
        cls,
        port: Port,
        *,
        rank: int,
        world_size: int,
        config: TransportConfig,
        session: int,
        peers: Sequence[Sequence[Address]],
        generation: int = 0,
        datagram_bytes: int | None = None,
    ) -> Endpoint:
        """Open ``port`` and shake hands with every peer on every path.

        ``peers[rank][path]`` are the addresses; ``datagram_bytes`` is what the group agreed on (default: the configured
        size or the port's limit, whichever is less). Raises HandshakeError, VersionError, or DeadlineError that
        lists the ranks that did not answer; the port is closed then.
        """
        loop = asyncio.get_running_loop()
        agreed = min(datagram_bytes or config.datagram_bytes, port.facts.max_datagram_bytes)
        now = clock_of(loop)()
        rng = np.random.default_rng([config.seed, session & 0xFFFFFFFF, session >> 32, rank])
        core = Core(
            rank=rank, world_size=world_size, session=session, generation=generation, config=config, facts=port.facts,
            datagram_bytes=agreed, peers=peers, rng=rng, now=now,
        )  # fmt: skip
        endpoint = cls(port, core, config)
        port.open(endpoint._on_batch, endpoint._on_writable)
        try:
            await endpoint._shake_hands(peers)
        except BaseException:
            endpoint._shut()
            raise
        return endpoint

    async def _shake_hands(self, peers: Sequence[Sequence[Address]]) -> None:
        if self.world_size == 1:
            return
        self._connected = self._loop.create_future()
        self.pump_soon()
        try:
            async with asyncio.timeout(self.config.connect_timeout_s):
                await self._connected
        except TimeoutError:
            missing = self.core.handshake.missing()
            where = ", ".join(
                f"rank {peer} at {peers[peer][0].host}:{peers[peer][0].port}" for peer in missing
            )
            raise DeadlineError(
                f"rank {self.rank}: no answer from {where} within {self.config.connect_timeout_s:g} s; are they running, "
                "and does a firewall let UDP through between the hosts?",
                missing,
            ) from None
        finally:
            self._connected = None
        self._tell_unproved(peers)

    def _tell_unproved(self, peers: Sequence[Sequence[Address]]) -> None:
        """Say which paths the group starts without."""
        for peer in sorted({peer for peer, _ in self.core.handshake.unproved()}):
            lost = [state for state in self.core.path_states(peer) if not state.proved]
            where = ", ".join(f"{s.path} ({s.address.host}:{s.address.port})" for s in lost)
            logger.warning(
                "rank %d: rank %d answers on %d of %d paths; without path %s until it answers there",
                self.rank, peer, len(peers[peer]) - len(lost), len(peers[peer]), where,
            )  # fmt: skip

    async def close(self, *, linger_s: float = 5.0, most_s: float | None = None) -> None:
        """Leave: what was sent goes on being repeated until it is acknowledged; then peers are told. A peer that owes an
        acknowledgement, or is still in its handshake with this rank, is waited for as long as it may still receive, ``most_s``
        in all (default: the configured ``timeout_s``); one that is silent, or is closing itself, for ``linger_s``. A warning
        names those that were given up. Idempotent."""
        if self._closed:
            return
        await self._linger(linger_s, max(linger_s, self.config.timeout_s if most_s is None else most_s))
        for repeat in range(CLOSE_REPEATS):
            self.core.say_goodbye()
            self._pump()
            if repeat + 1 == CLOSE_REPEATS or not self.core.unaware():
                break
            await asyncio.sleep(CLOSE_GAP_S)
        await self._let_late_leave(linger_s)
        self._shut()

    async def _linger(self, linger_s: float, most_s: float) -> None:
        """Wait for acknowledgements. What a peer holds for a receive that it has not posted yet is neither acknowledged nor asked
        about, so peers are asked for signs of life."""
        begun = now = self._now()
        asked = begun  # most acknowledgements come without a question
        heard = dict.fromkeys(range(self.world_size), begun)  # when a peer last gave hope
        unheard, welcomed = self._unheard(), float("-inf")
        while (unheard or not self.core.idle()) and now - begun < most_s:
            owing = sorted({*self.core.owing(), *unheard})
            for peer in owing:
                if peer in unheard:  # its HELLOs are all that can come of it
                    heard[peer] = max(heard[peer], self.core.greeted_at.get(peer, begun))
                elif peer not in self.core.closing:
                    heard[peer] = max(heard[peer], now - self.silence(peer))
            if owing and all(now - heard[peer] >= linger_s for peer in owing):
                break
            if unheard and now - welcomed >= WELCOME_GAP_S:
                welcomed = now
                self.core.welcome_again(unheard)
            if now - asked >= linger_s * LINGER_ASK_SHARE:
                asked = now
                self.core.ask_to_acknowledge(owing)
            self._pump()
            await asyncio.sleep(1e-3)
            now = self._now()
            unheard = self._unheard()
        if linger_s and unheard:
            logger.warning(
                "rank %d leaves after %.3g s although rank %s may not have finished its handshake: it is silent",
                self.rank, now - begun, ", ".join(map(str, unheard)),
            )  # fmt: skip
        if linger_s and self.core.failed is None and (owing := self.core.owing()):
            logger.warning(
                "rank %d leaves after %.3g s although rank %s has not acknowledged all that was sent to it: it is silent, or "
                "does not receive what was sent",
                self.rank, now - begun, ", ".join(map(str, owing)),
            )  # fmt: skip

    async def _let_late_leave(self, most_s: float) -> None:
        """An impaired port holds back what is delayed: to the peers it is on its way, as in the network that it stands for."""
        nothing, end = float("-inf"), self._now() + most_s
        while (until := getattr(self.port, "late_until", nothing)) > nothing and self._now() < end:
            await asyncio.sleep(max(min(until, end) - self._now(), 1e-3))

    def _unheard(self) -> list[int]:
        return self.core.unheard() if self.core.failed is None else []

    def _shut(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.port.close()

    # --- what the collectives ask for (interface.EndpointLike)

    @property
    def max_chunk_bytes(self) -> int:
        """Largest chunk of the group in bytes."""
        return self.core.max_chunk_bytes

    def time(self) -> float:
        """Seconds on the loop's clock."""
        return self._now()

    def begin_round(
        self,
        round_key: int,
        signature: bytes,
        describe: Callable[[bytes], str],
        standing: Callable[[], Standing] | None = None,
    ) -> RoundCounters:
        """See ``interface.EndpointLike.begin_round``."""
        return self.core.begin_round(round_key, signature, describe, standing)

    def end_round(self, round_key: int) -> None:
        """See ``interface.EndpointLike.end_round``."""
        self.core.end_round(round_key)

    def send(
        self,
        peer: int,
        message: int,
        data: Bytes,
        spec: MessageSpec,
        *,
        offered: bool = True,
        energy: float = 0.0,
        classes: npt.NDArray[np.uint8] | None = None,
    ) -> SendHandle:
        """See ``interface.EndpointLike.send``."""
        out = self.core.send(peer, message, data, spec, offered=offered, energy=energy, classes=classes)
        done: asyncio.Future[Sent] = self._loop.create_future()
        out.on_done = _resolver(done)
        self.pump_soon()
        return SendHandle(self, out, done)

    def receive(
        self,
        peer: int,
        message: int,
        spec: MessageSpec,
        sink: Sink,
        *,
        on_chunks: OnChunks | None = None,
        on_scattered: OnScattered | None = None,
        window: int = 0,
    ) -> ReceiveHandle:
        """See ``interface.EndpointLike.receive``."""
        done: asyncio.Future[Received] = self._loop.create_future()
        incoming = self.core.receive(
            peer,
            message,
            spec,
            sink,
            on_chunks=on_chunks,
            on_scattered=on_scattered,
            window=window,
            now=self._now(),
            on_done=_resolver(done),
        )
        self.pump_soon()
        return ReceiveHandle(self, peer, incoming, done)

    def silence(self, peer: int) -> float:
        """Seconds since anything authentic came from the peer."""
        return self._now() - max(self.core.receivers[peer].heard_at, self._started)

    def path_states(self, peer: int) -> list[PathState]:
        """What is known of each path to a peer: which are alive, their round trips, losses and bytes."""
        return self.core.path_states(peer)

    def ping(self, peers: Collection[int]) -> None:
        """Ask the peers for a sign of life."""
        self.core.ping(list(peers))
        self.pump_soon()

    def ask_standing(self, round_key: int, peers: Collection[int]) -> None:
        """See ``interface.EndpointLike.ask_standing``."""
        self.core.ask_standing(round_key, peers)
        self.pump_soon()

    def fail(self, error: Exception) -> None:
        """See ``interface.EndpointLike.fail``."""
        self.core.fail(error, tell=True)
        self.pump_soon()

    def _release(self, peer: int, message: Incoming, limit: int) -> None:
        self.core.release(peer, message, limit, self._now())
        self.pump_soon()

    # --- moving bursts

    def _on_batch(self, batch: Sequence[Slab]) -> None:
        self._busy = True
        try:
            self.core.receive_burst(batch, now=self._now())
        finally:
            self._busy = False
        self._pump()

    def _on_writable(self) -> None:
        if self._flush():
            self._pump()

    def pump_soon(self) -> None:
        """Send soon; calls from within a received batch are served at its end."""
        if not self._soon and not self._busy and not self._closed:
            self._soon = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._soon = False
        if self._closed:
            return
        if not self._unsent:
            self._busy = True
            try:
                more = self._send_some()
            finally:
                self._busy = False
            if more:
                self.pump_soon()
        self._deliver()
        self._arm()

    def _send_some(self) -> bool:
        """Send up to ``TRAINS_A_TURN`` trains; True if there may be more that could leave at once.

        Each gets its own time stamp: what lies between the stamp and the system call is taken for the network's delay.
        """
        for _ in range(TRAINS_A_TURN):
            sent = False
            for burst in self.core.bursts_to_send(now=self._now(), most=1):
                if not self._send(burst):
                    return False
                sent = True
            if not sent:
                return False
        return True

    def _send(self, burst: Burst | Train) -> bool:
        """Hand a burst or train to the port; what it does not take is copied and goes first later (the core has counted it as
        sent). False if something is left."""
        if isinstance(burst, Train):
            taken = self._send_train(burst) if self._send_train is not None else 0
            self._unsent += [burst.burst(index) for index in range(taken, burst.bursts)]
            return taken == burst.bursts or self._flush()
        if not self.port.send(burst):
            self._unsent.append(Burst(burst.data.copy(), burst.segment, burst.path, burst.cls, burst.address))
            return False
        return True

    def _flush(self) -> bool:
        """Send what is left over; True if nothing is."""
        while self._unsent:
            if not self.port.send(self._unsent[0]):
                return False
            self._unsent.popleft()
        return True

    def _deliver(self) -> None:
        for event in self.core.events():
            event.callback(event.outcome)
        if self._connected is not None and not self._connected.done():
            if self.core.handshake.error is not None:
                self._connected.set_exception(self.core.handshake.error)
            elif self.core.handshake.ready:
                self._connected.set_result(None)

    def _arm(self) -> None:
        """Keep the one timer no later than the core's next timeout; an early one just re-arms."""
        at = self.core.next_timeout()
        if self._unsent:
            # Nothing that is due can leave before the network takes this burst: look again in a moment.
            at = max(at, self._now() + BLOCKED_RETRY_S)
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
            self._timer = None
        if at < float("inf"):
            self._timer_at = at
            self._timer = self._loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._closed:
            return
        now = self._now()
        if self.core.next_timeout() <= now:
            self.core.on_timer(now=now)
            self._pump()
        else:
            self._arm()


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """The clock to tell the core: the loop's own in virtual time, else the finer ``time.monotonic`` on the same base
    (uvloop's ``time()`` stands still for a whole millisecond, more than a round trip takes)."""
    return loop.time if getattr(loop, "virtual", False) else time.monotonic


def _resolver(future: asyncio.Future[Any]) -> Callable[[Any], None]:
    def resolve(outcome: Any) -> None:
        if future.done():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
            future.exception()  # a round awaits some of its futures only: the rest must not be reported as forgotten
        else:
            future.set_result(outcome)

    return resolve
