"""Methods that send some elements and withhold the rest: their common part."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Iterator
from math import ceil

import numpy as np

from dblp.collectives.blocks import Blocks
from dblp.collectives.compression import blocked, entries
from dblp.collectives.compression.base import HEADER_BYTES, Array, Gathered, Job, Part, Rows, finite
from dblp.collectives.compression.entries import Indices
from dblp.collectives.compression.link import Bools, Bytes, Link, OnLost
from dblp.transport.spec import Kind, choice

RATIO = Kind(
    "a share in (0, 1] of the elements",
    float,
    lambda value: isinstance(value, (int, float)) and 0.0 < value <= 1.0,
    lambda value: repr(float(value)),
    "0.01",
)
VALUES = choice("full", "fp16")
"""``full``: float32, float64 for gradients of that type. ``fp16``: what rounding takes away stays with the sender."""
INDICES = choice("plain", "delta")
"""``delta``: coded gaps (``entries.py``); their length is told first, in a round of its own."""


_HEAD = np.dtype([("form", blocked.FORM), ("energy", "<f8")])
"""Of a payload of blocks: how they lie, and the sum of squares of all its values."""
_COUNT = slice(blocked.HEADER.fields["count"][1], blocked.HEADER.fields["count"][1] + 4)  # type: ignore[index]
"""Where a block's number of entries stands."""


def share_of(size: int, ratio: float) -> int:
    """Elements to send of ``size``: at least one, unless there is none."""
    return min(max(ceil(size * ratio), 1), size)


class Sparse(Gathered):
    """Entries, an index and a value each, in an all-gather. Subclasses have the fields ``values`` and ``indices``."""

    __slots__ = ()
    values: str
    indices: str

    @abstractmethod
    def select(self, job: Job) -> Indices:
        """Indices, ascending, of what is sent of ``job.values``."""

    @abstractmethod
    def target(self, job: Job) -> int | None:
        """At most so many are selected; None: that is not known before."""

    @property
    def withholds(self) -> bool:
        """That is what it does."""
        return True

    def sent(self, job: Job, indices: Indices) -> None:
        """Called when the entries at ``indices`` have been taken out of ``job.values``."""

    def halves(self, job: Job) -> bool:
        """Values are sent in half precision; the same on all ranks."""
        return self.values == "fp16"

    def came_back(self, job: Job, indices: Indices) -> None:
        """Called when entries that were sent turn out not to be counted."""

    def room(self, job: Job) -> int | None:
        """Known with plain indices where the count is."""
        count = self.target(job)
        if count is None or self.indices == "delta":
            return None
        return entries.plain_bytes(job.bucket.size, count, self._value_bytes(job))

    def most(self, job: Job) -> int:
        """As with all elements."""
        return entries.most_bytes(job.bucket.size, job.bucket.size)

    def encode(self, job: Job) -> Bytes:
        """The selected entries; what remains of a rounded value stays."""
        indices, values = self._take(job)
        return entries.encode(indices, values, job.bucket.size, delta=self.indices == "delta")

    def _take(self, job: Job) -> tuple[Indices, Array]:
        """Take the selected entries out of the values."""
        indices = self.select(job)
        picked = job.values[indices]
        values = entries.to_half(picked) if self.halves(job) else picked
        job.values[indices] = picked - values.astype(picked.dtype)
        self.sent(job, indices)
        return indices, values

    def _value_bytes(self, job: Job) -> int:
        return 2 if self.halves(job) else job.memory.dtype.itemsize

    # --- in blocks

    def layout(self, job: Job) -> Blocks | None:
        """Known with plain indices where the count is."""
        count = self.target(job)
        if count is None or self.indices == "delta":
            return None
        chunk, form = self._plain(job, count)
        return Blocks(-(-count // form.each), chunk, HEADER_BYTES + _HEAD.itemsize)

    def encode_blocks(self, job: Job) -> tuple[Rows, Bytes]:
        """Entries in blocks of as many; in the head how they lie, and their energy."""
        indices, values = self._take(job)
        if self.indices == "delta":
            # About two bytes an index: what most ratios take. Only the size of a block depends on it.
            chunk = self.block_bytes(job, indices.size * (2 + values.itemsize))
            rows, form = blocked.encode_coded(indices, values, chunk)
        else:
            chunk, _ = self._plain(job, indices.size if self.target(job) is None else self.target(job) or 0)
            rows, form = blocked.encode_plain(indices, values, job.bucket.size, chunk)
            rows = self._filled_up(job, rows)
        wide = values.astype(np.float64)
        head = np.zeros(1, _HEAD)
        head["form"], head["energy"] = form.to_bytes().view(blocked.FORM), float(wide @ wide)
        return rows, head.view(np.uint8)

    def decode_blocks(self, job: Job, rows: Rows, head: Bytes, counted: Bools, rank: int, out: Array) -> None:
        """Add the entries of blocks that count and hold any."""
        told = np.ascontiguousarray(head[: _HEAD.itemsize]).view(_HEAD)
        form = blocked.Form.from_bytes(told["form"].view(np.uint8))
        full = rows[:, _COUNT].any(axis=1)
        indices, values = blocked.decode(rows[counted & full], form, job.bucket.size, rank)
        wide = values.astype(out.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            out[indices] += wide
            sent, came = job.notes.get("energies", (0.0, 0.0))
            job.notes["energies"] = sent + float(told["energy"][0]), came + float(wide @ wide)

    def uncounted(self, job: Job, sent: Array) -> Array | None:
        """Its own entries that do not count."""
        sent_energy, came = job.notes.pop("energies", (0.0, 0.0))
        if job.notes["skipped"]:
            job.notes["energy_lost"] = 1.0
        elif sent_energy > 0.0 and not job.notes.get("means"):
            job.notes["energy_lost"] = min(max(1.0 - came / sent_energy, 0.0), 1.0)
        lost = Gathered.uncounted(self, job, sent)
        if lost is not None:
            self.came_back(job, np.flatnonzero(lost))
        return lost

    def _plain(self, job: Job, count: int) -> tuple[int, blocked.Form]:
        """(bytes of a block, form) of so many entries with plain indices."""
        nbytes = entries.plain_bytes(job.bucket.size, count, self._value_bytes(job))
        chunk = self.block_bytes(job, nbytes)
        return chunk, blocked.plain_form(job.bucket.size, self._value_bytes(job), chunk)

    def _filled_up(self, job: Job, rows: Rows) -> Rows:
        """With empty blocks where fewer entries were found than the layout has room for."""
        layout = self.layout(job)
        if layout is None or layout.count == len(rows):
            return rows
        return np.concatenate([rows, np.zeros((layout.count - len(rows), layout.chunk_bytes), np.uint8)])

    def decode(self, job: Job, body: Bytes, rank: int, out: Array) -> None:
        """Add the entries; no index stands twice in one body."""
        indices, values = entries.decode(body, job.bucket.size, rank)
        with np.errstate(over="ignore"):
            out[indices] += values.astype(out.dtype)


class PartlyDense(Sparse):
    """Some parameters go whole, in an all-reduce beside the entries; in half precision where values do."""

    __slots__ = ()

    @abstractmethod
    def dense(self, job: Job, part: Part) -> bool:
        """True if a parameter goes whole; the same on all ranks."""

    def note_dense(self, job: Job) -> OnLost | None:
        """Keeps what the sum of the dense parameters has lost; None: it may lose nothing."""
        return lambda lanes: job.notes.__setitem__("lost", lanes)

    def uncounted(self, job: Job, sent: Array) -> Array | None:
        """Entries, and dense parameters."""
        lost, lanes = Sparse.uncounted(self, job, sent), job.notes.get("lost")
        if lanes is None or job.spoiled:
            return lost
        lost = job.zeros() if lost is None else lost
        self.set_dense(job, lost, lanes)
        return lost

    def put_dense(self, job: Job, mean: Array, out: Array) -> None:
        """The dense parameters' averages have come: put what they give into ``out``, (size,)."""
        self.set_dense(job, out, mean)

    def compress(self, job: Job) -> Array:
        """What is dense is taken out first, but for what rounding takes away."""
        values = self.dense_of(job, job.values)
        job.notes["dense"] = lanes = entries.to_half(values) if self.halves(job) else values
        if not job.spoiled:
            self.set_dense(job, job.values, values - lanes.astype(values.dtype))
        return Sparse.compress(self, job)

    def own_part(self, job: Job, sent: Array) -> Array:
        """Entries, and what is dense."""
        out = Sparse.own_part(self, job, sent)
        if not job.spoiled:
            self.set_dense(job, out, job.notes["dense"])
        return out

    async def exchange(self, job: Job, sent: Array, link: Link) -> Awaitable[list[Array]]:
        """The all-reduce first, then the entries."""
        dense: Array = job.notes["dense"]
        if job.spoiled:
            dense.fill(np.nan)
        lost = self.note_dense(job) if job.lossy is not None else None
        total = [link.sum(dense, "avg", lost=lost)] if dense.size else []
        gathered = await Sparse.exchange(self, job, sent, link)

        async def both() -> list[Array]:
            results = await link.collect(*total, gathered)
            job.notes["means"] = results[:-1]
            payloads: list[Array] = results[-1]
            return payloads

        return both()

    def decompress(self, job: Job, received: list[Array]) -> Array:
        """The mean of the entries, and the dense parameters; all NaN if one of these is."""
        out = Sparse.decompress(self, job, received)
        for lanes in job.notes["means"]:
            mean = lanes.astype(job.memory.dtype, copy=False)
            if not finite(mean):
                job.spoiled = True
                out.fill(np.nan)
            if not job.spoiled:
                self.put_dense(job, mean, out)
        return out

    def dense_of(self, job: Job, flat: Array) -> Array:
        """A copy of the dense parameters' elements of a flat array."""
        pieces = [piece for part, piece in self._pieces(job, flat) if self.dense(job, part)]
        return np.concatenate([np.empty(0, flat.dtype), *pieces])

    def set_dense(self, job: Job, flat: Array, values: Array) -> None:
        """Overwrite them in a flat array."""
        low = 0
        for part, piece in self._pieces(job, flat):
            if self.dense(job, part):
                piece[...] = values[low : low + piece.size]
                low += piece.size

    def _pieces(self, job: Job, flat: Array) -> Iterator[tuple[Part, Array]]:
        return zip(job.bucket.parts, job.bucket.cut(flat), strict=True)
