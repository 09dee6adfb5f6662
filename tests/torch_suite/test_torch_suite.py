"""torch's own suites on this backend. ``make test`` runs the tests that are to pass at four ranks; the whole, with those
that are listed as not for this backend, is ``make test-torch`` or ``make slow``."""

import pytest

from tests.torch_suite.records import FAILED, PASSED, read_list
from tests.torch_suite.records import not_run as names_not_run
from tests.torch_suite.run import SUITES, describe, run_suite, verdicts

pytestmark = [pytest.mark.processes, pytest.mark.sockets]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("suite, least", [("distributed", 100), ("sharded", 7)])
def test_what_is_to_pass_at_four_ranks_passes(suite, least):
    records = run_suite(suite, 4, without=names_not_run(read_list(), suite, 4))
    assert len(records) >= least
    assert [record for record in records if record.outcome != PASSED] == [], describe(records)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "suite, ranks", [(suite, ranks) for suite in SUITES for ranks in SUITES[suite].ranks]
)
def test_the_whole_suite_does_as_the_list_says(suite, ranks):
    judged = verdicts(run_suite(suite, ranks), whole=True)
    assert [record for record in judged if record.outcome == FAILED] == [], describe(judged)
