"""Who sends what to whom, and what waits for what: a graph of flows and tasks, built by whole arrays.

A task sends nothing: it takes time at a host (a computation), or is a point where several meet. A flow or task starts when
all that it comes after is done. The parts of the graph that are timed together are a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_COLUMNS = {
    "source": np.int32,
    "target": np.int32,
    "bytes": np.int64,
    "cls": np.int8,
    "leg": np.int8,
    "batch": np.int64,
    "message": np.int64,
    "latency_s": np.float64,
    "timed": np.bool_,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tasks:
    """A graph in arrays; T flows and tasks, E edges, R rounds."""

    source: npt.NDArray[np.int32]
    """Host that sends, or works (T)."""
    target: npt.NDArray[np.int32]
    """Host that receives; a task's own (T)."""
    bytes: Ints
    """To be sent; 0: a task (T)."""
    cls: npt.NDArray[np.int8]
    """Class of its packets (T)."""
    leg: npt.NDArray[np.int8]
    """Index of its transport: 0 the first leg's, 1 the second's, 2 the background's, 3 of microbursts (T)."""
    batch: Ints
    """Flows of one source with one number start together (T)."""
    message: Ints
    """Flows of one source to one target with one number are parts of one message; 0: it is whole (T)."""
    latency_s: Floats
    """From when it may start until it does (T)."""
    timed: npt.NDArray[np.bool_]
    """The run is over when all of these are done (T)."""
    before: Ints
    """What must be done (E)."""
    after: Ints
    """before what starts (E)."""
    rounds: tuple[tuple[Ints, Ints], ...]
    """What begins and what ends each (R)."""
    per_flow: bool = False
    """Flows are timed one by one, not in rounds."""


class Graph:
    """Collects flows and tasks."""

    def __init__(self) -> None:
        self._columns: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in _COLUMNS}
        self._edges: list[tuple[Ints, Ints]] = []
        self._count = 0
        self._batches = 0
        self.rounds: list[tuple[Ints, Ints]] = []
        self.per_flow = False

    def next_batch(self) -> int:
        """A new number for flows that start together."""
        self._batches += 1
        return self._batches

    def flows(
        self,
        sources: npt.ArrayLike,
        targets: npt.ArrayLike,
        nbytes: npt.ArrayLike,
        *,
        leg: int = 0,
        cls: npt.ArrayLike = 0,
        batch: int = 0,
        message: int = 0,
        latency_s: npt.ArrayLike = 0.0,
        timed: bool = True,
    ) -> Ints:
        """Add flows, arguments broadcast against each other; returns their numbers. What a host would send itself is a task."""
        given = {
            "source": sources, "target": targets, "bytes": nbytes, "cls": cls, "leg": leg,
            "batch": batch, "message": message, "latency_s": latency_s, "timed": timed,
        }  # fmt: skip
        rows = np.broadcast_arrays(*given.values())
        size = rows[0].size
        for (name, kind), row in zip(_COLUMNS.items(), rows, strict=True):
            self._columns[name].append(np.atleast_1d(row).astype(kind))
        local = self._columns["source"][-1] == self._columns["target"][-1]
        self._columns["bytes"][-1][local] = 0
        self._count += size
        return np.arange(self._count - size, self._count)

    def tasks(self, hosts: npt.ArrayLike, seconds: npt.ArrayLike = 0.0) -> Ints:
        """Add tasks that take time at hosts; returns their numbers."""
        return self.flows(hosts, hosts, 0, latency_s=seconds)

    def order(self, before: npt.ArrayLike, after: npt.ArrayLike) -> None:
        """Each of ``after`` starts only when its ``before`` is done; broadcast against each other."""
        first, then = np.broadcast_arrays(before, after)
        self._edges.append((np.atleast_1d(first).ravel(), np.atleast_1d(then).ravel()))

    def build(self) -> Tasks:
        """Everything, as arrays."""
        columns = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        none = np.empty(0, np.int64)
        return Tasks(
            **columns,
            before=np.concatenate([none, *(edge[0] for edge in self._edges)]),
            after=np.concatenate([none, *(edge[1] for edge in self._edges)]),
            rounds=tuple(self.rounds),
            per_flow=self.per_flow,
        )
