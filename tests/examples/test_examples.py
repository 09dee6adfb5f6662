"""The examples, run as their first lines say."""

import importlib.util
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
pytestmark = [pytest.mark.processes, pytest.mark.sockets]


def _environment():
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    programs = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join(programs),  # torchrun, as in an activated environment
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _start(command):
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _output(process, seconds=200):
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        raise AssertionError(f"not done within {seconds} s:\n{output}") from None
    assert process.returncode == 0, output
    return output


def _run(*command):
    return _output(_start(list(command)))


def _learned(output, ranks):
    found = re.search(r"accuracy ([0-9.]+) on (\d+) ranks", output)
    assert found is not None, output
    assert float(found[1]) > 0.8 and int(found[2]) == ranks, output
    return output


def _needs(*modules):
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: it is part of an extra (docs/frameworks.md)")


@pytest.mark.slow
def test_fsdp2_goes_on_with_more_ranks(tmp_path):
    """Two ranks save, three go on: what the former carried is not lost."""
    two = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "examples.fsdp2"]
    _learned(_run(*two, "--checkpoint", str(tmp_path)), 2)
    three = [*TORCHRUN, "--standalone", "--nproc-per-node", "3", "-m", "examples.fsdp2"]
    _learned(_run(*three, "--checkpoint", str(tmp_path), "--resume", "--epochs", "1"), 3)


def test_lightning():
    _needs("lightning")
    output = _learned(_run(sys.executable, "-m", "examples.lightning_ddp"), 2)
    assert "backend dblp" in output and "gradient rounds" in output


@pytest.mark.slow
def test_lightning_goes_on_from_a_checkpoint(tmp_path):
    _needs("lightning")
    command = [sys.executable, "-m", "examples.lightning_ddp"]
    _run(*command, "--save", f"{tmp_path}/saved.ckpt", "--epochs", "1")
    output = _learned(_run(*command, "--resume", f"{tmp_path}/saved.ckpt", "--epochs", "3"), 2)
    before, after = (
        int(rounds) for rounds in re.findall(r"(\d+) gradient rounds", _rounds(output, tmp_path))
    )
    assert before < after


def _rounds(output, tmp_path):
    """The counts of rounds: as they were saved, and at the end of the run that went on."""
    import torch

    saved = torch.load(f"{tmp_path}/saved.ckpt", weights_only=False)
    (state,) = (state for name, state in saved["callbacks"].items() if "Attach" in name)
    return f"{state['summary']['rounds']} gradient rounds, {output}"


def test_accelerate():
    _needs("accelerate")
    output = _run(*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "examples.accelerate_loop")
    assert "backend dblp" in _learned(output, 2)


@pytest.mark.slow
def test_ray_train():
    _needs("ray", "ray.train")
    assert "backend dblp" in _learned(_run(sys.executable, "-m", "examples.ray_train"), 2)


def _lines_of_the_page(wanted):
    """Command lines of docs/first-lossy-run.md, as a reader copies them."""
    page = (ROOT / "docs" / "first-lossy-run.md").read_text()
    return [line for line in page.splitlines() if re.fullmatch(wanted, line)]


def _shares(output):
    """What the example says at its end of all its rounds: shares of chunks that were missing, and sent again."""
    found = re.search(r"(\d+) gradient rounds: missing ([0-9.]+)% of chunks .*, resent ([0-9.]+)%", output)
    assert found is not None and int(found[1]) > 0, output
    return float(found[2]), float(found[3])


def test_ddp_on_one_host():
    """Exact, on a network that loses nothing."""
    (line,) = _lines_of_the_page(r"torchrun --standalone .* -m examples\.ddp --policy exact")
    assert _shares(_learned(_run("sh", "-c", line), 2))[0] == 0.0


def test_ddp_on_one_host_that_loses():
    """With 5 % of what each rank sends lost: it learns as well, and tells about as much at the end."""
    (line,) = _lines_of_the_page(
        r"DBLP_IMPAIR=\S+ torchrun --standalone .* -m examples\.ddp --policy default"
    )
    assert 'DBLP_IMPAIR="loss(0.05),seed(1)"' in line
    missing, resent = _shares(_learned(_run("sh", "-c", line), 2))
    assert 3.0 < missing + resent < 8.0


@pytest.fixture
def two_hosts():
    """Two network namespaces joined by a pair of interfaces, as two hosts: the commands that run something in each."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    names = [f"dblp-example-{os.getpid()}-{index}" for index in range(2)]
    with ExitStack() as stack:
        for name in names:
            done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
        _ip("link", "add", "ex0", "netns", names[0], "type", "veth", "peer", "name", "ex0", "netns", names[1])
        for index, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"10.111.7.{index + 1}/24", "dev", "ex0")
            _ip("-n", name, "link", "set", "ex0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield [["ip", "netns", "exec", name] for name in names]


def _ip(*words):
    subprocess.run(["ip", *words], check=True, timeout=10)


def test_torchrun_on_two_hosts(two_hosts):
    """A launcher on each host, which share nothing but the network between them."""
    common = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        "10.111.7.1",
        "--master-port",
        "29611",
    ]
    launchers = [
        _start([*inside, *TORCHRUN, *common, "--node-rank", str(index), "-m", "examples.ddp"])
        for index, inside in enumerate(two_hosts)
    ]
    outputs = [_output(launcher) for launcher in launchers]
    assert "gradient rounds" in _learned(outputs[0], 2)


def test_importing_torch_is_enough():
    """The entry point ``torch.backends`` registers the backend: a script needs to import nothing of dblp."""
    code = "import sys, torch.distributed as dist; print(dist.Backend('dblp'), 'numpy.random' in sys.modules)"
    assert _run(sys.executable, "-c", code).split()[0] == "dblp"
