"""The backend in real processes; the scenarios are in ``scenarios_*.py``."""

import pytest

from dblp.collectives.torch.backend import DblpProcessGroup
from tests.torch.conftest import TORCH

pytestmark = [pytest.mark.processes, pytest.mark.sockets]
PROFILER = pytest.mark.skipif(TORCH < (2, 8), reason="torch 2.7 shows no event that ends on another thread")


@pytest.mark.parametrize(
    "before, now",
    [
        ("_allgather_base", "all_gather_single"),
        ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        ("_reduce_scatter_base", "reduce_scatter_single"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
        ("alltoall_base", "all_to_all_single"),
    ],
)
def test_the_names_of_torch_before_2_13_are_the_same_methods(before, now):
    assert getattr(DblpProcessGroup, before) is getattr(DblpProcessGroup, now)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("scenario", ["all_reduce", "moving", "reducing"])
def test_collectives(ranks, scenario, world_size):
    ranks(scenario, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("scenario", ["point_to_point", "groups"])
def test_pairs_and_groups(ranks, scenario, world_size):
    ranks(scenario, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "scenario",
    [
        "sparse",
        "sparse_coalesced",
        "sparse_gradients",
        "coalesced_gather",
        pytest.param("profiled", marks=PROFILER),
        "join_by_active_ranks",
    ],
)
def test_what_torchs_own_tests_ask(ranks, scenario, world_size):
    ranks(scenario, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("scenario", ["ddp", "attached"])
def test_training(ranks, scenario, world_size):
    ranks(scenario, world_size)


def test_bounded_training_on_a_lossy_network(ranks):
    ranks("lossy_network", 2)


@pytest.mark.parametrize(
    "scenario",
    ["mismatch", "timeouts", "own_timeouts", "unnamed_timeout", "backward_error", "again", "absent"],
)
def test_failures(ranks, scenario):
    ranks(scenario, 2)


@pytest.mark.skipif(
    TORCH < (2, 8),
    reason="torch 2.7 connects gloo groups when they are made",
)
def test_what_falls_through_to_gloo_is_said(ranks):
    ranks("falls_through", 2)


def test_torchs_debug_level_detail(ranks):
    ranks("debug_detail", 2)


def test_monitored_barrier_names_who_is_late(ranks):
    ranks("monitored", 3)


@pytest.mark.parametrize("scenario", ["dumped", "signalled"])
def test_the_flight_recorder_is_dumped(ranks, scenario):
    ranks(scenario, 2)


@pytest.mark.parametrize("scenario", ["killed_before", "killed_during", "hook_error"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_survivor_names_the_killed_rank_in_time(ranks, scenario, world_size):
    ranks(scenario, world_size, killed=[world_size - 1])
