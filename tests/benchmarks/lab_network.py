"""What the lab's networks cost and how true they are: ``python -m tests.benchmarks.lab_network`` (root).

Times to build, change, count and remove; and a rate held by tbf, as share of what was asked.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from dblp.sim.lab import means
from dblp.sim.lab.impairments import parse_conditions
from dblp.sim.lab.network import LabNetwork
from dblp.sim.lab.topology import load_topology, shipped
from dblp.sim.lab.traffic import CrossTraffic, Traffic

REPEATS = 20
RATE_SECONDS = 3.0
HEADERS_BYTES = 14 + 20 + 8
"""Ethernet, IP, UDP: tbf counts them."""
SIZE_BYTES = 1400


def main() -> None:
    """Print a table, then the rates."""
    say("topology       build    apply  counters   remove   (seconds; median of 20 for apply and counters)")
    for name in shipped():
        changes = {"core_delay": 0} if name == "two-sites" and not means.detect().netem else {}
        start = time.perf_counter()
        with LabNetwork(load_topology(name, **changes)) as net:
            build = time.perf_counter() - start
            texts = ["loss(1%)", ""] * (REPEATS // 2)
            apply = [timed(lambda text=text: net.apply(parse_conditions(text))) for text in texts]  # type: ignore[misc]
            count = [timed(net.counters) for _ in range(REPEATS)]
            end = time.perf_counter()
        remove = time.perf_counter() - end
        say(
            f"{name:12} {build:7.3f}  {statistics.median(apply):7.4f}   {statistics.median(count):7.4f}  {remove:7.3f}"
        )
    for rate in (1e7, 1e8, 1e9):
        say(f"tbf {rate / 1e6:6.0f} Mbit/s: {held(rate):.3f} of the rate")


def held(rate_bps: float) -> float:
    """Bits that pass the core a second under twice its rate, over that rate."""
    topology = load_topology(
        "dumbbell", hosts=2, core_rate=rate_bps, rate=0, core_queue=max(131072, round(rate_bps / 8 * 0.02))
    )
    with LabNetwork(topology) as net, CrossTraffic(net, Traffic(2 * rate_bps, 1.0, 0.0, SIZE_BYTES)):
        time.sleep(1.0)  # the sender's start
        before, start = net.counters(), time.monotonic()
        time.sleep(RATE_SECONDS)
        spent, elapsed = net.counters() - before, time.monotonic() - start
    packets = spent.points["core_up"].forwarded
    return packets * 8 * (SIZE_BYTES + HEADERS_BYTES) / elapsed / rate_bps


def timed(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
