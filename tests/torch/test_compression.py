"""``attach`` with a compression, in real processes."""

import logging

import pytest
import torch
import torch.distributed as dist

from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.torch.borrowed import compress_ddp
from dblp.collectives.torch.compression import check_optimizer
from dblp.errors import ConfigError


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


def _weights():
    return [torch.nn.Parameter(torch.zeros(3))]


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda: torch.optim.Adam(_weights()), "dgc with Adam: .* SGD alone"),
        (lambda: torch.optim.AdamW(_weights()), "dgc with AdamW"),
        (lambda: torch.optim.RMSprop(_weights()), "dgc with RMSprop"),
        (lambda: torch.optim.Adagrad(_weights()), "dgc with Adagrad"),
        (lambda: torch.optim.LBFGS(_weights()), "dgc with LBFGS"),
        (lambda: torch.optim.SGD(_weights(), lr=0.1, momentum=0.9), "DGC brings the momentum"),
    ],
)
def test_dgc_refuses_optimisers_that_it_does_not_go_with(optimizer, words):
    with pytest.raises(ConfigError, match=words):
        check_optimizer(parse_compression("dgc(0.1)"), optimizer())
    check_optimizer(parse_compression("dgc(0.1,momentum=0)"), optimizer())
    check_optimizer(parse_compression("topk(0.1)"), optimizer())


@pytest.mark.parametrize(("rank", "warnings"), [(0, 1), (1, 0)])
def test_dgc_without_the_optimiser_is_warned_of_on_rank_0(rank, warnings, monkeypatch, caplog):
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    with caplog.at_level(logging.WARNING, "dblp"):
        check_optimizer(parse_compression("dgc(0.1)"), None)
        check_optimizer(parse_compression("topk(0.1)"), None)
        check_optimizer(parse_compression("dgc(0.1)"), torch.optim.SGD(_weights(), lr=0.1))
    assert len(caplog.records) == warnings


class _Lars(torch.optim.Optimizer):
    """Somebody else's: it may be of SGD's kind or not."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})


def test_dgc_with_an_optimiser_that_is_not_torchs_is_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with caplog.at_level(logging.WARNING, "dblp"):
        check_optimizer(parse_compression("dgc(0.1)"), _Lars(_weights()))
        check_optimizer(parse_compression("topk(0.1)"), _Lars(_weights()))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["dgc with _Lars"]


@pytest.mark.parametrize("timeout_s", [-1, 0.0, float("inf"), float("nan"), "5"])
def test_a_timeout_that_is_none_is_refused(timeout_s):
    with pytest.raises(ConfigError, match=r"timeout_s=.*: seconds above 0"):
        compress_ddp(torch.nn.Linear(1, 1), "topk(0.1)", timeout_s=timeout_s)  # type: ignore[arg-type]
