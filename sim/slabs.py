"""Received datagrams laid out as a real port does it: coalesced super-packets, and singles in slots of one arena.

The kernel is free in how it groups what it hands over, so ``regroup`` cuts, scatters and joins at random: the
core must not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from dblp.transport.port import Address, Bytes, Ecn, Slab

SLOT_ALIGN_BYTES = 64
"""Slots of single datagrams start on cache lines, as in a real arena."""
MAX_COALESCED = 64
"""Datagrams that UDP GRO joins at most (UDP_GRO_CNT_MAX)."""
MAX_COALESCED_BYTES = 65_507
"""Bytes that it joins at most: the largest UDP payload over IPv4."""
JOIN_S = 1e-3
"""Longest between two arrivals that it joins: one poll of a network card, not the wait in a buffer after it."""
JUNK = 0xA5
"""What stands in an arena once its slab is no longer valid."""


@dataclass(slots=True)
class Arrival:
    """Datagrams of one flow that arrived together; ``data`` belongs to the simulator."""

    data: Bytes
    """Datagrams back to back, ``segment`` bytes each, the last perhaps shorter."""
    segment: int
    source: Address
    path: int
    at: float
    """Arrival of the first of them, seconds."""
    cls: int = 0
    """Class, as the switches see it (DSCP)."""
    ecn: Ecn = Ecn.NOT_ECT
    """ECN bits, equal in all of them: GRO joins no others."""
    count: int = field(init=False)
    """Number of datagrams; an empty datagram is one, too."""

    def __post_init__(self) -> None:
        self.count = max(1, -(-len(self.data) // self.segment))

    def part(self, first: int, end: int) -> Arrival:
        """Datagrams first..end-1, as a view."""
        data = self.data[first * self.segment : end * self.segment]
        return self.like(data)

    def like(self, data: Bytes, *, at: float | None = None) -> Arrival:
        """Other datagrams of the same burst that arrived with these, or at ``at``."""
        at = self.at if at is None else at
        return Arrival(data, self.segment, self.source, self.path, at, self.cls, self.ecn)


def slabs_of(arrivals: Sequence[Arrival]) -> list[Slab]:
    """Slabs in the order of arrival: what came together is coalesced, neighbours of one shape share an arena."""
    slabs: list[Slab] = []
    run: list[Arrival] = []
    for arrival in arrivals:
        if run and not (_joins(run, arrival) or _stacks(run, arrival)):
            slabs.append(_slab(run))
            run = []
        run.append(arrival)
    if run:
        slabs.append(_slab(run))
    if len(slabs) > 1:
        _share_arena(slabs)
    return slabs


def _share_arena(slabs: Sequence[Slab]) -> None:
    """Lay the slabs of one batch out in one arena, as one recvmmsg does."""
    places = list(accumulate((_aligned(len(slab.arena)) for slab in slabs), initial=0))
    arena = np.full(places[-1], JUNK, np.uint8)
    for slab, place in zip(slabs, places, strict=False):
        arena[place : place + len(slab.arena)] = slab.arena
        slab.arena, slab.offset = arena, place


def _aligned(nbytes: int) -> int:
    return -(-nbytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


def regroup(arrivals: Sequence[Arrival], rng: np.random.Generator, share: float) -> list[Arrival]:
    """Cut, scatter or join a ``share`` of the arrivals at random; the order of the datagrams stays."""
    out: list[Arrival] = []
    for arrival in arrivals:
        if rng.random() >= share:
            out.append(arrival)
            continue
        way = rng.integers(3)
        if way == 0 and out and _continues(out[-1], arrival):
            out[-1] = _join(out[-1], arrival)
        elif way <= 1 and arrival.count > 1:
            cut = int(rng.integers(1, arrival.count))
            out += [arrival.part(0, cut), arrival.part(cut, arrival.count)]
        else:
            out += [arrival.part(i, i + 1) for i in range(arrival.count)]
    return out


def scribble(slabs: Sequence[Slab]) -> None:
    """Destroy the arenas: whoever kept a view of one instead of a copy reads junk."""
    for arena in {id(slab.arena): slab.arena for slab in slabs}.values():
        arena.fill(JUNK)


def _slab(run: Sequence[Arrival]) -> Slab:
    slab = _singles(run) if run[0].count == 1 else _stack(run)
    slab.marked = run[0].ecn is Ecn.CE
    return slab


def _stack(run: Sequence[Arrival]) -> Slab:
    first, count, size = run[0], run[0].count, run[0].segment
    last = len(first.data) - (count - 1) * size
    arena = first.data if len(run) == 1 else np.concatenate([arrival.data for arrival in run])
    slab = Slab(arena, 0, size, size, count, last, first.path, first.at, lambda i: run[i // count].source)
    if len(run) > 1:
        slab.supers, slab.spacing = len(run), len(first.data)
        slab.arrived = [arrival.at for arrival in run].__getitem__
    return slab


def _stacks(run: Sequence[Arrival], arrival: Arrival) -> bool:
    """True if a super-packet may follow in one stack: same path and shape."""
    first = run[0]
    return (
        first.count > 1
        and arrival.count == first.count
        and arrival.ecn == first.ecn
        and arrival.segment == first.segment
        and arrival.path == first.path
        and len(arrival.data) == len(first.data)
    )


def _joins(singles: Sequence[Arrival], arrival: Arrival) -> bool:
    """True if a single may follow in one slab: same path, no longer, and nothing shorter stands before it."""
    size = len(singles[0].data)
    return (
        arrival.count == 1
        and singles[0].count == 1
        and arrival.path == singles[0].path
        and arrival.ecn == singles[0].ecn
        and len(singles[-1].data) == size
        and len(arrival.data) <= size
    )


def _singles(singles: Sequence[Arrival]) -> Slab:
    size, last = len(singles[0].data), len(singles[-1].data)
    stride = (size // SLOT_ALIGN_BYTES + 1) * SLOT_ALIGN_BYTES
    arena = np.full(len(singles) * stride, JUNK, np.uint8)
    for slot, single in enumerate(singles):
        arena[slot * stride : slot * stride + len(single.data)] = single.data
    sources = [single.source for single in singles]
    slab = Slab(
        arena, 0, stride, size, len(singles), last, singles[0].path, singles[0].at, sources.__getitem__
    )
    slab.arrived = [single.at for single in singles].__getitem__
    return slab


def _continues(before: Arrival, arrival: Arrival) -> bool:
    """True if GRO might join two arrivals: one flow, one size, nothing short before the end, within its limits."""
    return (
        arrival.at - before.at <= JOIN_S
        and before.source == arrival.source
        and before.path == arrival.path
        and before.segment == arrival.segment
        and (before.cls, before.ecn) == (arrival.cls, arrival.ecn)
        and len(before.data) == before.count * before.segment
        and before.count + arrival.count <= MAX_COALESCED
        and len(before.data) + len(arrival.data) <= MAX_COALESCED_BYTES
    )


def _join(before: Arrival, arrival: Arrival) -> Arrival:
    data = np.concatenate((before.data, arrival.data))
    return before.like(data)
