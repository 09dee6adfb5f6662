"""FSDP2's gradients: which parameters' elements lie where in the buffer that a reduce-scatter takes.

A module (more exactly its parameter group) has one buffer, of one row a rank. A row holds a piece of each parameter that needs a
gradient, one behind the other: its part along the dimension that it is sharded along, filled up with zeros where the first
dimension does not divide. Names, shapes and pieces are read from the state that ``fully_shard`` left in the module; torch has no
public way to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dblp.collectives.torch.backend import DblpProcessGroup
from dblp.collectives.torch.buckets import BucketLayout, Layouts
from dblp.errors import UnsupportedError

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedParameter:
    """One parameter as the buffer holds it."""

    name: str
    """As ``model.named_parameters()`` gives it."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    dim: int
    """Dimension that it is sharded along."""
    piece: int
    """Elements in each row, zeros at the end included."""

    @property
    def size(self) -> int:
        """Elements of the whole parameter."""
        return int(np.prod(self.shape))

    def join(self, pieces: Sequence[Array]) -> Array:
        """The whole parameter, 1-D, from the pieces of all rows."""
        if self.dim == 0:  # all zeros stand at the end
            return np.concatenate(pieces)[: self.size]
        shape = list(self.shape)
        shape[self.dim] //= len(pieces)
        return np.concatenate([piece.reshape(shape) for piece in pieces], axis=self.dim).reshape(-1)

    def cut(self, whole: Array, rows: int) -> list[Array]:
        """The pieces of all rows, from the whole parameter, 1-D."""
        if self.dim == 0:
            padded = np.zeros(rows * self.piece, whole.dtype)
            padded[: whole.size] = whole
            return np.split(padded, rows)
        parts = np.split(whole.reshape(self.shape), rows, axis=self.dim)
        return [np.ascontiguousarray(part).reshape(-1) for part in parts]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardLayout:
    """The buffer of one parameter group."""

    parameters: tuple[ShardedParameter, ...]
    """In the order in which a row holds them."""
    rows: int
    """Ranks that shard them."""
    row: BucketLayout
    """What a row's elements belong to."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return self.row.names

    @property
    def numel(self) -> int:
        """Elements of the buffer if every parameter has a gradient."""
        return self.rows * sum(self.row.sizes)

    def pieces(self) -> Iterator[tuple[str, int]]:
        """Key and size of each piece, in the order of the buffer."""
        for row in range(self.rows):
            for parameter in self.parameters:
                yield piece_key(parameter.name, row), parameter.piece


def piece_key(name: str, row: int) -> str:
    """How the piece of a parameter in a row is called."""
    return f"{name}[{row}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """All parameter groups of a model, and who shards it."""

    modules: tuple[tuple[Any, ShardLayout], ...]
    """The FSDP modules that have parameters, with the layouts of their buffers."""
    group: DblpProcessGroup
    """The ranks that shard."""
    replicas: DblpProcessGroup | None
    """The ranks that hold the same shard; None without replicas."""


def shards_of(model: Any) -> Shards:
    """What ``fully_shard`` made of a model. Raises UnsupportedError if its modules are sharded over different ranks, if nothing
    is sharded, or if a process group is not of the backend "dblp"."""
    layouts = Layouts(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: list[tuple[Any, ShardLayout]] = []
    groups: list[tuple[Any, Any]] = []
    for module in model.modules():
        if not hasattr(module, "_get_fsdp_state"):
            continue
        for group in parameter_groups(module):
            pair = _process_groups(group.mesh_info)
            groups.append(pair)
            found.append((module, _layout(group, pair[0].size(), layouts, names)))
    if not found:
        raise UnsupportedError("this model has no parameters that fully_shard has sharded: nothing to reduce")
    if any(pair != groups[0] for pair in groups):
        raise UnsupportedError(
            "the modules of this model are sharded over different meshes, which one attachment cannot follow; use one mesh"
        )
    return Shards(modules=tuple(found), group=groups[0][0], replicas=groups[0][1])


def parameter_groups(module: Any) -> list[Any]:
    """FSDP2's own groups of a module's parameters: none or one. Raises UnsupportedError for more."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # from torch 2.12 on more than one
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    if len(groups) > 1:
        raise UnsupportedError(
            f"{type(module).__name__} is sharded over several meshes, for which FSDP2 takes no reduce-scatter of one's own"
        )
    return list(groups)


def _process_groups(mesh_info: Any) -> tuple[DblpProcessGroup, DblpProcessGroup | None]:
    shard = getattr(mesh_info, "shard_process_group", None)
    if shard is None:
        raise UnsupportedError(
            "this model is replicated, not sharded: wrap it in DistributedDataParallel and attach to that"
        )
    replicas = getattr(mesh_info, "replicate_process_group", None)
    for group in (shard, replicas):
        if group is not None and not isinstance(group, DblpProcessGroup):
            raise UnsupportedError(
                f"dblp.attach needs a mesh over the backend 'dblp', this one has a {type(group).__name__}; call "
                "torch.distributed.init_process_group('dblp') before init_device_mesh"
            )
    return shard, replicas


def _layout(group: Any, rows: int, layouts: Layouts, names: Mapping[int, str]) -> ShardLayout:
    parameters = tuple(_parameter(each, names) for each in group.fsdp_params if _trainable(each))
    row = layouts.made([each.name for each in parameters], [each.piece for each in parameters])
    return ShardLayout(parameters=parameters, rows=rows, row=row)


def _trainable(parameter: Any) -> bool:
    return bool(parameter.sharded_param.requires_grad)


def _parameter(parameter: Any, names: Mapping[int, str]) -> ShardedParameter:
    place = parameter._module_info
    registered: torch.Tensor = getattr(place.module, place.param_name)
    return ShardedParameter(
        name=names[id(registered)],
        shape=tuple(parameter._orig_size),
        dim=int(parameter.fsdp_placement.dim),
        piece=int(parameter.padded_sharded_param_size.numel()),
    )
