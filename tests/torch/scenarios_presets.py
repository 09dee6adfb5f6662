"""Scenarios: training under every preset, by its name alone."""

# mypy: disable-error-code="attr-defined, union-attr, arg-type, index"
# torch.distributed's stubs miss names that it exports, and call every group and work optional.

import io
import logging
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dblp import TransportConfig, attach
from dblp.collectives.budget import dblp_controller
from dblp.collectives.presets import preset, presets
from dblp.errors import ConfigError
from dblp.transport.policy import Bounded, Consistency

STEPS = 8
SETTINGS = {"mlt": {"low": 0.1}, "ltp": {"share": 0.3}}
"""Where the usual budget is less than a chunk of so small a model."""


def _init(rank, world_size, folder, name, **config):
    dist.init_process_group(
        "dblp",
        store=dist.FileStore(f"{folder}/store-{name}", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
        pg_options=TransportConfig(**config),
    )


def _model():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 96), torch.nn.ReLU(), torch.nn.Linear(96, 4))
    return DistributedDataParallel(model, bucket_cap_mb=0.005)


def _steps(model, rank, count=STEPS, start=0, attachment=None):
    """Learn four sums; returns each step's loss. An epoch has four steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    losses = []
    for step in range(start, start + count):
        if attachment is not None and step % 4 == 0:
            attachment.epoch(step // 4)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(32, 32, generator=generator)
        targets = inputs.view(32, 4, 8).mean(2)
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class _Weights(torch.nn.Module):
    """Its gradient is what it is multiplied with."""

    def __init__(self, count):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(count))

    def forward(self, factors):
        return (self.weights * factors).sum()


def _flat(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def _gradient(model):
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def _spread(model):
    """Largest difference between two replicas."""
    mine = _flat(model)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    return max(float((other - mine).abs().max()) for other in theirs)


def every_preset(rank, world_size, folder):
    """Each trains on a network that loses a tenth; replicas are equal where the policy says so, else once resynchronised."""
    for name in presets():
        wanted = preset(name, **SETTINGS.get(name, {}))
        _init(rank, world_size, folder, name, impair="loss(0.1),seed(3)", **wanted.transport)
        model = _model()
        attachment = attach(model, wanted if name in SETTINGS else name)
        assert attachment.policy == wanted.policy
        assert (attachment.budget is None) == (wanted.controller is None)
        losses = _steps(model, rank, attachment=attachment)
        assert losses[-1] < 0.8 * losses[0], (name, losses)
        lost = torch.tensor([float(attachment.summary.missing_chunks)])
        dist.all_reduce(lost)
        if name == "exact":
            assert float(lost) == 0.0
        if name in ("mlt", "optireduce"):
            assert float(lost) > 0.0, f"{name}: nothing was lost, so nothing is shown"
        if wanted.policy.consistency is Consistency.RELAXED:
            apart = _spread(model) > 0.0
            drift = attachment.resynchronise()
            assert (drift > 0.0) == apart
            assert apart or not float(lost)
        assert _spread(model) == 0.0, name
        dist.destroy_process_group()


def phases_of_a_preset(rank, world_size, folder):
    """The controller of ``dblp`` raises its budget after the second check; one that is given replaces it."""
    _init(rank, world_size, folder, "phases")
    model = _model()
    attachment = attach(model, preset("dblp", low=0.01, step=0.5, eta=1e9))
    _steps(model, rank, attachment=attachment)
    budgets = [report.budget for report in attachment.reports]
    low, high = 1 - 0.99**2, 1 - 0.49**2
    assert {round(budget, 6) for budget in budgets} == {round(low, 6), round(high, 6)}, budgets
    assert budgets == sorted(budgets), "critical until the second epoch's check"
    given = dblp_controller()
    assert attach(_model(), "dblp", budget=given).budget is given
    first, second = (attach(_model(), "dblp").budget for _ in range(2))
    assert first is not second and first is not None
    for wrong, words in [("dlbp", "'dlbp'"), (0.1, "name of a preset")]:
        try:
            attach(_model(), wrong)
        except ConfigError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"{wrong!r} was taken")
    dist.destroy_process_group()


def rotated(rank, world_size, folder):
    """Under ``hadamard`` what arrives whole is the same average, and what is lost is a part of everything."""
    _init(rank, world_size, folder, "rotated")
    plain, turned = _model(), _model()
    attach(plain)
    attachment = attach(turned, "optireduce")
    for step in range(3):
        _steps(plain, rank, 1, step)
        _steps(turned, rank, 1, step)
        difference = (_gradient(turned) - _gradient(plain)).norm() / _gradient(plain).norm()
        assert difference < 1e-5, difference
    state = _through_a_file(attachment.state_dict())
    assert state["rounds"] == attachment.summary.rounds >= 3, (state["rounds"], attachment.summary)
    resumed = attach(_model(), "optireduce")
    resumed.load_state_dict(state)
    assert resumed.policy == attachment.policy and resumed.state_dict() == state
    before = torch.randn(500, generator=torch.Generator().manual_seed(0))
    one, other = before.clone(), before.clone()
    assert attachment.rotate(one, attachment.policy) == resumed.rotate(other, resumed.policy) != 0
    assert torch.equal(one, other) and not torch.equal(one, before)
    assert attachment.rotate(one, Bounded(0.1)) is None
    assert attachment.rotate(torch.ones(8, dtype=torch.complex64), attachment.policy) is None
    dist.destroy_process_group()
    _lost_while_rotated(rank, world_size, folder)


def _lost_while_rotated(rank, world_size, folder):
    """A gradient whose energy is in few places: of what is lost, each place loses a little, and the report says how much."""
    _init(rank, world_size, folder, "lossy", impair="loss(0.3),seed(5)")
    model = DistributedDataParallel(_Weights(60_000))
    attachment = attach(model, preset("optireduce", leg=0.6, t_b_s=5.0))
    places = torch.randperm(60_000, generator=torch.Generator().manual_seed(2))[:40]
    gradient = torch.zeros(60_000)
    gradient[places] = 100.0
    for _ in range(4):
        model.zero_grad()
        model(gradient).backward()
        report = attachment.reports[-1]
        got = model.module.weights.grad[places]
        if report.missing_chunks:
            missing = report.missing_share
            assert 0.5 * missing < report.energy_lost < 1.5 * missing, (report.energy_lost, missing)
            assert (got > 20.0).all() and (got < 100.0).any(), "nothing is lost whole"
    assert attachment.summary.missing_chunks > 0
    dist.destroy_process_group()


def transports(rank, world_size, folder):
    """A preset whose transport the group does not have says so, once it is attached."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    logging.getLogger("dblp").addHandler(Listener())
    _init(rank, world_size, folder, "usual")
    attach(_model(), "ltp")
    assert any("'ltp' asks for" in words and "DBLP_CONGESTION=bbr" in words for words in said), said
    said.clear()
    attach(_model(), "default")
    assert not said
    dist.destroy_process_group()


def _through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
