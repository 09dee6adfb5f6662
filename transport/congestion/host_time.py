"""What the hosts take of a round trip: how long they let datagrams and acknowledgements wait.

Windows are full while acknowledgements wait in a host, so what the hosts take counts for their size as what the network takes,
but not for the queue: that drains meanwhile. Swift keeps the two apart as well (Kumar et al., SIGCOMM 2020, section 3.2), with a
window of its own for each; here the network's window is made longer by what the hosts take. Without it, hosts that read every few
milliseconds, as busy ones do, were seen to leave three quarters of a 1 Gb/s link idle.
"""

from __future__ import annotations

from collections import deque

HOST_SAMPLES = 8
"""The least of so many samples counts: a host that lost its processor for a moment is not a busy one."""
MOST_HOST_S = 20e-3
"""Most that counts: a queue must not be as long as a host that has stopped."""


class HostTime:
    """The least of the last samples, seconds."""

    __slots__ = ("_samples", "value_s")

    def __init__(self) -> None:
        self.value_s = 0.0
        self._samples: deque[float] = deque(maxlen=HOST_SAMPLES)

    def update(self, host_s: float) -> None:
        """Take a sample: what of a round trip the network did not take."""
        self._samples.append(host_s)
        self.value_s = min(min(self._samples), MOST_HOST_S)
