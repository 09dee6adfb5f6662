"""Network namespaces: made, entered, removed; none but those of a laboratory is ever touched.

A name is ``<prefix>-<pid of the owner>-<start of the owner>-<n>-<node>``, so that what a killed run left behind is told by its
name alone; by the start also where another process has the owner's id by now.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from dblp.errors import ConfigError, LocalError
from dblp.installed import pip_line
from dblp.scratch import started
from dblp.sim.lab import tools
from dblp.sim.lab.tools import LabError

T = TypeVar("T")

FOLDER = Path("/run/netns")
PREFIX = "dblp"
_PREFIX = re.compile(r"[a-z][a-z0-9]{0,15}")
_CLONE_NEWNET = 0x40000000
_GRACE_S = 2.0
"""Between SIGTERM and SIGKILL to what still runs in a namespace that is removed."""
_serial = itertools.count()


def pyroute2() -> Any:
    """The package pyroute2; raises LocalError that names the extra."""
    try:
        import pyroute2 as package
    except ImportError:
        raise LocalError(f"the laboratory needs pyroute2; install with: {pip_line('lab')}") from None
    return package


def next_stem(prefix: str) -> str:
    """What the names of a new network's namespaces begin with; raises ConfigError for an unusable prefix."""
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError(f"prefix={prefix!r}: needs a lower-case word of letters and digits, 16 at most")
    return f"{prefix}-{os.getpid()}-{started(os.getpid())}-{next(_serial)}"


def owner_of(name: str, prefix: str = PREFIX) -> int | None:
    """Process id of the owner of a namespace of that name; None if the name is none of ours."""
    match = _match(name, prefix)
    return int(match[1]) if match else None


def owned(name: str, prefix: str = PREFIX) -> bool:
    """Whether the owner still runs."""
    match = _match(name, prefix)
    return match is not None and started(int(match[1])) == int(match[2])


def _match(name: str, prefix: str) -> re.Match[str] | None:
    return re.fullmatch(rf"{re.escape(prefix)}-(\d+)-(\d+)-\d+-[a-z]+\d+", name)


def path_of(name: str) -> Path:
    """Where a namespace is bound."""
    return FOLDER / name


def names() -> list[str]:
    """All named namespaces of this host."""
    return sorted(entry.name for entry in FOLDER.iterdir()) if FOLDER.is_dir() else []


def inode_of(name: str) -> int:
    """What tells a namespace from others; raises LabError if it is the host's own, which is never touched."""
    inode = path_of(name).stat().st_ino
    if inode in (_own("self"), _own("1")):
        raise LabError(
            f"namespace {name} is this host's own network: refused. Remove the name: umount {path_of(name)}"
        )
    return inode


def create(name: str) -> None:
    """Make a named namespace; raises LabError if it exists or cannot be made."""
    if path_of(name).exists():
        raise LabError(f"namespace {name} exists already: refused. If nobody needs it: ip netns del {name}")
    tools.run(["ip", "netns", "add", name])
    inode_of(name)


def remove(name: str) -> None:
    """End what runs in a namespace, and remove it. A name that is gone already is no fault."""
    if not path_of(name).exists():
        return
    try:
        inode = inode_of(name)
    except LabError:
        inode = None  # a broken binding shows the host's own network: only the name goes
    if inode is not None:
        end_processes([inode])
    tools.run(["ip", "netns", "del", name])


def processes(inodes: Iterable[int]) -> list[int]:
    """Process ids in any of these namespaces; never this process."""
    wanted = set(inodes)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if (entry / "ns/net").stat().st_ino in wanted:
                    found.append(int(entry.name))
    return found


def end_processes(inodes: Sequence[int]) -> None:
    """SIGTERM, then SIGKILL, to all processes in these namespaces; returns when they are gone (or after twice the grace)."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _GRACE_S
        pids = processes(inodes)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while pids and time.monotonic() < deadline:
            time.sleep(0.01)
            pids = processes(inodes)
        if not pids:
            return


def command_in(name: str, argv: Sequence[str]) -> list[str]:
    """The command line that runs ``argv`` in a namespace; it keeps its process id."""
    return [tools.need("nsenter"), f"--net={path_of(name)}", "--", *argv]


def run_in(name: str, argv: Sequence[str], text: str | None = None) -> str:
    """Run a system command in a namespace; raises LabError as ``tools.run`` does."""
    return tools.run(["nsenter", f"--net={path_of(name)}", "--", tools.need(argv[0]), *argv[1:]], text)


def write_settings(name: str, settings: Sequence[tuple[str, str]]) -> None:
    """Write sysctls (``net/ipv4/ip_forward``, value) in a namespace; those that the kernel lacks are left out.

    Raises LabError where the kernel has one and refuses it.
    """
    script = "".join(
        f"[ ! -e /proc/sys/{key} ] || echo {value} > /proc/sys/{key}\n" for key, value in settings
    )
    tools.run(["nsenter", f"--net={path_of(name)}", "--", "/bin/sh", "-e", "-s"], script)


def within(name: str, work: Callable[[], T]) -> T:
    """Do a short piece of work in a namespace: in a thread that enters it and ends. Returns, or raises, what the work does.

    A thread, not a forked process: a fork of this one would have its signal handlers and its 'with' blocks too, and Ctrl-C would
    run them twice.
    """
    future: Future[T] = Future()
    thread = threading.Thread(target=_do_there, args=(name, work, future))
    thread.start()
    try:
        return future.result()
    finally:
        thread.join()


def open_socket(name: str, family: int = socket.AF_INET, kind: int = socket.SOCK_DGRAM) -> socket.socket:
    """A socket of this process that belongs to a namespace."""
    try:
        return within(name, lambda: socket.socket(family, kind))
    except OSError as error:
        raise LabError(f"no socket in namespace {name}: {error.strerror}") from error


def _do_there(name: str, work: Callable[[], T], future: Future[T]) -> None:
    try:
        _enter(name)
        future.set_result(work())
    except BaseException as error:  # told by the thread that waits
        future.set_exception(error)


def _enter(name: str) -> None:
    """Move the calling thread into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path_of(name).open("rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def _own(process: str) -> int:
    try:
        return Path(f"/proc/{process}/ns/net").stat().st_ino
    except OSError:
        return -1
