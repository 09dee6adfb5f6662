"""Whether what a command will hold fits into this host's memory: asked before the work starts, not told by an allocator."""

from __future__ import annotations

from pathlib import Path

from dblp.errors import LocalError

MEMORY = Path("/proc/meminfo")
_GIB = 2**30


def available_bytes() -> int | None:
    """What new processes can have without swapping (proc(5), MemAvailable); None where the kernel does not tell."""
    try:
        lines = MEMORY.read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def require_memory(needed_bytes: int, what: str, remedy: str) -> None:
    """Raise LocalError with both figures if ``what`` holds more than there is. ``needed_bytes``: the least that it can be."""
    there = available_bytes()
    if there is not None and needed_bytes > there:
        raise LocalError(
            f"{what} would hold {_gib(needed_bytes)} at least, and this host has {_gib(there)} available: {remedy}"
        )


def _gib(size: int) -> str:
    return f"{size / _GIB:,.1f} GiB"
