"""Deep gradient compression (Lin, Han, Mao, Wang and Dally, arXiv 1712.01887, ICLR 2018), with all of its parts.

Momentum correction (section 3.2): with the optimiser's momentum m, u = m u + g is the velocity and v = v + u is what waits to be
sent (Nesterov: u = m (u + g), v = v + u + g). The largest entries of v are sent; the optimiser adds no momentum of its own.
Local gradient clipping: g is clipped before it is added, to the threshold times N^-1/2 (``clip_scaled``). Momentum factor
masking: where v was sent, u restarts at zero as v does. Warm-up (section 3.3): ``warmup.py``. Selection by a sampled
threshold: ``selection.sampled``. Parameters of fewer than two dimensions are averaged whole; their velocity is made of the
average, the same on all ranks. docs/compression.md has the differences from the paper and from the released code.

Memory of a bucket: v is the residual, u the velocity. Of dense parameters the residual is what ``values=fp16`` rounds away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dblp.collectives.compression import warmup as schedules
from dblp.collectives.compression.base import Array, Job, Part, drop_spoiled, finite
from dblp.collectives.compression.entries import Indices
from dblp.collectives.compression.selection import sampled
from dblp.collectives.compression.sparse import INDICES, RATIO, VALUES, PartlyDense, share_of
from dblp.transport.spec import FLAG, Kind, arg, choice

FACTOR = Kind(
    "a factor in [0, 1)",
    float,
    lambda value: isinstance(value, (int, float)) and 0.0 <= value < 1.0,
    lambda value: repr(float(value)),
)
NORM = Kind(
    "a norm of at least 0",
    float,
    lambda value: isinstance(value, (int, float)) and 0.0 <= value < float("inf"),
    lambda value: repr(float(value)),
)
COUNT = Kind(
    "a whole number from 0 to 10^9", int, lambda value: isinstance(value, int) and 0 <= value <= 10**9, str
)


@dataclass(frozen=True, slots=True)
class DGC(PartlyDense):
    """The optimiser must have no momentum: it is here."""

    name: ClassVar[str] = "dgc"
    ratio: float = arg("ratio", RATIO, default=0.001)
    """Share of each parameter's elements that is sent after the warm-up."""
    momentum: float = arg("momentum", FACTOR, default=0.9)
    """m; 0: sums of gradients instead of velocities."""
    nesterov: bool = arg("nesterov", FLAG, default=False)
    masking: bool = arg("masking", FLAG, default=True)
    """Momentum factor masking."""
    clip: float = arg("clip", NORM, default=0.0)
    """Largest L2 norm of a parameter's gradient; 0: it is not clipped."""
    clip_scaled: bool = arg("clip_scaled", FLAG, default=True)
    """``clip`` is of the sum over N ranks: each clips to N^-1/2 of it."""
    warmup: int = arg("warmup", COUNT, default=0)
    """Epochs of the warm-up; they are those of ``Attachment.epoch``, unless ``epoch_steps`` is given."""
    schedule: str | tuple[float, ...] = arg("schedule", schedules.SCHEDULE, default="paper")
    epoch_steps: int = arg("epoch_steps", COUNT, default=0)
    """Iterations of an epoch, to count them without being told."""
    values: str = arg("values", VALUES, default="full")
    indices: str = arg("indices", INDICES, default="plain")
    scope: str = arg("scope", choice("parameter", "bucket"), default="parameter")
    """What the largest are chosen from: each parameter, as in the paper ("layer-wise"), or all of a bucket that do not go whole
    ("global")."""

    def __post_init__(self) -> None:
        PartlyDense.__post_init__(self)
        schedules.check(self.warmup, self.schedule)

    @property
    def waits_for_epochs(self) -> bool:
        """A warm-up goes on with the epochs that it is told, unless it counts them."""
        return self.warmup > 0 and not self.epoch_steps

    def begin(self, job: Job, gradient: Array) -> None:
        """Clip, advance u, add it to v; where v is not finite, both restart, but for a velocity that is the same on all ranks."""
        memory = job.memory
        memory.residual = job.values = memory.zeros() if memory.residual is None else memory.residual
        if memory.velocity is None and self.momentum:
            memory.velocity = memory.zeros()
        velocities = job.values if memory.velocity is None else memory.velocity  # unused without momentum
        flats = zip(*(job.bucket.cut(flat) for flat in (gradient, velocities, job.values)), strict=True)
        with np.errstate(over="ignore", invalid="ignore"):
            for part, (new, velocity, value) in zip(job.bucket.parts, flats, strict=True):
                clipped = self._clipped(new, job.world_size)
                if self.dense(job, part):
                    value += clipped
                else:
                    self._accumulate(clipped, velocity, value)
        if finite(job.values):
            return
        averaged = self.dense_of(job, velocities)
        drop_spoiled(job, job.values, velocities)
        if memory.velocity is not None:
            self.set_dense(job, memory.velocity, averaged)

    def select(self, job: Job) -> Indices:
        """The largest of each parameter, or of the bucket, by a sampled threshold."""
        if self.scope == "bucket":
            return self._of_bucket(job)
        rng, ratio = job.own_rng(), self.ratio_of(job)
        found = [np.empty(0, np.int64)]
        for part, low, flat in zip(
            job.bucket.parts, job.bucket.bounds.tolist(), job.bucket.cut(job.values), strict=False
        ):
            if not self.dense(job, part):
                found.append(sampled(flat, share_of(part.size, ratio), rng) + low)
        return np.concatenate(found)

    def _of_bucket(self, job: Job) -> Indices:
        """What waits of dense parameters is put aside: zeros are not selected."""
        waits = self.dense_of(job, job.values)
        self.set_dense(job, job.values, np.zeros_like(waits))
        found = sampled(job.values, self.target(job), job.own_rng())
        self.set_dense(job, job.values, waits)
        return found

    def target(self, job: Job) -> int:
        """As many as would be selected by exact thresholds."""
        ratio = self.ratio_of(job)
        sizes = [part.size for part in job.bucket.parts if not self.dense(job, part)]
        if self.scope == "bucket":
            return share_of(sum(sizes), ratio)
        return sum(share_of(size, ratio) for size in sizes)

    def ratio_of(self, job: Job) -> float:
        """The share of this round."""
        epoch = job.iteration // self.epoch_steps if self.epoch_steps else job.epoch
        return schedules.ratio_in(epoch, self.ratio, self.warmup, self.schedule)

    def sent(self, job: Job, indices: Indices) -> None:
        """Momentum factor masking."""
        if self.masking and job.memory.velocity is not None:
            if job.lossy is not None:
                job.notes["masked"] = indices, job.memory.velocity[indices]
            job.memory.velocity[indices] = 0

    def came_back(self, job: Job, indices: Indices) -> None:
        """What was not delivered is not masked."""
        if "masked" in job.notes and job.memory.velocity is not None:
            masked, velocities = job.notes["masked"]
            job.memory.velocity[indices] = velocities[np.searchsorted(masked, indices)]

    def note_dense(self, job: Job) -> None:
        """Their velocity is made of the average, the same on all ranks, so nothing of it may be lost or come back."""

    def dense(self, job: Job, part: Part) -> bool:
        """Parameters with fewer than two dimensions."""
        return len(part.shape) < 2

    def _clipped(self, gradient: Array, ranks: int) -> Array:
        limit = self.clip * (ranks**-0.5 if self.clip_scaled else 1.0)
        norm = float(np.linalg.norm(gradient)) if self.clip else 0.0
        return gradient * gradient.dtype.type(limit / norm) if limit < norm < np.inf else gradient

    def _accumulate(self, gradient: Array, velocity: Array, value: Array) -> None:
        """Momentum correction of one parameter, in place."""
        if not self.momentum:
            value += gradient
            return
        if self.nesterov:
            velocity += gradient
            velocity *= velocity.dtype.type(self.momentum)
            value += gradient
        else:
            velocity *= velocity.dtype.type(self.momentum)
            velocity += gradient
        value += velocity

    def put_dense(self, job: Job, mean: Array, out: Array) -> None:
        """The velocity of the average, the same on all ranks."""
        if not self.momentum:
            self.set_dense(job, out, mean)
            return
        assert job.memory.velocity is not None
        held = self.dense_of(job, job.memory.velocity)
        factor = mean.dtype.type(self.momentum)
        held = (held + mean) * factor if self.nesterov else held * factor + mean
        self.set_dense(job, job.memory.velocity, held)
        self.set_dense(job, out, held + mean if self.nesterov else held)
