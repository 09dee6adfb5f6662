"""The interface between transport and collectives: what ``endpoint.Endpoint`` offers, and all that ``Group`` uses.

Everything here is called on the endpoint's event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dblp.transport.config import TransportConfig
from dblp.transport.message import (
    MessageSpec,
    OnChunks,
    OnScattered,
    Received,
    RoundCounters,
    Sent,
    Sink,
)
from dblp.transport.paths.peer_paths import PathState
from dblp.transport.port import Bytes
from dblp.transport.standing import Standing


class Sending(Protocol):
    """A message on its way to a peer."""

    done: asyncio.Future[Sent]
    """Resolved when the receiver has said its last word (FINAL); raises what poisoned the endpoint."""

    def offer(self, first: int, count: int) -> None:
        """Chunks first.. hold their final content and may leave. Each chunk is offered once."""

    def offer_scattered(self, chunks: npt.NDArray[np.uint32]) -> None:
        """``offer`` for chunks with gaps, ascending."""

    def detach(self) -> bool:
        """Let go of the caller's memory now: what is not acknowledged yet is copied and goes on in the background.
        False, with nothing done, if more than 256 KiB would have to be copied or not all chunks were offered yet:
        await ``done`` then."""

    @property
    def counts(self) -> tuple[int, int]:
        """Chunks sent first and sent again so far."""

    def missing(self) -> npt.NDArray[np.integer[Any]]:
        """Chunks that the peer is not known to have, ascending."""


class Receiving(Protocol):
    """A message on its way from a peer."""

    done: asyncio.Future[Received]
    """Resolved when the message is complete under its spec; every chunk not in ``missing`` has been placed. Raises
    MismatchError, or what poisoned the endpoint."""

    def release(self, limit: int) -> None:
        """Allow the peer to send chunks below ``limit`` (only for receives posted with a ``window``)."""

    def missing(self) -> npt.NDArray[np.integer[Any]]:
        """Chunks that have not been placed, ascending."""


class EndpointLike(Protocol):
    """One rank's transport to its peers."""

    rank: int
    world_size: int
    config: TransportConfig

    @property
    def max_chunk_bytes(self) -> int:
        """Largest chunk, agreed by the group: the datagram less the header, a multiple of 16."""

    def time(self) -> float:
        """Seconds on the loop's clock (virtual under the simulator)."""

    def begin_round(
        self,
        round_key: int,
        signature: bytes,
        describe: Callable[[bytes], str],
        standing: Callable[[], Standing] | None = None,
    ) -> RoundCounters:
        """Announce a round (``message.round_of``) before its messages are posted. ``signature`` (at most 32 bytes) must be
        equal on all ranks of the round; where a peer's differs, every receive of the round raises
        MismatchError, worded with ``describe`` of both signatures; or this call does, if the peer was first.
        ``standing()``: how this rank stands with the round, for peers that ask. Returns the round's counters, live."""

    def end_round(self, round_key: int) -> None:
        """The round is over here, well or badly: forget its messages; what comes late is dropped and counted."""

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
    ) -> Sending:
        """Send ``data`` (uint8, 1-D, contiguous; the caller leaves it alone until ``done``). With ``offered=False``
        chunks wait for ``offer``. ``energy``: sum of squares, for bounded messages. ``classes``: the class of each chunk,
        0 (critical: none may miss, at most a tenth of the chunks) to 3 (lost first); they leave and are repaired in this
        order. None: all have one class. Raises ConfigError for classes that are not so."""

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
    ) -> Receiving:
        """Post a receive. ``window``: chunks that the peer may send before ``release`` raises the limit; 0: all.
        ``on_scattered``: told of chunks that come with gaps, as those of tagged messages do."""

    def silence(self, peer: int) -> float:
        """Seconds since anything authentic came from the peer."""

    def path_states(self, peer: int) -> Sequence[PathState]:
        """What is known of each path to a peer; nothing where there are no paths to know of."""

    def ping(self, peers: Collection[int]) -> None:
        """Ask the peers for a sign of life: a living peer's ``silence`` falls within a round trip."""

    def ask_standing(self, round_key: int, peers: Collection[int]) -> None:
        """Tell peers how this rank stands with a round that is under way, and ask the same of them: what they say is in the
        round's counters (``told``) a round trip later."""

    def fail(self, error: Exception) -> None:
        """Poison the endpoint: every pending send and receive raises ``error``, later calls raise ClosedError with its
        text, and all peers are told the reason (they raise PeerError or DeadlineError that names the same ranks)."""
