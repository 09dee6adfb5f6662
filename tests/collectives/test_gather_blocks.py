"""The bounded all-gather: what any rank misses, none counts; bounds, heads and replicas hold; and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from dblp.collectives.blocks import Blocks
from dblp.errors import ConfigError, MismatchError, PeerError
from dblp.transport.message import BOUNDED_CLASS
from dblp.transport.policy import Bounded, Consistency, Exact, Policy, Short, Stop
from tests.collectives import worlds

LAYOUTS = [Blocks(200, 256, 24), Blocks(300, 512, 600), Blocks(1, 256, 24), Blocks(0, 16, 8)]


def _payload(rank, layout):
    return np.random.default_rng(rank).integers(1, 255, layout.nbytes).astype(np.uint8)


def _gather(policy, layouts):
    """A member that gathers; gives the outputs, the report, and the chunks of it that count for each rank."""

    async def member(group):
        outputs = [np.zeros(layout.nbytes, np.uint8) for layout in layouts]
        own = layouts[group.rank]
        report = await group.gather_blocks(
            outputs, _payload(group.rank, own), layouts, policy, timeout_s=20.0
        )
        counted = [np.ones(layout.chunks, np.bool_) for layout in layouts]
        for rank, chunks in report.uncounted.items():
            counted[rank][chunks] = False
        return outputs, report, counted

    return member


def _check(results, layouts, policy):
    """All ranks count the same, and have all that counts."""
    for outputs, _, counted in results:
        for rank, layout in enumerate(layouts):
            np.testing.assert_array_equal(counted[rank], results[0][2][rank])
            assert counted[rank][layout.count :].all()  # heads always do
            assert (~counted[rank]).sum() <= policy.budget * layout.chunks
            flags = np.repeat(counted[rank], layout.chunk_bytes)[: layout.nbytes]
            np.testing.assert_array_equal(outputs[rank][flags], _payload(rank, layout)[flags])


@pytest.mark.parametrize("stop", [Stop.STALL, Stop.EAGER])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_count_the_same_blocks(ranks, stop):
    policy, layouts = Bounded(0.3, stop=stop), LAYOUTS[:ranks]
    lost = 0
    for seed in range(3):
        results = worlds.run_network(_gather(policy, layouts), ranks, impair="loss(0.2)", seed=seed)
        _check(results, layouts, policy)
        lost += sum(report.filled_chunks for _, report, _ in results)
        assert all(report.filled_chunks == results[0][1].filled_chunks for _, report, _ in results)
    assert lost > 0  # else this says nothing


def test_a_report_names_what_this_rank_missed_itself():
    layouts = LAYOUTS[:3]
    results = worlds.run_network(_gather(Bounded(0.4), layouts), 3, impair="loss(0.2)", seed=5)
    union: dict[int, set[int]] = {}
    for _, report, _ in results:
        assert report.bounded_chunks and report.budget == 0.4
        for peer, chunks in report.missing.items():
            union.setdefault(peer, set()).update(chunks.tolist())
    assert {rank: set(chunks.tolist()) for rank, chunks in results[0][1].uncounted.items()} == union


@pytest.mark.parametrize("policy", [Exact(), Bounded(0.3)])
def test_without_loss_all_arrives(policy):
    for outputs, report, _ in worlds.run_network(_gather(policy, LAYOUTS), 4):
        assert not report.uncounted and not report.filled_chunks
        for rank, layout in enumerate(LAYOUTS):
            np.testing.assert_array_equal(outputs[rank], _payload(rank, layout))


def test_one_rank_has_its_own():
    ((outputs, report, _),) = worlds.run_memory(_gather(Bounded(0.3), LAYOUTS[:1]), 1)
    np.testing.assert_array_equal(outputs[0], _payload(0, LAYOUTS[0]))
    assert not report.uncounted


def test_a_round_that_is_skipped_counts_nothing_anywhere():
    """A deadline far too early for a slow network: all ranks skip alike."""
    policy = Policy(
        budget=0.05, stop=Stop.DEADLINE, stop_after_s=1e-4, short=Short.SKIP, consistency=Consistency.AGREED
    )
    results = worlds.run_network(_gather(policy, LAYOUTS[:2]), 2, impair="loss(0.3)", seed=1)
    for _, report, counted in results:
        assert report.skipped and not any(flags.any() for flags in counted)


def test_heads_are_critical_and_large_ones_make_a_payload_exact():
    small, large = Blocks(100, 256, 300), Blocks(10, 256, 700)
    assert small.chunks == 102 and small.classes().tolist() == [BOUNDED_CLASS] * 100 + [0, 0]
    assert small.spec(Bounded(0.3), 3).budget == pytest.approx(0.1)
    assert large.spec(Bounded(0.3), 3).budget == 0.0


def test_what_it_refuses():
    async def member(group):
        outputs = [np.zeros(layout.nbytes, np.uint8) for layout in LAYOUTS[:2]]
        own = _payload(group.rank, LAYOUTS[group.rank])
        relaxed = Bounded(0.1, consistency=Consistency.RELAXED)
        with pytest.raises(ConfigError, match="relaxed"):
            group.gather_blocks(outputs, own, LAYOUTS[:2], relaxed)
        with pytest.raises(ConfigError, match="layout of rank 1"):
            group.gather_blocks(outputs, own, [LAYOUTS[0], LAYOUTS[2]], Bounded(0.1))
        with pytest.raises(ConfigError, match="input"):
            group.gather_blocks(outputs, own[:-1], LAYOUTS[:2], Bounded(0.1))
        with pytest.raises(ConfigError, match="must be equal"):
            group.gather_blocks(outputs, own.view(np.int8), LAYOUTS[:2], Bounded(0.1))

    worlds.run_memory(member, 2)


def test_ranks_with_other_layouts_hear_of_it():
    async def member(group):
        layouts = [Blocks(10, 256, 8), Blocks(10, 256, 8 + 8 * group.rank)]
        outputs = [np.zeros(layout.nbytes, np.uint8) for layout in layouts]
        own = np.zeros(layouts[group.rank].nbytes, np.uint8)
        with pytest.raises((MismatchError, PeerError)):
            await group.gather_blocks(outputs, own, layouts, Bounded(0.1), timeout_s=5.0)

    worlds.run_network(member, 2)
