"""What all suites with one process a rank share: ranks are forks of a process that has imported torch."""

# mypy: disable-error-code="attr-defined"

import unittest
from typing import Any

import torch.multiprocessing
from torch.testing._internal.common_distributed import TEST_SKIPS, MultiProcessTestCase

SKIP_CODES = frozenset(skip.exit_code for skip in TEST_SKIPS.values())


class ForkedRanks(MultiProcessTestCase):
    """Mixed in before torch's class. torch spawns its ranks, at four seconds each on few cores. The parent
    runs no operation of torch and has no thread, so it may be forked."""

    def _spawn_processes(self) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
        """As torch's own, which looks at the first rank's exit code only; here all must be alike."""
        skip: unittest.SkipTest | None = None
        try:
            super()._check_return_codes(fn, elapsed_time)
        except unittest.SkipTest as reason:
            skip = reason
        if fn not in self.skip_return_code_checks:
            codes = [process.exitcode for process in self.processes]
            self.assertEqual(len(set(codes)), 1, msg=f"exit codes of the ranks: {codes}")
        if skip is not None:
            raise skip
