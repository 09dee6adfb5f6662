"""GraVAC: the compression factor that makes training fastest, found while training (Tyagi and Swany, arXiv 2305.12201).

In each round theta_min is applied to gradient and residual once, and the further levels to its result (multi-level
compression): level i is the largest of what level i - 1 would send. So the gain of every level is known in every iteration, and
one level, or everything, is sent; ``search.py`` chooses. There is one residual: whatever is not sent, and what a loss policy let
go missing of it. Gains are of what is sent, whether it arrives or not.

Decisions rest on figures that all ranks have: the ranks' norms and times of an iteration are summed beside the rounds of the next
one (``iterations.py``). docs/compression.md has the differences from the paper and from the released code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dblp.collectives.compression.adaptive import Adaptive
from dblp.collectives.compression.base import Array, Job, widened
from dblp.collectives.compression.entries import Indices
from dblp.collectives.compression.iterations import Iterations, stored
from dblp.collectives.compression.link import Link
from dblp.collectives.compression.redsync import by_bisection
from dblp.collectives.compression.search import DENSE, Rule, Search, ladder
from dblp.collectives.compression.selection import best_of, largest, sampled
from dblp.collectives.compression.sparse import INDICES, VALUES, share_of
from dblp.errors import ConfigError
from dblp.transport.spec import Kind, arg, choice

THETA = Kind(
    "a compression factor of at least 1, such as 10",
    float,
    lambda value: isinstance(value, (int, float)) and 1.0 <= value <= 1e9,
    lambda value: repr(float(value)),
)
STEP = Kind(
    "a factor from 1.1 to 1000",
    float,
    lambda value: isinstance(value, (int, float)) and 1.1 <= value <= 1000.0,
    lambda value: repr(float(value)),
)
PART = Kind(
    "a share in (0, 1]",
    float,
    lambda value: isinstance(value, (int, float)) and 0.0 < value <= 1.0,
    lambda value: repr(float(value)),
)
WINDOW = Kind(
    "a number of iterations", int, lambda value: isinstance(value, int) and 1 <= value <= 10**6, str
)
COMPRESSOR = choice("topk", "dgc", "redsync", "randomk")
_FIGURES = 5
"""Before the levels' norms: level, whether there is a time, the time, whether there are norms, the norm of everything."""


@dataclass(frozen=True, slots=True)
class GraVAC(Adaptive):
    """Sends a level of the ladder from theta_min to theta_max, or everything."""

    name: ClassVar[str] = "gravac"
    op: ClassVar[str] = "sum"
    theta_min: float = arg("theta_min", THETA, default=10.0)
    """Least factor: one element in so many is sent (the released code's min_cf of 0.1)."""
    theta_max: float = arg("theta_max", THETA, default=10_000.0)
    """Largest (max_cf 0.0001)."""
    scaling: str = arg("scaling", choice("exponential", "geometric"), default="exponential")
    step: float = arg("step", STEP, default=2.0)
    """Of the scaling (cfstepsize 0.5)."""
    epsilon: float = arg("epsilon", PART, default=0.75)
    """Gain below which a level gives way."""
    omega: float = arg("omega", PART, default=0.05)
    """Difference of two levels' CT, as a share, that counts as saturation."""
    window: int = arg("window", WINDOW, default=25)
    """Iterations of theta_min at the start, and of each trial."""
    alpha: float = arg("alpha", PART, default=0.05)
    """Weight of a new norm in the moving averages."""
    compressor: str = arg("compressor", COMPRESSOR, default="topk")
    """How elements are selected: exactly, by DGC's sampled threshold, by RedSync's bisection, or at random."""
    values: str = arg("values", VALUES, default="full")
    indices: str = arg("indices", INDICES, default="plain")
    gain: str = arg("gain", choice("gradient", "residual"), default="gradient")
    """What a level's norm is compared with: the gradient's, as in the released code (a gain of 1 at most: more is residual that
    catches up), or that of gradient and residual together."""

    def __post_init__(self) -> None:
        Adaptive.__post_init__(self)
        if self.theta_max < self.theta_min:
            raise ConfigError(f"gravac: theta_max={self.theta_max:g} is below theta_min={self.theta_min:g}")
        if self.compressor == "randomk" and (self.values != "full" or self.indices != "plain"):
            raise ConfigError(
                f"gravac(compressor=randomk) with values={self.values}, indices={self.indices}: values are summed in full and no "
                "index is sent; leave both out"
            )

    @property
    def thetas(self) -> tuple[float, ...]:
        """The factors of the levels."""
        return ladder(self.theta_min, self.theta_max, self.scaling, self.step)

    @property
    def rule(self) -> Rule:
        """What the search goes by."""
        return Rule(
            levels=len(self.thetas),
            epsilon=self.epsilon,
            omega=self.omega,
            window=self.window,
            alpha=self.alpha,
        )

    def figures(self, factors: Mapping[str, Array]) -> dict[str, float]:
        """``theta`` that is sent (1: everything), its ``gain``, ``steps`` so far, ``search_steps`` (warm-up and trials),
        ``settled``."""
        state = factors.get(".gravac")
        if state is None or state.size != self.rule.size + 1:
            return {}
        search, level = Search(self.rule, state[1:]), int(state[0])
        return {
            "theta": 1.0 if level == DENSE else self.thetas[level],
            "gain": 1.0 if level == DENSE else search.gain(level),
            "steps": search.steps,
            "search_steps": min(search.steps, self.window) + search.searched,
            "settled": float(search.settled),
        }

    # decisions

    async def decide(self, job: Job, link: Link, course: Iterations) -> None:
        """Advance the search by what all ranks have told."""
        state = stored(job, self.name, self.rule.size + 1)
        search = Search(self.rule, state[1:])
        if (told := self.heard(job)) is not None and told.size == _FIGURES + self.rule.levels:
            level, timed, seconds, normed, raw, *norms = told
            unknown = not normed
            search.hear(
                round(level / job.world_size),
                seconds / timed if timed else 0.0,
                np.nan if unknown else raw / normed,
                np.array(norms) / (normed or 1.0),
            )
        job.measured["gravac before"], level = state[0], search.choose()
        job.factors[f".{self.name}"] = np.concatenate([[level], search.state()])

    def tell(self, job: Job, link: Link, course: Iterations) -> Array:
        """Level, time and norms of the last iteration on this rank; none of the first, there is no last one."""
        last = course.last
        if last is None:
            return np.empty(0)
        known = last.norms is not None and not last.spoiled
        norms = last.norms if last.norms is not None and known else np.zeros(1 + self.rule.levels)
        timed = last.length_s > 0.0
        level = float(job.measured["gravac before"])
        return np.concatenate([[level, float(timed), last.length_s, float(known)], norms])

    def choose(self, job: Job) -> None:
        """The level of this iteration."""
        level = int(stored(job, self.name, self.rule.size + 1)[0])
        job.notes["level"] = level
        job.notes["whole"] = level == DENSE
        job.notes["lanes"] = level != DENSE and self.compressor == "randomk"

    # what is sent

    def compress(self, job: Job) -> Array:
        """All levels' norms first, then what the level sends."""
        job.notes["nested"] = [] if job.spoiled else self._nested(job)
        if not job.spoiled:
            job.notes["iteration"].add_norms(self._norms(job))
        if not job.notes["lanes"]:
            return Adaptive.compress(self, job)
        job.notes["iteration"].spoiled |= job.spoiled
        if job.spoiled:
            return np.full(self.target(job), np.nan, job.memory.dtype)
        drawn = self.select(job)
        lanes: Array = job.values[drawn]
        job.values[drawn] = 0
        return lanes

    def target(self, job: Job) -> int:
        """Elements of the level."""
        return share_of(job.bucket.size, 1.0 / self.thetas[job.notes["level"]])

    def select(self, job: Job) -> Indices:
        """Those of the level."""
        indices: Indices = job.notes["nested"][job.notes["level"]]
        return indices

    def whole_type(self, job: Job) -> str:
        """Drawn elements are summed in the residual's type."""
        return job.memory.dtype.name if job.notes["lanes"] else Adaptive.whole_type(self, job)

    def summed(self, job: Job) -> bool:
        """Drawn elements need no indices."""
        return bool(job.notes["lanes"]) or Adaptive.summed(self, job)

    def decode_whole(self, job: Job, lanes: Array) -> Array:
        """Everything, or what was drawn."""
        if not job.notes["lanes"]:
            return Adaptive.decode_whole(self, job, lanes)
        out = job.zeros()
        out[self._drawn(job, self.target(job))] = lanes
        return out

    def decode_lost(self, job: Job, lanes: Array) -> Array:
        """The same of what was lost."""
        return self.decode_whole(job, lanes) if job.notes["lanes"] else Adaptive.decode_lost(self, job, lanes)

    def _nested(self, job: Job) -> list[Indices]:
        """The indices of each level, ascending: theta_min's of all elements, the others' of the level's before."""
        sizes = [share_of(job.bucket.size, 1.0 / theta) for theta in self.thetas]
        if self.compressor == "randomk":
            return [self._drawn(job, size) for size in sizes]
        found = [self._first(job, sizes[0])]
        for size in sizes[1:]:
            found.append(best_of(job.values, found[-1], size))
        return found

    def _first(self, job: Job, count: int) -> Indices:
        if self.compressor == "dgc":
            return sampled(job.values, count, job.own_rng())
        return by_bisection(job.values, count) if self.compressor == "redsync" else largest(job.values, count)

    def _drawn(self, job: Job, count: int) -> Indices:
        """The first ``count`` of the elements that all ranks draw alike: a level's are among those of the level before."""
        if "drawn" not in job.notes:
            size = job.bucket.size
            most = share_of(size, 1.0 / self.theta_min)
            rng = job.shared_rng()
            job.notes["drawn"] = rng.choice(size, most, replace=False) if size else np.empty(0, np.int64)
        return np.sort(np.asarray(job.notes["drawn"][:count], np.int64))

    def _norms(self, job: Job) -> Array:
        """The norm that levels are compared with, then each level's: sums over the parameters of L2 norms, as in the released
        code."""
        whole = job.values
        if self.gain == "gradient":
            whole = widened(job.gradient, job.kind, job.memory.dtype)
        # Not np.linalg.norm: its library wakes threads for each of these short vectors, which takes longer than all the rest.
        raw = sum(float(np.sqrt(np.square(part, dtype=np.float64).sum())) for part in job.bucket.cut(whole))
        parts = len(job.bucket.parts)
        norms = [raw]
        for indices in job.notes["nested"]:
            owner = np.searchsorted(job.bucket.bounds, indices, side="right") - 1
            squares = np.square(job.values[indices], dtype=np.float64)
            norms.append(float(np.sqrt(np.bincount(owner, squares, minlength=parts)).sum()))
        return np.array(norms)
