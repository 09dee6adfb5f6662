"""What a network gives, as NetSenseML senses it: from rounds that are run anyway (Wang et al., arXiv 2506.16235).

Data of D bytes that cross a path of bandwidth B and least round trip m arrive after about m / 2 + D / B. So what a round took
beyond that delay gives the bandwidth that it found, background traffic included; the bandwidth-delay product B m is what fits
into the network without a queue, and D beyond it has stood in one. The least round trip is what the transport's acknowledgements
say, or the time of a round of one number where the transport tells nothing. The time is that of the rank that came last: the
others wait for it, which is no fault of the network; what arrived meanwhile cost no time.

Differences from the authors' code, which takes D / T for the bandwidth and the largest of 5 s: there a round that is mostly delay
counts as a slow network, and what the network gave before it changed counts for seconds. Here the delay is taken off, and the
largest of the last ``KEPT`` rounds counts: a change shows after two rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

KEPT = 2
"""Rounds whose largest bandwidth counts: one that something held up for a moment is no change of the network."""
_LEAST_SHARE = 0.25
"""Of the delay, that the data's part of a round is taken to last at least: less cannot be told from its jitter, and the
bandwidth is not taken for more than a round has shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One iteration's rounds, as all ranks agree."""

    data_bytes: float
    """That the rank which moved most of them moved."""
    seconds: float
    """In which rounds were under way, on the rank that waited least for others; 0: it was not measured."""
    crossings: float
    """How often their data crossed the network one after the other."""
    delay_s: float
    """Least round trip of the network; 0: not known."""


class Sensing:
    """See the module's docstring. State: one vector (``SIZE``,), zeros at first."""

    SIZE = KEPT + 4

    def __init__(self, state: Array) -> None:
        self._rates: list[float] = [rate for rate in state[:KEPT].tolist() if rate]
        self.data_bytes, self.seconds, self.delay_s, self._crossings = (float(x) for x in state[KEPT:])

    def state(self) -> Array:
        """What the constructor takes."""
        rates = np.zeros(KEPT)
        rates[: len(self._rates)] = self._rates
        return np.array([*rates, self.data_bytes, self.seconds, self.delay_s, self._crossings])

    def hear(self, sample: Sample) -> bool:
        """Take a sample; False if it tells nothing."""
        if sample.seconds <= 0.0 or sample.delay_s <= 0.0 or sample.data_bytes <= 0.0:
            return False
        self.data_bytes, self.seconds = sample.data_bytes, sample.seconds
        self.delay_s, self._crossings = sample.delay_s, sample.crossings
        moving_s = max(sample.seconds - self._waiting_s, _LEAST_SHARE * sample.delay_s)
        self._rates = [*self._rates, sample.data_bytes / moving_s][-KEPT:]
        return True

    @property
    def known(self) -> bool:
        """There was a sample."""
        return bool(self._rates)

    @property
    def bandwidth_bps(self) -> float:
        """Bits a second that the network gives this job; 0: not known."""
        return 8.0 * max(self._rates, default=0.0)

    @property
    def bdp_bytes(self) -> float:
        """Bandwidth-delay product."""
        return self.bandwidth_bps / 8.0 * self.delay_s

    @property
    def queue_bytes(self) -> float:
        """Of the last sample's data, what stood in queues."""
        return max(self.data_bytes - self.bdp_bytes, 0.0) if self.known else 0.0

    @property
    def _waiting_s(self) -> float:
        return self._crossings * self.delay_s / 2.0
