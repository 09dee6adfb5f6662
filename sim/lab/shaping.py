"""Rates and queues by tbf, delays and more by netem: what stands on a device, and what its counters say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dblp.sim.lab.impairments import Conditions
from dblp.transport.impair_spec import Corrupt, Delay, Duplicate, GilbertElliott, Jitter, Loss, Reorder

BURST_S = 250e-6
"""What tbf may send at once, as time at its rate: about the precision of the kernel's timers under load."""
_LEAST_BURST_BYTES = 2 * 1514
_LEAST_LIMIT = 1000
"""Packets: netem's own default."""
_UNLIMITED_BPS = 10e9
"""Rate that netem's limit is sized for where the link has none."""
_SMALL_PACKET_BYTES = 512
_MARGIN = 1.5


@dataclass(frozen=True, slots=True)
class Stack:
    """The queueing disciplines of a device: netem, and tbf below it; each may be missing."""

    netem: str = ""
    tbf: str = ""
    table: str = ""
    """Distribution of netem's jitter; it can't be taken back by a change."""

    @property
    def shape(self) -> tuple[bool, bool, str]:
        """What a change in place must keep."""
        return bool(self.netem), bool(self.tbf), self.table

    def lines(self, device: str, verb: str) -> list[str]:
        """Lines for ``tc -batch``; ``verb`` is ``add`` or ``change``."""
        found = [(text, handle) for text, handle in ((self.netem, "1"), (self.tbf, "10")) if text]
        places = ("root", "parent 1:1")
        return [
            f"qdisc {verb} dev {device} {place} handle {handle}: {text}"
            for (text, handle), place in zip(found, places, strict=False)
        ]


@dataclass(frozen=True, slots=True)
class QdiscCounts:
    """Packets of a device's disciplines since they were put there."""

    sent: int = 0
    dropped_by_model: int = 0
    dropped_by_queue: int = 0

    def __add__(self, other: QdiscCounts) -> QdiscCounts:
        return QdiscCounts(
            self.sent + other.sent,
            self.dropped_by_model + other.dropped_by_model,
            self.dropped_by_queue + other.dropped_by_queue,
        )


def tbf_text(rate_bps: float, queue_bytes: int) -> str:
    """A rate with a queue that drops at its tail; empty without a rate."""
    if not rate_bps:
        return ""
    burst = max(_LEAST_BURST_BYTES, round(rate_bps / 8 * BURST_S))
    return f"tbf rate {rate_bps:.0f}bit burst {burst} limit {queue_bytes}"


def netem_text(conditions: Conditions, delay_s: float, rate_bps: float, *, loses: bool) -> tuple[str, str]:
    """netem's arguments for conditions and a delay of the link itself, and its jitter's distribution.

    ``loses``: loss is netem's task. All values are written, zeros too, since a change keeps what it isn't told.
    Its limit is sized from rate and delay; beyond it netem would drop what no model asked for.
    """
    delay, jitter, reorder = conditions.get(Delay), conditions.get(Jitter), conditions.get(Reorder)
    late = delay_s + (delay.delay_s if delay else 0.0) + (reorder.by_s if reorder else 0.0)
    spread = jitter.jitter_s if jitter else 0.0
    table = "normal" if jitter and jitter.dist == "normal" else ""
    words = [f"netem limit {limit_packets(rate_bps, late + 4 * spread)} delay {_us(late)} {_us(spread)}"]
    words += [f"distribution {table}"] if table else []
    words += [f"reorder {_percent(1 - reorder.p)} gap 1"] if reorder and reorder.p < 1 else ["reorder 0%"]
    words += [_loss_text(conditions)] if loses else []
    words += [
        f"duplicate {_percent(conditions.get(Duplicate))}",
        f"corrupt {_percent(conditions.get(Corrupt))}",
    ]
    return " ".join(words), table


def limit_packets(rate_bps: float, late_s: float) -> int:
    """Packets that netem must hold: what comes at the rate while the delay lasts, for small packets, and a margin."""
    held = (rate_bps or _UNLIMITED_BPS) / 8 * late_s / _SMALL_PACKET_BYTES
    return _LEAST_LIMIT + round(_MARGIN * held)


def read_counts(document: Iterable[Mapping[str, Any]]) -> dict[str, QdiscCounts]:
    """By device, from ``tc -s -j qdisc show``.

    A drop of the tbf below netem counts as netem's too (its enqueue fails there), so it's taken off.
    """
    kinds: dict[str, dict[str, Mapping[str, Any]]] = {}
    for entry in document:
        kinds.setdefault(entry["dev"], {})[entry["kind"]] = entry
    return {device: _counts(of) for device, of in kinds.items() if "netem" in of or "tbf" in of}


def _counts(of: Mapping[str, Mapping[str, Any]]) -> QdiscCounts:
    queue = int(of["tbf"]["drops"]) if "tbf" in of else 0
    if "netem" not in of:
        return QdiscCounts(int(of["tbf"]["packets"]), 0, queue)
    return QdiscCounts(int(of["netem"]["packets"]), int(of["netem"]["drops"]) - queue, queue)


def _loss_text(conditions: Conditions) -> str:
    ge, loss = conditions.get(GilbertElliott), conditions.get(Loss)
    if ge is not None:
        # tc-netem(8): gemodel p [r [1-h [1-k]]]; 1-h is the loss of the bad state, 1-k of the good one.
        return "loss gemodel " + " ".join(_percent(share) for share in (ge.p, ge.r, ge.bad, ge.good))
    return f"loss {_percent(loss)}"


def _percent(of: Loss | Duplicate | Corrupt | float | None) -> str:
    share = (
        of if isinstance(of, float) else float(of) if isinstance(of, int) else of.p if of is not None else 0.0
    )
    return f"{100 * share:.6f}%"


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.0f}us"
