"""The paths to one peer: which are alive, and by which the next burst or control datagram leaves.

Theory of operation. Silence of one path while others answer is the evidence for its death: something has been in flight on it,
unanswered, for a retransmission timeout, and something that was sent later on another path was answered. If nothing was,
the timeout asks a question on other paths too (``witnesses``), so that the verdict comes a round trip later. A path that
is left has its flights declared lost, so that its chunks go out again on living paths, is probed with growing distance,
and taken back when it answers. The last living path is never left: if all are silent it may as well be the peer.

Where bursts go is the business of ``PathChoice``; control takes the living paths in turn, but for feedback, which
goes back on the path it speaks of while that is alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dblp.transport.outgoing import Outgoing
from dblp.transport.paths.base import PathChoice
from dblp.transport.port import Address
from dblp.transport.send_path import SendPath

LENT_RTTVAR_S = 4e-3
"""Least deviation that a path without a sample of its own expects from another's round trip, so that 16 ms more are no silence:
paths of one pair of hosts seldom differ by more."""
LOSSY = 0.02
"""Share of lost datagrams above which control takes another path."""
LOOKS = 4
"""Paths that are looked at for it."""
PROBES_A_TIMEOUT = 16
"""Copies of a question that silent paths send together in a timeout, where there are fewer of them."""
HasRoom = Callable[[Outgoing, SendPath, float, int], bool]
"""``has_room(message, path, now, most_chunks)``: it is worth to send what the message has next on this path now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathState:
    """What a rank knows of one path to a peer."""

    path: int
    address: Address
    """The peer's."""
    proved: bool
    """The handshake on this path is done."""
    alive: bool
    """Bursts may take it."""
    rtt_s: float
    """Smoothed round trip, the peer's holding time included; 0: not measured."""
    least_rtt_s: float
    """Least round trip of the network alone, seen lately (``send_path.LEAST_RTT_LIFE_S``); 0: not measured."""
    loss_share: float
    """Of the datagrams sent lately, at most 0.95."""
    bytes_sent: int
    """Payload and headers, control included."""
    times_left: int
    """How often it stopped answering."""


class PeerPaths:
    """The living and the dead paths to one peer."""

    def __init__(self, paths: Sequence[SendPath], choice: PathChoice) -> None:
        self.choice = choice
        choice.loss_share = lambda path: paths[path].steady_loss
        self._paths = paths
        self._used = [paths[index] for index in choice.paths]
        self.living = list(self._used)
        self.suspects: set[SendPath] = set()
        self._turn = 0
        self._unmeasured = True  # the round trips of some paths

    # --- where to

    @property
    def main(self) -> SendPath:
        """A path that is alive, if any is."""
        return self.living[0] if self.living else self._used[0]

    def uses(self, path_id: int) -> bool:
        """Whether the choice ever takes this path."""
        return path_id in self.choice.paths

    def next_control(self) -> SendPath:
        """The next living path in turn, but for lossy ones while others are not: nothing behind it tells of its loss before a
        timeout does."""
        count = len(self.living)
        if not count:
            return self._used[0]
        best = self.living[(self._turn + 1) % count]
        for _ in range(min(count, LOOKS)):
            self._turn += 1
            path = self.living[self._turn % count]
            if path.steady_loss < LOSSY:
                return path
            if path.steady_loss < best.steady_loss:
                best = path
        return best

    def pick(self, message: Outgoing, now: float, has_room: HasRoom) -> tuple[SendPath, int] | None:
        """The path of the message's next burst and how many chunks at most; None if it must wait."""
        paths, most = self._paths, self._share(message)

        def usable(index: int) -> bool:
            path = paths[index]
            return path.alive and has_room(message, path, now, most)

        picked = self.choice.pick(message, usable, now)
        return None if picked is None else (paths[picked[0]], min(picked[1], most))

    def _share(self, message: Outgoing) -> int:
        if self.choice.pinned:
            return self.choice.most_chunks
        return self.choice.share_of(message, len(self.living))

    # --- life and death

    def await_proof(self) -> None:
        """No path has been proved yet by the handshake."""
        for path in self._paths:
            path.alive = path.proved = False
            self.choice.on_left(path.path, now=0.0)
        self.living.clear()

    def on_proved(self, path: SendPath, now: float) -> None:
        """The handshake proved the path (it may do so twice)."""
        if not path.proved:
            path.proved = True
            self._revive(path, now)

    def on_answer(self, path: SendPath, sent_at: float, now: float) -> bool:
        """A datagram that was sent at ``sent_at`` is known to have arrived, with others that were not known of. True if the path
        had been left."""
        path.answered_at = max(path.answered_at, sent_at)
        path.progress_at = now
        self.suspects.discard(path)
        if self._unmeasured and path.srtt:
            self._lend_rtt(path)
        if path.alive or not path.proved:
            return False
        self._revive(path, now)
        return True

    def is_dead(self, path: SendPath, now: float) -> bool:
        """Silent for a timeout while another path answered something that was sent later."""
        if not self.may_leave(path) or path.silent_at() > now:
            return False
        since = max(path.unanswered_at(), path.progress_at)
        return any(other.answered_at >= since for other in self.living if other is not path)

    def may_leave(self, path: SendPath) -> bool:
        """The path is alive, and not the last one that is (nor one that is never used)."""
        return path in self.living and len(self.living) > 1

    def leave(self, path: SendPath, now: float) -> None:
        """The path is dead: nothing but probes takes it."""
        self.living.remove(path)
        self.suspects.discard(path)
        path.leave(now)
        self.choice.on_left(path.path, now=now)

    def witnesses(self, path: SendPath, now: float) -> list[SendPath]:
        """Paths to ask as well when this one is silent: two living ones in turn at first, twice as many each time after, and from
        the second time on those that were left: where all living ones are silent, one of them may have come back. None that
        has something in flight anyway: where all are silent together, each is asked once a timeout."""
        since = now - path.rto
        others = [other for other in self.living if other is not path]
        most = min(len(others), 1 << min(path.probes, 6))
        self._turn += most
        asked = [others[(self._turn + step) % len(others)] for step in range(most)]
        if path.probes > 1:
            asked += [other for other in self._used if other.proved and not other.alive]
        asked = [other for other in asked if not other.in_question(since)]
        for other in asked:
            other.asked_at = now
        return asked

    def _lend_rtt(self, path: SendPath) -> None:
        """Paths without a sample of their own expect about this one's round trip: their first silence is noticed soon, too."""
        self._unmeasured = False
        for other in self._used:
            if not other.srtt:
                other.srtt, other.rttvar = path.srtt, max(path.srtt, path.rttvar, LENT_RTTVAR_S)

    def _revive(self, path: SendPath, now: float) -> None:
        path.take_back(now)
        self.choice.on_back(path.path, now=now)
        if path in self._used:
            self.living.append(path)
            self.living.sort(key=lambda other: other.path)
