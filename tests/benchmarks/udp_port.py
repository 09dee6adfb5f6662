"""Cost of the UDP port on loopback: microseconds a burst, and MB/s through send and receive in one thread.

    python tests/benchmarks/udp_port.py [--json FILE] [--rounds N]

Three tables: what Python adds to a burst (the system calls replaced by nothing), what a burst costs with them, and the
throughput of an engine thread with the main thread idle or busy in pure Python, with the GIL kept or given up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from dblp.transport import libc
from dblp.transport.config import TransportConfig
from dblp.transport.port import Burst, Slab
from dblp.transport.udp import UdpPort, open_port
from dblp.transport.udp_send import Way

SEGMENT, COUNT = 1456, 44
BURST_BYTES = SEGMENT * COUNT
BATCH = 8
"""Bursts between two drains: 0.5 MB, well inside the receive buffer also where singles are charged 2.3 KB each."""
CONFIG = TransportConfig()


def _ports(way: Way, calls: libc.Calls) -> tuple[UdpPort, UdpPort, Burst]:
    sender, receiver = (open_port(CONFIG, way=way, calls=calls) for _ in range(2))
    data = libc.aligned(BURST_BYTES)
    burst = Burst(data, SEGMENT, 0, 1, receiver.addresses[0], libc.address_of(data))
    return sender, receiver, burst


async def _cost(way: Way, calls: libc.Calls, rounds: int) -> dict[str, Any]:
    """Median microseconds of CPU time a burst: to send it, and in the reading callback."""
    sender, receiver, burst = _ports(way, calls)
    got = 0

    def on_batch(slabs: Any) -> None:
        nonlocal got
        got += sum(slab.count for slab in slabs)

    receiver.open(on_batch, lambda: None)
    path = receiver._paths[0]  # the callback without the loop's own cost
    sends, receives = [], []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(BATCH):
            sender.send(burst)
        middle = time.thread_time()
        receiver._readable(path)
        stop = time.thread_time()
        while got % (BATCH * COUNT):
            receiver._readable(path)
        sends.append((middle - start) / BATCH)
        receives.append((stop - middle) / BATCH)
    assert got == rounds * BATCH * COUNT, f"{got} datagrams of {rounds * BATCH * COUNT} arrived"
    for port in (sender, receiver):
        port.close()
    return {
        "table": "cost",
        "way": way.name,
        "send_us": 1e6 * statistics.median(sends),
        "receive_us": 1e6 * statistics.median(receives),
    }


def _null_calls() -> libc.Calls:
    return libc.Calls(lambda *_: BURST_BYTES, lambda fd, at, count, flags: count, lambda *_: -1)


async def _python_cost(way: Way, rounds: int) -> dict[str, Any]:
    """Median microseconds of CPU time that send() itself takes, with system calls that do nothing."""
    sender, receiver, burst = _ports(way, _null_calls())
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(BATCH):
            sender.send(burst)
        times.append((time.thread_time() - start) / BATCH)
    for port in (sender, receiver):
        port.close()
    return {"table": "python", "way": way.name, "send_us": 1e6 * statistics.median(times)}


async def _stream(way: Way, calls: libc.Calls, seconds: float) -> float:
    """MB/s of a loop that sends a batch whenever the one before has arrived."""
    sender, receiver, burst = _ports(way, calls)
    arrived, credit = 0, asyncio.Event()

    def on_batch(slabs: list[Slab]) -> None:
        nonlocal arrived
        arrived += sum(slab.count for slab in slabs)
        credit.set()

    receiver.open(on_batch, lambda: None)  # type: ignore[arg-type]
    sender.open(lambda slabs: None, credit.set)
    stop = time.perf_counter() + seconds
    sent, start = 0, time.perf_counter()
    while time.perf_counter() < stop:
        credit.clear()
        while sent - arrived < 2 * BATCH * COUNT and sender.send(burst):
            sent += COUNT
        await credit.wait()
    elapsed = time.perf_counter() - start
    for port in (sender, receiver):
        port.close()
    return arrived * SEGMENT / elapsed / 1e6


def _in_thread(job: Callable[[], float], busy: bool) -> float:
    """Run ``job`` in a thread; meanwhile the main thread waits or computes in pure Python."""
    result: list[float] = []
    thread = threading.Thread(target=lambda: result.append(job()))
    thread.start()
    total = 0
    while busy and thread.is_alive():
        for number in range(1000):
            total += number * number
    thread.join()
    return result[0]


def _throughput(way: Way, hold_gil: bool, busy: bool, interval_s: float, seconds: float) -> dict[str, Any]:
    calls = libc.load(hold_gil=hold_gil)
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    try:
        rate = _in_thread(lambda: uvloop.run(_stream(way, calls, seconds)), busy)
    finally:
        sys.setswitchinterval(before)
    return {
        "table": "throughput",
        "way": way.name,
        "gil": "kept" if hold_gil else "released",
        "main_thread": "busy" if busy else "idle",
        "switch_interval_us": 1e6 * interval_s,
        "mb_per_s": rate,
    }


def measure(rounds: int, seconds: float) -> list[dict[str, Any]]:
    """All records, flat."""
    ways = (Way.GSO, Way.SENDMMSG)
    records = [asyncio.run(_python_cost(way, rounds)) for way in ways]
    records += [asyncio.run(_cost(way, libc.load(), rounds)) for way in ways]
    cases = [(False, 5e-3), (True, 5e-3), (True, 50e-6)]
    records += [
        _throughput(way, hold, busy, interval, seconds)
        for way in ways
        for busy, interval in cases
        for hold in (True, False)
    ]
    return records


def show(records: list[dict[str, Any]]) -> None:
    """Print one table a kind of record."""
    console = Console()
    for kind in ("python", "cost", "throughput"):
        rows = [record for record in records if record["table"] == kind]
        columns = [name for name in rows[0] if name != "table"]
        table = Table(*columns, title=f"{kind}: bursts of {COUNT} x {SEGMENT} bytes")
        for row in rows:
            cells = [row[name] for name in columns]
            table.add_row(*(f"{cell:,.2f}" if isinstance(cell, float) else str(cell) for cell in cells))
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    records = measure(arguments.rounds, arguments.seconds)
    show(records)
    if arguments.json:
        host = {"kernel": platform.release(), "cores": os.cpu_count(), "numpy": np.__version__}
        document = {"command": "benchmark udp_port", "version": "1", "host": host, "records": records}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
