"""Contributions of all peers to one span, reduced in rank order: the owner's side of the direct exchange under a bound.

Sums have the bits of an exact direct exchange, ((r0 + r1) + r2) ..., whatever the order of arrival (C5), and half types are
rounded once. So whole contributions are staged: whether a chunk is a hole is only known when its message has ended. A hole
adds nothing; with ``Fill.RESCALE`` the sum of the contributions that came is multiplied by world_size over their number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.algorithms.grid import segment_chunks
from dblp.collectives.algorithms.hops import Array, Chunks, Node, Span, true_runs
from dblp.collectives.algorithms.sinks import whole_rows, words
from dblp.collectives.reduction import energy
from dblp.transport.message import MessageSpec, Received
from dblp.transport.policy import Fill

if TYPE_CHECKING:
    from dblp.collectives.algorithms.flow import Flow

SCATTERED_PIECES = 4
"""Pieces of a burst's size in which chunks with gaps are reduced together: a quarter of a megabyte for each rank."""


class Fold(Node):
    """The reduction; ``receives`` makes its receives."""

    def __init__(self, flow: Flow, span: Span) -> None:
        super().__init__(flow, span)
        round_, peers = flow.round, flow.round.peers()
        self.target = flow.elements(span)
        self.per_chunk = flow.per_chunk
        nbytes = span.chunks * flow.chunk
        memory = round_.stage(nbytes * len(peers))
        self._stages = {
            peer: memory[place * nbytes : (place + 1) * nbytes].view(self.target.dtype)
            for place, peer in enumerate(peers)
        }
        self._left = np.full(span.chunks, len(peers), np.int32)
        self._came: npt.NDArray[np.int32] | None = None
        if flow.policy.fill is Fill.RESCALE:
            self._came = np.full(span.chunks, round_.world_size, np.int32)
        self._piece = segment_chunks(flow.chunk)
        self._scratch = np.empty(self._piece * self.per_chunk, self.target.dtype)
        self._pieces = SCATTERED_PIECES * self._piece
        self._gathered: Array | None = None  # chunks with gaps: a row for each rank, and one of scratch

    def receives(self, step: int, spec: MessageSpec) -> list[Part]:
        """What receives the peers' contributions. They know the fold, which must not know them: a cycle would keep memory."""
        return [Part(self, peer, step, spec, stage) for peer, stage in self._stages.items()]

    def arrived(self, low: int, high: int) -> None:
        """Chunks of one peer have come, or are holes, filled with zeros."""
        self._left[low:high] -= 1
        for first, end in true_runs(self._left[low:high] == 0, low):
            for start in range(first, end, self._piece):
                self._reduce(start, min(start + self._piece, end))
            self.done(first + self.span.low, end + self.span.low)
            self.flow.count(end - first)

    def arrived_scattered(self, chunks: Chunks) -> None:
        """The same for chunks with gaps."""
        self._left[chunks] -= 1
        chunks = chunks[self._left[chunks] == 0]
        if not len(chunks):
            return
        rest = chunks
        if int(chunks[-1]) >= self.target.size // self.per_chunk:  # the short last one
            self._reduce(int(chunks[-1]), int(chunks[-1]) + 1)
            rest = chunks[:-1]
        for start in range(0, len(rest), self._pieces):
            self._reduce_scattered(rest[start : start + self._pieces])
        self.done_scattered(chunks + np.uint32(self.span.low))
        self.flow.count(len(chunks))

    def missed(self, chunks: npt.NDArray[np.uint32]) -> None:
        """These chunks of one peer are holes."""
        if self._came is not None:
            self._came[chunks] -= 1

    def _reduce(self, low: int, high: int) -> None:
        start, stop = low * self.per_chunk, min(high * self.per_chunk, self.target.size)
        out, round_ = self.target[start:stop], self.flow.round
        parts = [
            out if rank == round_.rank else self._stages[rank][start:stop]
            for rank in range(round_.world_size)
        ]
        self.flow.reducer.fold(parts, out, self._scratch[: stop - start])
        if self._came is not None:
            self._rescale(low, self._came[low:high])

    def _reduce_scattered(self, chunks: Chunks) -> None:
        """Whole chunks, a few pieces of them: brought together, reduced, and put back."""
        round_, width, count = self.flow.round, self.per_chunk, len(chunks)
        if self._gathered is None:
            self._gathered = np.empty((round_.world_size + 1, self._pieces, width), self.target.dtype)
        whole = whole_rows(self.target, width)
        sources = [
            whole if rank == round_.rank else whole_rows(self._stages[rank], width)
            for rank in range(round_.world_size)
        ]
        parts = []
        for source, rows in zip(sources, self._gathered, strict=False):
            np.take(
                source, chunks, axis=0, out=rows[:count], mode="clip"
            )  # other modes take a detour by a copy
            parts.append(rows[:count].reshape(-1))
        out = parts[round_.rank]
        self.flow.reducer.fold(parts, out, self._gathered[-1, :count].reshape(-1))
        rows = out.reshape(count, width)
        if self._came is not None:
            came = self._came[chunks]
            for count in np.unique(came[came < round_.world_size]).tolist():
                scaled = rows[came == count]
                self.flow.reducer.scale(scaled, round_.world_size / count)
                rows[came == count] = scaled
        whole[chunks] = rows

    def _rescale(self, low: int, came: npt.NDArray[np.int32]) -> None:
        size = self.flow.round.world_size
        for count in np.unique(came[came < size]).tolist():
            for first, end in true_runs(came == count, low):
                part = self.target[first * self.per_chunk : end * self.per_chunk]
                self.flow.reducer.scale(part, size / count)


class Part:
    """What one peer contributes. It is its message's sink."""

    pushed = True
    weigh = True

    def __init__(self, fold: Fold, peer: int, step: int, spec: MessageSpec, stage: Array) -> None:
        self.fold = fold
        self.span = fold.span
        self.peer = peer
        self.step = step
        self.spec = spec
        self._stage = stage
        self._words = words(stage, spec.nbytes)
        self.dtype: np.dtype[Any] = self._words.dtype
        self._per_chunk = spec.chunk_bytes // self.dtype.itemsize

    def place(self, first: int, rows: Array) -> None:
        start = first * self._per_chunk
        self._words[start : start + rows.size].reshape(rows.shape)[...] = rows

    def scatter(self, chunks: npt.NDArray[np.uint32], rows: Array) -> None:
        """``place`` for whole chunks in any order."""
        whole_rows(self._words, self._per_chunk)[chunks] = rows

    def on_chunks(self, first: int, count: int) -> None:
        self.fold.arrived(first, first + count)

    def on_scattered(self, chunks: Chunks) -> None:
        """``on_chunks`` for chunks with gaps."""
        self.fold.arrived_scattered(chunks)

    def on_done(self, received: Received) -> None:
        missing = received.missing
        if len(missing):
            self._stage.reshape(self.span.chunks, -1)[missing] = 0
            self.fold.missed(missing)
        self.fold.flow.ended(self, received)
        if len(missing):
            self.fold.arrived_scattered(missing)

    def energies(self, received: Received) -> tuple[float, float]:
        """Sum of squares of the whole message, and of what came of it."""
        if not len(received.missing):
            return received.energy_total, received.energy_total
        came = energy(self._stage[: self.fold.target.size], self.fold.flow.reducer.dtype)
        return received.energy_total, came
