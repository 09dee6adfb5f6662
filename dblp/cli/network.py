"""What the impairment of a group's port did to this rank's datagrams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dblp.transport.impair import ImpairedPort


@dataclass(frozen=True, slots=True)
class DatagramCount:
    """Datagrams of one rank, control and repeats included."""

    offered: int = 0
    """Handed to the impaired network, duplicates included."""
    lost: int = 0
    """Of these, dropped by it."""

    def __sub__(self, before: DatagramCount) -> DatagramCount:
        return DatagramCount(self.offered - before.offered, self.lost - before.lost)


def datagram_count(group: Any) -> DatagramCount:
    """Counts since the group's port was opened; zeros where nothing impairs it."""
    port = group.session.endpoint.port
    if not isinstance(port, ImpairedPort):
        return DatagramCount()
    counters = port.impairer.counters
    return DatagramCount(counters.offered + counters.duplicated, counters.total_lost)
