"""``python -m tests.benchmarks.cuda``: tensors on a GPU, on a machine that has one: correctness, overlap, throughput beside gloo.

Two ranks on one device. Three parts: every dtype through every kind of call (those that add up for dtypes that can be added),
compared with what it must be; an all-reduce beside matrix products, with the share of its copies that the profiler saw under the
computation; and the throughput of an all-reduce of 100 MiB, dblp and gloo in turns. Without a GPU it says so and ends with 2;
``--device cpu`` tries the script itself on the host.
"""

# mypy: disable-error-code="attr-defined"
# torch.distributed's stubs miss names that it exports.

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import socket
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

WORLD_SIZE = 2
DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
"""What can be reduced."""
MOVED = ("float8_e4m3fn", "float8_e5m2")
"""What can only be moved."""
SIZES = (0, 1, 1000, 100_003)
"""Elements of a tensor."""
LARGE = 3_000_001
"""Elements of float32 that are cut into segments."""
MIB = 1 << 20
NO_GPU = 2
"""Exit code where there is no GPU."""


def _init(backend: str, rank: int, port: int) -> None:
    import torch.distributed as dist

    import dblp.collectives.torch.autoload

    dblp.collectives.torch.autoload.autoload()
    store = dist.TCPStore("127.0.0.1", port, WORLD_SIZE, is_master=rank == 0)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=120)
    )


def check_calls(rank: int, device: str) -> dict[str, Any]:
    """Every dtype and size through every kind of call; what was wrong."""
    import torch

    wrong, cells = [], 0
    for name in (*DTYPES, *MOVED):
        for size in SIZES:
            mine = torch.full((size,), rank + 1, device=device).to(getattr(torch, name))
            found = _moving(rank, mine) | (_reducing(rank, mine) if name in DTYPES else {})
            cells += len(found)
            wrong += [f"{call} of {size} {name}" for call, right in found.items() if not right]
    large = torch.full((LARGE,), rank + 1.0, device=device)
    found = {"all_reduce in segments": _all_reduced(large), "sparse all_reduce": _sparse(rank, device)}
    wrong += [call for call, right in found.items() if not right]
    return {"cells": cells + len(found), "wrong": wrong}


def _holds(tensor: Any, *values: float) -> bool:
    """Whether a tensor's parts, of the same length, have these values; compared on the host, where every dtype can be."""
    import torch

    expected = torch.tensor(values).to(tensor.dtype).to(torch.complex128).view(-1, 1)
    found = tensor.cpu().to(torch.complex128).view(len(values), tensor.numel() // len(values))
    return bool((found == expected).all())


def _moving(rank: int, mine: Any) -> dict[str, bool]:
    """The calls that move a tensor, whose content is the rank and one."""
    import torch
    import torch.distributed as dist

    def empty(count: int = WORLD_SIZE) -> list[Any]:
        return [torch.zeros_like(mine) for _ in range(count)]

    each = range(1, WORLD_SIZE + 1)
    root, moved = mine.clone(), mine.clone()
    gathered, at_root, exchanged, (part,) = empty(), empty(), empty(), empty(1)
    whole, swapped = mine.repeat(WORLD_SIZE), mine.repeat(WORLD_SIZE)
    dist.broadcast(root, 1)
    dist.all_gather(gathered, mine)
    dist.all_gather_into_tensor(whole, mine)
    dist.gather(mine, at_root if rank == 1 else None, dst=1)
    dist.scatter(part, [mine.clone() for _ in each] if rank == 1 else None, src=1)
    dist.all_to_all(exchanged, [mine.clone() for _ in each])
    dist.all_to_all_single(swapped, mine.repeat(WORLD_SIZE))
    (dist.send if rank else dist.recv)(moved, 1 - rank)
    lists = {"all_gather": gathered, "all_to_all": exchanged} | ({"gather": at_root} if rank == 1 else {})
    return {
        "broadcast": _holds(root, 2),
        "all_gather_into_tensor": _holds(whole, *each),
        "scatter": _holds(part, 2),
        "all_to_all_single": _holds(swapped, *each),
        "transfer": _holds(moved, 2),
        **{call: all(map(_holds, parts, each)) for call, parts in lists.items()},
    }


def _reducing(rank: int, mine: Any) -> dict[str, bool]:
    """The calls that add up."""
    import torch
    import torch.distributed as dist

    total, each = sum(range(1, WORLD_SIZE + 1)), range(WORLD_SIZE)
    at_root, part, of_whole = mine.clone(), torch.zeros_like(mine), torch.zeros_like(mine)
    dist.reduce(at_root, 0)
    dist.reduce_scatter(part, [mine.clone() for _ in each])
    dist.reduce_scatter_tensor(of_whole, mine.repeat(WORLD_SIZE))
    several = [mine.clone() for _ in each]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in several:
            dist.all_reduce(tensor)
    manager.wait()
    return {
        "all_reduce": _all_reduced(mine.clone()),
        "reduce": rank != 0 or _holds(at_root, total),
        "reduce_scatter": _holds(part, total),
        "reduce_scatter_tensor": _holds(of_whole, total),
        "coalesced all_reduce": all(_holds(tensor, total) for tensor in several),
    }


def _all_reduced(tensor: Any) -> bool:
    import torch.distributed as dist

    dist.all_reduce(tensor)
    return _holds(tensor, sum(range(1, WORLD_SIZE + 1)))


def _sparse(rank: int, device: str) -> bool:
    """Rank r has rows 0 to r; the sum is read on a stream of its own, which has to wait for it."""
    import torch
    import torch.distributed as dist

    with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext():
        rows, values = torch.arange(rank + 1, device=device), torch.ones(rank + 1, 1000, device=device)
        size = (WORLD_SIZE, 1000)
        tensor = torch.sparse_coo_tensor(rows.view(1, -1), values, size, check_invariants=False)
        dist.all_reduce(tensor)
        return _holds(tensor.to_dense(), *range(WORLD_SIZE, 0, -1))


def check_overlap(rank: int, device: str, mib: int) -> dict[str, Any]:
    """Matrix products while an all-reduce is under way: seconds of each alone and of both, and what the profiler saw."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    tensor = torch.ones(mib * MIB // 4, device=device)
    square = torch.ones(4096 if device == "cuda" else 256, 4096 if device == "cuda" else 256, device=device)

    def settle() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def compute() -> None:
        for _ in range(60):
            torch.mm(square, square)

    def timed(*, reduce: bool, computed: bool) -> float:
        settle()
        dist.barrier()
        begun = time.perf_counter()
        work = dist.all_reduce(tensor, async_op=True) if reduce else None
        if computed:
            compute()
        if work is not None:
            work.wait()
        settle()
        return time.perf_counter() - begun

    timed(reduce=True, computed=True)
    seconds = {
        "reduce": timed(reduce=True, computed=False),
        "compute": timed(reduce=False, computed=True),
        "both": timed(reduce=True, computed=True),
    }
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiled:
        timed(reduce=True, computed=True)
    hidden = (seconds["reduce"] + seconds["compute"] - seconds["both"]) / min(
        seconds["reduce"], seconds["compute"]
    )
    return {**seconds, "hidden_share": hidden, "copies": copies_under(profiled.events())}


def copies_under(events: Any) -> dict[str, float]:
    """Of the copies between host and device, microseconds in all and beside a kernel, as the profiler's device events tell."""
    device_events = [event for event in events if str(event.device_type).endswith("CUDA")]
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in device_events]
    kernels = [(start, end) for name, start, end in spans if not name.lower().startswith("mem")]
    total = beside = 0.0
    for name, start, end in spans:
        if not name.lower().startswith("memcpy"):
            continue
        total += end - start
        beside += sum(max(0.0, min(end, stop) - max(start, begin)) for begin, stop in kernels)
    return {"total_us": total, "beside_kernels_us": beside}


def measure(device: str, mib: int, rounds: int) -> float:
    """Bytes a second of an all-reduce, the median."""
    import torch
    import torch.distributed as dist

    tensor = torch.ones(mib * MIB // 4, device=device)
    seconds = []
    for _ in range(rounds + 2):
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(tensor)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        tensor.fill_(1.0)
    return tensor.nbytes / statistics.median(seconds[2:])


def _rank(pipe: Any, backend: str, part: str, rank: int, port: int, options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    if options.device == "cuda":
        torch.cuda.set_device(0)
    _init(backend, rank, port)
    if part == "calls":
        result: Any = check_calls(rank, options.device)
    elif part == "overlap":
        result = check_overlap(rank, options.device, options.mib)
    else:
        result = measure(options.device, options.mib, options.rounds)
    dist.destroy_process_group()
    pipe.send(result)


def run_part(backend: str, part: str, options: argparse.Namespace) -> list[Any]:
    """Run a part on both ranks; their results. Raises RuntimeError if a rank dies."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ends, ranks = [], []
    for rank in range(WORLD_SIZE):
        ours, theirs = context.Pipe()
        ranks.append(context.Process(target=_rank, args=(theirs, backend, part, rank, port, options)))
        ranks[-1].start()
        theirs.close()
        ends.append(ours)
    try:
        results = [end.recv() for end in ends]
    except EOFError:
        results = []
    for process in ranks:
        process.join()
    if not results or any(process.exitcode for process in ranks):
        raise RuntimeError(f"{part} on {backend}: exit codes {[process.exitcode for process in ranks]}")
    return results


def main() -> None:
    """Run all parts, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--mib", type=int, default=100, help="MiB of the all-reduce")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each of five turns")
    parser.add_argument("--turns", type=int, default=5, help="turns of dblp and gloo")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("there is no GPU here; --device cpu tries the script itself\n")
        sys.exit(NO_GPU)
    calls = run_part("dblp", "calls", options)
    overlap = run_part("dblp", "overlap", options)
    rates = [
        {backend: run_part(backend, "rate", options)[0] for backend in ("dblp", "gloo")}
        for _ in range(options.turns)
    ]
    wrong = [text for result in calls for text in result["wrong"]]
    ratio = statistics.median(turn["dblp"] / turn["gloo"] for turn in rates)
    lines = [
        f"calls: {sum(result['cells'] for result in calls)} checked, {len(wrong)} wrong {wrong}",
        f"overlap: {json.dumps(overlap[0])}",
        f"all-reduce of {options.mib} MiB, 2 ranks: dblp "
        f"{statistics.median(turn['dblp'] for turn in rates) / 1e9:.2f} GB/s, gloo "
        f"{statistics.median(turn['gloo'] for turn in rates) / 1e9:.2f} GB/s, dblp / gloo {ratio:.2f} (median of pairs)",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.json is not None:
        options.json.write_text(
            json.dumps({"calls": calls, "overlap": overlap, "rates": rates, "ratio": ratio}, indent=1) + "\n"
        )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
