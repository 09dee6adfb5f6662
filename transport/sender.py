"""Sending to one peer, and what the peer's feedback says of what left.

Theory of operation. Four parts share the work, and none knows those behind it: an ``Outbox`` holds what waits to leave, a
``Departure`` makes the next burst of it, ``Fates`` hold what became of the bursts that left, and ``Silence`` asks where the peer
says nothing. Here feedback and timers are handed to them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from dblp.transport import wire
from dblp.transport.backlog import Backlog
from dblp.transport.burst import BurstBuffer
from dblp.transport.config import TransportConfig
from dblp.transport.departure import Departure
from dblp.transport.fate import Fates, bursts_ahead
from dblp.transport.flight import Control
from dblp.transport.outbox import Outbox
from dblp.transport.paths.base import PathChoice
from dblp.transport.paths.peer_paths import PathState, PeerPaths
from dblp.transport.paths.spray import SprayChoice
from dblp.transport.port import Address
from dblp.transport.send_path import SendPath
from dblp.transport.silence import Silence
from dblp.transport.wire import Type


class PeerSender:
    """Everything that leaves for one peer."""

    def __init__(
        self,
        *,
        rank: int,
        session: int,
        addresses: Sequence[Address],
        window_bytes: int,
        config: TransportConfig,
        buffer: BurstBuffer,
        backlog: Backlog,
        watermark: Callable[[int], int],
        datagram_bytes: int,
        whole_to: Collection[str] = (),
        choice: PathChoice | None = None,
    ) -> None:
        """``whole_to``: hosts to which bursts stay whole (``port.PortFacts.whole_bursts``); ``choice``: which of several paths
        a burst takes, default: in turn."""
        self.config = config
        self.paths = [
            SendPath(path, address, window_bytes, config, backlog, whole_bursts=address.host in whole_to)
            for path, address in enumerate(addresses)
        ]
        self._several: PeerPaths | None = None
        if len(self.paths) > 1:
            self._several = PeerPaths(self.paths, choice or SprayChoice(len(self.paths), config.path_chunks))
        self.outbox = outbox = Outbox(
            rank=rank, session=session, paths=self.paths, several=self._several, config=config, watermark=watermark,
            datagram_bytes=datagram_bytes,
        )  # fmt: skip
        self._departure = Departure(
            outbox, rank=rank, session=session, config=config, buffer=buffer, datagram_bytes=datagram_bytes
        )  # fmt: skip
        self.fates = Fates(outbox)
        self._silence = Silence(outbox, self.fates)
        self.messages, self.control, self.active = outbox.messages, outbox.control, outbox.active
        # The parts' own methods, so that no call stands between: some are made for each burst.
        self.send, self.drop_round = outbox.send, outbox.drop_round
        self.fail, self.idle = outbox.fail, outbox.idle
        self.queue_control, self.queue_question = outbox.queue_control, outbox.queue_question
        self.hold, self.forget_control = outbox.hold, outbox.forget_control
        self.final_pending = outbox.final_pending
        self.arm_if_blocked = outbox.arm_if_blocked
        self.next_burst = self._departure.next_burst
        self.on_left = self._silence.on_left

    @property
    def datagrams_sent(self) -> int:
        """Of chunks and of control (a bundle of records is one), on all paths."""
        return self._departure.datagrams_sent

    def on_feedback(
        self, path_id: int, number: int, feedback: wire.Feedback, received_at: float, now: float
    ) -> None:
        """Masks, credit, grants and a round trip sample. Of an older feedback than the last (``number`` counts them on each
        path), overtaken or replayed, only the masks and grants hold still: they never take anything back."""
        path, several = self.paths[path_id], self._several
        newer = bursts_ahead(number, path.feedback_seen & 0xFFFFFFFF) > 0
        if newer:
            path.feedback_seen = number
            path.window_bytes = feedback.window_bytes
            path.peer_behind_s = feedback.behind_us * 1e-6
        for message_id, limit in feedback.grants:
            message = self.messages.get(message_id)
            if message is not None:
                self.outbox.grant(message, limit)
        before = path.inflight_bytes
        self.fates.whole, self.fates.waited_s = 0, 0.0
        before_news = path.acked_lately
        news = {
            space.cls & 3
            for space in feedback.spaces
            if self.fates.on_masks(path, path.spaces[space.cls & 3], space, now)
        }
        arrived = path.acked_lately - before_news
        if news:
            path.forget_loss(arrived)
        if self.fates.whole:
            path.settle(self.fates.whole, 0, now)
        if several is not None:
            path.note_fate(arrived, 0)
            self._silence.hear(several, path, feedback, bool(news), now)
        if news and newer:
            # From the datagram that arrived last: older flights in the same report may have waited long for a feedback that
            # got through. Without news (a grant, a repeated answer) the last arrival may be old.
            path.on_rtt(max(wire.since_us(feedback.echo, wire.clock_us(now)), 1e-6))
        acked = before - path.inflight_bytes
        if acked > 0:
            held = feedback.held_us * 1e-6
            rtt = wire.since_us(feedback.echo, wire.clock_us(received_at)) - held
            if rtt > 0.0:  # else the peer's clock or its holding time makes no sense
                path.on_net_rtt(rtt, now)
                if arrived:
                    path.host_s = max(self.fates.waited_s / arrived - rtt, 0.0)
            marked = path.newly_marked(feedback.marked) if newer else 0
            if several is not None:
                several.choice.on_acked(path.path, self.fates.whole, marked=marked > 0, now=now)
            if path.net_rtt:
                path.on_acked(acked, now, marked * self.config.datagram_bytes, waiting=bool(self.active))
        if acked > 0 or (feedback.asked and newer):
            if all(not space.unanswered() or cls in news for cls, space in enumerate(path.spaces)):
                path.probes = 0  # else the question for a class of which the answer knows nothing goes on, in as many copies
            path.arm_probe(path.answered(news, now))
        self.fates.detect_loss(path, now)
        self.outbox.turn_passes()
        if not any(space.flights for space in path.spaces):
            path.probe_at = float("inf")
            for message in self.messages.values():
                self.outbox.end_again(message, path)

    def on_final(self, message_id: int, final: wire.Final, now: float) -> None:
        """The receiver's last word on a message."""
        message = self.messages.get(message_id)
        if message is None:
            return
        outcome = message.add_final(final)
        if outcome is None:
            return
        before = [path.inflight_bytes for path in self.paths]
        self.outbox.forget(message)
        for path, inflight in zip(self.paths, before, strict=True):
            if (
                path.net_rtt and inflight > path.inflight_bytes
            ):  # small messages are rarely acknowledged otherwise
                path.on_acked(inflight - path.inflight_bytes, now, waiting=bool(self.active))
        message.finish(outcome)

    def next_timeout(self) -> float:
        """Seconds (on the core's clock) at which ``on_timer`` has something to do; infinity if nothing has."""
        at = self.outbox.held_until
        for path in self.paths:
            if path.probe_at < at:
                at = path.probe_at
            if path.loss_at < at:
                at = path.loss_at
            if self.active and self._departure.tried_at < path.next_send_at < at:
                at = path.next_send_at
        return at

    def on_timer(self, now: float) -> None:
        """Loss timers and retransmission timeouts that are due, and control that was held."""
        if self.outbox.held_until <= now:
            self.outbox.release_held()
        for path in self.paths:
            if path.loss_at <= now:
                self.fates.detect_loss(path, now)
            if path.probe_at <= now:
                self._silence.probe(path, now)

    @property
    def bytes_sent(self) -> int:
        """Payload and headers of all that left, on all paths."""
        return sum(path.bytes_sent for path in self.paths)

    def path_states(self) -> list[PathState]:
        """What is known of each path."""
        return [
            PathState(
                path=path.path,
                address=path.address,
                proved=path.proved,
                alive=path.alive,
                rtt_s=path.srtt,
                least_rtt_s=path.least_rtt,
                loss_share=path.loss_share,
                bytes_sent=path.bytes_sent,
                times_left=path.times_left,
            )
            for path in self.paths
        ]

    def await_proof(self) -> None:
        """Several paths are used only once the handshake has proved them."""
        if self._several is not None:
            self._several.await_proof()

    def on_proved(self, path_id: int, now: float) -> None:
        """The handshake has proved a path. A question tells its round trip while nothing else is on its way: congestion control
        would take the queue of a busy beginning for a part of it."""
        if not self.paths[path_id].net_rtt:
            self.control.append(Control(Type.PING, 0, path=path_id))
        if self._several is not None:
            self._several.on_proved(self.paths[path_id], now)

    def feedback_ways(self, path_id: int, *, asked: bool, again: bool) -> tuple[int | None, ...]:
        """The paths for feedback that speaks of one; None: any that lives. It goes back on that path, but a copy, which is there
        because answers were lost, anywhere. Of a path that we have left, the answer to a question goes both ways: the
        peer may have left all the others."""
        if again or (self._several is not None and not self._several.uses(path_id)):
            return (None,)
        if self.paths[path_id].alive:
            return (path_id,)
        return (None, path_id) if asked else (None,)
