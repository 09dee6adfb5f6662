"""Residuals and stores of what is carried, without a network; ``test_accounting`` has them in rounds."""

# mypy: disable-error-code="arg-type"
# Wrong types are what some tests are about.

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.collectives.carry import Account, CarryStore, Residual
from dblp.collectives.pieces import PIECE
from dblp.collectives.reduction import DTYPES, Op, narrow_bfloat16, widen_bfloat16
from dblp.errors import ConfigError
from dblp.transport.policy import Carry, CarryBound

F32 = DTYPES["float32"]
FREE = Carry(bound=CarryBound.NONE)


def losing(residual, gradient, lost, rule, kind=F32):
    """One round, all of it sent, that loses the slices ``lost``: what was sent, and the accounts."""
    sent = gradient.copy()
    residual.begin(sent, kind, rule)
    for part in lost:
        residual.keep(part.start, sent[part])
    return sent, *residual.settle(float(np.square(sent, dtype=np.float64).sum()))


class Reference:
    """The carries of all workers under one rule; arrays are (workers, chunks, PIECE)."""

    def __init__(self, rule):
        self.rule = rule
        self.velocity = 0.0
        self.kept = []  # the rounds of CarryBound.AGE one by one, the newest first; their sum under the others

    def added_to(self, gradients):
        self.fresh = gradients
        if self.rule.momentum:
            self.fresh = self.velocity = np.float32(self.rule.momentum) * self.velocity + gradients
        self.sent = sum(self.kept, start=self.fresh)
        return self.sent

    def settle(self, missing):
        lost = missing[:, :, None]
        if self.rule.bound is CarryBound.AGE:
            self.kept = [part * lost for part in [self.fresh, *self.kept][: int(self.rule.limit)]]
        else:
            carried = self.sent * lost * np.float32(0.5 if self.rule.bound is CarryBound.DECAY else 1.0)
            if self.rule.bound in (CarryBound.NORM, CarryBound.DECAY):
                carried = np.stack([self.within(*pair) for pair in zip(carried, self.fresh, strict=True)])
            self.kept = [carried]
        if self.rule.masking:
            self.velocity = self.velocity * lost

    def within(self, carried, fresh):
        """One worker's, (chunks, PIECE): the largest chunks whose norm is at most ``limit`` times that of ``fresh``."""
        left, carried = self.rule.limit**2 * np.square(fresh, dtype=np.float64).sum(), carried.copy()
        for chunk in np.argsort(-np.square(carried, dtype=np.float64).sum(1)):
            left -= np.square(carried[chunk], dtype=np.float64).sum()
            if left < 0:
                carried[chunk] = 0
        return carried


def test_what_is_lost_comes_with_the_next_gradient():
    residual = Residual(1000)
    first, second = (np.arange(1000, dtype=np.float32) + k for k in (1, 5000))
    sent, carried, discarded = losing(residual, first, [slice(100, 300)], FREE)
    assert (sent == first).all() and discarded == Account()
    assert carried.elements == 200 and carried.total == first[100:300].sum()
    assert carried.energy == pytest.approx(np.square(first[100:300], dtype=np.float64).sum())
    sent, carried, _ = losing(residual, second, [], FREE)
    assert (sent[100:300] == second[100:300] + first[100:300]).all()
    assert (np.delete(sent, slice(100, 300)) == np.delete(second, slice(100, 300))).all()
    assert carried == Account() and residual.empty


def test_what_is_lost_again_and_again_halves_each_time():
    residual = Residual(PIECE + 10)
    first, nothing = np.full(PIECE + 10, 24, np.float32), np.zeros(PIECE + 10, np.float32)
    rule, part = Carry(bound=CarryBound.DECAY, limit=100.0), slice(0, 5)
    small = np.full(PIECE + 10, 1, np.float32)
    sent = [losing(residual, gradient, [part], rule)[0][part].tolist() for gradient in (first, small, small)]
    assert sent == [[24.0] * 5, [13.0] * 5, [7.5] * 5]
    _, carried, discarded = losing(residual, nothing, [part], replace(rule, limit=1.0))
    assert carried == Account(), "a gradient of nothing bounds a carry at nothing"
    assert (discarded.total, discarded.energy) == (3.75 * 5, 1.875**2 * 5 * 2)
    assert residual.empty


def test_without_a_rule_what_is_carried_is_delivered_and_nothing_new_is_kept():
    residual = Residual(10)
    losing(residual, np.ones(10, np.float32), [slice(0, 4)], FREE)
    sent, carried, discarded = losing(residual, np.ones(10, np.float32), [slice(2, 6)], None)
    assert sent.tolist() == [2.0] * 4 + [1.0] * 6
    assert (carried, discarded.elements, discarded.total) == (Account(), 4, 6.0)


@pytest.mark.parametrize(("momentum", "masking"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize(
    ("bound", "limit"),
    [
        ("norm", 1.0),
        ("norm", 0.3),
        ("decay", 1.0),
        ("decay", 0.4),
        ("age", 1.0),
        ("age", 2.0),
        ("age", 3.0),
        ("none", 1.0),
    ],
)
@pytest.mark.parametrize("loss", [0.1, 0.6])
def test_the_rules_are_those_of_the_reference(bound, limit, momentum, masking, loss):
    """Against ``Reference``, chunk by chunk and without regard to memory."""
    rule = Carry(bound=CarryBound(bound), limit=limit, momentum=momentum, masking=masking)
    workers, chunks, rng = 2, 7, np.random.default_rng(5)
    reference = Reference(rule)
    residuals = [Residual(chunks * PIECE) for _ in range(workers)]
    for round_ in range(12):
        gradients = rng.standard_normal((workers, chunks, PIECE)).astype(np.float32) * (1 + round_ % 3)
        missing = rng.random((workers, chunks)) < loss
        wanted = reference.added_to(gradients)
        for worker, residual in enumerate(residuals):
            lost = [slice(c * PIECE, (c + 1) * PIECE) for c in np.flatnonzero(missing[worker]).tolist()]
            sent, _, _ = losing(residual, gradients[worker].reshape(-1), lost, rule)
            np.testing.assert_allclose(sent, wanted[worker].reshape(-1), rtol=2e-5, atol=2e-5)
        reference.settle(missing)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 3000),
    limit=st.sampled_from([0.2, 1.0, 3.0]),
    bound=st.sampled_from(["norm", "decay", "age", "none"]),
    share=st.floats(0.0, 1.0),
    kind=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    seed=st.integers(0, 1000),
)
def test_nothing_leaves_the_account(size, limit, bound, share, kind, seed):
    """Integers: contributed == delivered + carried + discarded, element by element; and the norm is bounded."""
    rule = Carry(bound=CarryBound(bound), limit=max(1.0, round(limit)) if bound == "age" else limit)
    rng = np.random.default_rng(seed)
    dtype = DTYPES[kind]
    discards: list[np.ndarray] = []
    residual = Residual(size, "float64" if kind == "float64" else "float32", on_discard=discards.append)
    contributed, delivered = np.zeros(size), np.zeros(size)
    discarded_total = 0.0
    for _ in range(5):
        gradient = rng.integers(-8, 9, size).astype(np.float32)
        contributed += gradient
        array = narrow_bfloat16(gradient) if kind == "bfloat16" else gradient.astype(dtype.storage)
        residual.begin(array, dtype, rule)
        sent = (widen_bfloat16(array) if kind == "bfloat16" else array).astype(np.float64)
        low, high = sorted(rng.integers(0, size + 1, 2).tolist())
        high = low + int((high - low) * share)
        if low < high:
            residual.keep(low, array[low:high])
            sent[low:high] = 0
        delivered += sent
        carried, discarded = residual.settle(float(np.square(gradient).sum()))
        discarded_total += discarded.total
        if bound in ("norm", "decay"):
            assert carried.energy <= limit**2 * np.square(gradient).sum() * (1 + 1e-5)
    everything = delivered + residual.values + sum(discards, start=np.zeros(size))
    assert (everything == contributed).all()
    assert discarded_total == sum(values.sum() for values in discards)


def test_the_least_energy_is_dropped_first():
    residual = Residual(3 * PIECE)
    gradient = np.repeat(np.array([3.0, 1.0, 2.0], np.float32), PIECE)
    rule = Carry(
        bound=CarryBound.NORM, limit=3.2 / 14**0.5
    )  # of the energies 9, 1 and 4, the largest and the least would fit, not both largest
    _, carried, discarded = losing(residual, gradient, [slice(0, gradient.size)], rule)
    assert carried.total == 3 * PIECE
    assert discarded.total == 3 * PIECE
    assert (residual.values == np.where(gradient == 3, 3, 0)).all()


def test_a_sum_of_ranks_weighs_its_share_of_the_norm():
    for divisor in (1, 4):
        residual = Residual(100)
        array = np.ones(100, np.float32)
        residual.begin(array, F32, Carry(bound=CarryBound.NORM))
        residual.keep(0, np.full(100, 4.0 / divisor, np.float32), divisor=divisor, ranks=4)
        carried, discarded = residual.settle(100.0)
        assert (carried.total, discarded.total) == (400.0, 0.0)
    residual = Residual(100)
    residual.begin(array, F32, Carry(bound=CarryBound.NORM))
    residual.keep(0, np.full(100, 4.0, np.float32))
    assert residual.settle(100.0)[0] == Account()


def test_half_types_carry_what_rounding_took():
    residual = Residual(4)
    half = DTYPES["float16"]
    losing(residual, np.full(4, 2048.0, np.float16), [slice(0, 4)], FREE, half)
    sent, carried, _ = losing(residual, np.array([1, 3, 5, 0], np.float16), [], FREE, half)
    assert sent.tolist() == [2048.0, 2052.0, 2052.0, 2048.0]
    assert residual.values.tolist() == [1.0, -1.0, 1.0, 0.0] and carried.elements == 3


def test_decay_leaves_what_rounding_took():
    residual = Residual(2)
    half, rule = DTYPES["float16"], Carry(bound=CarryBound.DECAY, limit=1e4)
    losing(residual, np.full(2, 4096.0, np.float16), [slice(0, 2)], rule, half)
    sent, _, discarded = losing(residual, np.array([1, 1], np.float16), [slice(0, 1)], rule, half)
    assert sent.tolist() == [2048.0, 2048.0]
    assert residual.values.tolist() == [1025.0, 1.0] and discarded.total == 1024.0


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(
    "rule",
    [Carry(bound=CarryBound.NORM), Carry(bound=CarryBound.DECAY), FREE, Carry(bound=CarryBound.AGE, limit=3)],
)
def test_what_overflowed_does_not_come_back(rule, momentum):
    """An infinite gradient is discarded where it was lost; all else is carried as ever, also what is older."""
    rule = replace(rule, momentum=momentum)
    residual = Residual(3 * PIECE)
    gradient = np.ones(3 * PIECE, np.float32)
    losing(residual, gradient, [slice(0, PIECE)], rule)
    spoiled = gradient.copy()
    spoiled[[3, 7, 2 * PIECE]] = np.inf, -np.inf, np.nan
    sent, carried, discarded = losing(residual, spoiled, [slice(0, PIECE)], rule)
    assert not np.isfinite(sent[[3, 7]]).any() and np.isfinite(carried.energy)
    assert discarded.elements == 2 or rule.bound in (CarryBound.NORM, CarryBound.DECAY)
    assert residual.values[3] == residual.values[7] == 0
    sent, carried, discarded = losing(residual, gradient, [], rule)
    assert np.isfinite(sent).all() and (sent[[3, 7]] == 1).all()
    if rule.bound in (CarryBound.NONE, CarryBound.AGE):
        assert (np.delete(sent[:PIECE], [3, 7]) >= 3).all()
    assert (carried, discarded) == (Account(), Account())


def test_a_carry_that_overflows_a_half_type_is_gone():
    residual = Residual(2)
    half = DTYPES["float16"]
    losing(residual, np.array([60_000, 1], np.float16), [slice(0, 2)], FREE, half)
    with np.errstate(over="ignore"):
        sent, carried, discarded = losing(residual, np.array([60_000, 1], np.float16), [], FREE, half)
    assert sent.tolist() == [np.inf, 2.0]
    assert carried == Account() and discarded.elements == 1 and residual.empty


def test_misuse_is_refused():
    with pytest.raises(ConfigError, match="float32, or in float64"):
        Residual(4, "float16")
    for size in (Carry(), -1, 1.5, True):
        with pytest.raises(ConfigError, match=r"size=.* number of the gradient's elements"):
            Residual(size)
    residual = Residual(4)
    for size, kind, words in [
        (5, "float32", "4 elements, the gradient 5"),
        (4, "float64", "cannot be held in float32"),
        (4, "int32", "none for types that are not floating-point"),
    ]:
        with pytest.raises(ConfigError, match=words):
            residual.check(size, DTYPES[kind])
    with pytest.raises(ConfigError, match="carry with MAX"):
        residual.check(4, F32, Op.MAX)
    residual.begin(np.zeros(4, np.float32), F32, FREE)
    with pytest.raises(ConfigError, match="still under way"):
        residual.check(4, F32)
    residual.abandon()
    residual.check(4, F32)


# stores


def store_with(values, layout=(("a", 3), ("b", 2)), rule=FREE, dtype="float32"):
    """A store whose bucket carries ``values``."""
    store = CarryStore()
    residual = store.residual(layout, dtype)
    losing(residual, np.array(values, dtype), [slice(0, len(values))], rule, DTYPES[dtype])
    return store


def test_buckets_that_are_made_anew_keep_what_is_carried():
    store = store_with([1, 2, 3, 4, 5])
    assert store.residual([("a", 3), ("b", 2)]).values.tolist() == [1, 2, 3, 4, 5]
    assert store.residual([("b", 2), ("c", 1)]).values.tolist() == [4, 5, 0]
    assert store.residual([("a", 3)]).values.tolist() == [1, 2, 3]
    assert store.residual([("c", 1), ("a", 3), ("b", 2)]).values.tolist() == [0, 1, 2, 3, 4, 5]
    assert store.residual([("b", 2)]).values.tolist() == [4, 5], "moved, not copied: none is delivered twice"
    rest = store.residual([("a", 3), ("c", 1)])
    assert rest.values.tolist() == [1, 2, 3, 0]


def test_another_type_keeps_what_is_carried():
    store = store_with([1.5, 2, 3, 4, 5])
    wide = store.residual([("a", 3), ("b", 2)], "float64")
    assert wide.dtype == np.float64 and wide.values.tolist() == [1.5, 2, 3, 4, 5]


@pytest.mark.parametrize("rule", [FREE, Carry(bound=CarryBound.AGE, limit=2), Carry(limit=9.0, momentum=0.5)])
def test_a_checkpoint_goes_on_where_the_run_was(rule):
    def step(store, layout, number):
        residual = store.residual(layout)
        gradient = np.random.default_rng(number).integers(-9, 10, 5).astype(np.float32)
        sent, carried, discarded = losing(residual, gradient, [slice(1, 4)], rule)
        return sent.tolist(), carried, discarded

    layout = (("a", 3), ("b", 2))
    store = CarryStore()
    for number in range(3):
        step(store, layout, number)
    state = store.state_dict()
    assert all(
        values.dtype == np.float32 for entry in state["parameters"].values() for values in entry["layers"]
    )
    resumed = CarryStore()
    resumed.load_state_dict(state)
    assert resumed.state_dict()["parameters"].keys() == state["parameters"].keys(), (
        "also before a bucket asks"
    )
    for number in range(3, 7):
        assert step(resumed, layout, number) == step(store, layout, number)


def test_states_and_layouts_that_do_not_fit_are_refused():
    store = store_with([1, 2, 3, 4, 5])
    with pytest.raises(ConfigError, match="'a' has 4 elements, 3 are held"):
        store.residual([("a", 4)])
    with pytest.raises(ConfigError, match="stands twice"):
        store.residual([("a", 3), ("a", 3)])
    busy = store.residual([("a", 3), ("b", 2)])
    busy.begin(np.zeros(5, np.float32), F32, FREE)
    with pytest.raises(ConfigError, match="still under way"):
        store.residual([("b", 2)])
    with pytest.raises(ConfigError, match="still under way"):
        store.state_dict()
    busy.settle()
    assert store.residual([("b", 2)]).empty
    for state in (
        {},
        {"version": 1},
        {"version": 1, "parameters": {"a": {"layers": [[[1.0]]], "velocity": None}}},
    ):
        with pytest.raises(ConfigError, match="no state of a CarryStore"):
            store.load_state_dict(state)
    with pytest.raises(ConfigError, match="version 9"):
        store.load_state_dict({"version": 9, "parameters": {}})
