"""Random networks whose hosts stop for a while, are cut off for a while, or fail for good.

Beside tests/networks, which has the numbers, these have faults that heal, slow network cards, the deadline rule, and what must
never happen on the network itself: a receive buffer that overflows, a datagram that is too large.

C1: what is exact is right on every rank. C2: what is bounded misses no more than its budget, and says so. C3: all
ranks hold the same bits. C5: where nothing is lost on the way, nothing is missing. C6: where a host fails, every
rank raises within the timeout, naming it. C8: nobody holds more than its early pool.
"""

from __future__ import annotations

import numpy as np
import pytest

from dblp.errors import RemoteError
from dblp.sim.port import HostSpec, Link
from dblp.transport.policy import Exact, Stop
from tests.sim.random_networks import EARLY_BYTES, Fault, Outcome, Plan, plan, play

NETWORKS, FAULTS, A_TEST = 100, 120, 20
CHUNK_ELEMENTS = 366
"""More than any chunk has: a 1472-byte datagram of float32."""
GRACE_S = 2.0
"""After its timeout a rank still tells the others why."""


def _seeds(count: int) -> list[range]:
    return [range(first, first + A_TEST) for first in range(0, count, A_TEST)]


def _check(plan: Plan, outcome: Outcome) -> None:
    assert outcome.early_bytes <= EARLY_BYTES * 1.125 + 65_536, "C8"
    assert not outcome.lost["oversize"], "no datagram may exceed what the group agreed on"
    for rank, results in outcome.results.items():
        for round_, result in enumerate(results):
            assert outcome.reports[rank][round_].duration_s <= plan.timeout_s + GRACE_S
            arrived = _arrived(plan, result, round_)
            if not plan.policy.lossy:
                assert (arrived == (1 << plan.world_size) - 1).all(), "C1"
    for round_ in range(plan.rounds):
        _check_round(plan, outcome, round_)


def _arrived(plan: Plan, result: np.ndarray, round_: int) -> np.ndarray:
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
        assert np.array_equal(first, outcome.results[rank][round_]), "C3"
    if not plan.policy.lossy or len(done) < plan.world_size:
        return
    arrived = _arrived(plan, first, round_)
    reports = [outcome.reports[rank][round_] for rank in done]
    for report in reports:
        assert report.missing_chunks <= plan.policy.budget * report.bounded_chunks, "C2"
    lossless = not outcome.lost.keys() - {"unreachable"}
    for peer in range(plan.world_size):
        missing = int(np.count_nonzero(~(arrived >> peer) & 1))
        told = sum(len(report.missing.get(peer, ())) for report in reports)
        assert (missing > 0) == (told > 0), "C2: the report says what is missing"
        assert missing <= told * CHUNK_ELEMENTS
        if lossless and plan.policy.stop is Stop.STALL:
            assert missing == 0, "C5"


@pytest.mark.parametrize("seeds", _seeds(NETWORKS), ids=str)
def test_every_job_on_a_network_that_heals_ends_right(seeds):
    for seed in seeds:
        drawn = plan(seed)
        outcome = play(drawn)
        assert outcome.errors == {}, drawn
        assert not outcome.lost["buffer"], "credit keeps the receive buffers from overflowing"
        assert all(len(results) == drawn.rounds for results in outcome.results.values()), drawn
        _check(drawn, outcome)


@pytest.mark.parametrize("seeds", _seeds(FAULTS), ids=str)
def test_every_job_with_a_fault_ends_right_or_in_an_error_that_names_the_host(seeds):
    for seed in seeds:
        drawn = plan(seed, faulty=True)
        outcome = play(drawn)
        _check(drawn, outcome)
        _check_errors(drawn, outcome)


def _check_errors(plan: Plan, outcome: Outcome) -> None:
    fault = plan.fault
    assert fault is not None
    if not fault.fatal:
        assert outcome.errors == {}, plan
    rounds = [len(results) for rank, results in outcome.results.items() if rank != fault.rank]
    assert max(rounds) - min(rounds) <= 1, "survivors are at most one round apart"
    for rank, error in outcome.errors.items():
        assert isinstance(error, RemoteError), (plan, error)
        assert outcome.ended_s[rank] - outcome.round_began_s[rank] <= plan.timeout_s + GRACE_S, "C6"
        if rank == fault.rank:
            assert error.ranks, (plan, error)
            assert rank not in error.ranks, (plan, error)
        else:
            assert error.ranks == (fault.rank,), (plan, error)


def _tamper(outcome: Outcome, rank: int, change: float) -> None:
    outcome.results[rank][1][0] += change


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda outcome: _tamper(outcome, 0, -2.0), "C1"),  # rank 0's part of it
        (lambda outcome: _tamper(outcome, 0, 0.5), "wrong place"),
        (lambda outcome: _tamper(outcome, 0, 1e6 * 2), "twice"),
        (lambda outcome: outcome.lost.update(oversize=1), "exceed"),
        (lambda outcome: setattr(outcome, "early_bytes", 1 << 20), "C8"),
    ],
)
def test_the_checks_see_what_they_are_for(damage, found):
    drawn = plan(1)
    outcome = play(drawn)
    _check(drawn, outcome)
    damage(outcome)
    with pytest.raises(AssertionError, match=found):
        _check(drawn, outcome)


def test_the_checks_see_replicas_that_differ_and_holes_that_are_not_told():
    drawn = next(p for p in map(plan, range(NETWORKS)) if p.policy.lossy)
    outcome = play(drawn)
    _check(drawn, outcome)
    outcome.results[0][1][0] -= drawn.contribution(0, 1)[0]
    with pytest.raises(AssertionError, match="C3"):
        _check(drawn, outcome)
    for rank in range(1, drawn.world_size):
        outcome.results[rank][1][:] = outcome.results[0][1]
    if not any(0 in reports[1].missing for reports in outcome.reports.values()):
        with pytest.raises(AssertionError, match="C2"):
            _check(drawn, outcome)


def test_faults_and_losses_of_every_kind_occur():
    """The plans are worth their time: each kind of fault strikes, and each kind of loss is drawn."""
    kinds = {fault.kind for seed in range(FAULTS) if (fault := plan(seed, faulty=True).fault)}
    assert kinds == {"kill", "partition", "pause", "hiccup", "flap"}
    drawn = [plan(seed) for seed in range(NETWORKS)]
    words = {word.split("(")[0] for each in drawn for word in str(each.link.spec()).split("),") if word}
    assert words == {"loss", "ge", "ge_time", "bursts", "duplicate", "jitter", "reorder", "corrupt", "rate"}
    assert {each.policy.stop for each in drawn if each.policy.lossy} == set(Stop)


@pytest.mark.parametrize("seed", [2, 18, 50])
def test_a_whole_job_replays_bit_for_bit(seed):
    first, second = play(plan(seed)), play(plan(seed))
    assert first.digest == second.digest
    assert first.lost == second.lost
    assert first.ended_s == second.ended_s
    for rank, results in first.results.items():
        assert [r.tobytes() for r in results] == [r.tobytes() for r in second.results[rank]]


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
        host=HostSpec(egress_bps=1e9, send_buffer_bytes=100_000, processing_s=5e-5),
        regroup=0.3,
        block=0.0,
        paths=1,
        fault=Fault(kind="hiccup", rank=0, at_s=0.0021652017519915075, lasts_s=0.2959381898295727),
    )
    outcome = play(drawn)
    assert outcome.errors == {}
    _check(drawn, outcome)
