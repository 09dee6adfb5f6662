"""The lossy hook in each mode of DDP, in real processes."""

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.sockets]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("scenario", ["lossy_modes", "lossy_join"])
def test_modes(ranks, scenario, world_size):
    ranks(scenario, world_size)


@pytest.mark.parametrize("scenario", ["lossy_compiled", "torch_hooks"])
def test_compiled_and_torchs_own_hooks(ranks, scenario):
    ranks(scenario, 2, timeout_s=120)


@pytest.mark.parametrize("world_size", [2, 4])
def test_calls_in_torchs_other_forms(ranks, world_size):
    ranks("overloads", world_size)
