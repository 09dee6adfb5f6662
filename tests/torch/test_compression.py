"""``attach`` with a compression, in real processes."""

import pytest


@pytest.mark.processes
@pytest.mark.sockets
@pytest.mark.parametrize(
    "scenario", ["compressed", "compression_saved", "compression_refused", "powersgd_is_torchs"]
)
def test_compression(ranks, scenario):
    ranks(scenario, 2)
