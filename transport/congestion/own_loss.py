"""Whether heavy loss follows from the windows: does it fall when they do?

A buffer that is overrun keeps what it has room for, and what windows send that are cut down to that is not lost. Loss of half and
more that stays as it was then has another cause, such as a burst of interference, and a small window only makes it last longer.
Both look alike at first, since the survivors of a window that leaves at once have queued behind each other. So heavy loss
is taken for the windows' own, until a much smaller window has lost as much for some time (the trial): then the window is as it
was before, and loss of that size is left alone for a while. Flows that overrun a buffer together all shrink in that time, so each
sees its loss fall. To find the cause by a change of one's own and its measured effect is PCC's idea (Dong et al., NSDI 2015).
"""

from __future__ import annotations

from typing import NamedTuple

DECREASE = 0.7
"""CUBIC's factor on loss (RFC 9438): Swift halves on retransmission timeouts only."""
MOST_DECREASE = 0.25
"""Where more is lost the window shrinks to what of it came through, down to this at once."""
LEAST_SHARE = 0.5
"""Less is always taken for the windows' own: by how much that should fall is too uncertain."""
TRIAL = 0.6
"""The window, as a share of that before the first decrease, from which on loss is held against what it was then."""
TRIAL_S = 10e-3
"""How long it must go on, while there is a queue: losses are told in lumps, and others whose windows overrun the same buffer
need a few round trips to shrink, too."""
FALL = 0.85
"""Loss that is a smaller share of that before has fallen."""
SPARED = 0.4
"""Of what the trial let through, how much less may come through later: the windows' own loss would let through as much less as
the window is larger again."""
LIFE_S = 1.0
"""How long a verdict stands, and how long after the first decrease one may still be reached; or ``LIFE_ROUND_TRIPS``."""
LIFE_ROUND_TRIPS = 64.0


class _First(NamedTuple):
    at: float
    window_bytes: float
    share: float


class OwnLoss:
    """Says what window heavy loss calls for."""

    __slots__ = ("_first", "_spared", "_spared_until", "_trial", "_trial_at")

    def __init__(self) -> None:
        self._first: _First | None = None  # the loss that the first decrease answered
        self._trial: list[float] = []  # shares that the trial lost so far
        self._trial_at = 0.0  # when it began
        self._spared = 0.0  # share up to which loss is known not to be the windows'
        self._spared_until = float("-inf")

    def window_for(
        self, window_bytes: float, share: float, *, queued: bool, now: float, rtt_s: float
    ) -> float:
        """The window (bytes) after a heavy loss of ``share`` of what left since the last decrease: smaller where it may be the
        windows' own; as it is where it is known not to be; what it was before the decreases where that has just come out.
        ``queued``: most of what came through had waited in a queue; where it had not, no buffer was overrun."""
        if now < self._spared_until and share <= self._spared:
            return window_bytes
        life_s = max(LIFE_S, LIFE_ROUND_TRIPS * rtt_s)
        first = self._first
        if first is not None and now - first.at > life_s:
            first = self._first = None
        if first is not None and share >= max(LEAST_SHARE, FALL * first.share):
            if window_bytes <= TRIAL * first.window_bytes:
                return self._try(first, window_bytes, share, queued, now, life_s)
        elif queued:
            self._first = _First(now, window_bytes, share)
        self._trial.clear()
        return window_bytes * min(max(1.0 - share, MOST_DECREASE), DECREASE) if queued else window_bytes

    def _try(
        self, first: _First, window_bytes: float, share: float, queued: bool, now: float, life_s: float
    ) -> float:
        """One more look at the loss of a window that is much smaller than the first was."""
        if not self._trial:
            self._trial_at = now
        self._trial.append(share)
        if queued and now - self._trial_at < TRIAL_S:
            return window_bytes
        mean = sum(self._trial) / len(self._trial)
        self._first = None
        self._trial.clear()
        self._spared, self._spared_until = 1.0 - SPARED * (1.0 - mean), now + life_s
        return first.window_bytes
