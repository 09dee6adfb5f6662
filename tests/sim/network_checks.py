"""What must hold of every job on every network: the contract of docs/design.md, line by line.

C1: what is exact is right on every rank. C2: what is bounded misses no more than its budget, and the sum is that of what the
reports do not call missing. C3: all ranks hold the same bits. C5: where nothing is lost on the way, nothing is missing.
C6: a host that fails makes every rank raise within the timeout, naming it. C8: nobody holds more than its early pool, and nothing
of it at the end; credit keeps the receive buffers from overflowing.
"""

from __future__ import annotations

import numpy as np

from dblp.collectives.algorithms.grid import chunk_bytes, cut
from dblp.collectives.priority import Tagger
from dblp.collectives.reduction import DTYPES
from dblp.errors import RemoteError
from dblp.transport.inbox import EARLY_SLACK_BYTES
from dblp.transport.policy import Stop, Tags
from tests.sim.random_networks import EARLY_BYTES, Outcome, Plan

GRACE_S = 2.0
"""After its timeout a rank still tells the others why."""


def check(plan: Plan, outcome: Outcome) -> None:
    """All that holds whether or not a host fails."""
    assert outcome.early_bytes <= EARLY_BYTES * 1.125 + EARLY_SLACK_BYTES, "C8"
    assert not outcome.lost["oversize"], "no datagram may exceed what the group agreed on"
    for rank, results in outcome.results.items():
        assert len(results) == plan.rounds or rank in outcome.errors, (
            f"rank {rank} neither finished nor raised"
        )
        for round_, result in enumerate(results):
            assert outcome.reports[rank][round_].duration_s <= plan.timeout_s + GRACE_S, "C6"
            arrived = arrived_bits(plan, result, round_)
            if not plan.policy.lossy:
                assert (arrived == (1 << plan.world_size) - 1).all(), "C1"
    for round_ in range(plan.rounds):
        _check_round(plan, outcome, round_)


def check_healthy(plan: Plan, outcome: Outcome) -> None:
    """What holds beside ``check`` where no host fails."""
    assert outcome.errors == {}
    assert not outcome.lost["buffer"], "C8: credit keeps the receive buffers from overflowing"
    assert outcome.left_early == 0, "C8: nothing is held for messages that have ended"


def check_faulty(plan: Plan, outcome: Outcome) -> None:
    """C6, where a host fails or stops for a while."""
    fault = plan.fault
    assert fault is not None
    if not fault.fatal:
        assert outcome.errors == {}
    rounds = [len(results) for rank, results in outcome.results.items() if rank != fault.rank]
    assert max(rounds) - min(rounds) <= 1, "survivors are at most one round apart"
    for rank, error in outcome.errors.items():
        assert isinstance(error, RemoteError)
        assert outcome.ended_s[rank] - outcome.round_began_s[rank] <= plan.timeout_s + GRACE_S, "C6"
        if not fault.isolating:
            continue
        if rank == fault.rank:
            assert error.ranks
            assert rank not in error.ranks
        else:
            assert error.ranks == (fault.rank,), "C6: survivors name the victim"


def arrived_bits(plan: Plan, result: np.ndarray, round_: int) -> np.ndarray:
    """Bit masks of the ranks whose contributions are in each element."""
    mask = result / plan.pattern(round_)
    assert (mask == np.floor(mask)).all(), "something stands in a wrong place"
    assert ((mask >= 0) & (mask < 1 << plan.world_size)).all(), "something was added twice"
    bits: np.ndarray = mask.astype(np.int64)
    return bits


def _check_round(plan: Plan, outcome: Outcome, round_: int) -> None:
    done = [rank for rank, results in outcome.results.items() if len(results) > round_]
    if not done:
        return
    first = outcome.results[done[0]][round_]
    for rank in done[1:]:
        assert first.tobytes() == outcome.results[rank][round_].tobytes(), "C3"
    if not plan.policy.lossy:
        for rank in done:
            report = outcome.reports[rank][round_]
            assert report.missing_chunks == 0 and report.energy_lost == 0.0, "C1"
    elif len(done) == plan.world_size:
        _check_holes(plan, outcome, round_, first)


def _check_holes(plan: Plan, outcome: Outcome, round_: int, result: np.ndarray) -> None:
    """The direct exchange's holes, in the grid of the array: of a contribution in the shard of who reports it, of a result in
    that of who sent it."""
    step, shards = _grid(plan, outcome.max_chunk_bytes)
    parts = [plan.contribution(rank, round_) for rank in range(plan.world_size)]
    void = np.zeros(shards[-1].stop, np.bool_)
    for rank, shard in enumerate(shards):
        report = outcome.reports[rank][round_]
        for peer, missing in report.missing.items():
            own = missing[(missing >= shard.start) & (missing < shard.stop)]
            theirs = missing[(missing >= shards[peer].start) & (missing < shards[peer].stop)]
            assert len(own) + len(theirs) == len(missing)
            assert len(own) <= plan.policy.reduce_leg_budget * len(shard), "C2"
            assert not np.isin(own, _critical(plan, peer, round_, step, shard)).any(), "C2: critical chunks"
            assert not np.isin(theirs, _critical(plan, peer, round_, step, shards[peer])).any(), (
                "C2: critical"
            )
            for chunk in own.tolist():
                parts[peer][chunk * step : (chunk + 1) * step] = 0
            void[theirs] = True
        assert (report.missing_chunks > 0) == (report.energy_lost > 0.0), "C2: the energy of holes is told"
        if plan.policy.stop is Stop.STALL and not anything_lost(outcome):
            assert report.missing_chunks == 0, "C5"
    for shard in shards:
        holes = np.count_nonzero(void[shard.start : shard.stop])
        assert holes <= plan.policy.gather_leg_budget * len(shard), "C2: of all ranks together"
    expected = np.asarray(np.sum(parts, axis=0, dtype=np.float32))
    expected[np.repeat(void, step)[: plan.elements]] = 0
    assert np.array_equal(result, expected), "C2: the report says what is missing"


def _critical(plan: Plan, rank: int, round_: int, step: int, shard: range) -> np.ndarray:
    """The critical chunks of what a rank sends of a shard: of its own contribution, which stands for a result too."""
    if plan.policy.tags is Tags.NONE:
        return np.empty(0, np.uint32)
    seed = (plan.seed, round_, rank)
    tagger = Tagger(plan.contribution(rank, round_), DTYPES["float32"], step, plan.policy, seed=seed)
    critical: np.ndarray = shard.start + np.flatnonzero(tagger.classes(shard.start, shard.stop) == 0)
    return critical


def anything_lost(outcome: Outcome) -> bool:
    return bool(outcome.lost.keys() - {"unreachable"})


def _grid(plan: Plan, max_chunk_bytes: int) -> tuple[int, list[range]]:
    """Elements of a chunk, and for each owner the chunks of its shard."""
    chunk = chunk_bytes(-(-4 * plan.elements // plan.world_size), max_chunk_bytes, plan.policy)
    shards, low = [], 0
    for shard in cut(np.empty(plan.elements, np.float32), plan.world_size, chunk):
        high = low + -(-len(shard) * 4 // chunk)
        shards.append(range(low, high))
        low = high
    return chunk // 4, shards
