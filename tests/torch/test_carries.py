"""``attach`` with a policy that carries, in real processes on a lossy network."""

import pytest


@pytest.mark.processes
@pytest.mark.sockets
@pytest.mark.parametrize("scenario", ["carried", "saved"])
def test_carried(ranks, scenario):
    ranks(scenario, 2)
