"""What the tests of compression share: methods of every kind, jobs without a network, references."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import numpy as np

from dblp.collectives.compression.base import Array, Bucket, Job, Method, Part, widened
from dblp.collectives.compression.gravac import GraVAC
from dblp.collectives.compression.memory import Memory
from dblp.collectives.compression.netsense import _SIZE
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.compression.rounds import Compression
from dblp.collectives.compression.search import _SCALARS, DENSE, Search
from dblp.collectives.reduction import DTYPES, narrow_bfloat16

STARTED: dict[str, float] = {
    "netsense(least=0.002)": 0.05,
    "netsense(prune=0.8,indices=delta)": 0.15,
    "netsense(quantise=0.1)": 0.3,
    "gravac(window=2,epsilon=0.01,scaling=geometric,theta_min=4)": 2,
    "gravac(window=2,epsilon=0.01,compressor=dgc,indices=delta)": 1,
    "gravac(window=2,epsilon=0.01,compressor=randomk)": 1,
    "gravac(window=2,epsilon=0.01,compressor=redsync,values=fp16)": 1,
    "gravac(window=2,epsilon=0.02)": DENSE,
}
"""Methods in the middle of a training: the share, or the level, at which ``started`` puts them. By themselves they begin with
everything, and with theta_min."""
TEXTS = [
    *STARTED,
    "none",
    "topk(0.05)",
    "topk(0.05,indices=delta,values=fp16)",
    "topk(0.1,selection=sampled)",
    "topk(0.1,feedback=false)",
    "redsync(0.1)",
    "redsync(0.05,indices=delta,values=fp16)",
    "randomk(0.1)",
    "threshold(1.5)",
    "threshold(1.5,indices=delta)",
    "fp16",
    "fp16(feedback=false)",
    "bf16",
    "int8",
    "int8(exchange=gather,block=16)",
    "int4",
    "int4(exchange=sum,block=64)",
    "sign",
    "powersgd(2)",
    "powersgd(1,min_rate=1)",
    "dgc(0.01)",
    "dgc(0.05,indices=delta,values=fp16,nesterov=true)",
    "dgc(0.05,momentum=0)",
    "dgc(0.05,momentum=0,values=fp16)",
    "dgc(0.02,scope=bucket,indices=delta,values=fp16)",
    "dgc(0.05,masking=false,clip=1)",
    "accordion",
    "accordion(values=fp16)",
    "accordion(critical=0.2,indices=delta)",
    "gravac",
    "gravac(compressor=randomk,window=1)",
    "gravac(compressor=dgc,scaling=geometric,window=1,epsilon=0.2)",
    "gravac(compressor=redsync,epsilon=1,window=1,values=fp16,indices=delta)",
    "netsense",
    "netsense(indices=delta)",
    "joint(0.05)",
    "joint(0.5,indices=delta,values=fp16)",
]
"""Every method, with every way to code or exchange what it sends."""
SHAPES: list[list[tuple[int, ...]]] = [
    [(40, 30), (40,), (30, 20), ()],
    [(1,)],
    [(1, 1)],
    [(0,), (5, 0)],
    [],
    [(33_000, 2), (7,)],
]
"""Parameters of a bucket: a usual one, one element, none, and more than float16 or int16 can count."""


def bucket(shapes: list[tuple[int, ...]]) -> Bucket:
    return Bucket([Part(f"p{i}", shape) for i, shape in enumerate(shapes)])


def started(text: str) -> dict[str, Array]:
    """What a method of ``STARTED`` keeps of the model by then; nothing of the others."""
    method = parse_compression(text)
    if text not in STARTED:
        return {}
    if isinstance(method, GraVAC):
        search = Search(method.rule, np.zeros(method.rule.size))
        search.steps, search.position, search.settled = method.window, max(int(STARTED[text]), 0), True
        state = search.state()
        if STARTED[text] == DENSE:
            state[_SCALARS - 1] = 1e30  # the norm of everything; no level's comes near it
        return {".gravac": np.array([STARTED[text], *state])}
    state = np.zeros(_SIZE)
    state[0] = STARTED[text]
    return {".netsense": state}


def compression_of(text: str, **options: Any) -> Compression:
    """A compression by a method, started."""
    made = Compression(parse_compression(text), **options)
    made._factors.update(started(text))
    return made


def gradient(size: int, dtype: str, seed: int = 0, *, spread: float = 2.0) -> Array:
    """Heavy-tailed, in a type; bfloat16 as bits."""
    rng = np.random.default_rng([seed, size])
    values = rng.standard_normal(size) * np.exp(spread * rng.standard_normal(size))
    if dtype == "bfloat16":
        return narrow_bfloat16(values.astype(np.float32))
    with np.errstate(over="ignore"):
        return np.clip(values, -6e4, 6e4).astype(dtype)


def wide(array: Array, dtype: str) -> Array:
    return widened(array, DTYPES[dtype], np.dtype("float64" if dtype == "float64" else "float32"))


def job(shapes: Bucket, array: Array, dtype: str, memory: Memory | None = None, **more: Any) -> Job:
    kind = DTYPES[dtype]
    if memory is None:
        memory = Memory(shapes.size, "float64" if dtype == "float64" else "float32")
    fields = {"rank": 0, "world_size": 2, "number": 1, "seed": 3} | more
    return Job(bucket=shapes, memory=memory, gradient=array, kind=kind, **fields)


class Alone:
    """A link of one rank that stands for several with the same gradient."""

    now_s = 0.0

    def __init__(self, ranks: int = 2) -> None:
        self.ranks = self.world_size = ranks

    def least_delay_s(self) -> float:
        return 0.0

    def sum(self, array: Array, op: str = "sum", dtype: str | None = None) -> Awaitable[Array]:
        async def done() -> Array:
            if op == "sum":
                np.multiply(array, array.dtype.type(self.ranks), out=array)
            return array

        return done()


def agree(method: Method, work: Job) -> None:
    """The method's first exchange, with ranks that hold the same."""
    asyncio.run(method.agree(work, Alone(work.world_size)))  # type: ignore[arg-type]
