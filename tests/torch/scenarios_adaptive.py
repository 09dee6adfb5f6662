"""Scenarios: compression that adapts, over dblp and over gloo: decisions alike, nothing lost, states, failures."""

# mypy: disable-error-code="attr-defined, union-attr, arg-type, index"
# torch.distributed's stubs miss names that it exports, and call every group and work optional.

import copy
import io
import os
import signal
import threading
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dblp import TransportConfig, attach
from dblp.collectives.torch import borrowed, staging
from dblp.collectives.torch.borrowed import compress_ddp
from dblp.errors import ConfigError, MismatchError, UnsupportedError
from tests.torch.standin import StandIn, wait

_SIZES = {"first": (200, 100), "second": (120, 10, 10), "third": (3_000,), "fourth": (50, 100)}
_TEXTS = (
    "gravac(window=2,theta_max=40,scaling=geometric,epsilon=0.05,omega=0.001)",
    "gravac(window=2,compressor=randomk)",
    "netsense",
    "netsense(allow=1us,indices=delta)",
)


class _Net(torch.nn.Module):
    """Its gradients are what the test chooses: each parameter's is the one that it is multiplied with."""

    def __init__(self):
        super().__init__()
        for name, shape in _SIZES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, factors):
        return sum((self.get_parameter(name) * factor).sum() for name, factor in factors.items())


def _init(rank, world_size, folder, backend, seconds=20):
    options = {"pg_options": TransportConfig(impair="loss(0.01),seed(5)")} if backend == "dblp" else {}
    dist.init_process_group(
        backend,
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
        **options,
    )


def _model(dtype=torch.float32):
    return DistributedDataParallel(_Net().to(dtype), bucket_cap_mb=0.025 * dtype.itemsize)


def _compress(model, text, backend):
    return attach(model, compression=text).compression if backend == "dblp" else compress_ddp(model, text)


def _iterate(model, rank, number):
    """A backward pass with small integers; returns this rank's gradients and the averages, in the order of the names."""
    dtype = next(model.parameters()).dtype
    rng = np.random.default_rng([rank, number])
    mine = {name: torch.from_numpy(rng.integers(-8, 9, shape)).to(dtype) for name, shape in _SIZES.items()}
    model.zero_grad()
    model(mine).backward()
    own = torch.cat([value.reshape(-1) for value in mine.values()]).double()
    return own, torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double()


def _withheld(compression):
    parts = compression.state_dict()["memory"]["parameters"]
    flats = []
    for name, shape in _SIZES.items():
        flat = torch.zeros(int(np.prod(shape)), dtype=torch.float64)
        for layer in parts.get(name, {"layers": []})["layers"]:
            flat += layer
        flats.append(flat)
    return torch.cat(flats)


def _equal_everywhere(tensor):
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor.contiguous())
    assert all(torch.equal(other, tensor) for other in others)


def adaptive(rank, world_size, folder, backend):
    """Replicas and figures are alike on all ranks, and what was not delivered is withheld, while DDP makes its buckets anew."""
    _init(rank, world_size, folder, backend)
    for text in _TEXTS:
        for dtype in (torch.float32, torch.bfloat16) if "randomk" not in text else (torch.float32,):
            model = _model(dtype)
            compression = _compress(model, text, backend)
            gap = torch.zeros(sum(int(np.prod(shape)) for shape in _SIZES.values()), dtype=torch.float64)
            for number in range(8):
                own, averages = _iterate(model, rank, number)
                _equal_everywhere(averages)
                gap += own - averages
            missing = gap - _withheld(compression)
            dist.all_reduce(missing)
            worst = float(missing.abs().max())
            assert worst <= (0.0 if dtype is torch.float32 and world_size == 2 else 1.0), (text, dtype, worst)
            figures = torch.tensor(list(compression.figures.values()), dtype=torch.float64)
            assert len(figures) == 5
            _equal_everywhere(figures)
            assert compression.totals.rounds % 8 == 0 and not compression.totals.spoiled
            if backend != "dblp":
                assert compression.totals.wire_bytes == 0 and compression.totals.payload_bytes > 0
                compression.close()
    dist.destroy_process_group()


def adaptive_static_on_gloo(rank, world_size, folder):
    """Methods that adapt to nothing run there too: coded indices of different lengths, half types, codes, velocities."""
    _init(rank, world_size, folder, "gloo")
    for text in (
        "none",
        "topk(0.1,indices=delta,values=fp16)",
        "bf16",
        "int8",
        "sign",
        "powersgd(2)",
        "dgc(0.05)",
    ):
        model = _model()
        compression = compress_ddp(model, text)
        for number in range(3):
            _, averages = _iterate(model, rank, number)
            _equal_everywhere(averages)
            assert averages.isfinite().all() and averages.any()
        compression.close()
    copied = copy.deepcopy(model)  # leaves the compression behind, and may get one of its own
    assert "no attachment" in repr(copied._comm_hooks)
    _equal_everywhere(_iterate(copied, rank, 0)[1])
    another = compress_ddp(copied, "topk(0.5)")
    _equal_everywhere(_iterate(copied, rank, 1)[1])
    another.close()
    dist.destroy_process_group()


class _Everything(StandIn):
    """A device that all tensors are on."""

    def of(self, tensor):
        return self


def adaptive_on_a_device(rank, world_size, folder):
    """The hook returns while the device still computes the gradient, rounds take it from there, and who waits for the future sees
    the average, though copies back take their time. The device is a stand-in, and so is what waits: DDP knows a real one only."""
    _init(rank, world_size, folder, "gloo")
    device = _Everything(copy_s=0.02)

    def hook(state: borrowed.BorrowedCompression, bucket: GradBucket) -> Future[torch.Tensor]:
        gradient, gate = bucket.buffer(), threading.Event()
        computed = gradient.clone()
        gradient.fill_(-1e6)
        device.main.put("gate", lambda: wait(gate))
        device.main.put("gradient", lambda: gradient.copy_(computed))
        future = state.start(bucket)
        assert not staging.take_departures(), "a copy that nobody waits for"
        threading.Timer(0.05, gate.set).start()

        def arrived(done: Future[torch.Tensor]) -> torch.Tensor:
            wait(
                device.current.record()
            )  # as DDP's stream does: torch has it wait for the callback's current one
            return done.value()

        return future.then(arrived)

    usual, none = borrowed._hook, staging.accelerators
    for text in ("none", "topk(0.1)", "dgc(0.05)"):
        expected = compress_ddp(reference := _model(), text)
        borrowed._hook = hook
        compression = compress_ddp(model := _model(), text)
        borrowed._hook = usual
        for number in range(3):
            staging.accelerators = device
            _, averages = _iterate(model, rank, number)
            staging.accelerators = none
            assert averages.any() and torch.equal(averages, _iterate(reference, rank, number)[1]), text
        assert torch.equal(_withheld(compression), _withheld(expected))
        compression.close()
        expected.close()
    assert {what.partition(":")[0] for what in device.log} == {"main", "out", "back"}
    dist.destroy_process_group()


def adaptive_saved(rank, world_size, folder, backend):
    """What was saved in the middle of a search goes on from there."""
    _init(rank, world_size, folder, backend)
    for text in _TEXTS[:3]:
        first = _compress(model := _model(), text, backend)
        for number in range(7):
            _iterate(model, rank, number)
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second = _compress(resumed := _model(), text, backend)
        second.load_state_dict(torch.load(file, weights_only=True))
        assert second.figures == first.figures and len(second.figures) == 5
        assert second.totals == first.totals and torch.equal(_withheld(second), _withheld(first))
        for number in range(7, 10):
            _, averages = _iterate(resumed, rank, number)
            _equal_everywhere(averages)
        if text.startswith("gravac"):
            assert second.figures["steps"] == first.figures["steps"] + 2
    dist.destroy_process_group()


def _refused(error, words, call):
    try:
        call()
    except error as caught:
        assert words in str(caught), caught
    else:
        raise AssertionError(f"{words!r}: {error.__name__} was expected")


def adaptive_refused(rank, world_size, folder):
    """What cannot be is refused where it is asked for."""
    _init(rank, world_size, folder, "gloo")
    _refused(UnsupportedError, "not _Net", lambda: compress_ddp(_Net(), "netsense"))
    _refused(ConfigError, "'zip' is no compression method", lambda: compress_ddp(_model(), "zip"))
    _refused(ConfigError, "follows phases", lambda: compress_ddp(_model(), "accordion"))
    _refused(
        MismatchError,
        "methods, rank 0 sign() and rank 1 fp16(feedback=true): give all ranks the same",
        lambda: compress_ddp(_model(), ("sign", "fp16")[rank]),
    )
    compression = compress_ddp(model := _model(), "topk(0.1)")
    _refused(ConfigError, "one: wrap it anew", lambda: compress_ddp(model, "topk(0.1)"))
    _refused(
        ConfigError,
        "no state of a compression: it has no",
        lambda: compression.load_state_dict({"version": 1}),
    )
    _iterate(model, rank, 0)
    compression.close()
    compression.close()
    _refused(ConfigError, "was closed", lambda: _iterate(model, rank, 1))
    dist.destroy_process_group()


def adaptive_loses_a_rank(rank, world_size, folder):
    """A rank that dies becomes an error of the backward pass on the others, within the timeout."""
    _init(rank, world_size, folder, "gloo", seconds=4)
    model = _model()
    compress_ddp(model, "netsense", timeout_s=4.0)
    try:
        for number in range(50):
            _iterate(model, rank, number)
            if rank == 1 and number:  # DDP has made its buckets anew by then, over gloo itself
                os.kill(os.getpid(), signal.SIGKILL)
    except RuntimeError as error:
        if "every rank run, with the same model and method" not in str(error):
            raise
        os._exit(0)  # gloo's own threads may wait for the dead
    raise AssertionError("an error was expected")
