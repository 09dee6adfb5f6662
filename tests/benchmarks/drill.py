"""``python -m tests.benchmarks.drill``: every collective, every way of waiting, every failure; the table of docs/reliability.md.

A cell is a group of three ranks in real processes, whose last rank fails before a call. It is good if each rank that lives has an
error within the timeout and two seconds that names the failed rank, is alive, and goes on in a new group of the survivors; and if
no rank notices that the store is gone. It is no command of ``dblp``: it tests the package, not a host.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from tests.torch.conftest import Ranks
from tests.torch.scenarios_drill import CALLS, DDP_CALLS, FAULTS, GROUP_CALLS, RESULT, STORE_GONE, TIMEOUT_S
from tests.torch_suite.records import FAILED, PASSED, Record, describe, last_line, write

NAME = "drill"
"""The suite that its records are of, beside those of torch's tests (``make test-torch``)."""
JOBS = 2
"""Cells at a time: they wait more than they compute."""
WORLD_SIZE = 3
VICTIM = WORLD_SIZE - 1
LIMIT_S = TIMEOUT_S + 2.0
"""Within which every rank that lives has its error."""
DIES = ("killed", "stopped")
"""Faults that the victim itself does not live to tell."""
INDEPENDENT = {
    *itertools.product(("reduce", "gather"), FAULTS, (1,)),
    *itertools.product(("a new group", "init again"), ("engine died",), range(WORLD_SIZE)),
    ("destroy", "engine died", VICTIM),
    ("barrier", "deaf", 0),
    ("barrier", "deaf", 1),
    ("barrier", "unheard", 2),
}
"""(call, fault, rank) that may end well: what is reduced or gathered at rank 0 needs nothing of another at rank 1, and who has
heard from all that they are at the barrier may pass it. Where a new group is made, a rank whose engine died gets a new one."""
NEEDS_STORE = ("a new group", "init again")
"""Calls that must say that the store is gone."""
CELL_TIMEOUT_S = 180.0
"""After which the processes of a cell are aborted: it fails."""


@dataclass(frozen=True)
class Cell:
    """One call under one fault."""

    call: str
    fault: str
    wait: bool
    """Asynchronously: the call returns a work, on which the rank waits."""

    @property
    def row(self) -> str:
        """What is called and how it waits."""
        return f"{self.call}, {'async' if self.wait else 'blocking'}" if self.call in CALLS else self.call

    @property
    def name(self) -> str:
        """The whole cell, in a line."""
        return f"{self.row}: {self.fault}"


@dataclass(frozen=True)
class Verdict:
    """What came of a cell."""

    cell: Cell
    good: bool
    seconds: float
    """Of the rank that waited longest."""
    why: str
    """What is wrong; empty if it is good."""


def cells() -> list[Cell]:
    """All of them."""
    calls = [(call, False) for call in (*CALLS, *DDP_CALLS, *GROUP_CALLS)] + [(call, True) for call in CALLS]
    return [
        Cell(call, fault, wait) for (call, wait), fault in itertools.product(calls, [*FAULTS, STORE_GONE])
    ]


def run_cell(cell: Cell, ranks: Ranks) -> Verdict:
    """Run one cell."""
    killed = [VICTIM] if cell.fault in DIES else []
    try:
        outputs = ranks(
            "drill", WORLD_SIZE, timeout_s=CELL_TIMEOUT_S, killed=killed, call=cell.call, fault=cell.fault, wait=cell.wait
        )  # fmt: skip
    except AssertionError as error:  # an exit code: the rank died, hung, or its next group did not work
        return Verdict(cell, False, 0.0, str(error))
    return judge(cell, outputs)


def judge(cell: Cell, outputs: Sequence[str]) -> Verdict:
    """Compare the ranks' outputs with what the cell should have."""
    wrong, longest = [], 0.0
    for rank, output in enumerate(outputs):
        if rank == VICTIM and cell.fault in DIES:
            continue
        lines = [line for line in output.splitlines() if line.startswith(RESULT)]
        if len(lines) != 1:
            wrong.append(f"rank {rank} has no result: {output[-500:]}")
            continue
        result = json.loads(lines[0].removeprefix(RESULT))
        longest = max(longest, result["seconds"])
        wrong += [
            f"rank {rank} {what}" for what in _complaints(cell, rank, result["error"], result["seconds"])
        ]
    return Verdict(cell, not wrong, longest, "; ".join(wrong))


def _complaints(cell: Cell, rank: int, error: str, seconds: float) -> Iterable[str]:
    if seconds > LIMIT_S:
        yield f"took {seconds:.2f} s"
    if cell.fault == STORE_GONE:
        if cell.call in NEEDS_STORE:
            if "store" not in error:
                yield f"does not say that the store is gone: {error}"
        elif error:
            yield f"failed though the store is not needed: {error}"
    elif not error:
        if (cell.call, cell.fault, rank) not in INDEPENDENT:
            yield "has no error"
    elif rank != VICTIM and f"rank {VICTIM}" not in error:
        yield f"does not name rank {VICTIM}: {error}"


def run_all(wanted: Sequence[Cell], jobs: int) -> list[Verdict]:
    """Run cells, ``jobs`` at a time; in the order of ``wanted``."""
    queue: SimpleQueue[Cell] = SimpleQueue()
    for cell in wanted:
        queue.put(cell)
    found: dict[Cell, Verdict] = {}

    def work() -> None:
        ranks = Ranks()
        while True:
            try:
                cell = queue.get_nowait()
            except Empty:
                ranks.close()
                return
            verdict = found[cell] = run_cell(cell, ranks)
            mark = "good" if verdict.good else f"WRONG: {verdict.why}"
            sys.stderr.write(f"{cell.name}: {verdict.seconds:.2f} s, {mark}\n")

    threads = [threading.Thread(target=work) for _ in range(min(jobs, len(wanted)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[cell] for cell in wanted]


def as_record(verdict: Verdict) -> Record:
    """A cell as a test among others; ``seconds``: of the rank that waited longest."""
    return Record(
        suite=NAME,
        test=verdict.cell.name,
        ranks=WORLD_SIZE,
        outcome=PASSED if verdict.good else FAILED,
        reason=verdict.why,
        seconds=verdict.seconds,
    )


def table(verdicts: Sequence[Verdict]) -> str:
    """Markdown: a row a call, a column a fault, the seconds of the rank that waited longest."""
    faults = list(dict.fromkeys(verdict.cell.fault for verdict in verdicts))
    rows: dict[str, dict[str, str]] = {}
    for verdict in verdicts:
        mark = f"{verdict.seconds:.1f} s" if verdict.good else "**wrong**"
        rows.setdefault(verdict.cell.row, {})[verdict.cell.fault] = mark
    lines = [f"| Call | {' | '.join(faults)} |", "|---|" + "---|" * len(faults)]
    lines += [
        f"| {row} | {' | '.join(marks.get(fault, '') for fault in faults)} |" for row, marks in rows.items()
    ]
    good = sum(verdict.good for verdict in verdicts)
    return "\n".join([*lines, "", f"{good} of {len(verdicts)} cells are as they should be."])


def main() -> None:
    """Run the cells whose row and fault contain the given words; print the table, what failed, and the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--call", default="", help="only rows that contain this")
    parser.add_argument("--fault", default="", help="only faults that contain this")
    parser.add_argument("--jobs", type=int, default=JOBS, help="cells at a time")
    parser.add_argument("--json", type=Path, help="also write a record a cell here, as make test-torch does")
    options = parser.parse_args()
    wanted = [cell for cell in cells() if options.call in cell.row and options.fault in cell.fault]
    verdicts = run_all(wanted, options.jobs)
    records = [as_record(verdict) for verdict in verdicts]
    if options.json is not None:
        write(options.json, "dblp", records)
    sys.stdout.write("\n".join(filter(None, [table(verdicts), describe(records), last_line(records)])) + "\n")
    sys.exit(not all(verdict.good for verdict in verdicts))


if __name__ == "__main__":
    main()
