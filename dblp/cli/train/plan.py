"""What a training run is to do: options, checked once."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dblp.cli.train.policies import POLICIES
from dblp.cli.train.recipes import recipe_of
from dblp.errors import ConfigError

DEFAULT_IMPAIR = "bursts(loss=0.6..0.9,length=200ms,every=1s),seed(7)"
"""60 to 90 % of the datagrams are lost for 200 ms in each second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """One comparison: every arm with every seed, one after the other, in the same worker processes."""

    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    ranks: int
    data: str
    data_dir: str
    model: str
    epochs: int
    batch: int
    optimizer: str
    lr: float
    impair: str
    budget: float
    stop: str

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ConfigError(
                f"--ranks {self.ranks}: 2 or more are needed, one rank has nobody to reduce with"
            )
        if self.epochs < 1:
            raise ConfigError(f"--epochs {self.epochs}: at least 1 is needed")
        if self.batch < self.ranks or self.batch % self.ranks:
            raise ConfigError(
                f"--batch {self.batch}: samples a step over all ranks, a multiple of --ranks {self.ranks}"
            )
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"--lr {self.lr}: a learning rate above 0 is needed")
        recipe_of(self.data, self.model)
        for make in POLICIES.values():
            make(self.budget, self.stop)

    @property
    def folder(self) -> Path | None:
        """Folder of the data set's files, if one was named."""
        return Path(self.data_dir) if self.data_dir else None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, for the workers."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainPlan:
        """Back from ``to_json``."""
        return cls(**{**values, "arms": tuple(values["arms"]), "seeds": tuple(values["seeds"])})
