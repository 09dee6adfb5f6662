"""What killed runs left behind: namespaces and folders whose name carries process id and start of an owner that is gone."""

from __future__ import annotations

from dblp.scratch import remove_lost_folders
from dblp.sim.lab import namespaces

FOLDER = "dblp-lab"
"""Kind of the runs' temporary folders."""


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
    return found + remove_lost_folders(FOLDER)
