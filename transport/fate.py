"""What became of the flights to one peer: acknowledged, lost, or only late.

Theory of operation. Loss needs evidence: a later datagram of the same path and class has arrived, or of a less urgent class (a
network with priorities lets it wait, never pass), and the flight is older than a round trip and the reordering seen so far
(RFC 9002, section 6.1.2). While a path has not been seen to reorder lately, no age is needed where one of a later burst of the
class or of a less urgent class has arrived, or the third behind it in its own burst (RFC 9002, section 6.1.1, by the packet;
RFC 8985, section 6.2, drops its allowance in the same way): spraying reorders between paths, whose numbers are their own, and
seldom within one. Silence is no loss (``silence``).
"""

from __future__ import annotations

from collections import deque

from dblp.transport import wire
from dblp.transport.flight import Flight, SendSpace, full_mask
from dblp.transport.outbox import Outbox
from dblp.transport.send_path import HEAVY_LOSS, SendPath
from dblp.transport.wire import Type

OVERTAKEN = 3
"""Places behind a datagram of which one must have come (RFC 9002's kPacketThreshold); a later burst is further away."""


LATE_TIMEOUTS = 4.0
"""Timeouts after which what was declared lost is not looked for any more."""


def bursts_ahead(seq: int, base: int) -> int:
    """How far burst ``seq`` lies beyond the one whose low 32 bits are ``base``; negative before it."""
    return ((seq - base + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


class Fates:
    """Takes flights off their paths as the peer's feedback tells what became of them."""

    def __init__(self, outbox: Outbox) -> None:
        self.whole = 0  # datagrams of chunks in bursts and trains that a feedback acknowledged to the last
        self.waited_s = 0.0  # of the datagrams that a feedback acknowledged: since they left, together
        self._outbox = outbox

    def on_masks(self, path: SendPath, space: SendSpace, report: wire.Space, now: float) -> bool:
        """Acknowledge what the report names; True if there was anything new."""
        masks, base = report.masks, report.base
        kept: deque[Flight] = deque()
        flights = space.flights
        newest = -1
        while flights:
            flight = flights[0]
            ahead = bursts_ahead(flight.seq, base)
            if ahead >= report.count:
                break
            flights.popleft()
            if ahead >= 0:
                got = (masks >> (ahead * wire.BURST_DATAGRAMS)) & flight.unacked
            else:  # a train of which the report has the end, or what it does not speak of any more
                got = (
                    masks << (-ahead * wire.BURST_DATAGRAMS) & flight.unacked if -ahead < flight.bursts else 0
                )
            if got:
                newest = flight.seq * wire.BURST_DATAGRAMS + got.bit_length() - 1
                if path.reorders and newest < space.largest_acked:  # it had only not been declared lost
                    path.note_late(now - flight.sent_at - path.srtt, now)
                space.acked_order = max(space.acked_order, flight.order)
                arrived = got.bit_count()
                path.acked_lately += arrived
                self.waited_s += arrived * (now - flight.sent_at)
                if got != flight.unacked:
                    path.release_part(flight, arrived)
                self._on_acked(flight, got)
            if flight.unacked:
                kept.append(flight)
                if got and not flights:
                    self._ask_behind(flight, path)
            else:
                path.inflight_bytes -= flight.nbytes
                path.inflight_cost -= flight.cost
                if flight.control is None:
                    self.whole += flight.count * flight.bursts
                else:
                    path.note_question(0)
                    self._outbox.goodbye_heard |= flight.control.type is Type.CLOSE
                    if flight.control.type is Type.END and flight.control.message in self._outbox.messages:
                        self._outbox.messages[flight.control.message].end_heard = True
        if kept:
            kept.extend(flights)
            space.flights = kept
        if newest > space.largest_acked:
            space.largest_acked = newest
        if space.lost:
            self._notice_late(path, space, report, now)
        return newest >= 0

    def _ask_behind(self, flight: Flight, path: SendPath) -> None:
        """A part of the last burst in flight has come: the rest is late or lost, and nothing behind it will tell which."""
        message = flight.message
        if message is not None and not message.done and message.all_sent and not message.end_due:
            message.end_due.append(path.path)
            self._outbox.wake(message)

    def _on_acked(self, flight: Flight, got: int) -> None:
        flight.unacked ^= got
        message = flight.message
        if message is None or message.done:
            return
        if flight.chunks is None:
            # Nearly always whole bursts: all of the flight's, or those of a train that had come so far.
            skipped = ((got & -got).bit_length() - 1) // wire.BURST_DATAGRAMS
            bursts = -(-got.bit_length() // wire.BURST_DATAGRAMS) - skipped
            if got >> (skipped * wire.BURST_DATAGRAMS) == full_mask(bursts, flight.count):
                first = flight.first + skipped * flight.count
                message.acked[first : first + bursts * flight.count] = True
                return
        message.acked[flight.chunks_at(got)] = True

    def _notice_late(self, path: SendPath, space: SendSpace, report: wire.Space, now: float) -> None:
        """Flights declared lost that came after all: the path reorders more than was believed."""
        oldest = now - LATE_TIMEOUTS * path.rto
        while space.lost and space.lost[0].sent_at < oldest:
            space.lost.popleft()
        for flight in space.lost:
            ahead = bursts_ahead(flight.seq, report.base)
            if not 0 <= ahead < report.count:
                continue
            got = (report.masks >> (ahead * wire.BURST_DATAGRAMS)) & flight.unacked
            if got:
                self._on_acked(flight, got)
                path.note_late(now - flight.sent_at - path.srtt, now)

    def detect_loss(self, path: SendPath, now: float) -> None:
        """Declare lost what was overtaken and is old enough; arm the timer for what is not old enough yet."""
        path.loss_at = float("inf")
        path.forget_reordering(now)
        delay = path.loss_delay()
        passed = -1  # what left before that flight is overtaken by one of a less urgent class
        for space in reversed(path.spaces):
            flights, below = space.flights, passed
            passed = max(passed, space.acked_order)
            if not flights or (
                flights[0].seq * wire.BURST_DATAGRAMS >= space.largest_acked and flights[0].order > below
            ):
                continue
            kept: deque[Flight] = deque()
            for flight in flights:
                if flight.last_unacked > space.largest_acked and flight.order > below:
                    kept.append(flight)
                elif flight.sent_at + delay <= now or (
                    not path.reorders
                    and (flight.order < below or space.largest_acked - flight.last_unacked >= OVERTAKEN)
                ):
                    self.on_lost(path, space, flight, now)
                else:
                    path.loss_at = min(path.loss_at, flight.sent_at + delay)
                    kept.append(flight)
            space.flights = kept

    def on_lost(self, path: SendPath, space: SendSpace, flight: Flight, now: float) -> None:
        path.inflight_bytes -= flight.nbytes
        path.inflight_cost -= flight.cost
        lost = flight.unacked.bit_count()
        path.lost_lately += lost
        path.lost_at = now
        if path.heavy_share > HEAVY_LOSS:
            for waiting in self._outbox.messages.values():
                if waiting.portion > 1:
                    waiting.hurry()
                    self._outbox.wake(waiting)
        if self._outbox.several is not None:
            path.note_fate(0, lost)
        path.congestion.on_lost(flight.nbytes, now=now)
        if flight.control is not None:
            path.note_question(1)
            if flight.control.reliable and not flight.control.dropped:
                self._outbox.queue_control(flight.control)
            elif flight.control.type is Type.END:
                self._outbox.end_again(self._outbox.messages.get(flight.control.message), path)
            return
        path.settle(flight.count * flight.bursts, lost, now)
        space.lost.append(flight)
        message = flight.message
        if message is not None and not message.done:
            if flight.decides:
                message.loss_share = path.heavy_share
                message.add_lost(flight.chunks_at(flight.unacked))
            if not message.passes:  # there its END is behind it already
                self._outbox.end_again(message, path)
            self._outbox.wake(message)
