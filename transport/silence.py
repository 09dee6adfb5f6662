"""Questions to a silent peer, and the verdict on a silent path.

Theory of operation. Silence is no loss: after a retransmission timeout an END or PING asks for feedback, and is itself the later
arrival that gives evidence. Timeouts do not back off for the first ``STEADY_PROBES`` tries, so that the end of a burst of loss is
noticed within one timeout. Where there are several paths, silence of one while others answer is a verdict on the path
(``paths.peer_paths``).
"""

from __future__ import annotations

from collections import deque

from dblp.transport import wire
from dblp.transport.fate import Fates
from dblp.transport.flight import Control, Flight, SendSpace
from dblp.transport.outbox import Outbox
from dblp.transport.outgoing import Outgoing
from dblp.transport.paths.peer_paths import PROBES_A_TIMEOUT, PeerPaths
from dblp.transport.send_path import SendPath
from dblp.transport.wire import Type

LEAST_COPIES = 4
"""Copies of a question that was asked several times in vain, whatever the path is known to lose."""
KEPT_QUESTIONS = 8
"""Questions of a silent class that are remembered."""


class Silence:
    """Asks for feedback that does not come, and leaves paths that stay silent while others answer."""

    def __init__(self, outbox: Outbox, fates: Fates) -> None:
        self._outbox = outbox
        self._fates = fates

    def probe(self, path: SendPath, now: float) -> None:
        """Ask for feedback in every class with something in flight that nothing overtook, and for grants that may have been lost.

        Repeated probes go out as several copies: in a loss burst of 80 % a single question and its single answer both arrive once
        in 25 times, eight copies of each two times in three.
        """
        if self._outbox.several is not None and self._judge(self._outbox.several, path, now):
            return
        path.probes += 1
        path.probe_at = float("inf")
        probes = self._questions(path)
        if probes:
            copies = max(path.question_copies(), min(path.probes + 1, path.affordable(LEAST_COPIES)))
            if self._outbox.several is not None:
                copies = max(1, min(copies, PROBES_A_TIMEOUT // max(len(self._outbox.several.living), 1)))
            for probe in probes:
                probe.copies = copies
            self._outbox.control.extend(probes * copies)
            path.arm_probe(now)
            if self._outbox.several is not None:
                self._suspect(self._outbox.several, path, now)

    def on_left(self, mask: int, now: float) -> None:
        """The peer gets no answer on the paths whose bits are set: most likely they fail in both directions."""
        for path in self._outbox.paths:
            if (
                self._outbox.several is not None
                and mask >> path.path & 1
                and self._outbox.several.may_leave(path)
            ):
                self._leave(self._outbox.several, path, now)

    def hear(
        self, several: PeerPaths, path: SendPath, feedback: wire.Feedback, news: bool, now: float
    ) -> None:
        """Feedback came about a path: it lives if there is news, and it may bear witness against silent ones."""
        if not news:
            return
        age = max(wire.since_us(feedback.echo, wire.clock_us(now)), 0.0)
        if several.on_answer(path, now - age, now):  # with nothing but probes in flight: of no interest now
            for space in path.spaces:
                while space.flights:
                    self._take_off(path, space.flights.popleft())
        for suspect in [*several.suspects]:
            if several.is_dead(suspect, now):
                self._condemn(several, suspect, now)

    def _judge(self, several: PeerPaths, path: SendPath, now: float) -> bool:
        """The timeout of a path: True if it is dead, was so, or its time has not come; then no other question is needed."""
        if not path.alive:
            path.probes += 1
            self._ask_again(path, now)
            return True
        if several.is_dead(path, now):
            self._condemn(several, path, now)
            return True
        return False

    def _suspect(self, several: PeerPaths, path: SendPath, now: float) -> None:
        """A path is silent: have others say whether it is the path or the peer."""
        verdict_at = path.silent_at()
        if verdict_at > now:  # it answered, but in another class
            path.probe_at = min(path.probe_at, verdict_at)
            return
        several.suspects.add(path)
        self._outbox.control.extend(
            Control(Type.PING, 0, path=other.path) for other in several.witnesses(path, now)
        )

    def _condemn(self, several: PeerPaths, path: SendPath, now: float) -> None:
        """Our own verdict: leave the path, and tell the peer."""
        self._leave(several, path, now)
        self._outbox.control.append(Control(Type.LEFT, 0, wire.encode_left(1 << path.path)))

    def _leave(self, several: PeerPaths, path: SendPath, now: float) -> None:
        """Give up what is in flight on a path: it goes out again on the others."""
        several.leave(path, now)
        messages = set()
        for space in path.spaces:
            flights, space.flights = space.flights, deque()
            for flight in flights:
                self._fates.on_lost(path, space, flight, now)
                messages.add(flight.control.message if flight.control is not None else _id_of(flight))
            space.lost.clear()  # what the path brought before it died is no sign of reordering when it tells of it at last
        path.forget_fates()
        for message in filter(None, map(self._outbox.messages.get, messages)):
            message.loss_share = several.main.loss_share
            message.paths.discard(path.path)
            if message.all_sent and not message.repairable and not message.end_due:
                message.end_due.append(several.main.path)
            self._outbox.wake(message)
        self._ask_again(path, now)

    def _ask_again(self, path: SendPath, now: float) -> None:
        """Probe a path that was left."""
        for space in path.spaces:
            self._trim_probes(path, space)
        self._outbox.control.append(Control(Type.PING, 0, path=path.path))
        path.arm_probe(now)

    def _questions(self, path: SendPath) -> list[Control]:
        probes = []
        for cls, space in enumerate(path.spaces):
            if not space.unanswered():
                continue
            self._trim_probes(path, space)
            ended = self._ended(space)
            for owner in ended:
                probes.append(Control(Type.END, owner.id, chunks=owner.spec.chunks, cls=cls, path=path.path))
            if not ended:
                probes.append(Control(Type.PING, 0, cls=cls, path=path.path))
        if not probes and any(m.blocked() for m in self._outbox.messages.values()):
            probes.append(Control(Type.PING, 0, path=path.path))
        return probes

    def _ended(self, space: SendSpace) -> list[Outgoing]:
        """Messages with something in flight of which all has left, the last few: their receivers may wait to hear that."""
        found: dict[int, Outgoing] = {}
        for flight in space.flights:
            message = flight.message
            if message is None and flight.control is not None and flight.control.type is Type.END:
                message = self._outbox.messages.get(flight.control.message)
            if message is not None and not message.done and message.all_sent:
                found[message.id] = message
        return list(found.values())[-(KEPT_QUESTIONS // 2) :]

    def _trim_probes(self, path: SendPath, space: SendSpace) -> None:
        """Keep only the last probes of a silent peer, so that they do not fill the mask window."""
        probes = [f for f in space.flights if f.control is not None and not f.control.reliable]
        for flight in probes[:-KEPT_QUESTIONS]:
            space.flights.remove(flight)
            if flight.control is not None and flight.control.type is Type.END:
                self._outbox.end_again(self._outbox.messages.get(flight.control.message), path)
            path.inflight_bytes -= flight.nbytes
            path.inflight_cost -= flight.cost

    @staticmethod
    def _take_off(path: SendPath, flight: Flight) -> None:
        """It is not in flight any more."""
        path.inflight_bytes -= flight.nbytes
        path.inflight_cost -= flight.cost


def _id_of(flight: Flight) -> int:
    return flight.message.id if flight.message is not None else 0
