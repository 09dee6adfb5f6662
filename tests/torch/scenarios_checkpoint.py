"""Scenarios: distributed checkpoints of models and attachments, also into other numbers of ranks."""

# mypy: disable-error-code="attr-defined, union-attr, arg-type, index, call-overload"
# torch.distributed's stubs miss names that it exports, and call every group and work optional.

from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dblp import (
    Bounded,
    BudgetController,
    Budgets,
    CheckpointState,
    Exact,
    Interval,
    NormChange,
    Phase,
    TransportConfig,
    attach,
    merge_states,
)
from dblp.errors import ConfigError
from dblp.transport.policy import Carry, CarryBound

LOSSY = Bounded(0.5, stop="eager", carry=Carry(bound=CarryBound.NONE))
SIZES = {"first": (50, 80), "second": (33, 100)}
KINDS = ("replicated", "sharded")


class _Net(torch.nn.Module):
    """The gradient of a parameter is what it is multiplied with."""

    def __init__(self):
        super().__init__()
        for name, size in SIZES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(size)))

    def forward(self, factors):
        return sum((getattr(self, name) * factor).sum() for name, factor in factors.items())


def _init(rank, world_size, folder):
    dist.init_process_group(
        "dblp",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
        pg_options=TransportConfig(impair="loss(0.1),seed(5)"),
    )


def _training(kind):
    """Model, optimiser and attachment: always of the same kind, over the ranks that there are."""
    model = (
        DistributedDataParallel(_Net(), bucket_cap_mb=0.02) if kind == "replicated" else fully_shard(_Net())
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    controller = BudgetController(
        NormChange(0.5), Budgets(low=0.4, high=0.5), interval=Interval(iterations=1)
    )
    return model, optimizer, attach(model, LOSSY, budget=controller)


def _integers(rank, number):
    random = np.random.default_rng([rank, number])
    return {name: torch.from_numpy(random.integers(-8, 9, size)).float() for name, size in SIZES.items()}


def _step(model, optimizer, rank, number):
    optimizer.zero_grad()
    model(_integers(rank, number)).backward()
    optimizer.step()


def _owed(attachment):
    """What all ranks together carry, by parameter."""
    entries = attachment.state_dict()["carry"]["parameters"]
    totals = {}
    for name, size in SIZES.items():
        layers = entries[name]["layers"] if name in entries else []
        totals[name] = sum(layers, torch.zeros(int(np.prod(size)))).view(size)
        dist.all_reduce(totals[name])
    return totals


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _state(model, optimizer, attachment, **options):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "dblp": CheckpointState(attachment, **options)}


def checkpoint_saved(rank, world_size, folder, place):
    """Train three steps and save: by ``dcp``, for any number of ranks and for this one, and by hand for ``merge_states``."""
    _init(rank, world_size, folder)
    for kind in KINDS:
        model, optimizer, attachment = _training(kind)
        for number in range(3):
            _step(model, optimizer, rank, number)
        owed = _owed(attachment)
        assert any(total.any() for total in owed.values()), "something is carried"
        dcp.save(_state(model, optimizer, attachment), checkpoint_id=f"{place}/{kind}")
        dcp.save(_state(model, optimizer, attachment, elastic=False), checkpoint_id=f"{place}/{kind}-own")
        torch.save(attachment.state_dict(), f"{place}/{kind}-{rank}.pt")
        weights = {name: _whole(p.detach()) for name, p in _module(model).named_parameters()}
        facts = {
            "owed": owed,
            "weights": weights,
            "ranks": world_size,
            "phase": attachment.phases.model.value,
        }
        if rank == 0:
            torch.save(facts, f"{place}/{kind}-facts.pt")
        _goes_on(rank, kind, place, attachment)
    dist.destroy_process_group()


def _module(model):
    return getattr(model, "module", model)


def _goes_on(rank, kind, place, attachment):
    """The same number of ranks: each loads its own state, which is bit for bit the one that was saved."""
    model, optimizer, other = _training(kind)
    dcp.load(_state(model, optimizer, other, elastic=False), checkpoint_id=f"{place}/{kind}-own")
    saved, loaded = attachment.state_dict(), other.state_dict()
    assert saved["budget"] == loaded["budget"] and saved["iterations"] == loaded["iterations"] == 3
    for name, entry in saved["carry"]["parameters"].items():
        assert all(map(torch.equal, entry["layers"], loaded["carry"]["parameters"][name]["layers"]))


def checkpoint_loaded(rank, world_size, folder, place):
    """Another number of ranks takes over all: weights, moments, phases, and what was owed, with its weight in the average."""
    _init(rank, world_size, folder)
    for kind in KINDS:
        facts = torch.load(f"{place}/{kind}-facts.pt", weights_only=True)
        by_hand = [
            torch.load(f"{place}/{kind}-{other}.pt", weights_only=True) for other in range(facts["ranks"])
        ]
        for load in (_by_dcp, _by_hand):
            model, optimizer, attachment = _training(kind)
            load(model, optimizer, attachment, place, kind, by_hand)
            assert attachment.policy == LOSSY and attachment.phases.model is Phase(facts["phase"])
            factor = world_size / facts["ranks"]
            for name, total in _owed(attachment).items():
                assert torch.equal(total, facts["owed"][name] * factor), f"{kind}: {name}"
            if load is _by_dcp:
                for name, parameter in _module(model).named_parameters():
                    assert torch.equal(_whole(parameter.detach()), facts["weights"][name])
                assert optimizer.state_dict()["state"], "moments"
            _delivers(model, optimizer, attachment, rank, facts, factor)
    dist.destroy_process_group()


def _by_dcp(model, optimizer, attachment, place, kind, by_hand):
    state = _state(model, optimizer, attachment)
    dcp.load(state, checkpoint_id=f"{place}/{kind}")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _by_hand(model, optimizer, attachment, place, kind, by_hand):
    attachment.load_state_dict(merge_states(by_hand))
    for broken in ([], [merge_states(by_hand)], [by_hand[0], {**by_hand[0], "iterations": 7}]):
        try:
            merge_states(broken)
        except ConfigError:
            continue
        raise AssertionError(f"{len(broken)} states were taken")


def _delivers(model, optimizer, attachment, rank, facts, factor):
    """An exact round brings what was owed, with the new gradients."""
    state = attachment.state_dict()
    module = _module(model)
    attachment._budget = None  # its budgets would replace the policy's
    attachment.policy = Exact()
    optimizer.zero_grad()
    model(_integers(rank, 5)).backward()
    world_size = dist.get_world_size()
    for name, parameter in module.named_parameters():
        fresh = _integers(rank, 5)[name]
        dist.all_reduce(fresh)
        expected = (fresh + facts["owed"][name] * factor) / world_size
        assert torch.equal(_whole(parameter.grad), expected), name
    assert not any(total.any() for total in _owed(attachment).values()) and state["iterations"] == 3
