"""A message on its way in: what came of it, where it goes, and when it is complete."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.transport import wire
from dblp.transport.message import MessageSpec, OnChunks, OnScattered, Received, Sink
from dblp.transport.policy import Stop

MANY_RUNS = 4
"""Above this many runs in one burst, rows are placed by one indexed operation where the sink has one."""


class Incoming:
    """State of one incoming message, from the first sign of it (posted receive, OPEN or chunk) to its FINAL."""

    __slots__ = (
        "asked", "closed", "critical", "early", "early_bytes", "early_chunks", "ended", "got", "grant_limit",
        "have", "high", "id", "last_useful", "may_miss", "on_chunks", "on_done", "on_scattered", "opened", "opened_at",
        "per_chunk", "sink", "spec", "width",
    )  # fmt: skip

    def __init__(self, message: int, now: float) -> None:
        self.id = message
        self.spec: MessageSpec | None = None
        self.sink: Sink | None = None
        self.opened: wire.Open | None = None
        self.opened_at = now
        self.have: npt.NDArray[np.bool_] = np.empty(0, np.bool_)
        self.got = 0
        self.critical = 0  # of them, those of class 0
        self.high = 0
        self.may_miss = 0
        self.per_chunk = 0
        self.width = 0
        self.early: list[
            tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8], int]
        ] = []  # chunks, rows, class
        self.early_bytes = 0
        self.early_chunks: set[int] = set()  # the indices in ``early``
        self.grant_limit = 0
        self.ended = False
        self.closed = False
        self.last_useful = now
        self.asked = False  # the sender waits for a grant
        self.on_chunks: OnChunks | None = None
        self.on_scattered: OnScattered | None = None
        self.on_done: Callable[[Received | Exception], None] | None = None

    @property
    def posted(self) -> bool:
        """A receive waits for this message."""
        return self.sink is not None

    @property
    def tagged(self) -> bool:
        """Its chunks have classes of their own, and come class by class."""
        return self.opened is not None and any(self.opened.counts)

    @property
    def lacks_critical(self) -> bool:
        """Chunks of class 0 are missing, for all that is known."""
        return self.opened is None or self.critical < self.opened.counts[0]

    def post(
        self,
        spec: MessageSpec,
        sink: Sink,
        on_chunks: OnChunks | None,
        limit: int,
        on_scattered: OnScattered | None = None,
    ) -> None:
        """A receive was posted."""
        self.spec = spec
        self.sink = sink
        self.on_chunks = on_chunks
        self.on_scattered = on_scattered
        self.may_miss = spec.may_miss
        self.have = np.zeros(spec.chunks, np.bool_)
        self.per_chunk = spec.chunk_bytes // sink.dtype.itemsize
        self.width = sink.dtype.itemsize
        self.grant_limit = limit

    def accept(self, chunks: npt.NDArray[np.uint32], rows: npt.NDArray[np.uint8], cls: int) -> int:
        """Place the new ones of these chunks of one class (any order, duplicates allowed); ``rows`` (n, payload bytes) uint8.
        Returns how many were new."""
        # Rows are copied only where they must be: most of what comes is ascending and new.
        if not (chunks[1:] > chunks[:-1]).all():
            order = np.argsort(chunks, kind="stable")
            chunks, rows = chunks[order], rows[order]
        fresh = ~self.have[chunks]
        fresh[1:] &= chunks[1:] != chunks[:-1]
        if not fresh.all():
            chunks, rows = chunks[fresh], rows[fresh]
        if not len(chunks):
            return 0
        self._note_scattered(chunks, cls)
        self._place_runs(chunks, rows)
        return len(chunks)

    def _note(self, first: int, count: int, cls: int) -> None:
        stop = first + count
        self.have[first:stop] = True
        self.got += count
        if not cls:
            self.critical += count
        if stop > self.high:
            self.high = stop

    def _note_scattered(self, chunks: npt.NDArray[np.uint32], cls: int) -> None:
        self.have[chunks] = True
        self.got += len(chunks)
        if not cls:
            self.critical += len(chunks)
        self.high = max(self.high, int(chunks[-1]) + 1)

    def _place_runs(self, chunks: npt.NDArray[np.uint32], rows: npt.NDArray[np.uint8]) -> None:
        sink: Any = self.sink
        typed = np.ascontiguousarray(rows).view(sink.dtype)
        borders = _borders(chunks)
        scatter = getattr(sink, "scatter", None) if len(borders) - 1 > MANY_RUNS else None
        if scatter is not None:
            scatter(chunks, typed)
            if self.on_scattered is not None:
                self.on_scattered(chunks)
                return
        for start, stop in itertools.pairwise(borders):
            if scatter is None:
                sink.place(int(chunks[start]), typed[start:stop])
            if self.on_chunks is not None:
                self.on_chunks(int(chunks[start]), stop - start)

    def fits(self, first: int, count: int, payload: int) -> bool:
        """Datagrams of ``payload`` bytes may be chunks first.. of this message: whole chunks, or its short last one alone."""
        spec = self.spec
        assert spec is not None
        stop = first + count
        if payload == spec.chunk_bytes:
            return stop * payload <= spec.nbytes
        return count == 1 and stop == len(self.have) and first * spec.chunk_bytes + payload == spec.nbytes

    def is_new(self, first: int, count: int) -> bool:
        """None of the chunks first.. was here before."""
        return first >= self.high or not self.have[first : first + count].any()

    def accept_run(self, first: int, count: int, rows: npt.NDArray[Any], cls: int) -> None:
        """The fast path: chunks first.., in the sink's dtype, none of which was here before; ``rows`` (n, elements a chunk), or
        (bursts, chunks a burst, elements a chunk) for a train."""
        self._note(first, count, cls)
        self.sink.place(first, rows)  # type: ignore[union-attr]
        if self.on_chunks is not None:
            self.on_chunks(first, count)

    def accept_scattered(self, chunks: npt.NDArray[np.uint32], rows: npt.NDArray[Any], cls: int) -> bool:
        """The same for whole chunks with gaps, ascending over all bursts: ``chunks`` (bursts, n), ``rows`` (bursts, n, elements a
        chunk). False with nothing done if one of them was here before, or the sink wants runs."""
        scatter = getattr(self.sink, "scatter", None)
        flat = chunks.reshape(-1)
        if scatter is None or not (flat[1:] > flat[:-1]).all() or self.have[flat].any():
            return False
        if len(chunks) == 1 and self._few_runs(flat, rows[0], cls):
            return True
        self._note_scattered(flat, cls)
        scatter(chunks, rows)
        if self.on_scattered is not None:
            self.on_scattered(flat)
        elif self.on_chunks is not None:
            for start, stop in itertools.pairwise(_borders(flat)):
                self.on_chunks(int(flat[start]), stop - start)
        return True

    def _few_runs(self, chunks: npt.NDArray[np.uint32], rows: npt.NDArray[Any], cls: int) -> bool:
        """Place a burst of new chunks run by run, if it has only a few: rows that lie together are placed faster."""
        borders = _borders(chunks)
        if len(borders) - 1 > MANY_RUNS:
            return False
        for low, high in itertools.pairwise(borders):
            self.accept_run(int(chunks[low]), high - low, rows[low:high], cls)
        return True

    # --- completion

    def complete(self, now: float, quiet_s: float, unended_quiet_s: float) -> bool:
        """The message may end now: everything is here, or its bound and its stop rule are met.

        ``quiet_s``: delay after which nothing first-transmitted can be in flight once END has come; ``unended_quiet_s``: the
        same without END.
        """
        if self.opened is None or self.spec is None:
            return False
        missing = self.spec.chunks - self.got
        if missing == 0:
            return True
        if self.spec.stop is Stop.ABANDON and now >= self.opened_at + self.spec.stop_after_s:
            return True
        if not self.may_miss or missing > self.may_miss or self.lacks_critical:
            return False
        if self.spec.stop is Stop.EAGER:
            return True
        if self.spec.stop is Stop.DEADLINE and now >= self.opened_at + self.spec.stop_after_s:
            return True
        return now >= self.last_useful + (quiet_s if self.ended else unended_quiet_s)

    def stop_check_at(self, quiet_s: float, unended_quiet_s: float) -> float:
        """When ``complete`` may turn true without anything arriving; infinity while the bound is not met."""
        if self.opened is None or self.spec is None or not self.may_miss or self.closed:
            return float("inf")
        over = self.opened_at + self.spec.stop_after_s
        if self.spec.chunks - self.got > self.may_miss or self.lacks_critical:
            return over if self.spec.stop is Stop.ABANDON else float("inf")
        at = self.last_useful + (quiet_s if self.ended else unended_quiet_s)
        return min(at, over) if self.spec.stop in (Stop.DEADLINE, Stop.ABANDON) else at

    def outcome(self) -> Received:
        """What a completed receive returns."""
        missing = (
            np.flatnonzero(~self.have).astype(np.uint32)
            if self.got < len(self.have)
            else np.empty(0, np.uint32)
        )
        return Received(missing=missing, energy_total=self.opened.energy if self.opened else 0.0)


def _borders(chunks: npt.NDArray[np.uint32]) -> list[int]:
    """Where the runs of ascending chunks begin, and where the last one ends."""
    return [0, *(np.flatnonzero(chunks[1:] - chunks[:-1] != 1) + 1).tolist(), len(chunks)]
