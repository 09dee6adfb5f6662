"""Throughput of the randomised Hadamard transform on this host, beside a copy of the same tensor.

    python tests/benchmarks/hadamard.py [--sizes 1M,25M,100M] [--threads 1] [--repeats 7] [--json FILE]

Rates are bytes of the tensor over the best time of the repeats; ``error`` is the largest difference after there and back,
over the tensor's root mean square.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
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


def best_s(run: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest run, after one that warms up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", default="1M,25M,100M")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    records = [
        measure(size, dtype, options.repeats) for dtype in DTYPES for size in parse_sizes(options.sizes)
    ]
    table = Table("dtype", "size", "copy MB/s", "rotate MB/s", "unrotate MB/s", "error")
    for record in records:
        rates = [f"{record[name]:.0f}" for name in ("copy_mb_s", "rotate_mb_s", "unrotate_mb_s")]
        table.add_row(record["dtype"], format_bytes(record["bytes"]), *rates, f"{record['error']:.1e}")
    Console().print(table)
    if options.json is not None:
        write_json(options.json, document("hadamard", records, options={"threads": options.threads}))


if __name__ == "__main__":
    main()
