"""The functions of ``import dblp`` in real processes, and their errors without a group."""

import json
import socket
import threading
from typing import Any, cast

import numpy as np
import pytest

import dblp
from dblp.collectives import api
from dblp.collectives.api import Handle


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"master_port": -1}, r"master_port=-1: a port of 1\.\.65535"),
        ({"master_port": 0}, r"master_port=0: a port of 1\.\.65535"),
        ({"master_port": 99_999}, r"master_port=99999: a port of 1\.\.65535"),
        ({"master_port": 1.5}, "master_port=1.5: a whole number is needed, not float"),
        ({"rank": "0"}, "rank='0': a whole number is needed, not str"),
        ({"rank": 0.5}, "rank=0.5: a whole number is needed, not float"),
        ({"rank": True}, "rank=True: a whole number is needed, not bool"),
        ({"world_size": 0}, "world_size=0: at least 1 is needed"),
        ({"world_size": 2.0}, "world_size=2.0: a whole number is needed, not float"),
        ({"world_size": 1_000_000_000}, "world_size=1000000000: at most 1024 ranks"),
        ({"master_addr": 3}, "master_addr=3: a text is needed, not int"),
        ({"job": b"a"}, "job=b'a': a text is needed, not bytes"),
        ({"config": {"timeout_s": 3}}, "config is a dict: a dblp.TransportConfig is needed"),
    ],
)
def test_what_is_no_port_rank_or_size_is_refused_at_once(options, words):
    with pytest.raises(dblp.ConfigError, match=words):
        dblp.init_process_group(
            **({"master_addr": "127.0.0.1", "master_port": 1, "rank": 0, "world_size": 1} | options)
        )


@pytest.mark.sockets
@pytest.mark.parametrize("name", ["a file", "a file/below", "/proc/below it"])
def test_a_folder_of_dumps_that_cannot_be_is_refused_at_once(name, monkeypatch, tmp_path, port):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("DBLP_FLIGHT_DIR", str(tmp_path / name))
    where = {"master_addr": "127.0.0.1", "master_port": port, "rank": 0, "world_size": 1}
    with pytest.raises(
        dblp.ConfigError, match=r"flight_dir='.*' \(DBLP_FLIGHT_DIR\): nothing can be written there"
    ):
        dblp.init_process_group(**where)
    assert not dblp.is_initialized()
    monkeypatch.setenv("DBLP_FLIGHT_DIR", str(tmp_path / "new" / "flights"))
    dblp.init_process_group(**where)
    dblp.destroy_process_group()
    assert list((tmp_path / "new" / "flights").iterdir()) == []


@pytest.mark.sockets
def test_the_folder_of_dumps_may_be_below_the_home(monkeypatch, tmp_path, port):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DBLP_FLIGHT_DIR", "~/flights")
    dblp.init_process_group(master_addr="127.0.0.1", master_port=port, rank=0, world_size=1)
    api._session().dump_flight("to try it")
    dblp.destroy_process_group()
    assert sorted(path.suffix for path in (tmp_path / "flights").iterdir()) == [".json", ".txt"]


@pytest.mark.sockets
def test_a_masked_array_is_refused(alone):
    with pytest.raises(dblp.UnsupportedError, match=r"its mask would be lost; send x.filled\(0\)"):
        dblp.all_reduce(np.ma.masked_array([1.0, 2.0], [False, True]))


@pytest.mark.sockets
def test_a_dump_that_cannot_be_written_goes_to_the_log(alone_with_dumps, caplog):
    alone_with_dumps.rmdir()
    alone_with_dumps.touch()  # the folder went in the meantime
    dblp.all_reduce(np.ones(3))
    api._session().dump_flight("to try it")
    assert "the flight recorder of rank 0 could not be written" in caplog.text
    assert "to try it" in caplog.text


@pytest.fixture
def alone_with_dumps(port, monkeypatch, tmp_path):
    monkeypatch.setenv("DBLP_FLIGHT_DIR", str(tmp_path / "flights"))
    dblp.init_process_group(master_addr="127.0.0.1", master_port=port, rank=0, world_size=1)
    yield tmp_path / "flights"
    dblp.destroy_process_group()


@pytest.fixture
def alone(port):
    dblp.init_process_group(master_addr="127.0.0.1", master_port=port, rank=int(np.int64(0)), world_size=1)
    yield
    dblp.destroy_process_group()


X = np.ones(3)
WRONG_ARGUMENTS: list[tuple[Any, tuple[Any, ...], str]] = [
    (dblp.broadcast, (X, 0.0), "root=0.0: a rank of the group is needed, not float"),
    (dblp.broadcast, (X, "0"), "root='0': a rank of the group"),
    (dblp.broadcast, (X, True), "root=True: a rank of the group"),
    (dblp.broadcast, (X, 1), r"root=1: must lie in 0\.\.0"),
    (dblp.reduce, (X, "sum"), "root='sum': a rank of the group"),
    (dblp.gather, (X, None, None), "root=None: a rank of the group"),
    (dblp.send, (X, "1"), "dst='1': a rank of the group"),
    (dblp.send, (X, 1.0), "dst=1.0: a rank of the group"),
    (dblp.recv, (X, "1"), "src='1': a rank of the group"),
    (dblp.recv, (X,), "recv from any rank in a group of one rank"),
    (dblp.recv, (X, None, "x"), "tag='x': a whole number is needed"),
    (dblp.recv, (X, None, 2**70), "tag=1180591620717411303424: must lie in"),
    (dblp.all_gather, ([], X), "output has 0 arrays: one for each of the 1 ranks"),
    (dblp.all_gather, (None, X), "output is None: one array, or a list of one for each"),
    (dblp.all_to_all, ([], []), "output has 0 arrays"),
    (dblp.reduce_scatter, (X, []), "input has 0 arrays"),
    (dblp.all_reduce, (X, "sum", None), "algorithm=3: a name, or name"),
]


@pytest.mark.sockets
def test_wrong_arguments_are_named_and_cost_no_round(alone):
    for call, arguments, words in WRONG_ARGUMENTS:
        options = {"algorithm": 3} if call is dblp.all_reduce else {}
        with pytest.raises(dblp.LocalError, match=words):
            call(*arguments, **options)
    assert dblp.all_reduce(X.copy()).round == 0


@pytest.mark.sockets
def test_numbers_of_numpy_are_numbers(alone):
    zero, tenth = cast("tuple[Any, Any]", (np.int64(0), np.float32(0.1)))
    dblp.broadcast(X.copy(), zero)
    dblp.all_reduce(X.copy(), "sum", dblp.Bounded(tenth))
    dblp.all_reduce(X.copy(), "sum", dblp.Policy(budget=5 * tenth, gather_budget=tenth))
    rounds = json.loads(dblp.flight_recorder().to_json())["rounds"]
    assert [entry["root"] for entry in rounds] == [0, -1, -1]
    assert [round(entry["budget"], 6) for entry in rounds] == [0.0, 0.1, 0.5]


@pytest.mark.sockets
@pytest.mark.parametrize("timeout_s", ["3", float("nan"), float("inf"), 1e300, 0, -1, True])
def test_a_time_that_cannot_be_waited_is_refused_before_the_call(alone, timeout_s):
    before = np.ones(3)
    with pytest.raises(dblp.ConfigError, match="timeout_s="):
        dblp.all_reduce(before, timeout_s=timeout_s)
    with pytest.raises(dblp.ConfigError, match="timeout_s="):
        dblp.barrier(async_op=True).wait(timeout_s)
    assert dblp.all_reduce(before, timeout_s=float(np.float32(3))).round == 1, "the barrier was 0"


def test_a_wait_that_is_over_says_that_the_call_goes_on():
    handle: Handle[int] = Handle("all_reduce", 7.0, [])
    with pytest.raises(
        dblp.DeadlineError,
        match=r"all_reduce: not done within 0\.01 s .* its own timeout of 7 s: call wait\(\) again",
    ):
        handle.wait(0.01)
    handle._finish(5, None)
    assert handle.wait(0.01) == 5


def test_a_process_that_was_stopped_has_not_waited():
    """A sleep that took long because the process stood still is one slice of the wait: the call's own deadline knows more."""

    class Stopped(threading.Event):
        sleeps = 0

        def wait(self, timeout=None):
            self.sleeps += 1
            return self.sleeps == 10

    handle: Handle[str] = Handle("barrier", 5.0, [])
    handle._ended = Stopped()
    handle._result = "report"
    assert handle.wait() == "report"
