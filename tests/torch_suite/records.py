"""What became of a test, whether that is what ``not_passing.toml`` says, and how it is written down."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
LIST = Path(__file__).with_name("not_passing.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One test at one number of ranks."""

    suite: str
    """Key of ``run.SUITES``, or ``drill``."""
    test: str
    """Class and method; of the drill the call and the fault."""
    ranks: int
    """Processes that it ran on."""
    outcome: str
    """``passed``, ``skipped`` or ``failed``."""
    reason: str = ""
    """Why it did not pass: torch's words as it ran, the list's once it is judged."""
    seconds: float = 0.0
    """Time it took, which on a shared machine says little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A test that is known not to run."""

    reason: str
    """Why not."""
    below: int | None = None
    """It is so with fewer ranks than this only; None: always."""
    above: int | None = None
    """It is so with more ranks than this only."""

    def holds(self, ranks: int) -> bool:
        """True if the test is not expected to run at this number of ranks."""
        return (self.below is None or ranks < self.below) and (self.above is None or ranks > self.above)


Listed = Mapping[tuple[str, str], Entry]
"""Entries by suite and test."""


def read_list(path: Path = LIST) -> dict[tuple[str, str], Entry]:
    """The committed list: tables ``[suite.Class]`` of ``test = "reason"`` or ``{reason, below, above}``."""
    tables = tomllib.loads(path.read_text())
    return {
        (suite, f"{name}.{test}"): _entry(value)
        for suite, classes in tables.items()
        for name, tests in classes.items()
        for test, value in tests.items()
    }


def _entry(value: Any) -> Entry:
    return Entry(reason=value) if isinstance(value, str) else Entry(**value)


def not_run(listed: Listed, suite: str, ranks: int) -> list[str]:
    """The tests of a suite that are not expected to run at this number of ranks."""
    return [test for (name, test), entry in listed.items() if name == suite and entry.holds(ranks)]


def judge(record: Record, listed: Listed) -> Record:
    """The record as it counts: a skip is one only with an entry; a pass with an entry is a failure too, for the list
    is then wrong."""
    entry = listed.get((record.suite, record.test))
    expected = entry if entry is not None and entry.holds(record.ranks) else None
    if record.outcome == SKIPPED and expected is not None:
        return replace(record, reason=expected.reason)
    if record.outcome == SKIPPED:
        return replace(record, outcome=FAILED, reason=f"skipped, and not in {LIST.name}: {record.reason}")
    if record.outcome == PASSED and expected is not None:
        return replace(record, outcome=FAILED, reason=f"passes, but {LIST.name} says: {expected.reason}")
    return record


def stale(records: Iterable[Record], listed: Listed) -> list[Record]:
    """Failures for entries of tests that a whole run has not met."""
    records = list(records)
    met = {(record.suite, record.test) for record in records}
    suites = {record.suite: record.ranks for record in records}
    return [
        Record(
            suite=suite,
            test=test,
            ranks=suites[suite],
            outcome=FAILED,
            reason=f"in {LIST.name}, but the suite has no such test",
        )
        for suite, test in listed
        if suite in suites and (suite, test) not in met
    ]


def describe(records: Iterable[Record]) -> str:
    """The failures, each with its reason."""
    return "\n".join(
        f"--- {record.suite}, {record.ranks} ranks: {record.test}\n{record.reason.strip()}"
        for record in records
        if record.outcome == FAILED
    )


def last_line(records: Iterable[Record]) -> str:
    """What a run prints last."""
    counts = Counter(record.outcome for record in records)
    return f"{counts[PASSED]} passed, {counts[FAILED]} failed"


def write(path: Path, backend: str, records: Sequence[Record]) -> None:
    """Write JSON: torch's version, the backend, and a record for each test."""
    content = {
        "torch": metadata.version("torch"),
        "backend": backend,
        "records": [asdict(record) for record in records],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
