"""Messages: what one rank sends another in a step of a round, as the collectives see them.

The collectives post receives and sends on an Endpoint; chunks come in any order. A ``Sink`` puts each run of received
chunks where it belongs, exactly once a chunk; ``on_chunks`` then tells the collective, which may offer the
same chunks of the next message at once: that is how rounds are pipelined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from dblp.errors import ConfigError
from dblp.transport.policy import MAX_CRITICAL_SHARE, Stop
from dblp.transport.port import CLASSES

if TYPE_CHECKING:
    from dblp.transport.standing import Standing

GROUP_BITS, ROUND_BITS, STEP_BITS = 16, 32, 16


def message_id(group: int, round_: int, step: int) -> int:
    """The 64-bit id of a message: group (16 bits), round (32), leg and step (16); never reused in a generation."""
    if not (0 <= group < 1 << GROUP_BITS and 0 <= round_ < 1 << ROUND_BITS and 0 <= step < 1 << STEP_BITS):
        raise ConfigError(f"message id out of range: group {group}, round {round_}, step {step}")
    return group << (ROUND_BITS + STEP_BITS) | round_ << STEP_BITS | step


def round_of(message: int) -> int:
    """The round key (group and round, 48 bits) of a message id."""
    return message >> STEP_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSpec:
    """What both ends must agree on before a message moves."""

    nbytes: int
    """Length of the message in bytes; may be 0."""
    chunk_bytes: int
    """Bytes a chunk, a multiple of 16; all chunks but the last have this size (``Endpoint.chunk_bytes`` chooses it)."""
    budget: float = 0.0
    """Largest missing share of the chunks, [0, 1)."""
    stop: Stop = Stop.STALL
    """When the receiver stops waiting."""
    stop_after_s: float = 0.0
    """For ``Stop.DEADLINE``."""

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.nbytes // self.chunk_bytes)

    @property
    def may_miss(self) -> int:
        """Number of chunks that may miss."""
        return int(self.budget * self.chunks)


ClassCounts = tuple[int, int, int, int]
"""Chunks of class 0 to 3 in a message whose chunks have classes of their own; all 0 where they don't."""
UNTAGGED: ClassCounts = (0, 0, 0, 0)
"""The counts of a message whose chunks all have one class, which is not 0."""


def most_critical(chunks: int) -> int:
    """Most chunks of class 0 in a message of ``chunks``: what is always repaired must not be most of it, but one is always
    allowed."""
    return max(1, int(MAX_CRITICAL_SHARE * chunks))


def class_counts(spec: MessageSpec, classes: npt.NDArray[np.uint8]) -> ClassCounts:
    """How many chunks of each class; raises ConfigError if ``classes`` are not those of such a message."""
    if classes.dtype != np.uint8 or classes.shape != (spec.chunks,):
        raise ConfigError(
            f"classes of dtype {classes.dtype} and shape {classes.shape}: one uint8 for each of {spec.chunks} chunks is needed"
        )
    counts = np.bincount(classes, minlength=CLASSES).tolist()
    if len(counts) > CLASSES:
        raise ConfigError(
            f"a chunk of class {len(counts) - 1}: classes are 0 (critical) to {CLASSES - 1} (lost first)"
        )
    if counts[0] > most_critical(spec.chunks):
        raise ConfigError(
            f"{counts[0]} of {spec.chunks} chunks are of class 0: at most {MAX_CRITICAL_SHARE:.0%} may be critical, "
            "since they are always repaired; give the others class 1 to 3"
        )
    return counts[0], counts[1], counts[2], counts[3]


EXACT_CLASS = 1
"""Class of the chunks of an exact message: always repaired, behind control."""
BOUNDED_CLASS = 2
"""Class of the chunks of a bounded message."""


class Sink(Protocol):
    """Where received chunks go. Called on the loop's thread; the views are valid only during the call."""

    dtype: np.dtype[Any]
    """Element type in which ``place`` wants its rows; its size divides the chunk size and the message's length."""

    def place(self, first: int, rows: npt.NDArray[Any]) -> None:
        """Take chunks first.., one a row: (n, elements a chunk), or (bursts, chunks a burst, elements a chunk) for a train of
        bursts. The message's short last chunk comes as a call of its own with one shorter row. No chunk comes twice.
        A sink may also offer ``scatter(chunks, rows)`` for whole chunks in ascending order with gaps: both (n, ...), or both
        (bursts, n, ...)."""


@dataclass(slots=True, kw_only=True)
class Received:
    """How a receive ended."""

    missing: npt.NDArray[np.uint32]
    """Indices of the chunks that did not arrive, ascending; empty for an exact message."""
    energy_total: float = 0.0
    """Sum of squares of the whole message as its sender computed it (bounded messages only)."""


@dataclass(slots=True, kw_only=True)
class Sent:
    """How a send ended."""

    missing: npt.NDArray[np.uint32]
    """Indices of the chunks that the receiver did not count (from its FINAL); empty for an exact message."""
    chunks_sent: int = 0
    """First transmissions, in chunks."""
    chunks_resent: int = 0
    """Retransmissions, in chunks."""


OnChunks = Callable[[int, int], None]
"""``on_chunks(first, count)``: these chunks have just been placed."""
OnScattered = Callable[[npt.NDArray[np.uint32]], None]
"""``on_scattered(chunks)``: the same for chunks with gaps, ascending; where it is not given, ``on_chunks`` hears of each run."""


@dataclass(slots=True)
class RoundCounters:
    """What an endpoint notes of one round beside its messages."""

    chunks_duplicate: int = 0
    """Chunks that came a second time or too late."""
    told: dict[int, Standing] = field(default_factory=dict)
    """How the peers stand with the round, where they were asked (``EndpointLike.ask_standing``)."""
