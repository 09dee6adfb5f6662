"""On which processors a rank's engine runs: a share of the host's for each rank that it has.

Why. A datagram wakes the thread that waits for it from the processor of the thread that sent it, and Linux tends to put the
woken one there too. On a host with about as many ranks as processors two engines end up behind each other on one processor while
the other is idle, and stay so for a round: 1 MiB between two ranks on two processors took twice as long (docs/performance.md).
Launchers of MPI bind their processes for this reason; torchrun does not.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from dblp.errors import ConfigError
from dblp.transport.config import ALL_CPUS, AUTO_CPUS
from dblp.units import parse_cpus

LOCAL_RANKS = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)
"""Variables that tell a process which of how many ranks of its host it is: torchrun, Open MPI, MPICH and Intel MPI, Slurm."""


def share(local_rank: int, local_ranks: int, processors: Collection[int]) -> frozenset[int]:
    """The part of a host's processors that one of its ranks gets: neighbours, so that they share a cache; one of them, in turn,
    where there are fewer than ranks."""
    ordered = sorted(processors)
    if len(ordered) < local_ranks:
        return frozenset({ordered[local_rank % len(ordered)]})
    first, last = (len(ordered) * rank // local_ranks for rank in (local_rank, local_rank + 1))
    return frozenset(ordered[first:last])


def local_place(environ: Mapping[str, str]) -> tuple[int, int]:
    """(rank on this host, ranks on it) as the launcher tells; (0, 1) if it does not."""
    for rank_name, size_name in LOCAL_RANKS:
        rank, size = environ.get(rank_name, ""), environ.get(size_name, "")
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
            return int(rank), int(size)
    return 0, 1


def engine_processors(
    text: str, environ: Mapping[str, str], own: Collection[int], parents: Collection[int]
) -> frozenset[int] | None:
    """The processors for this process's engine, None to leave it to the scheduler.

    ``text``: the setting ``engine_cpus``; ``own`` and ``parents``: those that this process and the one which started it may use.
    Where they differ the launcher has bound its ranks, and knows better. Raises ConfigError for a list of which this process may
    use none.
    """
    if text not in (AUTO_CPUS, ALL_CPUS):
        usable = parse_cpus(text) & frozenset(own)
        if not usable:
            raise ConfigError(
                f"engine_cpus={text!r}: this process may use none of them, only {', '.join(map(str, sorted(own)))}"
            )
        return usable
    local_rank, local_ranks = local_place(environ)
    if text == ALL_CPUS or local_ranks == 1 or frozenset(own) != frozenset(parents):
        return None
    return share(local_rank, local_ranks, own)


def here(text: str) -> frozenset[int] | None:
    """``engine_processors`` for this process."""
    own = os.sched_getaffinity(0)
    try:
        parents = os.sched_getaffinity(os.getppid())
    except OSError:  # the parent is gone, or in another namespace: nothing tells that it bound us
        parents = own
    return engine_processors(text, os.environ, own, parents)
