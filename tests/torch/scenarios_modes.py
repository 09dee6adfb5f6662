"""Scenarios: dblp's lossy hook in each mode of DDP, and torch's own hooks over the exact backend."""

# mypy: disable-error-code="attr-defined, union-attr, arg-type, index, call-arg"
# torch.distributed's stubs miss names that it exports, and call every group and work optional.

import contextlib
import copy
import io
import logging
import time
from dataclasses import replace
from datetime import timedelta

import torch
import torch._dynamo
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dblp import Bounded, Exact, TransportConfig, attach
from dblp.collectives.torch.backend import DblpProcessGroup
from dblp.errors import UnsupportedError
from dblp.transport.policy import Carry, CarryBound

LOSSY = Bounded(0.5, stop="eager", carry=Carry(bound=CarryBound.NONE))
WIDTH = 64


def _init(rank, world_size, folder, **config):
    dist.init_process_group(
        "dblp",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
        pg_options=TransportConfig(**config),
    )


class _Net(torch.nn.Module):
    """The gradient of each weight is what it is multiplied with; rank 0 alone uses ``sometimes``, nobody ``never``."""

    def __init__(self, optional, width=WIDTH):
        super().__init__()
        names = ["first", "second", "third", *(["sometimes", "never"] if optional else [])]
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(width, width)))

    def forward(self, factor):
        total = (
            (self.first * factor).sum() + (self.second * factor).sum() * 2 + (self.third * factor).sum() * 3
        )
        if hasattr(self, "sometimes") and dist.get_rank() == 0:
            total = total + (self.sometimes * factor).sum()
        return total


def _factor(rank, step, width=WIDTH):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(-8, 9, (width, width), generator=generator).float()


class _Books:
    """C4 by hand, for all parameters: what the ranks contributed is what all of them got and what is carried."""

    def __init__(self, model, attachment):
        self.model, self.attachment = model, attachment
        self.module = getattr(model, "_orig_mod", model).module
        named = self.module.named_parameters()
        self.contributed = {name: torch.zeros_like(parameter) for name, parameter in named}
        self.delivered = {name: torch.zeros_like(total) for name, total in self.contributed.items()}

    def contribute(self, factor):
        scales = {"first": 1, "second": 2, "third": 3, "sometimes": int(dist.get_rank() == 0), "never": 0}
        for name, total in self.contributed.items():
            total += factor * scales[name]

    def step(self, factor, *, accumulate=()):
        self.module.zero_grad()
        for extra in accumulate:
            with self.model.no_sync():
                self.model(extra).backward()
            self.contribute(extra)
        self.model(factor).backward()
        self.contribute(factor)
        self.note()

    def note(self, share=None):
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                self.delivered[name] += parameter.grad * (share or dist.get_world_size())

    def check(self):
        entries = self.attachment.state_dict()["carry"]["parameters"]
        carried = 0
        for name, contributed in self.contributed.items():
            layers = entries[name]["layers"] if name in entries else []
            held = sum(layers, torch.zeros(contributed.numel()))
            total = contributed - held.view_as(contributed)
            dist.all_reduce(total)
            assert torch.equal(total, self.delivered[name]), name
            carried += int(held.count_nonzero())
        return carried


def _wrapped(optional=False, bucket_cap_mb=0.02, **options):
    return DistributedDataParallel(_Net(optional), bucket_cap_mb=bucket_cap_mb, **options)


def lossy_modes(rank, world_size, folder):
    """Every mode of DDP on a network that loses: the bound holds, and nothing is lost without a trace."""
    _init(rank, world_size, folder, impair="loss(0.1),seed(5)")
    modes = [
        (False, {}),
        (True, {"find_unused_parameters": True}),
        (False, {"static_graph": True}),
        (False, {"gradient_as_bucket_view": True}),
        (True, {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
        (False, {"static_graph": True, "gradient_as_bucket_view": True}),
        (False, {"init_sync": False}),
    ]
    for optional, options in modes if world_size == 2 else modes[:3]:
        model = _wrapped(optional, **options)
        books, most = _Books(model, attach(model, LOSSY)), 0
        for step in range(3):
            books.step(_factor(rank, step))
            most = max(most, books.check())
        if "static_graph" not in options and "gradient_as_bucket_view" not in options:
            books.step(_factor(rank, 3), accumulate=[_factor(rank, 4), _factor(rank, 5)])
            books.check()
        assert most > 0, f"{options}: something was lost, and is carried"
        assert books.attachment.summary.missing_share < 0.5
        books.attachment.policy = Exact()
        books.step(_factor(rank, 6))
        assert books.check() == 0, f"{options}: an exact policy delivers all of it"
    dist.destroy_process_group()


class _Complex(torch.nn.Module):
    """The gradient of ``wave`` is the factor in both parts, that of ``real`` the factor."""

    def __init__(self):
        super().__init__()
        self.real = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.wave = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, factor):
        return (self.real * factor).sum() + ((self.wave.real + self.wave.imag) * factor).sum()


def complex_parameters(rank, world_size, folder):
    """DDP lays complex gradients out as real ones: what is lost of them is carried, and counted, like any other."""
    _init(rank, world_size, folder, impair="loss(0.1),seed(5)")
    model = DistributedDataParallel(_Complex(), bucket_cap_mb=0.02)
    attachment = attach(model, LOSSY)
    shapes = {"real": (WIDTH, WIDTH), "wave": (WIDTH, WIDTH, 2)}
    contributed = {name: torch.zeros(shape) for name, shape in shapes.items()}
    delivered = {name: torch.zeros(shape) for name, shape in shapes.items()}
    most, saved = 0, None
    for step in range(5):
        model.zero_grad()
        attachment.policy = LOSSY if step < 4 else Exact()
        model(_factor(rank, step)).backward()
        entries = attachment.state_dict()["carry"]["parameters"]
        for name, shape in shapes.items():
            factor = _factor(rank, step)
            contributed[name] += factor if name == "real" else torch.stack([factor, factor], -1)
            grad = getattr(model.module, name).grad
            delivered[name] += world_size * (torch.view_as_real(grad) if grad.is_complex() else grad)
            held = sum(
                entries[name]["layers"] if name in entries else [], torch.zeros(torch.Size(shape).numel())
            )
            total = contributed[name] - held.view(shape)
            dist.all_reduce(total)
            assert torch.equal(total, delivered[name]), (step, name)
            if name == "wave" and held.any():
                most, saved = max(most, int(held.count_nonzero())), attachment.state_dict()
    assert most > 0 and held.count_nonzero() == 0, "was carried, and is delivered"
    loaded = attach(DistributedDataParallel(_Complex()), LOSSY)
    loaded.load_state_dict(saved)
    before, after = (state["carry"]["parameters"]["wave"]["layers"] for state in (saved, loaded.state_dict()))
    assert sum(before).any() and torch.equal(sum(before), sum(after)), (
        "what is carried goes through a checkpoint"
    )
    dist.destroy_process_group()


def copied_models(rank, world_size, folder):
    """Copies and pickles of an attached model are models without an attachment, which may get one of their own."""
    _init(rank, world_size, folder, impair="loss(0.1),seed(5)")
    for policy in (Exact(), LOSSY, replace(Bounded(0.5, consistency="relaxed", carry=None), resync_rounds=1)):
        model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH, bias=False))
        attachment = attach(model, policy)
        for _ in range(2):
            model(_factor(rank, 0)).sum().backward()
        rounds = attachment.summary.rounds
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        averaged.update_parameters(model)
        for copied in (copy.deepcopy(model), torch.load(file, weights_only=False), averaged.module):
            assert "no attachment" in repr(copied._comm_hooks)
            mean = sum(_factor(peer, 3).sum(0) for peer in range(world_size)) / world_size
            copied.zero_grad()
            copied(_factor(rank, 3)).sum().backward()
            assert torch.equal(copied.module.weight.grad, mean.expand(WIDTH, WIDTH)), (
                "exact, as without an attachment"
            )
            assert attachment.summary.rounds == rounds, "the original's has nothing to do with it"
            another = attach(copied, LOSSY)
            for step in range(2):
                copied(_factor(rank, step)).sum().backward()
            assert another.summary.rounds > 0 and attachment.summary.rounds == rounds
        model(_factor(rank, 1)).sum().backward()
        assert attachment.summary.rounds > rounds, "it goes on"
    dist.destroy_process_group()


def lossy_join(rank, world_size, folder):
    """Ranks with fewer batches, with parameters that some do not use: rank r has r + 1 batches."""
    _init(rank, world_size, folder, impair="loss(0.1),seed(5)")
    for optional, options in [(False, {}), (True, {"find_unused_parameters": True})]:
        model = _wrapped(optional, **options)
        attachment = attach(model, LOSSY)
        model(_factor(rank, 9)).backward()  # DDP then makes its buckets anew
        for divide in (True, False):
            with model.join(divide_by_initial_world_size=divide):
                for step in range(rank + 1):
                    model.zero_grad()
                    model(_factor(rank, step)).backward()
            assert not torch.equal(model.module.first.grad, _factor(rank, rank)), "not this rank's alone"
        assert attachment.summary.rounds >= 2 * world_size and attachment.summary.missing_chunks > 0
        iterations = torch.tensor([attachment.state_dict()["iterations"]])
        both = [torch.zeros_like(iterations) for _ in range(world_size)]
        dist.all_gather(both, iterations)
        assert all(torch.equal(each, iterations) for each in both), "joined ranks count along"
        model.zero_grad()
        model(_factor(rank, 7)).backward()
        _same_everywhere(model.module.first.grad)
    dist.destroy_process_group()


def _same_everywhere(tensor):
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor)
    assert all(torch.equal(other, tensor) for other in others)


def lossy_compiled(rank, world_size, folder, backends):
    """Compiled models, whose graph DDP's optimiser cuts at its buckets."""
    _init(rank, world_size, folder, impair="loss(0.1),seed(5)")
    for backend in backends:
        torch._dynamo.reset()
        wrapped = DistributedDataParallel(_Net(False, 400), bucket_cap_mb=1)
        attachment = attach(wrapped, LOSSY)
        books, most = _Books(torch.compile(wrapped, backend=backend), attachment), 0
        for step in range(3):
            books.step(_factor(rank, step, 400))
            most = max(most, books.check())
        assert most > 0 and len({report.nbytes for report in attachment.reports}) > 1, backend
        attachment.policy = Exact()
        books.step(_factor(rank, 6, 400))
        assert books.check() == 0
    dist.destroy_process_group()


def exact_compiled(rank, world_size, folder, backends):
    """Compiled models without an attachment, on a network that loses: gradients are the mean, and training is that of an
    uncompiled model, to the bit."""
    _init(rank, world_size, folder, impair="loss(0.1),seed(5)")
    for backend in backends:
        torch._dynamo.reset()
        plain, wrapped = (DistributedDataParallel(_Net(False, 400), bucket_cap_mb=1) for _ in range(2))
        compiled = torch.compile(wrapped, backend=backend)
        for step in range(3):
            factor = _factor(rank, step, 400)
            for model, run in ((plain, plain), (wrapped, compiled)):
                model.zero_grad()
                run(factor).backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(parameter.grad, alpha=0.5)
            mean = sum(_factor(peer, step, 400) for peer in range(world_size)) / world_size
            for scale, name in enumerate(("first", "second", "third"), 1):
                assert torch.equal(getattr(wrapped.module, name).grad, scale * mean), (backend, name)
                assert torch.equal(getattr(wrapped.module, name), getattr(plain.module, name)), (
                    backend,
                    name,
                )
    dist.destroy_process_group()


def python_reducer(rank, world_size, folder):
    """It calls hooks while it is compiled, with a parameter in place of a bucket: exact only."""
    _init(rank, world_size, folder)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = DistributedDataParallel(_Net(False))
        try:
            attach(model, LOSSY)
        except UnsupportedError as error:
            assert "python_reducer" in str(error)
        else:
            raise AssertionError("an error was expected")
        compiled = torch.compile(model, backend="aot_eager")
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            compiled(_factor(rank, 0)).backward()
    mean = sum(_factor(peer, 0) for peer in range(world_size)) / world_size
    torch.testing.assert_close(model.module.second.grad, 2 * mean)
    dist.destroy_process_group()


def torch_hooks(rank, world_size, folder):
    """torch's own hooks, whose rounds are exact on any network: fp16, a wrapper, PowerSGD."""
    _init(rank, world_size, folder, impair="loss(0.05),seed(5)")
    mean = sum(_factor(peer, 0) for peer in range(world_size)) / world_size
    powersgd = {"process_group": None, "matrix_approximation_rank": WIDTH, "start_powerSGD_iter": 2}
    hooks = [
        (None, default_hooks.allreduce_hook, 1e-6),
        (None, default_hooks.fp16_compress_hook, 1e-2),
        (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 1e-2),
        (powerSGD_hook.PowerSGDState(**powersgd), powerSGD_hook.powerSGD_hook, 1e-3),
    ]
    for state, hook, tolerance in hooks:
        for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
            model = _wrapped(**options)
            model.register_comm_hook(state, hook)
            for _ in range(4):
                model.zero_grad()
                model(_factor(rank, 0)).backward()
                torch.testing.assert_close(
                    model.module.third.grad, 3 * mean, rtol=tolerance, atol=30 * tolerance
                )
                _same_everywhere(model.module.third.grad)
            if state is not None:
                break
    dist.destroy_process_group()


def powersgd_hook_slow_rank(rank, world_size, folder, late):
    """torch's PowerSGD hook, whose second and third rounds are called in callbacks: with several buckets and one slow rank these
    come in another order on each rank. The slow one is so between buckets, or, with ``late``, between a round and its callback.
    (gloo aborts, or adds one bucket's factors to another's.)"""
    _init(rank, world_size, folder, impair="loss(0.05),seed(7)")
    model = _wrapped()
    if rank == 1 and not late:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: time.sleep(0.05))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=WIDTH, start_powerSGD_iter=2)

    def hook(state, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if rank == 1 and late:
            plain = dist.all_reduce

            def slow(*args, **kwargs):
                work = plain(*args, **kwargs)
                time.sleep(0.05)
                return work

            dist.all_reduce = slow  # the round has ended before its callback is added, which runs at once
            try:
                return powerSGD_hook.powerSGD_hook(state, bucket)
            finally:
                dist.all_reduce = plain
        return powerSGD_hook.powerSGD_hook(state, bucket)

    model.register_comm_hook(state, hook)
    for step in range(6):
        model.zero_grad()
        model(_factor(rank, step)).backward()
        mean = sum(_factor(peer, step) for peer in range(world_size)) / world_size
        for name, times in (("first", 1), ("second", 2), ("third", 3)):
            gradient = getattr(model.module, name).grad
            _same_everywhere(gradient)
            if step < 2:
                torch.testing.assert_close(gradient, times * mean)
            else:  # what is not delivered is kept, so no step is the mean of its own; another bucket's would be far off
                assert torch.dist(gradient, times * mean) < 0.2 * torch.linalg.norm(times * mean)
    dist.destroy_process_group()


def callbacks_branch(rank, world_size, folder):
    """Calls in several callbacks at once, of sizes that are alike; one rank adds callbacks late. (gloo's sums are wrong.)"""
    _init(rank, world_size, folder, impair="loss(0.05),seed(9)")
    ranks = sum(range(world_size))

    def total(value):
        dist.all_reduce(tensor := torch.tensor([float(value)]))
        return tensor.item()

    def late(value):
        if rank == 0:
            time.sleep(0.05)
        return value

    def branches(_):
        futures = [dist.all_reduce(torch.ones(count), async_op=True).get_future() for count in (300_000, 1)]
        late(None)
        return [
            future.then(lambda _, value=value: total(rank + value))
            for future, value in zip(futures, (10, 20), strict=True)
        ]

    for _ in range(5):
        first = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        two_calls = first.then(lambda _: (total(rank + 1), late(None), total(rank + 2)))
        late(None)
        beside = first.then(lambda _: total(rank + 3))
        assert two_calls.wait() == (ranks + world_size, None, ranks + 2 * world_size)
        assert beside.wait() == ranks + 3 * world_size
        ends = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(branches).wait()
        assert [future.wait() for future in ends] == [ranks + 10 * world_size, ranks + 20 * world_size]

    told = []

    def note(record):
        told.append(record.getMessage())
        return True

    logging.getLogger("dblp.torch").addFilter(note)
    for _ in range(2):  # a callback of both has no place
        both = [dist.all_reduce(torch.ones(300_000), async_op=True).get_future() for _ in range(2)]
        collected = torch.futures.collect_all(both).then(lambda _: total(rank))
        assert collected.wait() == ranks
    assert len(told) == 1 and "all_reduce in a callback whose place is not known" in told[0]
    dist.destroy_process_group()


def overloads(rank, world_size, folder):
    """The forms of torch's own groups: one tensor for a list, and root, operation and timeout for the options."""
    _init(rank, world_size, folder)
    group, later = dist.group.WORLD, timedelta(seconds=15)
    assert isinstance(group, DblpProcessGroup)

    def mine():
        return torch.full((4,), rank + 1, dtype=torch.int32)

    total = world_size * (world_size + 1) // 2
    for work, tensor in _calls(group, mine, later):
        work.wait()
        assert tensor.tolist() == [total] * 4
    tensor = mine()
    group.allreduce(tensor, dist.ReduceOp.MAX, later).wait()
    assert tensor.tolist() == [world_size] * 4
    for call in (lambda t: group.broadcast(t, 1), lambda t: group.broadcast(t, root=1, timeout=later)):
        tensor = mine()
        call(tensor).wait()
        assert tensor.tolist() == [2] * 4
    tensor = mine()
    group.reduce(tensor, 0, dist.ReduceOp.SUM).wait()
    assert rank or tensor.tolist() == [total] * 4
    every = [torch.zeros(4, dtype=torch.int32) for _ in range(world_size)]
    group.allgather(every, mine()).wait()
    assert [int(each[0]) for each in every] == list(range(1, world_size + 1))
    group.gather(every if rank == 0 else [], mine(), 0, later).wait()
    out = torch.zeros(4, dtype=torch.int32)
    group.scatter(out, every if rank == 0 else [], 0).wait()
    assert out.tolist() == mine().tolist()
    group.reduce_scatter(out, every, dist.ReduceOp.SUM, later).wait()
    assert out.tolist() == [world_size * (rank + 1)] * 4
    group.alltoall(every, [mine() for _ in range(world_size)], later).wait()
    group.alltoall_base(out[:world_size], mine()[:1].repeat(world_size), [], [], later).wait()
    group.barrier(later).wait()
    with contextlib.suppress(TypeError):
        group.allreduce(tensor, nonsense=1)
        raise AssertionError("an unknown argument was taken")
    dist.destroy_process_group()


def _calls(group, mine, later):
    for call in (
        lambda tensor: group.allreduce(tensor),
        lambda tensor: group.allreduce([tensor]),
        lambda tensor: group.allreduce(tensor, dist.ReduceOp.SUM),
        lambda tensor: group.allreduce([tensor], dist.ReduceOp.SUM, later),
        lambda tensor: group.allreduce(tensor, op=dist.ReduceOp.SUM, timeout=later),
        lambda tensor: group.allreduce([tensor], dist.AllreduceOptions()),
        lambda tensor: group.allreduce([tensor], opts=dist.AllreduceOptions()),
    ):
        tensor = mine()
        yield call(tensor), tensor
