"""What a run of either engine came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.sim.fabric.graph import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """One run."""

    engine: str
    """``packet`` or ``exact``."""
    seed: int
    """Of all that was drawn."""
    ended: str
    """``done``; ``failed``: some flow was given up; ``until``: the scenario's time was over first."""
    times_s: Floats
    """Of each round (or training step), or of each flow of a workload of flows; NaN where it did not end."""
    flows: npt.NDArray[Any]
    """The workload's flows: source, target, bytes, cls, leg, ready_s, start_s, finish_s, chunks, missing, lost (structured).
    Empty of the exact engine, which notes none."""
    missing_share: float
    """Share of the workload's chunks that receivers went on without, of flows that failed what had not come; NaN of the exact
    engine where a round failed: its endpoints report nothing of that."""
    link_names: tuple[str, ...]
    """All links (L)."""
    link_bytes: Ints
    """Bytes of data packets that each sent; of the exact engine, of all datagrams, the handshake's and answers too (L)."""
    link_peak: Ints
    """Largest backlog of each (L)."""
    max_load_ratio: float
    """The most loaded link between switches, over what the most loaded one gets of ideal spraying: in planned bytes; in
    shares of those sent where packets choose their paths one by one, or flows leave theirs. NaN where nothing passes between
    switches, as in a star, and of the exact engine: what it sends is not data alone."""
    counts: Mapping[str, tuple[int, int]]
    """Data and control packets: sent, delivered, trimmed, and dropped by reason."""
    queued: tuple[int, int]
    """Data and control packets still under way at the end."""
    hops: int
    """Packets put on a link."""
    events: int
    """Events handled."""
    simulated_s: float
    """Time in the simulation."""
    wall_s: float
    """Time that it took."""
    series_s: Floats
    """Times of the samples (S)."""
    series: npt.NDArray[np.int32]
    """Backlog of each link at each (S, L); empty if they were not asked for."""
    rounds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Of rounds that compress, a value each: ``rate_bps`` of the links, ``ratio`` of the bytes that was sent; else empty."""

    @property
    def mean_s(self) -> float:
        """Mean of the times that ended; NaN if none did."""
        good = self.times_s[~np.isnan(self.times_s)]
        return float(good.mean()) if len(good) else float("nan")
