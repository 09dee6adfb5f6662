"""What an all-reduce over a lossy reduce leg gives, for all workers at once: the fill, the carry and the tags of a policy.

The carry and the tags are those of real rounds (``collectives.carry``, ``collectives.priority``); only the network is left out. A
worker's own contribution to its own shard is never lost, each other chunk of a contribution is lost with the same chance, the
gather leg is exact. Of a tagged message what is critical arrives nevertheless, and where more is missing than the policy's
budget allows, the most valuable chunks are repaired until it is met: as the transport does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dblp.collectives.carry import Residual
from dblp.collectives.pieces import PIECE
from dblp.collectives.priority import Layers, Priority, Tagger
from dblp.collectives.reduction import DTYPES
from dblp.transport.policy import Fill, Policy, Tags

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

CHUNK = PIECE
"""Elements in a chunk."""
NO_REPAIR = 1.0 - 1e-9
"""A budget that no loss exceeds: all that is lost stays so, unless it is critical."""
_FLOAT32 = DTYPES["float32"]


class LossyAllReduce:
    """Averages gradients (workers, n) over a reduce leg that loses chunks with chance ``loss``."""

    def __init__(
        self, loss: float, seed: int, policy: Policy, *, every: int = 1, layers: Layers | None = None
    ) -> None:
        """``policy``: its fill (ZERO or RESCALE), carry, tags and the budget of its reduce leg count. ``every``: one step in so
        many loses, the others nothing. ``layers``: of the gradient's elements; None: their order stands for it."""
        self._loss, self._policy, self._every = loss, policy, every
        self._rng = np.random.default_rng((seed, 1))
        self._seed, self._step = seed, 0
        self._layers = layers
        self._residuals: list[Residual] = []
        self._priorities: list[Priority] = []
        self.missing_share = 0.0
        """Share of the others' chunks that did not arrive in the last step."""

    def __call__(self, gradients: Floats) -> Floats:
        """The average (n,) as every worker gets it."""
        workers, length = gradients.shape
        chunks = -(-length // CHUNK)
        owners = np.arange(chunks) * workers // chunks
        sent = gradients if self._policy.carry is None else self._begin(gradients)
        missing = self._missing(workers, owners)
        if self._policy.tags is not Tags.NONE:
            self._repair(sent, missing, owners)
        self.missing_share = missing.sum() / max(missing.size - chunks, 1)
        self._step += 1
        arrived = np.repeat(~missing, CHUNK, axis=1)[:, :length]
        if self._policy.carry is not None:
            self._settle(sent, arrived)
        total: Floats = np.where(arrived, sent, np.float32(0.0)).sum(0)
        total /= np.maximum(arrived.sum(0), 1) if self._policy.fill is Fill.RESCALE else workers
        return total

    def carried(self) -> Floats:
        """What each worker carries (workers, n)."""
        return np.stack([residual.values for residual in self._residuals])

    def _begin(self, gradients: Floats) -> Floats:
        """What the workers send (workers, n)."""
        self._residuals = self._residuals or [Residual(gradients.shape[1]) for _ in gradients]
        sent = gradients.copy()
        for residual, row in zip(self._residuals, sent, strict=True):
            residual.begin(row, _FLOAT32, self._policy.carry)
        return sent

    def _settle(self, sent: Floats, arrived: Mask) -> None:
        """What did not arrive is kept."""
        for residual, row, there in zip(self._residuals, sent, arrived, strict=True):
            if not there.all():
                residual.keep(0, np.where(there, np.float32(0.0), row))
            residual.settle(float(np.square(row, dtype=np.float64).sum()))

    def _missing(self, workers: int, owners: npt.NDArray[np.int64]) -> Mask:
        """Which chunks of which contributions the network loses (workers, chunks)."""
        chunks = len(owners)
        missing = self._rng.random((workers, chunks)) < self._loss
        if self._step % self._every:
            missing[:] = False
        missing[owners, np.arange(chunks)] = False
        return missing

    def _repair(self, sent: Floats, missing: Mask, owners: npt.NDArray[np.int64]) -> None:
        """Take from ``missing`` what the transport repairs: what is critical, and what exceeds the budget."""
        self._priorities = self._priorities or [Priority(self._layers) for _ in sent]
        bounds = np.searchsorted(owners, np.arange(len(sent) + 1))
        for rank, (row, lost) in enumerate(zip(sent, missing, strict=True)):
            tagger = Tagger(
                row, _FLOAT32, CHUNK, self._policy, self._priorities[rank], (self._seed, self._step, rank)
            )
            for owner, (low, high) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
                if owner != rank and low < high:
                    _repair_message(lost[low:high], tagger.classes(low, high), self._policy)
            tagger.missed(np.flatnonzero(lost).astype(np.uint32))


def _repair_message(lost: Mask, classes: npt.NDArray[np.uint8], policy: Policy) -> None:
    """Of one message, in place."""
    lost[classes == 0] = False
    holes = np.flatnonzero(lost)
    allowed = int(policy.reduce_leg_budget * len(lost))
    if len(holes) > allowed:
        by_class = holes[np.argsort(classes[holes], kind="stable")]
        lost[by_class[: len(holes) - allowed]] = False
