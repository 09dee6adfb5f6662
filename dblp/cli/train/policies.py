"""The arms of ``dblp train``: gloo, and dblp under policies by name.

A named policy is one entry of ``POLICIES``; its arm has its name, but for the two that every comparison starts from.
"""

from __future__ import annotations

from collections.abc import Callable

from dblp.collectives.presets import Preset, preset, presets
from dblp.transport.policy import Bounded

GLOO, EXACT, BOUNDED = "gloo", "dblp-exact", "dblp-bounded"
ARMS = (GLOO, EXACT, BOUNDED)
"""The default comparison. gloo: torch's own, over TCP on a clean loopback. The dblp arms: over UDP under the same impairment."""


def _bounded(budget: float, stop: str) -> Preset:
    return Preset(name="bounded", policy=Bounded(budget, stop=stop), source="--budget and --policy-stop")


POLICIES: dict[str, Callable[[float, str], Preset]] = {
    "exact": lambda budget, stop: preset("exact"),
    "bounded": _bounded,
    **{name: lambda budget, stop, name=name: preset(name) for name in presets() if name != "exact"},  # type: ignore[misc]
}
"""Policies by name: the presets, and one from the options ``--budget`` and ``--policy-stop``."""
_ARMS_OF = {"exact": EXACT, "bounded": BOUNDED}


def arm_of(policy: str) -> str:
    """The arm that runs a named policy."""
    return _ARMS_OF.get(policy, policy)


def known_arms() -> tuple[str, ...]:
    """gloo, and an arm for each named policy."""
    return (GLOO, *map(arm_of, POLICIES))


def policy_of(arm: str, budget: float, stop: str) -> Preset | None:
    """The policy of an arm, with what it asks of the transport; None for gloo. Raises ConfigError for a budget or stop rule
    that is none."""
    return next((make(budget, stop) for name, make in POLICIES.items() if arm_of(name) == arm), None)
