"""The list of tests that do not pass, and what a record counts as beside it."""

import pytest

from tests.torch_suite.records import (
    FAILED,
    PASSED,
    SKIPPED,
    Entry,
    Record,
    judge,
    not_run,
    read_list,
    stale,
)

LISTED = {
    ("distributed", "C.test_cuda"): Entry(reason="needs CUDA"),
    ("distributed", "C.test_big"): Entry(reason="needs eight ranks", below=8),
}


def record(test, outcome, ranks=4, reason="torch's words"):
    return Record(suite="distributed", test=f"C.{test}", ranks=ranks, outcome=outcome, reason=reason)


def test_a_skip_needs_an_entry():
    assert judge(record("test_cuda", SKIPPED), LISTED) == record("test_cuda", SKIPPED, reason="needs CUDA")
    judged = judge(record("test_other", SKIPPED), LISTED)
    assert judged.outcome == FAILED and "not in not_passing.toml: torch's words" in judged.reason


def test_an_entry_holds_for_its_numbers_of_ranks():
    assert judge(record("test_big", SKIPPED, 4), LISTED).outcome == SKIPPED
    assert judge(record("test_big", PASSED, 8), LISTED).outcome == PASSED
    assert judge(record("test_big", SKIPPED, 8), LISTED).outcome == FAILED
    assert not Entry(reason="", above=4).holds(4) and Entry(reason="", above=4).holds(8)
    assert not_run(LISTED, "distributed", 4) == ["C.test_cuda", "C.test_big"]
    assert not_run(LISTED, "distributed", 8) == ["C.test_cuda"]


def test_a_pass_that_the_list_denies_is_a_failure():
    judged = judge(record("test_cuda", PASSED), LISTED)
    assert judged.outcome == FAILED and "passes, but not_passing.toml says: needs CUDA" in judged.reason


@pytest.mark.parametrize("test", ["test_cuda", "test_other"])
def test_a_failure_is_one_with_or_without_an_entry(test):
    assert judge(record(test, FAILED), LISTED) == record(test, FAILED)


def test_entries_without_a_test_are_failures():
    (failure,) = stale([record("test_cuda", SKIPPED)], LISTED)
    assert failure.test == "C.test_big" and failure.outcome == FAILED
    assert stale([], LISTED) == [], "suites that did not run"


def test_the_committed_list_blames_no_fault_of_ours():
    listed = read_list()
    assert len(listed) > 100
    for (suite, test), entry in listed.items():
        assert suite in {"distributed", "rpc"} and test.count(".") == 1
        assert any(word in entry.reason for word in ("CUDA", "NCCL", "ranks", "torch")), (test, entry)
