"""Where deep gradient compression loses: one part of it changed at a time, on the character transformer under SGD.

    python -m tests.benchmarks.dgc_causes [--steps 2000] [--only "none/paper/no masking"] [--json FILE]

The method is written here a second time, in torch, for all workers at once and from the paper's formulas alone (Lin et al.,
arXiv 1712.01887, sections 3.2 and 3.3), with exact selection: a gap that ``dblp.collectives.compression.dgc`` shares is no
fault of that module. It also takes what the method has no option for: selection over the whole model instead of in each
parameter, and matrices that are sent whole. Four workers, batches of 8 windows, one-cycle learning rate, one seed. FILE is
written after each training; those that it has are not repeated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dblp.cli.host import document, write_json
from dblp.cli.train.data import load
from dblp.cli.train.optimizers import MOMENTUM
from dblp.cli.train.samples import Samples
from dblp.cli.train.standin import StandIn, train
from dblp.collectives.compression.warmup import PAPER

WORKERS, BATCH, SEED = 4, 8, 1
MODEL = "transformer"
ENDS = ("_characters", "_positions", "_head")
"""What the model reads with and writes with: 15 % of its elements."""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One training."""

    label: str
    compressed: bool = True
    lr: float = 0.05
    """Peak of the learning rate."""
    ratio: float = 0.001
    masking: bool = False
    momentum: float = MOMENTUM
    warmup: float = 0.045
    """Share of the steps in which the paper's four shares are sent in turn."""
    whole: tuple[str, ...] = ()
    """Parameters whose names begin so are averaged as they are, as those of one dimension always are."""
    together: bool = False
    """The largest of the model are sent, not those of each parameter."""
    clip: float = 0.0
    """Largest norm of the sum of gradients; each worker clips its own to this times N^-1/2."""


VARIANTS = (
    Variant(label="none", compressed=False),
    Variant(label="none, rate 0.1", compressed=False, lr=0.1),
    Variant(label="none, rate 0.2", compressed=False, lr=0.2),
    Variant(label="paper", masking=True),
    Variant(label="no masking"),
    Variant(label="no masking, rate 0.025", lr=0.025),
    Variant(label="no masking, rate 0.1", lr=0.1),
    Variant(label="no masking, clipped to 0.5", clip=0.5),
    Variant(label="no masking, no momentum, rate 0.5", momentum=0.0, lr=0.5),
    Variant(label="no masking, 1 %", ratio=0.01),
    Variant(label="no masking, warm-up of 30 %", warmup=0.3),
    Variant(label="no masking, largest of the model", together=True),
    Variant(label="no masking, character table whole", whole=ENDS[:1]),
    Variant(label="no masking, tables and head whole", whole=ENDS),
    Variant(label="no masking, rate 0.1, warm-up of 30 %", lr=0.1, warmup=0.3),
    Variant(label="all three, tables and head whole", lr=0.1, warmup=0.3, whole=ENDS),
    Variant(label="all three, largest of the model", lr=0.1, warmup=0.3, together=True),
)


class Workers:
    """What an all-reduce of ``standin.train`` is, for one variant: the workers' velocities, and what waits to be sent."""

    def __init__(
        self, variant: Variant, names: Sequence[str], shapes: Sequence[Sequence[int]], steps: int
    ) -> None:
        self._variant, self._warmup, self._step = variant, round(variant.warmup * steps), 0
        self._sizes = [int(np.prod(shape)) for shape in shapes]
        self._whole = [
            len(shape) < 2 or any(name.startswith(start) for start in variant.whole)
            for name, shape in zip(names, shapes, strict=True)
        ]
        total = sum(self._sizes)
        self._dense = torch.cat(
            [torch.full((size,), whole) for size, whole in zip(self._sizes, self._whole, strict=True)]
        )
        self._velocities, self._waiting = torch.zeros(WORKERS, total), torch.zeros(WORKERS, total)
        self._mean_velocity = torch.zeros(total)
        self._times = torch.zeros(total, dtype=torch.int64)

    @property
    def times(self) -> Floats:
        """How often each element of a compressed parameter was sent after the warm-up, by all workers together."""
        counts: Floats = self._times[~self._dense].numpy().astype(np.float32)
        return counts

    def all_reduce(self, gradients: Floats) -> Floats:
        """Momentum correction and exchange; without compression the mean."""
        variant, own = self._variant, torch.from_numpy(gradients)
        if not variant.compressed:
            plain: Floats = own.mean(0).numpy()
            return plain
        if variant.clip:
            norms = own.norm(dim=1, keepdim=True)
            own = own * torch.clamp(variant.clip * WORKERS**-0.5 / norms, max=1.0)
        mean, momentum = own.mean(0), variant.momentum
        self._mean_velocity = (self._mean_velocity + mean) * momentum
        self._velocities.add_(own).mul_(momentum)
        self._waiting.add_(own).add_(self._velocities)
        sent = self._largest(self._ratio())
        self._times += sent.sum(0) if self._step >= self._warmup else 0
        self._step += 1
        average = torch.where(sent, self._waiting, 0.0).mean(0)
        self._waiting[sent] = 0.0
        if variant.masking:
            self._velocities[sent] = 0.0
        result: Floats = torch.where(self._dense, self._mean_velocity + mean, average).numpy()
        return result

    def _ratio(self) -> float:
        if self._step >= self._warmup:
            return self._variant.ratio
        return max(self._variant.ratio, PAPER[self._step * len(PAPER) // self._warmup])

    def _largest(self, ratio: float) -> Tensor:
        """Which elements each worker sends (workers, n)."""
        sent = torch.zeros_like(self._waiting, dtype=torch.bool)
        magnitudes = self._waiting.abs()
        if self._variant.together:
            magnitudes[:, self._dense] = -1.0
            count = ceil(int((~self._dense).sum()) * ratio)
            return sent.scatter_(1, magnitudes.topk(count, dim=1).indices, True)
        low = 0
        for size, whole in zip(self._sizes, self._whole, strict=True):
            if not whole:
                found = magnitudes[:, low : low + size].topk(ceil(size * ratio), dim=1).indices
                sent.scatter_(1, found + low, True)
            low += size
        return sent


def experiment(variant: Variant, samples: Samples, steps: int) -> dict[str, Any]:
    """One training."""
    module = samples.build(MODEL, seed=SEED)
    named = dict(module.named_parameters())
    workers = Workers(variant, list(named), [tuple(each.shape) for each in named.values()], steps)
    plan = StandIn(
        model=MODEL, optimizer="sgd", lr=variant.lr, batch=BATCH, steps=steps, seed=SEED, workers=WORKERS,
        momentum=0.0 if variant.compressed else MOMENTUM,
    )  # fmt: skip
    score, times = train(plan, samples, workers.all_reduce), workers.times
    return asdict(variant) | {
        "steps": steps,
        "perplexity": score.perplexity,
        "times_mean": float(times.mean()) if variant.compressed else None,
        "times_median": float(np.median(times)) if variant.compressed else None,
        "never_share": float((times == 0).mean()) if variant.compressed else None,
    }


def table(found: Sequence[dict[str, Any]]) -> Table:
    """One row a training, beside the best of those that send all."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    dense = [record["perplexity"] for record in found if not record["compressed"]]
    for heading in ("training", "perplexity", "above the best dense", "times sent, mean", "median", "never"):
        shown.add_column(heading, justify="left" if heading == "training" else "right")
    for record in found:
        above = f"{record['perplexity'] / min(dense) - 1.0:+.1%}" if dense else "-"
        mean, median, never = (record[name] for name in ("times_mean", "times_median", "never_share"))
        sent = ("", "", "") if mean is None else (f"{mean:.1f}", f"{median:.0f}", f"{never:.1%}")
        shown.add_row(record["label"], f"{record['perplexity']:.2f}", above, *sent)
    return shown


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", help="labels, with / between them")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Run what is not there yet."""
    options = _options()
    torch.set_num_threads(1)
    console, samples = Console(width=120), Samples(load("text", None))
    wanted = [variant for variant in VARIANTS if not options.only or variant.label in options.only.split("/")]
    found: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        found = json.loads(options.json.read_text())["records"]
    for variant in wanted:
        if any((record["label"], record["steps"]) == (variant.label, options.steps) for record in found):
            continue
        found.append(record := experiment(variant, samples, options.steps))
        console.print(f"{variant.label}: {record['perplexity']:.3f}", highlight=False)
        if options.json is not None:
            write_json(options.json, document("dgc_causes", found))
    console.print(table(found))


if __name__ == "__main__":
    main()
