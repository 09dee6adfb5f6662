"""Loss budget and compression ratio, decided together (beyond the papers): the quickest step whose cost in gradient is allowed.

Both buy time with gradient: a budget spares repairs, which cost round trips where the network loses; a ratio spares bytes, which
cost time where it is slow. ``JointController`` measures the path and the gradient, predicts the time of a step for every pair
of a small grid, and takes the quickest whose share of gradient energy lost or withheld stays under a cap, one for critical and
one for tolerant phases.

The model of a step, with N ranks, n elements of b bytes, and e bytes an entry (index and value)::

    T(r, p) = c(r) + 8 W(r) (1 + s) / R + d (1 + j)
    W(r)    = 2 (N - 1) / N b n  for r >= 1/2 (an all-reduce),  (N - 1) e r n  below (an all-gather of entries)
    m(r, p) = what a message may miss: 0.9 p in the all-reduce's first leg,  p / (N - 1) in the all-gather
    s       = max(0, l - m) / (1 - l)      what is sent again, over what is sent
    j       = passes of repair until what is missing fits: the least with l^(1 + j) <= max(m, 1 / K), K chunks a message
    E(r, p) = 1 - (1 - w(r)) (1 - min(l', p))      energy lost or withheld, times the bias of earlier predictions

R, d and l are the path's rate (bit/s), its time that does not depend on bytes (s) and its loss (a share), of the rank where each
is worst; l' = l in an all-reduce and 1 - (1 - l)^(N - 1) in an all-gather, whose blocks count if all have them. c(r) is what
encoding takes, 0 for all. w(r) is the share of energy behind the largest r n elements, from a sample of the values
(``compression/curve.py``): a residual that grows shows in it, and makes the controller send more.

Measured from reports alone: bytes and durations of the last iterations give R and d by least squares where their sizes differ
enough; so one iteration in ``PROBE_EVERY`` sends the next larger share. Where they don't, d stays and R is the best rate seen.

The cap. A choice must fit ``MARGIN`` of it by prediction, and may stay up to ``STAY_MARGIN``. Where more was measured than
predicted, the bias of the next predictions rises: a moving mean of measured over predicted, at least 1. From all to less it
goes by one step of the grid a check, because a residual takes time to grow.

All ranks decide alike: they reduce what they measured by MAX with the vector of ``BudgetController``, exact.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dblp.collectives.budget import BudgetController, Budgets, Interval, Vector
from dblp.collectives.compression.curve import RATIOS
from dblp.collectives.compression.shares import DENSE_FROM
from dblp.collectives.phases import Detector, Phase
from dblp.collectives.report import Report
from dblp.errors import ConfigError
from dblp.transport.fields import check_fields
from dblp.transport.policy import DEFAULT_GATHER_SHARE, Policy

BUDGETS = (0.0, 0.05, 0.1, 0.2, 0.4)
"""Budgets to choose from."""
MARGIN, STAY_MARGIN = 0.8, 0.9
"""Share of the cap that a prediction may fill, for a choice to be taken, and to be kept."""
GAIN = 0.05
"""Share of the predicted time that a change must save."""
PROBE_EVERY = 8
"""Iterations from one that sends a larger share to the next."""
WINDOW = 16
"""Iterations whose bytes and durations the path is estimated from."""
STRANGE, STRANGE_ROUNDS = 2.0, 2
"""How far off the expected time an iteration is strange, and how many in a row mean another path."""
COMPRESS_S_PER_MELEM = 0.004
"""Seconds that encoding and decoding a million elements take: about what ``topk`` needs (``dblp bench compression``)."""
_EPOCH, _CHECK = Interval(epochs=1), Interval(iterations=4)
_CHUNK_BYTES = 1392
"""About a chunk's payload on Ethernet."""
_SPREAD = 2.0
"""Largest over smallest bytes in the window from which on a line is put through them."""
_BIAS_HIGH, _BIAS_KEEP = 4.0, 0.7
"""Largest correction of predicted shares, and the weight of the corrections before."""
_LEAST_ENERGY = 1e-9
_OWN = 4 + len(RATIOS)
"""Entries that follow those of ``BudgetController``: negated rate, delay, loss, energy, and the curve."""
_NONE = -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The network as rounds see it, of the rank where it is worst."""

    rate_bps: float
    """Bits per second that a rank sends."""
    delay_s: float = 0.0
    """Seconds of a round that do not depend on its bytes."""
    loss: float = 0.0
    """Share of chunks that are lost when first sent, in [0, 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the next rounds do."""

    ratio: float = 1.0
    """Share of elements that is sent; 1: all, in an all-reduce."""
    budget: float = 0.0
    """Loss budget, end to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyCaps:
    """Largest shares of a gradient's energy (with the residual's) that a step may lose or withhold, each in (0, 1)."""

    low: float = 0.2
    """In critical phases."""
    high: float = 0.8
    """In tolerant ones, from ``low``."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0.0 < self.low <= self.high < 1.0:
            raise ConfigError(
                f"low={self.low!r}, high={self.high!r}: shares of energy with 0 < low <= high < 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """The formulas of this module's docstring."""

    ranks: int
    elements: int
    value_bytes: int = 4
    entry_bytes: float = 8.0
    compress_s_per_melem: float = COMPRESS_S_PER_MELEM

    def wire_bytes(self, ratio: float) -> float:
        """W: bytes that a rank sends first, without headers."""
        if ratio >= DENSE_FROM:
            return 2.0 * (self.ranks - 1) / self.ranks * self.value_bytes * self.elements
        return (self.ranks - 1) * self.entry_bytes * ratio * self.elements

    def may_miss(self, choice: Choice) -> float:
        """m: share of a message's chunks."""
        if choice.ratio >= DENSE_FROM:
            gather = DEFAULT_GATHER_SHARE * choice.budget
            return (choice.budget - gather) / (1.0 - gather)
        return choice.budget / max(self.ranks - 1, 1)

    def step_s(self, choice: Choice, path: Path) -> float:
        """T: seconds."""
        loss, missing = path.loss, self.may_miss(choice)
        nbytes = self.wire_bytes(choice.ratio)
        again = max(0.0, loss - missing) / (1.0 - loss)
        encode = 0.0 if choice.ratio >= DENSE_FROM else self.compress_s_per_melem * self.elements / 1e6
        return (
            encode
            + 8.0 * nbytes * (1.0 + again) / path.rate_bps
            + path.delay_s * (1 + self._passes(choice, path))
        )

    def energy(self, choice: Choice, path: Path, behind: float) -> float:
        """E without bias; ``behind``: w of the ratio."""
        withheld = 0.0 if choice.ratio >= DENSE_FROM else behind
        lost = path.loss if choice.ratio >= DENSE_FROM else 1.0 - (1.0 - path.loss) ** (self.ranks - 1)
        return 1.0 - (1.0 - withheld) * (1.0 - min(lost, choice.budget))

    def _passes(self, choice: Choice, path: Path) -> int:
        """j."""
        if path.loss <= 0.0:
            return 0
        chunks = max(self.wire_bytes(choice.ratio) / max(self.ranks - 1, 1) / _CHUNK_BYTES, 1.0)
        wanted = max(self.may_miss(choice), 1.0 / chunks)
        return max(0, math.ceil(math.log(wanted) / math.log(path.loss)) - 1) if wanted < 1.0 else 0


class PathEstimate:
    """Rate, delay and loss of the last ``WINDOW`` iterations."""

    def __init__(self) -> None:
        self.samples: deque[tuple[float, float, float, float]] = deque(maxlen=WINDOW)
        """Bytes, seconds, chunks sent and chunks lost, of each iteration."""
        self.delay_s = 0.0
        self.strange = 0
        """Iterations in a row that took more or less than ``STRANGE`` times what was to be expected."""

    def add(self, nbytes: float, seconds: float, chunks: float, lost: float) -> None:
        """One more iteration. After ``STRANGE_ROUNDS`` strange ones in a row the path is another: what was before goes."""
        if not (nbytes > 0.0 and seconds > 0.0):
            return
        path = self.path()
        self.samples.append((nbytes, seconds, chunks, lost))
        expected = seconds if path is None else path.delay_s + 8.0 * nbytes / path.rate_bps
        self.strange = self.strange + 1 if max(seconds / expected, expected / seconds) > STRANGE else 0
        if self.strange >= STRANGE_ROUNDS:
            while len(self.samples) > STRANGE_ROUNDS:
                self.samples.popleft()
            self.strange = 0

    def path(self) -> Path | None:
        """What they say, but for strange ones at the end; None without any."""
        known = list(self.samples)[: max(len(self.samples) - self.strange, 1)]
        if not known:
            return None
        nbytes, seconds, chunks, lost = np.array(known, np.float64).T
        rate = 8.0 * float((nbytes / np.maximum(seconds - self.delay_s, seconds / 10)).max())
        if nbytes.max() >= _SPREAD * nbytes.min():
            slope, intercept = np.polyfit(nbytes, seconds, 1)
            if slope > 0.0:
                rate, self.delay_s = 8.0 / float(slope), max(float(intercept), 0.0)
        loss = min(float(lost.sum() / max(chunks.sum(), 1.0)), 0.99)
        return Path(rate_bps=rate, delay_s=self.delay_s, loss=loss)


class JointController(BudgetController):
    """Decides budget and ratio for the rounds of a model that ``joint`` compresses. ``state_dict`` as of ``BudgetController``."""

    __slots__ = (
        "_bias", "_check_due", "_choice", "_estimate", "_expected", "_heard", "_running", "allowed", "caps", "check",
        "compress_s_per_melem", "predicted_s",
    )  # fmt: skip

    def __init__(
        self,
        detector: Detector,
        caps: EnergyCaps = EnergyCaps(),
        *,
        budgets: Sequence[float] = BUDGETS,
        interval: Interval = _EPOCH,
        check: Interval = _CHECK,
        compress_s_per_melem: float = COMPRESS_S_PER_MELEM,
    ) -> None:
        """``detector``: tells the phases, every ``interval``; ``check``: how often budget and ratio are decided anew;
        ``budgets``: to choose from. Raises ConfigError for what is none of these."""
        allowed = tuple(sorted({0.0, *map(float, budgets)}))
        super().__init__(detector, Budgets(low=0.0, high=allowed[-1]), interval=interval)
        if not isinstance(caps, EnergyCaps) or not isinstance(check, Interval):
            raise ConfigError(
                f"caps={caps!r}, check={check!r}: use dblp.EnergyCaps(...) and dblp.Interval(...)"
            )
        self.caps = caps
        self.check = check
        self.allowed = allowed
        self.compress_s_per_melem = compress_s_per_melem
        self.predicted_s: float | None = None
        """Of a step as it was last decided, in seconds; None before the first decision."""
        self._choice = Choice()
        self._estimate = PathEstimate()
        self._bias = 1.0
        self._expected: float | None = None  # share of energy, without bias, of the running choice
        self._check_due = False
        self._running = _Heard()
        self._heard = _Heard()

    @property
    def choice(self) -> Choice:
        """As last decided; all, without loss, before the first check."""
        return self._choice

    @property
    def energy_cap(self) -> float:
        """The cap of the running phase."""
        return self.caps.low if self.phases.model is Phase.CRITICAL else self.caps.high

    @property
    def ratio(self) -> float:
        """Share of elements that the rounds of the running iteration send."""
        place = RATIOS.index(self._choice.ratio)
        probes = place >= 2 and self._iteration % PROBE_EVERY == PROBE_EVERY - 1
        return RATIOS[place - probes]

    def policy(self, base: Policy, names: Sequence[str] = ()) -> Policy:
        """``base`` with the budget of now."""
        return replace(base, budget=self._choice.budget, gather_budget=None)

    # telling

    def begin_iteration(self) -> None:
        """An iteration begins."""
        super().begin_iteration()
        self._check_due = self.check.due(self.iteration, self._epoch, self._due)
        self._running = _Heard()

    def hear(self, report: Report) -> None:
        """A round of the running iteration has ended on this rank."""
        super().hear(report)
        self._running.add(report)

    def end_iteration(
        self, *, norm: float | None = None, layer_norms: Mapping[str, float] | None = None
    ) -> None:
        """The running iteration has ended."""
        super().end_iteration(norm=norm, layer_norms=layer_norms)
        heard = self._running
        self._estimate.add(heard.wire_bytes, heard.seconds, heard.chunks, heard.lost)
        if heard.nbytes:
            self._heard = heard
        self._running = _Heard()

    # deciding

    def vector_to_agree(self) -> Vector | None:
        """After an iteration that ends in a check of either kind: what all ranks reduce by MAX; else None."""
        if not (self._due or self._check_due):
            return None
        path, heard = self._estimate.path(), self._heard
        own = [_NONE] * _OWN
        if path is not None and heard.nbytes:
            own = [-path.rate_bps, path.delay_s, path.loss, heard.energy, *heard.curve]
        return np.array([*self._vector(), *own], np.float64)

    def decide(self, agreed: Vector) -> None:
        """Check, with the vector that all ranks have agreed on; raises as ``BudgetController.decide``."""
        super().decide(agreed[:-_OWN])
        rate, delay, loss, energy, *curve = agreed[-_OWN:].tolist()
        if math.isfinite(rate) and self._heard.nbytes:
            self._correct(energy)
            path = Path(rate_bps=-rate, delay_s=delay, loss=loss)
            self._choose(self._model(), path, dict(zip(RATIOS, curve, strict=True)))
        self._check_due = False

    def _correct(self, measured: float) -> None:
        """Compare the share of energy with what was expected of the choice that it was measured under."""
        seen = 1.0
        if self._expected is not None and self._expected > _LEAST_ENERGY:
            seen = min(max(measured / self._expected, 1.0), _BIAS_HIGH)
        self._bias = _BIAS_KEEP * self._bias + (1.0 - _BIAS_KEEP) * seen

    def _choose(self, model: StepModel, path: Path, curve: Mapping[float, float]) -> None:
        most = MARGIN * self.energy_cap

        def energy(choice: Choice) -> float:
            return min(self._bias * model.energy(choice, path, curve[choice.ratio]), 1.0)

        lowest = RATIOS[min(RATIOS.index(self._choice.ratio) + 1, len(RATIOS) - 1)]
        grid = [
            Choice(ratio=ratio, budget=budget)
            for ratio in RATIOS
            for budget in self.allowed
            if ratio >= lowest
        ]
        fitting = [choice for choice in grid if energy(choice) <= most] or [Choice()]
        best = min(fitting, key=lambda choice: (model.step_s(choice, path), -choice.ratio, choice.budget))
        now = model.step_s(self._choice, path)
        stays = energy(self._choice) <= STAY_MARGIN * self.energy_cap
        if not stays or model.step_s(best, path) < (1.0 - GAIN) * now:
            self._choice = best
        self._expected = model.energy(self._choice, path, curve[self._choice.ratio])
        self.predicted_s = model.step_s(self._choice, path)
        self._made.clear()

    def _model(self) -> StepModel:
        heard = self._heard
        return StepModel(
            ranks=heard.ranks,
            elements=max(heard.nbytes // 4, 1),
            compress_s_per_melem=self.compress_s_per_melem,
        )

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        """All that decisions depend on, as plain values."""
        own = {
            "choice": asdict(self._choice),
            "bias": self._bias,
            "expected": self._expected,
            "check_due": self._check_due,
            "samples": [list(sample) for sample in self._estimate.samples],
            "delay_s": self._estimate.delay_s,
            "strange": self._estimate.strange,
            "heard": self._heard.state(),
        }
        return {**super().state_dict(), "joint": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` gave; raises ConfigError if it is not usable here."""
        try:
            own = state["joint"]
            choice = Choice(**{name: float(value) for name, value in own["choice"].items()})
            bias, check_due = float(own["bias"]), bool(own["check_due"])
            expected = None if own["expected"] is None else float(own["expected"])
            estimate = PathEstimate()
            for nbytes, seconds, chunks, lost in own["samples"]:
                estimate.samples.append((float(nbytes), float(seconds), float(chunks), float(lost)))
            estimate.delay_s, estimate.strange = float(own["delay_s"]), int(own["strange"])
            heard = _Heard.from_state(own["heard"])
            RATIOS.index(choice.ratio)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"this is no state of a JointController: {error!r}") from None
        super().load_state_dict(state)
        self._choice, self._bias, self._expected = choice, bias, expected
        self._check_due, self._estimate, self._heard = check_due, estimate, heard


@dataclass(slots=True)
class _Heard:
    """What the reports of one iteration say."""

    nbytes: int = 0
    """Of the gradients."""
    wire_bytes: int = 0
    seconds: float = 0.0
    """Of its longest round: rounds of several buckets overlap."""
    chunks: int = 0
    lost: int = 0
    ranks: int = 0
    energy: float = 0.0
    """Share lost or withheld, mean over the rounds, weighed by bytes."""
    curve: tuple[float, ...] = (0.0,) * len(RATIOS)
    """The same of what lies behind the largest elements."""

    def add(self, report: Report) -> None:
        """One more round."""
        share = report.nbytes / max(self.nbytes + report.nbytes, 1)
        lost = report.energy_withheld
        if not report.carries:  # what was lost is not in the residual
            lost = 1.0 - (1.0 - lost) * (1.0 - report.energy_lost)
        self.energy += share * (lost - self.energy)
        curve = report.energy_curve or (0.0,) * len(RATIOS)
        self.curve = tuple(old + share * (new - old) for old, new in zip(self.curve, curve, strict=True))
        self.nbytes += report.nbytes
        self.wire_bytes += report.bytes_sent
        self.seconds = max(self.seconds, report.duration_s)
        self.chunks += report.chunks_sent + report.chunks_resent
        self.lost += report.chunks_resent + report.missing_chunks
        self.ranks = report.world_size

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "curve": list(self.curve)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> _Heard:
        """Back; raises what ``load_state_dict`` catches."""
        curve = tuple(float(value) for value in state["curve"])
        if len(curve) != len(RATIOS):
            raise ValueError(f"a curve of {len(curve)} ratios, here are {len(RATIOS)}")
        return cls(**{**state, "curve": curve})
