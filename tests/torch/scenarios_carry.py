"""Scenarios: what is lost is carried over in DDP, through buckets that are made anew and through checkpoints."""

# mypy: disable-error-code="attr-defined, union-attr, arg-type, index"
# torch.distributed's stubs miss names that it exports, and call every group and work optional.

import io
from dataclasses import replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dblp import Bounded, Exact, TransportConfig, attach
from dblp.errors import ConfigError
from dblp.transport.policy import Carry, CarryBound

FREE = Carry(bound=CarryBound.NONE)
LOSSY = Bounded(0.5, stop="eager", carry=FREE)


class _Net(torch.nn.Module):
    """Its gradients are small integers that the test chooses: each parameter's is the one that it is multiplied with."""

    def __init__(self):
        super().__init__()
        sizes = {"first": 20_000, "second": 12_000, "third": 30_000, "fourth": 5_000}
        for name, size in sizes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(size)))

    def forward(self, factors):
        return sum((self.get_parameter(name) * factor).sum() for name, factor in factors.items())


def _init(rank, world_size, folder):
    dist.init_process_group(
        "dblp",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
        pg_options=TransportConfig(impair="loss(0.1),seed(5)"),
    )


def _model(dtype=torch.float32):
    return DistributedDataParallel(_Net().to(dtype), bucket_cap_mb=0.025 * dtype.itemsize)


class _Books:
    """Sums over the iterations of a run, over all parameters by name: what this rank contributed, and what all got."""

    def __init__(self, model, former=None):
        self.model = model
        sizes = {name: parameter.numel() for name, parameter in model.module.named_parameters()}
        self.low = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
        self.contributed = former.contributed if former else np.zeros(sum(sizes.values()))
        self.delivered = former.delivered if former else self.contributed.copy()

    def iterate(self, rank, number):
        gradient = np.random.default_rng([rank, number]).integers(-8, 9, self.contributed.size)
        self.contributed += gradient
        parameters = list(self.model.module.named_parameters())
        parts = torch.from_numpy(gradient).split([parameter.numel() for _, parameter in parameters])
        self.model.zero_grad()
        self.model(
            {
                name: part.to(parameter.dtype)
                for (name, parameter), part in zip(parameters, parts, strict=True)
            }
        ).backward()
        gradients = torch.cat([parameter.grad for _, parameter in parameters]).double()
        self.delivered += dist.get_world_size() * gradients.numpy()

    def check(self, attachment):
        """C3, and C4 in every element: few small integers, whose sums are exact in all types. Returns what is carried here."""
        carried = np.zeros_like(self.contributed)
        for name, entry in attachment.state_dict()["carry"]["parameters"].items():
            for layer in entry["layers"]:
                carried[self.low[name] : self.low[name] + len(layer)] += layer.double().numpy()
        missing = torch.from_numpy(self.contributed - carried)
        dist.all_reduce(missing)
        assert (missing.numpy() == self.delivered).all(), (
            "C4 and C3: the same sum on all ranks, and all of it"
        )
        return np.count_nonzero(carried)


def _through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def carried(rank, world_size, folder):
    """Nothing is lost without a trace while DDP makes its buckets anew, and an exact policy then delivers all of it."""
    _init(rank, world_size, folder)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model = _model(dtype)
        attachment = attach(model, LOSSY)
        books = _Books(model)
        for number in range(3):
            books.iterate(rank, number)
            assert books.check(attachment) > 0
        sizes = [report.nbytes for report in attachment.reports]
        assert sum(sizes[:1]) == sum(sizes[1:3]) == sum(sizes[3:]), "one bucket, then two in other orders"
        assert any(report.carried.elements for report in attachment.reports)
        attachment.policy = Exact()
        books.iterate(rank, 3)
        left = books.check(attachment)
        assert left == 0 or dtype is torch.bfloat16, "only rounding is left"
    dist.destroy_process_group()


def saved(rank, world_size, folder):
    """A run that was saved and loaded carries what the one that went on does, though its buckets are still the first ones."""
    _init(rank, world_size, folder)
    for rule in (FREE, Carry(bound=CarryBound.AGE, limit=3.0), Carry(limit=50.0, momentum=0.5)):
        policy = replace(LOSSY, carry=rule)
        model = _model()
        attachment = attach(model, policy)
        books = _Books(model)
        for number in range(3):
            books.iterate(rank, number)
        state = _through_a_file(attachment.state_dict())
        assert any(entry["layers"] for entry in state["carry"]["parameters"].values())
        other = attach(_model(), policy)
        other.load_state_dict(state)
        _assert_equal(other.state_dict()["carry"], state["carry"])
        if rule.momentum:
            continue
        resumed = _Books(other._model, books)
        for number in range(3, 5):
            resumed.iterate(rank, number)
            if rule is FREE:
                assert resumed.check(other) > 0
    _refusals(attachment, state)
    dist.destroy_process_group()


def _assert_equal(left, right):
    assert left["begun"] == right["begun"] and left["parameters"].keys() == right["parameters"].keys()
    for name, entry in left["parameters"].items():
        wanted = right["parameters"][name]
        assert len(entry["layers"]) == len(wanted["layers"])
        pairs = list(zip(entry["layers"], wanted["layers"], strict=True))
        assert (entry["velocity"] is None) == (wanted["velocity"] is None)
        if entry["velocity"] is not None:
            pairs.append((entry["velocity"], wanted["velocity"]))
        assert all(torch.equal(*pair) for pair in pairs)


def _refusals(attachment, state):
    def with_parameters(**parameters):
        return {**state, "carry": {**state["carry"], "parameters": parameters}}

    entry = {"layers": [torch.zeros(7)], "velocity": None}
    for words, broken in [
        ("no state of dblp.attach", {**state, "carry": None}),
        ("no state of dblp.attach", {**state, "carry": {"version": 1}}),
        ("'first' has 20000 elements, 7 are held", with_parameters(first=entry)),
        ("no parameter 'fifth'", with_parameters(fifth=entry)),
        (
            "no state of a CarryStore",
            with_parameters(first={"layers": [torch.zeros(2, 2)], "velocity": None}),
        ),
    ]:
        before = attachment.state_dict()
        try:
            attachment.load_state_dict(broken)
        except ConfigError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"{words!r}: it was taken")
        _assert_equal(attachment.state_dict()["carry"], before["carry"])
