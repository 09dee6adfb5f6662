"""``attach`` to models of ``fully_shard``, in real processes."""

import pytest

from tests.torch.conftest import FSDP2_HOOK

pytestmark = [pytest.mark.processes, pytest.mark.sockets, FSDP2_HOOK]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("scenario", ["sharded_without_loss", "sharded_carried"])
def test_gradients(ranks, scenario, world_size):
    ranks(scenario, world_size, timeout_s=120)


@pytest.mark.parametrize(
    "scenario", ["sharded_saved", "sharded_budgets", "sharded_rotated", "sharded_refusals"]
)
def test_attachments(ranks, scenario):
    ranks(scenario, 2, timeout_s=120)


def test_leaving_without_a_word_is_clean(ranks):
    assert ranks("sharded_exit", 2) == ["", ""]
