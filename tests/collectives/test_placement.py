"""Each rank's engine gets its share of the host's processors, unless a launcher has bound it, or its user has."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dblp
from dblp.collectives import placement
from dblp.collectives.engine import Engine, acquire_engine, release_engine
from dblp.errors import ConfigError
from dblp.transport.config import TransportConfig
from dblp.units import parse_cpus
from tests.torch.test_master import free_port

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


def test_ranks_that_may_use_the_same_processors_share_them():
    keys = ["a", "b", "a", "b", "b", "a"]
    shares = [placement.engine_processors("auto", rank, keys, EIGHT) for rank in (0, 2, 5)]
    assert shares == [(frozenset({0, 1}), 3), (frozenset({2, 3, 4}), 3), (frozenset({5, 6, 7}), 3)]
    assert placement.engine_processors("auto", 4, keys, {3, 9}) == (frozenset({3}), 3), "fewer than ranks"


@pytest.mark.parametrize("keys", [["a"], ["a", "b"], ["", ""]])
def test_a_rank_that_is_alone_on_its_processors_or_does_not_know_is_left_to_the_scheduler(keys):
    assert placement.engine_processors("auto", 0, keys, EIGHT) == (None, 1)


def test_keys_tell_machines_and_bindings_apart():
    keys = {
        placement.make_key("one", {0, 1}),
        placement.make_key("one", {0, 2}),
        placement.make_key("two", {0, 1}),
    }
    assert len(keys) == 3 and all(keys)
    assert placement.processors_key() == placement.processors_key()


def test_a_list_wins_over_everything_and_all_means_all():
    assert placement.engine_processors("1,9", 1, ["a", "a"], {1, 2, 9}) == (frozenset({1, 9}), 2)
    assert placement.engine_processors("all", 1, ["a", "a"], EIGHT) == (None, 2)


@pytest.mark.parametrize("text", ["70-71", "0,70"])
def test_a_list_with_processors_that_are_not_there_is_an_error_that_names_those_that_are(text):
    with pytest.raises(ConfigError, match=rf"engine_cpus='{text}'.*only 0, 1, 2, 3, 4, 5, 6, 7"):
        placement.engine_processors(text, 0, ["a"], EIGHT)


@pytest.mark.parametrize("text", ["", "a", "0-", "-3", "3-1", "0,,1", "1.5", "auto,1", "none"])
def test_what_is_no_list_is_refused_where_it_is_set(text):
    with pytest.raises(ConfigError, match=r"engine_cpus=.*neither a processor.*'auto' or 'all'"):
        TransportConfig(engine_cpus=text)


def test_a_range_without_end_is_refused_before_it_is_counted_out():
    with pytest.raises(ConfigError, match="there is no processor 99999999999"):
        TransportConfig(engine_cpus="0-99999999999")


def test_lists_are_read_as_taskset_reads_them():
    assert parse_cpus("0-3, 8,10-10") == {0, 1, 2, 3, 8, 10}
    assert TransportConfig.from_env({"DBLP_ENGINE_CPUS": "0-1"}).engine_cpus == "0-1"


def affinity_of(engine: Engine) -> set[int]:
    """Of its thread."""

    async def look() -> set[int]:
        return os.sched_getaffinity(0)

    return engine.run(look)


def test_only_the_engine_s_thread_is_bound_and_the_group_with_the_most_sharers_wins():
    before = os.sched_getaffinity(0)
    engine = acquire_engine()
    try:
        assert affinity_of(engine) == before
        engine.bind({min(before)}, 2)
        assert affinity_of(engine) == {min(before)}
        engine.bind(before, 2)
        assert affinity_of(engine) == {min(before)}, "a group made later of as many or fewer"
        engine.bind({max(before)}, 4)
        assert affinity_of(engine) == {max(before)}
        assert os.sched_getaffinity(0) == before
        assert placement.usable() == before
    finally:
        release_engine(engine)


def test_processors_that_are_gone_are_a_warning_and_no_failure(caplog):
    engine = acquire_engine()
    try:
        engine.bind({4095}, 2)
        assert affinity_of(engine) == os.sched_getaffinity(0)
        assert "cannot be bound to processors [4095]" in caplog.text
    finally:
        release_engine(engine)


def _rank(rank: int, port: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dblp.init_process_group()
    try:
        dblp.barrier()
        results.put((rank, sorted(affinity_of(_shared_engine()))))
    finally:
        dblp.destroy_process_group()


def _shared_engine() -> Engine:
    engine = acquire_engine()
    release_engine(engine)
    return engine


def test_two_ranks_of_a_host_share_its_processors_whoever_started_them():
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    port = free_port()
    ranks = [context.Process(target=_rank, args=(rank, port, results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    seen = dict(results.get(timeout=60) for _ in ranks)
    for rank in ranks:
        rank.join(60)
    allowed = placement.usable()
    assert seen == {rank: sorted(placement.share(rank, 2, allowed)) for rank in range(2)}
