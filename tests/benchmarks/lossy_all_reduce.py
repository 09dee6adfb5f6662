"""What an all-reduce over a lossy reduce leg gives, for all workers at once: fills and carries of ``transport.policy``.

A reference in a few lines of numpy, for the table of ``carry_table.py``: a worker's own contribution to its own shard is never
lost, each other chunk of a contribution is lost with the same chance, the gather leg is exact.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dblp.transport.policy import Carry, CarryBound, Fill

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

CHUNK = 354
"""Elements in a chunk: a datagram of 1464 bytes less its header of 48, in float32."""


class LossyAllReduce:
    """Averages gradients (workers, n) over a reduce leg that loses chunks with chance ``loss``."""

    def __init__(self, loss: float, seed: int, *, fill: Fill = Fill.ZERO, carry: Carry | None = None) -> None:
        self._loss, self._fill = loss, fill
        self._rng = np.random.default_rng((seed, 1))
        self._carry = None if carry is None else Carried(carry)

    def __call__(self, gradients: Floats) -> Floats:
        """The average (n,) as every worker gets it."""
        workers, length = gradients.shape
        chunks = -(-length // CHUNK)
        contributions = np.zeros((workers, chunks, CHUNK), np.float32)
        contributions.reshape(workers, -1)[:, :length] = gradients
        missing = self._missing(workers, chunks)
        if self._carry is not None:
            contributions = self._carry.added_to(contributions)
        total = (contributions * ~missing[:, :, None]).sum(0)
        if self._carry is not None:
            self._carry.settle(missing)
        share = workers if self._fill is Fill.ZERO else np.maximum((~missing).sum(0), 1)[:, None]
        average: Floats = (total / share).astype(np.float32).reshape(-1)[:length]
        return average

    def _missing(self, workers: int, chunks: int) -> Mask:
        """Which chunks of which contributions are lost (workers, chunks)."""
        missing = self._rng.random((workers, chunks)) < self._loss
        owners = np.arange(chunks) * workers // chunks
        missing[owners, np.arange(chunks)] = False
        return missing


class Carried:
    """The carries of all workers under one ``Carry``; arrays are (workers, chunks, CHUNK)."""

    def __init__(self, carry: Carry) -> None:
        self._rule = carry
        self._velocity: Floats | float = 0.0
        self._fresh: Floats | None = None
        self._sent: Floats | None = None
        self._kept: list[Floats] = []
        """What was not delivered: the rounds of ``CarryBound.AGE`` one by one, the newest first; their sum under the others."""

    def added_to(self, gradients: Floats) -> Floats:
        """What is sent: gradients, or velocities, with what is carried."""
        if self._rule.momentum:
            self._velocity = np.float32(self._rule.momentum) * self._velocity + gradients
            self._fresh = self._velocity
        else:
            self._fresh = gradients
        self._sent = sum(self._kept, start=self._fresh)
        return self._sent

    def settle(self, missing: Mask) -> None:
        """Keep what did not arrive (workers, chunks), as far as the bound lets it."""
        assert self._fresh is not None and self._sent is not None
        lost = missing[:, :, None]
        if self._rule.bound is CarryBound.AGE:
            rounds = [self._fresh, *self._kept][: int(self._rule.limit)]
            self._kept = [part * lost for part in rounds]
        else:
            carried = self._sent * lost
            if self._rule.bound is CarryBound.NORM:
                carried *= self._within_norm(carried, self._fresh)[:, :, None]
            self._kept = [carried]
        if self._rule.masking:
            self._velocity = self._velocity * lost

    def _within_norm(self, carried: Floats, fresh: Floats) -> Mask:
        """The chunks to keep, so that each worker's norm is at most ``limit`` times that of what it contributed anew."""
        energy = np.square(carried, dtype=np.float64).sum(2)
        bound = self._rule.limit**2 * np.square(fresh, dtype=np.float64).sum((1, 2))
        order = np.argsort(energy, axis=1)
        largest_first = np.take_along_axis(energy, order, 1)[:, ::-1]
        kept = (np.cumsum(largest_first, axis=1) <= bound[:, None])[:, ::-1]
        mask: Mask = np.empty_like(kept)
        np.put_along_axis(mask, order, kept, 1)
        return mask
