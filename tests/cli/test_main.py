"""The command line: help without torch, one line for an error, exit codes."""

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
    assert "pip install 'dblp[torch,train]'" in error
