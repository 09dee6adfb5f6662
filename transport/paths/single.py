"""``single``: all that goes to a peer takes one path, as a connection of its own does under ECMP."""

from __future__ import annotations

from dblp.transport.outgoing import Outgoing
from dblp.transport.paths.base import PathChoice, Usable


class SingleChoice(PathChoice):
    """One path a peer, the same in both directions; different peers share the paths evenly.

    The baseline of the multipath papers (ECMP with one entropy a connection). It never moves: if its path dies, the round
    raises at its deadline.
    """

    def __init__(self, paths: int, rank: int, peer: int) -> None:
        super().__init__(paths)
        self.paths = ((rank + peer) % paths,)

    def pick(self, message: Outgoing, usable: Usable, now: float) -> tuple[int, int] | None:
        """The path, if it has room."""
        return (self.paths[0], self.most_chunks) if usable(self.paths[0]) else None
