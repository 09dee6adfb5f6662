"""A TCP-like bulk flow on the simulated network: what the transport meets on a shared link.

Theory of operation. The flow is two ports: a sender of full segments, each with its number, and a receiver that
acknowledges each read with the numbers that it misses (an ideal SACK, RFC 2018 and RFC 6675, without its three-block limit).
A segment is lost once three later ones have arrived. The window follows Reno (RFC 5681) or CUBIC (RFC 9438): slow start,
additive or cubic increase, one multiplicative decrease a loss event (a round trip), a window of one segment after a
retransmission timeout (RFC 6298, least 200 ms as in Linux). A model: no handshake, no delayed acknowledgements, no pacing,
no HyStart, data without end.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence

import numpy as np

from dblp.errors import ConfigError
from dblp.sim.port import Network
from dblp.transport.impair import MAX_BURST_DATAGRAMS
from dblp.transport.port import Address, Burst, Slab

SEGMENT_BYTES = 1448
"""Payload of a full segment: an MTU of 1500 less IPv4, TCP and timestamps."""
INITIAL_WINDOW = 10.0
"""Segments (RFC 6928)."""
DUPLICATE_THRESHOLD = 3
"""Later segments that must arrive before one is lost (RFC 5681, section 3.2)."""
MIN_RTO_S = 0.2
"""Linux's least retransmission timeout."""
CUBIC_C, CUBIC_BETA = 0.4, 0.7
"""RFC 9438, section 5: in segments and seconds; the factor of the decrease."""
_NUMBER = struct.Struct("<q")
_ACK = struct.Struct("<qqi")
MAX_MISSING = 128
"""Missing segments named in one acknowledgement: it fits the smallest datagram twice."""


class Reno:
    """RFC 5681's window, in segments."""

    def __init__(self) -> None:
        self.window = INITIAL_WINDOW
        self.threshold = float("inf")

    def on_acked(self, segments: int, rtt_s: float, now: float) -> None:
        """New data was acknowledged."""
        if self.window < self.threshold:
            self.window = min(self.window + segments, self.threshold)
        else:
            self.window += segments / self.window

    def on_loss(self, now: float) -> None:
        """A loss event."""
        self.threshold = self.window = max(self.window / 2.0, 2.0)

    def on_timeout(self, now: float) -> None:
        """A retransmission timeout."""
        self.on_loss(now)
        self.window = 1.0


class Cubic(Reno):
    """RFC 9438's window, in segments, with its Reno-friendly region and fast convergence."""

    def __init__(self) -> None:
        super().__init__()
        self._largest = 0.0
        self._epoch = -1.0
        self._friendly = 0.0

    def on_acked(self, segments: int, rtt_s: float, now: float) -> None:
        """RFC 9438, sections 4.2 to 4.5."""
        if self.window < self.threshold:
            super().on_acked(segments, rtt_s, now)
            return
        if self._epoch < 0.0:
            self._epoch = now
            self._largest = max(self._largest, self.window)
            self._friendly = self.window
            self._k = ((self._largest - self.window) / CUBIC_C) ** (1 / 3)
        self._friendly += 3.0 * (1.0 - CUBIC_BETA) / (1.0 + CUBIC_BETA) * segments / self.window
        target = CUBIC_C * (now - self._epoch + rtt_s - self._k) ** 3 + self._largest
        target = min(max(target, self.window), 1.5 * self.window)
        self.window = max(self.window + segments * (target - self.window) / self.window, self._friendly)

    def on_loss(self, now: float) -> None:
        """RFC 9438, sections 4.6 and 4.7."""
        shrunk = self.window < self._largest
        self._largest = self.window * (1.0 + CUBIC_BETA) / 2.0 if shrunk else self.window
        self.threshold = self.window = max(self.window * CUBIC_BETA, 2.0)
        self._epoch = -1.0


KINDS: dict[str, Callable[[], Reno]] = {"reno": Reno, "cubic": Cubic}


class TcpFlow:
    """Data without end from one host to another, from ``start`` to ``stop``. ``delivered_bytes`` counts what arrived once.

    ``kind``: ``reno`` or ``cubic``. Raises ConfigError for another.
    """

    def __init__(self, network: Network, source: str, target: str, *, kind: str = "cubic") -> None:
        if kind not in KINDS:
            raise ConfigError(f"kind={kind!r}: known are {', '.join(map(repr, KINDS))}")
        self.control = KINDS[kind]()
        self._loop = network.loop
        self._receiver = _TcpReceiver(network, target)
        self._port = network.port(source)
        self._target = self._receiver.address
        self._inflight: dict[int, float] = {}  # segment number -> time it left
        self._lost: dict[int, None] = {}  # in order of discovery
        self._next = 0
        self._recovery = -1  # losses up to this segment belong to one loss event
        self._srtt = 0.0
        self._rttvar = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    @property
    def delivered_bytes(self) -> int:
        """Payload bytes that arrived, each counted once."""
        return self._receiver.segments * SEGMENT_BYTES

    def start(self) -> None:
        """Begin to send."""
        self._port.open(self._on_batch, self._send)
        self._send()

    def stop(self) -> None:
        """Send no more and free the ports."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        self._port.close()
        self._receiver.close()

    # --- sending

    def _send(self) -> None:
        """Fill the window, retransmissions first."""
        while not self._stopped and len(self._inflight) < int(self.control.window):
            room = min(int(self.control.window) - len(self._inflight), MAX_BURST_DATAGRAMS // 2)
            fresh = range(self._next, self._next + room)
            numbers = list(self._lost)[:room] if self._lost else list(fresh)
            data = np.zeros((len(numbers), SEGMENT_BYTES), np.uint8)
            data[:, :8] = np.array(numbers, "<i8").view(np.uint8).reshape(-1, 8)
            if not self._port.send(Burst(data.reshape(-1), SEGMENT_BYTES, 0, 0, self._target)):
                return
            now = self._loop.time()
            for number in numbers:
                self._inflight[number] = now
                self._lost.pop(number, None)
            self._next = max(self._next, numbers[-1] + 1)
        if self._timer is None and not self._stopped:
            self._arm()

    def _arm(self) -> None:
        rto = max(self._srtt + 4.0 * self._rttvar, MIN_RTO_S)
        self._timer = self._loop.call_later(rto, self._on_timeout)

    def _on_timeout(self) -> None:
        """Everything in flight is lost."""
        self._timer = None
        self.control.on_timeout(self._loop.time())
        self._recovery = self._next
        self._lost = dict.fromkeys(sorted(self._inflight | self._lost))
        self._inflight.clear()
        self._send()

    # --- acknowledgements

    def _on_batch(self, slabs: Sequence[Slab]) -> None:
        for slab in slabs:
            for part in slab.parts():
                for index in range(part.count):
                    self._on_ack(part.datagram(index))
        self._send()

    def _on_ack(self, ack: bytes) -> None:
        below, highest, count = _ACK.unpack_from(ack)
        missing = set(struct.unpack_from(f"<{count}q", ack, _ACK.size))
        top = max(missing) if count == MAX_MISSING else highest  # beyond it nothing is told
        now = self._loop.time()
        arrived = [n for n in self._inflight if n < below or (n <= top and n not in missing)]
        if arrived:
            self._on_rtt(now - max(self._inflight[n] for n in arrived))
            if self._timer is not None:
                self._timer.cancel()
            self._arm()
        for number in arrived:
            del self._inflight[number]
            self._lost.pop(number, None)
        if arrived:
            self.control.on_acked(len(arrived), self._srtt, now)
        self._find_lost(missing, highest, now)

    def _on_rtt(self, sample: float) -> None:
        """RFC 6298, section 2."""
        if not self._srtt:
            self._srtt, self._rttvar = sample, sample / 2.0
            return
        self._rttvar += 0.25 * (abs(self._srtt - sample) - self._rttvar)
        self._srtt += 0.125 * (sample - self._srtt)

    def _find_lost(self, missing: set[int], highest: int, now: float) -> None:
        """Segments with three later arrivals, a round trip after they left: a retransmission has as long to arrive."""
        old = now - self._srtt
        lost = [
            n
            for n, left_at in self._inflight.items()
            if n in missing and n + DUPLICATE_THRESHOLD <= highest and left_at <= old
        ]
        for number in lost:
            del self._inflight[number]
            self._lost[number] = None
        if lost and max(lost) >= self._recovery:
            self._recovery = self._next
            self.control.on_loss(now)


class _TcpReceiver:
    """Counts segments and acknowledges each read."""

    def __init__(self, network: Network, host: str) -> None:
        self._port = network.port(host)
        self._port.open(self._on_batch, lambda: None)
        self.address = self._port.addresses[0]
        self.segments = 0
        self._below = 0  # all before this are here
        self._highest = -1
        self._beyond: set[int] = set()  # what is here of the others

    def close(self) -> None:
        self._port.close()

    def _on_batch(self, slabs: Sequence[Slab]) -> None:
        source: Address | None = None
        for slab in slabs:
            for part in slab.parts():
                source = part.source(0)
                for row in part.rows(0, part.count, 0, 1, np.dtype("<i8"))[:, 0].tolist():
                    self._take(row)
        if source is not None:
            self._acknowledge(source)

    def _take(self, number: int) -> None:
        if number < self._below or number in self._beyond:
            return
        self.segments += 1
        self._beyond.add(number)
        self._highest = max(self._highest, number)
        while self._below in self._beyond:
            self._beyond.remove(self._below)
            self._below += 1

    def _acknowledge(self, source: Address) -> None:
        missing = []
        for number in range(self._below, self._highest):
            if number not in self._beyond:
                missing.append(number)
                if len(missing) == MAX_MISSING:
                    break
        ack = _ACK.pack(self._below, self._highest, len(missing)) + struct.pack(f"<{len(missing)}q", *missing)
        data = np.frombuffer(ack, np.uint8)
        self._port.send(Burst(data, len(data), 0, 0, source))
