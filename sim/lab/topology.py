"""Topologies of the laboratory: what a person writes in a TOML table, and the names that ship.

``load_topology("star")`` takes a shipped file, ``load_topology({"kind": "star", "hosts": 8, "rate": "1gbit"})`` a table.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from dblp.errors import ConfigError, did_you_mean
from dblp.units import KIB, MIB, parse_bps, parse_bytes, parse_seconds

KINDS = ("star", "two-sites", "dumbbell", "leaf-spine")
DISCIPLINES = ("fifo", "red", "prio")
LEAST_RED_BYTES = 16 * KIB
"""Queue that RED needs at least, so that its thresholds are several packets apart."""
LEAST_BPS = 8_000.0
"""Least rate of a link, bits per second: a packet of 1500 bytes takes 1.5 s. tc counts in whole bytes a second: very small rates
would be others, or none."""
MOST_BPS = 1e12
MOST_QUEUE_BYTES = 1024 * MIB
MOST_DELAY_S = 60.0
MAX_HOSTS = 64
"""Hosts and cross hosts together: each is a namespace with its own addresses, and one bridge counts them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Hosts, links and routers. Raises ConfigError that names the field. Link names: ``h0``, ``h1``, ... (each host's own),
    ``core`` (between two switches), ``l0s1`` (leaf 0 to spine 1), ``x0``, ``y0`` (cross hosts).

    The defaults are a rack whose bottleneck is the processor: no rate, no delay."""

    kind: str
    """``star``: one switch. ``two-sites`` and ``dumbbell``: two switches and a core link. ``leaf-spine``: routers with ECMP."""
    hosts: int
    """Hosts that ranks run on; in two sites the first half is on the left."""
    rate_bps: float = 0.0
    """Rate of each host's link, both ways, bits per second; 0: no limit."""
    delay_s: float = 0.0
    """One-way delay of each host's link towards the host, seconds: a datagram meets it once. Needs netem."""
    queue_bytes: int = 256 * KIB
    """Queue of the switch before each host's link, bytes (with a rate)."""
    core_rate_bps: float = 0.0
    """Rate of the core link, or of each link between a leaf and a spine; 0: no limit."""
    core_delay_s: float = 0.0
    """One-way delay of those links, seconds. Needs netem."""
    core_queue_bytes: int = 256 * KIB
    """Queue at both ends of those links, bytes (with a rate)."""
    cross: int = 0
    """Pairs of hosts (x0 to y0, ...) for traffic beside that of the ranks: x on the left, y on the right."""
    leaves: int = 2
    """Leaf routers (leaf-spine)."""
    spines: int = 2
    """Spine routers (leaf-spine)."""
    mtu: int = 1500
    """Largest IP packet, bytes."""
    discipline: str = "fifo"
    """Of the switches' queues (with a rate): ``fifo``; ``red``, which marks ECN before it drops; ``prio``, four bands by DSCP."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"topology: kind={self.kind!r} is none: known are {', '.join(KINDS)}")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise ConfigError(f"topology: {name}={value!r}: needs a number in {low:g}..{high:g}")
            if name in _WHOLE and not isinstance(value, int):
                raise ConfigError(f"topology: {name}={value!r}: needs a whole number")
        for name in ("rate_bps", "core_rate_bps"):
            if 0 < getattr(self, name) < LEAST_BPS:
                key = name.removesuffix("_bps")
                raise ConfigError(f"topology: {key}: {too_slow(getattr(self, name))}; 0: no limit")
        self._check_together()

    def _check_together(self) -> None:
        if self.hosts + 2 * self.cross > MAX_HOSTS:
            raise ConfigError(
                f"topology: hosts={self.hosts} with cross={self.cross} makes {self.hosts + 2 * self.cross} namespaces of hosts; "
                f"at most {MAX_HOSTS} fit"
            )
        if self.kind == "star" and (self.core_rate_bps or self.core_delay_s):
            raise ConfigError(
                "topology: core_rate and core_delay: a star has no core link; use rate and delay"
            )
        if self.discipline not in DISCIPLINES:
            raise ConfigError(
                f"topology: discipline={self.discipline!r} is none: known are {', '.join(DISCIPLINES)}"
            )
        if self.discipline != "fifo" and not (self.rate_bps or self.core_rate_bps):
            raise ConfigError(
                f"topology: discipline={self.discipline!r} needs a rate: without one nothing queues"
            )
        if self.discipline == "red" and min(self.queue_bytes, self.core_queue_bytes) < LEAST_RED_BYTES:
            raise ConfigError(f"topology: discipline='red' needs queues of at least {LEAST_RED_BYTES} bytes")
        for rate, queue in (("rate_bps", "queue_bytes"), ("core_rate_bps", "core_queue_bytes")):
            if getattr(self, rate) and getattr(self, queue) < 2 * self.mtu:
                raise ConfigError(
                    f"topology: {queue}={getattr(self, queue)} holds less than two packets of mtu={self.mtu}"
                )

    @property
    def needs_delay(self) -> bool:
        """Whether the kernel has to delay packets (netem)."""
        return bool(self.delay_s or self.core_delay_s)


_RANGES: Mapping[str, tuple[float, float]] = {
    "hosts": (1, MAX_HOSTS),
    "rate_bps": (0, MOST_BPS),
    "delay_s": (0, MOST_DELAY_S),
    "queue_bytes": (1, MOST_QUEUE_BYTES),
    "core_rate_bps": (0, MOST_BPS),
    "core_delay_s": (0, MOST_DELAY_S),
    "core_queue_bytes": (1, MOST_QUEUE_BYTES),
    "cross": (0, 16),
    "leaves": (1, 16),
    "spines": (1, 16),
    "mtu": (576, 9216),
}
_WHOLE = {"hosts", "queue_bytes", "core_queue_bytes", "cross", "leaves", "spines", "mtu"}
_KEYS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "rate": ("rate_bps", parse_bps),
    "delay": ("delay_s", parse_seconds),
    "queue": ("queue_bytes", parse_bytes),
    "core_rate": ("core_rate_bps", parse_bps),
    "core_delay": ("core_delay_s", parse_seconds),
    "core_queue": ("core_queue_bytes", parse_bytes),
}
"""Keys of the table that take a text with a unit, the field that each stands for, and how it is read."""
_PLAIN = ("kind", "hosts", "cross", "leaves", "spines", "mtu", "discipline")


def too_slow(bps: float) -> str:
    """Why a rate below ``LEAST_BPS`` is refused."""
    return f"{bps:g} bit/s will not do: {LEAST_BPS / 1000:g}kbit at least, at which a packet of 1500 bytes takes 1.5 s"


def load_topology(source: str | Path | Mapping[str, Any], **changes: Any) -> Topology:
    """A shipped name, the path of a TOML file, or a table; ``changes`` are keys of the table that win.

    Raises ConfigError that names the file and the key.
    """
    if isinstance(source, Mapping):
        return _from_table({**source, **changes}, "topology")
    where, text = _read(source)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not TOML: {error}") from None
    return _from_table({**table, **changes}, where)


def shipped() -> tuple[str, ...]:
    """Names of the topologies that ship."""
    folder = resources.files("dblp.sim.lab").joinpath("topologies")
    return tuple(sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".toml")))


def _read(source: str | Path) -> tuple[str, str]:
    """What to call the source in errors, and its text."""
    if isinstance(source, str) and source in shipped():
        return f"topology {source}", resources.files("dblp.sim.lab").joinpath(
            "topologies", f"{source}.toml"
        ).read_text()
    path = Path(source)
    if path.suffix != ".toml":
        raise ConfigError(
            f"topology {source!s}: neither a .toml file nor one that ships ({', '.join(shipped())})"
            f"{did_you_mean(str(source), shipped())}"
        )
    try:
        return str(path), path.read_text()
    except OSError as error:
        raise ConfigError(f"topology {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"topology {path}: cannot be read: it is no text") from None


def _from_table(table: Mapping[str, Any], where: str) -> Topology:
    known = (*_PLAIN, *_KEYS)
    unknown = [key for key in table if key not in known]
    if unknown:
        near = did_you_mean(unknown[0], known)
        raise ConfigError(f"{where}: no field {unknown[0]!r}: known are {', '.join(known)}{near}")
    missing = [key for key in ("kind", "hosts") if key not in table]
    if missing:
        raise ConfigError(f"{where}: lacks {' and '.join(missing)}")
    values = dict(_field(key, value, where) for key, value in table.items())
    try:
        return Topology(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix('topology: ')}") from None


def _field(key: str, value: Any, where: str) -> tuple[str, Any]:
    if key not in _KEYS:
        return key, value
    name, parse = _KEYS[key]
    try:
        return name, parse(str(value)) if isinstance(value, (str, int, float)) else value
    except ConfigError as error:
        raise ConfigError(f"{where}: {key}: {error}") from None
