"""``attach`` for models that FSDP2's ``fully_shard`` has sharded: gradients are reduced by bounded reduce-scatters.

Parameters are gathered exactly, as without an attachment: only the reduce-scatter object of each FSDP module is replaced. A
reduce-scatter has one leg, so all of a policy's budget is that leg's, but for what the policy itself sets aside for a gather
leg; and every shard of a gradient has one owner, so replicas cannot drift apart. With replicas (a mesh of two dimensions, HSDP)
FSDP2 averages the shards over them by an exact all-reduce.

Theory of operation. FSDP2 calls the reduce-scatter of a module on the thread of the backward pass and waits for it, in the same
order on all ranks. The first call of a backward pass begins an iteration, as the first bucket does under DDP (``hook.py``); a
callback at the end of the pass ends it. There, where all ranks stand at the same place, what each rank measured of its shards is
added up over the ranks. A pass with ``set_requires_gradient_sync(False)`` reduces nothing and makes no iteration.

What a rank carries belongs to its own contributions to all shards: as much as the whole gradient, once something was lost.
It is kept by piece, and stands in ``state_dict`` by the name of the whole parameter, in the parameter's own order, as under DDP.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import Variable
from torch.optim import Optimizer

from dblp.collectives.algorithms import check_reduce_scatter
from dblp.collectives.budget import BudgetController
from dblp.collectives.carry import Residual
from dblp.collectives.named import parse_policy
from dblp.collectives.phases import Needs
from dblp.collectives.presets import Preset
from dblp.collectives.priority import Priority
from dblp.collectives.torch.backend import DblpProcessGroup
from dblp.collectives.torch.buckets import BucketLayout, square_norm
from dblp.collectives.torch.carries import Carries
from dblp.collectives.torch.hadamard import rotate_, unrotate_
from dblp.collectives.torch.hook import (
    Attachment,
    base_policy,
    check_others,
    policy_and_budget,
    remember,
)
from dblp.collectives.torch.iteration import Iteration
from dblp.collectives.torch.keyed import array_state, tensor_state
from dblp.collectives.torch.operations import op_name, premultiply
from dblp.collectives.torch.shards import ShardLayout, Shards, parameter_groups, piece_key, shards_of
from dblp.errors import ConfigError, UnsupportedError
from dblp.transport.policy import Consistency, Policy, Tags

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
except ImportError as missing:
    raise UnsupportedError(
        f"dblp.attach to a model of fully_shard needs torch 2.9 or later, this is {torch.__version__}; wrap the model in "
        "DistributedDataParallel, or update torch"
    ) from missing

_log = logging.getLogger("dblp")
_EXACT = Policy()


def attach_sharded(
    model: Any,
    policy: Policy | Preset | str | None,
    budget: BudgetController | None,
    optimizer: Optimizer | None,
    history: int,
    compression: object,
) -> ShardedAttachment:
    """``attach`` for a model of ``fully_shard``; same arguments. Raises what ``attach`` raises, and UnsupportedError for a
    compression and for policies that a reduce-scatter cannot have (``check_sharded``)."""
    shards = shards_of(model)
    if compression is not None:
        raise UnsupportedError(
            "compression= with a model of fully_shard: methods work on whole gradients, which no rank of FSDP2 reduces; use a "
            "loss policy, or DistributedDataParallel"
        )
    policy = parse_policy(policy) if isinstance(policy, str) else policy
    named = policy.policy if isinstance(policy, Preset) else policy
    if isinstance(named, Policy):  # before the transport is warned of, which a refused policy has no use for
        check_sharded(named)
    policy, budget = policy_and_budget(policy, budget, shards.group)
    check_others(model, optimizer, history)
    _check_free(shards)
    base = base_policy(policy, budget, compression)
    attachment = ShardedAttachment(model, shards, base, budget, optimizer, history)
    for module, layout in shards.modules:
        module.set_custom_reduce_scatter(BoundedReduceScatter(attachment, layout))
    remember(model, budget)
    return attachment


def check_sharded(policy: Policy) -> None:
    """Raise UnsupportedError for what makes no sense where each shard of a gradient has one owner: replicas that drift, an
    all-reduce's algorithm, fills and endings that need a second leg."""
    if policy.consistency is Consistency.RELAXED:
        raise UnsupportedError(
            "consistency='relaxed' with fully_shard: each shard has one owner, so there are no replicas that could drift; use "
            "consistency='agreed', as in dataclasses.replace(policy, consistency=dblp.Consistency.AGREED)"
        )
    check_reduce_scatter(policy)


def _check_free(shards: Shards) -> None:
    """Raise ConfigError for a module that has another reduce-scatter of one's own."""
    for module, layout in shards.modules:
        for group in parameter_groups(module):
            if (name := type(group._reduce_scatter_comm).__name__) != "DefaultReduceScatter":
                raise ConfigError(
                    f"the module of {layout.names[:1]} has the reduce-scatter {name}, and FSDP2 takes one: shard the model "
                    "anew to attach a policy"
                )


class BoundedReduceScatter(ReduceScatter):
    """What FSDP2 calls for the gradients of one module."""

    def __init__(self, attachment: ShardedAttachment, layout: ShardLayout) -> None:
        self._attachment = attachment
        self._layout = layout

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce and scatter; done when it returns, which is what FSDP2 needs of it on the CPU."""
        self._attachment.reduce_scatter(
            self._layout, output_tensor, premultiply(input_tensor, op), group, op_name(op)
        )


class ShardedAttachment(Attachment):
    """A policy on the gradients of a model of ``fully_shard``, and what came of it."""

    __slots__ = ("_part_priorities", "_shards", "_told")

    def __init__(
        self,
        model: torch.nn.Module,
        shards: Shards,
        policy: Policy,
        budget: BudgetController | None,
        optimizer: Optimizer | None,
        history: int,
    ) -> None:
        self._shards = shards
        super().__init__(model, shards.group, policy, budget, optimizer, history)
        self._policy = self._check(policy)
        self._carries = ShardedCarries([layout for _, layout in shards.modules])
        self._part_priorities: dict[tuple[str, ...], list[Priority]] = {}
        self._told: set[tuple[str, ...]] = set()

    @property
    def groups(self) -> tuple[DblpProcessGroup, ...]:
        """The ranks that shard the model, and those that hold the same shard."""
        replicas = self._shards.replicas
        return (self._shards.group,) if replicas is None else (self._shards.group, replicas)

    def resynchronise(self) -> float:
        """Raises UnsupportedError: there is nothing to make equal."""
        raise UnsupportedError(
            "resynchronise() with fully_shard: each shard has one owner, nothing can drift apart"
        )

    def reduce_scatter(
        self, layout: ShardLayout, output: torch.Tensor, input: torch.Tensor, group: DblpProcessGroup, op: str
    ) -> None:
        """Reduce the gradients of one module, ``input`` (rows * piece elements), into ``output`` (one row); blocks."""
        iteration = self._iteration()
        self._rounds += 1
        if input.numel() != layout.numel:
            self._reduce_unknown(layout, output, input, group, op, iteration)
            return
        policy = self._policy_of(layout)
        rotated = policy.hadamard and input.is_floating_point()
        if rotated:
            for row in input.view(layout.rows, -1):
                rotate_(row, self._rounds)
        work = group.reduce_scatter_lossy(
            output,
            input,
            policy,
            op,
            carry=self._carries.of(input, layout.row, policy),
            priorities=self._priorities_of(layout, policy),
        )
        work.wait()
        if rotated:
            unrotate_(output, self._rounds)
        iteration.measure(output, layout.row)
        self.end_round(iteration, work.report)

    # inside

    def _check(self, policy: object) -> Policy:
        checked = super()._check(policy)
        check_sharded(checked)
        loosest = checked if self._budget is None else self._budget.loosest(checked)
        for name, parameter in self._module.named_parameters():
            if loosest.lossy and parameter.requires_grad and parameter.is_complex():
                raise UnsupportedError(
                    f"parameter {name!r} is {parameter.dtype}, with fully_shard: only real gradients may lose anything there; "
                    "use DistributedDataParallel, which lays complex ones out as real ones, or an exact policy"
                )
        return checked

    def _iteration(self) -> Iteration:
        """The running iteration; a new one with the first call of a backward pass."""
        if self._running is None or self._running.launched_all:
            self._begin_iteration()
            assert self._running is not None
            Variable._execution_engine.queue_callback(functools.partial(self._end_iteration, self._running))
        return self._running

    def _end_iteration(self, iteration: Iteration) -> None:
        """The backward pass ends: add up over the shards what each rank measured of its own."""
        if iteration.measures & (Needs.NORM | Needs.LAYER_NORMS):
            squares = iteration.squares()
            self._shards.group.agree(squares, "sum")
            self._agree(squares)
            iteration.set_squares(squares)
        iteration.launch(True)

    def _policy_of(self, layout: ShardLayout) -> Policy:
        policy = self._policy if self._budget is None else self._budget.policy(self._policy, layout.names)
        return one_leg(policy)

    def _priorities_of(self, layout: ShardLayout, policy: Policy) -> list[Priority] | None:
        if policy.tags is Tags.NONE:
            return None
        if layout.names not in self._part_priorities:
            self._part_priorities[layout.names] = [Priority(layout.row) for _ in range(layout.rows)]
        return self._part_priorities[layout.names]

    def _reduce_unknown(
        self,
        layout: ShardLayout,
        output: torch.Tensor,
        input: torch.Tensor,
        group: DblpProcessGroup,
        op: str,
        iteration: Iteration,
    ) -> None:
        """Some parameters have no gradient, and FSDP2 does not say which: nothing can be carried, so nothing may be lost."""
        if layout.names not in self._told:
            self._told.add(layout.names)
            _log.warning(
                "some of %s had no gradient, so its reduce-scatter was exact: FSDP2 does not tell which; "
                "reduce_scatter_unused_params gives them zeros",
                ", ".join(layout.names),
            )
        work = group.reduce_scatter_lossy(output, input, _EXACT, op)
        work.wait()
        if Needs.NORM in iteration.measures:
            iteration.add_square(square_norm(output))
        self.end_round(iteration, work.report)


class ShardedCarries(Carries):
    """The residuals of a model's buffers: kept by piece, saved by parameter."""

    def __init__(self, layouts: Sequence[ShardLayout]) -> None:
        super().__init__({each.name: each.size for layout in layouts for each in layout.parameters})
        self._shard_layouts = list(layouts)
        self._pieces = {layout.names: tuple(layout.pieces()) for layout in layouts}

    def of(self, tensor: torch.Tensor, layout: BucketLayout, policy: Policy) -> Residual | None:
        """The residual of a buffer, by the layout of its rows."""
        return self._residual(tensor, self._pieces[layout.names], policy)

    def state_dict(self) -> dict[str, Any]:
        """By parameter, as ``Carries.state_dict``."""
        state = self._store.state_dict()
        pieces = state["parameters"]
        whole = {}
        for layout in self._shard_layouts:
            for parameter in layout.parameters:
                keys = [piece_key(parameter.name, row) for row in range(layout.rows)]
                if all(key in pieces for key in keys):  # of one residual, or waiting to be: all or none
                    whole[parameter.name] = _joined([pieces[key] for key in keys], parameter.join)
        return {**tensor_state({**state, "parameters": whole}), "begun": self._begun}

    def loaded(self, state: Mapping[str, Any]) -> ShardedCarries:
        """As ``Carries.loaded``."""
        loaded = ShardedCarries(self._shard_layouts)
        try:
            loaded._begun = bool(state["begun"])
        except (KeyError, TypeError) as error:
            raise ConfigError(f"this is no state of dblp.attach: carry: {error!r}") from None
        whole = array_state(state, self._sizes, "carry")
        pieces: dict[str, Any] = {}
        for layout in self._shard_layouts:
            for parameter in layout.parameters:
                if (entry := whole["parameters"].get(parameter.name)) is not None:
                    cut = functools.partial(parameter.cut, rows=layout.rows)
                    for row, piece in enumerate(_cut(entry, layout.rows, cut)):
                        pieces[piece_key(parameter.name, row)] = piece
        loaded._store.load_state_dict({**whole, "parameters": pieces})
        return loaded


def _joined(entries: Sequence[Mapping[str, Any]], join: Any) -> dict[str, Any]:
    layers = [join(list(pieces)) for pieces in zip(*(entry["layers"] for entry in entries), strict=True)]
    velocities = [entry["velocity"] for entry in entries]
    return {"layers": layers, "velocity": None if velocities[0] is None else join(velocities)}


def _cut(entry: Mapping[str, Any], rows: int, cut: Any) -> list[dict[str, Any]]:
    layers = [cut(values) for values in entry["layers"]]
    velocities = [None] * rows if entry["velocity"] is None else cut(entry["velocity"])
    return [
        {"layers": [pieces[row] for pieces in layers], "velocity": velocities[row]} for row in range(rows)
    ]


@functools.lru_cache(maxsize=256)
def one_leg(policy: Policy) -> Policy:
    """A policy for a round that has only the reduce leg: without what it sets aside, by name, for the gather leg."""
    if policy.gather_budget is None:
        return policy
    return replace(policy, budget=policy.reduce_leg_budget, gather_budget=None)
