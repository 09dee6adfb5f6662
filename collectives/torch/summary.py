"""Totals over the gradient rounds of one model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dblp.collectives.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What all gradient rounds of an attachment cost and lost, as this rank saw it."""

    rounds: int = 0
    """Gradient rounds (buckets) so far."""
    lossy_rounds: int = 0
    """Those that missed at least one chunk."""
    missing_chunks: int = 0
    """Chunks of peers' gradients that did not arrive and were not waited for."""
    bounded_chunks: int = 0
    """Chunks of peers' gradients that were allowed to miss."""
    energy_lost_sum: float = 0.0
    """Sum over the rounds of the share of the gradient's energy that was lost."""
    chunks_sent: int = 0
    """First transmissions."""
    chunks_resent: int = 0
    """Retransmissions."""
    seconds: float = 0.0
    """Sum of the rounds' durations; rounds overlap, so this may exceed the wall time."""
    resynchronisations: int = 0
    """Times that the replicas were made equal again (``Consistency.RELAXED``)."""
    largest_drift: float = 0.0
    """Largest drift found then: the L2 norm of a rank's parameters less those of rank 0, over the norm of the latter; the
    largest over all ranks."""

    @property
    def missing_share(self) -> float:
        """Missing chunks over those that were allowed to miss, in [0, 1)."""
        return self.missing_chunks / self.bounded_chunks if self.bounded_chunks else 0.0

    @property
    def energy_lost(self) -> float:
        """Mean over the rounds of the share of the gradient's energy that was lost, in [0, 1]."""
        return self.energy_lost_sum / self.rounds if self.rounds else 0.0

    @property
    def retransmitted_share(self) -> float:
        """Retransmissions over first transmissions."""
        return self.chunks_resent / self.chunks_sent if self.chunks_sent else 0.0

    def plus(self, report: Report) -> Summary:
        """With one more round."""
        return replace(
            self,
            rounds=self.rounds + 1,
            lossy_rounds=self.lossy_rounds + (report.missing_chunks > 0),
            missing_chunks=self.missing_chunks + report.missing_chunks,
            bounded_chunks=self.bounded_chunks + report.bounded_chunks,
            energy_lost_sum=self.energy_lost_sum + report.energy_lost,
            chunks_sent=self.chunks_sent + report.chunks_sent,
            chunks_resent=self.chunks_resent + report.chunks_resent,
            seconds=self.seconds + report.duration_s,
        )

    def resynchronised(self, drift: float) -> Summary:
        """With one more resynchronisation, which found ``drift``."""
        return replace(
            self,
            resynchronisations=self.resynchronisations + 1,
            largest_drift=max(self.largest_drift, drift),
        )

    def __str__(self) -> str:
        return (
            f"{self.rounds} gradient rounds: missing {self.missing_share:.2%} of chunks "
            f"({self.energy_lost:.2%} of "
            f"energy), resent {self.retransmitted_share:.2%}"
        )
