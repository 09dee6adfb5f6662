"""``attach`` by the name of a preset, in real processes."""

import pytest


@pytest.mark.processes
@pytest.mark.sockets
@pytest.mark.parametrize("scenario", ["every_preset", "phases_of_a_preset", "rotated", "transports"])
def test_presets(ranks, scenario):
    ranks(scenario, 2)
