"""Runs one of torch's suites at one number of ranks, and writes what became of each test.

``python -m tests.torch_suite.child`` with its environment set by ``run.py``: torch's suites read BACKEND and WORLD_SIZE
when they are imported.
"""

import argparse
import importlib
import json
import os
import sys
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tests.torch_suite.records import FAILED, PASSED, SKIPPED
from tests.torch_suite.swap import preload


class Recorder(unittest.TestResult):
    """Writes a line of JSON for each test that has ended, and a dot on the terminal."""

    def __init__(self, records: TextIO, terminal: TextIO) -> None:
        super().__init__()
        self._records = records
        self._terminal = terminal
        self._began = 0.0
        self._outcome: tuple[str, str] | None = None

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began = time.monotonic()
        self._outcome = None

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._outcome = (PASSED, "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._outcome = (SKIPPED, reason)

    def addError(self, test: unittest.TestCase, error: Any) -> None:
        self._outcome = (FAILED, self._exc_info_to_string(error, test))  # type: ignore[attr-defined]

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:
        self.addError(test, error)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, error: Any) -> None:
        if error is not None:
            self.addError(test, error)

    def addExpectedFailure(self, test: unittest.TestCase, error: Any) -> None:
        self._outcome = (PASSED, "")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._outcome = (FAILED, "torch expects this test to fail, and it passed")

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        outcome, reason = self._outcome or (FAILED, "the test ended without a word")
        record = {
            "test": test_name(test),
            "outcome": outcome,
            "reason": reason,
            "seconds": round(time.monotonic() - self._began, 2),
        }
        self._records.write(json.dumps(record) + "\n")
        self._records.flush()
        self._terminal.write({PASSED: ".", SKIPPED: "s", FAILED: "F"}[outcome])
        self._terminal.flush()


def test_name(test: unittest.TestCase) -> str:
    """Class and method."""
    return ".".join(test.id().split(".")[-2:])


def tests_of(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """All tests of a suite, flat."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from tests_of(test)
        else:
            yield test


def chosen(module: str, only: list[str], without: set[str]) -> list[unittest.TestCase]:
    """The tests of a module but those of ``without``; with ``only``, those that have one of its strings in their names."""
    loaded = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(module))
    tests = [test for test in tests_of(loaded) if test_name(test) not in without]
    return [test for test in tests if not only or any(part in test_name(test) for part in only)]


def redirect(log: Path) -> TextIO:
    """Send what the tests and their ranks print to ``log``; returns the terminal."""
    terminal = os.fdopen(os.dup(2), "w")
    target = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(target, stream)
    return terminal


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--share", default="0/1", help="i/n: each n-th test from the i-th on")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--without", type=Path, help="a file with names of tests, one a line")
    options = parser.parse_args()
    first, step = map(int, options.share.split("/"))
    terminal = redirect(options.log)
    preload(os.environ["DBLP_SUITE_BACKEND"])
    with options.records.open("a") as records:
        recorder = Recorder(records, terminal)
        without = set(options.without.read_text().split()) if options.without else set()
        for test in chosen(options.module, options.only, without)[first::step]:
            os.write(1, f"=== {test_name(test)}\n".encode())
            unittest.TestSuite([test]).run(recorder)


if __name__ == "__main__":
    main()
    sys.exit(0)
