"""The one interface of all compression methods.

Theory of operation. A round averages one bucket over all ranks in four steps, the same on every rank and in the same order:

1. ``begin``: what the rank withheld in earlier rounds (its residual) and the new gradient become ``job.values``.
2. ``agree``: what all ranks must know before they encode (a common scale, a common basis); most methods need nothing.
3. ``compress``: the rank encodes what it sends, and takes it out of ``job.values`` **in place**: what is left there is its new
   residual. ``exchange`` posts the rounds that carry it.
4. ``decompress``: the average over all ranks, from what came.

The contract (error feedback): ``values before compress == what the rank sent + values after it``, for every element, exactly
where the arithmetic of the residual allows it. Values and residuals are sums of gradients in the gradient's own unit, float32
(float64 for gradients of float64), ``(size,)`` of the bucket; ``decompress`` gives an average over the ranks. All ranks compute
the average from the same bytes in the same order, so that replicas stay identical.

Under a loss policy (``job.lossy``) sums may lose chunks, and payloads blocks. All ranks count the same, and ``uncounted`` gives
what of the rank's own part nobody has counted, which returns to its residual (``lossy.py``).

What is not finite. A rank whose values hold an infinity or NaN sends nothing of that bucket but the news of it: the average is
NaN in every element, on every rank, so that whoever scales losses sees it. On that rank the elements at fault restart at zero,
all others stay withheld. So it is passed on, and never enters a residual. What the other ranks sent in such a round is lost, and
with it what of it they had withheld before: their residuals do not get it back, as the gradients of a skipped step are not kept
without compression either.

A method is a frozen dataclass of its options (``transport/spec.py``) without state of its own: a bucket's state is its
``Memory``, what belongs to a parameter as a whole is in ``job.factors``, and randomness is drawn by the number of the round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dblp.collectives.algorithms.grid import chunk_bytes
from dblp.collectives.blocks import Blocks
from dblp.collectives.compression.link import Bools, Bytes, Link, OnLost
from dblp.collectives.compression.memory import Memory
from dblp.collectives.phases import Phase, Phases
from dblp.collectives.reduction import DType, narrow_bfloat16, widen_bfloat16
from dblp.transport.config import CHUNK_ALIGN_BYTES
from dblp.transport.policy import Policy
from dblp.transport.spec import Element

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.uint8]
"""Blocks, one a row."""

_QUIET = np.errstate(over="ignore", invalid="ignore")
"""A gradient that overflows is a matter of those who train."""
HEADER_BYTES = 8
"""Of a gathered payload: the first byte is 1 if the sender's values were not finite; eight keep what follows aligned."""


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter's place in a bucket."""

    name: str
    """As ``module.named_parameters()`` gives it."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)


class Bucket:
    """The parameters whose gradients lie one behind the other in a flat gradient."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self.layout = tuple((part.name, part.size) for part in parts)
        """Names and sizes, for stores."""
        self.bounds: npt.NDArray[np.int64] = np.cumsum([0, *(part.size for part in parts)], dtype=np.int64)
        """Where each part begins, and the end: (parts + 1,), in elements."""
        self.size = int(self.bounds[-1])
        """Elements."""

    def cut(self, flat: Array) -> list[Array]:
        """Views of a flat array, one for each part."""
        return [
            flat[low:high]
            for low, high in zip(self.bounds[:-1].tolist(), self.bounds[1:].tolist(), strict=True)
        ]


@dataclass(slots=True, kw_only=True)
class Job:
    """One bucket of one rank in one round."""

    bucket: Bucket
    memory: Memory
    gradient: Array
    """The rank's gradient, in its own type, (size,); left alone until ``decompress``."""
    kind: DType
    """The gradient's type."""
    rank: int
    world_size: int
    number: int = 0
    """Of the round, counted alike on all ranks."""
    iteration: int = 0
    """Backward passes before this one."""
    epoch: int = 0
    phases: Phases = field(default_factory=lambda: Phases(Phase.CRITICAL))
    """Of the training, by parameter; the same on all ranks."""
    ratio: float | None = None
    """Share of elements that a controller wants sent; None: the method's own."""
    seed: int = 0
    factors: dict[str, Array] = field(default_factory=dict)
    """What a method keeps of a parameter as a whole, by name; the same on all ranks."""
    measured: dict[str, Any] = field(default_factory=dict)
    """What a method measured on this rank, from round to round; it is not saved."""
    lossy: Policy | None = None
    """What the round may lose; None: nothing."""
    max_chunk_bytes: int = 0
    """Of the group's messages."""
    spoiled: bool = False
    """The average will be NaN: this rank's values are not finite, or all ranks know that another's are not."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What one step of a method leaves for the next."""

    _values: Array | None = None

    @property
    def values(self) -> Array:
        """Gradient and residual; after ``compress`` what is withheld."""
        assert self._values is not None
        return self._values

    @values.setter
    def values(self, values: Array) -> None:
        self._values = values

    def zeros(self) -> Array:
        """(size,), in the residual's type."""
        return self.memory.zeros()

    def own_rng(self) -> np.random.Generator:
        """Random numbers of this rank in this round."""
        return np.random.default_rng([self.seed, self.number, 1 + self.rank])

    def shared_rng(self) -> np.random.Generator:
        """Random numbers of this round, the same on all ranks."""
        return np.random.default_rng([self.seed, self.number, 0])


class Method(Element, ABC):
    """A compression method; see the module's docstring for the contract of each step."""

    __slots__ = ()
    follows_phases: ClassVar[bool] = False
    """It sends by ``job.phases``, which a controller must decide."""

    @property
    def keeps(self) -> bool:
        """What is not sent is kept for the next round; if not, it is discarded."""
        return True

    @property
    def withholds(self) -> bool:
        """It leaves gradient for later rounds by itself; if not, each round sends all of it but for rounding."""
        return False

    @property
    def waits_for_epochs(self) -> bool:
        """What it sends depends on epochs that it must be told."""
        return False

    def check(self, world_size: int) -> None:  # most methods take any
        """Raise ConfigError if the method cannot work between so many ranks."""

    def begin(self, job: Job, gradient: Array) -> None:
        """Make ``job.values`` of the residual and ``gradient`` ((size,), in the residual's type, left alone)."""
        self.absorb(job, gradient)
        drop_spoiled(job, job.values)

    @_QUIET
    def absorb(self, job: Job, gradient: Array) -> None:
        """The first half of ``begin``: without a look at what is finite."""
        memory = job.memory
        if not self.keeps or memory.residual is None:
            job.values = gradient.copy()
        else:
            memory.residual += gradient
            job.values = memory.residual
        memory.residual = job.values if self.keeps else None

    async def agree(self, job: Job, link: Link) -> None:
        """What all ranks must know before they encode."""

    @abstractmethod
    def compress(self, job: Job) -> Array:
        """Encode what is sent and take it out of ``job.values``, in place. Heavy: may run on a thread of its own."""

    @abstractmethod
    async def exchange(self, job: Job, sent: Array, link: Link) -> Awaitable[list[Array]]:
        """Post what ``compress`` gave; returns what gives the ranks' contributions, or their sum, when it has come."""

    @abstractmethod
    def decompress(self, job: Job, received: list[Array]) -> Array:
        """The average over the ranks, (size,), in the residual's type. Heavy: may run on a thread of its own."""

    @abstractmethod
    def own_part(self, job: Job, sent: Array) -> Array:
        """What of this rank is in ``sent``, as the others will count it, (size,): the first term of the contract."""

    @abstractmethod
    def uncounted(self, job: Job, sent: Array) -> Array | None:
        """After ``decompress`` of a round that may lose: what this rank holds of ``sent`` (and of results that it made) and no
        rank has counted, a new (size,) in the sum before division and the residual's type; None if all was counted."""

    def ended(self, job: Job) -> None:  # most methods keep no count
        """The bucket's round is over, well or badly; on the event loop."""

    def figures(self, factors: Mapping[str, Array]) -> dict[str, float]:
        """What it has decided and found, by name, from what it keeps of the model; nothing where it decides nothing."""
        return {}


class Gathered(Method):
    """Methods whose ranks gather each other's payloads and add up what is in them."""

    __slots__ = ()

    @abstractmethod
    def encode(self, job: Job) -> Bytes:
        """What is sent of ``job.values``, which it is taken out of."""

    @abstractmethod
    def decode(self, job: Job, body: Bytes, rank: int, out: Array) -> None:
        """Add a rank's contribution to ``out``, (size,). Raises MismatchError that names the rank if it is no such body."""

    @abstractmethod
    def room(self, job: Job) -> int | None:
        """Bytes of a body where all ranks' are equally long, else None."""

    @abstractmethod
    def most(self, job: Job) -> int:
        """Bytes that a body can have."""

    @abstractmethod
    def encode_blocks(self, job: Job) -> tuple[Rows, Bytes]:
        """``encode`` for a round that may lose: blocks, (blocks, bytes a block), and the head that they need."""

    @abstractmethod
    def decode_blocks(self, job: Job, rows: Rows, head: Bytes, counted: Bools, rank: int, out: Array) -> None:
        """``decode`` of those blocks of a rank that are ``counted``, (blocks,)."""

    @abstractmethod
    def layout(self, job: Job) -> Blocks | None:
        """How payloads of blocks lie where all ranks' lie alike, else None."""

    def compress(self, job: Job) -> Array:
        """Header and body."""
        if job.lossy is not None:
            return self._compress_blocks(job)
        room = self.room(job)
        body: Bytes = np.empty(0, np.uint8) if job.spoiled else self.encode(job)
        payload = np.zeros(HEADER_BYTES + (body.size if room is None else room), np.uint8)
        payload[0] = job.spoiled
        payload[HEADER_BYTES : HEADER_BYTES + body.size] = body
        return payload

    async def exchange(self, job: Job, sent: Array, link: Link) -> Awaitable[list[Array]]:
        """All-gather of the payloads, of their lengths first where they differ."""
        if job.lossy is not None:
            return await self._exchange_blocks(job, sent, link)
        if self.room(job) is None:
            return await link.gather_uneven(sent, HEADER_BYTES, HEADER_BYTES + self.most(job))
        return link.gather(sent)

    def decompress(self, job: Job, received: list[Array]) -> Array:
        """The mean of what the ranks sent, added in rank order."""
        out = job.zeros()
        if job.lossy is not None:
            return self._decompress_blocks(job, received, out)
        if job.spoiled or any(payload[0] for payload in received):
            job.spoiled = True
            out.fill(np.nan)
            return out
        for rank, payload in enumerate(received):
            self.decode(job, payload[HEADER_BYTES:], rank, out)
        return mean_of(out, job.world_size)

    def own_part(self, job: Job, sent: Array) -> Array:
        """Its own payload, decoded."""
        out = job.zeros()
        if job.lossy is not None and not job.spoiled:
            self._add_blocks(job, sent, job.notes["layout"], None, job.rank, out)
        elif not job.spoiled:
            self.decode(job, sent[HEADER_BYTES:], job.rank, out)
        return out

    def uncounted(self, job: Job, sent: Array) -> Array | None:
        """Its own blocks that do not count, decoded."""
        counted: Bools = job.notes["counted"][job.rank]
        if counted.all():
            return None
        out = job.zeros()
        self._add_blocks(job, sent, job.notes["layout"], ~counted, job.rank, out)
        return out

    def block_bytes(self, job: Job, nbytes: int) -> int:
        """The size of a block of a payload of about ``nbytes``."""
        assert job.lossy is not None
        return chunk_bytes(nbytes, job.max_chunk_bytes, job.lossy)

    def _compress_blocks(self, job: Job) -> Array:
        """Blocks, and behind them header and head."""
        known = self.layout(job)
        if not job.spoiled:
            rows, head = self.encode_blocks(job)
        elif known is None:
            rows, head = np.empty((0, CHUNK_ALIGN_BYTES), np.uint8), np.empty(0, np.uint8)
        else:
            rows = np.zeros((known.count, known.chunk_bytes), np.uint8)
            head = np.zeros(known.head_bytes - HEADER_BYTES, np.uint8)
        layout = known or Blocks(len(rows), rows.shape[1], HEADER_BYTES + len(head))
        payload = np.zeros(layout.nbytes, np.uint8)
        payload[: rows.size] = rows.reshape(-1)
        low = layout.count * layout.chunk_bytes
        payload[low] = job.spoiled
        payload[low + HEADER_BYTES :] = head
        job.notes["layout"] = layout
        return payload

    async def _exchange_blocks(self, job: Job, sent: Array, link: Link) -> Awaitable[list[Array]]:
        if self.layout(job) is None:
            most = HEADER_BYTES + self.most(job) + job.max_chunk_bytes + self.most(job) // 8
            layouts = await link.tell_blocks(job.notes["layout"], most)
        else:
            layouts = [job.notes["layout"]] * job.world_size
        coming = link.gather_blocks(sent, layouts)

        async def gathered() -> list[Array]:
            payloads, counted = await coming
            pairs = list(zip(counted, layouts, strict=True))
            job.notes["layouts"] = layouts
            job.notes["counted"] = [flags[: lay.count] for flags, lay in pairs]
            job.notes["skipped"] = not all(flags[lay.count :].all() for flags, lay in pairs)
            return payloads

        return gathered()

    def _decompress_blocks(self, job: Job, received: list[Array], out: Array) -> Array:
        layouts: list[Blocks] = job.notes["layouts"]
        if job.notes["skipped"]:
            return out
        flags = [payload[lay.count * lay.chunk_bytes] for payload, lay in zip(received, layouts, strict=True)]
        if job.spoiled or any(flags):
            job.spoiled = True
            out.fill(np.nan)
            return out
        for rank, (payload, layout) in enumerate(zip(received, layouts, strict=True)):
            self._add_blocks(job, payload, layout, job.notes["counted"][rank], rank, out)
        return mean_of(out, job.world_size)

    def _add_blocks(
        self, job: Job, payload: Bytes, layout: Blocks, counted: Bools | None, rank: int, out: Array
    ) -> None:
        low = layout.count * layout.chunk_bytes
        flags = np.ones(layout.count, np.bool_) if counted is None else counted
        rows = payload[:low].reshape(layout.count, layout.chunk_bytes)
        self.decode_blocks(job, rows, payload[low + HEADER_BYTES :], flags, rank, out)


class Coded(Gathered):
    """Gathered methods that send a code of the same length for every element, behind a few numbers that all of them need."""

    __slots__ = ()
    code_bits: ClassVar[int]
    """Bits of a code: 8, 4 or 1."""

    @property
    def withholds(self) -> bool:
        """Every element is sent."""
        return False

    @abstractmethod
    def head_bytes(self, job: Job) -> int:
        """Bytes of a body before the codes."""

    @abstractmethod
    def room(self, job: Job) -> int:
        """Always known."""

    def layout(self, job: Job) -> Blocks:
        """Codes in blocks, the rest of the body behind them."""
        codes = self.room(job) - self.head_bytes(job)
        chunk = self.block_bytes(job, codes)
        return Blocks(-(-codes // chunk), chunk, HEADER_BYTES + self.head_bytes(job))

    def encode_blocks(self, job: Job) -> tuple[Rows, Bytes]:
        """The body's codes, cut."""
        layout, low = self.layout(job), self.head_bytes(job)
        body = self.encode(job)
        rows = np.zeros((layout.count, layout.chunk_bytes), np.uint8)
        rows.reshape(-1)[: body.size - low] = body[low:]
        return rows, body[:low]

    def decode_blocks(self, job: Job, rows: Rows, head: Bytes, counted: Bools, rank: int, out: Array) -> None:
        """The whole body; elements of blocks that do not count are left out."""
        low = self.head_bytes(job)
        codes = self.room(job) - low
        body = np.concatenate([head[:low], rows.reshape(-1)[:codes]])
        if counted.all():
            self.decode(job, body, rank, out)
            return
        if not counted.any():
            return
        part = job.zeros()
        self.decode(job, body, rank, part)
        each = rows.shape[1] * 8 // self.code_bits
        part[np.repeat(~counted, each)[: part.size]] = 0
        out += part


class Summed(Method):
    """Methods whose codes are added up as they are: ranks send lanes, an all-reduce sums or averages them."""

    __slots__ = ()
    op: ClassVar[str] = "sum"
    """Of the all-reduce."""

    @abstractmethod
    def lanes(self, job: Job) -> tuple[int, str]:
        """How many lanes there are, and their element type."""

    @abstractmethod
    def encode(self, job: Job) -> Array:
        """What is sent of ``job.values``, which it is taken out of: the lanes."""

    @abstractmethod
    def decode(self, job: Job, lanes: Array, ranks: int) -> Array:
        """The average, (size,), of lanes that ``ranks`` ranks have summed up (where ``op`` is "sum")."""

    def compress(self, job: Job) -> Array:
        """The lanes; NaN where the values were not finite, which no sum hides."""
        if not job.spoiled:
            return self.encode(job)
        count, dtype = self.lanes(job)
        if dtype == "bfloat16":
            return np.full(count, 0x7FC0, np.uint16)
        return np.full(count, np.nan, np.dtype(dtype))

    async def exchange(self, job: Job, sent: Array, link: Link) -> Awaitable[list[Array]]:
        """An all-reduce of the lanes, in place."""
        return link.collect(link.sum(sent, self.op, self.lanes(job)[1], lost=note_lost(job)))

    def decompress(self, job: Job, received: list[Array]) -> Array:
        """The sum, decoded."""
        out = self.decode(job, received[0], job.world_size)
        if not finite(out):
            job.spoiled = True
            out = np.full(job.bucket.size, np.nan, out.dtype)
        return out

    def own_part(self, job: Job, sent: Array) -> Array:
        """Its own lanes, decoded as a sum of one."""
        return job.zeros() if job.spoiled else self.decode(job, sent, 1)

    def uncounted(self, job: Job, sent: Array) -> Array | None:
        """The lanes that were not counted."""
        lost: Array | None = job.notes.get("lost")
        return None if lost is None or job.spoiled else self.decode_lost(job, lost)

    def decode_lost(self, job: Job, lanes: Array) -> Array:
        """What float32 (or float64) lanes stand for, before division: a new (size,)."""
        return self.decode(job, lanes, 1)


def note_lost(job: Job) -> OnLost:
    """Keeps what a sum has lost for ``Method.uncounted``."""
    return lambda lanes: job.notes.__setitem__("lost", lanes)


@_QUIET
def drop_spoiled(job: Job, *arrays: Array) -> None:
    """Note whether the first of ``arrays`` (all (size,)) is finite; where it is not, all restart at zero, in place."""
    if finite(arrays[0]):
        return
    spoiled = ~np.isfinite(arrays[0])
    for array in arrays:
        array[spoiled] = 0
    job.spoiled = True


@_QUIET
def finite(values: Array) -> bool:
    """True if all are."""
    # One pass without a temporary: a NaN or an infinity survives every sum. Only where that overflows is there a second one.
    return bool(np.isfinite(values.sum()) or np.isfinite(values).all())


def mean_of(total: Array, ranks: int) -> Array:
    """Divide in place."""
    if ranks > 1:
        total /= total.dtype.type(ranks)
    return total


def widened(array: Array, kind: DType, dtype: np.dtype[Any]) -> Array:
    """``array`` of a kind in ``dtype``: itself where it has that already."""
    wide: Array = widen_bfloat16(array) if kind.name == "bfloat16" else array
    return wide.astype(dtype, copy=False)


@_QUIET
def narrowed(values: Array, kind: DType) -> Array:
    """Values in the storage type of a kind, rounded to nearest even."""
    return narrow_bfloat16(values) if kind.name == "bfloat16" else values.astype(kind.storage, copy=False)
