"""The arms of ``dblp train``: gloo, and dblp under policies by name.

A named policy is one entry of ``POLICIES``; its arm has its name, but for the two that every comparison starts from.
"""

from __future__ import annotations

from collections.abc import Callable

from dblp.transport.policy import Bounded, Exact, Policy

GLOO, EXACT, BOUNDED = "gloo", "dblp-exact", "dblp-bounded"
ARMS = (GLOO, EXACT, BOUNDED)
"""The default comparison. gloo: torch's own, over TCP on a clean loopback. The dblp arms: over UDP under the same impairment."""

POLICIES: dict[str, Callable[[float, str], Policy]] = {
    "exact": lambda budget, stop: Exact(),
    "bounded": lambda budget, stop: Bounded(budget, stop=stop),
}
"""Policies by name, from the options ``--budget`` and ``--policy-stop``."""
_ARMS_OF = {"exact": EXACT, "bounded": BOUNDED}


def arm_of(policy: str) -> str:
    """The arm that runs a named policy."""
    return _ARMS_OF.get(policy, policy)


def known_arms() -> tuple[str, ...]:
    """gloo, and an arm for each named policy."""
    return (GLOO, *map(arm_of, POLICIES))


def policy_of(arm: str, budget: float, stop: str) -> Policy | None:
    """The policy of an arm; None for gloo. Raises ConfigError for a budget or stop rule that is none."""
    return next((make(budget, stop) for name, make in POLICIES.items() if arm_of(name) == arm), None)
