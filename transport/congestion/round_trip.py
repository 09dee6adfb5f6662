"""The least round trip of a path, which tells how much of a round trip is a queue.

BBR's filter (Cardwell et al., 2016): the least sample of some seconds; when it has not been seen for so long, the sender
drains its share of the queue for a moment and takes the least of that. Flows that share a queue fall into step by
this: what one drains, the others see. Differences: the life of the estimate and the moment scale with the round trip, so
that flows of a machine room find to each other in half a second, not in ten; and the first life is short and doubles, as a
flow that begins when all begin, or beside others, has never seen the queue empty. A probe lowers the estimate; it raises it
only if the least round trip has not been seen for ten seconds, and twofold at most: where many share a queue, what one of
them drains does not empty it, and estimates that rose with it would make it longer still.
"""

from __future__ import annotations

MOST_LIFE_S = 10.0
"""BBR's life of the least round trip: routes change. Without one so low for so long, it may rise."""
LEAST_LIFE_S = 0.5
FIRST_LIFE_S = 0.05
"""Life of the first estimate; the next ones live twice as long each, up to what follows from the other limits."""
FIRST_LIFE_ROUND_TRIPS = 50.0
"""The same in round trips, where that is longer: a probe costs three or four of them."""
LIFE_ROUND_TRIPS = 500.0
"""Life in round trips, between the least and the most."""
PROBE_SHARE = 0.02
"""Part of its life that a probe lasts: BBR's 200 ms of 10 s."""


class LeastRoundTrip:
    """The least round trip. While ``probing``, the sender should keep its window at its floor."""

    __slots__ = ("_at", "_found", "_most_life_s", "_raised_at", "_until", "probing", "value_s")

    def __init__(self) -> None:
        self.value_s = float("inf")
        self.probing = False
        self._at = 0.0  # when it was last seen, or probed for
        self._raised_at = 0.0  # when it was last seen, or raised
        self._found = float("inf")  # by the probe that goes on
        self._until = 0.0
        self._most_life_s = FIRST_LIFE_S

    def update(self, rtt_s: float, now: float, *, near_s: float = 0.0) -> bool:
        """Take a sample; True if a probe has just ended. A sample within ``near_s`` of the least one proves that it holds."""
        if rtt_s <= self.value_s + near_s:
            self.value_s = min(self.value_s, rtt_s)
            self._at = self._raised_at = now
        if self.probing:
            self._found = min(self._found, rtt_s)
            if now >= self._until:
                self._end(now)
                return True
        elif now - self._at > self.life_s:
            self.probing = True
            self._found = rtt_s
            self._until = now + rtt_s + max(PROBE_SHARE * self.life_s, self.value_s)
        return False

    def _end(self, now: float) -> None:
        self.probing = False
        self._at = now
        self._most_life_s *= 2.0
        if now - self._raised_at > MOST_LIFE_S:
            self.value_s = min(self._found, 2.0 * self.value_s)
            self._raised_at = now

    @property
    def life_s(self) -> float:
        """How long the value stands before it is probed for."""
        life_s = min(max(LIFE_ROUND_TRIPS * self.value_s, LEAST_LIFE_S), MOST_LIFE_S)
        return min(life_s, max(self._most_life_s, FIRST_LIFE_ROUND_TRIPS * self.value_s))
