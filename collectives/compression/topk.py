"""Top-k: the elements with the largest magnitudes (Aji and Heafield, 2017; with error feedback Stich et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dblp.collectives.compression.base import Job
from dblp.collectives.compression.entries import Indices
from dblp.collectives.compression.selection import largest, sampled
from dblp.collectives.compression.sparse import INDICES, RATIO, VALUES, Sparse, share_of
from dblp.transport.spec import FLAG, arg, choice


@dataclass(frozen=True, slots=True)
class TopK(Sparse):
    """The largest of a bucket, exactly or by DGC's sampled threshold. ``feedback=false`` discards what is not sent."""

    name: ClassVar[str] = "topk"
    ratio: float = arg("ratio", RATIO)
    """Share of a bucket's elements that is sent."""
    values: str = arg("values", VALUES, default="full")
    indices: str = arg("indices", INDICES, default="plain")
    selection: str = arg("selection", choice("exact", "sampled"), default="exact")
    feedback: bool = arg("feedback", FLAG, default=True)

    @property
    def keeps(self) -> bool:
        """As the field says."""
        return self.feedback

    def target(self, job: Job) -> int:
        """Always the same share."""
        return share_of(job.bucket.size, self.ratio)

    def select(self, job: Job) -> Indices:
        """The largest, fewer if the rest is zero."""
        if self.selection == "sampled":
            return sampled(job.values, self.target(job), job.own_rng())
        return largest(job.values, self.target(job))
