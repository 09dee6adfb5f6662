"""``monitored_barrier``: a barrier that tells who has not come, and leaves the group usable.

It goes through the group's store, not over the network: it is asked when the network or a rank is in doubt,
and a deadline of a round would poison the group.
"""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import Any

from torch.distributed import DistBackendError

from dblp.collectives.rendezvous import list_ranks

_OK = b"ok"
_LEAST = timedelta(milliseconds=1)  # a wait of zero means the store's own default


def monitored_barrier(
    store: Any, number: int, rank: int, world_size: int, timeout: timedelta, wait_all_ranks: bool
) -> None:
    """Rank 0 waits for every rank, then lets all go. ``number`` counts the calls on this group.

    Raises DistBackendError that names the first rank that is missing after ``timeout`` (all of them with
    ``wait_all_ranks``); the other ranks raise it with rank 0's words. The texts begin as gloo's do: scripts look
    for them.
    """
    prefix = f"monitored/{number}"
    milliseconds = round(timeout.total_seconds() * 1e3)
    if rank == 0:
        text = _verdict(store, prefix, world_size, timeout, wait_all_ranks)
        store.set(f"{prefix}/go", text.encode() if text else _OK)
        if text:
            raise DistBackendError(text)
        return
    store.set(f"{prefix}/{rank}", b"here")
    # Rank 0 may come last and still wait for others: it has its own timeout, ours must outlast it.
    if not _there(store, f"{prefix}/go", 2 * timeout):
        raise DistBackendError(
            f"{_reached(rank)}: Rank 0 failed to pass monitoredBarrier: timeout after {2 * milliseconds} ms"
        )
    verdict = bytes(store.get(f"{prefix}/go"))
    if verdict != _OK:
        raise DistBackendError(f"{_reached(rank)}: {verdict.decode()}")


def _reached(rank: int) -> str:
    return (
        f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
        "send/recv from rank 0"
    )


def _verdict(store: Any, prefix: str, world_size: int, timeout: timedelta, wait_all_ranks: bool) -> str:
    """Rank 0's: what is wrong, or nothing."""
    milliseconds = round(timeout.total_seconds() * 1e3)
    if world_size > 1 and not milliseconds:
        return "[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms, before it could wait for any other rank"
    missing = _missing(store, prefix, world_size, timeout, wait_all_ranks)
    if not missing:
        return ""
    return (
        f"[Rank 0]: {list_ranks(missing).capitalize()} failed to pass monitoredBarrier in {milliseconds} ms"
    )


def _missing(store: Any, prefix: str, world_size: int, timeout: timedelta, wait_all_ranks: bool) -> list[int]:
    deadline = monotonic() + timeout.total_seconds()
    missing: list[int] = []
    for peer in range(1, world_size):
        left = timedelta(seconds=max(0.0, deadline - monotonic()))
        if not _there(store, f"{prefix}/{peer}", left):
            missing.append(peer)
            if not wait_all_ranks:
                break
    return missing


def _there(store: Any, key: str, timeout: timedelta) -> bool:
    try:
        store.wait([key], max(timeout, _LEAST))
    except RuntimeError:  # a DistStoreError from a TCPStore, a plain one from a FileStore
        return bool(store.check([key]))
    return True
