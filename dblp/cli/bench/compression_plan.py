"""What ``dblp bench compression`` measures, by default and as its options say."""

from __future__ import annotations

from dataclasses import dataclass

from dblp.collectives.compression.base import Bucket, Part
from dblp.transport.policy import Bounded, Exact, Policy

METHODS = (
    "topk(0.01)",
    "topk(0.001,indices=delta)",
    "dgc(0.001,indices=delta,nesterov=true,warmup=4)",
    "redsync(0.01)",
    "randomk(0.01)",
    "threshold(0.01,indices=delta)",
    "fp16",
    "bf16",
    "int8",
    "int4",
    "sign",
    "powersgd(4)",
)
"""All methods but those that move between others as the training or the network asks for; with ratios at which they are used."""
RATES_MBPS = (100.0, 1_000.0, 10_000.0)
ROW = 1000
"""Rows and columns of the matrices that stand for a model, each with a bias of as many elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionPlan:
    """One run."""

    methods: tuple[str, ...] = METHODS
    ranks: int = 4
    rates_bps: tuple[float, ...] = tuple(rate * 1e6 for rate in RATES_MBPS)
    """Of each rank's link."""
    delay_s: float = 100e-6
    """Of each link; a datagram crosses two."""
    loss: float = 0.0
    """Share of datagrams that the network loses."""
    budget: float = 0.0
    """Of each contribution's chunks; 0: exact rounds."""
    melem: int = 1
    """Millions of elements of the gradient whose rounds are timed."""
    data: str = "digits"
    data_dir: str = ""
    model: str = "cnn"
    optimizer: str = "sgd"
    lr: float = 0.1
    batch: int = 64
    steps: int = 0
    """Of each training; 0: none is run."""
    epoch_steps: int = 0
    """Steps of an epoch: what a warm-up counts."""
    seeds: tuple[int, ...] = (0,)

    @property
    def policy(self) -> Policy:
        """Of the compressed rounds."""
        return Bounded(self.budget) if self.budget else Exact()

    @property
    def bucket(self) -> Bucket:
        """``melem`` matrices with their biases."""
        shapes = [shape for _ in range(self.melem) for shape in ((ROW, ROW), (ROW,))]
        return Bucket([Part(f"p{index}", shape) for index, shape in enumerate(shapes)])
