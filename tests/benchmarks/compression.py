"""What compression costs and saves: time to select, and bytes.

    nice -n 15 python -m tests.benchmarks.compression --selection [--melem 25] [--repeats 9]
    nice -n 15 python -m tests.benchmarks.compression --sizes [--ranks 4]

``--selection``: the sampled threshold and the exact selection against ``torch.topk`` of the magnitudes, at 0.1 % of so many
million elements, in turns; medians, and the median of the ratios of each turn. ``--sizes``: one step of each method on the
parameters of ResNet-50 (25.6 million), between ranks on a simulated network that loses nothing: a rank's gradient against what it
puts into its rounds, as papers count it, and against what it sends, with headers. The dense all-reduce is run with a sixteenth
of the elements and counted sixteen times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from dblp.collectives.compression.base import Bucket, Part
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.compression.rounds import Compression, Totals
from dblp.collectives.compression.selection import largest, sampled
from dblp.collectives.group import Group
from tests.collectives.worlds import run_network

SHARE = 0.001
METHODS = (
    "topk(0.001)",
    "topk(0.001,indices=delta,values=fp16)",
    "dgc(0.001)",
    "dgc(0.001,indices=delta)",
    "dgc(0.001,indices=delta,values=fp16)",
    "randomk(0.001)",
    "powersgd(4)",
    "sign",
    "int4",
    "int8",
    "fp16",
)
_SIXTEENTH = 16


def resnet50() -> list[tuple[int, ...]]:
    """Shapes of ResNet-50's parameters (He et al., 2016): 25,557,032 elements."""
    shapes: list[tuple[int, ...]] = []

    def convolution(wide: int, narrow: int, kernel: int) -> None:
        shapes.extend([(wide, narrow, kernel, kernel), (wide,), (wide,)])  # with its normalisation

    convolution(64, 3, 7)
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(width, before, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if not block:
                convolution(4 * width, before, 1)
            before = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def selection(elements: int, repeats: int) -> list[dict[str, Any]]:
    """Times of the three ways in turns."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal(elements, np.float32) * np.exp(rng.standard_normal(elements, np.float32))
    tensor, count = torch.from_numpy(values), round(elements * SHARE)
    ways: dict[str, Callable[[], Any]] = {
        "torch.topk": lambda: torch.topk(tensor.abs(), count, sorted=False),
        "sampled threshold": lambda: sampled(values, count, np.random.default_rng(2)),
        "exact": lambda: largest(values, count),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
    reference = times["torch.topk"]
    return [
        {
            "way": name,
            "elements": elements,
            "selected": count,
            "median_s": statistics.median(taken),
            "ratio": statistics.median(a / b for a, b in zip(reference, taken, strict=True)),
        }
        for name, taken in times.items()
    ]


def sizes(ranks: int) -> list[dict[str, Any]]:
    """A step of each method."""
    parts = Bucket([Part(f"p{i}", shape) for i, shape in enumerate(resnet50())])
    return [_dense(parts.size, ranks), *(_compressed(text, parts, ranks) for text in METHODS)]


def _dense(size: int, ranks: int) -> dict[str, Any]:
    async def member(group: Group) -> int:
        return (await group.all_reduce(np.ones(size // _SIXTEENTH, np.float32))).bytes_sent

    sent = _SIXTEENTH * max(run_network(member, ranks, timeout_s=600.0))
    return {"method": "none", "ranks": ranks, "payload_bytes": 4 * size, "wire_bytes": sent, "ratio": 1.0}


def _compressed(text: str, parts: Bucket, ranks: int) -> dict[str, Any]:
    async def member(group: Group) -> Totals:
        compression = Compression(parse_compression(text))
        gradient = np.random.default_rng(group.rank).standard_normal(parts.size, np.float32)
        await compression.all_reduce(group, gradient, parts, timeout_s=600.0)
        return compression.totals

    totals = run_network(member, ranks, timeout_s=600.0)[0]
    return {
        "method": text,
        "ranks": ranks,
        "payload_bytes": totals.payload_bytes,
        "wire_bytes": totals.wire_bytes,
        "ratio": totals.ratio,
    }


def _show(records: list[dict[str, Any]], console: Console) -> None:
    table = Table(*records[0])
    for record in records:
        table.add_row(*map(_cell, record.values()))
    console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--selection", action="store_true")
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--melem", type=float, default=25.0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    console = Console(width=120)
    if options.selection:
        _show(selection(round(options.melem * 1e6), options.repeats), console)
    if options.sizes:
        dense, *compressed = sizes(options.ranks)
        for record in (dense, *compressed):
            record["wire_ratio"] = dense["wire_bytes"] / record["wire_bytes"]
        _show([dense, *compressed], console)


if __name__ == "__main__":
    main()
