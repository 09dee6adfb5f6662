"""FSDP2, tensor parallelism, DTensor and functional collectives, built on the classes that torch's wheel has for its own tests of
them (the tests themselves are not in the wheel). Each result is checked against one process that computes the whole."""

# mypy: disable-error-code="attr-defined, misc, name-defined, override, arg-type, union-attr"

import copy
import itertools
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_fsdp import MLPStack, check_sharded_parity

from tests.torch_suite.processes import ForkedRanks
from tests.torch_suite.swap import ASKED, swap

WIDTH = 12


class TestSharded(ForkedRanks, MultiProcessTestCase):
    """One process a rank."""

    @property
    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **kwargs: Any) -> None:
        swap(os.environ["DBLP_SUITE_BACKEND"])
        store = dist.FileStore(f"{file_name}_group", int(os.environ["WORLD_SIZE"]))
        dist.init_process_group(
            backend=ASKED, store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"])
        )
        super()._run(rank, test_name, file_name, parent_pipe, **kwargs)

    def _mesh(self, *names: str) -> Any:
        shape = (self.world_size,) if len(names) == 1 else (self.world_size // 2, 2)
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    def _pair(self) -> tuple[Any, Any]:
        torch.manual_seed(1)
        whole = MLPStack(WIDTH)
        return whole, copy.deepcopy(whole)

    def _batch(self, step: int, replica: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + replica)
        return torch.randn(4, WIDTH, generator=generator)

    def _step(self, whole: Any, sharded: Any, step: int, replica: int, replicas: int) -> None:
        """Forward and backward of this rank's batch sharded, and of all batches in one process."""
        losses = [whole(self._batch(step, other)).sum() / replicas for other in range(replicas)]
        sum(losses).backward()
        loss = sharded(self._batch(step, replica)).sum()
        self.assertEqual(loss.detach() / replicas, losses[replica].detach())
        loss.backward()

    def _train(self, mesh: Any, **settings: Any) -> None:
        whole, sharded = self._pair()
        for module in [*sharded, sharded]:
            fully_shard(module, mesh=mesh, **settings)
        optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (whole, sharded)]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            self._step(whole, sharded, step, dist.get_rank(), self.world_size)
            check_sharded_parity(self, whole, sharded)
            for optimizer in optimizers:
                optimizer.step()

    def test_fsdp2(self) -> None:
        for reshard in (True, False):
            self._train(self._mesh("shard"), reshard_after_forward=reshard)

    def test_fsdp2_replicated_over_half(self) -> None:
        self._train(self._mesh("replicate", "shard"))

    def test_fsdp2_with_tensor_parallelism(self) -> None:
        mesh = self._mesh("data", "tensor")
        whole, sharded = self._pair()
        sharded.parallelize(mesh["tensor"], mesh["data"], use_activation_checkpointing=False)
        self._step(whole, sharded, 0, mesh["data"].get_local_rank(), self.world_size // 2)
        for (name, mine), (_, theirs) in zip(
            sharded.named_parameters(), whole.named_parameters(), strict=True
        ):
            self.assertEqual(mine.full_tensor(), theirs, msg=name)
            self.assertEqual(mine.grad.full_tensor(), theirs.grad, msg=name)

    def test_dtensor_moves_between_all_placements(self) -> None:
        mesh = self._mesh("all")
        torch.manual_seed(2)
        for shape in ((8, 12), (5, 3), (1, 7)):  # even, uneven, fewer rows than ranks
            whole = torch.randn(shape)
            dist.broadcast(whole, 0)
            placements = (Replicate(), Shard(0), Shard(1))
            for source, target in itertools.product(placements, placements):
                moved = distribute_tensor(whole, mesh, [source]).redistribute(mesh, [target])
                self.assertEqual(moved.full_tensor(), whole)
            for target in placements:
                parts = dist.tensor.DTensor.from_local(whole * (dist.get_rank() + 1), mesh, [Partial()])
                total = self.world_size * (self.world_size + 1) // 2
                self.assertEqual(parts.redistribute(mesh, [target]).full_tensor(), whole * total)

    def test_dtensor_multiplies_whatever_the_placements(self) -> None:
        mesh = self._mesh("all")
        torch.manual_seed(3)
        left, right = torch.randn(8, 12), torch.randn(12, 8)
        for one, other in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2):
            product = distribute_tensor(left, mesh, [one]) @ distribute_tensor(right, mesh, [other])
            self.assertEqual(product.full_tensor(), left @ right)

    def test_functional_collectives(self) -> None:
        group, size, rank = dist.group.WORLD, self.world_size, dist.get_rank()
        self.assertEqual(dist.get_backend(), os.environ["DBLP_SUITE_BACKEND"])
        mine = torch.arange(2.0 * size) + rank
        every = [torch.arange(2.0 * size) + other for other in range(size)]
        total = sum(every)
        self.assertEqual(functional.all_reduce(mine, "sum", group), total)
        self.assertEqual(functional.all_reduce(mine, "max", group), torch.stack(every).amax(0))
        self.assertEqual(functional.all_gather_tensor(mine, 0, group), torch.cat(every))
        self.assertEqual(functional.all_gather_tensor(mine[None], 1, group), torch.cat(every)[None])
        self.assertEqual(functional.reduce_scatter_tensor(mine, "sum", 0, group), total.chunk(size)[rank])
        self.assertEqual(functional.broadcast(mine, 1, group), every[1])
        exchanged = functional.all_to_all_single(mine, [2] * size, [2] * size, group)
        self.assertEqual(exchanged, torch.cat([other.chunk(size)[rank] for other in every]))
        reduced = functional.all_reduce_coalesced([mine, mine * 2], "sum", group)
        for result, expected in zip(reduced, (total, total * 2), strict=True):
            self.assertEqual(result, expected)
        gathered = functional.all_gather_into_tensor_coalesced([mine, mine[:1]], group)
        for result, expected in zip(
            gathered, (torch.cat(every), torch.cat([other[:1] for other in every])), strict=True
        ):
            self.assertEqual(result, expected)
        scattered = functional.reduce_scatter_tensor_coalesced([mine, mine], "sum", [0, 0], group)
        for result in scattered:
            self.assertEqual(result, total.chunk(size)[rank])

    def test_functional_collectives_have_gradients(self) -> None:
        group, size, rank = dist.group.WORLD, self.world_size, dist.get_rank()
        mine = torch.ones(size, requires_grad=True)
        gathered = functional.all_gather_tensor_autograd(mine, 0, group)
        (gathered * torch.arange(float(size * size))).sum().backward()
        self.assertEqual(mine.grad, torch.arange(float(size * size)).chunk(size)[rank] * size)
