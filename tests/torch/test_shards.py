"""How FSDP2's buffers are taken apart, states of ranks are made one, and torch's short forms are read; in this process."""

# mypy: disable-error-code="call-arg"
# mypy sees the decorated methods' own forms.

from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from dblp.collectives.torch.checkpoint import CheckpointState, merge_states, share_of
from dblp.collectives.torch.overloads import overloaded
from dblp.collectives.torch.shards import ShardedParameter
from dblp.errors import ConfigError
from dblp.transport.policy import Bounded, Policy
from tests.torch.conftest import FSDP2_HOOK


@pytest.mark.parametrize("shape, dim", [((5, 3), 0), ((1, 7), 0), ((8,), 0), ((6, 8), 1), ((3, 4, 2), 1)])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_pieces_are_those_of_torch(shape, dim, rows):
    """Cut and joined again; and as ``torch.chunk`` cuts, filled up with zeros."""
    whole = torch.arange(1.0, 1.0 + int(np.prod(shape))).view(shape)
    chunks = list(torch.chunk(whole, rows, dim))
    piece = chunks[0].numel()
    parameter = ShardedParameter(name="p", shape=shape, dim=dim, piece=piece)
    pieces = parameter.cut(whole.reshape(-1).numpy(), rows)
    assert len(pieces) == rows and all(part.size == piece for part in pieces)
    for part, chunk in zip(pieces, chunks, strict=False):
        flat = chunk.reshape(-1).numpy()
        assert np.array_equal(part[: flat.size], flat) and not part[flat.size :].any()
    assert np.array_equal(parameter.join(pieces), whole.reshape(-1).numpy())


@FSDP2_HOOK
def test_a_budget_without_a_gather_leg():
    from dblp.collectives.torch.sharded import one_leg  # its module needs the newer torch, too

    assert one_leg(Bounded(0.1)).budget == 0.1
    assert one_leg(Policy(budget=0.19, gather_budget=0.1)).budget == pytest.approx(0.1)


def _state(rank, layers, velocity=None, **fields):
    entry = {"layers": [torch.full((6,), value) for value in layers], "velocity": velocity}
    parameters = {"p": entry, f"only {rank}": {"layers": [torch.ones(2)], "velocity": None}}
    return {"version": 5, "iterations": 3, "carry": {"parameters": parameters}, "compression": None, **fields}


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_what_ranks_carry_is_shared_out_anew(world_size):
    states = [_state(0, [1.0, 8.0]), _state(1, [2.0], torch.full((6,), 4.0)), _state(2, [4.0])]
    merged = merge_states(states)
    shares = [share_of(merged, rank, world_size)["carry"]["parameters"] for rank in range(world_size)]
    factor = world_size / 3
    sums = [sum(share["p"]["layers"][age] for share in shares) for age in range(2)]
    torch.testing.assert_close(sums[0], torch.full((6,), 7.0 * factor))
    torch.testing.assert_close(sums[1], torch.full((6,), 8.0 * factor))
    torch.testing.assert_close(
        sum(share["p"]["velocity"] for share in shares), torch.full((6,), 4.0 * factor)
    )
    for other in range(3):
        total = sum(share[f"only {other}"]["layers"][0] for share in shares)
        torch.testing.assert_close(total, torch.full((2,), factor))
    assert torch.equal(states[0]["carry"]["parameters"]["p"]["layers"][0], torch.ones(6)), "left alone"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_velocity_that_all_ranks_have_alike_is_whole_on_each(world_size):
    """As DGC's of parameters that go whole: replicas with parts of it drifted apart. Zeros of another sign are not alike."""
    common = torch.tensor([1.0, -0.0, 3.0, float("nan"), 5.0, 6.0])
    states = [_state(rank, [1.0], common.clone()) for rank in range(2)]
    for rank in range(world_size):
        share = share_of(merge_states(states), rank, world_size)["carry"]["parameters"]["p"]
        assert share["velocity"].numpy().tobytes() == common.numpy().tobytes()
    states[1]["carry"]["parameters"]["p"]["velocity"][1] = 0.0
    shares = [share_of(merge_states(states), rank, world_size) for rank in range(world_size)]
    parts = [share["carry"]["parameters"]["p"]["velocity"] for share in shares]
    assert sum(part[4] for part in parts) == 10.0 * world_size / 2


def test_what_a_compression_withheld_is_shared_out_too():
    def state(value):
        memory = {"parameters": {"p": {"layers": [torch.full((4,), value)], "velocity": None}}}
        return _state(0, [0.0], compression={"memory": memory, "rounds": 7})

    shares = [share_of(merge_states([state(1.0), state(2.0)]), rank, 2)["compression"] for rank in range(2)]
    held = [share["memory"]["parameters"]["p"]["layers"][0].tolist() for share in shares]
    assert held == [[3.0, 3.0, 0.0, 0.0], [0.0, 0.0, 3.0, 3.0]] and shares[1]["rounds"] == 7


@pytest.mark.parametrize(
    "states, words",
    [
        ([], "on each rank"),
        ([merge_states([_state(0, [1.0])])], "on each rank"),
        ([_state(0, [1.0]), _state(1, [1.0], iterations=4)], r"different iterations: \[3, 4\]"),
    ],
)
def test_states_that_do_not_belong_together(states, words):
    with pytest.raises(ConfigError, match=words):
        merge_states(states)
    with pytest.raises(ConfigError, match="no merged state"):
        share_of({"ranks": 2, "carry": None}, 0, 2)


class _Group:
    @overloaded(c10d.ReduceOptions, 1, "root", "op", "timeout")
    def reduce(self, tensors, opts=None):
        return tensors, opts

    @overloaded(c10d.AllgatherOptions, 2, "timeout")
    def allgather(self, outputs, inputs, opts=None):
        return outputs, inputs, opts


def test_the_forms_of_a_call():
    group, tensor = _Group(), torch.zeros(2)
    given = c10d.ReduceOptions()
    assert group.reduce([tensor], given) == ([tensor], given)
    assert group.reduce([tensor], opts=given)[1] is given
    for tensors, made in (
        group.reduce(tensor, 3, dist.ReduceOp.MAX),
        group.reduce(tensor, op=dist.ReduceOp.MAX, root=3, timeout=timedelta(seconds=4)),
    ):
        assert tensors == [tensor] and (made.rootRank, made.reduceOp) == (3, dist.ReduceOp.MAX)
    assert made.timeout == timedelta(seconds=4)
    assert group.allgather([tensor], tensor) == ([[tensor]], [tensor], None)
    with pytest.raises(TypeError):
        group.reduce(tensor, nonsense=1)


@pytest.mark.parametrize("states", [[], [1], [{}], [{"version": 1}], [None]])
def test_what_is_no_state_of_a_rank_is_not_merged(states):
    with pytest.raises(ConfigError, match="merge_states takes what attachment"):
        merge_states(states)


@pytest.mark.parametrize("attachment", [None, 3, object()])
def test_a_checkpoint_state_is_of_an_attachment(attachment):
    with pytest.raises(ConfigError, match=r"CheckpointState takes what dblp\.attach returned, not"):
        CheckpointState(attachment)
