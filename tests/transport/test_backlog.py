"""Copies and questions of a host that is behind its network."""

from __future__ import annotations

import pytest

from dblp.transport.backlog import BEHIND_S, HALF_LIFE_S, Backlog


def test_a_wait_is_remembered_and_fades():
    backlog = Backlog()
    backlog.note(0.08, now=1.0)
    assert backlog.behind_s == 0.08
    backlog.note(0.0, now=1.0 + HALF_LIFE_S)
    assert backlog.behind_s == pytest.approx(0.04)
    backlog.note(0.05, now=1.0 + 2 * HALF_LIFE_S)
    assert backlog.behind_s == 0.05
    backlog.note(-1e-6, now=100.0)  # clocks of the kernel and of the loop differ by a little
    assert 0.0 <= backlog.behind_s < 1e-9


def test_hosts_that_keep_up_send_all_copies():
    backlog = Backlog()
    backlog.note(BEHIND_S, now=0.0)
    assert backlog.affordable(8) == 8


@pytest.mark.parametrize(
    ("own", "peer", "copies"), [(6e-3, 0.0, 4), (0.0, 12e-3, 2), (12e-3, 12e-3, 1), (1.0, 0.0, 1)]
)
def test_the_farther_behind_either_is_the_fewer(own, peer, copies):
    backlog = Backlog()
    backlog.note(own, now=0.0)
    assert backlog.affordable(8, peer) == copies
