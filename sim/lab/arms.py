"""Arms of an experiment: what carries the gradients.

``gloo-cubic`` and ``gloo-bbr`` (or another of the kernel's congestion controls): torch's gloo over TCP. All else is dblp under a
policy by name (``collectives.named``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dblp.collectives.named import parse_policy
from dblp.collectives.presets import Preset
from dblp.errors import did_you_mean
from dblp.transport.policy import Policy
from dblp.transport.spec import Parser

GLOO = "gloo-"
CONGESTION_CONTROLS = (
    "bbr", "bic", "cdg", "cubic", "dctcp", "highspeed", "htcp", "hybla", "illinois", "lp", "nv", "reno", "scalable", "vegas",
    "veno", "westwood", "yeah",
)  # fmt: skip
"""TCP's congestion controls in Linux (net/ipv4/Kconfig); which of them a kernel has is seen when it is asked for one."""
_OFFERED = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
"""What this kernel has loaded, among them perhaps one of its own."""


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
    if not text.startswith(GLOO):
        return Arm(name=text, preset=parse_policy(text, "arm", also=("gloo-cubic", "gloo-bbr")))
    parser = Parser(text, "arm")
    start = parser.at
    name = parser.take_word("the name of an arm")
    congestion, known = name.removeprefix(GLOO), congestion_controls()
    if not parser.done or not congestion:
        parser.fail(
            start, "gloo takes TCP's congestion control in its name, as in gloo-cubic, and no settings"
        )
    if congestion not in known:
        near = did_you_mean(congestion, known)
        parser.fail(
            start,
            f"{congestion!r} is no congestion control of TCP: Linux has cubic, bbr, reno, dctcp and others{near}",
        )
    return Arm(name=text, congestion=congestion)


def congestion_controls() -> tuple[str, ...]:
    """Names that gloo's arms may have: those of Linux, and what this kernel offers beside them."""
    try:
        offered = _OFFERED.read_text().split()
    except OSError:
        offered = []
    return tuple(dict.fromkeys((*CONGESTION_CONTROLS, *offered)))
