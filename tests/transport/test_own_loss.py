"""Heavy loss, and windows that shrink to see whether it is theirs."""

from __future__ import annotations

import pytest

from dblp.transport.congestion.own_loss import DECREASE, LIFE_S, TRIAL_S, OwnLoss

WINDOW = 200_000.0
RTT_S = 1e-3


class Flow:
    """A window that leaves through something that loses, and is told of it once a round trip."""

    def __init__(self, window_bytes: float = WINDOW) -> None:
        self.window_bytes = window_bytes
        self.now = 0.0
        self.loss = OwnLoss()

    def lose(self, share: float, *, queued: bool = True) -> float:
        self.now += RTT_S
        self.window_bytes = self.loss.window_for(
            self.window_bytes, share, queued=queued, now=self.now, rtt_s=RTT_S
        )
        return self.window_bytes

    def lose_for(self, seconds: float, share: float) -> list[float]:
        return [self.lose(share) for _ in range(round(seconds / RTT_S))]

    def overrun(self, buffer_bytes: float) -> float:
        """A window that leaves at once into a buffer."""
        share = 1.0 - buffer_bytes / self.window_bytes
        return self.lose(share) if share > 0 else self.window_bytes


@pytest.mark.parametrize("share", [0.6, 0.8, 0.95])
def test_loss_that_stays_is_another_s(share):
    """After a decrease and a trial the window is as before, and stays so."""
    flow = Flow()
    assert flow.lose(share) == DECREASE * WINDOW
    flow.lose(share)
    assert max(flow.lose_for(TRIAL_S, share)) < 0.4 * WINDOW
    flow.lose_for(2 * RTT_S, share)
    assert flow.lose_for(0.1, share) == [WINDOW] * 100


def test_loss_without_a_queue_needs_no_long_trial():
    flow = Flow()
    flow.lose(0.8)
    flow.lose(0.8)
    assert flow.lose(0.8) < 0.4 * WINDOW
    assert flow.lose(0.8, queued=False) == WINDOW


def test_loss_without_a_queue_never_shrinks():
    flow = Flow()
    assert [flow.lose(0.8, queued=False) for _ in range(5)] == [WINDOW] * 5


def test_loss_that_grows_meanwhile_is_another_s():
    """A burst begins within a window: what is told of first is the part of it that was hit."""
    flow = Flow()
    flow.lose(0.5)
    flow.lose_for(TRIAL_S + 2 * RTT_S, 0.7)
    assert flow.lose(0.8) == WINDOW


@pytest.mark.parametrize("buffer_bytes", [10_000.0, 20_000.0, 60_000.0, 150_000.0])
def test_a_buffer_that_is_overrun_is_not(buffer_bytes):
    flow = Flow()
    for _ in range(40):
        flow.overrun(buffer_bytes)
        assert flow.window_bytes <= WINDOW
    assert 0.5 * buffer_bytes < flow.window_bytes <= buffer_bytes


def test_one_look_decides_nothing():
    """Losses are told in lumps: a trial in which one of them is small has shown that less is lost."""
    flow = Flow()
    flow.lose(0.8)
    flow.lose_for(TRIAL_S / 2, 0.9)
    flow.lose(0.2)
    assert max(flow.lose_for(TRIAL_S / 2, 0.9)) < 0.4 * WINDOW


def test_more_than_was_spared_is_looked_into_again():
    """What a window of a quarter lost of itself, the whole one loses much more of."""
    flow = Flow()
    flow.lose_for(TRIAL_S + 4 * RTT_S, 0.6)
    assert flow.window_bytes == WINDOW
    assert flow.lose(0.75) == WINDOW
    assert [flow.lose(share) for share in (0.9, 0.7, 0.9)] == [WINDOW] * 3, "once may be chance"
    assert flow.lose(0.9) == DECREASE * WINDOW
    assert flow.lose_for(0.1, 0.9)[-1] < 0.01 * WINDOW, "no second trial soon"


def test_a_verdict_has_an_end():
    flow = Flow()
    flow.lose_for(TRIAL_S + 4 * RTT_S, 0.8)
    assert flow.window_bytes == WINDOW
    flow.now += LIFE_S
    assert flow.lose(0.8) < WINDOW


def test_less_than_half_is_the_window_s_own_in_any_case():
    flow = Flow()
    assert [flow.lose(0.2) for _ in range(3)] == pytest.approx([WINDOW * DECREASE**n for n in (1, 2, 3)])


def test_old_losses_do_not_count():
    flow = Flow()
    flow.lose(0.8)
    flow.now += LIFE_S
    before = flow.window_bytes
    assert flow.lose(0.8) < before and flow.lose(0.8) <= before
