"""The table at the end of ``dblp train``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from rich import box
from rich.table import Table

from dblp.cli.train.outcome import Outcome
from dblp.cli.train.policies import EXACT, GLOO
from dblp.units import format_seconds


def summary_table(outcomes: Sequence[Outcome]) -> Table:
    """One row an arm; means over its seeds; all-reduce percentiles over the rounds of all seeds."""
    seeds = sorted({outcome.seed for outcome in outcomes})
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
        caption="mean of seeds " + ", ".join(map(str, seeds)) if len(seeds) > 1 else None,
    )
    table.add_column("\narm", style="bold", overflow="fold")  # a method's string may be long
    headings = (
        "test\naccuracy",
        "\ntime",
        "all-reduce\np50 / p99",
        "network\nloss",
        "gradient\nmissing",
        "retrans-\nmitted",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for arm, of_arm in _by_arm(outcomes).items():
        table.add_row(arm, *_cells(of_arm))
    return table


def perplexities(outcomes: Sequence[Outcome]) -> str | None:
    """Each arm's mean perplexity in one line, as the table has no room for it; None for images."""
    return _line(outcomes, "test perplexity", ".3f", lambda outcome: outcome.test_perplexity)


def sizes(outcomes: Sequence[Outcome]) -> str | None:
    """How much smaller each arm's gradients became in one line; None without compression."""
    return _line(
        outcomes, "gradients smaller by a factor of", ".1f", lambda outcome: outcome.compression_ratio
    )


def _line(
    outcomes: Sequence[Outcome], what: str, form: str, figure: Callable[[Outcome], float | None]
) -> str | None:
    """Each arm's mean of a figure in one line; None where no arm has it."""
    means = {arm: _mean_of(of_arm, figure) for arm, of_arm in _by_arm(outcomes).items()}
    known = [f"{arm} {mean:{form}}" for arm, mean in means.items() if mean is not None]
    return f"{what}: {', '.join(known)}" if known else None


def verdict(outcomes: Sequence[Outcome]) -> str | None:
    """How far the lossy arms' accuracies lie from the exact arm's, a line each; None if there is nothing to compare."""
    accuracy = {
        arm: float(np.mean([outcome.test_accuracy for outcome in of_arm]))
        for arm, of_arm in _by_arm(outcomes).items()
    }
    lossy = [arm for arm in accuracy if arm not in (GLOO, EXACT)]
    if EXACT not in accuracy or not lossy:
        return None
    count = len({outcome.seed for outcome in outcomes})
    return "\n".join(
        f"{arm} - {EXACT}: {(accuracy[arm] - accuracy[EXACT]) * 100:+.2f} points of test accuracy"
        f" ({count} seed{'s' * (count > 1)})"
        for arm in lossy
    )


def _by_arm(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    arms = dict.fromkeys(outcome.arm for outcome in outcomes)
    return {arm: [outcome for outcome in outcomes if outcome.arm == arm] for arm in arms}


def _cells(outcomes: Sequence[Outcome]) -> list[str]:
    times = np.concatenate([outcome.allreduce_s for outcome in outcomes])
    accuracy = _mean([outcome.test_accuracy for outcome in outcomes])
    wall_s = _mean([outcome.wall_s for outcome in outcomes])
    return [
        _share(accuracy),
        "-" if wall_s is None else f"{wall_s:.1f} s",
        " / ".join(format_seconds(float(np.percentile(times, level))) for level in (50, 99)),
        _share(_mean_of(outcomes, lambda outcome: outcome.network_loss)),
        _share(_mean_of(outcomes, lambda outcome: outcome.missing_share)),
        _share(_mean_of(outcomes, lambda outcome: outcome.retransmitted_share)),
    ]


def _mean_of(outcomes: Sequence[Outcome], of: Callable[[Outcome], float | None]) -> float | None:
    return _mean([value for outcome in outcomes if (value := of(outcome)) is not None])


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.2f} %"
