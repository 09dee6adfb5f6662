"""Fates of datagrams against closed forms. Each tolerance is five standard errors, at a fixed seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dblp.transport.impair_model import Fate, Impairer, Queue
from dblp.transport.impair_spec import ImpairSpec, Rate, parse_impair

SIZE = 1464
ONE = np.array([SIZE])


def _impairer(text: str, seed: int = 1) -> Impairer:
    return Impairer(parse_impair(text), np.random.default_rng(seed))


def _burst(count: int, size: int = SIZE) -> np.ndarray:
    return np.full(count, size)


def _lost(impairer: Impairer, count: int, now: float = 0.0) -> np.ndarray:
    """Which of ``count`` datagrams sent at once are lost."""
    lost = np.ones(count, bool)
    lost[impairer.apply(_burst(count), now).index] = False
    return lost


def _close(measured: float, expected: float, standard_error: float) -> None:
    assert abs(measured - expected) <= 5 * standard_error, (measured, expected, standard_error)


def test_no_impairment_lets_everything_through_at_once():
    impairer = Impairer(ImpairSpec())
    fate = impairer.apply(_burst(5), 3.0)
    assert fate.index.tolist() == [0, 1, 2, 3, 4]
    assert fate.at.tolist() == [3.0] * 5
    assert not fate.corrupt.any()
    assert impairer.counters.network_loss == 0.0


@pytest.mark.parametrize(
    "text", ["loss(0.3)", "rate(1gbit)", "ge(0.1,0.1)", "ge_time(1s,1s)", "bursts(1,1s,1s)"]
)
def test_an_empty_burst_is_harmless(text):
    fate = _impairer(text).apply(_burst(0), 1.0)
    assert len(fate.index) == len(fate.at) == len(fate.corrupt) == 0


@pytest.mark.parametrize("p", [0.0, 0.001, 0.3, 1.0])
def test_uniform_loss(p):
    count = 200_000
    impairer = _impairer(f"loss({p})")
    lost = _lost(impairer, count)
    _close(lost.mean(), p, math.sqrt(p * (1 - p) / count))
    assert impairer.counters.lost["loss"] == lost.sum()
    assert impairer.counters.network_loss == lost.mean()


@pytest.mark.parametrize(
    ("p", "r", "bad", "good"),
    [(0.002, 0.05, 0.8, 0.0), (0.1, 0.3, 1.0, 0.0), (0.05, 0.5, 0.9, 0.02), (0.0, 1.0, 1.0, 0.1)],
)
def test_gilbert_elliott_loses_its_stationary_share(p, r, bad, good):
    """Loss is good * r/(p+r) + bad * p/(p+r); its variance has the chain's correlation, (1-p-r)^lag."""
    count = 400_000
    lost = _lost(_impairer(f"ge({p},{r},bad={bad},good={good})"), count)
    share_bad = p / (p + r)
    mean = good * (1 - share_bad) + bad * share_bad
    decay = 1 - p - r
    correlated = share_bad * (1 - share_bad) * (bad - good) ** 2 * 2 * decay / (1 - decay)
    _close(lost.mean(), mean, math.sqrt((mean * (1 - mean) + correlated) / count))


def _runs(lost: np.ndarray, state: bool) -> np.ndarray:
    """Lengths of the complete runs of a state."""
    edges = np.flatnonzero(np.diff(lost.astype(int))) + 1
    lengths: np.ndarray = np.diff(edges)[lost[edges[:-1]] == state]
    return lengths


def test_gilbert_elliott_bad_runs_last_one_over_r():
    p, r = 0.01, 0.1
    lost = _lost(_impairer(f"ge({p},{r})"), 500_000)
    for runs, leave in ((_runs(lost, True), r), (_runs(lost, False), p)):
        assert len(runs) > 1000
        _close(runs.mean(), 1 / leave, math.sqrt((1 - leave) / leave**2 / len(runs)))


def test_gilbert_elliott_may_stay_in_a_state_for_ever():
    assert not _lost(_impairer("ge(p=0,r=0.5)"), 10_000)[1000:].any()
    assert _lost(_impairer("ge(p=0.5,r=0)"), 10_000)[1000:].all()


def test_gilbert_elliott_starts_in_the_stationary_law():
    seeds = 2000
    first = [_lost(_impairer("ge(p=0.2,r=0.3)", seed), 1)[0] for seed in range(seeds)]
    _close(float(np.mean(first)), 0.4, math.sqrt(0.4 * 0.6 / seeds))


def test_gilbert_elliott_by_time_is_bad_for_its_share_of_the_time():
    """Exponential times; the share of bad time over T has variance about 2 (b g)^2 / (b+g)^3 / T."""
    burst, gap = 0.05, 0.2
    impairer = _impairer(f"ge_time(burst={burst}s,gap={gap}s)")
    step, count = 0.005, 200_000
    lost = np.array([len(impairer.apply(ONE, i * step).index) == 0 for i in range(count // 10)])
    span = step * len(lost)
    _close(lost.mean(), burst / (burst + gap), math.sqrt(2 * (burst * gap) ** 2 / (burst + gap) ** 3 / span))


def test_gilbert_elliott_by_time_treats_all_of_an_instant_alike():
    impairer = _impairer("ge_time(burst=1ms,gap=1ms)")
    for now in np.arange(0.0, 0.5, 0.003):
        lost = _lost(impairer, 20, float(now))
        assert lost.all() or not lost.any()


def test_gilbert_elliott_by_time_spread_over_a_burst_changes_within_it():
    times = np.arange(0.0, 10.0, 1e-4)
    lost = np.ones(len(times), bool)
    lost[_impairer("ge_time(burst=10ms,gap=30ms)").apply(_burst(len(times)), times).index] = False
    assert len(_runs(lost, True)) > 200
    _close(lost.mean(), 0.25, math.sqrt(2 * (0.01 * 0.03) ** 2 / 0.04**3 / 10.0))


def test_gilbert_elliott_by_time_skips_long_silence_quickly():
    impairer = _impairer("ge_time(burst=1us,gap=1us)")
    _lost(impairer, 1, 0.0)
    lost = [_lost(impairer, 1, 1e6 * k)[0] for k in range(1, 2001)]
    _close(float(np.mean(lost)), 0.5, math.sqrt(0.25 / 2000))


def test_scheduled_bursts_are_exact_in_time():
    impairer = _impairer("bursts(loss=1,length=0.25s,every=1s,start=2s)")
    for now in np.arange(0.0, 6.0, 1 / 64):
        expected = now >= 2.0 and now % 1.0 < 0.25
        assert _lost(impairer, 3, float(now)).all() == expected
        assert _lost(impairer, 3, float(now)).any() == expected
    times = np.arange(0.0, 6.0, 1 / 64)
    kept = _impairer("bursts(loss=1,length=0.25s,every=1s,start=2s)").apply(_burst(len(times)), times).index
    assert kept.tolist() == np.flatnonzero((times < 2.0) | (times % 1.0 >= 0.25)).tolist()


def test_scheduled_bursts_count_from_the_origin():
    spec = parse_impair("bursts(loss=1,length=0.25s,every=1s)")
    impairer = Impairer(spec, origin=0.5)
    assert not _lost(impairer, 1, 0.25).any()
    assert _lost(impairer, 1, 0.5).all()
    assert not _lost(impairer, 1, 1.0).any()


def test_the_loss_of_a_scheduled_burst_is_drawn_once_within_its_range():
    count = 4000
    impairer = _impairer("bursts(loss=0.6..0.9,length=1s,every=1s),seed(5)")
    levels = [_lost(impairer, count, k + 0.5).mean() for k in range(200)]
    noise = math.sqrt(0.25 / count)
    assert 0.6 - 5 * noise < min(levels) < 0.63
    assert 0.87 < max(levels) < 0.9 + 5 * noise
    _close(float(np.mean(levels)), 0.75, math.sqrt(0.3**2 / 12 / 200))


def test_ranks_that_share_a_seed_share_the_level_of_each_scheduled_burst():
    text = "bursts(loss=0..1,length=1s,every=1s),seed(5)"
    for k in (0, 3, 17):
        levels = [_lost(_impairer(text, seed), 20_000, k + 0.5).mean() for seed in (1, 2)]
        _close(levels[0] - levels[1], 0.0, math.sqrt(2 * 0.25 / 20_000))


def test_losses_are_counted_once_with_the_first_reason():
    impairer = _impairer("loss(1),bursts(1,1s,1s)")
    _lost(impairer, 10)
    assert impairer.counters.lost == {"loss": 10, "bursts": 0}
    assert impairer.counters.total_lost == 10


def test_duplicates_follow_their_original():
    count, p = 100_000, 0.1
    impairer = _impairer(f"duplicate({p})")
    fate = impairer.apply(_burst(count), 0.0)
    assert (np.diff(fate.index) >= 0).all()
    copies = np.bincount(fate.index, minlength=count)
    assert set(copies.tolist()) == {1, 2}
    _close((copies == 2).mean(), p, math.sqrt(p * (1 - p) / count))
    assert impairer.counters.duplicated == (copies == 2).sum()


def test_corrupt_datagrams_are_lost_as_by_the_checksum():
    count, p = 100_000, 0.2
    impairer = _impairer(f"corrupt({p})")
    fate = impairer.apply(_burst(count), 0.0)
    assert not fate.corrupt.any()
    _close(1 - len(fate.index) / count, p, math.sqrt(p * (1 - p) / count))
    assert impairer.counters.lost["corrupt"] == count - len(fate.index)
    assert impairer.counters.corrupted == 0


def test_corrupt_datagrams_are_marked_if_they_are_to_be_delivered():
    count, p = 100_000, 0.2
    impairer = _impairer(f"corrupt({p},deliver=true)")
    fate = impairer.apply(_burst(count), 0.0)
    assert len(fate.index) == count
    _close(fate.corrupt.mean(), p, math.sqrt(p * (1 - p) / count))
    assert impairer.counters.corrupted == fate.corrupt.sum()
    assert impairer.counters.total_lost == 0


def test_damage_flips_one_bit_of_each_datagram():
    impairer = _impairer("corrupt(1,deliver=true)")
    data = np.zeros(10 * 100 - 50, np.uint8)
    impairer.damage(data, np.array([0, 300, 900]), np.array([100, 100, 50]))
    bits = np.unpackbits(np.pad(data, (0, 50)).reshape(10, 100), axis=1).sum(axis=1)
    assert bits.tolist() == [1, 0, 0, 1, 0, 0, 0, 0, 0, 1]


def test_delay_is_exact():
    assert _impairer("delay(2ms)").apply(_burst(3), 1.0).at.tolist() == [1.002] * 3


def test_uniform_jitter():
    """Uniform over delay -/+ jitter: mean the delay, variance jitter^2 / 3."""
    count = 100_000
    fate = _impairer("delay(2ms),jitter(1ms)").apply(_burst(count), 5.0)
    late = fate.at - 5.0
    assert late.min() >= 0.001
    assert late.max() <= 0.003 + 1e-12
    _close(late.mean(), 0.002, 0.001 / math.sqrt(3 * count))
    _close(late.var(), 0.001**2 / 3, 0.001**2 / math.sqrt(count))
    assert (np.diff(fate.at) >= 0).all()
    assert (np.diff(fate.index) < 0).any()


def test_normal_jitter():
    count = 100_000
    late = _impairer("delay(10ms),jitter(1ms,dist=normal)").apply(_burst(count), 0.0).at
    _close(late.mean(), 0.010, 0.001 / math.sqrt(count))
    _close(late.std(), 0.001, 0.001 / math.sqrt(2 * count))


def test_nothing_is_delivered_before_it_was_sent():
    fate = _impairer("jitter(1ms)").apply(_burst(10_000), 7.0)
    assert fate.at.min() == 7.0
    _close((fate.at == 7.0).mean(), 0.5, math.sqrt(0.25 / 10_000))


def test_reorder_holds_its_share_back():
    count, p = 100_000, 0.1
    impairer = _impairer(f"reorder({p},by=2ms),delay(1ms)")
    fate = impairer.apply(_burst(count), 0.0)
    held = fate.at > 0.002
    assert np.unique(fate.at).tolist() == [0.001, 0.003]
    _close(held.mean(), p, math.sqrt(p * (1 - p) / count))
    assert impairer.counters.reordered == held.sum()
    # What is held back comes after what is not, each group in its own order.
    assert (np.diff(fate.index[~held]) > 0).all()
    assert (np.diff(fate.index[held]) > 0).all()


def test_rate_spaces_datagrams_exactly():
    impairer = _impairer("rate(1mbit,queue=1MB)")
    fate = impairer.apply(np.array([1000, 500, 1000]), 2.0)
    assert fate.at.tolist() == [2.0 + 8000 / 1e6, 2.0 + 12000 / 1e6, 2.0 + 20000 / 1e6]
    # The next waits for them; after an idle time the link starts afresh.
    assert impairer.apply(np.array([125]), 2.010).at.tolist() == [2.0 + 21000 / 1e6]
    assert impairer.apply(np.array([125]), 9.0).at.tolist() == [9.001]


def test_queue_drops_at_its_tail_exactly():
    impairer = _impairer("rate(8mbit,queue=4000B)")
    fate = impairer.apply(_burst(10, 1000), 0.0)
    assert fate.index.tolist() == [0, 1, 2, 3]
    assert impairer.counters.lost["rate"] == 6
    # After 1.5 ms 1500 of the 4000 bytes have left: one more fits, a second one would not.
    fate = impairer.apply(_burst(2, 1000), 0.0015)
    assert fate.index.tolist() == [0]
    assert fate.at.tolist() == [0.005]


def test_a_short_last_datagram_may_fit_where_full_ones_do_not():
    fate = _impairer("rate(8mbit,queue=4000B)").apply(np.array([1500, 1500, 1500, 1500, 600, 600, 300]), 0.0)
    assert fate.index.tolist() == [0, 1, 4, 6]
    assert fate.at.tolist() == [0.0015, 0.003, 0.0036, 0.0039]


def test_what_is_larger_than_the_queue_is_always_lost():
    assert len(_impairer("rate(1gbit,queue=1000B)").apply(_burst(3, 1001), 0.0).index) == 0


def _by_hand(rate: Rate, sizes: list[int], times: list[float]) -> list[tuple[int, float]]:
    """Tail drop and Lindley's recursion, one datagram at a time."""
    free_at, out = 0.0, []
    for number, (size, now) in enumerate(zip(sizes, times, strict=True)):
        backlog = max(0.0, free_at - now) * rate.bps / 8
        if backlog + size <= rate.queue_bytes + 1e-6:
            free_at = max(free_at, now) + size * 8 / rate.bps
            out.append((number, free_at))
    return out


@given(
    st.lists(
        st.tuples(st.integers(1, 1500), st.sampled_from([0.0, 0.0, 1e-4, 3e-3])), min_size=1, max_size=60
    ),
    st.sampled_from([2000, 6001, 1 << 20]),
)
def test_queue_equals_the_recursion_by_hand(arrivals, queue_bytes):
    rate = Rate(8e6, queue_bytes)
    sizes = [size for size, _ in arrivals]
    times = np.cumsum([gap for _, gap in arrivals]).tolist()
    kept, left = Queue(rate).admit(np.array(sizes), np.array(times))
    expected = _by_hand(rate, sizes, times)
    assert np.flatnonzero(kept).tolist() == [number for number, _ in expected]
    assert left == pytest.approx([at for _, at in expected], abs=1e-9)


_REPEATABLE = (
    "loss(0.2)",
    "ge(0.05,0.2,bad=0.8,good=0.01)",
    "ge_time(burst=2ms,gap=5ms,bad=0.9)",
    "bursts(loss=0.2..0.8,length=3ms,every=10ms),seed(3)",
    "duplicate(0.3)",
    "corrupt(0.2)",
    "corrupt(0.2,deliver=true)",
    "jitter(1ms),delay(1ms)",
    "jitter(1ms,dist=normal)",
    "reorder(0.2,by=1ms)",
    "rate(100mbit,queue=20KB)",
    "loss(0.1),ge(0.05,0.2),ge_time(1ms,9ms),duplicate(0.1),rate(1gbit),corrupt(0.1),delay(1ms),jitter(1ms)",
)


@pytest.mark.parametrize("text", _REPEATABLE)
def test_a_whole_burst_fares_as_its_datagrams_one_by_one(text):
    whole, single = _impairer(text), _impairer(text)
    for step in range(60):
        now = step * 1e-3
        sizes = _burst(1 + step % 44)
        sizes[-1] = 700
        fate = whole.apply(sizes, now)
        rows = [single.apply(sizes[i : i + 1], now) for i in range(len(sizes))]
        index = np.concatenate([np.full(len(row.index), i) for i, row in enumerate(rows)])
        at = np.concatenate([row.at for row in rows])
        corrupt = np.concatenate([row.corrupt for row in rows])
        order = np.argsort(at, kind="stable")
        assert fate.index.tolist() == index[order].tolist()
        assert fate.at.tolist() == at[order].tolist()
        assert fate.corrupt.tolist() == corrupt[order].tolist()
    assert whole.counters == single.counters


@pytest.mark.parametrize("text", _REPEATABLE)
def test_counters_balance_and_a_seed_repeats(text):
    def run() -> tuple[list[Fate], Impairer]:
        impairer = _impairer(text, seed=9)
        return [impairer.apply(_burst(44), k * 1e-3) for k in range(50)], impairer

    fates, impairer = run()
    again, _ = run()
    counters = impairer.counters
    assert counters.offered == 50 * 44
    assert counters.offered + counters.duplicated == counters.delivered + counters.total_lost
    assert counters.delivered == sum(len(fate.index) for fate in fates)
    for fate, other in zip(fates, again, strict=True):
        assert fate.index.tolist() == other.index.tolist()
        assert fate.at.tolist() == other.at.tolist()


def test_the_seed_of_the_spec_counts_where_no_generator_is_given():
    first, same, other = (Impairer(parse_impair(f"loss(0.5),seed({seed})")) for seed in (1, 1, 2))
    lost = [_lost(impairer, 200).tolist() for impairer in (first, same, other)]
    assert lost[0] == lost[1] != lost[2]
