"""Groups without end, forks, and processes that end without a word; the scenarios are in ``scenarios_leaving.py``."""

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.sockets]


@pytest.mark.parametrize(("kind", "times"), [("groups", 300), ("rounds", 2000)])
def test_nothing_is_left_of_what_came_and_went(ranks, kind, times):
    """The whole, 10,000 groups and 20,000 rounds: ``python -m tests.benchmarks.flatness``."""
    ranks("many", 2, kind=kind, times=times, timeout_s=240)


def test_a_fork_says_that_it_is_one(ranks):
    assert ranks("forked", 2) == ["", ""]


def test_leaving_without_destroy_is_clean(ranks):
    assert ranks("exit_without_destroy", 2) == ["", ""]


@pytest.mark.parametrize("number", range(10))
def test_leaving_with_work_in_flight_is_clean(ranks, number):
    """Exit code 0, no SIGABRT, not a word on standard error."""
    assert ranks("exit_in_flight", 2, number=number) == ["", ""]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_so_it_is_200_times(ranks):
    for number in range(200):
        assert ranks("exit_in_flight", 2, number=number) == ["", ""], number
