"""Deadlines: every wait of a group ends, and the error says who is missing and what each lacks.

While a call waits, the peers are asked for a sign of life at 1/2, 3/4 and 7/8 of its timeout, and, in a round, how they stand
with it. When it expires, those that answered none of the later two are silent. Whom the error names follows from both: ``blame``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from dblp.collectives.blame import Evidence, find_missing
from dblp.errors import ConfigError, DeadlineError
from dblp.transport.interface import EndpointLike
from dblp.transport.standing import Standing
from dblp.units import format_seconds

_PINGS = (0.5, 0.75, 0.875)
"""Shares of the timeout at which the peers are pinged."""
_SILENT_SHARE = 0.25
"""A peer not heard from for this share of the timeout answered neither the ping at 3/4 nor that at 7/8."""
LATE_S = 0.05
"""A timer that fires so late tells of a process that stood still: what came meanwhile lies unread, and must be read first."""
MOST_GRACE_S = 1.0
"""Longest that a process which stood still is given for that; else as long as it was late."""


class Deadline:
    """One running timeout: pings the peers, then calls ``on_expire`` once."""

    __slots__ = (
        "_due",
        "_endpoint",
        "_handle",
        "_loop",
        "_on_ask",
        "_on_expire",
        "_peers",
        "_start",
        "_steps",
        "timeout_s",
    )

    def __init__(
        self,
        endpoint: EndpointLike,
        peers: Collection[int],
        timeout_s: float,
        on_expire: Callable[[], None],
        on_ask: Callable[[], object] | None = None,
    ) -> None:
        """``peers`` are the endpoint's ranks; ``on_ask()`` is called whenever they are pinged. Raises ConfigError if the timeout
        is not above 0."""
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s!r}: a time above 0 seconds is needed")
        self._endpoint = endpoint
        self._peers = peers
        self._on_expire = on_expire
        self._on_ask = on_ask
        self.timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self._steps = [1.0, *reversed(_PINGS)]
        self._due = self._start + timeout_s
        self._handle = self._next()

    def cancel(self) -> None:
        """Stop; idempotent."""
        self._handle.cancel()

    def _next(self) -> asyncio.TimerHandle:
        return self._loop.call_at(self._start + self._steps[-1] * self.timeout_s, self._step)

    def _step(self) -> None:
        self._steps.pop()
        if self._steps:
            self._ask()
            self._handle = self._next()
        else:
            self._last()

    def _last(self) -> None:
        late_s = self._loop.time() - self._due
        if late_s <= LATE_S:
            self._on_expire()
            return
        self._due = float("inf")  # once is enough
        self._ask()
        self._handle = self._loop.call_later(min(late_s, MOST_GRACE_S), self._last)

    def _ask(self) -> None:
        self._endpoint.ping(self._peers)
        if self._on_ask is not None:
            self._on_ask()


def silent_peers(
    endpoint: EndpointLike, peers: Collection[int], timeout_s: float, waited_s: float
) -> tuple[int, ...]:
    """Peers that have not been heard for so long that they did not answer a ping of a wait of ``timeout_s`` that has lasted
    ``waited_s``. Before the second ping nobody is: a peer that has nothing to say here is silent until it is asked."""
    if waited_s < _PINGS[0] * timeout_s + 0.9 * _SILENT_SHARE * timeout_s:
        return ()
    return tuple(peer for peer in peers if endpoint.silence(peer) > _SILENT_SHARE * timeout_s)


def deadline_error(
    endpoint: EndpointLike,
    title: str,
    timeout_s: float,
    peers: Collection[int],
    lacks: Mapping[int, str],
    culprits: Collection[int] = (),
    told: Mapping[int, Standing] | None = None,
) -> DeadlineError:
    """The error of an expired wait. ``peers``: the endpoint's ranks in the group; ``lacks``: what is missing, in words,
    by the endpoint's rank of the peer that owes it; ``culprits``: those of them to blame if nothing better is known (default:
    all); ``told``: what peers have told of themselves. Who is named: see ``blame``."""
    silent = silent_peers(endpoint, peers, timeout_s, timeout_s)
    evidence = Evidence(
        rank=endpoint.rank, peers=peers, owed=lacks.keys(), culprits=culprits, silent=silent, told=told or {}
    )
    missing = find_missing(evidence)
    items = [
        f"rank {peer} ({_state(endpoint, peer, silent)}{what and '; ' + what}; {lacks.get(peer, _NOT_HERE)})"
        for peer, what in missing.items()
    ]
    text = f"{title} on rank {endpoint.rank}: not complete within {format_seconds(timeout_s)}. Missing: {', '.join(items)}."
    if len(silent) == len(peers) > 1:
        text += " Nothing was heard from any peer: this rank's own network may be down."
    elif silent:
        text += " Are these processes alive and reachable?"
    text += " If the ranks are only slow, raise timeout_s (of the call or the group) or DBLP_TIMEOUT_S."
    return DeadlineError(text, missing)


_NOT_HERE = "nothing is due from it here, others may wait for it"


def _state(endpoint: EndpointLike, peer: int, silent: Collection[int]) -> str:
    return f"silent for {format_seconds(endpoint.silence(peer))}" if peer in silent else "alive"
