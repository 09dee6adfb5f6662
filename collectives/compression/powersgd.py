"""PowerSGD (Vogels, Karimireddy and Jaggi, arXiv 1905.13727): each matrix as a product of two thin ones, by a power iteration.

For a parameter's gradient M (n, m; what is not the first dimension is flattened) and last round's Q (m, r): P = sum of M Q over
the ranks, made orthonormal; Q = mean of M^T P; the average is P Q^T. It is linear in M, so its parts are summed as they are.
Averages are those of torch's own hook with ``use_error_feedback`` and ``warm_start``, from the same first Q (a scenario of
tests/torch has both); parameters that it would not make smaller by ``min_rate`` are averaged as they are, as there.

Differences: arithmetic is in the residual's type (torch's in the gradient's). A rank's residual is M - P (M^T P)^T, what itself
did not send, as in algorithm 2 of the paper; torch keeps M less the average. Their sums over the ranks are equal, and with them
all averages that follow. Replicas are identical as far as the ranks' linear algebra gives identical bits, which different kinds
of processors need not.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dblp.collectives.compression.base import Array, Job, Part, Summed, mean_of
from dblp.collectives.compression.link import Link
from dblp.transport.spec import SEED, Kind, arg

RANK = Kind("a rank of 1 to 4096", int, lambda value: isinstance(value, int) and 1 <= value <= 4096, str)
RATE = Kind(
    "a number of at least 1",
    float,
    lambda value: isinstance(value, (int, float)) and 1.0 <= value < float("inf"),
    lambda value: repr(float(value)),
)


@dataclass(frozen=True, slots=True)
class PowerSGD(Summed):
    """Low rank, by parameter."""

    name: ClassVar[str] = "powersgd"
    rank: int = arg("rank", RANK, default=1)
    """r; less for a matrix with fewer rows or columns."""
    min_rate: float = arg("min_rate", RATE, default=2.0)
    """A matrix is sent as it is unless its factors are smaller by more than this."""
    start: int = arg("start", SEED, default=0)
    """Iterations before which all is sent as it is (torch's ``start_powerSGD_iter``, 1,000 there)."""

    @property
    def withholds(self) -> bool:
        """What is beyond the rank."""
        return True

    async def agree(self, job: Job, link: Link) -> None:
        """The basis of each matrix: P, summed over the ranks."""
        low = [part for part in job.bucket.parts if self._factors(job, part)]
        job.notes["low"] = {part.name for part in low}
        matrices = self._matrices(job)
        products = [matrices[part.name] @ _orthonormal(self._last(job, part)) for part in low]
        total = _joined(products, job.memory.dtype)
        if job.spoiled:
            total.fill(np.nan)
        if total.size:
            total = await link.sum(total)
        job.spoiled |= not np.isfinite(total).all()
        shapes = [product.shape for product in products]
        bases = [] if job.spoiled else [_orthonormal(p) for p in _split(total, shapes)]
        job.notes["bases"] = dict(zip((part.name for part in low), bases, strict=False))

    def lanes(self, job: Job) -> tuple[int, str]:
        """Q of what has factors, all elements of what has not."""
        parts = job.bucket.parts
        count = sum(
            self._q_shape(p)[0] * self._q_shape(p)[1] if p.name in job.notes["low"] else p.size for p in parts
        )
        return count, job.memory.dtype.name

    def encode(self, job: Job) -> Array:
        """This rank's Q; the values become what P Q^T does not hold."""
        lanes = []
        for part, flat in zip(job.bucket.parts, job.bucket.cut(job.values), strict=True):
            basis = job.notes["bases"].get(part.name)
            if basis is None:
                lanes.append(flat.copy())
                flat.fill(0)
                continue
            matrix = flat.reshape(part.shape[0], -1)
            own = matrix.T @ basis
            matrix -= basis @ own.T
            lanes.append(own)
        return _joined(lanes, job.memory.dtype)

    async def exchange(self, job: Job, sent: Array, link: Link) -> Awaitable[list[Array]]:
        """All-reduce, unless all know already that it would be NaN."""
        if job.spoiled and job.notes["low"]:
            return link.collect()
        return await Summed.exchange(self, job, sent, link)

    def decompress(self, job: Job, received: list[Array]) -> Array:
        """The average, and Q for the next round."""
        if not received:
            return np.full(job.bucket.size, np.nan, job.memory.dtype)
        return Summed.decompress(self, job, received)

    def decode(self, job: Job, lanes: Array, ranks: int) -> Array:
        """P Q^T, and what was sent as it is."""
        out = job.zeros()
        shapes = [self._q_shape(p) if p.name in job.notes["low"] else (p.size,) for p in job.bucket.parts]
        means = _split(mean_of(lanes.copy(), ranks), shapes)
        for part, flat, mean in zip(job.bucket.parts, job.bucket.cut(out), means, strict=True):
            basis = job.notes["bases"].get(part.name)
            if basis is None:
                flat[...] = mean
                continue
            np.matmul(basis, mean.T, out=flat.reshape(part.shape[0], -1))
            if ranks == job.world_size:
                job.factors[part.name] = mean
        return out

    def _factors(self, job: Job, part: Part) -> bool:
        """True if factors are small enough."""
        if job.iteration < self.start or not part.shape or not part.size:
            return False
        rows, columns = part.shape[0], part.size // part.shape[0]
        return (rows + columns) * min(rows, columns, self.rank) * self.min_rate < part.size

    def _q_shape(self, part: Part) -> tuple[int, int]:
        rows, columns = part.shape[0], part.size // part.shape[0]
        return columns, min(rows, columns, self.rank)

    def _last(self, job: Job, part: Part) -> Array:
        """Last round's Q; at first a random one, the same on all ranks."""
        shape = self._q_shape(part)
        known = job.factors.get(part.name)
        if known is not None and known.shape == shape:
            return known.astype(job.memory.dtype)
        rng = np.random.default_rng([job.seed, zlib.crc32(part.name.encode()), *shape])
        return rng.standard_normal(shape).astype(job.memory.dtype)

    def _matrices(self, job: Job) -> dict[str, Array]:
        flats = zip(job.bucket.parts, job.bucket.cut(job.values), strict=True)
        return {p.name: flat.reshape(p.shape[0], -1) for p, flat in flats if p.name in job.notes["low"]}


def _orthonormal(matrix: Array) -> Array:
    """Columns of unit length at right angles, in the sense of Gram and Schmidt: the first has the direction of the first."""
    q, r = np.linalg.qr(matrix)
    return np.ascontiguousarray(q * np.where(np.diag(r) < 0, -1, 1).astype(matrix.dtype))


def _joined(arrays: list[Array], dtype: np.dtype[np.generic]) -> Array:
    return np.concatenate([np.empty(0, dtype), *(array.reshape(-1) for array in arrays)])


def _split(flat: Array, shapes: Sequence[tuple[int, ...]]) -> Iterator[Array]:
    low = 0
    for shape in shapes:
        size = int(np.prod(shape, dtype=np.int64))
        yield flat[low : low + size].reshape(shape)
        low += size
