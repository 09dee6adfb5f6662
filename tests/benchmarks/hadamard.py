"""The randomised Hadamard transform: what it costs on this host, beside a copy of the same tensor, and what a loss becomes.

    python -m tests.benchmarks.hadamard [--sizes 1M,25M,100M] [--threads 1] [--repeats 7] [--only cost|dispersal] [--json FILE]

Cost: bytes of the tensor over processor time, the best of the repeats: on an idle host, the time of one thread. ``error`` is
the largest difference after there and back, over the tensor's root mean square.

Dispersal: a tenth of the chunks is filled with zeros, at random or in one run (the tail of a tensor that a deadline cut off).
Printed is the mean squared error over the mean square of the tensor, over ``SEEDS`` draws: mean, and at most. ``even``: all
elements are normal; ``one layer``: a hundredth of the tensor, at its end, holds all but a ten-thousandth of the energy.
OptiReduce (NSDI'25) has a toy example of its own, from 2.53 to 0.01, unlike in set-up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from dblp.cli.host import document, write_json
from dblp.cli.options import parse_sizes
from dblp.collectives.torch.hadamard import rotate_, unrotate_
from dblp.units import format_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
ELEMENTS = 1 << 20
CHUNK = 352
"""Elements of a chunk: the float32 payload of a datagram for an MTU of 1500."""
LOST = 0.1
SEEDS = 20


def best_s(run: Callable[[], Any], repeats: int) -> float:
    """Processor seconds of the fastest run, after one that warms up."""
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times[1:])


def measure(size: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """One record: a tensor of ``size`` bytes."""
    length = size // dtype.itemsize
    tensor = torch.from_numpy(np.random.default_rng(0).standard_normal(length)).to(dtype)
    before, target = tensor.clone(), torch.empty_like(tensor)
    error = unrotate_(rotate_(tensor, 1), 1).double() - before.double()
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "bytes": length * dtype.itemsize,
        "copy_mb_s": size / 1e6 / best_s(lambda: target.copy_(before), repeats),
        "rotate_mb_s": size / 1e6 / best_s(lambda: rotate_(tensor, 1), repeats),
        "unrotate_mb_s": size / 1e6 / best_s(lambda: unrotate_(tensor, 1), repeats),
        "error": float(error.abs().max()),
    }


def gradient(kind: str, rng: np.random.Generator) -> torch.Tensor:
    """A tensor of ``ELEMENTS`` normal numbers; of ``one layer`` all but the last hundredth are scaled down."""
    values = rng.standard_normal(ELEMENTS, np.float32)
    if kind == "one layer":
        values[: -ELEMENTS // 100] *= 1e-3
    return torch.from_numpy(values)


def lose(tensor: torch.Tensor, how: str, rng: np.random.Generator) -> None:
    """Fill a tenth of the chunks of ``tensor`` with zeros, in place."""
    chunks = -(-len(tensor) // CHUNK)
    number = round(LOST * chunks)
    for index in rng.permutation(chunks)[:number] if how == "random" else range(chunks - number, chunks):
        tensor[index * CHUNK : (index + 1) * CHUNK] = 0


def disperse(kind: str, how: str) -> dict[str, Any]:
    """One record: errors without and with the transform."""
    errors: dict[str, list[float]] = {"plain": [], "rotated": []}
    for seed in range(SEEDS):
        for arm, values in errors.items():
            rng = np.random.default_rng(seed)  # the same tensor and the same chunks for both
            tensor = gradient(kind, rng)
            received = tensor.clone() if arm == "plain" else rotate_(tensor.clone(), seed)
            lose(received, how, rng)
            if arm == "rotated":
                unrotate_(received, seed)
            values.append(float((received - tensor).square().mean() / tensor.square().mean()))
    return {"gradient": kind, "lost": how, **errors}


def dispersal(console: Console) -> list[dict[str, Any]]:
    """Measure and print."""
    records = [disperse(kind, how) for kind in ("even", "one layer") for how in ("random", "run")]
    table = Table(title=f"{LOST:.0%} of the chunks lost: mean squared error over mean square (at most)")
    for column in ("gradient", "lost", "plain", "rotated"):
        table.add_column(column, justify="right")
    for record in records:
        cells = [
            f"{statistics.mean(record[arm]):.4f} ({max(record[arm]):.4f})" for arm in ("plain", "rotated")
        ]
        table.add_row(record["gradient"], record["lost"], *cells)
    console.print(table)
    return records


def costs(sizes: Sequence[int], repeats: int, console: Console) -> list[dict[str, Any]]:
    """Measure and print."""
    records = [measure(size, dtype, repeats) for dtype in DTYPES for size in sizes]
    table = Table("dtype", "size", "copy MB/s", "rotate MB/s", "unrotate MB/s", "error")
    for record in records:
        rates = [f"{record[name]:.0f}" for name in ("copy_mb_s", "rotate_mb_s", "unrotate_mb_s")]
        table.add_row(record["dtype"], format_bytes(record["bytes"]), *rates, f"{record['error']:.1e}")
    console.print(table)
    return records


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="1M,25M,100M")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", choices=("cost", "dispersal"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console, records = Console(width=120), []
    if options.only != "cost":
        records += dispersal(console)
    if options.only != "dispersal":
        records += costs(parse_sizes(options.sizes), options.repeats, console)
    if options.json is not None:
        write_json(options.json, document("hadamard", records, options={"threads": options.threads}))


if __name__ == "__main__":
    main()
