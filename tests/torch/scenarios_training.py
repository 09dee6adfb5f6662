"""Scenarios: DistributedDataParallel over the backend, exact and bounded."""

# mypy: disable-error-code="attr-defined, union-attr, arg-type, index"
# torch.distributed's stubs miss names that it exports, and call every group and work optional.

import itertools
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from dblp import Bounded, BudgetController, Budgets, Exact, Policy, Stop, TransportConfig, attach
from dblp.collectives.phases import Manual
from dblp.errors import ConfigError, UnsupportedError


def _init(rank, world_size, folder, **config):
    dist.init_process_group(
        "dblp",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
        pg_options=TransportConfig(**config),
    )


def _model(dtype=torch.float32, **options):
    torch.manual_seed(1)  # but DDP broadcasts rank 0's parameters all the same
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 5)
    )
    return DistributedDataParallel(model.to(dtype), bucket_cap_mb=0.01, **options)


def _train(model, rank, steps=3, dtype=torch.float32):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 20, generator=generator).to(dtype)).square().mean().backward()
        optimizer.step()


def _flat(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def _assert_replicas_identical(model):
    mine = _flat(model)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    for other in theirs:
        assert torch.equal(other, mine)


def _reference(world_size, steps=3):
    """The same training in one process: the mean of all ranks' gradients, each with its own batch
    statistics."""
    model = _model().module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generators = [torch.Generator().manual_seed(100 + rank) for rank in range(world_size)]
    for _ in range(steps):
        optimizer.zero_grad()
        for generator in generators:
            (model(torch.randn(16, 20, generator=generator)).square().mean() / world_size).backward()
        optimizer.step()
    return _flat(model)


def ddp(rank, world_size, folder):
    _init(rank, world_size, folder)
    expected = _reference(world_size)
    for options in [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ]:
        model = _model(**options)
        _train(model, rank)
        _assert_replicas_identical(model)
        torch.testing.assert_close(_flat(model), expected, rtol=1e-4, atol=1e-5)
    model = _model()
    with model.no_sync():
        model(torch.ones(4, 20)).sum().backward()
    _train(model, rank)
    _assert_replicas_identical(model)
    dist.destroy_process_group()


def attached(rank, world_size, folder):
    _init(rank, world_size, folder)
    expected = _reference(world_size)
    model = _model()
    attachment = attach(model, Exact())
    _train(model, rank)
    torch.testing.assert_close(_flat(model), expected, rtol=1e-4, atol=1e-5)
    assert attachment.summary.rounds == len(attachment.reports) >= 3
    assert attachment.summary.missing_chunks == 0 and attachment.summary.missing_share == 0.0
    for dtype in (torch.float32, torch.bfloat16):
        model = _model(dtype)
        attachment = attach(model, Bounded(0.1), history=2)
        _train(model, rank, dtype=dtype)
        _assert_replicas_identical(model)
        assert len(attachment.reports) == 2 < attachment.summary.rounds
        assert attachment.reports[-1].budget == 0.1
        told = f"<Attachment rank {rank} of {world_size}: budget 0.1; {attachment.summary.rounds} rounds, 0.00% missing"
        assert repr(attachment).startswith(told)
    _state(attachment)
    _refusals()
    dist.destroy_process_group()


def _state(attachment):
    other = attach(_model(), Bounded(0.3, stop="deadline", stop_after_s=0.5))
    state = other.state_dict()
    assert state == torch.load(_saved(state), weights_only=True)
    attachment.load_state_dict(state)
    assert attachment.policy == Bounded(0.3, stop=Stop.DEADLINE, stop_after_s=0.5)
    assert attachment.summary == other.summary and attachment.reports == ()
    for broken in (
        {},
        {"policy": {"budget": 2.0}, "summary": {}},
        {"policy": {}, "summary": {"rounds": 1, "x": 2}},
    ):
        try:
            attachment.load_state_dict(broken)
        except ConfigError:
            continue
        raise AssertionError(f"{broken} was taken")


def _saved(state):
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def _refusals():
    plain = torch.nn.Linear(2, 2)
    other = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=dist.new_group(backend="gloo"))
    lossy = dist.group.WORLD.allreduce_lossy
    refused = [
        (UnsupportedError, "DistributedDataParallel", lambda: attach(plain)),
        (UnsupportedError, "'gloo'", lambda: attach(other)),
        (ConfigError, "dblp.Bounded", lambda: attach(_model(), 0.1)),
        (UnsupportedError, "int64", lambda: lossy(torch.ones(4, dtype=torch.int64), Bounded(0.1))),
    ]
    for error, words, call in itertools.chain(refused, _refused_arguments()):
        try:
            call()
        except error as caught:
            assert words in str(caught), caught
        else:
            raise AssertionError(f"{error.__name__} was expected")


def _refused_arguments():
    """What is no use is refused in attach, before anything is registered: the same model is then attached after all."""
    model = _model()
    hooked = _model()
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    controller = BudgetController(Manual(), Budgets(low=0.0, high=0.2))
    calls = [
        (ConfigError, "history=-1", lambda: attach(model, history=-1)),
        (ConfigError, "history=2.5", lambda: attach(model, history=2.5)),
        (ConfigError, "history=True", lambda: attach(model, history=True)),
        (ConfigError, "optimizer is a float", lambda: attach(model, optimizer=0.1)),
        (ConfigError, "algorithm='rign'", lambda: attach(model, Policy(algorithm="rign"))),
        (ConfigError, "no option", lambda: attach(model, Policy(algorithm="ring(columns=2)"))),
        (ConfigError, "servers", lambda: attach(model, Policy(algorithm="ps(servers=99)"))),
        (UnsupportedError, "exact only", lambda: attach(model, Policy(budget=0.1, algorithm="flat"))),
        (UnsupportedError, "exact only", lambda: attach(model, Policy(algorithm="flat"), budget=controller)),
        (ConfigError, "allreduce_hook", lambda: attach(hooked)),
    ]
    yield from calls
    attachment = attach(model, Policy(algorithm="flat"), history=0)
    yield ConfigError, "has an attachment already", lambda: attach(model)
    yield (
        UnsupportedError,
        "exact only",
        lambda: setattr(attachment, "policy", Policy(budget=0.1, algorithm="flat")),
    )
    yield ConfigError, "algorithm='rign'", lambda: setattr(attachment, "policy", Policy(algorithm="rign"))
    assert attachment.policy == Policy(algorithm="flat")
    attach(_model(), budget=controller)  # the refusal did not take it


def lossy_network(rank, world_size, folder):
    _init(rank, world_size, folder, impair="loss(0.05),seed(3)")
    model = _model()
    attachment = attach(model, Bounded(0.5, stop="eager"))
    _train(model, rank, steps=30)
    _assert_replicas_identical(model)
    assert 0.0 < attachment.summary.missing_share < 0.5
    assert 0.0 < attachment.summary.energy_lost < 1.0
    exact = torch.full((50_000,), float(rank + 1))
    dist.all_reduce(exact)
    assert torch.equal(exact, torch.full_like(exact, world_size * (world_size + 1) / 2))
    dist.destroy_process_group()
