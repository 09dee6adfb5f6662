"""What a burst benchmark is to do: arms, cases, and the closed form of the passes that a bound needs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from dblp.collectives.algorithms.grid import chunk_bytes
from dblp.collectives.presets import Preset, preset, presets
from dblp.errors import ConfigError
from dblp.transport.config import CHUNK_ALIGN_BYTES, ETHERNET_DATAGRAM_BYTES, HEADER_BYTES, TransportConfig
from dblp.transport.policy import Consistency, Policy

MLT = "mlt"
ARMS = (MLT, "dblp", "default", "optireduce", "ltp", "exact")
"""All presets, in the order of the table."""
PHASED = ("mlt", "dblp")
"""Arms whose budgets are P_low and P_low + 40 points."""
VIRTUAL, SOCKETS = "virtual", "sockets"
RANKS = 4
"""Three workers and a server; arms without a server have four workers."""
STAR = "ps(serve_only,whole)"
"""DBLP's set-up: rank 0 serves only, reduces, then broadcasts."""
WARM_UP_ROUNDS = 8
"""Rounds in which round trips are learned and windows open."""
MEASURED_ROUNDS = 3
"""Rounds after the warm-up: a clean one, the burst, a clean one."""
PAUSE_S = 0.02
"""Between rounds: computing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstPlan:
    """Cases and the network that they meet."""

    modes: tuple[str, ...]
    arms: tuple[str, ...]
    losses: tuple[float, ...]
    """q: share of the datagrams that is lost while a burst round lasts."""
    lows: tuple[float, ...]
    """P_low, of each leg."""
    nbytes: int
    bursts: int
    """Burst rounds of each case. Each begins with fresh connections and a warm-up, since in DBLP's experiment hundreds of rounds
    lie between two of them; a clean round before it and one after it are measured too."""
    rate_bps: float
    delay_s: float
    """Of each link of the star; a datagram crosses two."""
    loss: float
    """Share of the datagrams that is lost outside bursts too."""
    control_too: bool
    """Bursts lose control datagrams like the others."""
    seed: int

    def __post_init__(self) -> None:
        for loss in self.losses:
            if not 0.0 < loss < 1.0:
                raise ConfigError(f"--losses {loss:g}: a share between 0 and 1, such as 0.6")
        for low in self.lows:
            preset("dblp", low=low)
        if self.bursts < 1:
            raise ConfigError(f"--bursts {self.bursts}: one burst round or more")
        if not 0 <= self.seed < 1 << 31:
            raise ConfigError(f"--seed {self.seed}: a whole number of 0..{(1 << 31) - 1}")
        if (
            not 0.0 < self.rate_bps < math.inf
            or not 0.0 <= self.delay_s < math.inf
            or not 0.0 <= self.loss < 1.0
        ):
            raise ConfigError(
                "--link needs a rate above 0, --delay none below 0, --base-loss a share in [0, 1)"
            )
        if unknown := set(self.arms) - set(presets()):
            raise ConfigError(f"--arms: no preset {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")

    def cases(self, mode: str) -> Iterator[Case]:
        """All cases of a mode. Arms that have no P_low run once for each q."""
        for loss in self.losses:
            for arm in self.arms:
                for low in self.lows if arm in PHASED else self.lows[:1]:
                    yield Case(mode=mode, arm=arm, loss=loss, low=low)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, for the workers."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> BurstPlan:
        """Back from ``to_json``."""
        lists = ("modes", "arms", "losses", "lows")
        return cls(**{**values, **{name: tuple(values[name]) for name in lists}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One arm in one burst loss."""

    mode: str
    arm: str
    loss: float
    low: float

    @property
    def preset(self) -> Preset:
        """The arm's preset."""
        return preset(self.arm, low=self.low) if self.arm in PHASED else preset(self.arm)

    @property
    def policy(self) -> Policy:
        """The policy of all its rounds: that of a tolerant phase where the arm has phases, since bursts are rounds of one. The
        Hadamard transform is left out: it changes neither what is sent nor when."""
        base = self.preset.tolerant or self.preset.policy
        algorithm = STAR if base.algorithm.startswith("ps") else base.algorithm
        return replace(base, algorithm=algorithm, hadamard=False)

    @property
    def config(self) -> TransportConfig:
        """The transport as the arm wants it."""
        return TransportConfig(**self.preset.transport)

    def passes(self, nbytes: int) -> int:
        """Passes that the arm's bounds need in a burst, over both legs (``passes``)."""
        return sum(passes(self.loss, share, chunks) for share, chunks in self._legs(nbytes))

    def _legs(self, nbytes: int) -> list[tuple[float, int]]:
        """The share that each leg's messages may miss, and their chunks."""
        policy = self.policy
        star = policy.algorithm == STAR
        message = nbytes if star else -(-nbytes // RANKS)
        largest = (ETHERNET_DATAGRAM_BYTES - HEADER_BYTES) // CHUNK_ALIGN_BYTES * CHUNK_ALIGN_BYTES
        chunks = -(-message // chunk_bytes(message, largest, policy))
        copies = RANKS - 1 if policy.consistency is Consistency.AGREED else 1
        return [(policy.reduce_leg_budget, chunks), (policy.gather_leg_budget / copies, chunks)]


def passes(loss: float, share: float, chunks: int) -> int:
    """Passes after which a message misses at most ``share`` of its chunks, if each pass sends all that is missing and loses
    ``loss`` of it: loss^m <= share, so m = ceil(ln share / ln loss). An exact message needs less than one chunk missing."""
    return math.ceil(math.log(share or 1.0 / chunks) / math.log(loss))
