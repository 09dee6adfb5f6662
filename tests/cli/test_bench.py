"""The benchmark's figures: the slowest rank counts, ratios are gloo's time over dblp's; tables fit a terminal."""

import contextlib
import io

import numpy as np
import pytest
from rich.console import Console

from dblp.cli import launch
from dblp.cli.bench import command
from dblp.cli.bench.plan import BOUNDED, EXACT, GLOO, BenchPlan
from dblp.cli.bench.results import Collector, combine
from dblp.cli.bench.tables import burst_table, busy_table, memory_table, timing_rows, timing_table
from dblp.errors import ConfigError

PLAN = {
    "ranks": 2, "sizes": (4096,), "arms": (EXACT,), "rounds": 0, "impair": "", "datagram_bytes": 1464,
    "algorithm": "auto", "budget": 0.0, "stop": "stall", "busy_main": False, "memory": False,
}  # fmt: skip
FULL = {"arms": (EXACT, BOUNDED), "budget": 0.1, "busy_main": True, "memory": True, "impair": "loss(0.1)"}


def plan(**changes):
    return BenchPlan(**{**PLAN, **changes})


def event(of, seconds, *, nbytes=4096, lost=None, peak=0):
    """One rank's event: ``seconds`` by arm, the same for busy variants."""
    names = [variant.name for variant in of.variants]
    times = {name: seconds[name.removesuffix("+busy")] for name in names}
    rounds = len(next(iter(times.values())))
    return {
        "kind": "size", "bytes": nbytes, "seconds": times,
        "lost": {name: lost or [0] * rounds for name in names}, "peaks": {name: [peak] * rounds for name in names},
    }  # fmt: skip


def test_the_slowest_rank_of_each_round_counts():
    first, second = (
        {GLOO: [2.0, 8.0, 2.0], EXACT: [1.0, 2.0, 1.0]},
        {GLOO: [4.0, 1.0, 2.0], EXACT: [0.5, 4.0, 1.0]},
    )
    result = combine(plan(), [event(plan(), first), event(plan(), second)])
    assert result.timings[GLOO].seconds.tolist() == [4.0, 8.0, 2.0]
    assert result.timings[EXACT].seconds.tolist() == [1.0, 4.0, 1.0]
    assert result.ratio(EXACT) == 4.0
    assert result.paired_ratio(EXACT) == 2.0


def test_a_result_is_complete_with_its_last_rank_and_sizes_are_kept_apart():
    collector = Collector(plan())
    times = {GLOO: [1.0], EXACT: [1.0]}
    assert collector.add(0, event(plan(), times)) is None
    assert collector.add(1, event(plan(), times, nbytes=8192)) is None
    result = collector.add(1, event(plan(), times))
    assert result is not None
    assert result.nbytes == 4096


def test_the_record_holds_the_documented_keys():
    times = {GLOO: [0.2, 0.2], EXACT: [0.1, 0.1]}
    record = combine(plan(), [event(plan(), times)] * 2).record()
    keys = ["ranks", "bytes", "impair", "gloo_p50_s", "gloo_p99_s", "dblp_p50_s", "dblp_p99_s", "ratio_p50"]
    assert set(keys) <= set(record)
    assert (record["ranks"], record["bytes"], record["ratio_p50"]) == (2, 4096, 2.0)
    assert record["dblp_arm"] == EXACT


def test_a_bounded_arm_alone_is_named_in_the_record():
    alone = plan(arms=(BOUNDED,), budget=0.1)
    record = combine(alone, [event(alone, {GLOO: [0.2], BOUNDED: [0.1]})] * 2).record()
    assert (record["dblp_arm"], record["dblp_p50_s"]) == (BOUNDED, 0.1)


def test_rounds_that_lost_a_datagram_on_any_rank_are_hit():
    full = plan(**FULL)
    times = {GLOO: [1.0, 1.0, 1.0], EXACT: [1.0, 5.0, 2.0], BOUNDED: [1.0, 3.0, 2.0]}
    result = combine(full, [event(full, times), event(full, times, lost=[0, 7, 0])])
    assert result.timings[EXACT].hit.tolist() == [False, True, False]
    assert not result.timings[GLOO].hit.any()
    record = result.record()
    assert (record["dblp_hit_rounds"], record["dblp_clean_rounds"]) == (1, 2)
    assert (record["dblp_hit_max_s"], record["bounded_hit_max_s"]) == (5.0, 3.0)
    assert all(value is None or isinstance(value, (int, float, str)) for value in record.values())


@pytest.mark.parametrize("finished", [0, 1, 2])
@pytest.mark.parametrize("terminal", [True, False])
def test_what_was_timed_before_ctrl_c_is_shown(monkeypatch, finished, terminal):
    """Two sizes; the workers are stopped after none, one or both."""
    two, times = plan(sizes=(4096, 8192)), {GLOO: [0.2], EXACT: [0.1]}

    def workers(job, plan, *, ranks, on_event, env):
        for nbytes in two.sizes[:finished]:
            for rank in range(ranks):
                on_event(rank, event(two, times, nbytes=nbytes))
        if finished < 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(launch, "run_workers", workers)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=80)
    with contextlib.suppress(KeyboardInterrupt):
        assert len(command.run([two], console)) == finished == 2
    said = screen.getvalue()
    last = said.rpartition("timing 2 sizes")[2]
    assert ("arm" in last) is (finished > 0), said
    assert ("4 KiB" in last, "8 KiB" in last) == (finished > 0, finished > 1), said
    assert (f"ended early: {finished} of 2 sizes timed" in last) is (finished < 2), said


def test_what_a_busy_thread_costs_is_a_share_of_throughput():
    busy = plan(busy_main=True)
    events = [event(busy, {GLOO: [1.0], EXACT: [1.0]}) for _ in range(2)]
    for one in events:
        one["seconds"]["exact+busy"] = [1.25]
    assert combine(busy, events).busy_loss(EXACT) == pytest.approx(0.2)


def test_all_tables_fit_80_columns():
    full = plan(**FULL)
    rng = np.random.default_rng(0)
    times = {arm: list(rng.uniform(0.1, 0.3, 50)) for arm in (GLOO, EXACT, BOUNDED)}
    result = combine(
        full, [event(full, times, nbytes=100 << 20, lost=[0, 1] * 25, peak=12_345_678) for _ in range(2)]
    )
    times_table = timing_table()
    for row in timing_rows(result):
        times_table.add_row(*row)
    for table in (times_table, burst_table([result]), busy_table([result]), memory_table([result])):
        console = Console(width=80, color_system=None)
        with console.capture() as capture:
            console.print(table)
        assert "…" not in capture.get()
        assert "100 MiB" in capture.get()


def test_the_number_of_rounds_follows_the_size():
    sizes = [4096, 25 << 20, 100 << 20]
    assert [plan().rounds_of(size) for size in sizes] == [100, 24, 10]
    assert [plan(impair="loss(0.1)").rounds_of(size) for size in sizes] == [1000, 240, 100]
    assert plan(rounds=7).rounds_of(4096) == 7


def test_a_plan_survives_its_way_to_the_workers():
    full = plan(**FULL)
    assert BenchPlan.from_json(full.to_json()) == full


def test_a_bounded_arm_needs_a_budget():
    with pytest.raises(ConfigError, match="--policy-budget"):
        plan(arms=(BOUNDED,))
