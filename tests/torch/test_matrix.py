"""What users build on torch.distributed, in real processes: the rows of ``scenarios_matrix.py``."""

import pytest


@pytest.mark.processes
@pytest.mark.sockets
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_every_row(ranks, world_size):
    ranks("matrix", world_size, timeout_s=200)
