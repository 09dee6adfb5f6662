"""What killed runs left behind: namespaces and folders whose name carries process id and start of an owner that is gone."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from dblp.sim.lab import namespaces

_FOLDER = "dblp-lab"


def folder_prefix() -> str:
    """What the name of this process's temporary folder begins with."""
    return f"{_FOLDER}-{os.getpid()}-{namespaces.started(os.getpid())}-"


def _lost_folders() -> list[Path]:
    """Temporary folders whose owner does not run any more."""
    found = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{_FOLDER}-*")):
        match = re.fullmatch(rf"{_FOLDER}-(\d+)-(\d+)-.*", folder.name)
        if match and namespaces.started(int(match[1])) != int(match[2]):
            found.append(folder)
    return found


def find_leftovers(prefix: str = namespaces.PREFIX) -> list[str]:
    """Names of namespaces of this prefix whose owner does not run any more; those of others are never named."""
    return [
        name
        for name in namespaces.names()
        if namespaces.owner_of(name, prefix) is not None and not namespaces.owned(name, prefix)
    ]


def remove_leftovers(prefix: str = namespaces.PREFIX) -> list[str]:
    """Remove them, with what still runs in them, and folders of killed runs; returns the names. Needs root."""
    found = find_leftovers(prefix)
    for name in found:
        namespaces.remove(name)
    for folder in _lost_folders():
        shutil.rmtree(folder, ignore_errors=True)  # the next run tries again
        if not folder.exists():
            found.append(str(folder))
    return found
