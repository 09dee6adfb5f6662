"""The failure drill: a few cells each time, all of them under ``slow``, and that a bad cell is called bad."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.drill import LIMIT_S, Cell, Verdict, as_record, cells, judge, run_cell, table
from tests.torch.scenarios_drill import CALLS, DDP_CALLS, FAULTS, GROUP_CALLS, RESULT, STORE_GONE
from tests.torch_suite.records import FAILED, PASSED, last_line

QUICK = [
    Cell("all_reduce", "unheard", wait=True),
    Cell("broadcast", "cut off", wait=False),
    Cell("all_gather", "deaf", wait=False),
    Cell("DDP backward, bounded", "stopped", wait=False),
    Cell("a new group", "cut off", wait=False),
    Cell("destroy", "killed", wait=False),
    Cell("init again", STORE_GONE, wait=False),
    Cell("all_reduce", "engine died", wait=False),
]
"""A cell of each fault that other tests have not, with different calls and waits."""


@pytest.mark.processes
@pytest.mark.sockets
@pytest.mark.parametrize("cell", QUICK, ids=lambda cell: f"{cell.row}-{cell.fault}")
def test_some_cells(ranks, cell):
    verdict = run_cell(cell, ranks)
    assert verdict.good, verdict.why


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.sockets
@pytest.mark.parametrize("cell", cells(), ids=lambda cell: f"{cell.row}-{cell.fault}")
def test_all_cells(ranks, cell):
    verdict = run_cell(cell, ranks)
    assert verdict.good, verdict.why


def test_the_drill_has_every_call_under_every_fault():
    found = cells()
    rows = 2 * len(CALLS) + len(DDP_CALLS) + len(GROUP_CALLS)
    assert len(set(found)) == len(found) == rows * (len(FAULTS) + 1)
    assert set(QUICK) <= set(found)


def outputs(*results: tuple[str, float]) -> list[str]:
    return [f"noise\n{RESULT}{json.dumps({'error': text, 'seconds': took})}\n" for text, took in results]


NAMED = "not complete within 1.5 s. Missing: rank 2 (silent for 1.8 s)"
GOOD = [(NAMED, 1.6), (NAMED, 1.7), ("Missing: rank 0, rank 1", 1.5)]


@pytest.mark.parametrize(
    ("results", "wrong"),
    [
        (GOOD, ""),
        ([*GOOD[:1], (NAMED, LIMIT_S + 0.1), GOOD[2]], "rank 1 took"),
        ([("Missing: rank 1 (alive)", 1.6), *GOOD[1:]], "rank 0 does not name rank 2"),
        ([*GOOD[:2], ("", 1.0)], "rank 2 has no error"),
    ],
)
def test_a_bad_cell_is_called_bad(results, wrong):
    verdict = judge(Cell("all_reduce", "unheard", wait=False), outputs(*results))
    assert verdict.good == (not wrong) and wrong in verdict.why


def test_a_rank_without_a_result_is_bad_unless_it_was_to_die():
    told = [*outputs(*GOOD[:2]), "Traceback"]
    assert judge(Cell("all_reduce", "killed", wait=False), told).good
    assert "rank 2 has no result: Traceback" in judge(Cell("all_reduce", "deaf", wait=False), told).why


def test_ranks_that_need_nothing_of_the_failed_one_may_end_well():
    told = outputs(GOOD[0], ("", 0.1), GOOD[2])
    assert judge(Cell("gather", "deaf", wait=False), told).good
    assert not judge(Cell("all_gather", "deaf", wait=False), told).good
    passed = outputs(("", 0.1), ("", 0.1), GOOD[2])
    assert judge(Cell("barrier", "deaf", wait=True), passed).good
    assert not judge(Cell("barrier", "killed", wait=True), passed).good


def test_without_the_store_nothing_may_fail():
    cell = Cell("all_reduce", STORE_GONE, wait=False)
    assert judge(cell, outputs(("", 0.1), ("", 0.1), ("", 0.1))).good
    assert not judge(cell, outputs(*GOOD)).good


def test_who_needs_the_store_must_say_that_it_is_gone():
    cell = Cell("init again", STORE_GONE, wait=False)
    assert judge(cell, outputs(*[("the store at 127.0.0.1:29500 does not answer", 0.1)] * 3)).good
    assert not judge(cell, outputs(*[("Broken pipe", 0.1)] * 3)).good
    assert not judge(cell, outputs(*[("", 0.1)] * 3)).good


def test_the_table_counts_what_is_wrong():
    pair = [Cell("barrier", "killed", wait=False), Cell("barrier", "deaf", wait=False)]
    text = table([Verdict(pair[0], True, 1.52, ""), Verdict(pair[1], False, 9.0, "rank 0 took 9.00 s")])
    assert "| barrier, blocking | 1.5 s | **wrong** |" in text
    assert "1 of 2 cells are as they should be." in text


def test_cells_are_records_like_those_of_torchs_tests():
    pair = [Cell("barrier", "killed", wait=True), Cell("destroy", "deaf", wait=False)]
    records = [
        as_record(Verdict(pair[0], True, 1.5, "")),
        as_record(Verdict(pair[1], False, 9.0, "rank 0 took 9 s")),
    ]
    assert [(record.suite, record.test, record.ranks) for record in records] == [
        ("drill", "barrier, async: killed", 3),
        ("drill", "destroy: deaf", 3),
    ]
    assert [record.outcome for record in records] == [PASSED, FAILED]
    assert records[1].reason == "rank 0 took 9 s" and last_line(records) == "1 passed, 1 failed"
