"""All-reduce of sparse COO tensors, as DDP asks for it for ``nn.Embedding(sparse=True)``.

Three rounds: what each rank has (shapes, number of entries), then all indices, then all values; each rank adds
the same entries in the same order, so all get the same bits. The first round blocks the caller, for the buffers of
the others depend on it and rounds are numbered when they are called. What moves grows with the number of entries of all
ranks, not with the dense size.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

import torch

from dblp.collectives.group import Group
from dblp.collectives.torch.staging import Arrival
from dblp.collectives.torch.tensors import Staged, stage, stage_all
from dblp.errors import MismatchError, UnsupportedError

OPERATIONS = ("sum", "avg")
"""Reductions in which an entry that a rank lacks counts as nothing."""


class SparseReduction:
    """One all-reduce of one sparse tensor, in its parts. Ranks are ranks in the group."""

    def __init__(self, tensor: torch.Tensor, op: str, world_size: int) -> None:
        """Raises UnsupportedError for a reduction other than those of ``OPERATIONS``, and for other layouts than COO."""
        if tensor.layout != torch.sparse_coo:
            raise UnsupportedError(
                f"an all_reduce of a {tensor.layout} tensor: dblp reduces dense and sparse COO tensors; "
                "convert it with .to_sparse_coo() or .to_dense()"
            )
        if op not in OPERATIONS:
            raise UnsupportedError(
                f"an all_reduce of a sparse tensor by {op}: entries that a rank lacks have no part in it; "
                f"use {' or '.join(OPERATIONS)}, or .to_dense()"
            )
        self.tensor = tensor
        self._op = op
        whole = tensor.detach().coalesce()
        self._indices = stage(whole.indices())
        self._values = stage(whole.values(), arithmetic=True)
        facts = [whole._nnz(), whole.sparse_dim(), *whole.shape]
        self._facts = stage(torch.tensor(facts, dtype=torch.int64))
        self._all_facts = _room([self._facts.array.shape] * world_size, torch.int64)
        self._all_indices: list[Staged] = []
        self._all_values: list[Staged] = []

    def gather_facts(self, group: Group, timeout_s: float) -> Awaitable[Any]:
        """The first round."""
        return _gather(group, self._all_facts, self._facts, timeout_s)

    def make_room(self) -> None:
        """Allocate the others' entries; once the first round has ended. Raises MismatchError for shapes that differ."""
        all_facts = [item.array.tolist() for item in self._all_facts]
        mine = self._facts.array.tolist()
        for rank, theirs in enumerate(all_facts):
            if theirs[1:] != mine[1:]:
                raise MismatchError(
                    f"an all_reduce of sparse tensors of {_shape(mine)} here and {_shape(theirs)} on rank {rank}: "
                    "shapes and sparse dimensions must be the same on all ranks",
                    [rank],
                )
        counts = [facts[0] for facts in all_facts]
        rows, *dense = self._indices.array.shape[0], *self._values.array.shape[1:]
        self._all_indices = _room([(rows, count) for count in counts], torch.int64)
        self._all_values = _room([(count, *dense) for count in counts], self._values.tensor.dtype)

    def gather_indices(self, group: Group, timeout_s: float) -> Awaitable[Any]:
        """The second round."""
        return _gather(group, self._all_indices, self._indices, timeout_s)

    def gather_values(self, group: Group, timeout_s: float) -> Awaitable[Any]:
        """The third round."""
        return _gather(group, self._all_values, self._values, timeout_s)

    def add(self) -> list[Arrival]:
        """Put the result into the tensor, on a device by a copy that is only queued; once the third round has ended."""
        indices = torch.cat([item.tensor for item in self._all_indices], dim=1)
        values = torch.cat([item.tensor for item in self._all_values])
        total = torch.sparse_coo_tensor(indices, values, self.tensor.shape, check_invariants=False).coalesce()
        if self._op == "avg":
            total = total / len(self._all_values)
        accelerator = self._values.accelerator
        with torch.no_grad():  # a detached sparse tensor would get the new entries in place of this one
            if accelerator is None:
                self.tensor.copy_(total)
                return []
            return [Arrival(accelerator, accelerator.copy_back(self.tensor, total), made=self.tensor)]


def _gather(group: Group, targets: list[Staged], source: Staged, timeout_s: float) -> Awaitable[Any]:
    return group.all_gather([item.array for item in targets], source.array, timeout_s=timeout_s)


def _room(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Staged]:
    return stage_all(torch.empty(shape, dtype=dtype) for shape in shapes)


def _shape(facts: list[int]) -> str:
    return f"shape {tuple(facts[2:])} ({facts[1]} of its dimensions sparse)"
