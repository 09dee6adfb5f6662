"""Scenarios: compressed gradients in DDP, through buckets that are made anew and through checkpoints."""

# mypy: disable-error-code="attr-defined, union-attr, arg-type, index"
# torch.distributed's stubs miss names that it exports, and call every group and work optional.

from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dblp import TransportConfig, attach
from dblp.collectives.compression.registry import METHODS

_SIZES = {"first": (200, 100), "second": (120, 10, 10), "third": (30_000,), "fourth": (50, 100)}
_TEXTS = {
    "topk": "topk(0.1)",
    "randomk": "randomk(0.2)",
    "threshold": "threshold(0.002)",
    "dgc": "dgc(0.05,indices=delta)",
}

_MORE_TYPES = {"topk": (torch.float64, torch.bfloat16), "int8": (torch.float16,), "dgc": (torch.float64,)}


class _Net(torch.nn.Module):
    """Its gradients are what the test chooses: each parameter's is the one that it is multiplied with."""

    def __init__(self):
        super().__init__()
        for name, shape in _SIZES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, factors):
        return sum((self.get_parameter(name) * factor).sum() for name, factor in factors.items())


def _init(rank, world_size, folder):
    dist.init_process_group(
        "dblp",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
        pg_options=TransportConfig(impair="loss(0.01),seed(5)"),
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
    dist.destroy_process_group()


def _check_gap(name, dtype, gap, withheld):
    """Over the ranks: what was contributed and not delivered is what is withheld. Exactly where sums of integers are."""
    missing = gap - withheld
    dist.all_reduce(missing)
    if name == "dgc":
        return  # velocities, not gradients, are what it delivers
    worst = float(missing.abs().max())
    if name in ("topk", "randomk", "none", "threshold") and dtype is not torch.bfloat16:
        assert worst == 0.0, (name, dtype, worst)
    else:
        assert worst < 0.5, (name, dtype, worst)
