"""Every method keeps the contract of ``base.py``: what is not sent is withheld, and what is not finite enters no residual."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.collectives.compression.dgc import DGC
from dblp.collectives.compression.registry import METHODS, parse_compression
from tests.collectives.compression.cases import (
    SHAPES,
    STARTED,
    TEXTS,
    agree,
    bucket,
    gradient,
    job,
    started,
    wide,
)

DTYPES = ["float16", "bfloat16", "float32", "float64"]
EXACT = ("none", "topk", "redsync", "randomk", "threshold", "fp16", "bf16", "dgc", "gravac", "netsense")
"""Their residual is what a rounding took away, or nothing: sent + withheld has all bits of the values."""


def _compress(text, shapes, array, dtype, memory=None, **more):
    """(values before, own part of what was sent, values after, job, what was sent)"""
    more = {"factors": started(text)} | more
    method, work = parse_compression(text), job(bucket(shapes), array, dtype, memory, **more)
    method.begin(work, wide(array, dtype))
    before = work.values.copy()
    agree(method, work)
    sent = method.compress(work)
    return before, method.own_part(work, sent), work.values, work, sent


def test_the_list_has_every_method():
    assert {parse_compression(text).name for text in TEXTS} == set(METHODS)


@pytest.mark.parametrize("text", STARTED)
def test_methods_in_the_middle_of_a_training_send_what_they_have_decided(text):
    """So that the tests here see the ways that are only taken once something has been decided."""
    array = gradient(bucket(SHAPES[0]).size, "float32")
    _, own, after, work, _ = _compress(text, SHAPES[0], array, "float32")
    if work.notes["whole"]:
        assert text.startswith("gravac") and work.notes["level"] == STARTED[text] and not after.any()
    elif text.startswith("gravac"):
        assert work.notes["level"] == STARTED[text] > 0 and 0 < np.count_nonzero(own) < own.size / 10
    else:
        assert work.notes["share"] == STARTED[text]
        assert np.count_nonzero(own) == np.ceil(STARTED[text] * own.size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_not_sent_is_withheld(text, dtype):
    for shapes in SHAPES:
        array = gradient(bucket(shapes).size, dtype)
        before, own, after, work, _ = _compress(text, shapes, array, dtype)
        assert before.dtype == own.dtype == after.dtype == ("float64" if dtype == "float64" else "float32")
        assert not work.spoiled
        _assert_conserved(text, before, own, after)


def _assert_conserved(text, before, own, after):
    if text.partition("(")[0] in EXACT:
        np.testing.assert_array_equal(own + after, before)
        return
    unit = np.finfo(before.dtype).eps * max(
        float(np.abs(before).max(initial=0)), float(np.abs(own).max(initial=0))
    )
    assert np.abs(own + after - before).max(initial=0) <= 8 * unit


@settings(max_examples=60, deadline=None)
@given(
    text=st.sampled_from(TEXTS),
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=4),
    dtype=st.sampled_from(DTYPES),
    rounds=st.integers(1, 4),
    scale=st.integers(-40, 10),
    seed=st.integers(0, 99),
)
def test_what_is_withheld_comes_back(text, shapes, dtype, rounds, scale, seed):
    """Over several rounds: all gradients == all that was sent + the last residual. Small integers times a power of two."""
    size = bucket(shapes).size
    method = parse_compression(text)
    if not method.keeps or isinstance(method, DGC):
        return  # the first discards by its name, the second sums velocities; test_dgc.py has its books
    total, delivered, memory = np.zeros(size), np.zeros(size), None
    for number in range(rounds):
        integers = np.random.default_rng([seed, number]).integers(-8, 9, size)
        with np.errstate(over="ignore"):
            array = integers.astype("float32") * np.float32(2.0) ** (scale if "float16" not in dtype else 0)
        array = (
            (array.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else array.astype(dtype)
        )
        _, own, after, work, _ = _compress(text, shapes, array, dtype, memory, number=number)
        memory = work.memory
        total += wide(array, dtype)
        delivered += own
    exact = (
        method.name in ("topk", "redsync", "randomk", "threshold", "gravac", "netsense")
        and "fp16" not in text
    )
    assert np.abs(total - delivered - after).max(initial=0) <= (
        0 if exact else 1e-6 * np.abs(total).max(initial=0) + 1e-5 * rounds * 8 * 2.0**scale
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", TEXTS)
def test_zeros_stay_zeros(text, dtype):
    """In buckets of every size, round after round."""
    for shapes in SHAPES:
        memory = None
        for number in range(2):
            array = gradient(bucket(shapes).size, dtype) * 0
            before, own, after, work, _ = _compress(text, shapes, array, dtype, memory, number=number)
            memory = work.memory
            assert not work.spoiled
            assert not before.any() and not own.any() and not after.any()


@pytest.mark.parametrize("text", TEXTS)
def test_the_largest_halves_are_conserved(text):
    """Elements of float16's largest magnitude, more than 32,767 of them, round after round: what is added up to no longer fits
    into the type, and is neither an infinity nor lost."""
    memory = None
    for number in range(3):
        array = gradient(bucket(SHAPES[-1]).size, "float16", seed=number)
        array[::2] = np.where(array[::2] > 0, 65504, -65504)
        before, own, after, work, _ = _compress(text, SHAPES[-1], array, "float16", memory, number=number)
        memory = work.memory
        assert not work.spoiled and np.isfinite(own).all() and np.isfinite(after).all()
        _assert_conserved(text, before, own, after)


@pytest.mark.parametrize(
    ("text", "share"),
    [(text, 0.05) for text in TEXTS if text.startswith("topk(0.05")] + [("randomk(0.1)", 0.1)],
)
def test_sparse_methods_send_their_share(text, share):
    array = gradient(bucket(SHAPES[0]).size, "float32")
    _, own, _, _, _ = _compress(text, SHAPES[0], array, "float32")
    assert np.count_nonzero(own) == np.ceil(share * own.size)


def test_threshold_sends_what_reaches_it():
    array = gradient(bucket(SHAPES[0]).size, "float32")
    _, own, _, _, _ = _compress("threshold(1.5)", SHAPES[0], array, "float32")
    np.testing.assert_array_equal(own, np.where(np.abs(array) >= 1.5, array, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", [text for text in TEXTS if text != "none"])
def test_what_is_not_finite_enters_no_residual(text, dtype):
    """The rank sends the news of it; the elements at fault restart at zero, the others wait; the round after is a usual one."""
    for bad in (np.nan, np.inf, -np.inf):
        _spoil(text, dtype, bad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", [text for text in TEXTS if text != "none"])
def test_nor_does_it_in_buckets_of_one_element_or_of_many(text, dtype):
    for shapes in (SHAPES[1], SHAPES[2], SHAPES[-1]):
        _spoil(text, dtype, np.nan, shapes)


def _spoil(text, dtype, bad, shapes=SHAPES[0]):
    size = bucket(shapes).size
    clean, spoilt, first = gradient(size, dtype), gradient(size, dtype), min(17, size - 1)
    spoilt[first] = spoilt[-1] = {"bfloat16": 0x7FC0 if np.isnan(bad) else 0x7F80}.get(dtype, bad)
    _, own, after, work, _ = _compress(text, shapes, spoilt, dtype)
    assert work.spoiled and not own.any()
    assert np.isfinite(after).all() and after[first] == 0
    held = work.memory.residual
    assert held is None or np.isfinite(held).all()
    assert work.memory.velocity is None or np.isfinite(work.memory.velocity).all()
    before, own, after, work, _ = _compress(text, shapes, clean, dtype, work.memory, number=2)
    assert not work.spoiled and np.isfinite(before).all()
    _assert_conserved(text, before, own, after)


@pytest.mark.parametrize("text", TEXTS)
def test_a_sum_of_finite_values_that_overflows_is_no_silent_infinity(text):
    """Gradient and residual are finite, their sum is not."""
    array = np.full(bucket(SHAPES[0]).size, 3e38, np.float32)
    method = parse_compression(text)
    work = job(bucket(SHAPES[0]), array, "float32")
    work.memory.residual = array.copy() if method.keeps else None
    method.begin(work, array)
    assert np.isfinite(work.values).all()
    assert work.spoiled == method.keeps
