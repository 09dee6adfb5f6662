"""Proof that each datagram is dropped on its own: a super-packet sent through a throw-away network, and counted there."""

from __future__ import annotations

import time

from dblp.sim.lab import namespaces
from dblp.sim.lab.network import LabNetwork
from dblp.sim.lab.topology import Topology
from dblp.transport import libc

SEGMENTS = 16
SEGMENT_BYTES = 1000
_PORT = 9
_WAIT_S = 2.0


def split_packets() -> tuple[int, int]:
    """Datagrams in the super-packet that was sent, and packets that crossed the switch.

    Raises LabError where no network can be built; a kernel without UDP_SEGMENT sends single datagrams anyway: (1, 1).
    """
    with LabNetwork(Topology(kind="star", hosts=2)) as net:
        sender, receiver = net.hosts
        with namespaces.open_socket(receiver.namespace) as inbox:  # else the kernel answers with ICMP
            inbox.bind((receiver.address, _PORT))
            before = net.counters()
            sent = _send(sender.namespace, receiver.address)
            deadline = time.monotonic() + _WAIT_S
            while True:
                crossed = (net.counters() - before).points[f"{receiver.name}_down"].forwarded
                if crossed >= sent or time.monotonic() > deadline:
                    return sent, crossed


def _send(namespace: str, address: str) -> int:
    with namespaces.open_socket(namespace) as sock:
        try:
            sock.setsockopt(libc.SOL_UDP, libc.UDP_SEGMENT, SEGMENT_BYTES)
        except OSError:
            return int(bool(sock.sendto(bytes(SEGMENT_BYTES), (address, _PORT))))
        sock.sendto(bytes(SEGMENTS * SEGMENT_BYTES), (address, _PORT))
        return SEGMENTS
