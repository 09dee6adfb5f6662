"""Congestion controls on a simulated bottleneck, in virtual time: the same figures each time.

    python -m tests.benchmarks.congestion [--controls delay,bbr,dctcp] [--scenarios loss,two,...] [--json]

All of it takes many minutes; ``--scenarios loss,two,incast --controls delay,bbr,dctcp`` about three.

Shares are of the link's rate, payload of chunks only (headers are 3.3 % of a datagram). ``lan``: 1 Gb/s, 0.1 ms round trip, a
buffer of 256 KiB; ``wan``: 200 Mb/s, 20 ms, 512 KiB. ``loss``: one flow at 1 % random loss, ``late``: seen from 2 s on, where
slow growth has ended; ``busy``: hosts that read every 4 ms, 300 Mb/s, a buffer of 512 KiB; ``shallow``: that read every 0.5 ms,
1 Gb/s, a buffer of 128 KiB; ``two``: the second begins 0.1 s after the first; ``incast``: 16 senders to one receiver at once;
``cubic``, ``reno``: beside a TCP-like flow.
"""

# ruff: noqa: T201

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tests.sim.flows import BUSY, LAN, SHALLOW, WAN, Share, beside_tcp, incast, lossy, two

SCENARIOS: dict[str, Callable[[str], Share]] = {
    "loss": lambda control: lossy(control, LAN, warm_up_s=0.1, seconds=0.4),
    "loss-wan": lambda control: lossy(control, WAN, warm_up_s=0.5, seconds=1.5),
    "loss-wan-late": lambda control: lossy(control, WAN, warm_up_s=2.0, seconds=1.0),
    "busy": lambda control: lossy(control, BUSY, warm_up_s=0.5, seconds=0.5, loss=0.0),
    "shallow": lambda control: lossy(control, SHALLOW, warm_up_s=0.5, seconds=0.5, loss=0.0),
    "two": lambda control: two(control, LAN, warm_up_s=0.3, seconds=0.5, apart_s=0.1),
    "incast": lambda control: incast(control, LAN, senders=16, warm_up_s=0.02, seconds=0.4),
    "cubic": lambda control: beside_tcp(control, LAN, kind="cubic", warm_up_s=0.3, seconds=0.7),
    "reno": lambda control: beside_tcp(control, LAN, kind="reno", warm_up_s=0.3, seconds=0.7),
    "cubic-wan": lambda control: beside_tcp(control, WAN, kind="cubic", warm_up_s=2.0, seconds=3.0),
}
CONTROLS = ("delay", "bbr", "dctcp", "fixed")


def record(scenario: str, control: str) -> dict[str, Any]:
    """One run as a JSON record."""
    share = SCENARIOS[scenario](control)
    rounded = {name: round(value, 6) for name, value in asdict(share).items() if name != "shares"}
    return {
        "scenario": scenario,
        "control": control,
        "shares": [round(value, 4) for value in share.shares],
        "total": round(share.total, 4),
        "jain": round(share.jain, 4),
        **rounded,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--controls", default=",".join(CONTROLS))
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--json", action="store_true", help="a record a line")
    options = parser.parse_args()
    if not options.json:
        print(
            f"{'scenario':13} {'control':7} {'flows':>6} {'Jain':>6} {'TCP':>6} {'queue':>8} {'most':>8} {'lost':>6}"
        )
    for scenario in options.scenarios.split(","):
        for control in options.controls.split(","):
            row = record(scenario, control)
            if options.json:
                print(json.dumps(row), flush=True)
                continue
            print(
                f"{scenario:13} {control:7} {row['total']:6.1%} {row['jain']:6.3f} {row['tcp']:6.1%} "
                f"{row['queue_delay_s'] * 1e3:5.2f} ms {row['peak_delay_s'] * 1e3:5.2f} ms {row['lost']:6.2%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
