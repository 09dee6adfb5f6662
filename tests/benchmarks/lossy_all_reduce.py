"""What an all-reduce over a lossy reduce leg gives, for all workers at once: the fills and the carry of a policy.

The carry is the one of real rounds (``collectives.carry``); only the network is left out. A worker's own contribution to its own
shard is never lost, each other chunk of a contribution is lost with the same chance, the gather leg is exact.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dblp.collectives.carry import PIECE, Residual
from dblp.collectives.reduction import DTYPES
from dblp.transport.policy import Carry, Fill

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

CHUNK = PIECE
"""Elements in a chunk."""
_FLOAT32 = DTYPES["float32"]


class LossyAllReduce:
    """Averages gradients (workers, n) over a reduce leg that loses chunks with chance ``loss``; ``fill`` is ZERO or RESCALE."""

    def __init__(self, loss: float, seed: int, *, fill: Fill = Fill.ZERO, carry: Carry | None = None) -> None:
        self._loss, self._fill, self._carry = loss, fill, carry
        self._rng = np.random.default_rng((seed, 1))
        self._residuals: list[Residual] = []

    def __call__(self, gradients: Floats) -> Floats:
        """The average (n,) as every worker gets it."""
        workers, length = gradients.shape
        missing = self._missing(workers, -(-length // CHUNK))
        arrived = np.repeat(~missing, CHUNK, axis=1)[:, :length]
        sent = gradients if self._carry is None else self._send(gradients, self._carry, arrived)
        total = np.where(arrived, sent, np.float32(0.0)).sum(0)
        if self._fill is Fill.RESCALE:
            total /= np.maximum(arrived.sum(0), 1)
        else:
            total /= workers
        average: Floats = total
        return average

    def carried(self) -> Floats:
        """What each worker carries (workers, n)."""
        return np.stack([residual.values for residual in self._residuals])

    def _send(self, gradients: Floats, rule: Carry, arrived: Mask) -> Floats:
        """What the workers send (workers, n); what does not arrive is kept."""
        workers, length = gradients.shape
        self._residuals = self._residuals or [Residual(length) for _ in range(workers)]
        sent = gradients.copy()
        for residual, row, there in zip(self._residuals, sent, arrived, strict=True):
            residual.begin(row, _FLOAT32, rule)
            residual.keep(0, np.where(there, np.float32(0.0), row))
            residual.settle(float(np.square(row, dtype=np.float64).sum()))
        return sent

    def _missing(self, workers: int, chunks: int) -> Mask:
        """Which chunks of which contributions are lost (workers, chunks)."""
        missing = self._rng.random((workers, chunks)) < self._loss
        owners = np.arange(chunks) * workers // chunks
        missing[owners, np.arange(chunks)] = False
        return missing
