"""What taking the remnants of broken bursts together saves the receiver.

    python -m tests.benchmarks.remnants [--repeats 40] [--json FILE]

A batch of 30 bursts of one awaited message, of which a share of the datagrams was lost: the kernel coalesces what is left between
two losses. The core takes it with and without ``dblp.transport.remnants``, in turn; the least time of each and their ratio.
Chunks are copied to their places and nothing is added, so what adding costs is not in it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dblp.cli.host import document, write_json
from dblp.transport import remnants
from dblp.units import format_seconds
from tests.transport.cores import numbers
from tests.transport.test_receive_paths import PER_BURST, World, stream
from tests.transport.test_remnants import arena_of, kept

BURSTS = 30
LOSSES = (0.0, 0.01, 0.02, 0.05, 0.3, 0.8)


def take(share: float) -> tuple[float, int]:
    """Seconds that a core takes for a batch, and its slabs."""
    data = numbers(BURSTS * PER_BURST)
    world, slabs = World(data, scatter=True), arena_of(kept(stream(data), share))
    began = time.perf_counter()
    world.hand_over(slabs)
    return time.perf_counter() - began, len(slabs)


def measure(share: float, repeats: int) -> dict[str, float]:
    """Both ways in turn."""
    least, times = remnants.LEAST_REMNANTS, {"together": float("inf"), "apart": float("inf")}
    try:
        for _ in range(repeats):
            for way, slabs in (("together", least), ("apart", 1 << 30)):
                remnants.LEAST_REMNANTS = slabs
                seconds, count = take(share)
                times[way] = min(times[way], seconds)
    finally:
        remnants.LEAST_REMNANTS = least
    return {
        "loss": share,
        "slabs": count,
        "together_s": times["together"],
        "apart_s": times["apart"],
        "ratio": times["apart"] / times["together"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    records = [measure(share, options.repeats) for share in LOSSES]
    table = Table("loss", "slabs", "one by one", "together", "ratio")
    for row in records:
        seconds = [format_seconds(row[way]) for way in ("apart_s", "together_s")]
        table.add_row(f"{row['loss']:.0%}", str(row["slabs"]), *seconds, f"{row['ratio']:.2f}")
    Console().print(table)
    if options.json is not None:
        write_json(options.json, document("remnants", records))


if __name__ == "__main__":
    main()
