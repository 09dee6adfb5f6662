"""torch's tests of groups and DDP beside its RPC and distributed autograd, sparse gradients among them.

Their number of ranks is their own: six (four trainers, a master, a remote worker), or four.
"""

# mypy: disable-error-code="attr-defined, misc, name-defined, override"

import os
from typing import Any

from torch.testing._internal.distributed import ddp_under_dist_autograd_test as ddp_tests
from torch.testing._internal.distributed.rpc import rpc_test
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
    TensorPipeRpcAgentTestFixture,
)

from tests.torch_suite.processes import ForkedRanks
from tests.torch_suite.swap import swap


class SwappedRanks(ForkedRanks, TensorPipeRpcAgentTestFixture):
    """One process a rank, with the backend's name swapped; the RPC agent is torch's own."""

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **kwargs: Any) -> None:
        swap(os.environ["DBLP_SUITE_BACKEND"])
        super()._run(rank, test_name, file_name, parent_pipe, **kwargs)

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


class TestDdpUnderDistAutograd(ddp_tests.DdpUnderDistAutogradTest, SwappedRanks):
    """The model is split over a remote worker and trainers."""


class TestDdpComparison(ddp_tests.DdpComparisonTest, SwappedRanks):
    """The same gradients with and without distributed autograd."""


class TestRpcBesideGroups(SwappedRanks):
    """Those of torch's tests of RPC that make a group."""

    test_pg_init_no_rpc_init = rpc_test.RpcTest.test_pg_init_no_rpc_init
    test_init_pg_then_rpc = rpc_test.RpcTest.test_init_pg_then_rpc
    test_init_rpc_then_pg = rpc_test.RpcTest.test_init_rpc_then_pg
    test_dynamic_and_static_init_rpc_together = (
        rpc_test.TensorPipeAgentRpcTest.test_dynamic_and_static_init_rpc_together
    )
