"""Puts the oldest torch that dblp promises into the environment of the interpreter that runs it, without the CUDA libraries.

    .venv-oldest-torch/bin/python tests/torch_suite/oldest.py 2.7.0

A package index may have that release for x86-64 as a CUDA build only, which asks for gigabytes of NVIDIA's libraries.
The tests use none of them, but ``import torch`` ends where one is missing. So torch is installed by itself, then what
it requires but for those and for triton; of those only what a process without a GPU calls: CUDA's runtime, with which
torch's kernels register while they are loaded, and CUPTI, which the profiler asks (10 MB together). The other
libraries that torch names are made by the C compiler, with the functions that torch names, each of which ends the
process. A CPU build names none, and gets none.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

LEFT_OUT = re.compile(r"nvidia-|triton")
CALLED = re.compile(r"nvidia-cuda-(runtime|cupti)")
FOREIGN = re.compile(
    r"lib(cublas|cublasLt|cudnn|cufft|cufile|curand|cusolver|cusparse|cusparseLt|nccl)\.so\."
)
"""Libraries that those of torch are linked with. Not the driver's and the compiler's: torch opens them where there is a GPU."""


def install(version: str) -> None:
    """Install torch and what it takes to import it."""
    _pip("--no-deps", f"torch=={version}")
    required = [text.split(";") for text in metadata.requires("torch") or [] if "extra ==" not in text]
    names = [name.strip() for name, *_ in required]
    _pip(*(name for name in names if not LEFT_OUT.match(name)))
    if called := [name for name in names if CALLED.match(name)]:
        _pip("--no-deps", *called)
        _stand_in(_libraries())
    subprocess.run([sys.executable, "-c", "import torch; print('torch', torch.__version__)"], check=True)


def _stand_in(folder: Path) -> None:
    """Make the libraries that those in ``folder`` need and that are not there."""
    ours = [path for path in folder.glob("*.so*") if path.is_file()]
    needed = {
        name for path in ours for name in re.findall(r"NEEDED.*\[(.*)\]", _output("readelf", "-d", path))
    }
    missing = sorted(name for name in needed if FOREIGN.match(name) and not (folder / name).exists())
    functions = {name for path in ours for name in _undefined(path)}
    for name in missing:
        _compile(functions, folder / name)


def _undefined(path: Path) -> list[str]:
    """Symbols that a library expects of NVIDIA's, by the prefixes of their names."""
    symbols = _output("nm", "-D", "--undefined-only", path)
    return re.findall(r" U ((?:cublas|cudnn|cufft|cuFile|curand|cusolver|cusparse|nccl)\w*)", symbols)


def _compile(functions: set[str], target: Path) -> None:
    lines = ["#include <stdlib.h>", *(f"void {name}(void) {{ abort(); }}" for name in sorted(functions))]
    with tempfile.NamedTemporaryFile("w", suffix=".c") as source:
        source.write("\n".join(lines))
        source.flush()
        options = ["-shared", "-fPIC", f"-Wl,-soname,{target.name}", "-o", str(target)]
        subprocess.run(["cc", *options, source.name], check=True)


def _libraries() -> Path:
    spec = importlib.util.find_spec("torch")  # finds it without an import, which would fail
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "lib"


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True)


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    install(sys.argv[1])
