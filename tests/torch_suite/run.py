"""torch's own test suites on this backend, and the failure drill: ``python -m tests.torch_suite.run --json FILE``.

Prints what failed and, last, ``N passed, N failed``. A test counts as failed too if it is skipped and not in
``not_passing.toml``, or is there and passes. ``--backend gloo`` runs torch's tests on gloo, without the list; the drill
(``tests.benchmarks.drill``), whose cells count as tests, is of dblp only.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.benchmarks.drill import JOBS, NAME, WORLD_SIZE, as_record, cells, run_all
from tests.torch_suite.records import (
    FAILED,
    PASSED,
    SKIPPED,
    Record,
    describe,
    judge,
    last_line,
    read_list,
    stale,
    write,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A module with torch's test classes."""

    module: str
    """Its import name."""
    ranks: tuple[int, ...]
    """Numbers of ranks that it is run at; one that has its own ignores them."""


SUITES = {
    "distributed": Suite(module="tests.torch_suite.suite_distributed", ranks=(4, 8)),
    "sharded": Suite(module="tests.torch_suite.suite_sharded", ranks=(4,)),
    "rpc": Suite(module="tests.torch_suite.suite_rpc", ranks=(6,)),
}
ROOT = Path(__file__).parents[2]
TEST_TIMEOUT_S = 120
"""torch's harness ends the ranks of a test after this time."""


def run_suite(
    suite: str,
    ranks: int,
    *,
    backend: str = "dblp",
    only: Sequence[str] = (),
    without: Iterable[str] = (),
    jobs: int = 1,
) -> list[Record]:
    """Run one suite in processes of its own, ``jobs`` tests at a time; what became of each test.

    ``only``: parts of tests' names; ``without``: names. Raises RuntimeError if a process that runs the tests dies.
    """
    arguments = [word for name in only for word in ("--only", name)]
    with tempfile.TemporaryDirectory() as folder:
        if names := list(without):
            excluded = Path(folder, "without")
            excluded.write_text("\n".join(names))
            arguments += ["--without", str(excluded)]
        parts = [
            Part(Path(folder, str(job)), suite, ranks, backend, [*arguments, "--share", f"{job}/{jobs}"])
            for job in range(jobs)
        ]
        return [record for part in parts for record in part.finish()]


class Part:
    """One process that runs a part of a suite's tests, one after the other."""

    def __init__(self, folder: Path, suite: str, ranks: int, backend: str, arguments: Sequence[str]) -> None:
        folder.mkdir()
        self._suite = suite
        self._ranks = ranks
        self._records = folder / "records"
        self._log = folder / "log"
        command = [sys.executable, "-m", "tests.torch_suite.child", SUITES[suite].module, *arguments]
        command += ["--records", str(self._records), "--log", str(self._log)]
        self._process = subprocess.Popen(command, cwd=ROOT, env=_environment(ranks, backend, folder))

    def finish(self) -> list[Record]:
        """Wait for the end and read the records."""
        code = self._process.wait()
        if code:
            raise RuntimeError(f"the process that runs {self._suite} ended with {code}:\n{_tail(self._log)}")
        lines = self._records.read_text().splitlines()
        records = [Record(suite=self._suite, ranks=self._ranks, **json.loads(line)) for line in lines]
        return [self._with_output(record) if record.outcome == FAILED else record for record in records]

    def _with_output(self, record: Record) -> Record:
        """A failure with the end of what its ranks printed: a rank that dies early has no other way to say why."""
        printed = self._log.read_text(errors="replace").partition(f"=== {record.test}\n")[2]
        return replace(record, reason=f"{record.reason}\n{printed.partition('=== Test')[0][-3000:]}")


def _environment(ranks: int, backend: str, folder: Path) -> dict[str, str]:
    """What torch's suites read when they are imported; they are told gloo (see ``swap.py``)."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "BACKEND": "gloo",
        "WORLD_SIZE": str(ranks),
        "INIT_METHOD": "file://",
        "DBLP_SUITE_BACKEND": backend,
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_TIMEOUT_S),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),  # torch's harness leaves files behind
    }


def _tail(log: Path, characters: int = 3000) -> str:
    return log.read_text(errors="replace")[-characters:] if log.exists() else ""


def verdicts(records: Sequence[Record], *, whole: bool) -> list[Record]:
    """The records as they count; after a ``whole`` run with those of the list that name no test."""
    listed = read_list()
    judged = [judge(record, listed) for record in records]
    return judged + (stale(records, listed) if whole else [])


def run_drill(only: Sequence[str] = (), jobs: int = JOBS) -> list[Record]:
    """Run the cells of the drill, or those with one of the words of ``only`` in their names."""
    wanted = [cell for cell in cells() if not only or any(word in cell.name for word in only)]
    return [as_record(verdict) for verdict in run_all(wanted, jobs)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; 1 if something failed."""
    options = _options(arguments)
    judged: list[Record] = []
    for suite in options.suite or SUITES:
        if suite == NAME:
            continue
        for ranks in options.ranks or SUITES[suite].ranks:
            begin = time.monotonic()
            records = run_suite(suite, ranks, backend=options.backend, only=options.only, jobs=options.jobs)
            if options.backend == "dblp":
                records = verdicts(records, whole=not options.only)
            judged += records
            _tell(suite, ranks, begin, records)
    if options.backend == "dblp" and NAME in (options.suite or [NAME]):
        begin = time.monotonic()
        judged += (records := run_drill(options.only, max(JOBS, options.jobs)))
        _tell(NAME, WORLD_SIZE, begin, records)
    if options.json is not None:
        write(options.json, options.backend, judged)
    if text := describe(judged):
        print(text)
    print(last_line(judged))
    return 1 if any(record.outcome == FAILED for record in judged) else 0


def _tell(suite: str, ranks: int, begin: float, records: Sequence[Record]) -> None:
    print(f"\n{suite}, {ranks} ranks, {time.monotonic() - begin:.0f} s: {_counts(records)}", flush=True)


def _counts(records: Sequence[Record]) -> str:
    counts = Counter(record.outcome for record in records)
    return (
        f"{counts[PASSED]} passed, {counts[SKIPPED]} listed as not for this backend, {counts[FAILED]} failed"
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="torch's own test suites on this backend, and the failure drill"
    )
    parser.add_argument("--suite", action="append", choices=[*SUITES, NAME], help="default: all")
    parser.add_argument(
        "--ranks", action="append", type=int, help="of torch's suites; default: those of each"
    )
    parser.add_argument("--backend", default="dblp", choices=["dblp", "gloo"])
    parser.add_argument("--only", action="append", default=[], help="tests with this in their names")
    parser.add_argument("--jobs", type=int, default=1, help="tests at a time")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
