"""Who is missing when a wait has ended without success: of the ranks that are waited for, those that wait for nobody themselves.

Theory of operation. Each rank knows who owes it something, of whom it hears nothing, and what the others have told of themselves
(``transport.standing``). "Waits for" is a graph: a rank that waits is not to blame, whoever it waits for may be. So the ones to
name are found at the ends of the graph: who is silent, who hears nothing from here, who has not called the collective and waits
nowhere else. Only if there is no such rank, as where an older peer tells nothing, those are named that owe something here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from dblp.transport.standing import Stand, Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What one rank knows when its wait expires. All ranks are the endpoint's."""

    rank: int
    """The one that waits."""
    peers: Collection[int]
    """The other ranks of the group."""
    owed: Collection[int]
    """Who owes it something."""
    culprits: Collection[int] = ()
    """Those of them to name if nothing better is known; empty: all."""
    silent: Collection[int] = ()
    """Of whom it hears nothing."""
    told: Mapping[int, Standing] = field(default_factory=dict)
    """What the peers have told of themselves."""


def find_missing(evidence: Evidence) -> dict[int, str]:
    """The ranks to name, ascending, with what is known of each, in words (empty: nothing but that it owes something)."""
    found = dict.fromkeys(evidence.silent, "")
    found |= _deaf(evidence) | _elsewhere(evidence)
    if not found:
        found = _links(evidence)
    if not found:
        reached = _reached(evidence)
        found = dict.fromkeys((peer for peer in reached if peer not in evidence.told), "")
        if len(found) == len(reached):  # nobody has told anything
            found = {}
    if not found:
        found = dict.fromkeys(evidence.culprits or evidence.owed, "")
    return dict(sorted(found.items()))


def _deaf(evidence: Evidence) -> dict[int, str]:
    """Peers that are heard here but hear nothing from here."""
    return {
        peer: f"hears nothing from rank {evidence.rank}"
        for peer, standing in _told(evidence)
        if evidence.rank in standing.silent
    }


def _elsewhere(evidence: Evidence) -> dict[int, str]:
    """Peers that have not called the collective, and wait for nobody in another."""
    return {
        peer: "has not called it"
        for peer, standing in _told(evidence)
        if standing.stand is Stand.NOT_CALLED and not standing.waits_for
    }


def _links(evidence: Evidence) -> dict[int, str]:
    """Pairs of peers that are both heard here, one of which hears nothing from the other."""
    found: dict[int, str] = {}
    for peer, standing in _told(evidence):
        for other in standing.silent:
            if other in evidence.peers:
                found[peer] = f"hears nothing from rank {other}"
                found.setdefault(other, f"is not heard by rank {peer}")
    return found


def _reached(evidence: Evidence) -> list[int]:
    """Peers that this rank waits for, and whom those wait for, and so on."""
    found: dict[int, None] = {}
    left = list(evidence.owed)
    while left:
        peer = left.pop()
        if peer in found or peer == evidence.rank:
            continue
        found[peer] = None
        if (standing := evidence.told.get(peer)) is not None:
            left += standing.waits_for
    return sorted(found)


def _told(evidence: Evidence) -> Iterable[tuple[int, Standing]]:
    """What living peers of the group have told."""
    for peer, standing in sorted(evidence.told.items()):
        if peer in evidence.peers and peer not in evidence.silent:
            yield peer, standing
