"""More than 500 random networks, jobs and faults: each job ends in the right result or in the right error.

``network_checks`` has the invariants. Losses, disorder, slow cards and links, full queues, split and joined arrivals, ports that
block; hosts that are killed, paused, cut off (both ways or one), for a while or for good.
"""

from __future__ import annotations

import dataclasses

import pytest

from dblp.sim.port import HostSpec, Link
from dblp.transport.policy import Bounded, Exact, Stop, Tags
from tests.sim.network_checks import anything_lost, check, check_faulty, check_healthy
from tests.sim.random_networks import Fault, Outcome, Plan, plan, play

NETWORKS, FAULTS, PAIRS, A_TEST = 300, 220, 30, 20


def _seeds(count: int) -> list[range]:
    return [range(first, first + A_TEST) for first in range(0, count, A_TEST)]


def _play_and_check(drawn: Plan) -> None:
    try:
        outcome = play(drawn)
        check(drawn, outcome)
        (check_faulty if drawn.fault else check_healthy)(drawn, outcome)
    except BaseException as error:
        error.add_note(f"seed {drawn.seed}: {drawn}")
        raise


@pytest.mark.parametrize("seeds", _seeds(NETWORKS), ids=str)
def test_every_job_on_a_network_that_heals_ends_right(seeds):
    for seed in seeds:
        _play_and_check(plan(seed))


@pytest.mark.parametrize("seeds", _seeds(FAULTS), ids=str)
def test_every_job_with_a_fault_ends_right_or_in_an_error_that_names_the_host(seeds):
    for seed in seeds:
        _play_and_check(plan(seed, faulty=True))


@pytest.mark.parametrize("seed", range(PAIRS))
def test_bounded_on_a_network_that_loses_nothing_gives_the_bits_of_exact(seed):
    """C5, on real-valued sums, whose bits depend on the order of addition: no repair, no hole, the same bits."""
    drawn = plan(seed)
    quiet = dataclasses.replace(
        drawn,
        policy=Bounded(0.2),
        algorithm="direct",
        link=Link(latency_s=drawn.link.latency_s, impair="jitter(1ms)" if seed % 2 else ""),
        host=HostSpec(receive_buffer_bytes=8 << 20),
        real=True,
    )
    bounded, exact = play(quiet), play(dataclasses.replace(quiet, policy=Exact()))
    assert not anything_lost(bounded) and not bounded.errors and not exact.errors
    for rank, results in bounded.results.items():
        assert [r.tobytes() for r in results] == [r.tobytes() for r in exact.results[rank]]
        assert all(report.missing_chunks == 0 for report in bounded.reports[rank])


# --- the checks themselves


def _tamper(outcome: Outcome, rank: int, change: float) -> None:
    outcome.results[rank][1][0] += change


def _forget_round(outcome: Outcome) -> None:
    outcome.results[0].pop()


EXACT_PLAN = dataclasses.replace(plan(1), policy=Exact(), elements=300, fault=None)
BOUNDED_PLAN = dataclasses.replace(
    plan(1),
    policy=Bounded(0.5, stop="eager"),
    algorithm="direct",
    elements=30_000,
    link=Link(impair="loss(0.2)"),
    paths=1,
)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda outcome: _tamper(outcome, 0, -2.0), "C1"),  # rank 0's part of it
        (lambda outcome: _tamper(outcome, 0, 0.5), "wrong place"),
        (lambda outcome: _tamper(outcome, 0, 1e6 * 2), "twice"),
        (lambda outcome: outcome.lost.update(oversize=1), "exceed"),
        (lambda outcome: setattr(outcome, "early_bytes", 1 << 20), "C8"),
        (_forget_round, "neither finished nor raised"),
    ],
)
def test_the_checks_see_what_they_are_for(damage, found):
    outcome = play(EXACT_PLAN)
    check(EXACT_PLAN, outcome)
    damage(outcome)
    with pytest.raises(AssertionError, match=found):
        check(EXACT_PLAN, outcome)


def test_the_checks_see_replicas_that_differ():
    outcome = play(BOUNDED_PLAN)
    check(BOUNDED_PLAN, outcome)
    outcome.results[0][1][0] += BOUNDED_PLAN.contribution(0, 1)[0] * (1 - 2 * _has_rank_0(outcome))
    with pytest.raises(AssertionError, match="C3"):
        check(BOUNDED_PLAN, outcome)


def test_the_checks_see_a_hole_that_is_not_told():
    outcome = play(BOUNDED_PLAN)
    reports = [reports[1] for reports in outcome.reports.values()]
    told = next(report for report in reports if report.missing_chunks)
    peer = next(peer for peer, missing in told.missing.items() if len(missing))
    missing = dict(told.missing)
    missing[peer] = missing[peer][1:]
    for reports_of in outcome.reports.values():
        reports_of[1] = (
            dataclasses.replace(reports_of[1], missing=missing) if reports_of[1] is told else reports_of[1]
        )
    with pytest.raises(AssertionError, match="C2"):
        check(BOUNDED_PLAN, outcome)


def test_the_checks_see_more_holes_than_the_budget():
    outcome = play(BOUNDED_PLAN)
    strict = dataclasses.replace(BOUNDED_PLAN, policy=Bounded(0.001, stop="eager"))
    with pytest.raises(AssertionError, match="C2"):
        check(strict, outcome)


def _has_rank_0(outcome: Outcome) -> int:
    return int(outcome.results[0][1][0] / BOUNDED_PLAN.pattern(1)[0]) & 1


def test_faults_and_losses_of_every_kind_occur():
    """The plans are worth their time: each kind of fault strikes, each kind of loss is drawn, some jobs send trains."""
    kinds = {fault.kind for seed in range(FAULTS) if (fault := plan(seed, faulty=True).fault)}
    assert kinds == {"kill", "partition", "pause", "one-way", "hiccup", "flap"}
    drawn = [plan(seed) for seed in range(NETWORKS)]
    words = {word.split("(")[0] for each in drawn for word in str(each.link.spec()).split("),") if word}
    assert words == {"loss", "ge", "ge_time", "bursts", "duplicate", "jitter", "reorder", "corrupt", "rate"}
    assert {each.policy.stop for each in drawn if each.policy.lossy} == set(Stop) - {Stop.ABANDON}
    tagged = [each for each in drawn if each.policy.tags is not Tags.NONE]
    assert {each.policy.tags for each in tagged} == {Tags.RANDOM, Tags.MAGNITUDE, Tags.BOTH}
    assert sum(each.policy.critical_share > 0.0 and each.elements > 1000 for each in tagged) > NETWORKS // 30
    assert {each.algorithm for each in drawn} == {"auto", "direct", "ring", "flat"}
    assert {each.elements == 0 for each in drawn} == {True, False}
    assert sum(each.elements > 80_000 for each in drawn) > 10
    assert sum(each.policy.lossy for each in drawn) > NETWORKS // 5


# --- replay


@pytest.mark.parametrize("seed", [2, 18, 50])
def test_a_whole_job_replays_bit_for_bit(seed):
    first, second = play(plan(seed)), play(plan(seed))
    assert first.digest == second.digest
    assert first.lost == second.lost
    assert first.ended_s == second.ended_s
    for rank, results in first.results.items():
        assert [r.tobytes() for r in results] == [r.tobytes() for r in second.results[rank]]


def test_a_job_with_a_fault_replays_to_the_same_errors():
    drawn = plan(3, faulty=True)
    drawn = dataclasses.replace(drawn, fault=Fault(kind="kill", rank=0, at_s=1e-3))
    first, second = play(drawn), play(drawn)
    assert first.digest == second.digest
    assert first.errors and str(first.errors) == str(second.errors)


def test_seeds_differ():
    assert len({play(plan(seed)).digest for seed in range(4)}) == 4


# --- what was found


@pytest.mark.parametrize("seed", [3086, 4902])
def test_faults_that_were_found_by_longer_sweeps(seed):
    """3086: pings, acknowledged on and on, put off the question for a lost last chunk until the deadline.
    4902: datagrams that had waited in a buffer together were taken to have come with the first, and a round trip of nothing
    closed the window."""
    _play_and_check(plan(seed, faulty=True))


def test_feedback_on_a_long_mess_stays_within_a_datagram():
    """A queue that overflows in turn with loss bursts, after a stop of the peer, leaves more ranges than fit."""
    drawn = Plan(
        seed=21,
        world_size=4,
        elements=20_010,
        rounds=3,
        policy=Exact(),
        algorithm="ring",
        link=Link(
            latency_s=2e-5,
            rate_bps=5e7,
            queue_bytes=50_000,
            impair="bursts(loss=0.4..0.8,length=10ms,every=50ms,start=1ms),corrupt(0.01)",
        ),
        host=HostSpec(egress_bps=1e9, send_buffer_bytes=100_000, processing_s=5e-05),
        regroup=0.3,
        block=0.0,
        paths=1,
        fault=Fault(kind="hiccup", rank=0, at_s=0.0021652017519915075, lasts_s=0.2959381898295727),
    )
    outcome = play(drawn)
    assert outcome.errors == {}
    check(drawn, outcome)
