"""Arms of an experiment: what carries the gradients.

``gloo-cubic`` and ``gloo-bbr`` (or another of the kernel's congestion controls): torch's gloo over TCP. ``dblp-exact``,
``bounded(budget=0.1)`` or the name of a preset: dblp under that policy. A preset's settings go in brackets, as in
``default(leg=0.4)``; ``phase=tolerant`` takes the policy of a tolerant phase where the preset has phases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dblp.collectives.presets import Preset, preset, presets
from dblp.errors import ConfigError, did_you_mean
from dblp.transport.policy import Bounded, Policy
from dblp.transport.spec import Parser

GLOO = "gloo-"
EXACT = "dblp-exact"
CONGESTION_CONTROLS = (
    "bbr", "bic", "cdg", "cubic", "dctcp", "highspeed", "htcp", "hybla", "illinois", "lp", "nv", "reno", "scalable", "vegas",
    "veno", "westwood", "yeah",
)  # fmt: skip
"""TCP's congestion controls in Linux (net/ipv4/Kconfig); which of them a kernel has is seen when it is asked for one."""
_OFFERED = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
"""What this kernel has loaded, among them perhaps one of its own."""
_BOUNDED: dict[str, Callable[[str], Any]] = {
    "budget": float,
    "stop": str,
    "stop_after_s": float,
    "consistency": str,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to all-reduce."""

    name: str
    """As it was written; also what figures call it."""
    congestion: str = ""
    """TCP's congestion control, for gloo; empty for dblp."""
    preset: Preset | None = None
    """Policy and transport, for dblp; None for gloo."""

    @property
    def lossy(self) -> bool:
        """Whether its rounds may miss anything."""
        return self.preset is not None and self.preset.policy.lossy

    def policy(self, algorithm: str) -> Policy | None:
        """The policy of its rounds; ``algorithm`` wins over the preset's own unless it is ``auto``. None for gloo."""
        if self.preset is None or algorithm == "auto":
            return self.preset.policy if self.preset is not None else None
        return replace(self.preset.policy, algorithm=algorithm)


def parse_arm(text: str) -> Arm:
    """Read an arm; raises ConfigError with the column of the fault."""
    parser = Parser(text, "arm")
    start = parser.at
    name = parser.take_word("the name of an arm")
    settings = _settings(parser) if not parser.done else {}
    if not parser.done:
        parser.fail(parser.at, f"expected the end, found {parser.found()}")
    if name.startswith(GLOO):
        if settings or name == GLOO:
            parser.fail(
                start, "gloo takes TCP's congestion control in its name, as in gloo-cubic, and no settings"
            )
        congestion, known = name.removeprefix(GLOO), congestion_controls()
        if congestion not in known:
            near = did_you_mean(congestion, known)
            parser.fail(
                start,
                f"{congestion!r} is no congestion control of TCP: Linux has cubic, bbr, reno, dctcp and others{near}",
            )
        return Arm(name=text, congestion=congestion)
    try:
        return Arm(name=text, preset=_preset(name, settings))
    except (ConfigError, ValueError) as error:
        parser.fail(start, str(error))


def congestion_controls() -> tuple[str, ...]:
    """Names that gloo's arms may have: those of Linux, and what this kernel offers beside them."""
    try:
        offered = _OFFERED.read_text().split()
    except OSError:
        offered = []
    return tuple(dict.fromkeys((*CONGESTION_CONTROLS, *offered)))


def _settings(parser: Parser) -> dict[str, str]:
    parser.take("(", "'(' or the end after the name")
    settings: dict[str, str] = {}
    while not parser.text.startswith(")", parser.at):
        if settings:
            parser.take(",", "',' or ')'")
        start = parser.at
        key = parser.take_word("the name of a setting")
        parser.take("=", f"'=' after {key}")
        if key in settings:
            parser.fail(start, f"{key} is given twice")
        settings[key] = parser.take_word(f"a value of {key}")
    parser.take(")", "')'")
    return settings


def _preset(name: str, settings: dict[str, str]) -> Preset:
    if name == "bounded":
        return _bounded(settings)
    known = presets()
    if name not in (EXACT, *known):
        raise ConfigError(
            f"{name!r} is none: known are gloo-cubic, gloo-bbr, {EXACT}, bounded, {', '.join(known)}"
            f"{did_you_mean(name, ('gloo-cubic', 'gloo-bbr', EXACT, 'bounded', *known))}"
        )
    phase = settings.pop("phase", "critical")
    made = preset(name.removeprefix("dblp-"), **{key: _number(key, value) for key, value in settings.items()})
    if phase == "critical":
        return made
    if phase != "tolerant" or made.tolerant is None:
        phases = "critical or tolerant" if made.tolerant is not None else "critical only, as it has no phases"
        raise ConfigError(f"phase={phase}: {name} knows {phases}")
    return replace(made, policy=made.tolerant, controller=None)


def _bounded(settings: dict[str, str]) -> Preset:
    unknown = [key for key in settings if key not in _BOUNDED]
    if unknown or "budget" not in settings:
        what = f"has no {unknown[0]!r}" if unknown else "lacks budget"
        raise ConfigError(f"bounded {what}: bounded(budget, {', '.join(list(_BOUNDED)[1:])})")
    numbers = {
        key: _number(key, settings[key])
        for key, kind in _BOUNDED.items()
        if kind is float and key in settings
    }
    policy = Bounded(**{**settings, **numbers})  # type: ignore[arg-type]
    return Preset(name="bounded", policy=policy, source="Bounded")


def _number(key: str, text: str) -> float:
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ConfigError(f"{key}={text}: a number is expected") from None
