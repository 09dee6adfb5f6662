"""How a rank stands with a round: asked and told while the round is late, so that its deadline names who is missing.

A rank that waits sees only who owes *it* something. Around a ring, or where a rank waits in an earlier round, that is a rank
which waits itself; who is missing is known to somebody else. So the ranks of a late round tell one another, by STATE, whether
they have called it, for whom they wait there, and of whom they hear nothing.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from dblp.transport.wire import Field

MOST_RANKS = 128
"""Ranks of either list that are told, the first ones: 512 bytes of both fit into the smallest datagram."""


class Stand(enum.IntEnum):
    """Where a rank is in its calls; the value is its code on the wire."""

    NOT_CALLED = 0
    """It has not called the round's collective."""
    WAITING = 1
    """It has, and waits."""
    OVER = 2
    """For it the round is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a rank tells of itself and a round. Ranks are the endpoint's."""

    stand: Stand
    waits_for: tuple[int, ...] = ()
    """Who owes it something in the round; of a rank that has not called it, in the rounds that it waits in instead."""
    silent: tuple[int, ...] = ()
    """Of whom it hears nothing."""


STATE_FIELDS = (
    Field("asks", "B", "1: the sender wants to be told the same of the receiver"),
    Field(
        "stand", "B", "0: it has not called the round's collective, 1: it waits, 2: the round is over for it"
    ),
    Field("waits_for", "H", "ranks that follow, which it waits for"),
    Field("silent", "H", "ranks that follow then, of which it hears nothing"),
)
"""STATE's payload, before the ranks, 2 bytes each."""
_STATE = struct.Struct("<" + "".join(field.code for field in STATE_FIELDS))


def encode_state(standing: Standing, *, asks: bool) -> bytes:
    """STATE's payload."""
    waits_for, silent = standing.waits_for[:MOST_RANKS], standing.silent[:MOST_RANKS]
    head = _STATE.pack(asks, standing.stand, len(waits_for), len(silent))
    return head + struct.pack(f"<{len(waits_for) + len(silent)}H", *waits_for, *silent)


def decode_state(payload: bytes) -> tuple[Standing, bool] | None:
    """What a peer tells, and whether it asks the same; None if the payload makes no sense."""
    try:
        asks, stand, waits_for, silent = _STATE.unpack_from(payload)
        ranks = struct.unpack(f"<{waits_for + silent}H", payload[_STATE.size :])
        return Standing(stand=Stand(stand), waits_for=ranks[:waits_for], silent=ranks[waits_for:]), bool(asks)
    except (struct.error, ValueError):
        return None


def not_called(waiting: Iterable[Standing]) -> Standing:
    """Of a rank that has not called the round: it may wait in others."""
    found = list(waiting)
    return Standing(
        stand=Stand.NOT_CALLED,
        waits_for=_union(standing.waits_for for standing in found),
        silent=_union(standing.silent for standing in found),
    )


def _union(lists: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({rank for ranks in lists for rank in ranks}))
