"""Deadlines: every wait of a group ends, and the error says who is missing and what each lacks.

While a call waits, the peers are asked for a sign of life at 1/2, 3/4 and 7/8 of its timeout. When it expires, those that
answered none of the later two are silent; they are blamed before living peers, which probably wait for them too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from dblp.errors import ConfigError, DeadlineError
from dblp.transport.interface import EndpointLike
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
        "_on_expire",
        "_peers",
        "_start",
        "_steps",
        "timeout_s",
    )

    def __init__(
        self, endpoint: EndpointLike, peers: Collection[int], timeout_s: float, on_expire: Callable[[], None]
    ) -> None:
        """``peers`` are the endpoint's ranks. Raises ConfigError if the timeout is not above 0."""
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s!r}: a time above 0 seconds is needed")
        self._endpoint = endpoint
        self._peers = peers
        self._on_expire = on_expire
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
            self._endpoint.ping(self._peers)
            self._handle = self._next()
        else:
            self._last()

    def _last(self) -> None:
        late_s = self._loop.time() - self._due
        if late_s <= LATE_S:
            self._on_expire()
            return
        self._due = float("inf")  # once is enough
        self._endpoint.ping(self._peers)
        self._handle = self._loop.call_later(min(late_s, MOST_GRACE_S), self._last)


def deadline_error(
    endpoint: EndpointLike,
    title: str,
    timeout_s: float,
    peers: Collection[int],
    lacks: Mapping[int, str],
    culprits: Collection[int] = (),
) -> DeadlineError:
    """The error of an expired wait. ``peers``: the endpoint's ranks in the group; ``lacks``: what is missing, in words,
    by the endpoint's rank of the peer that owes it; ``culprits``: those of them to blame if nobody is silent (default: all)."""
    silence = {peer: endpoint.silence(peer) for peer in peers}
    silent = {peer for peer in peers if silence[peer] > _SILENT_SHARE * timeout_s}
    blamed = sorted(silent & lacks.keys() or silent or culprits or lacks.keys())
    items = []
    for peer in blamed:
        state = f"silent for {format_seconds(silence[peer])}" if peer in silent else "alive"
        items.append(
            f"rank {peer} ({state}; {lacks.get(peer, 'nothing is due from it here, others may wait for it')})"
        )
    text = f"{title} on rank {endpoint.rank}: not complete within {format_seconds(timeout_s)}. Missing: {', '.join(items)}."
    if len(silent) == len(peers) > 1:
        text += " Nothing was heard from any peer: this rank's own network may be down."
    elif silent:
        text += " Are these processes alive and reachable?"
    text += " If the ranks are only slow, raise timeout_s (of the call or the group) or DBLP_TIMEOUT_S."
    return DeadlineError(text, blamed)
