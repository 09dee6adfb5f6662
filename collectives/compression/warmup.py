"""DGC's warm-up: in the first epochs more is sent, and less in each that follows (Lin et al., arXiv 1712.01887, section 3.3)."""

from __future__ import annotations

from dblp.errors import ConfigError
from dblp.transport.spec import Kind

PAPER = (0.25, 0.0625, 0.015625, 0.004)
"""The paper's sparsities 75, 93.75, 98.4375 and 99.6 %, as shares that are sent."""


def _parse(text: str) -> str | tuple[float, ...]:
    return text if text in ("paper", "geometric") else tuple(float(part) for part in text.split("/"))


def _valid(value: object) -> bool:
    if isinstance(value, str):
        return value in ("paper", "geometric")
    return isinstance(value, tuple) and bool(value) and all(0.0 < share <= 1.0 for share in value)


SCHEDULE = Kind(
    "paper, geometric, or shares in (0, 1] such as 0.25/0.06/0.015",
    _parse,
    _valid,
    lambda value: value if isinstance(value, str) else "/".join(repr(float(share)) for share in value),
)


def check(warmup: int, schedule: str | tuple[float, ...]) -> None:
    """Raise ConfigError if a list has another length than the warm-up."""
    if isinstance(schedule, tuple) and len(schedule) != warmup:
        raise ConfigError(
            f"warmup={warmup} with a schedule of {len(schedule)} shares: one share for each epoch is needed"
        )


def ratio_in(epoch: int, ratio: float, warmup: int, schedule: str | tuple[float, ...]) -> float:
    """The share that is sent in an epoch, counted from 0; ``ratio`` after ``warmup`` epochs, and never less.

    ``paper``: its four shares, stretched over the warm-up. ``geometric``: ratio^((i + 1) / (warmup + 1)), the released code's
    formula. A tuple: one share for each epoch.
    """
    if epoch >= warmup:
        return ratio
    if schedule == "geometric":
        return float(ratio ** ((epoch + 1) / (warmup + 1)))
    shares = PAPER if isinstance(schedule, str) else schedule
    return max(ratio, shares[epoch * len(shares) // warmup])
