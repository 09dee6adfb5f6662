"""Scenarios: FSDP2 (``fully_shard``) with bounded reduce-scatters."""

# mypy: disable-error-code="attr-defined, union-attr, arg-type, index, call-overload, operator"
# torch.distributed's stubs miss names that it exports, and call every group and work optional.

import io
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from dblp import (
    Bounded,
    BudgetController,
    Budgets,
    Exact,
    Interval,
    NormChange,
    Phase,
    Policy,
    Stop,
    Tags,
    TransportConfig,
    attach,
)
from dblp.errors import ConfigError, UnsupportedError
from dblp.transport.policy import Carry, CarryBound

FREE = Carry(bound=CarryBound.NONE)
LOSSY = Bounded(0.5, stop="eager", carry=FREE)
SHAPES = {"first": (101, 90), "second": (64, 100), "third": (7, 900)}
"""Rows that 2 and 4 ranks do not share evenly, and more than they have rows for."""


def _init(rank, world_size, folder, **config):
    dist.init_process_group(
        "dblp",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
        pg_options=TransportConfig(**config),
    )


class _Part(torch.nn.Module):
    """One parameter, whose gradient is what it is multiplied with."""

    def __init__(self, shape):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(shape))

    def forward(self, factor):
        return (self.weight * factor).sum()


class _Net(torch.nn.Module):
    def __init__(self, frozen=False):
        super().__init__()
        for name, shape in SHAPES.items():
            self.add_module(name, _Part(shape))
        self.scale = torch.nn.Parameter(torch.ones(3), requires_grad=not frozen)

    def forward(self, factors, scale):
        parts = [self.get_submodule(name)(factors[name]) for name in SHAPES]
        return sum(parts) + (0.0 if scale is None else (self.scale * scale).sum())


def _sharded(mesh=None, frozen=False, **settings):
    model = _Net(frozen)
    for name in ("first", "third"):  # "second" and "scale" are the root's
        fully_shard(model.get_submodule(name), mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def _integers(rank, number):
    """Gradients of small integers, whose sums are exact; by parameter."""
    random = np.random.default_rng([rank, number])
    shapes = {**{f"{name}.weight": shape for name, shape in SHAPES.items()}, "scale": (3,)}
    return {name: random.integers(-8, 9, shape).astype(np.float32) for name, shape in shapes.items()}


def _backward(model, gradients, scale=1.0):
    model.zero_grad()
    factors = {name: torch.from_numpy(gradients[f"{name}.weight"]) * scale for name in SHAPES}
    model(factors, torch.from_numpy(gradients["scale"]) * scale).backward()


def _whole(gradient):
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).numpy()


def _gradients(model):
    return {
        name: _whole(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _carried(attachment):
    """What this rank carries, by parameter, in the parameter's shape."""
    entries = attachment.state_dict()["carry"]["parameters"]
    sums = {name: sum(layer.double() for layer in entry["layers"]) for name, entry in entries.items()}
    return {name: values.numpy() for name, values in sums.items() if not isinstance(values, int)}


class _Books:
    """What the ranks contributed and what they got, summed over the iterations."""

    def __init__(self, former=None):
        self.contributed = dict(former.contributed) if former else {}
        self.delivered = dict(former.delivered) if former else {}

    def iterate(self, model, rank, number):
        mine = _integers(rank, number)
        _backward(model, mine)
        for name, gradient in _gradients(model).items():
            self.contributed[name] = self.contributed.get(name, 0.0) + mine[name].astype(np.float64)
            self.delivered[name] = self.delivered.get(name, 0.0) + dist.get_world_size() * gradient

    def check(self, attachment):
        """C4 in every element. Returns how many elements are carried here."""
        carried = _carried(attachment)
        for name, contributed in self.contributed.items():
            held = carried.get(name, np.zeros(contributed.size)).reshape(contributed.shape)
            total = torch.from_numpy(contributed - held)
            dist.all_reduce(total)
            assert (total.numpy() == self.delivered[name]).all(), f"C4 of {name}"
        return sum(np.count_nonzero(values) for values in carried.values())


def sharded_without_loss(rank, world_size, folder):
    """Where nothing is lost, an attachment changes no bit; also in mixed precision, over replicas, by other dimensions."""
    _init(rank, world_size, folder)
    kinds = [
        ({}, {}),
        ({"frozen": True}, {}),
        ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, {}),
        (
            {
                "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
                "reshard_after_forward": False,
            },
            {},
        ),
        ({"shard_placement_fn": _last_dimension}, {}),
        ({}, {"tags": Tags.BOTH, "critical_share": 0.1}),
    ]
    if world_size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        kinds.append(({"mesh": mesh}, {}))
    for settings, fields in kinds:
        plain, model = _sharded(**settings), _sharded(**settings)
        attachment = attach(model, replace(Bounded(0.3), **fields))
        for number in range(3):
            gradients = {name: values * 0.37 for name, values in _integers(rank, number).items()}
            _backward(plain, gradients)
            _backward(model, gradients)
            expected, found = _gradients(plain), _gradients(model)
            assert expected.keys() == found.keys()
            assert all(np.array_equal(expected[name], found[name]) for name in expected), settings
        modules = 3
        assert attachment.summary.rounds == 3 * modules == len(attachment.reports)
        assert attachment.summary.missing_chunks == 0 and attachment.reports[0].budget == 0.3
    dist.destroy_process_group()


def _last_dimension(parameter):
    even = parameter.ndim == 2 and parameter.shape[1] % 4 == 0
    return Shard(1) if even else Shard(0)


def sharded_carried(rank, world_size, folder):
    """On a network that loses: within the bound, nothing without a trace, parameters whole; then all of it by an exact policy."""
    _init(rank, world_size, folder, impair="loss(0.1),seed(5)")
    kinds: list[Any] = [(None, None), (None, _last_dimension)]
    if world_size == 4:
        kinds = [(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), None)]
    for mesh, placement in kinds:
        model = _sharded(mesh, shard_placement_fn=placement)
        attachment = attach(model, LOSSY)
        books, most = _Books(), 0
        for number in range(3):
            books.iterate(model, rank, number)
            most = max(most, books.check(attachment))
        assert most > 0, "something was lost and is carried"
        assert 0.0 < attachment.summary.missing_share < 0.5
        attachment.policy = Exact()
        books.iterate(model, rank, 3)
        assert books.check(attachment) == 0
        _without_some(model, attachment, rank)
    dist.destroy_process_group()


def _without_some(model, attachment, rank):
    """A module of which a part has no gradient is reduced exactly; a pass that does not reduce makes no iteration."""
    attachment.policy = LOSSY
    model.zero_grad()
    mine = _integers(rank, 4)
    model({name: torch.from_numpy(mine[f"{name}.weight"]) for name in SHAPES}, None).backward()
    budgets = sorted(report.budget for report in attachment.reports[-3:])
    assert budgets == [0.0, 0.5, 0.5], "the root's was exact: scale has no gradient"
    iterations, rounds = attachment.state_dict()["iterations"], attachment.summary.rounds
    model.set_requires_gradient_sync(False)
    _backward(model, mine)
    model.set_requires_gradient_sync(True)
    assert attachment.state_dict()["iterations"] == iterations and attachment.summary.rounds == rounds


def sharded_saved(rank, world_size, folder):
    """A run that was saved and loaded carries what the one that went on does; a DDP model can take the state, too."""
    _init(rank, world_size, folder, impair="loss(0.1),seed(5)")
    for rule in (FREE, Carry(bound=CarryBound.AGE, limit=3.0), Carry(limit=50.0, momentum=0.5)):
        model = _sharded(shard_placement_fn=_last_dimension)
        attachment = attach(model, replace(LOSSY, carry=rule))
        books = _Books()
        for number in range(3):
            books.iterate(model, rank, number)
        state = _through_a_file(attachment.state_dict())
        assert any(entry["layers"] for entry in state["carry"]["parameters"].values())
        other_model = _sharded()  # by other dimensions
        other = attach(other_model, Exact())
        other.load_state_dict(state)
        assert other.policy == attachment.policy
        again = other.state_dict()
        _same_carry(again["carry"], state["carry"])
        replicated = attach(DistributedDataParallel(_Net()), Exact())
        replicated.load_state_dict(state)
        _same_carry(replicated.state_dict()["carry"], state["carry"])
        if rule is FREE:
            resumed = _Books(books)
            for number in range(3, 5):
                resumed.iterate(other_model, rank, number)
                assert resumed.check(other) > 0
    for broken in (
        {**state, "carry": None},
        {**state, "carry": {**state["carry"], "parameters": {"x": None}}},
    ):
        _refused(ConfigError, "no state of dblp.attach", lambda broken=broken: other.load_state_dict(broken))
    dist.destroy_process_group()


def _same_carry(left, right):
    assert left["begun"] == right["begun"] and left["parameters"].keys() == right["parameters"].keys()
    for name, entry in left["parameters"].items():
        wanted = right["parameters"][name]
        assert len(entry["layers"]) == len(wanted["layers"])
        assert all(map(torch.equal, entry["layers"], wanted["layers"]))
        assert (entry["velocity"] is None) == (wanted["velocity"] is None)
        if entry["velocity"] is not None:
            assert torch.equal(entry["velocity"], wanted["velocity"])


def sharded_budgets(rank, world_size, folder):
    """Budgets follow the norm of the whole gradient, of which each rank has a part: as under DDP, and alike on all ranks."""
    _init(rank, world_size, folder)
    scales = [1.0, 1.1, 1.2, 9.0, 9.5, 9.4]
    found = []
    for wrap in (_sharded, lambda: DistributedDataParallel(_Net())):
        model = wrap()
        controller = BudgetController(
            NormChange(0.5, layers=True) | NormChange(0.5),
            Budgets(low=0.01, high=0.4),
            layers={"scale": Budgets(low=0.0, high=0.2)},
            interval=Interval(iterations=1),
        )
        attachment = attach(model, Bounded(0.1, consistency="exact"), budget=controller)
        phases = []
        for number, scale in enumerate(scales):
            _backward(model, _integers(rank, 0), scale)
            phases.append((controller.phases.model, controller.phases.of("first.weight")))
            assert controller.iteration == number
        state = attachment.state_dict()
        found.append(phases)
        budgets = {report.budget for report in attachment.reports}
        assert min(budgets) == 0.0 and max(budgets) == (0.4 if wrap is _sharded else 0.2), budgets
        gathered = [None] * world_size
        dist.all_gather_object(gathered, (phases, state["budget"]))
        assert all(other == gathered[0] for other in gathered), "all ranks decide alike"
        again = attach(
            wrap(),
            Bounded(0.1),
            budget=BudgetController(
                NormChange(0.5, layers=True) | NormChange(0.5),
                Budgets(low=0.01, high=0.4),
                layers={"scale": Budgets(low=0.0, high=0.2)},
                interval=Interval(iterations=1),
            ),
        )
        again.load_state_dict(_through_a_file(state))
        assert again.state_dict()["budget"] == state["budget"]
    assert found[0] == found[1], "sharded as replicated"
    assert {Phase.CRITICAL, Phase.TOLERANT} == {phase for phase, _ in found[0]}
    dist.destroy_process_group()


def sharded_rotated(rank, world_size, folder):
    """A rotated reduce-scatter gives the gradient back, up to rounding; what is lost takes a little of everything."""
    _init(rank, world_size, folder, impair="loss(0.1),seed(5)")
    model, plain = _sharded(), _sharded()
    attachment = attach(model, Policy(budget=0.5, stop=Stop.EAGER, hadamard=True))
    for number in range(3):
        gradients = _integers(rank, number)
        _backward(plain, gradients)
        _backward(model, gradients)
        expected, found = _gradients(plain)["first.weight"], _gradients(model)["first.weight"]
        lost = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert lost < 0.8
    assert attachment.summary.missing_chunks > 0
    attachment.policy = Policy(hadamard=True)
    _backward(model, gradients)
    np.testing.assert_allclose(_gradients(model)["first.weight"], expected, atol=1e-4)
    dist.destroy_process_group()


def _refused(error, words, call):
    try:
        call()
    except error as caught:
        assert words in str(caught), caught
    else:
        raise AssertionError(f"{error.__name__} was expected")


class _Waves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wave = torch.nn.Parameter(torch.ones(8, 4, dtype=torch.complex64))

    def forward(self, factor):
        return ((self.wave.real + self.wave.imag) * factor).sum()


def _sharded_by_fsdp1():
    return FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))


def sharded_refusals(rank, world_size, folder):
    """What makes no sense for shards is refused in ``attach``, and leaves the model as it was."""
    _init(rank, world_size, folder)
    model = _sharded()
    waves = fully_shard(_Waves())
    policy = Bounded(0.1, carry=None)
    for error, words, call in [
        (UnsupportedError, "nothing", lambda: attach(fully_shard(torch.nn.ReLU()))),
        (
            UnsupportedError,
            "consistency='agreed'",
            lambda: attach(model, replace(policy, consistency="relaxed")),
        ),
        (UnsupportedError, "consistency='agreed'", lambda: attach(model, "mlt")),
        (UnsupportedError, "algorithm='ps", lambda: attach(model, "ltp")),
        (UnsupportedError, "algorithm='ring'", lambda: attach(model, replace(policy, algorithm="ring"))),
        (UnsupportedError, "fill='rescale'", lambda: attach(model, replace(policy, fill="rescale"))),
        (
            UnsupportedError,
            "short='skip'",
            lambda: attach(model, replace(policy, stop="deadline", stop_after_s=1.0, short="skip")),
        ),
        (UnsupportedError, "compression=", lambda: attach(model, compression="topk(0.1)")),
        (ConfigError, "history=-1", lambda: attach(model, history=-1)),
        (ConfigError, "dblp.Policy", lambda: attach(model, 0.1)),
        (UnsupportedError, "fully_shard", lambda: attach(_sharded_by_fsdp1())),
        (UnsupportedError, "'wave' is torch.complex64", lambda: attach(waves, policy)),
    ]:
        _refused(error, words, call)
    exact = attach(waves)
    waves(torch.full((8, 4), 3.0 * (rank + 1))).backward()
    assert (waves.wave.grad.to_local() == complex(1, 1) * 3 * (world_size + 1) / 2).all()
    _refused(UnsupportedError, "only real gradients", lambda: setattr(exact, "policy", policy))
    attachment = attach(model, "default")
    _refused(ConfigError, "has an attachment already", lambda: attach(model))
    _refused(UnsupportedError, "nothing can drift", attachment.resynchronise)
    _refused(
        UnsupportedError, "algorithm='ring'", lambda: setattr(attachment, "policy", Policy(algorithm="ring"))
    )
    for number in range(2):
        _backward(model, _integers(rank, number))
    assert attachment.summary.rounds == 6 and attachment.reports[0].budget < attachment.policy.budget
    gloo = init_device_mesh("cpu", (world_size,))
    group = dist.new_group(backend="gloo")
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    assert gloo.size() == mesh.size()
    _refused(UnsupportedError, "over the backend 'dblp'", lambda: attach(_sharded(mesh)))
    dist.destroy_process_group()


def sharded_exit(rank, world_size, folder):
    """A rank that ends without destroying its group, its model alive."""
    _init(rank, world_size, folder)
    global _left
    _left = _sharded()
    attach(_left, Bounded(0.1))
    _backward(_left, _integers(rank, 0))


_left = None
"""What ``sharded_exit`` leaves behind."""
