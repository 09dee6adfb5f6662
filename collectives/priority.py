"""Priority: which chunks of a gradient are worth most, and the classes that they get for it (docs/policies.md, "Tags").

Theory of operation. A policy's ``tags`` give each chunk of a gradient a value, from what its own rank knows before the round:
its energy, the place of its layer in the model, both, or chance. Within each message the chunks are ranked by value and cut
into classes by fixed shares (``class_sizes``): the ``critical_share`` of most value into class 0, which is never lost, the rest
into 1, 2 and 3. Senders send and repair in this order, switches that look at DSCP drop in the reverse one. A partial sum or a
result is not known when its message begins: the rank's own contribution stands for it.

A chunk of little value could be lost for ever, and its parameters with it. ``Priority`` counts the rounds in a row in which a
chunk was missing somewhere; from ``STARVED_ROUNDS`` on it is promoted into class 0, as far as that has room, else into class 1.

Sources: gradient-aware queueing and dropping of DLCP (arXiv 2008.08445) and MLT (NSDI'24). Differences from the papers:
- Cut-offs and numbers of queues were not published: the shares are ours. Ranks within a message take the place of absolute
  cut-offs on magnitude, so they need no tuning and hold in every phase of training.
- A chunk's value is its energy, the sum of squares, not the size of single gradients.
- DLCP has two orders: front layers are queued first, as the next forward pass needs them first, but dropped first, as they
  tolerate more loss (1.1 % against 0.4 % of the back layers). Here one class serves for both, and it follows tolerance: a
  round is over only when all of it has come, so that arriving first gains nothing.
- Critical chunks and promotion are ours (LTP, arXiv 2305.04279, has critical packets, of headers and the like).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dblp.collectives.reduction import DType, widen_bfloat16
from dblp.transport.message import most_critical
from dblp.transport.policy import Policy, Tags
from dblp.transport.port import CLASSES

Array = npt.NDArray[Any]
Values = npt.NDArray[np.float64]
Classes = npt.NDArray[np.uint8]

SHARES = (0.3, 0.4, 0.3)
"""Shares of the chunks that are not critical in class 1, 2 and 3: the last holds about three times what a bound of 10 % may
lose, so that a network that drops it first seldom needs another; the first is what repairs turn to first."""
TOLERANCE_FRONT, TOLERANCE_BACK = 0.011, 0.004
"""Loss that the first and the last layer of a model bear (DLCP): energy counts for as much more as a layer bears less."""
STARVED_ROUNDS = 3
"""Rounds in a row in which a chunk was missing, after which it is promoted."""
_SLAB_CHUNKS = 4096
"""Chunks that are weighed together where they must be widened first: some megabytes of scratch memory."""


class Layers(Protocol):
    """Where in the model the elements of a gradient belong (``torch.buckets.BucketLayout``)."""

    @property
    def layer_count(self) -> int:
        """Layers of the whole model."""

    def layer_of(self, elements: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The layers of elements, given by their indices in the gradient; counted from the input side."""


class Priority:
    """What is remembered of one flat gradient (a bucket) from round to round."""

    __slots__ = ("_missed", "_streaks", "layers")

    def __init__(self, layers: Layers | None = None) -> None:
        """``layers``: of its elements; None: the gradient's own order stands for it, front first."""
        self.layers = layers
        self._streaks: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._missed: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)

    def begin(self, chunks: int) -> npt.NDArray[np.bool_]:
        """A round of ``chunks`` chunks begins; which of them starve. Counts start anew if the number of chunks has changed."""
        if len(self._streaks) != chunks:
            self._streaks = np.zeros(chunks, np.uint8)
        else:
            self._streaks += self._streaks < STARVED_ROUNDS
            self._streaks[~self._missed] = 0
        self._missed = np.zeros(chunks, np.bool_)
        starved: npt.NDArray[np.bool_] = self._streaks >= STARVED_ROUNDS
        return starved

    def missed(self, chunks: npt.NDArray[np.uint32]) -> None:
        """These chunks of the round are missing somewhere."""
        self._missed[chunks] = True


class Tagger:
    """The values of a gradient's chunks in one round, and their classes."""

    __slots__ = ("_classes", "_critical_share", "_priority", "_starved", "_values", "energies")

    def __init__(
        self,
        buffer: Array,
        dtype: DType,
        per_chunk: int,
        policy: Policy,
        priority: Priority | None = None,
        seed: Sequence[int] = (0,),
    ) -> None:
        """``buffer``: the rank's contribution, 1-D; ``per_chunk``: elements of a chunk; ``seed``: for ``Tags.RANDOM``,
        another one for each round and rank."""
        chunks = -(-buffer.size // per_chunk)
        self.energies = chunk_energies(buffer, dtype, per_chunk)
        """Sum of squares of each chunk; with a NaN in it NaN."""
        self._critical_share = policy.critical_share
        self._priority = priority or Priority()
        self._starved = self._priority.begin(chunks)
        self._values = self._value(policy.tags, buffer.size, per_chunk, seed)
        self._classes: dict[tuple[int, int], Classes] = {}

    def classes(self, low: int, high: int) -> Classes:
        """Classes of the chunks low..high, which make one message."""
        known = self._classes.get((low, high))
        if known is None:
            values, starved = self._values[low:high], self._starved[low:high]
            known = self._classes[low, high] = classes_by_value(values, self._critical_share, starved)
        return known

    def energy(self, low: int, high: int) -> float:
        """Sum of squares of these chunks."""
        return float(self.energies[low:high].sum())

    def missed(self, chunks: npt.NDArray[np.uint32]) -> None:
        """These chunks (indices in the gradient) are missing somewhere."""
        self._priority.missed(chunks)

    def _value(self, tags: Tags, size: int, per_chunk: int, seed: Sequence[int]) -> Values:
        chunks = len(self.energies)
        if tags is Tags.RANDOM:
            return np.random.default_rng(seed).random(chunks)
        if tags is Tags.MAGNITUDE:
            return self.energies
        depth = chunk_depths(self._priority.layers, size, per_chunk)
        return depth if tags is Tags.LAYER else self.energies * layer_weights(depth)


def chunk_energies(values: Array, dtype: DType, per_chunk: int) -> Values:
    """Sum of squares of each chunk of the 1-D ``values`` (storage type), the last of which may be shorter; in float64 where
    float32 overflows."""
    whole = values.size // per_chunk
    rows = values[: whole * per_chunk].reshape(whole, per_chunk)
    with np.errstate(all="ignore"):
        parts = [_row_energies(rows[at : at + _SLAB_CHUNKS], dtype) for at in range(0, whole, _SLAB_CHUNKS)]
        if whole * per_chunk < values.size:
            parts.append(_row_energies(values[None, whole * per_chunk :], dtype))
    return np.concatenate(parts) if parts else np.zeros(0)


def _row_energies(rows: Array, dtype: DType) -> Values:
    if dtype.half:
        rows = widen_bfloat16(rows) if dtype.name == "bfloat16" else rows.astype(np.float32)
    energies: Values = np.einsum("ij,ij->i", rows, rows).astype(np.float64)
    over = np.isinf(energies)
    if over.any():
        wide = rows[over].astype(np.float64)
        energies[over] = np.einsum("ij,ij->i", wide, wide)
    return energies


def chunk_depths(layers: Layers | None, size: int, per_chunk: int) -> Values:
    """Place of each chunk of a gradient of ``size`` elements in the model: 0 the first layer, 1 the last. Of a chunk that holds
    several layers, the deepest of its ends."""
    chunks = -(-size // per_chunk)
    if layers is None:
        return np.linspace(0.0, 1.0, chunks)
    first = np.arange(chunks, dtype=np.int64) * per_chunk
    last = np.minimum(first + per_chunk, size) - 1
    deepest = np.maximum(layers.layer_of(first), layers.layer_of(last))
    return deepest / max(layers.layer_count - 1, 1)


def layer_weights(depth: Values) -> Values:
    """What a chunk's energy counts for: the inverse of the loss that its layer bears, which falls evenly from the first layer to
    the last; 1 for the first."""
    return TOLERANCE_FRONT / (TOLERANCE_FRONT + depth * (TOLERANCE_BACK - TOLERANCE_FRONT))


def class_sizes(chunks: int, critical_share: float, starved: int = 0) -> tuple[int, int, int, int]:
    """Chunks of class 0 to 3 in a message of ``chunks``, of which ``starved`` starve. A share above 0 makes at least one chunk
    critical."""
    room = min(most_critical(chunks), chunks)
    critical = max(1, int(critical_share * chunks)) if critical_share else 0
    critical = min(max(critical, starved), room)
    rest = chunks - critical
    first = min(max(round(SHARES[0] * rest), starved - critical), rest)
    last = min(round(SHARES[2] * rest), rest - first)
    return critical, first, rest - first - last, last


def classes_by_value(
    values: Values, critical_share: float, starved: npt.NDArray[np.bool_] | None = None
) -> Classes:
    """The class of each chunk of a message: ranked by value, those that starve before all others. Equal values keep the order of
    the chunks; NaN is worth most, for nobody should miss that there is one."""
    ranked = np.where(np.isnan(values), np.inf, values)
    if starved is None or not starved.any():
        order, hungry = np.argsort(-ranked, kind="stable"), 0
    else:
        order, hungry = np.lexsort((-ranked, ~starved)), int(np.count_nonzero(starved))
    sizes = class_sizes(len(values), critical_share, hungry)
    classes: Classes = np.empty(len(values), np.uint8)
    classes[order] = np.repeat(np.arange(CLASSES, dtype=np.uint8), sizes)
    return classes
