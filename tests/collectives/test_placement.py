"""Each rank's engine gets its share of the host's processors, unless launcher or user know better."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dblp.collectives import placement
from dblp.collectives.engine import acquire_engine, release_engine
from dblp.errors import ConfigError
from dblp.transport.config import TransportConfig
from dblp.units import parse_cpus

TORCHRUN = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
EIGHT = frozenset(range(8))


@given(st.sets(st.integers(0, 255), min_size=1), st.integers(1, 64))
def test_shares_are_equal_and_leave_no_processor_out(processors, ranks):
    shares = [placement.share(rank, ranks, processors) for rank in range(ranks)]
    assert set().union(*shares) <= processors and all(shares)
    if len(processors) >= ranks:
        assert sum(map(len, shares)) == len(processors) and set().union(*shares) == processors
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        loads = [sum(cpu in share for share in shares) for cpu in processors]
        assert all(len(share) == 1 for share in shares) and max(loads) - min(loads) <= 1


def test_ranks_of_a_launcher_share_the_processors():
    assert placement.engine_processors("auto", TORCHRUN, EIGHT, EIGHT) == frozenset({4, 5, 6, 7})
    assert placement.engine_processors("auto", {**TORCHRUN, "LOCAL_RANK": "0"}, {3, 9}, {3, 9}) == frozenset(
        {3}
    )
    slurm = {"SLURM_LOCALID": "3", "SLURM_NTASKS_PER_NODE": "4"}
    assert placement.engine_processors("auto", slurm, EIGHT, EIGHT) == frozenset({6, 7})


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {"LOCAL_RANK": "0"},
        {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
        {"LOCAL_RANK": "-1", "LOCAL_WORLD_SIZE": "2"},
        {"LOCAL_RANK": "one", "LOCAL_WORLD_SIZE": "2"},
    ],
)
def test_a_rank_that_is_alone_or_does_not_know_is_left_to_the_scheduler(environ):
    assert placement.engine_processors("auto", environ, EIGHT, EIGHT) is None


def test_a_launcher_that_has_bound_its_ranks_knows_better():
    assert placement.engine_processors("auto", TORCHRUN, {2, 3}, EIGHT) is None


def test_a_list_wins_over_everything_and_all_means_all():
    assert placement.engine_processors("0-1,9", TORCHRUN, {1, 2, 9}, EIGHT) == frozenset({1, 9})
    assert placement.engine_processors("all", TORCHRUN, EIGHT, EIGHT) is None


def test_a_list_of_processors_that_are_not_there_is_an_error_that_names_those_that_are():
    with pytest.raises(ConfigError, match=r"engine_cpus='70-71'.*only 0, 1, 2, 3, 4, 5, 6, 7"):
        placement.engine_processors("70-71", {}, EIGHT, EIGHT)


@pytest.mark.parametrize("text", ["", "a", "0-", "-3", "3-1", "0,,1", "1.5", "auto,1", "none"])
def test_what_is_no_list_is_refused_where_it_is_set(text):
    with pytest.raises(ConfigError, match=r"engine_cpus=.*neither a processor.*'auto' or 'all'"):
        TransportConfig(engine_cpus=text)


def test_lists_are_read_as_taskset_reads_them():
    assert parse_cpus("0-3, 8,10-10") == {0, 1, 2, 3, 8, 10}
    assert TransportConfig.from_env({"DBLP_ENGINE_CPUS": "0-1"}).engine_cpus == "0-1"


def test_only_the_engine_s_thread_is_bound():
    before = os.sched_getaffinity(0)
    chosen = {min(before)}
    engine = acquire_engine(processors=chosen)
    try:
        seen: list[set[int]] = []
        done = threading.Event()

        def look() -> None:
            seen.append(os.sched_getaffinity(0))
            done.set()

        engine.loop.call_soon_threadsafe(look)
        assert done.wait(10)
        assert seen == [chosen]
        assert os.sched_getaffinity(0) == before
    finally:
        release_engine(engine)


def test_processors_that_are_gone_are_a_warning_and_no_failure(caplog):
    engine = acquire_engine(processors={4095})
    try:

        async def answer() -> int:
            return 5

        assert engine.run(answer) == 5
        assert "cannot be bound to processors [4095]" in caplog.text
    finally:
        release_engine(engine)
