"""GraVAC's search for the compression factor that makes training fastest (Tyagi and Swany, arXiv 2305.12201), without arithmetic
on gradients: what it is told of an iteration, and which level it chooses for the next one.

A level is a compression factor, theta: one element in theta is sent. Level 0 is theta_min. The gain of a level is the moving
average of the norm of what it would send over that of the gradient (or of gradient and residual), 1 at most: what is sent holds
residual too, and where that makes more of it than the gradient, nothing is being lost. Its compression throughput (CT) is gain
over the time of an iteration in which it is sent. Both averages have the same weights, so the gain needs no start-up correction.

Course: for a window theta_min is sent. Then the next level is tried for a window, if its gain reaches epsilon; if its CT is
higher than the last level's, it is kept and the next one tried. The search ends where two levels' CT differ by less than omega
(the more compressed one is kept: saturation), where CT falls, or at theta_max. In every iteration, a level whose gain is below
epsilon gives way to theta_min, and where that is too, everything is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

DENSE = -1
"""The level at which everything is sent."""
_SCALARS = 7


def ladder(theta_min: float, theta_max: float, scaling: str, step: float) -> tuple[float, ...]:
    """The factors to try, rising from ``theta_min``; ``theta_max`` is the last one.

    ``geometric``: each is ``step`` times the one before (10, 20, 40, 80, ...). ``exponential``: theta_min times ``step`` to the
    power 1, 2, 4, 8, ... (10, 20, 40, 160, 2560, ...).
    """
    found, power = [theta_min], 1
    while True:
        factor = theta_min * step**power
        if factor >= theta_max:
            break
        found.append(factor)
        power = power + 1 if scaling == "geometric" else 2 * power
    return (*found, theta_max) if theta_max > theta_min else tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When a level will do, and when the search ends."""

    levels: int
    epsilon: float
    omega: float
    window: int
    alpha: float

    @property
    def size(self) -> int:
        """Elements of a search's state."""
        return _SCALARS + 2 * self.levels + self.window


class Search:
    """See the module's docstring. All of its state is one float64 vector (``Rule.size``,), zeros at first, which may be saved."""

    def __init__(self, rule: Rule, state: Array) -> None:
        self.rule = rule
        scalars, rest = state[:_SCALARS], state[_SCALARS:]
        self.steps, self.searched, self.position, trial, settled, timed = (int(x) for x in scalars[:-1])
        self.trial: int | None = trial - 1 if trial else None
        """The level that is tried."""
        self.settled = bool(settled)
        """The search is over: ``position`` is kept."""
        self._raw = float(scalars[-1])
        self._norms = rest[: rule.levels].copy()
        self._ct = rest[rule.levels : 2 * rule.levels].copy()
        self._times: list[float] = rest[2 * rule.levels : 2 * rule.levels + timed].tolist()

    def state(self) -> Array:
        """What the constructor takes."""
        scalars = [self.steps, self.searched, self.position, 0 if self.trial is None else self.trial + 1]
        scalars += [int(self.settled), len(self._times)]
        times = np.zeros(self.rule.window)
        times[: len(self._times)] = self._times
        return np.concatenate([np.array([*scalars, self._raw]), self._norms, self._ct, times])

    @property
    def warming_up(self) -> bool:
        """theta_min is sent whatever its gain."""
        return self.steps < self.rule.window

    def gain(self, level: int) -> float:
        """Of a level, in [0, 1]; 1 if nothing is known of it, or there is nothing to send."""
        return min(float(self._norms[level]) / self._raw, 1.0) if self._raw > 0.0 else 1.0

    def throughput(self, level: int) -> float:
        """CT of a level, gain times iterations a second; 0 if it has not been measured."""
        return float(self._ct[level])

    def hear(self, level: int, seconds: float, raw: float, norms: Array) -> None:
        """An iteration in which ``level`` was sent took so long (0: not known); the norms of everything and of each level
        (levels,), means over the ranks; NaN where they are not known."""
        self.steps += 1
        self.searched += level == self.trial
        if np.isfinite(raw):
            keep = 1.0 - self.rule.alpha if self._raw > 0.0 else 0.0
            self._raw = keep * self._raw + (1.0 - keep) * raw
            self._norms = keep * self._norms + (1.0 - keep) * norms
        if level == self._watched and seconds > 0.0 and len(self._times) < self.rule.window:
            self._times.append(seconds)

    def choose(self) -> int:
        """The level of the next iteration."""
        if self.warming_up:
            return 0
        self._advance()
        for level in (self._watched, 0):
            if self._passes(level):
                return level
        return DENSE

    @property
    def _watched(self) -> int:
        return self.position if self.trial is None else self.trial

    def _passes(self, level: int) -> bool:
        return self.gain(level) >= self.rule.epsilon

    def _advance(self) -> None:
        """Judge a trial whose window is over, begin the next."""
        if self.trial is not None and not self._passes(self.trial):
            self.trial = None
            self._times.clear()
        if len(self._times) == self.rule.window:
            watched = self._watched
            # The median: a test or a checkpoint between two iterations is no time of the level's.
            self._ct[watched] = self.gain(watched) / float(np.median(self._times))
            self._times.clear()
            if self.trial is not None:
                self._judge(self.trial)
        following = self.position + 1
        self.settled |= following == self.rule.levels
        if self.settled or self.trial is not None or not self._ct[self.position]:
            return
        if self._passes(self.position) and self._passes(following):
            self.trial = following
            self._times.clear()

    def _judge(self, trial: int) -> None:
        new, old = float(self._ct[trial]), float(self._ct[self.position])
        saturated = abs(new - old) < self.rule.omega * old
        if saturated or new > old:
            self.position = trial
        self.settled |= saturated or new <= old
        self.trial = None
