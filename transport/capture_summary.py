"""What a capture says of messages and rounds: who sent what to whom, what was repaired, and how each message stopped."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dblp.transport import wire
from dblp.transport.capture import Capture
from dblp.transport.message import ROUND_BITS, STEP_BITS
from dblp.transport.wire import Type

_PACKET = ("path", "cls", "burst", "position")
COMPLETE = "complete"
"""How a message ended of which nothing is missing."""
OPEN_END = "no FINAL"
"""How a message ended whose FINAL the capture does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MessageTrace:
    """One message, as the capture shows it. Times are seconds since the capture's first record."""

    session: int
    group: int
    round: int
    step: int
    sender: int
    receiver: int | None
    """None where the capture holds nothing that the receiver sent."""
    nbytes: int | None
    """None where the capture lacks its OPEN; so are the next three."""
    chunks: int | None
    budget: float | None
    stop: str | None
    """Stop rule."""
    times: npt.NDArray[np.float64]
    """(n,) of its DATA, and of the OPEN that brought the data with it."""
    chunk: npt.NDArray[np.uint32]
    """(n,) index of the chunk."""
    repair: npt.NDArray[np.bool_]
    """(n,) the chunk had been sent before, under another packet number."""
    copies: int
    """Datagrams that stand in the capture twice with one packet number."""
    opened_s: float | None
    final_s: float | None
    missing: npt.NDArray[np.uint32] | None
    """Chunks that FINAL leaves out, ascending; None without a whole FINAL."""

    @property
    def repairs(self) -> int:
        """Number of repairs."""
        return int(self.repair.sum())

    @property
    def end(self) -> str:
        """How it ended: ``complete``, by its stop rule, or ``no FINAL``."""
        if self.missing is None:
            return OPEN_END
        return (self.stop or "short") if len(self.missing) else COMPLETE

    @property
    def first_s(self) -> float:
        """When the first of it was seen."""
        known = [time for time in (self.opened_s, *self.times[:1].tolist()) if time is not None]
        return float(min(known, default=self.final_s or 0.0))

    @property
    def last_s(self) -> float:
        """When the last of it was seen."""
        known = (*self.times[-1:].tolist(), self.final_s or 0.0, self.opened_s or 0.0)
        return float(max(known))

    def record(self) -> dict[str, Any]:
        """Flat, for JSON."""
        return {
            "session": f"{self.session:016x}",
            "group": self.group,
            "round": self.round,
            "step": self.step,
            "sender": self.sender,
            "receiver": self.receiver,
            "bytes": self.nbytes,
            "chunks": self.chunks,
            "budget": self.budget,
            "stop": self.stop,
            "first_s": self.first_s,
            "last_s": self.last_s,
            "chunks_seen": len(np.unique(self.chunk)),
            "repairs": self.repairs,
            "copies": self.copies,
            "end": self.end,
            "final_s": self.final_s,
            "missing": None if self.missing is None else len(self.missing),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrace:
    """One round: all its messages."""

    session: int
    group: int
    round: int
    messages: tuple[MessageTrace, ...]

    @property
    def duration_s(self) -> float:
        """From the first that was seen of it to the last."""
        return max(m.last_s for m in self.messages) - min(m.first_s for m in self.messages)

    def record(self) -> dict[str, Any]:
        """Flat, for JSON."""
        return {
            "session": f"{self.session:016x}",
            "group": self.group,
            "round": self.round,
            "ranks": len({m.sender for m in self.messages}),
            "messages": len(self.messages),
            "start_s": min(m.first_s for m in self.messages),
            "duration_s": self.duration_s,
            "bytes": sum(m.nbytes or 0 for m in self.messages),
            "data": sum(len(m.chunk) for m in self.messages),
            "repairs": sum(m.repairs for m in self.messages),
            "missing": sum(len(m.missing) for m in self.messages if m.missing is not None),
            "ends": dict(Counter(m.end for m in self.messages)),
        }


def messages_of(capture: Capture) -> list[MessageTrace]:
    """All messages of which the capture holds OPEN or DATA, in the order of their first record."""
    rows = capture.records
    if not len(rows):
        return []
    peers = _peers(rows)
    opens, finals = _opens(capture, peers), _finals(capture, peers)
    data = _grouped(rows, peers, np.flatnonzero(rows["type"] == Type.DATA))
    none = np.empty(0, np.intp)
    traces = [
        _trace(capture, key, data.get(key, none), opens.get(key), finals.get(key, {}))
        for key in dict.fromkeys([*opens, *data])
    ]
    return sorted(traces, key=lambda trace: trace.first_s)


def rounds_of(messages: Sequence[MessageTrace]) -> list[RoundTrace]:
    """The rounds that the messages make up, in order of time."""
    rounds: dict[tuple[int, int, int], list[MessageTrace]] = defaultdict(list)
    for message in messages:
        rounds[message.session, message.group, message.round].append(message)
    return [
        RoundTrace(session=session, group=group, round=number, messages=tuple(of_round))
        for (session, group, number), of_round in rounds.items()
    ]


class _Key(NamedTuple):
    """A message id says round and step; with both ends it is one message."""

    session: int
    sender: int
    peer: int
    """The receiver's rank; where the capture does not tell it, -1 less its address's index."""
    message: int


def _peers(rows: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """Whom each record was sent to (records,): the rank that sends from that address, else as in ``_Key.peer``."""
    senders = np.unique(rows[["session", "source", "rank"]]).tolist()
    ranks = {(session, source): rank for session, source, rank in senders}
    pairs, inverse = np.unique(rows[["session", "target"]], return_inverse=True)
    peers = [ranks.get((session, target), -1 - target) for session, target in pairs.tolist()]
    return np.array(peers, np.int64)[inverse]


def _grouped(
    rows: npt.NDArray[np.void], peers: npt.NDArray[np.int64], which: npt.NDArray[np.intp]
) -> dict[_Key, npt.NDArray[np.intp]]:
    """Indices into ``rows`` by message: sorted once, then cut."""
    if not len(which):
        return {}
    table = np.empty(len(which), [("session", "u8"), ("rank", "i8"), ("peer", "i8"), ("message", "u8")])
    for name in ("session", "rank", "message"):
        table[name] = rows[name][which]
    table["peer"] = peers[which]
    keys, inverse = np.unique(table, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    parts = np.split(which[order], np.flatnonzero(np.diff(inverse[order])) + 1)
    return {_Key(*key): part for key, part in zip(keys.tolist(), parts, strict=True)}


def _opens(capture: Capture, peers: npt.NDArray[np.int64]) -> dict[_Key, tuple[int, wire.Open]]:
    """The first OPEN of each message: its row, and what it says."""
    rows = capture.records
    opens: dict[_Key, tuple[int, wire.Open]] = {}
    for row in np.flatnonzero(rows["type"] == Type.OPEN).tolist():
        message = wire.decode_open(capture.payloads[row])
        if message is not None:
            session, rank, number = rows[["session", "rank", "message"]][row].tolist()
            opens.setdefault(_Key(session, rank, int(peers[row]), number), (row, message))
    return opens


_Parts = dict[int, tuple[int, wire.Final]]
"""Parts of a FINAL by their number: the row of the first, and what it says."""


def _finals(capture: Capture, peers: npt.NDArray[np.int64]) -> dict[_Key, _Parts]:
    """FINAL of each message; its sender is the message's receiver."""
    rows = capture.records
    finals: dict[_Key, _Parts] = defaultdict(dict)
    for row in np.flatnonzero(rows["type"] == Type.FINAL).tolist():
        final = wire.decode_final(capture.payloads[row])
        if final is not None:
            session, receiver, number = rows[["session", "rank", "message"]][row].tolist()
            finals[_Key(session, int(peers[row]), receiver, number)].setdefault(final.part, (row, final))
    return finals


def _trace(
    capture: Capture,
    key: _Key,
    data: npt.NDArray[np.intp],
    opened: tuple[int, wire.Open] | None,
    parts: _Parts,
) -> MessageTrace:
    start = float(capture.records["time"][0])
    spec = opened[1].spec if opened is not None else None
    if opened is not None and opened[1].data:
        data = np.concatenate(([opened[0]], data))
    rows = capture.records[data]
    again, copy = _repeats(rows)
    final_s, missing = _outcome(capture, parts, spec.chunks if spec is not None else 0)
    return MessageTrace(
        session=key.session,
        group=key.message >> (ROUND_BITS + STEP_BITS),
        round=key.message >> STEP_BITS & (1 << ROUND_BITS) - 1,
        step=key.message & (1 << STEP_BITS) - 1,
        sender=key.sender,
        receiver=key.peer if key.peer >= 0 else None,
        nbytes=spec.nbytes if spec is not None else None,
        chunks=spec.chunks if spec is not None else None,
        budget=spec.budget if spec is not None else None,
        stop=spec.stop.value if spec is not None else None,
        times=rows["time"] - start,
        chunk=rows["chunk"],
        repair=again & ~copy,
        copies=int(copy.sum()),
        opened_s=float(capture.records["time"][opened[0]]) - start if opened is not None else None,
        final_s=final_s - start if final_s is not None else None,
        missing=missing if spec is not None else None,
    )


def _repeats(rows: npt.NDArray[np.void]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Of a message's rows: whose chunk, and whose chunk with the same packet number, stands earlier."""
    packets = rows[[*_PACKET, "chunk"]].copy()
    packets["cls"] &= wire.CLASS_MASK
    return _seen_before(rows["chunk"]), _seen_before(packets)


def _seen_before(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    seen = np.ones(len(values), np.bool_)
    seen[np.unique(values, return_index=True)[1]] = False
    return seen


def _outcome(
    capture: Capture, parts: _Parts, chunks: int
) -> tuple[float | None, npt.NDArray[np.uint32] | None]:
    """When FINAL came, and the chunks that it leaves out; None where it, or a part of it, is not there."""
    if not parts:
        return None, None
    time = min(float(capture.records["time"][row]) for row, _ in parts.values())
    if len(parts) < next(iter(parts.values()))[1].parts:
        return time, None
    bits = b"".join(parts[part][1].bits for part in sorted(parts))
    return time, wire.missing_from_bits(bits, chunks)
