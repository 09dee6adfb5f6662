"""GraVAC's search: which level it chooses, from norms and times alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dblp.collectives.compression.search import DENSE, Rule, Search, ladder


def _rule(levels=4, **changes):
    return Rule(**{"levels": levels, "epsilon": 0.5, "omega": 0.05, "window": 3, "alpha": 0.5} | changes)


class Course:
    """A training: gains and times by level; its search is packed and unpacked between iterations, as in rounds."""

    def __init__(self, rule, gains, seconds):
        self.rule, self.gains, self.seconds = rule, list(gains), dict(seconds)
        self._state = np.zeros(rule.size)
        self.levels = []

    @property
    def search(self):
        return Search(self.rule, self._state)

    def run(self, iterations):
        for _ in range(iterations):
            search = self.search
            level = search.choose()
            self.levels.append(level)
            search.hear(level, self.seconds[level], 2.0, 2.0 * np.array(self.gains))
            self._state = search.state()
        return self


def test_ladders():
    assert ladder(10, 10_000, "exponential", 2) == (10, 20, 40, 160, 2560, 10_000)
    assert ladder(10, 100, "geometric", 2) == (10, 20, 40, 80, 100)
    assert ladder(10, 10, "geometric", 2) == (10,)
    assert ladder(5, 7, "exponential", 3) == (5, 7)


def test_it_begins_with_a_window_of_theta_min_and_then_tries_what_follows():
    course = Course(_rule(), [1, 1, 1, 1], {0: 8.0, 1: 4.0, 2: 2.0, 3: 1.0}).run(12)
    assert course.levels == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert course.run(1).levels[-1] == 3 and course.search.settled
    assert course.search.searched == 9 and course.search.throughput(3) == 1.0


def test_it_ends_where_throughput_saturates_and_keeps_the_more_compressed():
    course = Course(_rule(), [1, 1, 1, 1], {0: 8.0, 1: 4.0, 2: 3.9, 3: 1.0}).run(40)
    assert course.levels[-20:] == [2] * 20 and course.search.settled and course.search.searched == 6


def test_it_ends_where_throughput_falls_and_keeps_the_better_one():
    """Level 2 is a little quicker and sends much less: gain over time is lower."""
    course = Course(_rule(), [1, 0.9, 0.6, 0.5], {0: 8.0, 1: 4.0, 2: 3.5, 3: 1.0}).run(40)
    assert course.levels[-20:] == [1] * 20 and course.search.settled


def test_a_level_below_epsilon_is_not_tried_until_its_gain_has_risen():
    course = Course(_rule(), [0.9, 0.4, 0.3, 0.2], {0: 8.0, 1: 4.0, 2: 2.0, 3: 1.0}).run(20)
    assert set(course.levels) == {0} and not course.search.settled and not course.search.searched
    course.gains = [0.9, 0.8, 0.7, 0.6]
    assert max(course.run(20).levels) == 3


def test_fallback_from_the_candidate_to_theta_min_to_everything_and_back():
    course = Course(_rule(2), [1, 1], {0: 8.0, 1: 4.0, DENSE: 9.0}).run(12)
    assert course.levels[-1] == 1
    for gains, level in [((0.9, 0.1), 0), ((0.1, 0.05), DENSE), ((0.9, 0.1), 0), ((1.0, 0.9), 1)]:
        course.gains = list(gains)
        assert course.run(12).levels[-1] == level


def test_a_trial_whose_gain_falls_is_broken_off():
    course = Course(_rule(), [1, 1, 1, 1], {0: 8.0, 1: 4.0, 2: 2.0, 3: 1.0, DENSE: 9.0}).run(7)
    assert course.levels[-1] == 2
    course.gains = [1, 1, 0.1, 0.1]
    assert course.run(8).levels[-5:] == [1] * 5
    assert course.search.throughput(2) == 0.0, "it was never measured"


def test_one_slow_iteration_is_no_level_s_time():
    """A test or a checkpoint between two iterations: the median of the window does not see it."""
    course = Course(_rule(), [1, 1, 1, 1], {0: 8.0, 1: 4.0, 2: 2.0, 3: 1.0}).run(3)
    course.seconds[1] = 500.0
    course.run(1)
    course.seconds[1] = 4.0
    assert course.run(8).search.throughput(1) == 0.25


def test_unknown_norms_change_no_gain_and_unknown_times_are_waited_for():
    search = Search(_rule(), np.zeros(_rule().size))
    search.hear(0, 1.0, 2.0, np.array([2.0, 1.5, 1.0, 0.5]))
    gains = [search.gain(level) for level in range(4)]
    assert gains == [1.0, 0.75, 0.5, 0.25]
    search.hear(0, 0.0, np.nan, np.full(4, np.nan))
    assert [search.gain(level) for level in range(4)] == gains and search.steps == 2
    search.hear(0, 0.0, 2.0, np.full(4, 2.0))
    search.hear(0, 1.0, 2.0, np.full(4, 2.0))
    assert search.choose() == 0 and search.trial is None, "two times of three are known"


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1)), min_size=1, max_size=60),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_whatever_it_hears_it_chooses_a_level_and_searches_each_once(told, levels, window):
    search = Search(_rule(levels, window=window), np.zeros(_rule(levels, window=window).size))
    for seconds, share in told:
        level = search.choose()
        assert DENSE <= level < levels
        search.hear(level, seconds, 1.0, share ** np.arange(1, levels + 1))
        copied = Search(search.rule, search.state())
        np.testing.assert_array_equal(copied.state(), search.state())
    assert search.searched <= len(told)


def test_the_median_is_of_the_level_that_is_watched():
    """Iterations in which a level gave way do not count towards its time."""
    course = Course(_rule(2, window=2), [1.0, 0.2], {0: 8.0, 1: 4.0, DENSE: 100.0}).run(4)
    course.gains = [0.2, 0.1]
    course.run(6)
    assert course.levels[-1] == DENSE
    assert 0.2 / 8.0 <= course.search.throughput(0) <= 1.0 / 8.0
