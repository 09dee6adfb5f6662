"""Rates and queues by tbf, delays and more by netem: what stands on a device, and what its counters say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dblp.sim.lab.impairments import Conditions, Slot
from dblp.transport.impair_spec import Corrupt, Delay, Duplicate, GilbertElliott, Jitter, Loss, Reorder
from dblp.transport.udp_send import DSCP

BURST_S = 250e-6
"""What tbf may send at once, as time at its rate: about the precision of the kernel's timers under load."""
_LEAST_BURST_BYTES = 2 * 1514
_LEAST_LIMIT = 1000
"""Packets: netem's own default."""
_UNLIMITED_BPS = 10e9
"""Rate that netem's limit is sized for where the link has none."""
_SMALL_PACKET_BYTES = 512
_MARGIN = 1.5
_RED_PACKET_BYTES = 1000
"""Mean packet, for RED's average."""


@dataclass(frozen=True, slots=True)
class Stack:
    """The queueing disciplines of a device: netem, and tbf below it; each may be missing."""

    netem: str = ""
    tbf: str = ""
    fixed: str = ""
    """What a change of netem can't take back: its jitter's distribution, and slots."""
    below: tuple[str, ...] = ()
    """What stands below tbf in place of its fifo: ``tc`` lines with ``{device}``."""

    @property
    def shape(self) -> tuple[bool, bool, str, tuple[str, ...]]:
        """What a change in place must keep."""
        return bool(self.netem), bool(self.tbf), self.fixed, self.below

    def lines(self, device: str, verb: str) -> list[str]:
        """Lines for ``tc -batch``; ``verb`` is ``add`` or ``change``."""
        found = [(text, handle) for text, handle in ((self.netem, "1"), (self.tbf, "10")) if text]
        places = ("root", "parent 1:1")
        lines = [
            f"qdisc {verb} dev {device} {place} handle {handle}: {text}"
            for (text, handle), place in zip(found, places, strict=False)
        ]
        return lines + [line.format(device=device) for line in self.below if verb == "add"]


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


def below_tbf(discipline: str, rate_bps: float, queue_bytes: int) -> tuple[str, ...]:
    """What stands below tbf for a topology's discipline; nothing for a fifo or without a rate."""
    if not rate_bps or discipline == "fifo":
        return ()
    if discipline == "red":
        # Floyd and Jacobson 1993, section 6: a maximum of three times the minimum; tc-red(8): the burst.
        least, most = queue_bytes // 6, queue_bytes // 2
        burst = (2 * least + most) // (3 * _RED_PACKET_BYTES) + 1
        return (
            f"qdisc add dev {{device}} parent 10:1 handle 20: red limit {queue_bytes} min {least} max {most} "
            f"avpkt {_RED_PACKET_BYTES} burst {burst} ecn bandwidth {rate_bps:.0f}bit probability 0.1",
        )
    # Four bands, one a class of dblp; what has none of their DSCPs (TCP) goes with class 2.
    bands = " ".join("2" * 16)
    lines = [f"qdisc add dev {{device}} parent 10:1 handle 20: prio bands {len(DSCP)} priomap {bands}"]
    for band, dscp in enumerate(DSCP, start=1):
        lines += [
            f"qdisc add dev {{device}} parent 20:{band} handle 2{band}: bfifo limit {queue_bytes}",
            f"filter add dev {{device}} parent 20: protocol ip prio 1 u32 match ip dsfield {dscp << 2:#x} 0xfc flowid 20:{band}",
        ]
    return tuple(lines)


def netem_text(conditions: Conditions, delay_s: float, rate_bps: float, *, loses: bool) -> tuple[str, str]:
    """netem's arguments for conditions and a delay of the link itself, and what of them a change can't take back.

    ``loses``: loss is netem's task. All values are written, zeros too, since a change keeps what it isn't told.
    Its limit is sized from rate and delay; beyond it netem would drop what no model asked for.
    """
    delay, jitter, reorder = conditions.get(Delay), conditions.get(Jitter), conditions.get(Reorder)
    slot = conditions.get(Slot)
    late = delay_s + (delay.delay_s if delay else 0.0) + (reorder.by_s if reorder else 0.0)
    spread = jitter.jitter_s if jitter else 0.0
    table = "normal" if jitter and jitter.dist == "normal" else ""
    held = late + 4 * spread + (slot.latest_s if slot else 0.0)
    words = [f"netem limit {limit_packets(rate_bps, held)} delay {_us(late)} {_us(spread)}"]
    words += [f"distribution {table}"] if table else []
    words += [f"reorder {_percent(1 - reorder.p)} gap 1"] if reorder and reorder.p < 1 else ["reorder 0%"]
    words += [_loss_text(conditions)] if loses else []
    words += [
        f"duplicate {_percent(conditions.get(Duplicate))}",
        f"corrupt {_percent(conditions.get(Corrupt))}",
    ]
    slots = f"slot {_us(slot.least_s)} {_us(slot.latest_s)}" if slot else ""
    words += [slots] if slots else []
    return " ".join(words), f"{table} {slots}".strip()


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
    netem = of["netem"]
    # netem counts a packet when it leaves, and a drop at once: without what it holds, a burst's share would be another one.
    passed = int(netem["packets"]) + int(netem.get("qlen", 0))
    return QdiscCounts(passed, int(netem["drops"]) - queue, queue)


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
