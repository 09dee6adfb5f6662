"""Paths: which of several local ports, each an ECMP entropy, a burst takes; by name, one way a file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dblp.transport.config import TransportConfig
from dblp.transport.paths.base import ANY_CHUNKS, PathChoice, Usable
from dblp.transport.paths.ethereal import EtherealChoice, Leaf
from dblp.transport.paths.peer_paths import PathState
from dblp.transport.paths.reps import RepsChoice
from dblp.transport.paths.single import SingleChoice
from dblp.transport.paths.spray import RandomChoice, SprayChoice


class PathChoices:
    """The choices of one rank, one object a peer; those of ``ethereal`` share what they know of a leaf."""

    def __init__(self, config: TransportConfig, rank: int, rng: np.random.Generator) -> None:
        self._config = config
        self._rank = rank
        self._rng = rng
        self._leaves: dict[int, Leaf] = {}

    def to(self, peer: int) -> PathChoice:
        """The choice for a peer, as ``config.path_choice`` names it."""
        return REGISTRY[self._config.path_choice](self, peer)

    def _single(self, peer: int) -> PathChoice:
        return SingleChoice(self._config.paths, self._rank, peer)

    def _spray(self, peer: int) -> PathChoice:
        return SprayChoice(self._config.paths, self._config.path_chunks)

    def _random(self, peer: int) -> PathChoice:
        return RandomChoice(self._config.paths, self._child(), self._config.path_chunks)

    def _reps(self, peer: int) -> PathChoice:
        return RepsChoice(self._config.paths, self._child(), self._config.path_chunks)

    def _ethereal(self, peer: int) -> PathChoice:
        paths, name = self._config.paths, peer // self._config.leaf_ranks
        if name not in self._leaves:
            self._leaves[name] = Leaf(paths, int(self._rng.integers(paths)))
        return EtherealChoice(self._leaves[name], paths, self._config.path_chunks)

    def _child(self) -> np.random.Generator:
        return np.random.default_rng(self._rng.integers(1 << 63))


REGISTRY: dict[str, Callable[[PathChoices, int], PathChoice]] = {
    "spray": PathChoices._spray,
    "random": PathChoices._random,
    "reps": PathChoices._reps,
    "ethereal": PathChoices._ethereal,
    "single": PathChoices._single,
}
"""By the name in ``TransportConfig.path_choice``."""

__all__ = [
    "ANY_CHUNKS",
    "REGISTRY",
    "EtherealChoice",
    "Leaf",
    "PathChoice",
    "PathChoices",
    "PathState",
    "RandomChoice",
    "RepsChoice",
    "SingleChoice",
    "SprayChoice",
    "Usable",
]
