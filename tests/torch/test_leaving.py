"""Groups without end, forks, and processes that end without a word; the scenarios are in ``scenarios_leaving.py``."""

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.sockets]


@pytest.mark.parametrize(("kind", "times"), [("groups", 300), ("rounds", 600)])
def test_nothing_is_left_of_what_came_and_went(ranks, kind, times):
    """The whole, 10,000 groups and 20,000 rounds: ``python -m tests.benchmarks.flatness``."""
    ranks("many", 2, kind=kind, times=times, timeout_s=240)


def test_a_fork_says_that_it_is_one(ranks):
    assert ranks("forked", 2) == ["", ""]


def test_leaving_without_destroy_is_clean(ranks):
    assert ranks("exit_without_destroy", 2) == ["", ""]


def leave_in_flight(ranks, number, **options):
    """Exit code 0, no SIGABRT, nothing raised. A rank whose peer leaves in a round with it may say so, as a warning."""
    for output in ranks("exit_in_flight", 2, number=number, **options):
        for word in ("Traceback", "Exception", "Fatal", "terminate called", "Segmentation"):
            assert word not in output, (number, output)


@pytest.mark.parametrize("number", range(7))
def test_leaving_with_work_in_flight_is_clean(ranks, number):
    leave_in_flight(ranks, number)


@pytest.mark.parametrize("number", range(7))
def test_leaving_wakes_nobody_in_an_interpreter_that_ends(ranks, number):
    """A thread that needs the interpreter's lock when it has begun to end is cut off there: in the midst of torch's C++ that
    aborts the process, or leaves a lock behind that the process then waits for."""
    leave_in_flight(ranks, number, hogged=True)


def test_waiting_after_the_exit_is_an_error(ranks):
    waited, other = ranks("exit_waited_for", 2)
    assert waited.count("the process is exiting") == 2, waited
    assert "exiting" not in other


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_so_it_is_200_times(ranks):
    for number in range(200):
        leave_in_flight(ranks, number)
