"""What impairments do to the datagrams of a burst: seeded, sans-IO, vectorised.

Theory of operation: datagrams pass the elements in the order of ``impair_spec.ELEMENTS``. What loses them
looks at all that are offered; then copies are made; then the queue and the damage take their share; then come
delays. Each element draws from a random stream of its own, always as many numbers as it sees datagrams, so
the cut of a stream into bursts does not change what an element does.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dblp.transport.impair_spec import (
    Bursts,
    Corrupt,
    Delay,
    Duplicate,
    GilbertElliott,
    GilbertElliottTime,
    ImpairSpec,
    Jitter,
    Loss,
    Rate,
    Reorder,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ENDLESS_RUN = 1 << 40
"""Datagrams of a run that does not end: years at any rate, and sums of a block of them stay below 2**63."""
RUNS_A_BLOCK = 128
"""Runs that are drawn at once; even, so that each block starts with the same state."""
CYCLES_TO_SKIP = 1000
"""Cycles of a chain by time that may pass unseen before its state is drawn afresh: it is independent then."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a burst's datagrams, one row a delivered copy, in the order of delivery."""

    index: Ints
    """Which datagram of the burst; a duplicate stands twice."""
    at: Floats
    """Delivery times, seconds, ascending, none before the datagram was sent."""
    corrupt: Bools
    """True where a bit must be flipped."""


@dataclass(slots=True)
class ImpairCounters:
    """What an impairer did, in datagrams: offered + duplicated == delivered + total_lost."""

    offered: int = 0
    delivered: int = 0
    duplicated: int = 0
    reordered: int = 0
    """Held back by ``reorder``."""
    corrupted: int = 0
    """Damaged and delivered; damaged and dropped ones stand in ``lost``."""
    lost: Counter[str] = field(default_factory=Counter)
    """Lost by reason: the name of the element, or ``backlog``."""

    @property
    def total_lost(self) -> int:
        """Lost for any reason."""
        return self.lost.total()

    @property
    def network_loss(self) -> float:
        """Share of the copies on the network that was lost; 0.0 before the first."""
        return self.total_lost / max(1, self.offered + self.duplicated)


class Impairer:
    """Decides the fate of datagrams by a spec. One for each direction that is impaired on its own.

    ``rng`` is the source of all its randomness (``default_rng([spec.seed, rank])`` gives each rank its own);
    without it the spec's seed alone. ``origin``: the time on the caller's clock from which scheduled bursts
    count.
    """

    def __init__(
        self, spec: ImpairSpec, rng: np.random.Generator | None = None, *, origin: float = 0.0
    ) -> None:
        self.spec = spec
        self.counters = ImpairCounters()
        streams = _Streams(spec.seed if rng is None else int(rng.integers(1 << 63)))
        self._losses = [
            (element.name, make(element, streams[element.name], origin, spec.seed))
            for element in spec.elements
            if (make := _LOSSES.get(type(element)))
        ]
        self._streams = streams
        rate = spec.get(Rate)
        self._queue = Queue(rate) if rate else None
        self._duplicate = spec.get(Duplicate)
        self._corrupt = spec.get(Corrupt)
        self._delay = _delays(spec, streams)
        self._reorder = spec.get(Reorder)
        self._bursts = [process for _, process in self._losses if isinstance(process, _LossInBursts)]
        self._only_bursts = len(self._bursts) == len(spec.elements)

    def apply(self, sizes: Ints, now: float | Floats) -> Fate:
        """Decide the fate of n datagrams of ``sizes`` bytes, offered at ``now``: one time or n ascending."""
        at = np.full(len(sizes), now) if np.ndim(now) == 0 else np.array(now, np.float64)
        index = np.arange(len(sizes))
        self.counters.offered += len(index)
        index, at = self._lose(index, at)
        index, at = self._copy(index, at)
        if self._queue is not None:
            kept, at = self._queue.admit(sizes[index], at)
            index = self._drop("rate", kept, index)
        index, at, corrupt = self._damage(index, at)
        at = self._late(at)
        self.counters.delivered += len(index)
        if len(at) > 1 and bool((at[1:] < at[:-1]).any()):
            order = np.argsort(at, kind="stable")
            index, at, corrupt = index[order], at[order], corrupt[order]
        return Fate(index, at, corrupt)

    def quiet(self, now: float) -> bool:
        """Nothing befalls what is offered at ``now``: the spec has only scheduled bursts, and none is on."""
        return self._only_bursts and all(process.loss_at(now) == 0.0 for process in self._bursts)

    def pass_by(self, count: int) -> None:
        """Count ``count`` datagrams that were offered while it was ``quiet``."""
        self.counters.offered += count
        self.counters.delivered += count

    def damage(self, data: npt.NDArray[np.uint8], starts: Ints, sizes: Ints) -> None:
        """Flip one random bit in each datagram: ``sizes`` bytes at ``starts`` in ``data``."""
        flips = self._streams["flips"]
        where = starts + (flips.random(len(starts)) * sizes).astype(np.int64)
        data[where] ^= np.uint8(1) << flips.integers(0, 8, len(starts), dtype=np.uint8)

    def lose(self, reason: str, count: int) -> None:
        """Count ``count`` datagrams as lost that had been meant to be delivered."""
        self.counters.lost[reason] += count
        self.counters.delivered -= count

    def _lose(self, index: Ints, at: Floats) -> tuple[Ints, Floats]:
        if not self._losses:
            return index, at
        lost = np.zeros(len(index), np.bool_)
        for name, process in self._losses:
            hit = process.lost(at) & ~lost
            self.counters.lost[name] += int(np.count_nonzero(hit))
            lost |= hit
        kept = ~lost
        return index[kept], at[kept]

    def _copy(self, index: Ints, at: Floats) -> tuple[Ints, Floats]:
        if self._duplicate is None:
            return index, at
        twice = self._streams[Duplicate.name].random(len(index)) < self._duplicate.p
        self.counters.duplicated += int(np.count_nonzero(twice))
        copies = twice + np.int64(1)
        return np.repeat(index, copies), np.repeat(at, copies)

    def _damage(self, index: Ints, at: Floats) -> tuple[Ints, Floats, Bools]:
        if self._corrupt is None:
            return index, at, np.zeros(len(index), np.bool_)
        hit = self._streams[Corrupt.name].random(len(index)) < self._corrupt.p
        if self._corrupt.deliver:
            self.counters.corrupted += int(np.count_nonzero(hit))
            return index, at, hit
        return self._drop("corrupt", ~hit, index), at[~hit], np.zeros(len(index) - int(hit.sum()), np.bool_)

    def _drop(self, reason: str, kept: Bools, index: Ints) -> Ints:
        self.counters.lost[reason] += len(index) - int(np.count_nonzero(kept))
        return index[kept]

    def _late(self, at: Floats) -> Floats:
        at = at + self._delay(len(at))
        if self._reorder is not None:
            held = self._streams[Reorder.name].random(len(at)) < self._reorder.p
            self.counters.reordered += int(np.count_nonzero(held))
            at += held * self._reorder.by_s
        return at


class Queue:
    """A link behind a finite first-in first-out queue that drops at its tail (``Rate``).

    A work-conserving server: datagram i leaves at d_i = max(a_i, d_(i-1)) + s_i * 8 / bps (Lindley 1952). In
    a busy period bytes are counted as an integer from its start: times do not depend on the cut into bursts.
    """

    def __init__(self, rate: Rate) -> None:
        self.bps = rate.bps
        self.queue_bytes = rate.queue_bytes
        self._start = 0.0  # of the busy period, seconds
        self._taken = 0  # bytes since then

    @property
    def free_at(self) -> float:
        """The time at which all that was admitted has left."""
        return self._start + self._taken * 8 / self.bps

    def backlog(self, now: float) -> float:
        """Bytes that wait or are in service at ``now``."""
        if now >= self.free_at:
            return 0.0
        return self._taken - (now - self._start) * self.bps / 8

    def admit(self, sizes: Ints, at: Floats) -> tuple[Bools, Floats]:
        """Offer datagrams at ascending times; (which were taken (n,), departure times of these)."""
        if len(sizes) == 0 or at[0] == at[-1]:
            return self._admit_at_once(sizes, float(at[0]) if len(at) else 0.0)
        left = self._departures(sizes, at)
        before = np.concatenate(([self.free_at], left[:-1]))
        backlog = np.maximum(before - at, 0.0) * self.bps / 8
        if not (backlog + sizes > self.queue_bytes).any():
            self._start, self._taken = float(left[-1]), 0
            return np.ones(len(sizes), np.bool_), left
        # A drop changes all that comes after it: no closed form, so one arrival after the other.
        steps = [self._admit_at_once(sizes[i : i + 1], float(at[i])) for i in range(len(sizes))]
        return np.concatenate([kept for kept, _ in steps]), np.concatenate([left for _, left in steps])

    def _departures(self, sizes: Ints, at: Floats) -> Floats:
        """Lindley's recursion unrolled: d_i = C_i + max(d_before, max over j <= i of (a_j - C_(j-1)))."""
        work = np.cumsum(sizes) * 8 / self.bps
        begin = np.maximum.accumulate(at - (work - sizes * 8 / self.bps))
        departures: Floats = work + np.maximum(begin, self.free_at)
        return departures

    def _admit_at_once(self, sizes: Ints, now: float) -> tuple[Bools, Floats]:
        backlog = self.backlog(now)
        if backlog == 0.0:
            self._start, self._taken = now, 0
        kept = _fitting(sizes, self.queue_bytes - backlog)
        total = np.cumsum(sizes[kept])
        left: Floats = self._start + (self._taken + total) * 8 / self.bps
        self._taken += int(total[-1]) if len(total) else 0
        return kept, left


class _Streams(dict[str, np.random.Generator]):
    """A random stream for each name, made when it is first asked for (a generator costs 20 us)."""

    def __init__(self, entropy: int) -> None:
        super().__init__()
        self._entropy = entropy

    def __missing__(self, name: str) -> np.random.Generator:
        return self.setdefault(name, np.random.default_rng([self._entropy, zlib.crc32(name.encode())]))


class _LossProcess(Protocol):
    def lost(self, at: Floats) -> Bools:
        """Which of the datagrams that are offered at ascending times ``at`` (n,) are lost (n,)."""


class _UniformLoss:
    def __init__(self, element: Loss, rng: np.random.Generator, origin: float, seed: int) -> None:
        self._p = element.p
        self._rng = rng

    def lost(self, at: Floats) -> Bools:
        hit: Bools = self._rng.random(len(at)) < self._p
        return hit


class _Chain:
    """Two states in turn, as runs whose lengths are drawn in blocks; positions are datagrams or seconds."""

    def __init__(self, start: float, bad_first: bool, draw: Callable[[bool, int], npt.NDArray[Any]]) -> None:
        self._draw = draw
        self._bad_first = bad_first
        self._ends: npt.NDArray[Any] = np.array([], draw(True, 0).dtype)
        self.horizon = start  # end of the last run that was drawn

    def bad(self, positions: npt.NDArray[Any]) -> Bools:
        """State at ascending positions (n,)."""
        while self.horizon <= positions[-1]:
            self._extend()
        run = np.searchsorted(self._ends, positions, "right")
        # Whole pairs of past runs go, so that run 0 of what is kept has the same state.
        past = int(run[0]) & ~1
        self._ends = self._ends[past:]
        bad: Bools = (run & 1) == (0 if self._bad_first else 1)
        return bad

    def _extend(self) -> None:
        lengths = np.empty(RUNS_A_BLOCK, self._ends.dtype)
        lengths[0::2] = self._draw(self._bad_first, RUNS_A_BLOCK // 2)
        lengths[1::2] = self._draw(not self._bad_first, RUNS_A_BLOCK // 2)
        ends = self.horizon + np.cumsum(lengths)
        self._ends = np.concatenate((self._ends, ends.astype(self._ends.dtype)))
        self.horizon = self._ends[-1].item()


class _LossByDatagram:
    """Gilbert-Elliott by the datagram: geometric run lengths; starts in the stationary law."""

    def __init__(self, element: GilbertElliott, rng: np.random.Generator, origin: float, seed: int) -> None:
        self._element = element
        self._rng, self._runs = rng.spawn(2)
        self._offered = 0
        self._chain = _Chain(0, bool(self._runs.random() < element.p / (element.p + element.r)), self._draw)

    def lost(self, at: Floats) -> Bools:
        if len(at) == 0:
            return np.zeros(0, np.bool_)
        bad = self._chain.bad(np.arange(self._offered, self._offered + len(at)))
        self._offered += len(at)
        return self._rng.random(len(at)) < np.where(bad, self._element.bad, self._element.good)

    def _draw(self, bad: bool, count: int) -> Ints:
        leave = self._element.r if bad else self._element.p
        if leave == 0.0:
            return np.full(count, ENDLESS_RUN, np.int64)
        return np.minimum(self._runs.geometric(leave, count), ENDLESS_RUN).astype(np.int64)


class _LossByTime:
    """Gilbert-Elliott by time: exponential run lengths; starts, in the stationary law, at first use."""

    def __init__(
        self, element: GilbertElliottTime, rng: np.random.Generator, origin: float, seed: int
    ) -> None:
        self._element = element
        self._rng, self._runs = rng.spawn(2)
        self._chain: _Chain | None = None

    def lost(self, at: Floats) -> Bools:
        if len(at) == 0:
            return np.zeros(0, np.bool_)
        cycle = self._element.burst_s + self._element.gap_s
        if self._chain is None or at[0] > self._chain.horizon + CYCLES_TO_SKIP * cycle:
            bad_first = bool(self._runs.random() < self._element.burst_s / cycle)
            self._chain = _Chain(float(at[0]), bad_first, self._draw)
        bad = self._chain.bad(at[:1] if at[0] == at[-1] else at)
        return self._rng.random(len(at)) < np.where(bad, self._element.bad, self._element.good)

    def _draw(self, bad: bool, count: int) -> Floats:
        return self._runs.exponential(self._element.burst_s if bad else self._element.gap_s, count)


class _LossInBursts:
    """Scheduled bursts. The loss of burst k is a function of (seed, k), whoever asks and whenever; what is offered between two
    draws nothing."""

    def __init__(self, element: Bursts, rng: np.random.Generator, origin: float, seed: int) -> None:
        self._element = element
        self._rng = rng
        self._start = origin + element.start_s
        self._seed = seed
        self._known: tuple[int, float] = (-1, 0.0)  # the last burst asked for and its loss

    def lost(self, at: Floats) -> Bools:
        if len(at) == 0 or at[0] == at[-1]:
            loss = self.loss_at(float(at[0])) if len(at) else 0.0
            return self._rng.random(len(at)) < loss if loss else np.zeros(len(at), np.bool_)
        since = at - self._start
        number = np.floor(since / self._element.every_s)
        inside = (number >= 0) & (since - number * self._element.every_s < self._element.length_s)
        hit = np.zeros(len(at), np.bool_)
        for k in np.unique(number[inside]):
            where = inside & (number == k)
            hit[where] = self._rng.random(int(where.sum())) < self._level(int(k))
        return hit

    def loss_at(self, now: float) -> float:
        since = now - self._start
        number = math.floor(since / self._element.every_s)
        if number < 0 or since - number * self._element.every_s >= self._element.length_s:
            return 0.0
        return self._level(number)

    def _level(self, k: int) -> float:
        if self._known[0] != k:
            low, high = self._element.loss
            self._known = (k, low + (high - low) * float(np.random.default_rng([self._seed, k]).random()))
        return self._known[1]


_LOSSES: dict[type, Callable[[Any, np.random.Generator, float, int], _LossProcess]] = {
    Loss: _UniformLoss,
    GilbertElliott: _LossByDatagram,
    GilbertElliottTime: _LossByTime,
    Bursts: _LossInBursts,
}


def _delays(spec: ImpairSpec, streams: dict[str, np.random.Generator]) -> Callable[[int], Floats | float]:
    """Delays of n datagrams, seconds, none negative."""
    delay, jitter = spec.get(Delay), spec.get(Jitter)
    base = delay.delay_s if delay else 0.0
    if jitter is None:
        return lambda count: base
    rng, scale = streams[Jitter.name], jitter.jitter_s
    if jitter.dist == "normal":
        return lambda count: np.maximum(base + scale * rng.standard_normal(count), 0.0)
    return lambda count: np.maximum(base + scale * (2 * rng.random(count) - 1), 0.0)


def _fitting(sizes: Ints, room: float) -> Bools:
    """Which datagrams of one instant a queue with ``room`` bytes takes: in order, each that still fits.

    One pass takes the longest prefix that fits and drops what is larger than the room left. A second one is
    only needed when something smaller comes after what was dropped (a burst's last datagram).
    """
    if sizes.sum() <= room:
        return np.ones(len(sizes), np.bool_)
    kept = np.zeros(len(sizes), np.bool_)
    candidates = np.arange(len(sizes))
    while len(candidates):
        total = np.cumsum(sizes[candidates])
        count = int(np.searchsorted(total, room, "right"))
        kept[candidates[:count]] = True
        room -= int(total[count - 1]) if count else 0
        candidates = candidates[count:]
        candidates = candidates[sizes[candidates] <= room]
    return kept
