"""On which processors a rank's engine runs: a share of its host's for each rank that may use the same ones.

Why. A datagram wakes the thread that waits for it from the processor of the thread that sent it, and Linux tends to put the
woken one there too. On a host with about as many ranks as processors two engines end up behind each other on one processor while
the other is idle, and stay so for a round: docs/performance.md, "Where the engine runs", has what that costs.
Launchers of MPI bind their processes for this reason; torchrun does not.

Who shares with whom is told at the rendezvous: each rank publishes a key of its machine and of the processors that it may use
(``processors_key``). Ranks that a launcher has bound to processors of their own have keys of their own, and are left alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from dblp.errors import ConfigError
from dblp.transport.config import ALL_CPUS, AUTO_CPUS
from dblp.units import parse_cpus

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
KEY_BYTES = 6
"""Of the hash in a key: among a million hosts two have the same one in two of a thousand jobs, and then share for no reason."""


def processors_key() -> str:
    """Names this machine and the processors that this process may use on it; empty if the machine has no name."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        return ""
    return make_key(boot, usable())


def make_key(boot: str, processors: Collection[int]) -> str:
    """The key of these processors of the machine that was booted as ``boot``."""
    text = f"{boot}/{','.join(map(str, sorted(processors)))}"
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * KEY_BYTES]


def usable() -> set[int]:
    """Processors that the process may use: those of its main thread, for an engine's may be bound already."""
    return os.sched_getaffinity(os.getpid())


def share(place: int, sharers: int, processors: Collection[int]) -> frozenset[int]:
    """The part of the processors that one of several ranks gets: neighbours, so that they share a cache; one of them, in turn,
    where there are fewer than ranks."""
    ordered = sorted(processors)
    if len(ordered) < sharers:
        return frozenset({ordered[place % len(ordered)]})
    first, last = (len(ordered) * number // sharers for number in (place, place + 1))
    return frozenset(ordered[first:last])


def engine_processors(
    text: str, rank: int, keys: Sequence[str], processors: Collection[int]
) -> tuple[frozenset[int] | None, int]:
    """The processors for this rank's engine, None to leave it to the scheduler, and how many ranks share those of its process.

    ``text``: the setting ``engine_cpus``; ``keys``: of all ranks; ``processors``: those that this process may use. Raises
    ConfigError for a list of which it may not use all.
    """
    sharers = [other for other, key in enumerate(keys) if key and key == keys[rank]] or [rank]
    if text not in (AUTO_CPUS, ALL_CPUS):
        chosen = parse_cpus(text)
        if not chosen <= frozenset(processors):
            raise ConfigError(
                f"engine_cpus={text!r}: this process may use only {', '.join(map(str, sorted(processors)))} (DBLP_ENGINE_CPUS)"
            )
        return chosen, len(sharers)
    if text == ALL_CPUS or len(sharers) == 1:
        return None, len(sharers)
    return share(sharers.index(rank), len(sharers), processors), len(sharers)
