"""The worlds that the matrix runs in."""

from __future__ import annotations

import pytest

from tests.collectives import worlds


@pytest.fixture(params=["memory", "network"])
def run(request):
    """Runs a member on every rank of a group: on endpoints in memory, then on real ones over a simulated network."""
    return {"memory": worlds.run_memory, "network": worlds.run_network}[request.param]
