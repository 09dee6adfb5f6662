"""What waits to leave for one peer: its messages, control datagrams, and what the peer has room for unasked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dblp.transport import wire
from dblp.transport.burst import burst_chunks
from dblp.transport.config import ALWAYS, HEADER_BYTES, PASSES, TransportConfig
from dblp.transport.flight import Control
from dblp.transport.message import UNTAGGED, MessageSpec, Sent, class_counts
from dblp.transport.outgoing import Outgoing
from dblp.transport.paths.peer_paths import PeerPaths
from dblp.transport.policy import Stop
from dblp.transport.port import Bytes
from dblp.transport.send_path import HEAVY_LOSS, LOSSY_SHARE, MAX_PROBE_GAP_S, SendPath
from dblp.transport.wire import Type

CLEAN_LOSS = 0.5
"""Datagrams lost lately (a decaying count) below which a path is clean: the last burst says itself that it is the last."""
INLINE_QUEUE = 32
"""Control that waits to leave, above which messages of one chunk wait for their turn as others do."""
HELD_S = 2e-3
"""How long a FINAL for which nobody waits may wait for something that leaves for the same peer: longer than small rounds are
apart that follow each other. Well below the retransmission timeout of the message."""
BLOCKED_SHARE = 0.125
"""Distance of the questions of a blocked sender, as a share of how long it has been blocked: a lost grant costs no more than
that, and a peer that comes to its receive minutes later is asked once in ``MAX_PROBE_GAP_S``."""


class Outbox:
    """The messages and control datagrams for one peer, and the paths that they may take."""

    def __init__(
        self,
        *,
        rank: int,
        session: int,
        paths: Sequence[SendPath],
        several: PeerPaths | None,
        config: TransportConfig,
        watermark: Callable[[int], int],
        datagram_bytes: int,
    ) -> None:
        """``rank``: our own; ``several``: which paths live, if there are several."""
        self.paths = paths
        self.several = several
        self.messages: dict[int, Outgoing] = {}
        self.control: deque[Control] = deque()
        self.held: list[Control] = []  # control that leaves with what leaves next, or at ``held_until``
        self.held_until = float("inf")
        self.active: deque[Outgoing] = deque()  # messages that may have something to send
        self.active_ids: set[int] = set()
        self.passes = config.repair == PASSES
        self.always_by_value = config.by_value == ALWAYS
        self.early_bytes = config.early_bytes
        self.goodbye_heard = False  # the peer has acknowledged our CLOSE
        self.blocked_at = float("inf")  # since when no chunk could leave for want of a grant
        self._rank = rank
        self._session = session
        self._ended_below = watermark
        self._datagram_bytes = datagram_bytes

    # --- messages

    def send(
        self,
        message: int,
        spec: MessageSpec,
        data: Bytes,
        signature: bytes,
        energy: float,
        *,
        offered: bool,
        classes: npt.NDArray[np.uint8] | None = None,
    ) -> Outgoing:
        """Start a message; ``classes`` as in ``interface.EndpointLike.send``."""
        counts = UNTAGGED if classes is None or not spec.chunks else class_counts(spec, classes)
        if counts == UNTAGGED:
            classes = None
        header = wire.Header(
            wire.VERSION, Type.DATA, 0, 0, 0, 0, self._rank, self._session, message, spec.chunks, 0, 0, 0, 0, 1, spec.chunk_bytes
        )  # fmt: skip
        head = bytearray(wire.encode_header(header))
        per_burst = burst_chunks(spec.chunk_bytes)
        lossy = any(path.worst_loss > LOSSY_SHARE * spec.budget for path in self.paths)
        # Rules other than STALL leave behind what comes last.
        ranked = lossy or self.always_by_value or spec.stop is not Stop.STALL
        out = Outgoing(message, spec, data, head, per_burst, classes, passes=self.passes, ranked=ranked)
        out.wakes = self.wake
        if (lossy and spec.budget > 0.0) or any(path.heavy_share > HEAVY_LOSS for path in self.paths):
            out.hurry()
        self._allow_early(out)
        self.blocked_at = float("inf")  # its first grant may be lost: asked for soon
        self.messages[message] = out
        if self.several is not None:
            self.several.choice.on_started(out)
        opened = wire.encode_open(wire.Open(spec, signature, energy, counts))
        if out.limit == 1 == spec.chunks and self._goes_inline(len(opened) + spec.nbytes):
            out.inline = opened
        else:
            self._open(out, opened)
        out.opened = True
        if offered:
            out.offer(0, spec.chunks)
        return out

    @property
    def _main(self) -> SendPath:
        """The path for what may take any."""
        return self.paths[0] if self.several is None else self.several.main

    def _goes_inline(self, payload_bytes: int) -> bool:
        """A message of one chunk may leave with its OPEN: there is room for it in a datagram, and on the path, which counts
        control but does not hold it back."""
        path = self._main
        datagram = HEADER_BYTES + payload_bytes
        return (
            datagram <= self._datagram_bytes
            and len(self.control) < INLINE_QUEUE
            and path.room() >= path.charge(datagram, 1)
        )

    def _open(self, out: Outgoing, payload: bytes) -> None:
        out.open_control = Control(Type.OPEN, out.id, payload, chunks=out.spec.chunks)
        self.queue_control(out.open_control)

    def _allow_early(self, out: Outgoing) -> None:
        """What the peer holds for receives that are not posted yet may leave: up to a burst more than the pool, if that makes the
        message whole (the receiver has room for it, ``inbox.EARLY_SLACK_BYTES``)."""
        chunk_bytes, left = out.spec.chunk_bytes, out.spec.chunks - out.limit
        allowed = min(max(self.early_bytes, 0) // chunk_bytes, left)
        if allowed and left - allowed <= out.per_burst:
            allowed = left
        out.raise_limit(out.limit + allowed)
        self.early_bytes -= allowed * chunk_bytes
        out.granted = out.spec.chunks == 0

    def _share_pool(self) -> None:
        """What has come back to the pool is for messages that wait for it. They may wait for nothing else: the peer tells of its
        receives with its next feedback, which may take as long as feedback ever does, as each step of a ring would find."""
        for out in self.messages.values():
            if self.early_bytes <= 0:
                break
            if not out.granted and out.limit < out.spec.chunks:
                self._allow_early(out)
                self.wake(out)

    def drop_round(self, round_key: int) -> None:
        """Forget the round's messages that still use the caller's memory: the round ended without them."""
        for message in [m for m in self.messages.values() if m.id >> 16 == round_key and not m.detached]:
            self.forget(message)
            message.finish(Sent(missing=np.empty(0, np.uint32)))

    def fail(self, error: Exception) -> None:
        """Every message ends with ``error``."""
        for message in list(self.messages.values()):
            self.forget(message)
            message.finish(error)
        self.active.clear()
        self.active_ids.clear()

    def forget_control(self) -> None:
        """The peer has left: nothing of it need leave."""
        self.control.clear()
        self.held.clear()
        self.held_until = float("inf")

    def idle(self) -> bool:
        """Nothing waits to leave and nothing that must arrive is unacknowledged."""
        if self.messages or self.control or self.held:
            return False
        return not any(
            flight.control is not None and flight.control.reliable and not flight.control.dropped
            for path in self.paths
            for space in path.spaces
            for flight in space.flights
        )

    def wake(self, message: Outgoing) -> None:
        """Something of the message may be able to leave."""
        if message.inline is not None:
            if not message.unoffered:
                payload, message.inline = message.inline, None
                self._open(message, payload + message.source.data.tobytes())
            return
        if message.id not in self.active_ids and message.sendable():
            self.active_ids.add(message.id)
            self.active.append(message)

    def forget(self, message: Outgoing) -> None:
        """Take the message's flights back: its credit is free again."""
        self.messages.pop(message.id, None)
        if message.open_control is not None:
            message.open_control.dropped = True  # whoever has told the end of it knows what it was
        if self.several is not None:
            self.several.choice.on_ended(message)
        if not message.granted:
            self.grant(message, message.limit)
        for path in self.paths:
            for space in [path.spaces[message.cls]] if message.lanes is None else path.spaces:
                if any(flight.message is message for flight in space.flights):
                    for flight in space.flights:
                        if flight.message is message:
                            path.inflight_bytes -= flight.nbytes
                            path.inflight_cost -= flight.cost
                    space.flights = deque(flight for flight in space.flights if flight.message is not message)

    def grant(self, message: Outgoing, limit: int) -> None:
        if limit > message.limit:
            self.blocked_at = float("inf")
        returned = 0
        if not message.granted:
            message.granted = True
            returned = message.limit * message.spec.chunk_bytes
            self.early_bytes += returned
        message.raise_limit(limit)
        self.wake(message)
        if returned:
            self._share_pool()

    def watermark(self, group: int) -> int:
        """Rounds of the group below this have ended here and nothing of them is on its way to this peer any more."""
        watermark = self._ended_below(group)
        for message_id in self.messages:  # in order of their rounds: the first of the group decides
            if message_id >> 48 == group:
                return min(watermark, (message_id >> 16) & 0xFFFFFFFF)
        return watermark

    def queue_control(self, control: Control) -> None:
        """Let a control datagram leave with the next bursts; in copies what is repeated until it arrives, where much is lost."""
        self.control.append(control)
        if control.reliable:
            path = self._main
            self.control.extend(control.copy() for _ in range(path.question_copies() - 1))

    def hold(self, control: Control, now: float) -> None:
        """Let a control datagram leave with what leaves next, in ``HELD_S`` at the latest."""
        self.held.append(control)
        self.held_until = min(self.held_until, now + HELD_S)

    def release_held(self) -> None:
        """What was held leaves with the next bursts."""
        held, self.held = self.held, []
        self.held_until = float("inf")
        for control in held:
            self.queue_control(control)

    def queue_question(self, control: Control) -> None:
        """Let a control datagram leave that is not repeated by itself: in copies where much is lost."""
        self.control.append(control)
        self.control.extend(control.copy() for _ in range(self._main.question_copies() - 1))

    def final_pending(self, message_id: int) -> bool:
        """A FINAL of this message waits to leave or to be acknowledged."""
        queued = any(c.type is Type.FINAL and c.message == message_id for c in (*self.control, *self.held))
        return queued or any(
            f.control is not None and f.control.type is Type.FINAL and f.control.message == message_id
            for path in self.paths
            for f in path.spaces[0].flights
        )

    def arm_if_blocked(self, now: float) -> None:
        """Probe in time if chunks wait for a grant while nothing is in flight that would be answered. A grant may have been lost,
        or there is none for long, as from a peer that comes to its receive later: the longer it takes, the rarer the
        questions."""
        path = self._main
        if (
            self.messages
            and path.probe_at == float("inf")
            and any(m.blocked() for m in self.messages.values())
        ):
            self.blocked_at = min(self.blocked_at, now)
            path.arm_probe(now)
            gap = min(BLOCKED_SHARE * (now - self.blocked_at), MAX_PROBE_GAP_S)
            path.probe_at = max(path.probe_at, now + gap)

    def turn_passes(self) -> None:
        """After news of what became of what had left: messages whose pass is over begin the next one."""
        if self.passes:
            for message in self.messages.values():
                if message.turn_pass():
                    self.wake(message)

    def end_again(self, message: Outgoing | None, path: SendPath) -> None:
        """END, or the burst that said LAST, may be among what was lost: a receiver whose bound is met waits for it, and where
        nothing is repaired or in flight, nothing else says it again."""
        if message is None or message.done or not message.may_miss or message.end_due or message.end_heard:
            return
        if message.all_sent and not message.repairable:
            message.end_due.append(path.path)
            self.wake(message)
