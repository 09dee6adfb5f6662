"""The functions of ``import dblp`` in real processes, and their errors without a group."""

import socket

import numpy as np
import pytest

import dblp


@pytest.fixture
def port():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.processes
@pytest.mark.sockets
@pytest.mark.parametrize("scenario", ["functions", "tensors", "disagreement", "leaving", "leaving_any"])
def test_functions(ranks, scenario, port):
    ranks(scenario, 3, port=port)


@pytest.mark.parametrize("call", [dblp.get_rank, dblp.barrier, lambda: dblp.all_reduce(np.ones(1))])
def test_calls_without_a_group_say_so(call):
    with pytest.raises(dblp.ClosedError, match="init_process_group"):
        call()


def test_destroying_nothing_is_no_error():
    dblp.destroy_process_group()
    assert not dblp.is_initialized()


@pytest.mark.parametrize("variable", ["MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"])
def test_missing_variables_are_named(monkeypatch, variable):
    for name, value in [
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
    ]:
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(variable)
    with pytest.raises(dblp.ConfigError, match=variable):
        dblp.init_process_group()


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(dblp.ConfigError, match=r"rank must lie in 0\.\.1"):
        dblp.init_process_group(master_addr="127.0.0.1", master_port=1, rank=2, world_size=2)
