"""Traffic beside that of the ranks: UDP trains with pauses between them, from a process of its own on a host.

``traffic(rate=900mbit,on=5ms,off=20ms)`` sends at a rate for an exponential time (5 ms on average), pauses for another,
and so on. Two such senders into one link, or one beside the ranks, make real microbursts in a shallow queue.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

import numpy as np

from dblp.errors import ConfigError
from dblp.sim.lab import namespaces
from dblp.sim.lab.hosts import Host
from dblp.sim.lab.network import LabNetwork
from dblp.sim.lab.tools import LabError
from dblp.sim.lab.topology import LEAST_BPS, too_slow
from dblp.transport import libc
from dblp.transport.spec import RATE, SIZE, SPAN, TIME, Element, Parser, arg

PORT = 40009
"""UDP port that nobody reads: what is full drops, at no cost to the processor."""
_TRAIN = 32
"""Datagrams of one system call, at most."""
_END_S = 5.0


@dataclass(frozen=True, slots=True)
class Traffic(Element):
    """Times on and off are exponential, with these means; ``off=0s`` sends without a pause."""

    name: ClassVar[str] = "traffic"
    rate_bps: float = arg("rate", RATE)
    """Of UDP payload while on, bits per second."""
    on_s: float = arg("on", SPAN, default=0.005)
    off_s: float = arg("off", TIME, default=0.02)
    size_bytes: int = arg("size", SIZE, default=1400)
    """UDP payload of a datagram, bytes."""

    def __post_init__(self) -> None:
        Element.__post_init__(self)
        if self.rate_bps < LEAST_BPS:
            raise ConfigError(f"rate: {too_slow(self.rate_bps)}")

    @property
    def mean_bps(self) -> float:
        """Over on and off."""
        return self.rate_bps * self.on_s / (self.on_s + self.off_s)


def parse_traffic(text: str) -> Traffic:
    """Read one; raises ConfigError with the column of the fault."""
    parser = Parser(text, "traffic")
    start = parser.at
    if parser.take_word("traffic(...)") != Traffic.name:
        parser.fail(start, "expected traffic(rate, [on], [off], [size])")
    element = parser.take_element(start, Traffic)
    if not parser.done:
        parser.fail(parser.at, "expected the end")
    return element


class CrossTraffic:
    """Senders while a block runs; by default from each cross host of the network to its partner.

    Raises LabError if the network has no pair, or if a sender failed.
    """

    def __init__(
        self,
        net: LabNetwork,
        traffic: Traffic,
        pairs: Sequence[tuple[Host, Host]] | None = None,
        seed: int = 0,
    ) -> None:
        self._net = net
        self._traffic = traffic
        self._pairs = net.cross if pairs is None else tuple(pairs)
        self._seed = seed
        self._stack = ExitStack()
        self._senders: list[subprocess.Popen[Any]] = []
        self.sent = 0
        """Datagrams that were sent, known at the end."""
        if not self._pairs:
            raise LabError(
                "cross traffic: this network has no cross hosts. Remedy: cross = 1 in its topology"
            )

    def __enter__(self) -> CrossTraffic:
        for index, (source, target) in enumerate(self._pairs):
            sink = self._stack.enter_context(namespaces.open_socket(target.namespace))
            sink.bind((target.address, PORT))  # else the kernel would answer each datagram by ICMP
            command = [sys.executable, "-m", "dblp.sim.lab.traffic", target.address, str(self._traffic)]
            command += ["--seed", str(self._seed + index)]
            self._senders.append(self._net.popen(source, command, stdout=subprocess.PIPE, bufsize=0))
        for sender in self._senders:
            assert sender.stdout is not None
            sender.stdout.readline()  # it sends from here on; one that has failed says nothing, and its exit code does
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            for sender in self._senders:
                sender.terminate()
            codes = [self._finish(sender) for sender in self._senders]
        if kind is None and any(codes):
            raise LabError(
                f"cross traffic: senders ended with exit codes {codes}; what they said stands above"
            )

    def _finish(self, sender: subprocess.Popen[Any]) -> int:
        try:
            said, _ = sender.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            sender.kill()
            sender.communicate()
            return sender.returncode
        if sender.returncode == 0:
            self.sent += int(json.loads(said)["sent"])
        return sender.returncode


def spells(traffic: Traffic, seed: int) -> Iterator[tuple[float, float]]:
    """Times on and off in turn, seconds; the same seed gives the same."""
    rng = np.random.default_rng(seed)
    while True:
        yield float(rng.exponential(traffic.on_s)), float(rng.exponential(traffic.off_s))


class _Sender:
    """Sends trains at a rate; a stall is not caught up with, since the burst would be another one then."""

    def __init__(self, traffic: Traffic, address: str) -> None:
        self.sent = 0
        self._traffic = traffic
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.connect((address, PORT))
        self._count = max(1, min(_TRAIN, 65507 // traffic.size_bytes))
        try:
            self._sock.setsockopt(libc.SOL_UDP, libc.UDP_SEGMENT, traffic.size_bytes)
        except OSError:  # an old kernel: one datagram a call
            self._count = 1
        self._train = bytes(self._count * traffic.size_bytes)
        self._every_s = 8 * len(self._train) / traffic.rate_bps

    def run(self, seed: int) -> None:
        """Until KeyboardInterrupt, which ends a pause of any length."""
        for on_s, off_s in spells(self._traffic, seed):
            self._send_for(on_s)
            time.sleep(off_s)

    def _send_for(self, span_s: float) -> None:
        now = time.monotonic()
        end, due = now + span_s, now
        while due < end:
            time.sleep(max(0.0, due - time.monotonic()))
            self._send()
            due = max(due + self._every_s, time.monotonic() - self._every_s)

    def _send(self) -> None:
        self.sent += self._count  # before, since the end may come between: what left has been counted
        try:
            self._sock.send(self._train)
        except (ConnectionRefusedError, BlockingIOError):
            self.sent -= self._count  # the sink is gone at the end


def main(arguments: Sequence[str] | None = None) -> None:
    """Say that sending begins, send until SIGTERM or Ctrl-C, then print how many datagrams were sent, as JSON."""
    parser = argparse.ArgumentParser(prog="python -m dblp.sim.lab.traffic")
    parser.add_argument("address")
    parser.add_argument("traffic", type=parse_traffic)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    sender = _Sender(options.traffic, options.address)
    with suppress(KeyboardInterrupt):
        sys.stdout.write("sending\n")
        sys.stdout.flush()
        sender.run(options.seed)
    sys.stdout.write(json.dumps({"sent": sender.sent}) + "\n")


if __name__ == "__main__":
    main()
