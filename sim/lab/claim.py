"""Whether a run had the loss that it claims, by the kernel's counters: one that had not proves nothing, and ends as failed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dblp.sim.lab.counters import Counters, LinkCounters
from dblp.sim.lab.impairments import Conditions, Schedule, parse_conditions
from dblp.transport.impair_spec import GilbertElliott

if TYPE_CHECKING:
    from dblp.sim.lab.run import Block, Run, Trained

SIGMAS = 5.0
"""Of a binomial: a fair run fails once in two million."""
RELATIVE = 0.05
"""Beside it: packets that count but meet no rule (ARP, what is on its way while the counters are read)."""
_BURSTY = 10.0
"""Factor on the deviation of a Gilbert-Elliott loss, whose drops come in runs."""
_ENOUGH = 20.0
"""Drops to expect before an arm without any is suspicious."""


def check(schedule: Schedule, run: Run) -> str:
    """Why the run's loss is not the one that it claims; empty if it is."""
    parts = {block.arm: Counters() for block in run.blocks} | {item.arm: Counters() for item in run.trained}
    pieces: list[Block | Trained] = [*run.blocks, *run.trained]
    for piece in pieces:
        parts[piece.arm] = add(parts[piece.arm], piece.counters)
    if schedule.changing is not None or schedule.listed:
        return _check_bursts(schedule, run, parts)
    return next((fault for arm, at in parts.items() if (fault := _check_lasting(arm, schedule.base, at))), "")


def add(left: Counters, right: Counters) -> Counters:
    """Both together."""
    zero = LinkCounters()
    names = {**left.points, **right.points}
    points = {name: left.points.get(name, zero) + right.points.get(name, zero) for name in names}
    return Counters(points, left.last_hops | right.last_hops)


def offered_and_dropped(conditions: Conditions, counters: Counters) -> tuple[int, int]:
    """Packets that met the conditions, and those that they dropped; on named links only what passed these, in their way."""
    if not conditions.links:
        return counters.offered, counters.dropped_by_model
    met = [counters.link(link, conditions.way) for link in conditions.links]
    return sum(link.offered for link in met), sum(link.dropped_by_model for link in met)


def _check_lasting(arm: str, conditions: Conditions, counters: Counters) -> str:
    """A loss that holds all the time: as asked, within a binomial's bounds."""
    offered, dropped = offered_and_dropped(conditions, counters)
    asked = conditions.loss
    if not asked:
        return f"{arm}: {dropped} packets were dropped by a model where none was asked for" if dropped else ""
    if not offered:
        return f"{arm}: no packet met the loss of {asked:.2%}"
    return _beside(arm, [(conditions, counters)])


def _beside(where: str, pieces: Sequence[tuple[Conditions, Counters]]) -> str:
    """What is wrong with the share that was dropped, over conditions and what happened under them; empty if it is as asked."""
    offered = dropped = 0
    wanted = variance = 0.0
    for conditions, counters in pieces:
        met, lost = offered_and_dropped(conditions, counters)
        asked = conditions.loss
        wide = _BURSTY if conditions.get(GilbertElliott) else 1.0
        offered, dropped = offered + met, dropped + lost
        wanted, variance = wanted + asked * met, variance + wide**2 * asked * (1 - asked) * met
    room = SIGMAS * math.sqrt(max(variance, 1.0)) + RELATIVE * wanted
    if not offered or abs(dropped - wanted) <= room:
        return ""
    return (
        f"{where}: a loss of {wanted / offered:.3%} was asked for, and {dropped} of {offered} packets ({dropped / offered:.3%}) "
        "were dropped, by the kernel's counters: the run proves nothing about that loss"
    )


def _check_bursts(schedule: Schedule, run: Run, parts: dict[str, Counters]) -> str:
    """Bursts: some were applied; in no arm that met them did nothing drop; while they held everywhere the share that dropped was
    theirs, and between them that of the steady loss, if there is one."""
    if not run.spans:
        return f"no burst of {schedule} began within the run: it was too short"
    for arm, counters in parts.items():
        met = _met(run, arm)
        offered, dropped = counters.offered, counters.dropped_by_model
        if not met:
            return f"{arm}: none of its rounds met a burst of {schedule}: more rounds are needed"
        if not dropped and offered * met * 0.5 > _ENOUGH:
            return f"{arm}: {met:.0%} of its time was in bursts, but no packet was dropped, by the kernel's counters"
    inside = [(parse_conditions(s.what), s.inside) for s in run.spans if s.inside is not None]
    between = [(schedule.base, s.before) for s in run.spans if s.before is not None]
    return _beside("in the bursts", inside) or _beside("between the bursts", between)


def _met(run: Run, arm: str) -> float:
    """Share of the arm's time that bursts covered."""
    times = [
        (block.starts[0], block.starts[-1] + block.seconds[-1]) for block in run.blocks if block.arm == arm
    ]
    times += [
        (t.start_s, t.start_s + max(e["wall_s"] for e in t.events)) for t in run.trained if t.arm == arm
    ]
    total = sum(end - start for start, end in times)
    return covered(times, [(span.start_s, span.end_s) for span in run.spans]) / total if total else 0.0


def covered(times: Sequence[tuple[float, float]], spans: Sequence[tuple[float, float]]) -> float:
    """Seconds of the times that lie within spans."""
    return sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in times for begin, stop in spans)
