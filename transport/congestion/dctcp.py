"""Congestion control from the switches' marks, of the DCTCP kind.

Sources: Alizadeh et al., "Data Center TCP (DCTCP)", SIGCOMM 2010; RFC 8257. Switches mark what arrives at a queue above a
threshold; the sender estimates the marked share, alpha, and shrinks its window by half of it, at most once a window.
DLCP (arXiv 2008.08445) takes a control of this kind.

Differences from RFC 8257:
- Loss within ``LOSS_SHARE`` is ignored: the protocol tolerates it, and marks tell of queues. More of it, by three standard
  deviations, halves the window as its section 3.4 demands: a switch that does not mark must not be flooded.
- Feedback carries the exact count of marked datagrams (section 3.2 squeezes it into one bit of each acknowledgement).
- Marks end slow start where they come, in the middle of a window, too.
- The window leaves in eighths, each of which asks for its acknowledgement: a window of one burst would find an empty queue,
  fill it, and wait.
- A flow that heeds no marks (TCP without ECN) keeps a shared queue above the threshold, so that every datagram is marked and
  the window stays at its floor: section 5 of RFC 8257 demands queues of their own. Where there are none, a window that has
  been at its floor for ``PATIENCE_WINDOWS``, all of it marked, takes a mark for what it means to classic ECN, as RFC 9331
  (section 4.3) asks of controls of this kind, and shrinks by a fifth (RFC 8511) instead of half, until fewer are marked.
"""

from __future__ import annotations

from typing import ClassVar

from dblp.transport.config import TransportConfig
from dblp.transport.congestion.base import heavy_loss

GAIN = 1.0 / 16.0
"""RFC 8257's g, the weight of the newest window in alpha."""
INITIAL_WINDOW_BYTES = 64 * 1024
"""One burst, as in ``delay``."""
MAX_WINDOW_BYTES = 64 * 1024 * 1024
LOSS_SHARE = 0.05
"""Loss of a window that is taken for random, as in ``delay``."""
PACED_RTT_S = 2e-3
"""Round trip above which portions are paced: a queue would see them as one burst."""
PORTIONS = 8
"""Portions of a window that leave apart."""
FULL_SHARE = 0.9
"""Marked share of a window from which the queue counts as always above the threshold."""
PATIENCE_WINDOWS = 32
"""Such windows at the floor, after which the queue must be somebody else's, as in ``delay``."""
CLASSIC_DECREASE = 0.8
"""RFC 8511's factor on a mark of classic ECN, once a window."""


class DctcpControl:
    """See the module's docstring."""

    ecn: ClassVar[bool] = True

    def __init__(self, config: TransportConfig) -> None:
        self.window_bytes: float = INITIAL_WINDOW_BYTES
        self.quantum_bytes: float = INITIAL_WINDOW_BYTES / PORTIONS
        self.alpha = 1.0
        """Estimate of the marked share; 1 before the first window, so that the first mark halves (RFC 8257, section 3.3)."""
        self._datagram = config.datagram_bytes
        self._floor = 2.0 * config.datagram_bytes
        self._slow_start = True
        self._rtt_s = 0.0
        self._acked = 0  # of the window that is observed
        self._marked = 0
        self._lost = 0
        self._window_end = INITIAL_WINDOW_BYTES  # acknowledged and lost bytes that close it
        self._reduced = False  # in this window
        self._full_windows = 0  # in a row: all marked, though the window was at its floor

    @property
    def competing(self) -> bool:
        """The queue is somebody else's, who heeds no marks: a mark shrinks the window by a fifth."""
        return self._full_windows >= PATIENCE_WINDOWS

    def on_acked(
        self,
        acked_bytes: int,
        rtt_s: float,
        *,
        now: float,
        marked_bytes: int = 0,
        inflight_bytes: int = 0,
        waiting: bool = True,
        host_s: float = 0.0,
    ) -> None:
        """Shrink on the first mark of a window, else grow: a datagram a window, or exponentially in slow start."""
        self._rtt_s = rtt_s
        self._acked += acked_bytes
        self._marked += marked_bytes
        if self._acked + self._lost >= self._window_end:
            self._close_window(inflight_bytes)
        if marked_bytes:
            self._slow_start = False
            if not self._reduced:
                self._reduce(CLASSIC_DECREASE if self.competing else 1.0 - self.alpha / 2.0)
        elif self._slow_start:
            self._set_window(self.window_bytes + acked_bytes)
        if not self._slow_start and waiting:
            self._set_window(self.window_bytes + self._datagram * acked_bytes / self.window_bytes)

    def on_lost(self, lost_bytes: int, *, now: float) -> None:
        """Halve if a window lost more than random loss explains."""
        self._lost += lost_bytes
        seen = max(self._acked + self._lost, self._window_end)
        if not self._reduced and heavy_loss(self._lost / self._datagram, seen / self._datagram, LOSS_SHARE):
            self._slow_start = False
            self._full_windows = 0  # or there are many like this one, and the queue is theirs
            self._reduce(0.5)

    def pacing_bps(self) -> float:
        """Twice the window a round trip where round trips are long enough to be worth a timer, as in ``delay``."""
        return 16.0 * self.window_bytes / self._rtt_s if self._rtt_s > PACED_RTT_S else 0.0

    def _close_window(self, inflight_bytes: int) -> None:
        """RFC 8257, section 3.3, steps 3 to 8; the next ends beyond what is in flight (its WindowEnd is SND.NXT)."""
        share = min(self._marked / self._acked, 1.0) if self._acked else 0.0
        self.alpha += GAIN * (share - self.alpha)
        if share < FULL_SHARE:
            self._full_windows = 0
        elif self.window_bytes <= 2.0 * self._floor:
            self._full_windows += 1
        self._acked = self._marked = self._lost = 0
        self._window_end = inflight_bytes + self._datagram  # acknowledgements of what leaves from now on
        self._reduced = False

    def _reduce(self, factor: float) -> None:
        self._reduced = True
        self._set_window(self.window_bytes * factor)

    def _set_window(self, window_bytes: float) -> None:
        self.window_bytes = min(max(window_bytes, self._floor), MAX_WINDOW_BYTES)
        # One by one when competing: by twos, a window of three and a half would let two leave and wait for both.
        least = self._datagram if self.competing else self._floor
        self.quantum_bytes = max(self.window_bytes / PORTIONS, least)
