"""Distributed checkpoints, in real processes."""

import pytest

from tests.torch.conftest import FSDP2_HOOK

pytestmark = [pytest.mark.processes, pytest.mark.sockets, FSDP2_HOOK]


@pytest.mark.parametrize("before, after", [(4, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_another_number_of_ranks_takes_over(ranks, tmp_path, before, after):
    ranks("checkpoint_saved", before, timeout_s=120, place=str(tmp_path))
    ranks("checkpoint_loaded", after, timeout_s=120, place=str(tmp_path))


@pytest.mark.parametrize("before, after", [(2, 3), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_another_number_of_ranks_takes_over_what_was_compressed(ranks, tmp_path, before, after):
    """Their replicas stay identical: with DGC those parameters drifted apart that it sends whole."""
    ranks("compressed_saved", before, timeout_s=120, place=str(tmp_path))
    ranks("compressed_loaded", after, timeout_s=120, place=str(tmp_path), before=before)
