"""Numbered datagrams from host to host, and which of them came; who may run these tests."""

from __future__ import annotations

import functools
import socket
import threading
import time

import numpy as np
import pytest

from dblp.sim.lab import means, namespaces, preflight
from dblp.sim.lab.hosts import Host
from dblp.sim.lab.tools import LabError
from dblp.transport import libc

PORT = 5555
SIZE_BYTES = 200
_TRAIN = 32
_PAUSE_S = 0.0005
_QUIET_S = 0.5
"""Longer than any packet is under way here."""
_RECEIVE_BUFFER = 64 * 2**20


@functools.cache
def why_not() -> str:
    """Why no laboratory can run here; empty if one can."""
    try:
        preflight.require()
    except LabError as error:
        return str(error)
    return ""


needs_lab = pytest.mark.skipif(bool(why_not()), reason=why_not() or "a laboratory can run here")
needs_loss = pytest.mark.skipif(
    bool(why_not()) or not means.detect().loss, reason=why_not() or "no means of loss"
)


def send(source: Host, target: Host, count: int, *, quiet_s: float = _QUIET_S):
    """Send ``count`` numbered datagrams, paced; the numbers that came, in order of arrival."""
    came: list[int] = []
    with namespaces.open_socket(target.namespace) as inbox, namespaces.open_socket(source.namespace) as out:
        inbox.setsockopt(socket.SOL_SOCKET, libc.SO_RCVBUFFORCE, _RECEIVE_BUFFER)
        inbox.bind((target.address, PORT))
        out.connect((target.address, PORT))
        done = threading.Event()
        reader = threading.Thread(target=_read, args=(inbox, came, done, quiet_s))
        reader.start()
        for first in range(0, count, _TRAIN):
            for number in range(first, min(first + _TRAIN, count)):
                out.send(number.to_bytes(4, "big") + bytes(SIZE_BYTES - 4))
            time.sleep(_PAUSE_S)
        done.set()
        reader.join()
    return np.array(came, np.int64)


def missing(source: Host, target: Host, count: int, **options):
    """Which of ``count`` datagrams did not come."""
    lost = np.ones(count, np.bool_)
    lost[send(source, target, count, **options)] = False
    return lost


def mean_run(lost) -> float:
    """Mean number of datagrams lost in a row."""
    starts = np.flatnonzero(np.diff(np.concatenate(([0], lost.astype(np.int8)))) == 1)
    return float(lost.sum() / len(starts))


def _read(inbox: socket.socket, came: list[int], done: threading.Event, quiet_s: float) -> None:
    inbox.settimeout(quiet_s)
    while True:
        try:
            came.append(int.from_bytes(inbox.recv(2048)[:4], "big"))
        except TimeoutError:
            if done.is_set():
                return
