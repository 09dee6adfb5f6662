"""What a choice of paths is told and asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from dblp.transport.outgoing import Outgoing

ANY_CHUNKS = 1 << 30
"""As many chunks as the path takes."""
LEAST_SHARE = 8
"""Chunks that are worth a system call: messages of fewer for each path leave on some of the paths."""
EVEN_TURNS = 4
"""Bursts of a message on each path, up to which all are made equally long: one more on some paths than on others would show."""
Usable = Callable[[int], bool]
"""``usable(path)``: the path is alive and has room, credit and its pacing time for what the message sends next."""


class PathChoice:
    """Which of the paths to one peer the next chunks of a message take. Paths are indices of local ports.

    It is asked before each burst or train and told what became of those that left. One object a peer, never asked
    where there is but one path.
    """

    pinned: ClassVar[bool] = False
    """A message that finds no path now says nothing of the others: each has paths of its own."""

    def __init__(self, paths: int, most_chunks: int = 0) -> None:
        """``paths``: how many there are; ``most_chunks``: chunks of a message that leave together on one path before
        the next choice, 0: see ``share_of``."""
        self.paths: tuple[int, ...] = tuple(range(paths))
        """Those that are ever used, control included; the others carry the handshake only."""
        self.most_chunks = most_chunks or ANY_CHUNKS
        self.loss_share: Callable[[int], float] = lambda path: 0.0
        """Share of a path's datagrams that were lost lately; whoever owns the paths sets it."""

    def share_of(self, message: Outgoing, paths: int) -> int:
        """Chunks of the message that leave together where ``paths`` are alive: what was asked for, else so many that all paths
        carry equally much of it, so that none idles while a whole train of a small message leaves on another."""
        if self.most_chunks < ANY_CHUNKS or paths < 2:
            return self.most_chunks
        share = -(-message.spec.chunks // paths)
        turns = -(-share // message.per_burst)
        return max(share if turns > EVEN_TURNS else -(-share // turns), LEAST_SHARE) if turns else ANY_CHUNKS

    def pick(self, message: Outgoing, usable: Usable, now: float) -> tuple[int, int] | None:
        """The path that the message's next burst takes, and how many chunks at most (``share_of`` may be less); None if it must
        wait."""
        raise NotImplementedError

    def on_started(self, message: Outgoing) -> None:
        """A message to this peer begins."""

    def on_ended(self, message: Outgoing) -> None:
        """A message is over or forgotten."""

    def on_acked(self, path: int, datagrams: int, *, marked: bool, now: float) -> None:
        """Bursts and trains were acknowledged to their last datagram, ``datagrams`` of chunks in all; ``marked``: congestion
        marks (ECN's CE) came with them."""

    def on_left(self, path: int, *, now: float) -> None:
        """The path does not answer: a retransmission timeout that was judged a failure. It is not usable until
        ``on_back``."""

    def on_back(self, path: int, *, now: float) -> None:
        """The path answers (again)."""
