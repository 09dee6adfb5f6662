"""``attach`` with a compression, in real processes."""

import pytest


@pytest.mark.processes
@pytest.mark.sockets
@pytest.mark.parametrize(
    "scenario",
    [
        "compressed",
        "compressed_under_a_policy",
        "compression_saved",
        "compression_refused",
        "compression_kinds_of_ddp",
        "powersgd_is_torchs",
        "accordion_follows_phases",
    ],
)
def test_compression(ranks, scenario):
    ranks(scenario, 2, timeout_s=180)


@pytest.mark.processes
@pytest.mark.sockets
def test_a_rank_dies(ranks):
    ranks("compression_loses_a_rank", 2, killed=[1])
