"""How this kernel can impair: tried in throw-away network namespaces, which end with the command that made them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from dblp.sim.lab import tools
from dblp.sim.lab.tools import LabError

_RED = "red limit 60000 min 5000 max 20000 avpkt 1000 burst 20 ecn bandwidth 1mbit"
_DISCIPLINES = {"red": tuple(_RED.split()), "prio": ("prio",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Which of the kernel's parts do what. ``loss`` is ``netem``, ``nft`` or empty."""

    loss: str
    """netem where the kernel has it, else nftables in the bridge."""
    netem: bool
    """Delay, jitter, reordering, duplicates and corruption can be done."""
    nft: bool
    tbf: bool
    """Rates and queues can be done."""
    why: str = ""
    """What the kernel said where something is missing."""

    def need_netem(self, what: str) -> None:
        """Raise LabError that names the remedy where something needs netem and the kernel has none."""
        if not self.netem:
            raise LabError(
                f"{what} needs tc's netem, which this kernel refuses ({self.why or 'no sch_netem'}). Remedy: modprobe sch_netem; "
                "Debian: linux-image without -cloud; Fedora: kernel-modules-extra; or run this in a guest whose kernel has it"
            )


def in_words(means: Mapping[str, str]) -> str:
    """How a run is done and why, from ``means`` of its JSON."""
    ways = {"netem": "tc netem", "nft": "nftables", "none": "nothing"}
    by = {name: ways.get(means.get(name, "none"), means.get(name)) for name in ("loss", "rate", "delay")}
    why = f" (netem is refused: {means['why']})" if means.get("why") else ""
    return f"loss by {by['loss']}, rates by {by['rate']}, delays by {by['delay']}{why}"


def refused_discipline(name: str) -> str:
    """What the kernel says against a topology's queueing discipline; empty if it takes it (``fifo`` is always there)."""
    return (
        tried("tc", "qdisc", "add", "dev", "lo", "root", *_DISCIPLINES[name]) if name in _DISCIPLINES else ""
    )


def need_discipline(name: str) -> None:
    """Raise LabError where the kernel lacks a queueing discipline that a topology asks for."""
    said = refused_discipline(name)
    if said:
        raise LabError(
            f"topology: discipline={name!r}: this kernel refuses it ({said}). Remedy: modprobe sch_{name}"
        )


def tried(*command: str) -> str:
    """Try a command in a network namespace of its own; what it said against it, empty if it worked."""
    if tools.find("unshare") is None or tools.find(command[0]) is None:
        return f"no command {command[0] if tools.find('unshare') else 'unshare'}"
    done = tools.attempt(["unshare", "--net", "--", tools.need(command[0]), *command[1:]])
    return (
        ""
        if done.returncode == 0
        else (done.stderr or done.stdout).strip().removeprefix("Error: ") or "refused"
    )


@functools.cache
def detect() -> Means:
    """Try all; once a process, as a kernel doesn't change meanwhile."""
    netem = tried("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    nft = tried("nft", "add table bridge t; add chain bridge t c { type filter hook forward priority 0; }")
    tbf = tried(
        "tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1gbit", "burst", "3000", "limit", "10000"
    )
    return Means(
        loss="nft" if netem and not nft else "" if netem else "netem",
        netem=not netem,
        nft=not nft,
        tbf=not tbf,
        why=netem,
    )
