"""torch's ``DistributedTest``: collectives, point to point, groups, DDP."""

# mypy: disable-error-code="attr-defined, misc, name-defined, override"

import inspect
import os
from typing import Any

from torch.testing._internal.distributed import distributed_test

from tests.torch_suite.processes import ForkedRanks
from tests.torch_suite.swap import swap

SKIPPED_BY_NAME = ("Only MPI supports",)
"""Beginnings of torch's reasons to skip that tell of a backend's name, not of what it lacks."""
SKIPPED_ELSEWHERE = frozenset({"test_broadcast_object_list"})
"""Skipped for what went wrong in torch's own test runs."""

ASK_FOR_THE_NAME = frozenset({"test_get_backend", "test_Backend_enum_class"})
"""These compare the group's name with BACKEND: they are told the right one."""
PROFILED = (
    distributed_test.PROFILING_SUPPORTED_BACKENDS,
    distributed_test.CUDA_PROFILING_SUPPORTED_BACKENDS,
    distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
)
"""Lists of backends whose events the tests look for in the profiler."""


class TestDistributed(
    ForkedRanks, distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
):
    """The suite, one process a rank."""

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **kwargs: Any) -> None:
        backend = os.environ["DBLP_SUITE_BACKEND"]
        swap(backend)
        if test_name in ASK_FOR_THE_NAME:
            distributed_test.BACKEND = backend
        super()._run(rank, test_name, file_name, parent_pipe, **kwargs)

    def setUp(self) -> None:
        super().setUp()
        distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]  # its ranks, unlike forks, import it anew
        self._spawn_processes()


def unskip() -> None:
    """Let those tests and checks run that are left out for a backend's name only."""
    for names in PROFILED:
        names.append(os.environ["DBLP_SUITE_BACKEND"])
    for name in dir(TestDistributed):
        test = getattr(TestDistributed, name)
        if name in SKIPPED_ELSEWHERE:
            setattr(TestDistributed, name, inspect.unwrap(test))
        elif getattr(test, "__unittest_skip_why__", "").startswith(SKIPPED_BY_NAME):
            test.__unittest_skip__ = False


unskip()
