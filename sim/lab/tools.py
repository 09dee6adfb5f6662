"""The system's own commands (tc, nft, ethtool, nsenter): run, checked, their faults told with what was asked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from dblp.errors import LocalError

PACKAGES = {
    "ethtool": "ethtool",
    "ip": "iproute2",
    "nft": "nftables",
    "nsenter": "util-linux",
    "tc": "iproute2",
    "sh": "dash",
    "ss": "iproute2",
    "unshare": "util-linux",
}
"""Commands that the laboratory runs, and the Debian package of each."""
_PATH = os.pathsep.join(("/usr/sbin", "/sbin", "/usr/bin", "/bin"))
_TIMEOUT_S = 30.0
"""None of these commands takes a second; beyond this the kernel holds it, and waiting on would hang the run."""


class LabError(LocalError):
    """The laboratory cannot do what was asked on this host."""

    code = "lab"
    exit_code = 69
    """EX_UNAVAILABLE of sysexits.h: the host lacks something."""


class PrivilegeError(LabError):
    """The laboratory needs root."""

    code = "privilege"
    exit_code = 77
    """EX_NOPERM of sysexits.h."""


def find(name: str) -> str | None:
    """The path of a command; also looks where root's commands are when PATH does not."""
    return shutil.which(name) or shutil.which(name, path=_PATH)


def need(name: str) -> str:
    """The path of a command; raises LabError with the package that has it."""
    path = find(name)
    if path is None:
        raise LabError(
            f"no command {name}: apt install {PACKAGES[name]}, or your system's package of that name"
        )
    return path


def attempt(argv: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of the table above with ``text`` as its input; never raises for its exit code."""
    full = [need(argv[0]), *argv[1:]]
    try:
        return subprocess.run(
            full, input=text, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(full, 124, "", f"no answer within {_TIMEOUT_S:g} s")


def run(argv: Sequence[str], text: str | None = None) -> str:
    """Run a command; what it printed. Raises LabError with the command and what it said."""
    done = attempt(argv, text)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        asked = f"\n  asked: {text.strip()}" if text else ""
        raise LabError(f"{' '.join(argv)}: the kernel or the command refuses: {said}{asked}")
    return done.stdout


def run_json(argv: Sequence[str]) -> Any:
    """Run a command that prints JSON; raises LabError as ``run`` does, or if it is none."""
    said = run(argv)
    try:
        return json.loads(said) if said.strip() else []
    except ValueError:
        raise LabError(f"{' '.join(argv)}: printed no JSON: {said[:200]!r}") from None
