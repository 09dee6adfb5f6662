"""One path to a peer as its sender sees it: address, what is in flight, credit, congestion control and round trip."""

from __future__ import annotations

import math
from collections.abc import Set

from dblp.transport.backlog import Backlog
from dblp.transport.config import MAX_DATAGRAM_BYTES, TransportConfig
from dblp.transport.congestion import make_congestion_control
from dblp.transport.flight import Flight, SendSpace
from dblp.transport.port import Address

PACKET_OVERHEAD_BYTES = 900
"""Kernel memory that a queued packet costs beside its bytes: 2,304 for 1,464 were read back (truesize)."""
MIN_RTO_S = 8e-3
"""Least retransmission timeout: above a delayed feedback (4 ms) and a tick of the scheduler. A timeout that was not needed
costs a probe and its answer, never a retransmission."""
ASKED_RTO_S = 3e-3
"""Least timeout of a repeated question on a lossy path, and of any on one that has just lost much: in a burst of loss each pass
of repair takes a few of them."""
HEAVY_LOSS = 0.1
"""Loss share of a path above which questions are repeated sooner and in more copies, and END goes out twice behind a repair."""
COPIED_LOSS = 0.2
"""Loss share of a path above which chunks leave in copies: with less, a pass or two of repair are enough, and it may be that
copies would make the loss, in a buffer that overflows."""
COPIED_TIMEOUTS = 2.0
"""Timeouts after which loss is no longer news: what leaves then is not sent in copies before it has been seen again."""
MAX_RTO_S = 2.0
"""Largest timeout before back-off: paths of one second of round trip work still."""
TAIL_MEMORY_S = 1.0
"""After a loss, for so long, the last of what is in flight is asked about after two round trips (RFC 8985, section 7.2), not
after a timeout: where something is lost, the last may be, and nothing behind it tells."""
REORDER_S = 1e-3
"""Reordering that is allowed for where none has been seen."""
MOST_REORDER_S = 0.5
"""Most that is allowed for."""
REORDER_GAIN = 1.25
"""What is allowed for is so much more than what was seen."""
REORDER_LIFE_S = 1.0
"""How long reordering is allowed for after it was last seen, at least; at most twice as long. RFC 8985, section 6.2, forgets it
after 16 recoveries: one datagram that a processor held up must not put off all repairs from then on."""
REORDER_LIFE_ROUND_TRIPS = 8.0
"""The same in round trips, where that is longer."""
ASK_GAP_S = 1e-3
"""Least distance of the questions of a full window: sooner they are not answered (``feedback.ANSWER_GAP_S``)."""
INITIAL_RTT_S = 30e-3
"""Round trip assumed before the first sample."""
STEADY_PROBES = 64
"""Probes at one timeout's distance before the distance doubles: a loss burst of 64 timeouts is bridged without back-off."""
MAX_PROBE_GAP_S = 1.0
"""Longest distance between probes of a silent peer."""
RELAPSE_S = 1.0
"""A path that is left again so soon after it came back is probed at twice the distance."""
PROBE_COPIES = 8
"""Most copies of a question: at 80 % loss, five of six times one arrives."""
ALL_LOST = 0.2
"""Share of the questions of which all copies may be lost, where ``PROBE_COPIES`` are not too few."""
QUESTIONS_KEPT = 0.95
"""Share of what is known of control datagrams' loss that the fate of one more leaves."""
SUPPOSED_QUESTIONS = 4.0
"""Control datagrams that are taken to be lost like chunks, before their own fate says otherwise."""
SETTLED_DATAGRAMS = 64
"""Datagrams of which half are forgotten in ``heavy_share``: a burst of loss is known as such after one burst."""
SETTLED_PRIOR = 16.0
"""Datagrams that are taken to have arrived before any did: a few losses make no burst of loss."""
LOSSY_SHARE = 0.25
"""Loss, as a share of what a message may lose, from which on it is worth its cost to send by value and in small pieces: with less
nothing will have to be repaired."""
LOSSY_DATAGRAMS = 2048
"""Datagrams of which half are forgotten in the loss that is compared with it."""
LOSSY_PRIOR = 256.0
"""Datagrams that are taken to have arrived before any did: a few losses make no lossy path."""
LOSSY_MEMORY_S = 10.0
"""How long the worst loss of a path is remembered: bursts come back."""
FATE_DATAGRAMS = 256
"""Datagrams whose fate makes the loss by which paths are compared: 20 % show as 17 to 23."""
FATE_PRIOR = 8
"""Datagrams that are taken to have arrived before any did: one early loss makes no bad path."""
LEAST_RTT_LIFE_S = 10.0
"""How long the least round trip of the network is remembered, at least; at most twice as long. BBR's: routes change."""
ECHO_TICK_S = 2e-6
"""Times that come back as an echo are whole microseconds."""


class SendPath:
    """One path to the peer: its address, what is in flight, credit, congestion control and round trip."""

    def __init__(
        self,
        path: int,
        address: Address,
        window_bytes: int,
        config: TransportConfig,
        backlog: Backlog,
        *,
        whole_bursts: bool = False,
    ) -> None:
        self.path = path
        self.address = address
        self.spaces = [SendSpace() for _ in range(4)]
        self.window_bytes = window_bytes
        self.whole_bursts = whole_bursts  # see port.PortFacts
        packet = MAX_DATAGRAM_BYTES if whole_bursts else config.datagram_bytes
        self.scale = (
            1.0 + PACKET_OVERHEAD_BYTES / packet
        )  # bytes at the kernel's charge for each that is sent
        self.bytes_sent = 0
        self.flown = 0  # flights that have left, of all classes
        self.inflight_bytes = 0
        self.inflight_cost = 0
        self.congestion = make_congestion_control(config)
        self.srtt = 0.0
        self.rttvar = INITIAL_RTT_S / 2
        self.latest_rtt = INITIAL_RTT_S
        self.reorder_s = REORDER_S
        self.reorders = False  # of late, something came after it had been declared lost
        self._lateness_s = 0.0  # how late things came in the running life of that
        self._lateness_since = 0.0
        self.probes = 0
        self.probe_at = float("inf")
        self.loss_at = float("inf")
        self.next_send_at = 0.0
        self.net_rtt = 0.0  # the network's share of the round trip, as last seen; 0: not yet
        self.host_s = 0.0  # what both hosts took of the last round trip
        self._least_rtts = float("inf"), float("inf")  # of the running life and the one before
        self._least_since = 0.0  # when the running one began
        self.acked_lately = 1.0
        self.lost_lately = 0.0
        self.settled = SETTLED_PRIOR  # datagrams of bursts whose fate is known
        self.settled_lost = 0.0  # the lost ones of them
        self.fates = LOSSY_PRIOR  # the same with a longer memory
        self.fates_lost = 0.0
        self.worst_loss = 0.0  # the greatest loss share of late, see LOSSY_SHARE
        self.worst_at = float("-inf")
        self.lost_at = float("-inf")  # when something was last found lost
        self.questions = self.questions_lost = 0.0  # control datagrams of late, and the lost ones of them
        self.ask_at = float("-inf")  # when a full window may ask aloud again
        self.feedback_seq = -1  # number of the last feedback sent
        self.feedback_seen = -1  # number of the newest feedback received
        self.marked_seen = 0  # datagrams with a congestion mark that it told of
        self.peer_behind_s = (
            0.0  # how long datagrams wait in the peer's host before they are read, as it told
        )
        self._backlog = backlog
        self._config = config
        # The rest is for several paths (``paths.peer_paths``).
        self.arrived = (
            0.0  # datagrams that arrived, and that were lost: they count half after ``FATE_DATAGRAMS`` more
        )
        self.lost = 0.0
        self.alive = True
        self.proved = True  # by the handshake
        self.answered_at = -1.0  # when the newest datagram that is known to have arrived was sent
        self.asked_at = -1.0  # when it was last asked about, to see whether it answers
        self.progress_at = -1.0  # when that was last heard of
        self.back_at = float("-inf")  # when it answered after it had been left
        self.times_left = 0
        self.relapses = 0  # times in a row that it was left soon after it had come back

    @property
    def loss_share(self) -> float:
        """Share of the datagrams that were lost lately, at most 0.95."""
        return min(self.lost_lately / (self.acked_lately + self.lost_lately), 0.95)

    def loses_much(self, now: float) -> bool:
        """It has just lost a good part of the chunks that it took."""
        if now - self.lost_at >= COPIED_TIMEOUTS * self.rto:
            return False
        return self.settled_lost > COPIED_LOSS * self.settled

    def settle(self, datagrams: int, lost: int, now: float) -> None:
        """A burst of chunks is settled: so many of its datagrams are lost, the rest has arrived."""
        keep = 0.5 ** (datagrams / SETTLED_DATAGRAMS)
        self.settled = keep * self.settled + datagrams
        self.settled_lost = keep * self.settled_lost + lost
        keep = 0.5 ** (datagrams / LOSSY_DATAGRAMS)
        self.fates = keep * self.fates + datagrams
        self.fates_lost = keep * self.fates_lost + lost
        loss = self.fates_lost / self.fates
        if loss >= self.worst_loss or now - self.worst_at > LOSSY_MEMORY_S:
            self.worst_loss, self.worst_at = loss, now

    @property
    def heavy_share(self) -> float:
        """The loss share that the next pass must reckon with, at most 0.95. Feedback tells of arrivals before it tells of losses:
        bursts whose fate is settled say more than the last feedback, but for those that were the first to be hit."""
        return max(self.loss_share, min(self.settled_lost / self.settled, 0.95))

    def note_question(self, lost: int) -> None:
        """A control datagram arrived, or was lost: 1."""
        self.questions = QUESTIONS_KEPT * self.questions + 1.0
        self.questions_lost = QUESTIONS_KEPT * self.questions_lost + lost

    @property
    def behind_s(self) -> float:
        """How far both hosts are behind the network, seconds."""
        return self._backlog.behind_s + self.peer_behind_s

    def affordable(self, copies: int) -> int:
        """How many of so many copies are worth it, see ``Backlog``."""
        return self._backlog.affordable(copies, self.peer_behind_s)

    def question_copies(self) -> int:
        """Copies in which a question leaves: one, but where much is lost."""
        heavy = self.heavy_share
        if heavy <= HEAVY_LOSS:
            return 1
        loss = (SUPPOSED_QUESTIONS * heavy + self.questions_lost) / (SUPPOSED_QUESTIONS + self.questions)
        if loss <= HEAVY_LOSS:
            return 1
        wanted = min(math.ceil(math.log(ALL_LOST) / math.log(loss)), PROBE_COPIES)
        return max(self.affordable(wanted), 2)

    def forget_loss(self, arrived: float) -> None:
        """Feedback had news, of ``arrived`` datagrams: what was acknowledged and lost before weighs less than what came now."""
        self.acked_lately = max(0.75 * (self.acked_lately - arrived), 1.0) + arrived
        self.lost_lately *= 0.75

    @property
    def rto(self) -> float:
        """Retransmission timeout in seconds (RFC 6298's form)."""
        return min(max(MIN_RTO_S, (self.srtt or INITIAL_RTT_S) + 4 * self.rttvar), MAX_RTO_S)

    def on_rtt(self, sample: float) -> None:
        """A full round trip, holding times included (RFC 6298, section 2)."""
        self.latest_rtt = sample
        if not self.srtt:
            self.srtt, self.rttvar = sample, sample / 2
            return
        self.rttvar += 0.25 * (abs(self.srtt - sample) - self.rttvar)
        self.srtt += 0.125 * (sample - self.srtt)

    def on_net_rtt(self, sample: float, now: float) -> None:
        """The network's share of a round trip."""
        self.net_rtt = sample
        running, before = self._least_rtts
        if now - self._least_since > LEAST_RTT_LIFE_S:
            running, before, self._least_since = float("inf"), running, now
        self._least_rtts = min(running, sample), before

    @property
    def least_rtt(self) -> float:
        """The least of them of late, seconds; 0 before the first."""
        least = min(self._least_rtts)
        return least if math.isfinite(least) else 0.0

    def release_part(self, flight: Flight, datagrams: int) -> None:
        """Some of a flight's datagrams arrived, not all: what they took of the window and the credit is free again."""
        left = flight.unacked.bit_count()
        nbytes, cost = flight.nbytes * datagrams // left, flight.cost * datagrams // left
        flight.nbytes -= nbytes
        flight.cost -= cost
        self.inflight_bytes -= nbytes
        self.inflight_cost -= cost

    def newly_marked(self, marked: int) -> int:
        """Datagrams with a congestion mark since the feedback before: feedback has their number modulo 2^32."""
        new = (marked - self.marked_seen) & 0xFFFFFFFF
        self.marked_seen = marked
        return new

    def on_acked(self, acked_bytes: int, now: float, marked_bytes: int = 0, *, waiting: bool) -> None:
        """Tell the congestion control that bytes arrived; ``waiting``: more waits to be sent."""
        self.congestion.on_acked(
            acked_bytes,
            self.net_rtt,
            now=now,
            marked_bytes=min(marked_bytes, acked_bytes),
            inflight_bytes=self.inflight_bytes,
            waiting=waiting,
            host_s=self.host_s,
        )

    def note_late(self, late_s: float, now: float) -> None:
        """Something came so much later, seconds, than it would have in its turn."""
        self.forget_reordering(now)
        self.reorders = True
        self._lateness_s = max(self._lateness_s, late_s, ECHO_TICK_S)
        self.reorder_s = max(self.reorder_s, min(REORDER_GAIN * late_s, MOST_REORDER_S))

    def forget_reordering(self, now: float) -> None:
        """What was seen before the last life does not count any more."""
        life_s = max(REORDER_LIFE_S, REORDER_LIFE_ROUND_TRIPS * self.srtt)
        lives = (now - self._lateness_since) / life_s
        if lives <= 1.0:
            return
        late_s = self._lateness_s if lives <= 2.0 else 0.0
        self._lateness_s, self._lateness_since = 0.0, now
        self.reorders = late_s > 0.0
        self.reorder_s = max(REORDER_S, min(REORDER_GAIN * late_s, MOST_REORDER_S))

    def loss_delay(self) -> float:
        """Age at which a flight that was overtaken is lost (RFC 9002, 6.1.2), with the reordering that was seen."""
        longest = max(self.srtt or INITIAL_RTT_S, self.latest_rtt)
        return longest + max(longest / 8, self.reorder_s)

    def arm_probe(self, now: float) -> None:
        """(Re)start the timeout. Probes of a path that is left back off from the first on."""
        doublings = max(0, self.probes - STEADY_PROBES) if self.alive else self.probes + self.relapses
        doublings = min(doublings, 16)
        asked = self.probes > 0 and self.loss_share > HEAVY_LOSS
        if self.alive and not doublings and (asked or self.loses_much(now)):
            # What is asked is answered at once: only the network's round trip and a tick of both hosts' schedulers count, and
            # what keeps them busy.
            self.probe_at = now + min(max(ASKED_RTO_S, 2.0 * self.net_rtt, self.behind_s), self.rto)
            return
        if self.alive and not doublings and now - self.lost_at < TAIL_MEMORY_S:
            self.probe_at = now + min(
                max(ASKED_RTO_S, 2.0 * (self.srtt or INITIAL_RTT_S), self.behind_s), self.rto
            )
            return
        gap = self.rto if not doublings else min(self.rto * 2**doublings, max(MAX_PROBE_GAP_S, self.rto))
        self.probe_at = now + gap

    def leave(self, now: float) -> None:
        """It does not answer: probed only, first after one more timeout if it answered lately, until it does. Where it leads to
        when it comes back may be another route, of which congestion control knows nothing."""
        self.relapses = self.relapses + 1 if now - self.back_at < RELAPSE_S else 0
        self.alive = False
        self.probes = 0
        self.times_left += 1
        self.loss_at = float("inf")
        self.next_send_at = 0.0
        self.congestion = make_congestion_control(self._config)

    def forget_fates(self) -> None:
        """What was lost when the path died, probes included, says nothing of the path that comes back."""
        self.acked_lately, self.lost_lately = 1.0, 0.0
        self.arrived = self.lost = 0.0
        self.fates, self.fates_lost, self.worst_loss = LOSSY_PRIOR, 0.0, 0.0

    def take_back(self, now: float) -> None:
        """It answers."""
        self.alive = True
        self.back_at = now
        self.probes = 0

    def note_fate(self, arrived: float, lost: float) -> None:
        """So many datagrams arrived or were lost."""
        keep = 0.5 ** ((arrived + lost) / FATE_DATAGRAMS)
        self.arrived = keep * self.arrived + arrived
        self.lost = keep * self.lost + lost

    @property
    def steady_loss(self) -> float:
        """Share of lost datagrams over more of them than ``loss_share`` looks back to; 0 before anything came back."""
        return self.lost / (self.arrived + self.lost + FATE_PRIOR)

    def unanswered_at(self) -> float:
        """When the first datagram was sent that has not been answered, nor anything sent after it; infinity if none was."""
        newest = self.answered_at + ECHO_TICK_S
        flying = (f.sent_at for space in self.spaces for f in space.flights if f.sent_at > newest)
        return min(flying, default=float("inf"))

    def in_question(self, since: float) -> bool:
        """Something was sent or asked on it after ``since``: its answer will tell whether it lives."""
        return self.asked_at > since or any(
            space.flights[-1].sent_at > since for space in self.spaces if space.flights
        )

    def silent_at(self) -> float:
        """When the path will have been silent for a timeout; infinity if nothing waits for an answer."""
        return max(self.unanswered_at(), self.progress_at) + self.rto

    def answered(self, news: Set[int], now: float) -> float:
        """When the peer was last heard of what is in flight, class by class: now for those of which it had ``news``. What else it
        acknowledges must not put off the question for a class of which it knows nothing. What was overtaken is not asked about:
        its age decides."""
        flying = [(cls, space.flights[-1]) for cls, space in enumerate(self.spaces) if space.unanswered()]
        return min([now if cls in news else flight.sent_at for cls, flight in flying], default=now)

    def charge(self, nbytes: int, datagrams: int, bursts: int = 1) -> int:
        """What the peer's kernel charges against its receive buffer for these datagrams."""
        return nbytes + PACKET_OVERHEAD_BYTES * (bursts if self.whole_bursts else datagrams)

    def window(self) -> int:
        """Bytes, at the kernel's charge, that congestion control and credit allow in flight."""
        return int(min(self.congestion.window_bytes * self.scale, self.window_bytes, 1 << 30))

    @property
    def told_unasked(self) -> bool:
        """The peer tells in time what has come: only its credit holds back what leaves, of which it reports each third by itself
        (``feedback.WINDOW_PARTS``). It counts bytes, not the kernel's charge, which is about the same where bursts stay whole."""
        return self.whole_bursts and self.congestion.window_bytes * self.scale >= self.window_bytes

    def quantum(self) -> int:
        """Bytes, at the kernel's charge, that may leave at once."""
        return max(int(min(self.congestion.quantum_bytes * self.scale, 1 << 30)), 1)

    def room(self) -> int:
        """Bytes, at the kernel's charge, that congestion control and credit leave; at least one datagram when nothing is in
        flight."""
        if not self.inflight_cost:
            return max(self.window(), 1)
        free = (self.congestion.window_bytes - self.inflight_bytes) * self.scale
        return int(min(max(min(free, self.window_bytes - self.inflight_cost), 0), 1 << 30))

    def portion(self) -> int:
        """Bytes, at the kernel's charge, of the room that may leave at once."""
        return max(min(self.room(), self.quantum()), 1)
