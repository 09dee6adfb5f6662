"""Algorithms of several hops on random networks, with and without faults: equal ranks, whole contributions, bounds kept.

The networks and jobs are those of ``test_random_networks``; what differs is what a report can say of a hop's holes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dblp.collectives.report import Report
from dblp.transport.policy import Bounded, Consistency, Exact, Policy
from tests.sim.network_checks import arrived_bits, check_faulty, check_healthy
from tests.sim.random_networks import Outcome, Plan, plan, play

ALGORITHMS = ["ring", "halving_doubling", "hierarchical", "ps", "ps(servers=1,serve_only)"]
NETWORKS, FAULTS = 5, 3
"""Plans an algorithm."""


def drawn_plan(algorithm: str, seed: int, *, faulty: bool) -> Plan:
    """A random plan, by another algorithm and, three times in four, under a bound."""
    drawn = plan(1000 * ALGORITHMS.index(algorithm) + seed, faulty=faulty)
    drawn = dataclasses.replace(drawn, algorithm=algorithm)
    stop = ("stall", "eager", "deadline")[seed % 3]
    policies: list[Policy] = [
        Exact(),
        Bounded(0.3, stop=stop, stop_after_s=0.01),
        Policy(budget=0.5, gather_budget=0.2),
        Bounded(0.4, stop=stop, stop_after_s=0.01, consistency=Consistency.EXACT),
    ]
    return dataclasses.replace(drawn, policy=policies[seed % 4])


def check(drawn: Plan, outcome: Outcome) -> None:
    """C1 to C3 as far as a result can tell them."""
    for rank, results in outcome.results.items():
        assert len(results) == drawn.rounds or rank in outcome.errors
        for number, result in enumerate(results):
            arrived = arrived_bits(drawn, result, number)
            report = outcome.reports[rank][number]
            assert report.missing_share <= drawn.policy.budget, "C2"
            if not drawn.policy.lossy:
                assert (arrived == contributors(drawn)).all(), "C1"
            elif not any(reports[number].missing_chunks for reports in complete(outcome, number)):
                assert (
                    len(complete(outcome, number)) < drawn.world_size
                    or (arrived == contributors(drawn)).all()
                )
    for number in range(drawn.rounds):
        bits = {results[number].tobytes() for results in outcome.results.values() if len(results) > number}
        assert len(bits) <= 1, "C3"


def contributors(drawn: Plan) -> np.int64:
    """The bits of those who contribute."""
    everyone = (1 << drawn.world_size) - 1
    return np.int64(everyone & ~2 if "serve_only" in drawn.algorithm else everyone)


def complete(outcome: Outcome, number: int) -> list[list[Report]]:
    """The reports of a round, by rank, of those that finished it."""
    return [reports for reports in outcome.reports.values() if len(reports) > number]


@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_job_ends_right_or_in_an_error_that_names_the_host(algorithm, faulty):
    for seed in range(FAULTS if faulty else NETWORKS):
        drawn = drawn_plan(algorithm, seed, faulty=faulty)
        try:
            outcome = play(drawn)
            check(drawn, outcome)
            (check_faulty if faulty else check_healthy)(drawn, outcome)
        except BaseException as error:
            error.add_note(f"seed {seed}: {drawn}")
            raise


def test_the_checks_find_what_is_wrong():
    drawn = drawn_plan("halving_doubling", 2, faulty=False)
    assert drawn.policy.lossy and drawn.elements
    outcome = play(drawn)
    outcome.results[0][1][0] += 1
    with pytest.raises(AssertionError):
        check(drawn, outcome)
