"""Scenarios: compressed gradients in DDP, through buckets that are made anew and through checkpoints."""

# mypy: disable-error-code="attr-defined, union-attr, arg-type, index"
# torch.distributed's stubs miss names that it exports, and call every group and work optional.

import io
import os
import signal
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dblp import (
    Bounded,
    BudgetController,
    Budgets,
    Carry,
    CheckpointState,
    Exact,
    Interval,
    JointController,
    Manual,
    NormChange,
    Policy,
    TransportConfig,
    attach,
    merge_states,
)
from dblp.collectives.compression.base import Bucket, Job, Part
from dblp.collectives.compression.memory import Memory
from dblp.collectives.compression.powersgd import PowerSGD
from dblp.collectives.compression.registry import METHODS, parse_compression
from dblp.collectives.compression.rounds import Compression
from dblp.collectives.reduction import DTYPES
from dblp.errors import ConfigError, MismatchError

_SIZES = {"first": (200, 100), "second": (120, 10, 10), "third": (30_000,), "fourth": (50, 100)}
_TEXTS = {
    "topk": "topk(0.1)",
    "redsync": "redsync(0.1)",
    "randomk": "randomk(0.2)",
    "threshold": "threshold(0.002)",
    "dgc": "dgc(0.05,indices=delta)",
}

_CHECKPOINTED = ("dgc", "topk", "powersgd", "gravac")
_AGES = Carry(bound="age", limit=2)
_MORE_TYPES = {"topk": (torch.float64, torch.bfloat16), "int8": (torch.float16,), "dgc": (torch.float64,)}


class _Net(torch.nn.Module):
    """Its gradients are what the test chooses: each parameter's is the one that it is multiplied with."""

    def __init__(self):
        super().__init__()
        for name, shape in _SIZES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, factors):
        return sum((self.get_parameter(name) * factor).sum() for name, factor in factors.items())


def _init(rank, world_size, folder, seconds=20, impair="loss(0.01),seed(5)"):
    dist.init_process_group(
        "dblp",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
        pg_options=TransportConfig(impair=impair),
    )


def _model(dtype=torch.float32):
    return DistributedDataParallel(_Net().to(dtype), bucket_cap_mb=0.025 * dtype.itemsize)


def _iterate(model, rank, number):
    """A backward pass with small integers; returns this rank's gradients and the averages, in the order of the names."""
    dtype = next(model.parameters()).dtype
    rng = np.random.default_rng([rank, number])
    mine = {name: torch.from_numpy(rng.integers(-8, 9, shape)).to(dtype) for name, shape in _SIZES.items()}
    model.zero_grad()
    model(mine).backward()
    own = torch.cat([value.reshape(-1) for value in mine.values()]).double()
    averages = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double()
    return own, averages


def _withheld(attachment):
    parts = attachment.state_dict()["compression"]["memory"]["parameters"]
    flats = []
    for name, shape in _SIZES.items():
        flat = torch.zeros(int(np.prod(shape)), dtype=torch.float64)
        for layer in parts.get(name, {"layers": []})["layers"]:
            flat += layer
        flats.append(flat)
    return torch.cat(flats)


def _assert_equal_everywhere(tensor):
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor)
    assert all(torch.equal(other, tensor) for other in others), "C3: replicas are identical"


def compressed(rank, world_size, folder):
    """Every method and type: replicas identical, and what is not delivered is withheld, while DDP makes its buckets anew."""
    _init(rank, world_size, folder)
    for name in METHODS:
        for dtype in (torch.float32, *_MORE_TYPES.get(name, ())):
            model = _model(dtype)
            attachment = attach(model, compression=_TEXTS.get(name, name))
            gap = torch.zeros(sum(int(np.prod(shape)) for shape in _SIZES.values()), dtype=torch.float64)
            for number in range(3):
                own, averages = _iterate(model, rank, number)
                _assert_equal_everywhere(averages)
                gap += own - averages
            _check_gap(name, dtype, gap, _withheld(attachment))
            assert attachment.compression.totals.rounds == attachment.summary.rounds
    flights = dist.group.WORLD.flight_recorder.report()
    assert flights["groups"]["0"] == "default" and set(flights["groups"].values()) == {
        "default",
        "compression",
    }
    assert {round_["group"] for round_ in flights["rounds"]} > {0, 1}
    dist.destroy_process_group()


def compressed_saved(rank, world_size, folder, place):
    """Methods that hold something, after two steps: a checkpoint of all ranks, and each rank's own state."""
    _init(rank, world_size, folder)
    for name in _CHECKPOINTED:
        model = _model()
        attachment = attach(model, compression=_TEXTS.get(name, name))
        for number in range(2):
            _iterate(model, rank, number)
        dcp.save({"dblp": CheckpointState(attachment)}, checkpoint_id=f"{place}/{name}")
        torch.save(attachment.state_dict(), f"{place}/{name}-{rank}.pt")
    dist.destroy_process_group()


def compressed_loaded(rank, world_size, folder, place, before):
    """Taken over by another number of ranks: replicas stay identical, and what was the same on all ranks still is."""
    _init(rank, world_size, folder)
    for name in _CHECKPOINTED:
        states = [torch.load(f"{place}/{name}-{other}.pt", weights_only=True) for other in range(before)]
        for by_hand in (False, True):
            model = _model()
            attachment = attach(model, compression=_TEXTS.get(name, name))
            if by_hand:
                attachment.load_state_dict(merge_states(states))
            else:
                dcp.load({"dblp": CheckpointState(attachment)}, checkpoint_id=f"{place}/{name}")
            if name == "dgc":
                saved, loaded = (
                    state["compression"]["memory"]["parameters"]["third"]["velocity"]
                    for state in (states[0], attachment.state_dict())
                )
                assert saved.any() and torch.equal(loaded, saved), "made of averages: whole on each rank"
            for number in (2, 3):
                _, averages = _iterate(model, rank, number)
                _assert_equal_everywhere(averages)
    dist.destroy_process_group()


def _check_gap(name, dtype, gap, withheld):
    """Over the ranks: what was contributed and not delivered is what is withheld. Exactly where sums of integers are."""
    missing = gap - withheld
    dist.all_reduce(missing)
    if name == "dgc":
        return  # velocities, not gradients, are what it delivers
    worst = float(missing.abs().max())
    if name in ("topk", "redsync", "randomk", "none", "threshold", "gravac") and dtype is not torch.bfloat16:
        assert worst == 0.0, (name, dtype, worst)
    else:
        assert worst < 0.5, (name, dtype, worst)


def compressed_under_a_policy(rank, world_size, folder):
    """Every method under a loss policy, on sockets that lose: replicas identical, and what is not delivered is withheld, while
    DDP makes its buckets anew; there is no second carry; a controller moves the budget."""
    _init(rank, world_size, folder, impair="loss(0.1),seed(7)")
    policy, missing = Bounded(0.4, carry=Carry(bound="none")), 0
    for name in METHODS:
        attachment = attach(model := _model(), policy, compression=_TEXTS.get(name, name))
        gap = torch.zeros(sum(int(np.prod(shape)) for shape in _SIZES.values()), dtype=torch.float64)
        for number in range(3):
            own, averages = _iterate(model, rank, number)
            _assert_equal_everywhere(averages)
            gap += own - averages
        _check_gap(name, torch.float32, gap, _withheld(attachment))
        assert not attachment.state_dict()["carry"]["parameters"]
        assert all(report.budget == 0.4 for report in attachment.reports)
        missing += attachment.summary.missing_chunks
    total = torch.tensor(missing)
    dist.all_reduce(total)
    assert total > 0, "a network that loses a tenth"
    controller = BudgetController(NormChange(), Budgets(low=0.1, high=0.3), interval=Interval(iterations=1))
    attachment = attach(model := _model(), Bounded(0.2), compression="topk(0.2)", budget=controller)
    for _ in range(3):
        _iterate(model, rank, 7)
    assert [report.budget for report in attachment.reports][:: len(attachment.reports) - 1] == [0.1, 0.3]
    _joint(rank)
    dist.destroy_process_group()


def _joint(rank):
    """A controller of budget and ratio: all at first, then less, the same on all ranks, and through a checkpoint."""
    joint = JointController(Manual("tolerant"), interval=Interval(iterations=1), check=Interval(iterations=1))
    attachment = attach(model := _model(), Bounded(0.2), compression="joint", budget=joint)
    for _ in range(4):
        _, averages = _iterate(model, rank, 7)
        _assert_equal_everywhere(averages)
    assert joint.choice.ratio <= 1.0 and joint.predicted_s is not None
    other = JointController(Manual("tolerant"), interval=Interval(iterations=1), check=Interval(iterations=1))
    resumed = attach(_model(), Bounded(0.2), compression="joint", budget=other)
    resumed.load_state_dict(_through_a_file(attachment.state_dict()))
    assert other.choice == joint.choice
    for words, options in [("decides the ratio", {"compression": "topk(0.1)"}), ("without compression", {})]:
        free = JointController(Manual())
        _refused(ConfigError, words, lambda: attach(_model(), budget=free, **options))  # noqa: B023


def compression_saved(rank, world_size, folder):
    """A run that was saved and loaded goes on as the one that was not, though its buckets are still the first ones."""
    _init(rank, world_size, folder)
    for text in ("topk(0.1)", "dgc(0.05,momentum=0.5)", "randomk(0.2)"):
        attachment = attach(model := _model(), compression=text)
        attachment.epoch(2)
        for number in range(3):
            _iterate(model, rank, number)
        state = _through_a_file(attachment.state_dict())
        other = attach(resumed := _model(), compression=text)
        other.load_state_dict(state)
        assert torch.equal(_withheld(other), _withheld(attachment)) and _withheld(other).any()
        assert other.compression.totals == attachment.compression.totals
        gap = _withheld(other)
        for number in range(3, 5):
            own, averages = _iterate(resumed, rank, number)
            gap += own - averages
        if "dgc" not in text:
            _check_gap(text.partition("(")[0], torch.float32, gap, _withheld(other))
    _refused_states(attachment, state)
    dist.destroy_process_group()


def _through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _refused_states(attachment, state):
    inside = state["compression"]

    def with_parameters(**parameters):
        return {**state, "compression": {**inside, "memory": {**inside["memory"], "parameters": parameters}}}

    entry = {"layers": [torch.zeros(7)], "velocity": None}
    for words, broken in [
        ("attach has a compression", {**state, "compression": None}),
        ("the state is of 'dgc'", {**state, "compression": {**inside, "method": "dgc"}}),
        ("'first' has 20000 elements, 7 are held", with_parameters(first=entry)),
        ("no parameter 'fifth'", with_parameters(fifth=entry)),
        ("no state of a compression: it has no 'factors'", {**state, "compression": {"version": 1}}),
    ]:
        before = _withheld(attachment)
        _refused(ConfigError, words, lambda broken=broken: attachment.load_state_dict(broken))
        assert torch.equal(_withheld(attachment), before)


def _refused(error, words, call):
    try:
        call()
    except error as caught:
        assert words in str(caught), caught
    else:
        raise AssertionError(f"{words!r}: {error.__name__} was expected")


def compression_refused(rank, world_size, folder):
    """What does not go together is refused where it is asked for; NaN is heard by all ranks, and the next step is a usual one."""
    _init(rank, world_size, folder)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    for words, call in [
        ("'zip' is no compression method", lambda: attach(_model(), compression="zip")),
        ("compression=0.1", lambda: attach(_model(), compression=0.1)),
        ("bounded by 'age'", lambda: attach(_model(), Bounded(0.1, carry=_AGES), compression="fp16")),
        ("momentum=0", lambda: attach(_model(), compression="dgc", optimizer=sgd)),
    ]:
        _refused(ConfigError, words, call)
    _refused(
        MismatchError,
        "different compression methods, rank 0 sign() and rank 1 fp16(feedback=true): give all",
        lambda: attach(_model(), compression=("sign", "fp16")[rank]),
    )
    model = _model()
    attachment = attach(model, Exact(), compression="topk(0.1)")

    def relaxed():
        attachment.policy = Bounded(0.1, consistency="relaxed")

    _refused(ConfigError, "'topk' with this policy: consistency='relaxed'", relaxed)
    controller = BudgetController(NormChange(), Budgets(low=0.0, high=0.1))
    rotated = Policy(hadamard=True)
    _refused(
        ConfigError, "hadamard", lambda: attach(_model(), rotated, compression="fp16", budget=controller)
    )
    assert attachment.policy == Exact()
    ones = {name: torch.ones(shape) for name, shape in _SIZES.items()}
    ones["first"][3, 4] = torch.nan if rank else 1.0
    model(ones).backward()
    assert model.module.first.grad.isnan().all(), "it is passed on, on every rank"
    assert _withheld(attachment).isfinite().all(), "and enters no residual"
    model.zero_grad()
    _, averages = _iterate(model, rank, 1)
    _assert_equal_everywhere(averages)
    assert averages.isfinite().all() and attachment.compression.totals.spoiled >= 1
    dist.destroy_process_group()


class _Bucket:
    """What torch's hook asks of a bucket."""

    def __init__(self, flat):
        self._flat = flat
        sizes = [int(np.prod(shape)) for shape in _SIZES.values()]
        self._parts = [
            part.view(shape) for part, shape in zip(flat.split(sizes), _SIZES.values(), strict=True)
        ]

    def index(self):
        return 0

    def buffer(self):
        return self._flat

    def gradients(self):
        return self._parts

    def is_last(self):
        return True


def powersgd_is_torchs(rank, world_size, folder):
    """The averages of torch's own hook, over several steps with its error feedback and warm start, from the same first Q."""
    _init(rank, world_size, folder)
    group = dist.group.WORLD
    rounds, own_group = Compression(parse_compression("powersgd(2)")), group.session.new_group("a test")
    parts = Bucket([Part(name, shape) for name, shape in _SIZES.items()])
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    state.iter = 2
    first = [_first_q(name, shape) for name, shape in _SIZES.items() if len(shape) > 1]
    state.q_memory_dict[0] = torch.cat([q.reshape(-1) for q in first])
    state.p_memory_dict[0] = torch.empty(2 * sum(shape[0] for shape in _SIZES.values() if len(shape) > 1))
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + rank)
        gradient = torch.randn(parts.size, generator=generator)
        mine = gradient.numpy().copy()
        group.session.run(
            "powersgd", 20.0, lambda _, mine=mine: rounds.all_reduce(own_group, mine, parts, timeout_s=20.0)
        )
        wanted = powerSGD_hook.powerSGD_hook(state, _Bucket(gradient)).wait()
        torch.testing.assert_close(torch.from_numpy(mine), wanted, rtol=1e-3, atol=1e-3)
    dense = sum(int(np.prod(shape)) for shape in _SIZES.values() if len(shape) == 1)
    assert (
        state.total_numel_after_compression / 5
        == dense + len(torch.cat([q.reshape(-1) for q in first])) + 2 * 370
    )
    assert rounds.totals.payload_bytes == 4 * state.total_numel_after_compression
    dist.destroy_process_group()


def _first_q(name, shape):
    """The method's first Q, by its own seed."""
    method, part = PowerSGD(rank=2), Part(name, shape)
    job = Job(
        bucket=Bucket([part]),
        memory=Memory(part.size),
        gradient=np.zeros(part.size, np.float32),
        kind=DTYPES["float32"],
        rank=0,
        world_size=1,
    )
    return torch.from_numpy(method._last(job, part))


def compression_kinds_of_ddp(rank, world_size, folder):
    """Views of buckets, unused parameters, accumulation without rounds, ranks with fewer batches, a barrier in between."""
    _init(rank, world_size, folder)
    for text in ("int8", "dgc(0.05)"):
        for options in ({"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
            torch.manual_seed(1)
            net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
            model = DistributedDataParallel(net, bucket_cap_mb=0.002, **options)
            attachment = attach(model, compression=text)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            generator = torch.Generator().manual_seed(rank)

            def step(model=model, optimizer=optimizer, generator=generator):
                optimizer.zero_grad()
                model(torch.randn(8, 20, generator=generator)).square().mean().backward()
                optimizer.step()

            step()
            with model.no_sync():
                model(torch.ones(4, 20)).sum().backward()
            rounds = attachment.summary.rounds
            dist.barrier()
            if "find_unused_parameters" in options:
                step()
            else:
                with model.join():
                    for _ in range(2 + rank):
                        step()
            assert attachment.summary.rounds > rounds
            _assert_equal_everywhere(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    dist.destroy_process_group()


def compression_loses_a_rank(rank, world_size, folder):
    """A rank that dies in training becomes an error on the others that names it."""
    _init(rank, world_size, folder, seconds=4)
    model = _model()
    attach(model, compression="dgc(0.05,indices=delta)")
    try:  # the first iteration too: what rank 1 owes of it may die with it
        for number in range(50):
            _iterate(model, rank, number)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    except RuntimeError as error:
        assert "rank 1" in str(error), error
    else:
        raise AssertionError("an error was expected")


def accordion_follows_phases(rank, world_size, folder):
    """Gradients that keep their norm become tolerant after the first interval, one that grows stays critical."""
    _init(rank, world_size, folder)
    model = _model()
    attachment = attach(model, compression="accordion(epochs=1,tolerant=0.05)")
    for epoch in range(4):
        attachment.epoch(epoch)
        for number in range(2):
            factors = {
                name: torch.randn(shape, generator=torch.Generator().manual_seed(number))
                for name, shape in _SIZES.items()
            }
            factors["second"] *= 4.0**epoch
            model.zero_grad()
            model(factors).backward()
    before = attachment.compression.totals.payload_bytes
    model(factors).backward()
    sent = attachment.compression.totals.payload_bytes - before
    assert attachment.phases.of("second").value == "critical"
    assert attachment.phases.of("first").value == "tolerant"
    assert 4 * 12_000 <= sent <= 4 * 12_000 + 8 * 0.05 * 55_000 + 200, sent
    _assert_equal_everywhere(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    dist.destroy_process_group()
