"""NetSenseML: as much of the gradient as the network takes without a queue (Wang, Li, Wu, Chen and Kutscher, arXiv 2506.16235).

In each iteration the data in flight are compared with 0.9 of the bandwidth-delay product (``sensing.py``): more of them are
congestion, and the share that is sent falls to what fits; else it rises by a step, twice as large each time in a row, or half way
to what fits. What is sent goes through the paper's pipeline, in another order: the smaller part of each parameter's elements is
pruned, the largest of the rest are selected, and their values are rounded to half precision; a small share sets in motion all
three, a larger one less. The paper's abstract names quantisation first. Rounding keeps the order of magnitudes, so the same
elements are selected either way but for ties that it makes and what half precision cannot hold; and only what is sent is rounded.
Where everything fits, or would be no more data than its entries, everything is sent as it is: compression is off.

Under a loss policy the bytes that count are those that were posted: up to the budget's share of them may not have come, so the
bandwidth may be taken for so much more than it is.

All ranks decide alike: their times, delays and bytes are reduced beside the rounds (``iterations.py``). docs/compression.md has
the differences from the paper and from the authors' code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dblp.collectives.compression import entries
from dblp.collectives.compression.adaptive import Adaptive
from dblp.collectives.compression.base import Array, Job
from dblp.collectives.compression.entries import Indices
from dblp.collectives.compression.iterations import Iterations, stored
from dblp.collectives.compression.link import Link
from dblp.collectives.compression.selection import LEAST_SAMPLE, largest
from dblp.collectives.compression.sensing import Sample, Sensing
from dblp.collectives.compression.sparse import INDICES, RATIO, share_of
from dblp.transport.spec import SHARE, TIME, Kind, arg, choice

PART = Kind(
    "a share in (0, 1)",
    float,
    lambda value: isinstance(value, (int, float)) and 0.0 < value < 1.0,
    lambda value: repr(float(value)),
)
FILLED = Kind(
    "a share in (0, 1] of the bandwidth-delay product",
    float,
    lambda value: isinstance(value, (int, float)) and 0.0 < value <= 1.0,
    lambda value: repr(float(value)),
)
PRUNED = Kind(
    "a share in [0, 1)",
    float,
    lambda value: isinstance(value, (int, float)) and 0.0 <= value < 1.0,
    lambda value: repr(float(value)),
)
_MOST_DOUBLINGS = 8
"""Of the step by which the share rises: from 0.001 to a quarter at once."""
_GENTLE = 0.95
"""The authors' factor: the share falls by this at least."""
_BLIND = 0.25
"""Of the share, a step at most: more would overshoot what small shares are, and fall again."""
_HALF_WAY = 0.5
"""To what fits, by the last rounds' bandwidth, at once: steps alone take too long to find that a network has become faster."""
_ALIKE = 1.0 - 1e-9
"""Of the bytes of an all-reduce: entries of as many are no saving."""
_PROBE_EVERY = 50
"""Iterations from one measurement of the delay to the next, where the transport tells none."""
_SCALARS = 4
_SIZE = _SCALARS + Sensing.SIZE
_FIGURES = 6
"""Time, delay, bytes, crossings, elements, share."""
_HEARD_AFTER = 2
"""Iterations after which a decision rests on one, see ``iterations.py``."""


class _Control:
    """The share, and what it is set by. State: one vector, zeros at first."""

    def __init__(self, state: Array) -> None:
        self.share, self._streak, self._delay, self._delay_before = (float(x) for x in state[:_SCALARS])
        self.sensing = Sensing(state[_SCALARS:])

    def state(self) -> Array:
        """What the constructor takes."""
        scalars = [self.share, self._streak, self._delay, self._delay_before]
        return np.concatenate([scalars, self.sensing.state()])

    def delay_s(self, told_s: float) -> float:
        """The less of the last two that were measured, the newest of them ``told_s``: one may have met a queue."""
        if told_s != self._delay:
            self._delay, self._delay_before = told_s, self._delay
        return min(self._delay, self._delay_before or self._delay)

    def off(self) -> None:
        """Everything is sent."""
        self.share = self._streak = 0.0

    def begin(self, share: float) -> None:
        """From everything to a share."""
        self.share, self._streak = share, 0.0

    def fall(self, share: float) -> None:
        """To a share, if it is not less already."""
        self.share, self._streak = min(self.share or 1.0, share), 0.0

    def rise(self, step: float, fits: float, most: float) -> None:
        """By a step that is twice as large each time in a row, ``_BLIND`` of the share at most; half way to what fits if that is
        more."""
        if self.share:
            step *= 2.0 ** min(self._streak, _MOST_DOUBLINGS)
            step = max(min(step, _BLIND * self.share), _HALF_WAY * (fits - self.share))
            self.share = min(self.share + step, most, 1.0)
            self._streak += 1


@dataclass(frozen=True, slots=True)
class NetSense(Adaptive):
    """``share`` below is the part of a bucket's elements that is sent."""

    name: ClassVar[str] = "netsense"
    op: ClassVar[str] = "max"
    threshold: float = arg("threshold", FILLED, default=0.9)
    """Of the bandwidth-delay product: more data are congestion."""
    decrease: float = arg("decrease", PART, default=0.1)
    """Least factor by which the share falls at once; it falls to what fits, and by ``_GENTLE`` at least."""
    increase: float = arg("increase", PART, default=0.001)
    """Step by which the share rises, the first time in a row."""
    least: float = arg("least", RATIO, default=0.001)
    """Least share."""
    quantise: float = arg("quantise", SHARE, default=0.25)
    """Share below which values are sent in half precision."""
    prune: float = arg("prune", PRUNED, default=0.5)
    """Part of each parameter's elements, the smallest, that is not sent where the share is below one minus this; 0: none."""
    allow: float = arg("allow", TIME, default=0.0)
    """Time that data may take though the least delay is less: on a network of a machine room, whose delay is next to nothing, all
    would be congestion."""
    indices: str = arg("indices", INDICES, default="plain")
    values: str = arg("values", choice("full", "fp16"), default="full")
    """``fp16``: quantised whatever the share."""

    def figures(self, factors: Mapping[str, Array]) -> dict[str, float]:
        """``ratio`` that is sent (1: compression is off), ``bandwidth_bps``, ``delay_s``, ``bdp_bytes``, ``queue_bytes``."""
        state = factors.get(".netsense")
        if state is None or state.size != _SIZE:
            return {}
        sensing = Sensing(state[_SCALARS:])
        return {
            "ratio": _Control(state).share or 1.0,
            "bandwidth_bps": sensing.bandwidth_bps,
            "delay_s": sensing.delay_s,
            "bdp_bytes": sensing.bdp_bytes,
            "queue_bytes": sensing.queue_bytes,
        }

    # decisions

    async def decide(self, job: Job, link: Link, course: Iterations) -> None:
        """Sense, and set the share."""
        control = _Control(stored(job, self.name, _SIZE))
        job.measured["netsense before"] = control.share
        if (told := self.heard(job)) is not None and told.size == _FIGURES:
            waited, delay, data, crossings, elements, share = told.tolist()
            seconds = 0.0 if waited >= 0.0 else -waited
            delay = max(control.delay_s(delay), self.allow)
            sample = Sample(data_bytes=data, seconds=seconds, crossings=crossings, delay_s=delay)
            # In a job's first rounds congestion windows open: the first iteration's time says nothing of the network.
            if job.iteration > _HEARD_AFTER and control.sensing.hear(sample):
                self._set(control, job, elements, share)
        await self._probe(link, course)
        job.factors[f".{self.name}"] = control.state()

    def _set(self, control: _Control, job: Job, elements: float, sent_share: float) -> None:
        """The share of the next iteration. ``sent_share``: of the iteration that was sensed (0: everything); ``elements``: of
        the model."""
        fits = self.threshold * control.sensing.bdp_bytes
        others = job.world_size - 1
        whole = 2.0 * others / job.world_size * elements * job.gradient.itemsize
        each = others * elements  # of these, as many bytes as an entry has
        most = self._room(job, whole, each)
        if not others or whole <= fits:
            control.off()
        elif control.sensing.data_bytes <= fits:
            control.rise(self.increase, self._room(job, fits, each), most)
        elif not control.share and not sent_share:
            control.begin(min(max(self._room(job, fits, each), self.least), most))
        elif sent_share:
            factor = min(max(fits / control.sensing.data_bytes, self.decrease), _GENTLE)
            control.fall(max(sent_share * factor, self.least))
        if control.share and control.share * each * self._entry_bytes(job, control.share) >= _ALIKE * whole:
            control.off()  # the same bytes bring everything

    def _entry_bytes(self, job: Job, share: float) -> float:
        """Of an entry with a plain index, where ``share`` is sent."""
        size = max(job.bucket.size, 1)
        width = 2 if self._halves(share) else job.memory.dtype.itemsize
        return (entries.plain_bytes(size, size, width) - entries.HEADER.itemsize) / size

    def _room(self, job: Job, nbytes: float, each: float) -> float:
        """The largest share whose entries are ``nbytes`` at most. Values get wider at ``quantise``: shares above it may not fit
        where those just below do."""
        below = float(np.nextafter(self.quantise, 0.0))
        wide, narrow = (nbytes / max(each * self._entry_bytes(job, share), 1.0) for share in (1.0, below))
        return max(wide, min(narrow, below))

    async def _probe(self, link: Link, course: Iterations) -> None:
        """Where the transport does not tell the delay: the time of a round of one number, after one that ranks meet in."""
        if link.world_size == 1 or (course.count - 1) % _PROBE_EVERY:
            return
        course.probed_s = link.least_delay_s()
        known = await link.sum(np.array([course.probed_s]), "min")
        if known[0] > 0.0:
            return
        began = link.now_s
        await link.sum(np.zeros(1))
        course.probed_s = link.now_s - began

    def tell(self, job: Job, link: Link, course: Iterations) -> Array:
        """Of the last iteration: the time less its sign, so that the largest is of the rank that waited least; delay, bytes,
        crossings; elements and share, which are alike on all ranks."""
        last = course.last
        if last is None:
            return np.empty(0)
        seconds, crossings = last.busy()
        delay = link.least_delay_s() or course.probed_s
        share = float(job.measured["netsense before"])
        return np.array([-seconds, delay, last.data_bytes, crossings, last.elements, share])

    def choose(self, job: Job) -> None:
        """The share of this iteration."""
        share = _Control(stored(job, self.name, _SIZE)).share
        job.notes["share"] = share
        job.notes["whole"] = not share

    # what is sent

    def halves(self, job: Job) -> bool:
        """The last step of the pipeline, on what was selected."""
        return self._halves(job.notes["share"])

    def _halves(self, share: float) -> bool:
        return self.values == "fp16" or share < self.quantise

    def target(self, job: Job) -> int:
        """Of the bucket, by the share."""
        return share_of(job.bucket.size, job.notes["share"])

    def select(self, job: Job) -> Indices:
        """Prune, then the largest of what is left."""
        return largest(self._pruned(job), self.target(job))

    def _pruned(self, job: Job) -> Array:
        """The values, with zeros where they are among the smaller ones of their matrix or kernel."""
        if not self.prune or job.notes["share"] >= 1.0 - self.prune:
            return job.values
        values = job.values.copy()
        for part, flat in zip(job.bucket.parts, job.bucket.cut(values), strict=True):
            if len(part.shape) > 1 and part.size > 1:
                sample = np.abs(flat[:: max(part.size // LEAST_SAMPLE, 1)])
                rank = min(int(self.prune * sample.size), sample.size - 1)
                flat[np.abs(flat) < np.partition(sample, rank)[rank]] = 0
        return values
