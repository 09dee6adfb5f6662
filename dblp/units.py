"""Units: sizes, times and rates from and to text, through named functions."""

from __future__ import annotations

import numbers
import re
from typing import NewType

from dblp.errors import ConfigError

ByteCount = NewType("ByteCount", int)
"""A size, bytes."""
Seconds = NewType("Seconds", float)
"""A span of time, seconds."""
BitsPerSecond = NewType("BitsPerSecond", float)
"""A rate, bits per second."""
Picoseconds = NewType("Picoseconds", int)
"""Simulated time of the packet engine: 64 bits of them are 106 days, and a byte at 400 Gb/s is exactly 20."""
PS_PER_S = 1_000_000_000_000

MOST_TIMEOUT_S = 1e9
"""Longest time to wait, seconds."""
MOST_CPUS = 8192
"""Linux numbers processors below it (CONFIG_NR_CPUS)."""

KIB = 1024
MIB = 1024 * 1024
GIB = 1024 * MIB

_SIZES = {
    "": 1, "b": 1, "k": KIB, "kb": KIB, "kib": KIB, "m": MIB, "mb": MIB, "mib": MIB, "g": GIB, "gb": GIB, "gib": GIB,
}  # fmt: skip
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0}
_RATES = {
    "": 1.0,
    "bit": 1.0,
    "bps": 1.0,
    "kbit": 1e3,
    "kbps": 1e3,
    "mbit": 1e6,
    "mbps": 1e6,
    "gbit": 1e9,
    "gbps": 1e9,
}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]*)\s*$")


def _parse(text: str, table: dict[str, float] | dict[str, int], what: str) -> float:
    if text.strip().startswith("-") and _NUMBER.match(text.strip()[1:]):
        raise ConfigError(f"{text!r} is not a {what}: it is negative")
    match = _NUMBER.match(text)
    if match is None or match[2].lower() not in table:
        units = ", ".join(unit for unit in table if unit)
        raise ConfigError(f"{text!r} is not a {what}: a number is expected, alone or with one of {units}")
    return float(match[1]) * table[match[2].lower()]


def parse_bytes(text: str) -> int:
    """Read a size: ``"25M"`` is 25 MiB (powers of 1024), ``"1.367KB"`` the nearest byte; raises ConfigError, also for parts of a
    byte without a unit."""
    size = _parse(text, _SIZES, "size")
    if size != round(size) and not re.search("[kmgt]", text.lower()):
        raise ConfigError(f"{text!r}: {size:g} bytes are not a whole number")
    return round(size)


def parse_seconds(text: str) -> float:
    """Read a time: ``"200ms"`` is 0.2; a bare number is in seconds; raises ConfigError."""
    return _parse(text, _TIMES, "time")


def check_timeout(name: str, seconds: object) -> float:
    """A time to wait as a float; raises ConfigError for what is no number, and for one that is not above 0 or beyond
    ``MOST_TIMEOUT_S``, infinity included: clocks cannot tell such a time."""
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
        raise ConfigError(f"{name}={seconds!r}: a number of seconds is needed, not {type(seconds).__name__}")
    value = float(seconds)
    if not value > 0:
        raise ConfigError(f"{name}={value:g}: a time above 0 seconds is needed")
    if value > MOST_TIMEOUT_S:
        raise ConfigError(f"{name}={value:g}: at most {MOST_TIMEOUT_S:g} seconds can be waited (30 years)")
    return value


def parse_bps(text: str) -> float:
    """Read a rate in bits per second: ``"1gbit"`` is 1e9 (powers of 1000); raises ConfigError."""
    return _parse(text, _RATES, "rate")


def parse_cpus(text: str) -> frozenset[int]:
    """Read a list of processors as taskset takes it: ``"0-3,8"``; raises ConfigError."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = (
            number.strip() for number in (part if "-" in part else f"{part}-{part}").partition("-")
        )
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ConfigError(f"{text!r}: {part!r} is neither a processor nor a range of them such as '0-3'")
        if int(last) >= MOST_CPUS:
            raise ConfigError(f"{text!r}: there is no processor {last}; Linux numbers them below {MOST_CPUS}")
        cpus.update(range(int(first), int(last) + 1))
    return frozenset(cpus)


def picoseconds(seconds: float) -> Picoseconds:
    """Round a time in seconds to the packet engine's unit."""
    return Picoseconds(round(seconds * PS_PER_S))


def format_bytes(size: float) -> str:
    """Write a size in powers of 1024: ``26214400`` is ``"25 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.4g} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """Write a time with three digits and a fitting unit: ``0.0213`` is ``"21.3 ms"``."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"


def format_count(count: int, what: str) -> str:
    """Write a number of things: ``(1, "round")`` is ``"1 round"``, ``(2, "round")`` is ``"2 rounds"``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
