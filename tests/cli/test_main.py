"""The command line: help without torch, one line for an error, exit codes."""

import signal
import subprocess
import sys

import pytest

from dblp.cli.main import run

TRAIN_REFUSALS = [
    (["--ranks", "1"], "--ranks 1"),
    (["--batch", "63"], "--batch 63"),
    (["--batch", "100000"], "only 1347 training samples"),
    (["--epochs", "0"], "--epochs 0"),
    (["--lr", "0"], "--lr 0"),
    (["--lr", "inf"], "--lr inf"),
    (["--budget", "1"], "budget=1"),
    (["--policy-stop", "never"], "'never'"),
    (["--arms", "tcp"], "'tcp'"),
    (["--model", "vit"], "mlp, cnn"),
    (["--impair", "bursts(loss=2)"], "bursts(loss=2)"),
    (["--data", "fashion-mnist", "--data-dir", "nowhere"], "nowhere"),
    (["--data", "text", "--data-dir", "nowhere"], "nowhere"),
    (["--data", "mnist"], "'mnist'"),
    (["--model", "transformer", "--data", "digits"], "models for digits: mlp, cnn, resnet"),
    (["--optimizer", "lion"], "sgd, adamw"),
    (["--policy", "none"], "'none'"),
    (["--policy", "bounded", "--arms", "gloo,tcp"], "'tcp'"),
    (["--compression", "zip"], "'zip' is no compression method"),
    (["--compression", "dgc; topk(2)"], "compression, column 6"),
    (["--compression", "topk"], "[feedback=true]), as in topk(ratio=0.01), found the end"),
    (["--compression", "topk()"], "[feedback=true]), as in topk(ratio=0.01)"),
    (["--compression", "gloo:"], "names no method, as in 'gloo:topk(ratio=0.01)'"),
    (["--compression", ";"], "names no method, as in 'topk(ratio=0.01); dgc'"),
    (["--compression", "netsense(threshold=2)"], "a share in (0, 1] of the bandwidth-delay product"),
]


def test_the_version_is_that_of_the_package(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.split()[0] == "dblp"


@pytest.mark.parametrize("command", [[], ["train"], ["bench"], ["bench", "allreduce"], ["doctor"]])
def test_help_is_told(capsys, command):
    assert run([*command, "--help"]) == 0
    assert "Usage: dblp" in capsys.readouterr().out


@pytest.mark.processes
def test_help_needs_neither_torch_nor_numpys_heavy_friends():
    code = (
        "import sys; from dblp.cli.main import run; code = run(['train', '--help'])\n"
        "heavy = {'torch', 'sklearn', 'matplotlib', 'uvloop'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


INTERRUPTED_AT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == NAME:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from dblp.cli.main import main
sys.argv = ["dblp", "lab", "list"]
main()
"""


@pytest.mark.processes
@pytest.mark.parametrize("module", ["typer", "numpy", "dblp.cli.train.command", "dblp.sim.lab.experiment"])
def test_ctrl_c_while_modules_are_imported_shows_no_trace(module):
    """At the beginning, in the middle and at the end of the imports, and in those of the command itself."""
    code = INTERRUPTED_AT.replace("NAME", repr(module))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert done.stderr == "dblp: interrupted; nothing is left running\n"


@pytest.mark.processes
def test_ctrl_c_is_ignored_where_the_parent_wants_it():
    """As under nohup, or behind a shell's ``&``."""
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + INTERRUPTED_AT.replace(
        "NAME", "'typer'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_option_is_wrong_use(capsys):
    assert run(["train", "--colour"]) == 2
    assert "--colour" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "words"), TRAIN_REFUSALS)
def test_bad_options_of_train_end_in_one_line(capsys, options, words):
    assert run(["train", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dblp: error: ")
    assert words in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "1,2"], "--ranks"),
        (["--sizes", "lots"], "'lots'"),
        (["--against", "nccl"], "known are gloo"),
        (["--arms", "bounded"], "--policy-budget"),
        (["--datagram", "100"], "datagram_bytes=100"),
        (["--rounds", "-1"], "--rounds -1"),
        (["--algorithm", "star"], "'star'"),
    ],
)
def test_bad_options_of_bench_end_in_one_line(capsys, options, words):
    assert run(["bench", "allreduce", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dblp: error: ")
    assert words in error


def test_a_missing_package_is_named_with_the_pip_line(capsys, monkeypatch):
    monkeypatch.setattr("dblp.cli.extras.find_spec", lambda name: None)
    assert run(["train"]) == 2
    error = capsys.readouterr().err
    assert "needs torch and matplotlib" in error
    assert "[torch,train]" in error and "python -m pip install " in error
