"""Virtual cases side by side: each has a world, a clock and seeds of its own, so they may run in any order, in any process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from dblp.cli.bench.burst_plan import BurstPlan, Case
from dblp.cli.bench.burst_results import BurstResult, combine
from dblp.cli.bench.burst_rounds import run_virtual_case
from dblp.cli.worker import die_with_parent
from dblp.errors import LocalError


def virtual_results(plan: BurstPlan, cases: list[Case], jobs: int) -> Iterator[BurstResult]:
    """The results of all cases as they come; ``jobs`` cases at a time, each in a process of its own if more than one.

    Raises what a case raises, and LocalError if one of the processes is killed. None of them outlives the iteration.
    """
    if jobs == 1:
        for case in cases:
            yield run(case, plan)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the parent's threads and locks
    pool = ProcessPoolExecutor(jobs, context, initializer=die_with_parent, initargs=(os.getpid(),))
    try:
        for future in as_completed([pool.submit(run, case, plan) for case in cases]):
            yield future.result()
    except BrokenProcessPool:
        raise LocalError(
            "a process of the benchmark was killed, perhaps for want of memory: see dmesg, or run it with --jobs 1"
        ) from None
    finally:
        for process in multiprocessing.active_children():  # of the pool alone: the command has no others
            process.kill()
        # Waited for, as the interpreter's exit would wake a pool that is just closing, and print what that raises.
        pool.shutdown(wait=True, cancel_futures=True)


def run(case: Case, plan: BurstPlan) -> BurstResult:
    """One case in virtual time."""
    return combine(case, plan, run_virtual_case(case, plan))
