"""Element types and operations, against numpy and torch's rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dblp.collectives.reduction import (
    DTYPES,
    Op,
    Reducer,
    check_op,
    dtype_of,
    energy,
    narrow_bfloat16,
    parse_op,
    widen_bfloat16,
)
from dblp.errors import ConfigError, UnsupportedError

FLOAT32_BITS = hnp.arrays(np.uint32, st.integers(1, 40))


def bfloat16(values):
    return narrow_bfloat16(np.asarray(values, np.float32))


@given(FLOAT32_BITS)
def test_bfloat16_rounds_to_the_nearest_and_ties_to_even(bits):
    """The nearest of the two neighbours by exact arithmetic (in float64), and the even one in the middle."""
    values = bits.view(np.float32)
    finite = np.isfinite(values)
    got = narrow_bfloat16(values)
    low = (bits >> 16).astype(np.uint32)
    below, above = low.astype(np.uint16), (low + 1).astype(np.uint16)
    for value, g, a, b in zip(values[finite], got[finite], below[finite], above[finite], strict=True):
        exact = float(value)
        # Beyond the largest finite bfloat16 the next step would be 2^128: that is infinity's place.
        near = [
            math.copysign(2.0**128, exact) if np.isinf(w) else float(w)
            for w in widen_bfloat16(np.array([a, b]))
        ]
        distances = [abs(exact - n) for n in near]
        expected = a if distances[0] < distances[1] or (distances[0] == distances[1] and a % 2 == 0) else b
        assert g == expected


@given(FLOAT32_BITS)
def test_bfloat16_keeps_nan_and_infinity(bits):
    values = bits.view(np.float32)
    back = widen_bfloat16(narrow_bfloat16(values))
    assert (np.isnan(back) == np.isnan(values)).all()
    assert (np.signbit(back) == np.signbit(values)).all()
    assert np.isinf(back[np.isinf(values)]).all()


@given(hnp.arrays(np.uint16, st.integers(1, 40)))
def test_bfloat16_survives_a_round_trip(bits):
    wide = widen_bfloat16(bits)
    back = narrow_bfloat16(wide)
    number = ~np.isnan(wide)
    assert (back[number] == bits[number]).all() and np.isnan(widen_bfloat16(back[~number])).all()


def test_bfloat16_agrees_with_torch():
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(1).integers(0, 1 << 32, 100_000, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    theirs = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    number = ~np.isnan(values)
    assert (narrow_bfloat16(values)[number] == theirs[number]).all()


@pytest.mark.parametrize("name", DTYPES)
def test_codes_and_storage(name):
    dtype = DTYPES[name]
    array = np.zeros(3, dtype.storage)
    assert dtype_of(array, name) is dtype and 0 < dtype.code < 255
    assert len({known.code for known in DTYPES.values()}) == len(DTYPES)


@pytest.mark.parametrize("dtype", ["longdouble", "datetime64[s]", "object", "U3"])
def test_unknown_types_are_refused(dtype):
    with pytest.raises(UnsupportedError, match="not supported; known are float16"):
        dtype_of(np.zeros(2, dtype))


def test_foreign_byte_order_and_wrong_storage_are_refused():
    with pytest.raises(UnsupportedError, match="byte order"):
        dtype_of(np.zeros(2, ">f4"))
    with pytest.raises(ConfigError, match="held in arrays of uint16, not of float32"):
        dtype_of(np.zeros(2, np.float32), "bfloat16")


def test_operations_by_name():
    assert parse_op("Sum") is Op.SUM and parse_op(Op.BXOR) is Op.BXOR
    with pytest.raises(ConfigError, match=r"'premul'.*'sum', 'avg', 'product'"):
        parse_op("premul")


@pytest.mark.parametrize(
    ("name", "op"),
    [(n, o) for n in ("float32", "bfloat16", "complex64") for o in (Op.BAND, Op.BOR, Op.BXOR)]
    + [("complex128", Op.MIN), ("complex64", Op.MAX)]
    + [("int32", Op.AVG), ("uint8", Op.AVG), ("bool", Op.AVG)],
)
def test_meaningless_operations_are_refused(name, op):
    with pytest.raises(UnsupportedError, match=f"op {op.name} on {name}"):
        check_op(DTYPES[name], op)


def fold(name, op, *parts):
    """Fold parts with the result in the last one's place, and with ``accumulate`` where there are two."""
    dtype = DTYPES[name]
    arrays = [np.array(part, dtype.storage) for part in parts]
    untouched = [array.copy() for array in arrays]
    out = arrays[-1]
    Reducer(dtype, op, len(parts)).fold(arrays, out, np.empty_like(out))
    for array, before in zip(arrays[:-1], untouched[:-1], strict=True):
        assert array.tobytes() == before.tobytes(), "fold changed a part"
    if len(parts) == 2:
        target, rows = untouched[1].copy(), untouched[0].copy()
        Reducer(dtype, op, 2).accumulate(target, rows, final=True)
        assert np.array_equal(target, out, equal_nan=dtype.kind in "fc")
    return out


def test_bool_sum_is_or_and_product_is_and():
    a, b = [True, True, False, False], [True, False, True, False]
    assert fold("bool", Op.SUM, a, b).tolist() == [True, True, True, False]
    assert fold("bool", Op.PRODUCT, a, b).tolist() == [True, False, False, False]
    assert fold("bool", Op.BXOR, a, b).tolist() == [False, True, True, False]
    assert fold("bool", Op.MIN, a, b).tolist() == [True, False, False, False]
    assert fold("bool", Op.MAX, a, b).tolist() == [True, True, True, False]


@pytest.mark.parametrize("op", [Op.MIN, Op.MAX])
@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_nan_wins(name, op):
    result = fold(name, op, [np.nan, 1.0, 2.0], [1.0, np.nan, 3.0])
    assert np.isnan(result[:2]).all() and result[2] == (2.0 if op is Op.MIN else 3.0)


def test_integers_wrap():
    assert fold("uint8", Op.SUM, [200], [100]).tolist() == [44]
    assert fold("int8", Op.PRODUCT, [64], [2]).tolist() == [-128]


def test_half_types_round_once():
    """2048 + 1 + 1 in float16: rounded after each addition it stays 2048."""
    assert fold("float16", Op.SUM, [2048.0], [1.0], [1.0])[0] == 2050.0
    one, small = bfloat16([1.0])[0], bfloat16([2.0**-8])[0]
    assert widen_bfloat16(fold("bfloat16", Op.SUM, [one], [small], [small]))[0] == np.float32(1 + 2.0**-7)


def test_half_average_divides_before_rounding():
    assert fold("float16", Op.AVG, [60000.0], [60000.0])[0] == 60000.0


def test_average_divides_complex_parts():
    result = fold("complex64", Op.AVG, [3 + 6j], [0], [0])
    assert result[0] == np.complex64(1 + 2j)


def test_overflow_gives_infinity_without_a_warning():
    assert np.isinf(fold("float32", Op.SUM, [3e38], [3e38])[0])
    assert np.isnan(fold("float64", Op.SUM, [np.inf], [-np.inf])[0])
    assert np.isinf(fold("float16", Op.PRODUCT, [60000.0], [2.0])[0])


@given(st.integers(2, 6), st.data())
def test_fold_is_the_sum_in_rank_order_wherever_the_result_goes(parts, data):
    """(((p0 + p1) + p2) + ...) bit for bit, with the result in place of any part or apart."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    arrays = [rng.standard_normal(17).astype(np.float32) for _ in range(parts)]
    expected = arrays[0].copy()
    for array in arrays[1:]:
        expected = expected + array
    place = data.draw(st.integers(-1, parts - 1))
    out = np.empty(17, np.float32) if place < 0 else arrays[place]
    Reducer(DTYPES["float32"], Op.SUM, parts).fold(arrays, out, np.empty(17, np.float32))
    assert out.tobytes() == expected.tobytes()


def test_energy_survives_overflow_and_tells_nan():
    assert energy(np.full(10_000, 1e30, np.float32), DTYPES["float32"]) == pytest.approx(1e64, rel=1e-6)
    assert energy(bfloat16(np.full(20_000, 3.0)), DTYPES["bfloat16"]) == 180_000.0
    assert energy(np.full((3, 5), 300.0, np.float16), DTYPES["float16"]) == 15 * 90_000.0
    assert math.isnan(energy(np.array([1.0, np.nan], np.float32), DTYPES["float32"]))
    assert energy(np.empty(0, np.float32), DTYPES["float32"]) == 0.0
