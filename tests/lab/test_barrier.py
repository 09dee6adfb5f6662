"""The barrier of processes that does not go over the network."""

from __future__ import annotations

import threading
import time

import pytest

from dblp.cli.lab.barrier import Barrier
from dblp.errors import LocalError

RANKS, ROUNDS = 4, 200


def test_nobody_passes_before_the_last_one_comes(tmp_path):
    """Every rank adds to its count before it waits: after the wait all counts are equal or one further."""
    counts = [0] * RANKS
    seen = []

    def member(rank):
        barrier = Barrier(tmp_path / "b", rank, RANKS, 60.0)
        for number in range(ROUNDS):
            if rank == number % RANKS:
                time.sleep(0.0005)
            counts[rank] += 1
            decision = barrier.wait(number % 3 == 0)
            seen.append((number, decision, min(counts), max(counts)))

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(seen) == RANKS * ROUNDS
    for number, decision, least, most in seen:
        assert least >= number + 1 and most <= number + 2
        assert decision == (number % 3 == 0)


def test_who_does_not_come_is_named(tmp_path):
    with pytest.raises(LocalError, match="rank 0, 2 did not come"):
        Barrier(tmp_path / "b", 1, 3, 0.05).wait()
