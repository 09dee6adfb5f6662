"""What an experiment came to: flat records, and the JSON that reports and comparisons are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.sim.lab.claim import add, covered, offered_and_dropped
from dblp.sim.lab.counters import Counters
from dblp.sim.lab.ratios import ratios_of
from dblp.sim.lab.run import Block, Run, Trained

Floats = npt.NDArray[np.float64]

LEVELS = {"p50_s": 50.0, "p90_s": 90.0, "p99_s": 99.0, "p999_s": 99.9}
"""Percentiles of a record, by its field."""
_GB = 1e9


def document_of(run: Run) -> dict[str, Any]:
    """Everything but the common head of a command's JSON: experiment, failed, means, bursts, rounds, ratios, records.

    Times are seconds since the schedule began.
    """
    records = records_of(run)
    return {
        "experiment": run.experiment.record(),
        "failed": run.failed or None,
        "means": run.means,
        "bursts": [[s.start_s - run.start_s, s.end_s - run.start_s] for s in run.spans],
        "rounds": rounds_of(run, records),
        "ratios": ratios_of(run, records),
        "records": records,
    }


def records_of(run: Run) -> list[dict[str, Any]]:
    """A record for each arm and size, or for each arm's training over all seeds, in the order of the experiment."""
    arms = [arm.name for arm in run.experiment.arms]
    if run.experiment.train is not None:
        return [
            _trained(run, arm, of_arm) for arm in arms if (of_arm := [t for t in run.trained if t.arm == arm])
        ]
    pairs = [(arm, nbytes) for nbytes in run.experiment.sizes for arm in arms]
    found = (
        (arm, nbytes, [b for b in run.blocks if (b.arm, b.nbytes) == (arm, nbytes)]) for arm, nbytes in pairs
    )
    return [_measured(run, arm, nbytes, blocks) for arm, nbytes, blocks in found if blocks]


def rounds_of(run: Run, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every timed round, by arm and size: ``start_s``, ``seconds`` and ``hit`` (a burst lay over it)."""
    return [
        {"arm": record["arm"], "bytes": record["bytes"], **_series(run, record["arm"], record["bytes"])}
        for record in records
        if record["bytes"] is not None
    ]


def _series(run: Run, arm: str, nbytes: int) -> dict[str, Any]:
    blocks = [b for b in run.blocks if (b.arm, b.nbytes) == (arm, nbytes)]
    starts, seconds = _joined(blocks)
    return {
        "start_s": (starts - run.start_s).tolist(),
        "seconds": seconds.tolist(),
        "hit": hit(run, starts, seconds).tolist(),
    }


def hit(run: Run, starts: Floats, seconds: Floats) -> npt.NDArray[np.bool_]:
    """Rounds (n,) that a burst lay over, for however short a time."""
    found = np.zeros(len(starts), np.bool_)
    for span in run.spans:
        found |= (starts < span.end_s) & (starts + seconds > span.start_s)
    return found


def _joined(blocks: Sequence[Block]) -> tuple[Floats, Floats]:
    return np.concatenate([b.starts for b in blocks]), np.concatenate([b.seconds for b in blocks])


def _measured(run: Run, arm: str, nbytes: int, blocks: Sequence[Block]) -> dict[str, Any]:
    starts, seconds = _joined(blocks)
    in_burst = hit(run, starts, seconds)
    bounded = sum(block.bounded for block in blocks)
    moved = nbytes * run.experiment.topology.hosts * len(seconds)
    return {
        **_head(run, arm, nbytes, len(seconds)),
        **_percentiles(seconds),
        "max_s": float(seconds.max()),
        "mean_s": float(seconds.mean()),
        "tail_ratio": _tail(seconds),
        "burst_rounds": int(in_burst.sum()),
        "burst_p50_s": float(np.percentile(seconds[in_burst], 50)) if in_burst.any() else None,
        "burst_max_s": float(seconds[in_burst].max()) if in_burst.any() else None,
        "clear_p50_s": float(np.percentile(seconds[~in_burst], 50)) if not in_burst.all() else None,
        **_losses(run, [block.counters for block in blocks]),
        "missing_share": sum(block.missing for block in blocks) / bounded if bounded else 0.0,
        "repaired_share": _share(sum(b.resent for b in blocks), sum(b.sent for b in blocks)),
        "cpu_s_per_gb": sum(block.cpu_s for block in blocks) / (moved / _GB),
        "test_accuracy": None,
        "wall_s": float(seconds.sum()),
    }


def _trained(run: Run, arm: str, runs: Sequence[Trained]) -> dict[str, Any]:
    """Means over the seeds; times of rounds over all ranks and seeds."""
    rounds = np.concatenate([np.asarray(e["allreduce_s"], np.float64) for t in runs for e in t.events])
    walls = [max(event["wall_s"] for event in t.events) for t in runs]
    traffics = [event["traffic"] for t in runs for event in t.events if event["traffic"] is not None]
    total = {name: sum(t[name] for t in traffics) for name in (traffics[0] if traffics else ())}
    times = [(t.start_s, t.start_s + wall) for t, wall in zip(runs, walls, strict=True)]
    spans = [(span.start_s, span.end_s) for span in run.spans]
    return {
        **_head(run, arm, None, sum(len(t.events[0]["allreduce_s"]) for t in runs)),
        **_percentiles(rounds),
        "max_s": float(rounds.max()),
        "mean_s": float(rounds.mean()),
        "tail_ratio": _tail(rounds),
        "burst_rounds": None,
        "burst_p50_s": None,
        "burst_max_s": None,
        "clear_p50_s": None,
        "burst_time_share": covered(times, spans) / sum(walls),
        **_losses(run, [t.counters for t in runs]),
        "missing_share": _share(total.get("chunks_missing", 0), total.get("chunks_expected", 0)) or 0.0,
        "repaired_share": _share(
            total.get("chunks_resent", 0), total.get("chunks_sent", 0) - total.get("chunks_resent", 0)
        ),
        "cpu_s_per_gb": None,
        "test_accuracy": float(np.mean([t.events[0]["test_accuracy"] for t in runs])),
        "wall_s": float(np.mean(walls)),
        "seeds": len(runs),
    }


def _head(run: Run, arm: str, nbytes: int | None, rounds: int) -> dict[str, Any]:
    experiment = run.experiment
    return {
        "experiment": experiment.name,
        "arm": arm,
        "ranks": experiment.topology.hosts,
        "bytes": nbytes,
        "rounds": rounds,
    }


def _percentiles(seconds: Floats) -> dict[str, float]:
    return {name: float(np.percentile(seconds, level)) for name, level in LEVELS.items()}


def _tail(seconds: Floats) -> float:
    """p99 over p50, by which OptiReduce names its environments."""
    return float(np.percentile(seconds, 99) / np.percentile(seconds, 50))


def _losses(run: Run, counters: Sequence[Counters]) -> dict[str, Any]:
    """Shares of the packets that the model and full queues dropped, by the kernel's counters."""
    total = Counters()
    for part in counters:
        total = add(total, part)
    offered, dropped = offered_and_dropped(run.experiment.schedule.base, total)
    return {
        "packets": total.offered,
        "offered_loss": _share(dropped, offered) or 0.0,
        "queue_loss": _share(total.dropped_by_queue, total.offered) or 0.0,
    }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
