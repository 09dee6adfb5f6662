"""Accordion (Agarwal et al., arXiv 2010.16248): top-k by parameter, with more in critical phases than in tolerant ones.

The phases are those of a controller, as for budgets (``budget.py``, ``phases.py``): ``attach`` makes the one that ``controller``
gives, unless it is given another. A parameter is critical where its gradient's norm has changed by ``eta`` or more from one
check to the next, and, if ``attach`` knows the optimiser, where the learning rate has changed; in the first interval all are.

Differences from the paper: what is compared is the root mean square over an interval of the norms of a rank's own gradients, of
the rank where it is largest, not the norm of a sum over an epoch; all ranks decide from the same numbers, none is asked by the
others; what of a parameter goes dense: ``shares.py``.
``critical`` and ``tolerant`` are what the released code keeps with top-k; its other compressor, PowerSGD with rank 2 and 1, isn't
built here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dblp.collectives.budget import BudgetController, Budgets, Interval
from dblp.collectives.compression.base import Job, Part
from dblp.collectives.compression.shares import Shares
from dblp.collectives.compression.sparse import INDICES, RATIO, VALUES
from dblp.collectives.phases import ETA, Detector, LearningRateChange, NormChange, Phase
from dblp.errors import ConfigError
from dblp.transport.spec import Kind, arg

CHANGE = Kind(
    "a relative change above 0",
    float,
    lambda value: isinstance(value, (int, float)) and 0.0 < value < float("inf"),
    lambda value: repr(float(value)),
)
EPOCHS = Kind("a whole number from 1", int, lambda value: isinstance(value, int) and 1 <= value <= 10**9, str)


@dataclass(frozen=True, slots=True)
class Accordion(Shares):
    """Two shares, by phase."""

    name: ClassVar[str] = "accordion"
    follows_phases: ClassVar[bool] = True
    critical: float = arg("critical", RATIO, default=0.99)
    """Share of a parameter's elements that is sent in its critical phases."""
    tolerant: float = arg("tolerant", RATIO, default=0.1)
    """The same in tolerant ones."""
    eta: float = arg("eta", CHANGE, default=ETA)
    epochs: int = arg("epochs", EPOCHS, default=10)
    """Epochs from check to check (the paper's 10; 5 for its LSTM)."""
    values: str = arg("values", VALUES, default="full")
    indices: str = arg("indices", INDICES, default="plain")

    def __post_init__(self) -> None:
        Shares.__post_init__(self)
        if self.critical < self.tolerant:
            raise ConfigError(
                f"accordion: critical={self.critical:g} is below tolerant={self.tolerant:g}: critical phases send more"
            )

    def controller(self, *, learning_rate: bool, budget: float = 0.0) -> BudgetController:
        """A controller of its own phases; ``learning_rate``: it will be told; ``budget``: of the loss policy, in all phases."""
        detector: Detector = NormChange(self.eta, layers=True)
        if learning_rate:
            detector = detector | LearningRateChange()
        budgets = Budgets(low=budget, high=budget)
        return BudgetController(detector, budgets, interval=Interval(epochs=self.epochs), average_norms=True)

    def ratio_of(self, job: Job, part: Part) -> float:
        """The share of a parameter in this round."""
        return self.critical if job.phases.of(part.name) is Phase.CRITICAL else self.tolerant
