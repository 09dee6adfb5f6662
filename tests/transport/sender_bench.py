"""A bench for one peer's sender: it is told literal times, and gets feedback that a test makes by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dblp.transport import wire
from dblp.transport.backlog import Backlog
from dblp.transport.burst import BurstBuffer
from dblp.transport.config import TransportConfig
from dblp.transport.message import message_id
from dblp.transport.send_path import PACKET_OVERHEAD_BYTES
from dblp.transport.sender import PeerSender
from dblp.transport.wire import Type
from tests.transport.cores import CHUNK, address, numbers, spec_of, split

WINDOW = 1 << 20
COST = CHUNK + 48 + PACKET_OVERHEAD_BYTES
RTT_S = 10e-3


class Bench:
    """A sender, what it sent, and feedback made by hand."""

    def __init__(
        self,
        *,
        window: int = WINDOW,
        early: int = 1 << 20,
        paths: int = 1,
        congestion: str = "fixed",
        copies: int = 8,
        repair: str = "evidence",
    ) -> None:
        self.ended = 0
        self.backlog = Backlog()
        self.peer_behind_us = 0
        self.sender = PeerSender(
            rank=0,
            session=1,
            addresses=[address(1, path) for path in range(paths)],
            window_bytes=window,
            config=TransportConfig(congestion=congestion, paths=paths, copies=copies, repair=repair),
            backlog=self.backlog,
            buffer=BurstBuffer(),
            watermark=lambda group: self.ended,
            datagram_bytes=1464,
        )
        self.sender.outbox.early_bytes = early
        self.feedbacks = 0
        self.now = 100.0
        self.outcomes: list[object] = []

    @property
    def path(self):
        return self.sender.paths[0]

    def send(
        self, data: np.ndarray, *, budget: float = 0.0, number: int = 0, step: int = 0, offered: bool = True
    ):
        spec = spec_of(data, budget)
        out = self.sender.send(
            message_id(0, number, step), spec, data.view(np.uint8), b"s", 0.0, offered=offered
        )
        out.on_done = self.outcomes.append
        out.portion = 1  # what is offered leaves, however little it is
        return out

    def leave(self, most: int = 10_000) -> list[wire.Header]:
        """Headers of all that leaves now, at most ``most`` bursts."""
        headers: list[wire.Header] = []
        while most and (burst := self.sender.next_burst(self.now)) is not None:
            headers += [wire.decode_header(datagram) for datagram in split(burst)]
            most -= 1
        return headers

    def feedback(
        self,
        *arrived: wire.Header,
        sent_s: float | None = None,
        window: int = WINDOW,
        asked: bool = False,
        grants: Sequence[tuple[int, int]] = (),
        number: int | None = None,
    ) -> None:
        """The peer says now that these datagrams have come, the last of them sent at ``sent_s``."""
        spaces = []
        for cls in sorted({header.cls & 3 for header in arrived}):
            bursts = [(h.burst, h.position) for h in arrived if h.cls & 3 == cls]
            base = min(burst for burst, _ in bursts)
            masks = 0
            for burst, position in bursts:
                masks |= 1 << (64 * (burst - base) + position)
            spaces.append(wire.Space(cls, base, max(burst for burst, _ in bursts) - base + 1, masks))
        echo = wire.clock_us(self.now - RTT_S if sent_s is None else sent_s)
        if number is None:
            number = self.feedbacks
            self.feedbacks += 1
        report = wire.Feedback(
            echo, 0, window, asked, tuple(grants), tuple(spaces), behind_us=self.peer_behind_us
        )
        self.sender.on_feedback(0, number, report, self.now, self.now)

    def timer(self, at: float) -> None:
        self.now = at
        self.sender.on_timer(at)


def data_of(headers: list[wire.Header]) -> list[wire.Header]:
    return [header for header in headers if header.type == Type.DATA]


def warm(bench: Bench) -> None:
    """A first round trip of ``RTT_S``."""
    bench.send(numbers(1), number=0, step=9)
    headers = bench.leave()
    bench.now += RTT_S
    bench.feedback(*headers)
    bench.sender.on_final(message_id(0, 0, 9), wire.Final(0, 1, b""), bench.now)
    assert bench.path.srtt == pytest.approx(RTT_S, rel=0.01)


def send_bursts(bench: Bench, count: int, **options: Any):
    """``count`` bursts of 4 chunks, a millisecond apart."""
    out = bench.send(numbers(4 * count), offered=False, **options)
    headers = []
    for at in range(count):
        out.offer(4 * at, 4)
        headers.append(data_of(bench.leave()))
        bench.now += 1e-3
    return out, headers
