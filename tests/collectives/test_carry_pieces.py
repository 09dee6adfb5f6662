"""Residuals handle only the pieces of which something was lost, and do to them what ``DenseCarry`` does to whole arrays."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.collectives.carry import CarryStore, Residual
from dblp.collectives.pieces import PIECE
from dblp.collectives.reduction import DTYPES, narrow_bfloat16, widen_bfloat16
from dblp.transport.policy import Carry, CarryBound
from tests.collectives.dense_carry import DenseCarry

SIZES = [0, 1, 5, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 7 * PIECE + 17, 20 * PIECE + PIECE - 1]
LIMITS = {
    CarryBound.NORM: [0.2, 1.0],
    CarryBound.DECAY: [0.3, 1.0, 50.0],
    CarryBound.AGE: [1.0, 2.0, 3.0],
    CarryBound.NONE: [1.0],
}


def some_rule(rng, momentum):
    """Any rule, or none."""
    if rng.random() < 0.1:
        return None
    bound = list(CarryBound)[rng.integers(4)]
    limit = float(rng.choice(LIMITS[bound]))
    factor = float(rng.choice([0.5, 0.9])) if momentum else 0.0
    return Carry(bound=bound, limit=limit, momentum=factor, masking=bool(momentum and rng.random() < 0.5))


class Both:
    """A residual and its dense model, side by side through the same rounds."""

    def __init__(self, size, kind, wide, rng, *, integers, momentum):
        self.size, self.kind, self.rng, self.integers = size, DTYPES[kind], rng, integers
        self.exact = integers and not momentum
        self.told: tuple[list[Any], list[Any]] = [], []
        tell = rng.random() < 0.7
        self.sides: list[Any] = [
            made(size, wide, on_discard=told.append if tell else None)
            for made, told in zip((Residual, DenseCarry), self.told, strict=True)
        ]

    def gradient(self):
        """Integers or not, nothing at all now and then, with overflows now and then; in the storage type."""
        rng = self.rng
        values = rng.standard_normal(self.size) * 10.0 ** rng.integers(-2, 3)
        if self.integers:
            values = rng.integers(-8, 9, self.size).astype(np.float64)
        values *= rng.random() > 0.05
        if self.size and rng.random() < 0.15:
            values[rng.integers(0, self.size, 3)] = rng.choice([np.inf, -np.inf, np.nan], 3)
        with np.errstate(over="ignore"):
            if self.kind.name == "bfloat16":
                return narrow_bfloat16(values.astype(np.float32))
            return values.astype(self.kind.storage)

    def round(self, rule):
        """One round; it fails now and then."""
        rng, first = self.rng, self.gradient()
        weigh, contributes = bool(rng.random() < 0.4), bool(rng.random() < 0.9)
        sent = [first.copy() for _ in self.sides]
        losses = self.losses()
        for side, array in zip(self.sides, sent, strict=True):
            side.begin(array, self.kind, rule, weigh=weigh, contributes=contributes)
            for low, high, options in losses:
                with np.errstate(all="ignore"):
                    side.keep(low, array[low:high], **options)
        same(*map(self.floats, sent))
        if rng.random() < 0.08:
            for side in self.sides:
                side.abandon()
        else:
            energy_sent = float(np.square(self.floats(sent[0]).astype(np.float64)).sum())
            accounts = [side.settle(energy_sent) for side in self.sides]
            for account, wanted in zip(*accounts, strict=True):
                self.same_account(account, wanted)
        self.check()

    def losses(self):
        """None, a few or all, in chunks that do not mind pieces; some lie over others."""
        rng, losses = self.rng, []
        for _ in range(int(rng.choice([0, 1, 2, 6]))):
            low, high = sorted(rng.integers(0, self.size + 1, 2).tolist())
            if rng.random() < 0.7:
                high = min(high, low + 40)
            options = [{}, {"ranks": 3}, {"divisor": 4, "ranks": 4}][rng.integers(3)]
            losses.append((low, high, options))
        return losses

    def floats(self, array):
        return widen_bfloat16(array) if self.kind.name == "bfloat16" else array

    def same_account(self, account, wanted):
        assert account.elements == wanted.elements
        same(account.energy, wanted.energy)
        if self.exact:
            same(account.total, wanted.total)
        elif math.isfinite(wanted.total):  # the last bits are those of the order in which numpy adds float64
            size = math.sqrt(wanted.energy * wanted.elements)
            assert account.total == pytest.approx(wanted.total, rel=0, abs=1e-13 * size)
        else:
            same(account.total, wanted.total)

    def check(self):
        """Values, their ages, velocities and what ``on_discard`` was told."""
        (ours, model), (told, wanted) = self.sides, self.told
        assert ours.empty == model.empty
        same(ours.values, model.values)
        low, high = sorted(self.rng.integers(0, self.size + 1, 2).tolist())
        for bounds in ((0, self.size), (low, high)):
            part, whole = (side.take(*bounds) for side in self.sides)
            assert len(part.layers) == len(whole.layers)
            for layer, values in zip(part.layers, whole.layers, strict=True):
                same(layer, values)
            assert (part.velocity is None) == (whole.velocity is None)
            if part.velocity is not None:
                same(part.velocity, whole.velocity)
        assert len(told) == len(wanted)
        for values, dense in zip(told, wanted, strict=True):
            same(values, dense)
        told.clear()
        wanted.clear()

    def rebuild(self):
        """What is held moves to new ones, as when buckets are made anew."""
        cuts = sorted({0, *self.rng.integers(0, self.size + 1, 3).tolist(), self.size})
        spans = list(itertools.pairwise(cuts))
        self.rng.shuffle(spans)
        for index, side in enumerate(self.sides):
            fresh = type(side)(self.size, side.dtype, on_discard=side.on_discard)
            for low, high in spans:
                fresh.put(low, side.take(low, high))
            self.sides[index] = fresh
        self.check()


def same(left, right):
    """Equal in value and type; NaNs are, and zeros of either sign."""
    left, right = np.asarray(left), np.asarray(right)
    assert left.dtype == right.dtype
    np.testing.assert_array_equal(left, right)


KINDS = [("float32", "float32"), ("float32", "float64"), ("float64", "float64"), ("float16", "float32"),
         ("float16", "float64"), ("bfloat16", "float32")]  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(
    size=st.sampled_from(SIZES),
    kind=st.sampled_from(KINDS),
    momentum=st.sampled_from([False, False, True]),
    steady=st.booleans(),
    integers=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_the_same_bits_as_on_whole_arrays(size, kind, momentum, steady, integers, seed):
    """Rounds of all rules, also of one that changes from round to round, of all types, through rebuilt buckets."""
    rng = np.random.default_rng(seed)
    both = Both(size, kind[0], kind[1], rng, integers=integers, momentum=momentum)
    rule = some_rule(rng, momentum)
    for _ in range(7):
        with np.errstate(over="ignore", invalid="ignore"):
            both.round(rule)
        if rng.random() < 0.2:
            both.rebuild()
        if not steady:
            rule = some_rule(rng, momentum)


def lossy_round(residual, array, kind, rule, pieces):
    """One round that loses these pieces; ``array`` becomes what was sent."""
    residual.begin(array, DTYPES[kind], rule)
    for piece in pieces:
        residual.keep(piece * PIECE, array[piece * PIECE : (piece + 1) * PIECE])
    residual.settle(1e9)


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("bound", CarryBound)
def test_a_round_costs_what_it_lost(kind, bound):
    """It takes no memory of the gradient's size but for the one array that is used again, and holds the pieces that it lost; when
    all is delivered, none."""
    pieces = 4000
    size = pieces * PIECE - 5
    gradient = np.random.default_rng(1).integers(-8, 9, size).astype(np.float32)
    stored = narrow_bfloat16(gradient) if kind == "bfloat16" else gradient.astype(DTYPES[kind].storage)
    residual = Residual(size, "float64" if kind == "float64" else "float32")
    lost = np.random.default_rng(2).choice(pieces, (5, 40), replace=False)
    rule = Carry(bound=bound, limit=2.0)
    array = stored.copy()
    lossy_round(residual, array, kind, rule, lost[0])
    tracemalloc.start()
    try:
        for numbers in lost[1:]:
            array[...] = stored
            held = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            lossy_round(residual, array, kind, rule, numbers)
            peak = tracemalloc.get_traced_memory()[1] - held
            assert peak < stored.nbytes / 4
            newest = residual._layers[0]
            assert newest.rows.shape == (len(numbers), PIECE) and set(newest.index) == set(numbers)
    finally:
        tracemalloc.stop()
    array[...] = stored
    lossy_round(residual, array, kind, rule, [])
    assert residual.empty and residual._kept is None


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "bfloat16"])
def test_what_nothing_is_added_to_goes_out_as_it_is(kind):
    """Also zeros of either sign: beside what is carried a gradient has the bits of one that nothing was lost of."""
    wide = np.tile(np.array([-0.0, 0.0, 1.5], np.float32), 2 * PIECE)
    stored = narrow_bfloat16(wide) if kind == "bfloat16" else wide.astype(DTYPES[kind].storage)
    residual = Residual(wide.size, "float64" if kind == "float64" else "float32")
    lossy_round(residual, stored.copy(), kind, Carry(limit=9.0), [1])
    sent = stored.copy()
    lossy_round(residual, sent, kind, Carry(limit=9.0), [])
    beside = np.arange(wide.size) // PIECE != 1
    assert sent[beside].tobytes() == stored[beside].tobytes()
    assert (sent[~beside] != stored[~beside]).any()


def test_a_checkpoint_holds_whole_arrays():
    """As ever: of parameters that lost nothing too, and whatever pieces they lie in."""
    sizes = {"a": 3, "b": 2 * PIECE, "c": PIECE + 7}
    held = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    held["b"][[0, PIECE, -1]], held["c"][-1] = (1.0, 2.0, 3.0), 4.0
    parameters = {name: {"layers": [values], "velocity": None} for name, values in held.items()}
    store = CarryStore()
    store.load_state_dict({"version": 1, "parameters": parameters})
    for layout in [("a", "b", "c")], [("c", "a"), ("b",)]:
        buckets = [store.residual([(name, sizes[name]) for name in names]) for names in layout]
        for bucket, names in zip(buckets, layout, strict=True):
            same(bucket.values, np.concatenate([held[name] for name in names]))
        state = store.state_dict()["parameters"]
        assert state.keys() == held.keys()
        for name, entry in state.items():
            same(entry["layers"][0], held[name])
