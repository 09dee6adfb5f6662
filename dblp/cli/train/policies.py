"""The arms of ``dblp train``: gloo, dblp under policies by name, and dblp with compressed gradients.

A named policy is one entry of ``POLICIES``; its arm has its name, but for the two that every comparison starts from. An arm with
compression is called by the string that names the method: with ``gloo:`` before it where it runs over gloo, and as ``METHOD over
POLICY`` where its rounds may lose something.
"""

from __future__ import annotations

from collections.abc import Callable

from dblp.cli.train.recipes import SGD
from dblp.collectives.compression.base import Method
from dblp.collectives.compression.dgc import DGC
from dblp.collectives.compression.lossy import check_lossy
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.named import plain_name
from dblp.collectives.presets import Preset, preset, presets
from dblp.errors import ConfigError, UnsupportedError
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
OVER_GLOO = f"{GLOO}:"
"""Before the name of a method that runs over torch's gloo backend."""
_ARMS_OF = {"exact": EXACT, "bounded": BOUNDED}


def arm_of(policy: str) -> str:
    """The arm that runs a named policy; any other name as it is."""
    policy = plain_name(policy)
    return _ARMS_OF.get(policy, policy)


def known_arms() -> tuple[str, ...]:
    """gloo, and an arm for each named policy."""
    return (GLOO, *map(arm_of, POLICIES))


def parse_compressions(text: str) -> list[str]:
    """Arms of compression methods, from ``"topk(0.01); dgc over bounded; gloo:dgc"``; raises ConfigError for what is none."""
    arms = [" ".join(part.split()) for part in text.split(";") if part.strip()]
    if text.strip() and not arms:
        raise ConfigError(f"--compression {text!r}: names no method, as in 'topk(ratio=0.01); dgc'")
    for arm in arms:
        if not arm.removeprefix(OVER_GLOO).strip():
            raise ConfigError(f"--compression {arm!r}: names no method, as in '{OVER_GLOO}topk(ratio=0.01)'")
        if arms.count(arm) > 1:
            raise ConfigError(f"--compression: {arm!r} stands twice")
        method, policy = _method_and_policy(arm.removeprefix(OVER_GLOO))
        if arm.startswith(OVER_GLOO) and policy != "exact":
            raise ConfigError(f"--compression {arm!r}: gloo loses nothing, leave out the policy")
        if policy in POLICIES and parse_compression(method).follows_phases and arm.startswith(OVER_GLOO):
            raise ConfigError(
                f"--compression {arm!r}: it follows phases, which dblp decides; leave out 'gloo:'"
            )
        if policy not in POLICIES:
            raise ConfigError(
                f"--compression {arm!r}: no policy {policy!r} to run over; known are {', '.join(POLICIES)}"
            )
    return arms


def _method_and_policy(arm: str) -> tuple[str, str]:
    """The strings of an arm with compression."""
    method, over, policy = arm.partition(" over ")
    return method, plain_name(policy.strip()) if over else "exact"


def is_bounded(arm: str) -> bool:
    """True if ``--budget`` and ``--policy-stop`` are for this arm."""
    return arm == BOUNDED or (arm not in known_arms() and _method_and_policy(arm)[1] == "bounded")


def method_of(arm: str) -> Method | None:
    """The compression of an arm; None where there is none."""
    return (
        None if arm in known_arms() else parse_compression(_method_and_policy(arm.removeprefix(OVER_GLOO))[0])
    )


def check_arm(arm: str, budget: float, stop: str, ranks: int, optimizer: str) -> None:
    """Raise ConfigError for a compression that does not go with its policy, in any phase, or with the optimiser: before the arms
    that come first have trained in vain."""
    method, policy = method_of(arm), policy_of(arm, budget, stop)
    if method is None:
        return
    if isinstance(method, DGC) and method.momentum and optimizer != SGD:
        raise ConfigError(
            f"--compression {arm!r}: DGC is defined for SGD alone, not for --optimizer {optimizer}; take sgd, or another method"
        )
    try:
        for kept in (policy.policy, policy.tolerant) if policy is not None else ():
            if kept is not None:
                check_lossy(kept, method, ranks)
    except (ConfigError, UnsupportedError) as error:
        raise ConfigError(f"--compression {arm!r}: {error}") from None


def policy_of(arm: str, budget: float, stop: str) -> Preset | None:
    """The policy of an arm, with what it asks of the transport; None for gloo. Raises ConfigError for a budget or stop rule
    that is none."""
    if arm not in known_arms():
        if arm.startswith(OVER_GLOO):
            return None
        arm = arm_of(_method_and_policy(arm)[1])
    return next((make(budget, stop) for name, make in POLICIES.items() if arm_of(name) == arm), None)
