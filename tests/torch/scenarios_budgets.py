"""Scenarios: budgets that follow the phase, and replicas that may drift, in DDP."""

# mypy: disable-error-code="attr-defined, union-attr, arg-type, index"
# torch.distributed's stubs miss names that it exports, and call every group and work optional.

import io
import logging
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from dblp import Bounded, Policy, TransportConfig, attach
from dblp.collectives.budget import BudgetController, Budgets, EnergyCap, Interval, dblp_controller
from dblp.collectives.phases import Hold, LearningRateChange, Manual, Metric, NormChange, Phase, Schedule
from dblp.collectives.torch.buckets import Layouts, layer_square_norms, square_norm
from dblp.errors import ConfigError, MismatchError, UnsupportedError
from dblp.transport.policy import Consistency, Stop, Tags

BUDGETS = Budgets(low=0.01, high=0.4)
C, T = Phase.CRITICAL, Phase.TOLERANT


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
    """Linear in its parameters but for a bias, so that scaling the loss scales the gradient by as much."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(40, 64, bias=False)
        self.middle = torch.nn.Linear(64, 64)
        self.head = torch.nn.Linear(64, 8)
        self.unused = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.middle(self.body(x)))


def _model(unused=True, **options):
    torch.manual_seed(1)
    net = _Net()
    if not unused:
        del net.unused
    return DistributedDataParallel(net, bucket_cap_mb=0.01, find_unused_parameters=unused, **options)


def _iterate(model, rank, iteration, scale=1.0, backwards=1):
    """One iteration without an update; gradients are summed over ``backwards`` passes of which the last one is reduced."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(rank)
    for left in reversed(range(backwards)):
        inputs = torch.randn(8, 40, generator=generator)
        if left:
            with model.no_sync():
                (scale * model(inputs).sum()).backward()
        else:
            (scale * model(inputs).sum()).backward()


def _budgets(model, attachment, rank, scales, start=0, **options):
    """The budget of each iteration, checked to be one for all of its rounds."""
    found = []
    for iteration, scale in enumerate(scales, start):
        before = attachment.summary.rounds
        _iterate(model, rank, iteration, scale, **options)
        used = {report.budget for report in attachment.reports[before - attachment.summary.rounds :]}
        assert len(used) == 1, used
        found.append(used.pop())
    return found


def _same_everywhere(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert all(other == found[0] for other in found), found


def _through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


SCALES = [1.0, 1.0, 1.0, 2.0, 2.0, 2.2, 2.2, 1.0, 1.0, 1.0]
"""Checked every second iteration: norms 1, 1, 2, 2.2, 1: critical, tolerant, critical, tolerant, critical."""
EXPECTED = [0.01, 0.01, 0.01, 0.4, 0.4, 0.01, 0.01, 0.4, 0.4, 0.01]


def phases(rank, world_size, folder):
    """Phases switch as the gradient's norm says, one iteration after its check; accumulation steps make no iteration."""
    _init(rank, world_size, folder)
    for unused, backwards in [(True, 1), (False, 1), (False, 3)]:
        model = _model(unused)
        controller = BudgetController(NormChange(), BUDGETS, interval=Interval(iterations=2))
        attachment = attach(model, Bounded(0.1), budget=controller)
        assert attachment.phases.model is C and attachment.policy.budget == 0.1
        found = _budgets(model, attachment, rank, SCALES, backwards=backwards)
        assert found == EXPECTED, found
        _same_everywhere(controller.state_dict())
    _per_layer(rank)
    _by_learning_rate(rank)
    _by_epoch(rank)
    dist.destroy_process_group()


def _per_layer(rank):
    """The norm of each parameter's averaged gradient, as torch computes it from ``grad``; budgets by name."""
    model = _model(False)
    controller = BudgetController(
        NormChange(layers=True),
        BUDGETS,
        layers={"head.*": Budgets(low=0.0, high=0.0)},
        interval=Interval(iterations=1),
    )
    attachment = attach(model, Bounded(0.1), budget=controller)
    for iteration in range(2):
        _iterate(model, rank, iteration)
    attachment.state_dict()  # settles what was measured
    names = [name for name, _ in model.module.named_parameters()]
    norms = attachment.state_dict()["budget"]["layer_norms"]
    assert sorted(norms) == sorted(names)
    for name, parameter in model.module.named_parameters():
        measured = norms[name][0] ** 0.5
        assert abs(measured / float(parameter.grad.norm()) - 1.0) < 1e-3, name
    before = attachment.summary.rounds
    _iterate(model, rank, 2)
    assert {controller.phases.of(name) for name in names} == {T}
    budgets = [report.budget for report in attachment.reports[before - attachment.summary.rounds :]]
    assert set(budgets) == {0.4, 0.0}, "the head's bucket is exact, others are not"


def _by_learning_rate(rank):
    """Read from the optimiser on one rank alone: the others follow."""
    model = _model(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    controller = BudgetController(LearningRateChange(), BUDGETS, interval=Interval(iterations=1))
    attachment = attach(model, Bounded(0.1), budget=controller, optimizer=optimizer if rank == 0 else None)
    found = _budgets(model, attachment, rank, [1.0] * 3)
    optimizer.param_groups[0]["lr"] = 0.01  # seen at the check of the third iteration, made in the fourth
    found += _budgets(model, attachment, rank, [1.0] * 3, start=3)
    assert found == [0.01, 0.01, 0.4, 0.01, 0.4, 0.4], found


def _by_epoch(rank):
    """DBLP's rule, an epoch of three iterations; a manual request of one rank overrides it on all."""
    model = _model(False)
    controller = BudgetController(NormChange() | Manual(T), BUDGETS)
    attachment = attach(model, Bounded(0.1), budget=controller)
    found = []
    for epoch, scale in enumerate([1.0, 1.2, 5.0, 5.0, 5.0]):
        attachment.epoch(epoch)
        if epoch == 4 and rank == 1:
            attachment.note(phase="critical")
        found += _budgets(model, attachment, rank, [scale] * 3)
    low, high = 0.01, 0.4
    assert found == [low] * 4 + [high] * 3 + [low] * 3 + [high] * 3 + [low] * 2, found


def resumed(rank, world_size, folder):
    """A run that was saved and loaded decides as the one that went on: also right before a decision, where a check's norm is
    measured but not yet compared."""
    _init(rank, world_size, folder)

    def make():
        detector = Hold(NormChange(), 1) | Schedule(epochs=[(90, 91)])
        cap = EnergyCap(limit=0.5, interval=Interval(iterations=3))
        controller = BudgetController(
            detector, BUDGETS, layers={"*": BUDGETS}, interval=Interval(iterations=2), cap=cap
        )
        model = _model(False)
        return model, attach(model, Bounded(0.1, consistency="exact"), budget=controller)

    for cut in (4, 5):
        model, attachment = make()
        found = _budgets(model, attachment, rank, SCALES[:cut])
        state = _through_a_file(attachment.state_dict())
        other_model, other = make()
        other.load_state_dict(state)
        assert other.state_dict() == attachment.state_dict() == state
        assert other.summary == attachment.summary and other.policy == attachment.policy
        rest = _budgets(model, attachment, rank, SCALES[cut:])
        assert _budgets(other_model, other, rank, SCALES[cut:]) == rest
        assert found + rest == EXPECTED
        assert other.budget.state_dict() == attachment.budget.state_dict()
    dist.destroy_process_group()


def overruled(rank, world_size, folder):
    """A saved policy holds over the one that attach was given; rank 0 names both, and nobody warns where they are one."""
    _init(rank, world_size, folder)
    heard: list[logging.LogRecord] = []
    listener = logging.Handler()
    listener.emit = heard.append  # type: ignore[assignment, method-assign]
    logging.getLogger("dblp").addHandler(listener)
    saved = Bounded(0.1)
    state = _through_a_file(attach(_model(False), saved).state_dict())
    attach(_model(False), saved).load_state_dict(state)
    assert not heard, heard
    other = attach(_model(False), Bounded(0.3, stop="eager"))
    other.load_state_dict(state)
    assert other.policy == saved
    texts = [record.getMessage() for record in heard]
    assert len(texts) == (rank == 0), texts
    for text in texts:
        assert "budget=0.1, stop='stall'" in text and "budget=0.3, stop='eager'" in text, text
    other.policy = Bounded(0.3, stop="eager")
    assert other.policy != saved
    dist.destroy_process_group()


def uneven(rank, world_size, folder):
    """Ranks with fewer batches join: they count iterations and take part in decisions with zeros."""
    _init(rank, world_size, folder)
    model = _model(False)
    controller = BudgetController(NormChange(3.0), BUDGETS, interval=Interval(iterations=1))
    attachment = attach(model, Bounded(0.1), budget=controller)
    with model.join():
        for iteration in range(3 + 2 * rank):
            _iterate(model, rank, iteration)
    assert controller.iteration == 2 + 2 * (world_size - 1)
    _same_everywhere((controller.state_dict(), controller.phases.model))
    assert controller.phases.model is T
    attachment.policy = Policy(budget=0.1, consistency=Consistency.RELAXED, resync_rounds=1)
    try:
        with model.join():
            _iterate(model, rank, 0)
    except UnsupportedError as error:
        assert "resync_rounds=0" in str(error)
    else:
        raise AssertionError("no error")
    dist.destroy_process_group()


def drifting(rank, world_size, folder):
    """Rank r's parameters are moved by r % of their norm: found, and gone, in the forward pass of every fifth iteration."""
    _init(rank, world_size, folder)
    model = _model(False)
    policy = Policy(budget=0.1, consistency=Consistency.RELAXED, resync_rounds=5)
    attachment = attach(model, policy)
    drift = 0.01 * (world_size - 1)
    for iteration in range(5):
        _iterate(model, rank, iteration)
    assert attachment.summary.resynchronisations == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 + 0.01 * rank)
    with torch.no_grad():
        model.module(torch.ones(1, 40))  # neither evaluation nor the bare module resynchronises
    model.eval()
    model(torch.ones(1, 40))
    model.train()
    assert attachment.summary.resynchronisations == 0
    _iterate(model, rank, 5)
    assert attachment.summary.resynchronisations == 1
    assert abs(attachment.summary.largest_drift / drift - 1.0) < 1e-3, attachment.summary
    _same_everywhere([parameter.detach().numpy().tobytes() for parameter in model.parameters()])
    assert attachment.resynchronise() == 0.0 and attachment.summary.resynchronisations == 2
    restored = attach(_model(False), policy)
    restored.load_state_dict(_through_a_file(attachment.state_dict()))
    assert restored.summary == attachment.summary
    dist.destroy_process_group()


def tagged(rank, world_size, folder):
    """Chunks are tagged by what the buckets hold, also after DDP has made them anew; all ranks end with the same gradients."""
    _init(rank, world_size, folder)
    model = _model(False)
    policy = Policy(budget=0.4, stop=Stop.EAGER, tags=Tags.BOTH, critical_share=0.1)
    attachment = attach(model, policy)
    for iteration in range(5):
        _iterate(model, rank, iteration)
        _same_everywhere([parameter.grad.numpy().tobytes() for parameter in model.parameters()])
    known = attachment._priorities
    names = {"body.weight", "middle.weight", "middle.bias", "head.weight", "head.bias"}
    assert {name for bucket in known for name in bucket} == names
    assert len(known) >= 2
    for bucket, priority in known.items():
        assert priority.layers.names == bucket and priority.layers.layer_count == 3
        assert len(priority._streaks) > 0, "each bucket's rounds have used what is known of it"
    attachment.policy = Policy(budget=0.4)
    before = len(known)
    _iterate(model, rank, 5)
    assert len(known) == before, "a policy without tags needs none of it"
    dist.destroy_process_group()


def layouts(rank, world_size, folder):
    """What a layout says is where DDP has it: before and after it rebuilds its buckets, last layers first."""
    _init(rank, world_size, folder)
    model = _model(False)
    known = Layouts(model.module)
    seen = []

    def hook(state, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        layout = known.of(bucket)
        buffer = bucket.buffer()
        for k, gradient in enumerate(bucket.gradients()):
            offset = (gradient.data_ptr() - buffer.data_ptr()) // buffer.element_size()
            assert (layout.bounds[k], layout.bounds[k + 1]) == (offset, offset + gradient.numel())
        squares = layer_square_norms(buffer, layout)
        for name, gradient in zip(layout.names, bucket.gradients(), strict=True):
            assert abs(squares[name] - float(gradient.square().sum())) <= 1e-3 * squares[name]
        assert abs(sum(squares.values()) - square_norm(buffer)) <= 1e-3 * square_norm(buffer)
        assert known.of(bucket) is layout
        seen.append(layout)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    model.register_comm_hook(None, hook)
    _iterate(model, rank, 0)
    first = len(seen)
    _iterate(model, rank, 1)
    names = ["body.weight", "middle.weight", "middle.bias", "head.weight", "head.bias"]
    assert list(known.names) == names
    for part in (seen[:first], seen[first:]):
        assert sorted(name for layout in part for name in layout.names) == sorted(names)
    layers = [layer for layout in seen[first:] for layer in layout.layers]
    assert layers == sorted(layers, reverse=True) and set(layers) == {0, 1, 2}
    assert len(seen) - first > 1 and all(layout.layer_count == 3 for layout in seen)
    last = seen[-1]
    middle = np.arange(last.bounds[-1])
    assert (last.layer_of(middle) == np.repeat(last.layers, last.sizes)).all()
    dist.destroy_process_group()


def misused(rank, world_size, folder):
    """What is wrong is said where it happens, on all ranks, in words that name the remedy."""
    _init(rank, world_size, folder)
    carries = attach(_model(False), budget=dblp_controller()).policy
    assert carries == Bounded(0.008) and carries.carry is not None
    taken = dblp_controller()
    attachment = attach(_model(False), Bounded(0.1), budget=taken)
    plain = attach(_model(False))
    odd = BudgetController(NormChange(), BUDGETS, layers={"hed.*": BUDGETS})
    plain.epoch(3)
    for words, call in [
        ("dblp.Bounded", lambda: attach(_model(False), budget=0.1)),
        ("already follows", lambda: attach(_model(False), budget=taken)),
        ("'hed.*'", lambda: attach(_model(False), budget=odd)),
        ("budget=BudgetController", lambda: plain.note(metric=0.5)),
        ("no detector", lambda: attachment.note(metric=0.5)),
        ("attach has a budget", lambda: attachment.load_state_dict(plain.state_dict())),
        ("the state has a budget", lambda: plain.load_state_dict(attachment.state_dict())),
        ("it has no 'version'", lambda: plain.load_state_dict({})),
        ("it has no 'policy'", lambda: plain.load_state_dict({"version": 5})),
        ("of version 99: a later dblp", lambda: plain.load_state_dict({**plain.state_dict(), "version": 99})),
        (
            "this version reads 1",
            lambda: taken.load_state_dict({**taken.state_dict(), "version": 99}),
        ),
        ("no state of dblp.attach, but a NoneType", lambda: plain.load_state_dict(None)),
        ("no policy", lambda: plain.load_state_dict({**plain.state_dict(), "policy": {"budget": 2.0}})),
        ("reads up to", lambda: plain.load_state_dict({**plain.state_dict(), "version": 6})),
        ("exact policy with a controller", lambda: attach(_model(False), "exact", budget=dblp_controller())),
        ("exact policy with a controller", lambda: setattr(attachment, "policy", Policy())),
        ("loses nothing on the gather leg", lambda: attach(_model(False), GATHER_EXACT, budget=_gathers())),
        ("no odd", lambda: plain.load_state_dict({**plain.state_dict(), "policy": {"odd": 1}})),
    ]:
        _raises(ConfigError, words, call)
    _raises(AttributeError, "polisy", lambda: setattr(attachment, "polisy", Bounded(0.1)))
    _forgotten_rate(rank)
    _different_epochs(rank)
    dist.destroy_process_group()


GATHER_EXACT = Bounded(0.1, consistency="exact")


def _gathers():
    return BudgetController(NormChange(), Budgets(low=0.1, high=0.5, gather_low=0.05, gather_high=0.4))


def _forgotten_rate(rank):
    model = _model(False)
    attach(model, budget=BudgetController(LearningRateChange() | Metric(), BUDGETS))
    _iterate(model, rank, 0)
    _raises(ConfigError, "optimizer", lambda: _iterate(model, rank, 1))


def _different_epochs(rank):
    model = _model(False)
    attachment = attach(model, budget=dblp_controller())
    attachment.epoch(rank)
    _iterate(model, rank, 0)
    _raises(MismatchError, "epochs (0 and 1)", lambda: _iterate(model, rank, 1))


def _raises(kind, words, call):
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{kind.__name__} with {words!r} was expected")
