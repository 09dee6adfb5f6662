"""torch's own suites on this backend. ``make test`` runs the tests that are to pass at four ranks; the whole, with those
that are listed as not for this backend, is ``make test-torch`` or ``make slow``."""

import json

import pytest

from tests.torch_suite.records import FAILED, PASSED, describe, read_list
from tests.torch_suite.records import not_run as names_not_run
from tests.torch_suite.run import SUITES, main, run_suite, verdicts

pytestmark = [pytest.mark.processes, pytest.mark.sockets]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("suite, least", [("distributed", 100), ("sharded", 7)])
def test_what_is_to_pass_at_four_ranks_passes(suite, least):
    records = run_suite(suite, 4, without=names_not_run(read_list(), suite, 4))
    assert len(records) >= least
    assert [record for record in records if record.outcome != PASSED] == [], describe(records)


def test_one_run_has_torchs_tests_and_the_drill(tmp_path, capfd):
    """As ``make test-torch``: one form of record, and one last line."""
    file = tmp_path / "records.json"
    arguments = ["--suite", "sharded", "--suite", "drill", "--only", "test_functional", "--only"]
    assert main([*arguments, "barrier, blocking: deaf", "--json", str(file)]) == 0
    records = json.loads(file.read_text())["records"]
    assert {record["suite"] for record in records} == {"sharded", "drill"}
    assert {record["test"] for record in records if record["suite"] == "drill"} == {"barrier, blocking: deaf"}
    assert all(
        record["outcome"] == PASSED and {"test", "outcome", "reason"} <= record.keys() for record in records
    )
    assert capfd.readouterr().out.splitlines()[-1] == f"{len(records)} passed, 0 failed"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "suite, ranks", [(suite, ranks) for suite in SUITES for ranks in SUITES[suite].ranks]
)
def test_the_whole_suite_does_as_the_list_says(suite, ranks):
    judged = verdicts(run_suite(suite, ranks), whole=True)
    assert [record for record in judged if record.outcome == FAILED] == [], describe(judged)
