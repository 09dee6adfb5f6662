"""Reports: what one collective call did, what it cost and what it lost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dblp.collectives.carry import NOTHING, Account
from dblp.transport.policy import CarryBound
from dblp.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Report:
    """One round, as this rank saw it. Losses are those of the messages that this rank received."""

    round: int
    """Number of the round in its group."""
    collective: str
    """Name of the call."""
    algorithm: str
    """Algorithm that ran."""
    reason: str
    """Why that algorithm."""
    nbytes: int
    """Bytes of the caller's array on this rank."""
    world_size: int
    """Ranks of the group."""
    duration_s: float
    """Seconds from the call to its end."""
    chunks_sent: int = 0
    """First transmissions, in chunks."""
    chunks_resent: int = 0
    """Retransmissions, in chunks, up to the end of the round."""
    chunks_received: int = 0
    """Chunks received and placed."""
    chunks_duplicate: int = 0
    """Chunks that came a second time or too late."""
    bytes_sent: int = 0
    """Bytes of those chunks, both times, with their headers; without control datagrams."""
    missing: Mapping[int, npt.NDArray[np.uint32]] = field(default_factory=dict)
    """For each peer (rank in the group) whose contribution has holes: indices of its missing chunks, ascending."""
    bounded_chunks: int = 0
    """Chunks of all messages to this rank that were allowed to have holes."""
    energy_lost: float = 0.0
    """Share of the energy (sum of squares) of those messages that did not arrive; where an energy is NaN or infinite,
    the missing share stands in for it. 0.0 if nothing is missing."""
    budget: float = 0.0
    """Largest missing share that the call allowed each message."""
    stop: str = "stall"
    """Stop rule of the call's policy."""
    skipped: bool = False
    """A message was given up below its bound, here or on another rank: the result is zeros on all (``Short.SKIP``)."""

    filled_chunks: int = 0
    """Chunks of the result that the gather leg missed and a fill stands in for: on any rank, the same on all, under
    ``Consistency.AGREED``; those that this rank missed itself under ``RELAXED``."""
    uncounted: Mapping[int, npt.NDArray[np.int64]] = field(default_factory=dict)
    """For each rank (in the group) whose payload of a bounded all-gather some rank missed a part of: indices of those chunks,
    ascending. The same on all ranks: none counts them."""
    energy_withheld: float = 0.0
    """Of a compressed round: share of the energy of this rank's values (gradient and residual) that it still holds after the
    round, because the method did not send it or because it was lost. Measured under a loss policy or for a controller."""
    energy_curve: tuple[float, ...] = ()
    """For a controller of ratios: share of the energy of those values behind their largest elements, by
    ``compression.curve.RATIOS``; empty where nobody asked."""
    carries: bool = False
    """What is missing is kept by who has it, as far as the bound of the carry allows. If not, all of it is discarded."""
    bound: str = ""
    """How the policy bounds what is kept: a value of ``CarryBound``; empty where nothing is."""
    carried: Account = NOTHING
    """What this rank keeps for its next gradient of the same bucket: all of it, also from earlier rounds."""
    discarded: Account = NOTHING
    """What this rank had kept and the bound of the carry dropped; not counted where nothing is carried."""

    @property
    def missing_chunks(self) -> int:
        """Number of missing chunks, over all peers."""
        return sum(len(chunks) for chunks in self.missing.values())

    @property
    def missing_share(self) -> float:
        """Missing chunks over the chunks of all messages to this rank that were allowed to have holes."""
        return self.missing_chunks / self.bounded_chunks if self.bounded_chunks else 0.0

    @property
    def resent_share(self) -> float:
        """Retransmissions over first transmissions."""
        return self.chunks_resent / self.chunks_sent if self.chunks_sent else 0.0

    def __str__(self) -> str:
        loss = f", {self._loss()}" if self.budget or self.carries else ""
        return (
            f"round {self.round} {self.collective} by {self.algorithm}: {format_bytes(self.nbytes)} on {self.world_size} ranks "
            f"in {format_seconds(self.duration_s)}, {self.chunks_sent} chunks sent, {self.resent_share:.2%} resent{loss}"
        )

    def _loss(self) -> str:
        """What is missing, and what became of it."""
        parts = [f"missing {self.missing_share:.2%} of chunks ({self.energy_lost:.2%} of energy)"]
        if self.filled_chunks:
            parts.append(f"{self.filled_chunks} chunks of the result filled")
        if self.carries:
            parts.append(f"carried to the next gradient: {_amount(self.carried)}, {self._dropped()}")
        elif self.missing_chunks:
            parts.append("discarded")
        return ", ".join(parts)

    def _dropped(self) -> str:
        """What the bound took of it. Under ``DECAY`` the same elements are in both accounts, each with a part of its value."""
        part = self.discarded.elements and self.bound == CarryBound.DECAY.value
        return f"discarded: {_amount(self.discarded)}" + (" (half of each value or more)" if part else "")


def _amount(account: Account) -> str:
    """``"352 elements of norm 0.52"``: what they weigh, since a part of each value may be elsewhere."""
    if not account.elements:
        return "nothing"
    return f"{format_count(account.elements, 'element')} of norm {math.sqrt(account.energy):.3g}"


def energy_lost_share(pairs: Iterable[tuple[float, float]], missing_share: float) -> float:
    """Lost energy over total energy of messages, in [0, 1]; ``pairs`` are (total, received) sums of squares.

    ``missing_share`` stands in where the energies are not finite: one NaN in a gradient must not hide the loss.
    """
    if missing_share == 0.0:
        return 0.0
    totals = [(total, received) for total, received in pairs]
    total = sum(pair[0] for pair in totals)
    received = sum(pair[1] for pair in totals)
    if not (math.isfinite(total) and math.isfinite(received)):
        return missing_share
    return min(1.0, max(0.0, 1.0 - received / total)) if total > 0.0 else 0.0
