"""Loss by nftables, where packets pass a bridge or router: a rule a point, a named counter a rule.

Theory of operation. Each point has a chain; a ruleset is replaced in one transaction (``nft -f -``), and the counters, which
are objects of their own, go on through it. Uniform loss is ``numgen random``. Gilbert-Elliott needs a state: a dynamic set has
the point's device as an element while the point is in its bad state. The rules add it with probability p and delete it with
probability r, packet by packet, so that runs have the geometric lengths of the model. A deleted element keeps its place until
the set's next collection, once a second: hence the set's size, which bounds the bursts a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dblp.sim.lab.impairments import Conditions
from dblp.sim.lab.plan import Point, Role
from dblp.transport.impair_spec import GilbertElliott, Loss

TABLE = "dblp"
_PARTS = 100_000_000
"""Resolution of a share."""
_BAD_SET = "type ifname; flags dynamic,timeout; timeout 1h; gc-interval 1s; size 65535;"
_FAMILIES = {Role.SWITCH: ("bridge", "ether type ip "), Role.ROUTER: ("ip", "")}
"""The family of a node's table, and what tells IP packets there: address resolution is never dropped."""


def family_of(role: Role) -> str:
    """``bridge`` or ``ip``."""
    return _FAMILIES[role][0]


def base_ruleset(role: Role, points: Iterable[Point]) -> str:
    """Table, counters, sets and chains of a node, before any loss."""
    family, match = _FAMILIES[role]
    lines = [
        f"add table {family} {TABLE}",
        f"add chain {family} {TABLE} forward {{ type filter hook forward priority 0; policy accept; }}",
    ]
    for point in points:
        lines += [f"add counter {family} {TABLE} {kind}_{point.name}" for kind in ("seen", "model")]
        lines.append(f"add set {family} {TABLE} bad_{point.name} {{ {_BAD_SET} }}")
        lines += [f"add chain {family} {TABLE} {chain}_{point.name}" for chain in ("at", "while_bad")]
        lines.append(
            f'add rule {family} {TABLE} forward {match}{_key(point)} "{point.device}" jump at_{point.name}'
        )
    return "\n".join(lines) + "\n"


def loss_ruleset(role: Role, losses: Mapping[Point, Conditions]) -> str:
    """The transaction that gives each point its loss, in place of what it had."""
    family = family_of(role)
    lines = []
    for point, conditions in losses.items():
        place = f"{family} {TABLE}"
        lines += [f"flush chain {place} {chain}_{point.name}" for chain in ("at", "while_bad")]
        lines.append(f"flush set {place} bad_{point.name}")
        lines += [f"add rule {place} at_{point.name} {rule}" for rule in _rules(point, conditions)]
        lines += [f"add rule {place} while_bad_{point.name} {rule}" for rule in _bad_rules(point, conditions)]
    return "\n".join(lines) + "\n"


def read_counters(document: Mapping[str, Any]) -> dict[str, int]:
    """Packets by counter (``seen_h0_down``, ``model_h0_down``) from ``nft -j list counters``."""
    counters = (entry["counter"] for entry in document.get("nftables", ()) if "counter" in entry)
    return {counter["name"]: int(counter["packets"]) for counter in counters if counter["table"] == TABLE}


def _rules(point: Point, conditions: Conditions) -> list[str]:
    """Of the good state, which is the only one of uniform loss."""
    rules = [f"counter name seen_{point.name}"]
    ge, loss = conditions.get(GilbertElliott), conditions.get(Loss)
    if ge is not None:
        key = _key(point)
        rules.append(f"{key} @bad_{point.name} goto while_bad_{point.name}")
        rules += _by_chance(ge.p, f"add @bad_{point.name} {{ {key} }}")
        rules += _drop(point, ge.good)
    elif loss is not None:
        rules += _drop(point, loss.p)
    return rules


def _bad_rules(point: Point, conditions: Conditions) -> list[str]:
    ge = conditions.get(GilbertElliott)
    if ge is None:
        return []
    leave = _by_chance(ge.r, f"delete @bad_{point.name} {{ {_key(point)} }}")
    return leave + _drop(point, ge.bad)


def _drop(point: Point, share: float) -> list[str]:
    return _by_chance(share, f"counter name model_{point.name} drop")


def _by_chance(share: float, what: str) -> list[str]:
    parts = round(share * _PARTS)
    if parts == 0:
        return []
    return [what] if parts == _PARTS else [f"numgen random mod {_PARTS} < {parts} {what}"]


def _key(point: Point) -> str:
    return "iifname" if point.ingress else "oifname"
