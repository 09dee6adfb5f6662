"""Buckets and types that change while training goes on: what is withheld follows its parameters."""

from __future__ import annotations

import numpy as np
import pytest

from dblp.collectives.compression.base import Bucket, Part
from dblp.collectives.compression.dgc import DGC
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.reduction import narrow_bfloat16
from tests.collectives.compression.cases import TEXTS, compression_of, wide
from tests.collectives.worlds import run_memory

PARTS = {
    part.name: part
    for part in (Part("a", (40, 30)), Part("b", (40,)), Part("c", (20, 30)), Part("d", ()), Part("e", (0, 7)))
}
LAYOUTS = ("abcde", "ab cde", "edcba", "ca d b e", "abcde")
"""Names of parameters; a bucket a word."""
RANKS = 2
TO_THE_BIT = ("none", "topk", "redsync", "randomk", "threshold", "dgc", "gravac", "netsense")
"""What they deliver of small integers is exact, where values are sent in full."""
WIDE, ALL = ("float32", "float64"), ("float32", "float16", "float64", "bfloat16")


def _kept(text):
    """Methods whose residual holds all that was not delivered: not those that discard, nor sums of velocities."""
    method = parse_compression(text)
    return method.keeps and not (isinstance(method, DGC) and method.momentum)


def _exact(text):
    return text.partition("(")[0] in TO_THE_BIT and "fp16" not in text


def _member(text, dtypes):
    """A member whose buckets and type are others in each step; what was given, delivered and is withheld, by parameter."""

    async def member(group):
        compression = compression_of(text)
        given, delivered = ({name: np.zeros(part.size) for name, part in PARTS.items()} for _ in range(2))
        buckets = []
        for step, layout in enumerate(LAYOUTS):
            dtype = dtypes[step % len(dtypes)]
            buckets = [Bucket([PARTS[name] for name in names]) for names in layout.split()]
            for parts in buckets:
                integers = np.random.default_rng([group.rank, step, parts.size]).integers(-8, 9, parts.size)
                array = (
                    narrow_bfloat16(integers.astype(np.float32))
                    if dtype == "bfloat16"
                    else integers.astype(dtype)
                )
                _add(given, parts, integers)
                await compression.all_reduce(group, array, parts, timeout_s=20.0, iteration=step, dtype=dtype)
                _add(delivered, parts, wide(array, dtype))
        withheld = {name: np.zeros(part.size) for name, part in PARTS.items()}
        for parts in buckets:
            held = compression._memories.of(parts.layout).residual
            if held is not None:
                _add(withheld, parts, held)
        return given, delivered, withheld

    return member


def _add(totals, parts, flat):
    for part, values in zip(parts.parts, parts.cut(flat), strict=True):
        totals[part.name] += values


@pytest.mark.parametrize("text", [text for text in TEXTS if _kept(text)])
def test_what_is_withheld_follows_its_parameters(text):
    """Over two ranks: given == delivered + withheld for each element of each parameter, whatever bucket it stood in and whatever
    type its gradient had."""
    results = run_memory(_member(text, ALL if _exact(text) else WIDE), RANKS)
    for name in PARTS:
        given, delivered, withheld = (sum(result[kind][name] for result in results) for kind in range(3))
        np.testing.assert_array_equal(results[0][1][name], results[1][1][name])
        if _exact(text):
            np.testing.assert_array_equal(delivered + withheld, given)
        else:
            np.testing.assert_allclose(delivered + withheld, given, rtol=0, atol=1e-3)


def test_the_cases_withhold_something():
    """What the test above adds up is not nothing."""
    for text in ("topk(0.05)", "gravac", "dgc(0.05,momentum=0)", "sign"):
        results = run_memory(_member(text, WIDE), RANKS)
        assert any(withheld.any() for withheld in results[0][2].values())
