"""The flight recorder: what the last rounds of a group were, and how far each of their messages had come.

Theory of operation. Each round and transfer of a group has an ``Entry`` in a ring. While it runs, the entry asks it for the state
of its messages only when somebody looks; when it fails, the state of that instant is kept, with the chunks that are missing; when
it ends well, a tuple a message. So a round costs one small object and one tuple a message, whatever its size.

Times are seconds on the endpoint's clock; only ``report`` looks at the wall clock, to tell when that was.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dblp.errors import ConfigError
from dblp.units import format_seconds

VERSION = 2
"""Of the JSON form."""
SHOWN_RANGES = 8
"""Runs of missing chunks that are kept of a message."""
SHOWN_BRIEFLY = 12
"""Rounds, and messages of each, of which the brief text tells: it goes to a log."""

Details = Callable[[], Mapping[str, Any]]
"""``details()``: what the ranks agreed on, as dtype, operation, algorithm and budget, by name; plain values."""


class MessageState(NamedTuple):
    """One message of a round, as this rank sees it. A tuple, since each message of each round makes one."""

    peer: int
    """The endpoint's rank at the other end."""
    outgoing: bool
    """It goes to the peer; otherwise it comes from it."""
    step: int
    """Within the round."""
    chunks: int
    """In the message."""
    arrived: int
    """Chunks that are here, or that the peer is known to have."""
    sent: int = 0
    """Of an outgoing message: chunks that left, for the first time and again."""
    done: bool = False
    """Complete under its bound; of an outgoing message: the peer has confirmed it, or the round need not wait for that."""
    missing: tuple[tuple[int, int], ...] = ()
    """Of a round that fails or runs: the first runs of chunks that lack, as (first, last)."""


States = Callable[[bool], Sequence[MessageState]]
"""``states(missing)``: the messages of a round as they are now, with what is missing of each if asked for."""


class Entry:
    """A round or transfer in the recorder. ``state``: ``running``, ``done``, ``failed`` or ``cancelled``."""

    __slots__ = (
        "_states", "began", "details", "ended", "error", "label", "messages", "nbytes", "number", "state", "timeout_s"
    )  # fmt: skip

    def __init__(
        self, number: int, label: str, nbytes: int, details: Details, timeout_s: float, began: float, states: States
    ) -> None:  # fmt: skip
        """``number``: of the round in its group, -1 for a transfer; ``nbytes``: of the caller's array."""
        self.number = number
        self.label = label
        self.nbytes = nbytes
        self.details = details
        self.timeout_s = timeout_s
        self.began = began
        self.ended = 0.0
        self.state = "running"
        self.error = ""
        self.messages: Sequence[MessageState] = ()
        self._states: States | None = states

    def fail(self, error: BaseException, now: float) -> None:
        """It fails now; what follows from that, as messages that are given up, is of no interest."""
        if self.state == "running":
            self._close("failed", now, missing=True)
            self.error = str(error) or type(error).__name__

    def end(self, now: float, *, done: bool) -> None:
        """It is over; ``done``: all messages are. Nothing happens if it has failed."""
        if self.state == "running":
            self._close("done" if done else "cancelled", now, missing=not done)

    def now(self) -> Sequence[MessageState]:
        """The messages as they are, or as they were at the end."""
        states = self._states  # the engine may end the round while another thread looks
        return self.messages if states is None else states(True)

    def _close(self, state: str, now: float, *, missing: bool) -> None:
        if self._states is not None:
            self.messages = self._states(missing)
        self.state, self.ended, self._states = state, now, None  # the caller's arrays are not held


class FlightRecorder:
    """The last rounds and transfers of one group on this rank, oldest first."""

    def __init__(
        self,
        *,
        rank: int,
        ranks: Sequence[int],
        group: int,
        rounds: int,
        clock: Callable[[], float],
        name: str = "default",
    ) -> None:
        """``rank`` and ``ranks`` are the endpoint's; ``rounds``: how many are kept, 0: none; ``name``: of the group."""
        self.rank = rank
        self.group = group
        self.name = name
        self._others: list[FlightRecorder] = []
        self._ranks = tuple(ranks)
        self._entries: deque[Entry] = deque(maxlen=rounds)
        self._clock = clock

    def begin(
        self, number: int, label: str, nbytes: int, details: Details, timeout_s: float, states: States
    ) -> Entry:
        """A round begins."""
        entry = Entry(number, label, nbytes, details, timeout_s, self._clock(), states)
        self._entries.append(entry)
        return entry

    def include(self, other: FlightRecorder) -> None:
        """Tell of another group of the same ranks as well, whose rounds run beside this one's."""
        self._others.append(other)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What is kept of this group, oldest first; safe on any thread."""
        return tuple(self._entries)

    def report(self, reason: str = "") -> dict[str, Any]:
        """All of it as plain values, as ``to_json`` writes it: the rounds of this group and of those that it includes, in the
        order in which they began."""
        now = self._clock()
        recorders = [self, *self._others]
        found = [(entry, recorder) for recorder in recorders for entry in recorder.entries]
        found.sort(key=lambda item: item[0].began)
        rounds = [recorder._plain(entry, now) for entry, recorder in found]
        return {
            "version": VERSION,
            "rank": self.rank,
            "ranks": list(self._ranks),
            "groups": {str(recorder.group): recorder.name for recorder in recorders},
            "time": _wall(0.0),
            "reason": reason,
            "rounds": rounds,
        }

    def to_json(self, reason: str = "") -> str:
        """The report as JSON."""
        return json.dumps(self.report(reason), indent=1)

    def to_text(self, reason: str = "", *, brief: bool = False) -> str:
        """The report for people: a line a round, and one for each message that is not done. ``brief``: the first of those rounds
        that have not ended well."""
        report = self.report(reason)
        rounds, most = report["rounds"], len(report["rounds"])
        if brief:
            rounds, most = [round_ for round_ in rounds if round_["state"] != "done"], SHOWN_BRIEFLY
        groups = ", ".join(f"group {number} ({name})" for number, name in report["groups"].items())
        head = f"flight recorder of rank {self.rank}, {groups}, {report['time']}"
        lines = [f"{head}: {reason}" if reason else head]
        for round_ in rounds[:most]:
            told, *messages = _lines(round_, reason, grouped=len(report["groups"]) > 1)
            lines += [told, *_first(messages, SHOWN_BRIEFLY if brief else len(messages), "    ")]
        if not rounds:
            lines.append("  no rounds, or all have ended well" if brief else "  no rounds")
        return "\n".join([*lines, *_first(["  round"] * len(rounds), most, "  ")[most:]])

    def _plain(self, entry: Entry, now: float) -> dict[str, Any]:
        messages = [message._asdict() for message in entry.now()]
        lacking = sorted({message["peer"] for message in messages if not message["done"]})
        return {
            "group": self.group,
            "round": entry.number,
            "call": entry.label,
            "nbytes": entry.nbytes,
            **entry.details(),
            "state": entry.state,
            "began": _wall(now - entry.began),
            "seconds": round((entry.ended if entry.state != "running" else now) - entry.began, 6),
            "timeout_s": entry.timeout_s,
            "error": entry.error,
            "lacks_ranks": lacking if entry.state != "done" else [],
            "messages": messages,
        }


def open_flight_dir(folder: str) -> Path:
    """Make the folder of dumps, before something goes wrong that needs it; ``~`` is a home. Raises ConfigError where nothing can
    be written."""
    try:
        place = Path(folder).expanduser()
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: no such home
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"flight_dir={folder!r} (DBLP_FLIGHT_DIR): nothing can be written there ({why}); name a folder "
            "that this user may write to, or none: what did not end well goes to the log then"
        ) from None
    return place


def write_dump(recorder: FlightRecorder, folder: Path, reason: str, number: int) -> tuple[Path, Path]:
    """Write the text and the JSON of a recorder, the ``number``-th of this process; returns where. The folder is made if it is
    missing. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"flight-rank{recorder.rank}-pid{os.getpid()}-{number}"
    text, plain = folder / f"{stem}.txt", folder / f"{stem}.json"
    text.write_text(recorder.to_text(reason) + "\n")
    plain.write_text(recorder.to_json(reason) + "\n")
    return text, plain


def runs(chunks: npt.NDArray[np.integer[Any]]) -> tuple[tuple[int, int], ...]:
    """Ascending chunk indices as runs (first, last), the first ``SHOWN_RANGES`` of them."""
    if not len(chunks):
        return ()
    cuts = np.flatnonzero(np.diff(chunks) != 1) + 1
    firsts, lasts = chunks[np.r_[0, cuts]], chunks[np.r_[cuts - 1, len(chunks) - 1]]
    return tuple(zip(firsts[:SHOWN_RANGES].tolist(), lasts[:SHOWN_RANGES].tolist(), strict=True))


def _first(lines: Sequence[str], most: int, indent: str) -> list[str]:
    """At most so many lines, and one that counts the rest."""
    rest = len(lines) - most
    return [*lines[:most], *([f"{indent}and {rest} more"] if rest > 0 else [])]


def _lines(round_: Mapping[str, Any], reason: str, *, grouped: bool) -> list[str]:
    """One round of a report: what it was, its error unless that is the report's reason, and what it lacks; ``grouped``: there are
    several groups, and it says of which it is."""
    name = "transfer" if round_["round"] < 0 else f"round {round_['round']}"
    name += f"/{round_['place']}" if "place" in round_ else ""
    name += f" of group {round_['group']}" if grouped else ""
    details = [
        f"{key} {value}"
        for key, value in round_.items()
        if key in _SHOWN and value not in ("", -1) and not (key == "budget" and not value)
    ]
    head = f"  {name}: {round_['call']}, {round_['nbytes']} bytes" + "".join(f", {item}" for item in details)
    state = f"{round_['state']} after {format_seconds(round_['seconds'])} of {format_seconds(round_['timeout_s'])}"
    lines = [f"{head}: {state}, begun {round_['began']}"]
    if round_["error"] and round_["error"] not in reason:
        lines.append(f"    {round_['error']}")
    if round_["state"] != "done":
        lines += [f"    {_message(message)}" for message in round_["messages"] if not message["done"]]
    return lines


_SHOWN = ("dtype", "op", "root", "algorithm", "budget", "peer", "tag")


def _message(message: Mapping[str, Any]) -> str:
    way = "to" if message["outgoing"] else "from"
    have = "confirmed" if message["outgoing"] else "arrived"
    text = f"{way} rank {message['peer']}, step {message['step']}: {message['arrived']} of {message['chunks']} chunks {have}"
    if message["outgoing"]:
        text += f", {message['sent']} sent"
    if message["missing"]:
        listed = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in message["missing"])
        text += f"; missing {listed}" + (", ..." if len(message["missing"]) == SHOWN_RANGES else "")
    return text


def _wall(ago_s: float) -> str:
    """The time of so long ago, to the millisecond, in UTC."""
    return datetime.fromtimestamp(time.time() - ago_s, UTC).isoformat(timespec="milliseconds")
