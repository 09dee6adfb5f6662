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
LEAST_SHARE = 0.5
"""Less is always taken for the windows' own: by how much that should fall is too uncertain."""
TRIAL = 0.4
"""The window, as a share of that before the first decrease, from which on loss is held against that of then: three decreases."""
TRIAL_S = 10e-3
"""How long it must go on, while there is a queue: losses are told in lumps, and others whose windows overrun the same buffer
need a few round trips to shrink, too."""
FALL = 0.85
"""Loss that is a smaller share of that before has fallen."""
SPARED = 0.4
"""Of what came through of the trial, what must come through later: of the windows' own loss it would be as much less as the
window is larger again."""
LOOKS = 2
"""Times in a row that it must have been less: losses are told in lumps."""
LIFE_S = 1.0
"""How long a verdict stands, and how long after the first decrease one may still be reached; or ``LIFE_ROUND_TRIPS``."""
LIFE_ROUND_TRIPS = 64.0


class _First(NamedTuple):
    at: float
    window_bytes: float
    share: float


class OwnLoss:
    """Says what window heavy loss calls for."""

    __slots__ = ("_barred_until", "_first", "_over", "_spared", "_spared_until", "_trial", "_trial_at")

    def __init__(self) -> None:
        self._first: _First | None = None  # the loss that the first decrease answered
        self._trial: list[float] = []  # shares that the trial lost so far
        self._trial_at = 0.0  # when it began
        self._spared = 0.0  # share up to which loss is known not to be the windows'
        self._spared_until = float("-inf")
        self._over = 0  # times in a row that more was lost
        self._barred_until = float("-inf")  # no trial before: one has been wrong

    def tries(self, window_bytes: float) -> bool:
        """The window is small enough for a trial of what its loss is."""
        return self._first is not None and window_bytes <= TRIAL * self._first.window_bytes

    def window_for(
        self, window_bytes: float, share: float, *, queued: bool, now: float, rtt_s: float
    ) -> float:
        """The window (bytes) after a heavy loss of ``share`` of what left since the last decrease: smaller where it may be the
        windows' own; as it is where it is known not to be; what it was before the decreases where that has just come out.
        ``queued``: most of what came through had waited in a queue; where it had not, no buffer was overrun."""
        life_s = max(LIFE_S, LIFE_ROUND_TRIPS * rtt_s)
        if now < self._spared_until:
            self._over = self._over + 1 if share > self._spared else 0
            if self._over < LOOKS:
                return window_bytes
            self._spared_until = float("-inf")  # it grew with the window
            self._barred_until = now + life_s
        first = self._first
        if first is not None and now - first.at > life_s:
            first = self._first = None
        if first is not None and share >= max(LEAST_SHARE, FALL * first.share):
            if self.tries(window_bytes) and now >= self._barred_until:
                return self._try(first, window_bytes, share, queued, now, life_s)
        elif queued:
            self._first = _First(now, window_bytes, share)
        self._trial.clear()
        return window_bytes * DECREASE if queued else window_bytes

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
        self._over = 0
        self._spared, self._spared_until = 1.0 - SPARED * (1.0 - mean), now + life_s
        return first.window_bytes
