"""``python -m tests.benchmarks.calls_per_burst``: Python calls of the transport per burst, by function.

One clean all-reduce of 16 MiB by two ranks in virtual time, both ranks counted together. Counts do not depend on the
machine's speed: a loop per datagram would show as 44 calls a burst or more.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
from pathlib import Path
from typing import TextIO

from dblp.sim.loop import run
from dblp.transport.burst import burst_chunks
from tests.transport.test_calls_per_burst import ELEMENTS, exchange

SHOWN = 16


def main(out: TextIO = sys.stdout) -> None:
    """Print the table."""
    profile = cProfile.Profile()
    profile.enable()
    _, chunks = run(exchange(ELEMENTS, count=False))
    profile.disable()
    bursts = 2 * chunks / burst_chunks(1408)  # both rounds of the exchange are in the profile
    rows = []
    for (file, line, name), (_, calls, *_rest) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        path = Path(file)
        if path.parent.name in ("transport", "congestion") and "impair" not in path.name:
            rows.append((calls / bursts, f"{path.name}:{line} {name}"))
    rows.sort(reverse=True)
    out.write(f"{chunks} chunks in {bursts / 2:.0f} bursts a round\n\n calls a burst  function\n")
    for calls, name in rows[:SHOWN]:
        out.write(f"{calls:14.2f}  {name}\n")
    out.write(f"{sum(calls for calls, _ in rows):14.2f}  all {len(rows)} functions of the transport\n")


if __name__ == "__main__":
    main()
