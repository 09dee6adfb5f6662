"""500 random networks and more: each ends in the right result or the right error (C1, C2, C5, C6, C8 of docs/design.md)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dblp.collectives.algorithms.grid import chunk_bytes, cut
from dblp.transport.config import TransportConfig
from dblp.transport.policy import Policy
from tests.networks.scenario import TIMEOUT_S, Outcome, Scenario, contribution, draw, play

SEEDS = 520
BATCH = 20
MAX_CHUNK = 1408


def check(scenario: Scenario, outcome: Outcome) -> None:
    """All invariants that hold for every scenario."""
    if outcome.errors:
        assert scenario.fault, f"a healthy network raised {outcome.errors}"
        check_errors(scenario, outcome)
    for index in range(min(len(arrays) for arrays in outcome.arrays)):
        check_round(scenario, outcome, index)
    # C8: no more than the pool, whatever comes before its receive is posted.
    assert outcome.early_peak <= TransportConfig().early_bytes * 1.125 + 65536


def check_errors(scenario: Scenario, outcome: Outcome) -> None:
    """C6: every rank that did not finish raised within its timeout, and the survivors name the victim."""
    rounds = len(scenario.sizes)
    for rank in range(scenario.world_size):
        finished = len(outcome.arrays[rank]) == rounds
        assert finished or rank in outcome.errors, f"rank {rank} neither finished nor raised"
    for rank, error in outcome.errors.items():
        # A survivor may be a round behind the one that gave up first.
        assert outcome.raised_at[rank] - outcome.began_at[rank] <= TIMEOUT_S + 2.0
        ranks = getattr(error, "ranks", ())
        if scenario.fault in ("kill", "pause", "partition") and rank != scenario.victim:
            assert scenario.victim in ranks, f"rank {rank} blames {ranks}, not {scenario.victim}: {error}"


def check_round(scenario: Scenario, outcome: Outcome, index: int) -> None:
    """C1, C2, C3: the sum of what arrived, the same bits on every rank, holes as reported and within the budget."""
    policy = scenario.policy
    expected = expected_sum(scenario, outcome, index)
    for rank in range(scenario.world_size):
        np.testing.assert_array_equal(outcome.arrays[rank][index], expected)
        report = outcome.reports[rank][index]
        if not policy.lossy:
            assert report.missing_chunks == 0 and report.energy_lost == 0.0
        for missing in report.missing.values():
            chunks = len(shard_slices(scenario, index)[rank])
            assert len(missing) <= policy.budget * chunks


def shard_slices(scenario: Scenario, index: int) -> list[list[slice]]:
    """For each owner, the element ranges of its shard's chunks."""
    size, world = scenario.sizes[index], scenario.world_size
    chunk = chunk_bytes(-(-4 * size // world), MAX_CHUNK, scenario.policy)
    positions = np.arange(size)
    slices = []
    for shard in cut(positions.astype(np.float32), world, chunk):
        low = int(shard[0]) if len(shard) else 0
        step = chunk // 4
        slices.append(
            [slice(low + at, min(low + at + step, low + len(shard))) for at in range(0, len(shard), step)]
        )
    return slices


def expected_sum(scenario: Scenario, outcome: Outcome, index: int) -> np.ndarray:
    """The sum of all contributions less the holes that the owners report."""
    parts = [contribution(scenario, rank, index) for rank in range(scenario.world_size)]
    if scenario.policy.lossy:
        slices = shard_slices(scenario, index)
        for owner in range(scenario.world_size):
            for peer, missing in outcome.reports[owner][index].missing.items():
                for chunk in missing.tolist():
                    parts[peer][slices[owner][chunk]] = 0
    return np.sum(parts, axis=0, dtype=np.float32)


@pytest.mark.parametrize("batch", range(SEEDS // BATCH))
def test_every_random_network_ends_right(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        scenario = draw(seed)
        try:
            check(scenario, play(scenario))
        except BaseException as error:
            error.add_note(f"seed {seed}: {scenario}")
            raise


@pytest.mark.parametrize("seed", [3, 14, 15, 92])
def test_a_seed_replays_bit_for_bit(seed: int) -> None:
    first, second = play(draw(seed)), play(draw(seed))
    assert first.digest == second.digest != ""
    assert str(first.errors) == str(second.errors)
    for left, right in zip(first.arrays, second.arrays, strict=True):
        for one, other in zip(left, right, strict=True):
            np.testing.assert_array_equal(one, other)


def test_seeds_differ() -> None:
    assert len({play(draw(seed)).digest for seed in range(4)}) == 4


@pytest.mark.parametrize("seed", range(30))
def test_bounded_on_a_network_that_loses_nothing_gives_exacts_bits(seed: int) -> None:
    """C5: no repair, no hole, the same bits as the same algorithm without a policy."""
    scenario = dataclasses.replace(
        draw(seed),
        fault="",
        impair="jitter(1ms)" if seed % 2 else "",
        policy=Policy(budget=0.2),
        algorithm="direct",
        host=dataclasses.replace(draw(seed).host, receive_buffer_bytes=8 << 20, processing_s=0.0),
        link=dataclasses.replace(draw(seed).link, rate_bps=0.0),
    )
    bounded, exact = play(scenario), play(dataclasses.replace(scenario, policy=Policy()))
    assert bounded.lost == 0 and not bounded.errors and not exact.errors
    for rank in range(scenario.world_size):
        for index in range(len(scenario.sizes)):
            assert bounded.reports[rank][index].missing_chunks == 0
            np.testing.assert_array_equal(
                bounded.arrays[rank][index].view(np.uint32), exact.arrays[rank][index].view(np.uint32)
            )
