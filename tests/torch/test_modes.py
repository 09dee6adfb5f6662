"""The lossy hook in each mode of DDP, in real processes."""

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.sockets]


FOUR = pytest.param(4, marks=pytest.mark.slow)


@pytest.mark.parametrize("world_size", [2, FOUR])
@pytest.mark.parametrize("scenario", ["lossy_modes", "lossy_join"])
def test_modes(ranks, scenario, world_size):
    ranks(scenario, world_size, timeout_s=120)


@pytest.mark.parametrize("scenario", ["complex_parameters", "copied_models"])
def test_models_of_other_kinds(ranks, scenario):
    ranks(scenario, 2)


def test_compiled(ranks):
    ranks("lossy_compiled", 2, timeout_s=200, backends=["aot_eager"])


def test_compiled_without_an_attachment(ranks):
    ranks("exact_compiled", 2, timeout_s=200, backends=["aot_eager"])


@pytest.mark.slow
def test_compiled_by_others(ranks):
    ranks("lossy_compiled", 2, timeout_s=200, backends=["eager"])
    ranks("exact_compiled", 2, timeout_s=200, backends=["eager", "inductor"])
    ranks("python_reducer", 2, timeout_s=200)


def test_torchs_own_hooks(ranks):
    ranks("torch_hooks", 2)


@pytest.mark.parametrize("late", [False, True])
def test_torchs_powersgd_hook_with_a_slow_rank(ranks, late):
    ranks("powersgd_hook_slow_rank", 2, late=late)


def test_callbacks_that_branch(ranks):
    ranks("callbacks_branch", 2)


@pytest.mark.parametrize("world_size", [2, FOUR])
def test_calls_in_torchs_other_forms(ranks, world_size):
    ranks("overloads", world_size)
