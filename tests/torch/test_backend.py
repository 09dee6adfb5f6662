"""The backend in real processes; the scenarios are in ``scenarios_*.py``."""

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.sockets]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("scenario", ["all_reduce", "moving", "reducing"])
def test_collectives(ranks, scenario, world_size):
    ranks(scenario, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("scenario", ["point_to_point", "groups"])
def test_pairs_and_groups(ranks, scenario, world_size):
    ranks(scenario, world_size)
