"""Scenarios: every feature of torch.distributed that users build on, one function a row; and what torch itself refuses.

Collectives, dtypes, point to point and groups have scenarios of their own, and torch's own tests (tests/torch_suite) have more.
"""

# mypy: disable-error-code="attr-defined, union-attr, arg-type, index, call-overload, operator, no-any-return, assignment"
# torch.distributed's stubs miss names that it exports, and call every group and work optional.

import warnings
from datetime import timedelta

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dblp.collectives.torch.backend import DblpProcessGroup

CPU = torch.device("cpu")


def _network():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8), torch.nn.Linear(8, 4)
    )


def _batch(rank, step=0):
    return torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def _loss(model, rank, step=0):
    return model(_batch(rank, step)).square().mean()


def _expected(steps, make):
    """The same training in one process: the mean of all ranks' losses."""
    model, world_size = _network(), dist.get_world_size()
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world_size):
            (_loss(model, rank, step) / world_size).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _trained(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        _loss(model, dist.get_rank(), step).backward()
        optimizer.step()


def _close(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].detach(), tensor, rtol=1e-4, atol=1e-5)


def _adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def _raises(words, call, kinds=(RuntimeError, ValueError, AssertionError)):
    try:
        call()
    except kinds as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"an error with {words!r} was expected")


# what works


def zero_redundancy(folder):
    for options in ({}, {"parameters_as_bucket_view": True}):
        model = DistributedDataParallel(_network())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2, **options)
        _trained(model, optimizer, 3)
        _close(dict(model.module.named_parameters()), _expected(3, _adam))
        optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            assert len(optimizer.state_dict()["state"]) == 6
            optimizer.load_state_dict(optimizer.state_dict())


def fsdp1(folder):
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of FSDP1's future
            model = FullyShardedDataParallel(
                _network(), sharding_strategy=strategy, device_id=CPU, use_orig_params=True
            )
            _trained(model, _adam(model.parameters()), 3)
            with FullyShardedDataParallel.state_dict_type(
                model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)
            ):
                _close(model.state_dict(), _expected(3, _adam))


def fsdp1_hook(folder):
    def hook(state, gradient, shard=None):
        state.append(gradient.numel())
        gradient.div_(dist.get_world_size())
        if shard is None:
            dist.all_reduce(gradient)
        else:
            dist.reduce_scatter_tensor(shard, gradient)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(_network(), device_id=CPU, use_orig_params=True)
        called: list[int] = []
        model.register_comm_hook(called, hook)
        _loss(model, dist.get_rank()).backward()
    assert called


def _sharded(mesh=None, **settings):
    model = _network()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, **settings)
    return model


def _gathered(model):
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


def fsdp2(folder):
    for settings in ({}, {"reshard_after_forward": False}):
        model = _sharded(**settings)
        _trained(model, _adam(model.parameters()), 3)
        _close(_gathered(model), _expected(3, _adam))
    model = _sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    _trained(model, _adam(model.parameters()), 1)


def hsdp(folder):
    size = dist.get_world_size()
    model = _sharded(init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))
    _trained(model, _adam(model.parameters()), 3)
    _close(_gathered(model), _expected(3, _adam))


def fsdp2_compiled(folder):
    torch._dynamo.reset()
    model = _sharded()
    _trained(torch.compile(model, backend="aot_eager"), _adam(model.parameters()), 2)
    _close(_gathered(model), _expected(2, _adam))


def mesh_and_dtensor(folder):
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "tensor"))
    assert mesh["data"].size() == 2 and isinstance(mesh.get_group("tensor"), DblpProcessGroup)
    whole = torch.arange(48.0).view(8, 6)
    spread = distribute_tensor(whole, mesh, [Shard(0), Replicate()])
    assert torch.equal(spread.full_tensor(), whole)
    assert torch.equal(spread.redistribute(mesh, [Replicate(), Shard(1)]).full_tensor(), whole)
    assert torch.equal((spread @ spread.T).full_tensor(), whole @ whole.T)


def tensor_parallel(folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    whole, split = _network()[:3], parallelize_module(_network()[:3], mesh, plan)
    for model in (whole, split):
        model(_batch(0)).square().sum().backward()
    for (name, one), (_, other) in zip(whole.named_parameters(), split.named_parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), one.grad, msg=name)


def _functional(tensor):
    group, size = dist.group.WORLD, dist.get_world_size()
    total = functional.all_reduce(tensor, "sum", group)
    every = functional.all_gather_tensor(total, 0, group)
    part = functional.reduce_scatter_tensor(every, "sum", 0, group)
    moved = functional.all_to_all_single(
        part, [part.shape[0] // size] * size, [part.shape[0] // size] * size, group
    )
    return functional.wait_tensor(moved)


def functional_collectives(folder):
    """Eager and compiled: the same bits."""
    size = dist.get_world_size()
    tensor = torch.arange(4.0 * size) + dist.get_rank()
    eager = _functional(tensor)
    assert float(eager.sum()) > 0.0
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(_functional, backend=backend, fullgraph=True)(tensor), eager)


def collectives_inside_compile(folder):
    torch._dynamo.reset()

    def reduced(tensor):
        tensor = tensor * 2
        dist.all_reduce(tensor)
        return tensor + 1

    size = dist.get_world_size()
    found = torch.compile(reduced, backend="aot_eager")(torch.full((5,), dist.get_rank() + 1.0))
    assert found.tolist() == [size * (size + 1) + 1.0] * 5


def autograd_collectives(folder):
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = torch.full((3,), rank + 1.0, requires_grad=True)
    (torch.distributed.nn.functional.all_reduce(mine) * (rank + 1)).sum().backward()
    assert mine.grad.tolist() == [size * (size + 1) / 2] * 3
    mine.grad = None
    gathered = torch.distributed.nn.functional.all_gather(mine)
    sum((each * (peer + 1)).sum() for peer, each in enumerate(gathered)).backward()
    assert mine.grad.tolist() == [size * (rank + 1.0)] * 3


def local_sgd_and_noop_hooks(folder):
    model = DistributedDataParallel(_network())
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=dist.group.WORLD, start_localSGD_iter=1
    )
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    _trained(model, _adam(model.parameters()), 3)
    _close(dict(model.module.named_parameters()), _expected(3, _adam))
    local, lone = DistributedDataParallel(_network()), _network()
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks

    local.register_comm_hook(None, debugging_hooks.noop_hook)
    for each in (local, lone):
        _loss(each, dist.get_rank()).backward()
    _close(
        {n: p.grad for n, p in local.module.named_parameters()},
        {n: p.grad for n, p in lone.named_parameters()},
    )


def checkpoints(folder):
    """Saved, saved in the background, and loaded, sharded and whole."""
    model = _sharded()
    optimizer = _adam(model.parameters())
    _trained(model, optimizer, 2)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/whole")
    dcp.async_save({"model": weights}, checkpoint_id=f"{folder}/background").result()
    saved = {name: tensor.clone() for name, tensor in _gathered(model).items()}
    for place in ("whole", "background"):
        other = _sharded()
        other_optimizer = _adam(other.parameters())
        weights, moments = get_state_dict(other, other_optimizer)
        wanted = {"model": weights, "optimizer": moments} if place == "whole" else {"model": weights}
        dcp.load(wanted, checkpoint_id=f"{folder}/{place}")
        set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=moments)
        _close(_gathered(other), saved)
    full = get_model_state_dict(
        model, options=dcp.state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    assert dist.get_rank() or full.keys() == saved.keys()


def groups_of_all_kinds(folder):
    size, rank = dist.get_world_size(), dist.get_rank()
    mine, _ = dist.new_subgroups(group_size=size // 2)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=mine)
    assert tensor.tolist() == [size // 2] * 3
    described = dist.new_group(list(range(size)), group_desc="all of them")
    assert described.group_desc == "all of them" and dist.get_process_group_ranks(described) == list(
        range(size)
    )
    gloo = dist.new_group(backend="gloo")
    tensor = torch.full((2,), float(rank))
    dist.all_reduce(tensor, group=gloo)
    assert float(tensor[0]) == size * (size - 1) / 2
    for group in (mine, described, gloo):
        dist.destroy_process_group(group)


# what torch refuses, whatever the backend


def refused_by_torch(folder):
    _raises("GLOO", lambda: dist.monitored_barrier())
    dist.group.WORLD.monitored_barrier(timedelta(seconds=10))
    _raises("device", lambda: dist.split_group(split_ranks=[[0, 1]]))
    model = DistributedDataParallel(_network())
    if torch.version.cuda is None:  # a build for GPUs takes the hook, whatever the backend
        _raises("BF16", lambda: model.register_comm_hook(None, default_hooks.bf16_compress_hook), TypeError)
    batch_norm = torch.nn.SyncBatchNorm(4)
    _raises("GPU", lambda: batch_norm(torch.ones(2, 4, requires_grad=True)))


ROWS = (
    zero_redundancy,
    fsdp1,
    fsdp1_hook,
    fsdp2,
    hsdp,
    fsdp2_compiled,
    mesh_and_dtensor,
    tensor_parallel,
    functional_collectives,
    collectives_inside_compile,
    autograd_collectives,
    local_sgd_and_noop_hooks,
    checkpoints,
    groups_of_all_kinds,
    refused_by_torch,
)


def matrix(rank, world_size, folder):
    """All rows in one launch; the error of a row says which it is."""
    dist.init_process_group(
        "dblp",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    for row in ROWS:
        if row is hsdp and torch.__version__.startswith("2.7."):
            continue  # fails on CPU tensors in torch's own code, on any backend (docs/torch.md)
        try:
            row(f"{folder}/{row.__name__}")
            dist.barrier()
        except Exception as error:
            raise AssertionError(f"row {row.__name__}") from error
    dist.destroy_process_group()
