"""Compression that adapts, in real processes, over dblp and over gloo."""

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.sockets]


@pytest.mark.parametrize("backend", ["dblp", "gloo"])
@pytest.mark.parametrize("scenario", ["adaptive", "adaptive_saved"])
def test_adaptive(ranks, scenario, backend):
    ranks(scenario, 2, backend=backend)


@pytest.mark.parametrize("scenario", ["adaptive_static_on_gloo", "adaptive_on_a_device", "adaptive_refused"])
def test_another_backend(ranks, scenario):
    ranks(scenario, 2)


def test_a_rank_dies(ranks):
    ranks("adaptive_loses_a_rank", 2, killed=[1])
