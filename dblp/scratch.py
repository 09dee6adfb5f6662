"""Temporary folders of runs, named after their process, so that those of killed runs are told from those in use, and removed."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path


def started(pid: int) -> int | None:
    """When a process began, in the kernel's ticks since boot; None if there is none. Tells it from others that had its id."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # proc_pid_stat(5): field 22; the name, field 2, may hold spaces and brackets.
    return int(stat.rpartition(")")[2].split()[19])


def folder_prefix(kind: str) -> str:
    """What the names of this process's temporary folders of a kind (a word of its own, like ``dblp-lab``) begin with."""
    return f"{kind}-{os.getpid()}-{started(os.getpid())}-"


def remove_lost_folders(kind: str) -> list[str]:
    """Remove the temporary folders of a kind whose process does not run any more; returns those that are gone."""
    gone = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{kind}-*")):
        match = re.fullmatch(rf"{re.escape(kind)}-(\d+)-(\d+)-.*", folder.name)
        if match and started(int(match[1])) != int(match[2]):
            shutil.rmtree(folder, ignore_errors=True)  # the next run tries again
            if not folder.exists():
                gone.append(str(folder))
    return gone
