"""Hosts of a laboratory network, as those who run something on them see them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dblp.sim.lab import namespaces


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace with one interface."""

    index: int
    name: str
    """``h0``; ``x0`` and ``y0`` for cross hosts. Also the name of its link."""
    namespace: str
    address: str
    interface: str

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command here; it keeps the process id that Popen tells."""
        return subprocess.Popen(namespaces.command_in(self.namespace, argv), **options)
