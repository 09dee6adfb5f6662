"""Element types and operations: what may be reduced, with which accumulator, and how a batch of rows is reduced.

The semantics are torch's: a sum of bools is their "or", a product their "and"; NaN wins in MIN and MAX; integers wrap.
Half types (float16, bfloat16) are reduced in float32 and rounded once, to nearest even.

numpy has no bfloat16: such arrays come as uint16 with ``dtype="bfloat16"``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.errors import ConfigError, UnsupportedError

Array = npt.NDArray[Any]

_ENERGY_BLOCK = 8192
"""Elements in a block of the sum of squares: its float32 partial sums keep 6 digits, and BLAS threads stay asleep."""


class Op(enum.IntEnum):
    """A reduction; the value is its code on the wire."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7


@dataclass(frozen=True, slots=True)
class DType:
    """An element type."""

    name: str
    code: int
    """Its code on the wire; 0 is free."""
    kind: str
    """``f`` floating, ``c`` complex, ``i`` integer, ``b`` bool."""
    storage: np.dtype[Any]
    """numpy's type of the arrays that hold it."""
    half: bool = False
    """True if it is reduced in float32."""


def _table() -> dict[str, DType]:
    rows = [
        ("float16", "f"),
        ("bfloat16", "f"),
        ("float32", "f"),
        ("float64", "f"),
        ("complex64", "c"),
        ("complex128", "c"),
    ]
    rows += [(f"{sign}int{bits}", "i") for sign in ("", "u") for bits in (8, 16, 32, 64)]
    rows += [("bool", "b")]
    return {
        name: DType(
            name,
            code,
            kind,
            np.dtype("uint16" if name == "bfloat16" else name),
            name in ("float16", "bfloat16"),
        )
        for code, (name, kind) in enumerate(rows, start=1)
    }


DTYPES: dict[str, DType] = _table()
"""All element types by name."""
_BY_CODE = {dtype.code: dtype for dtype in DTYPES.values()}
_KNOWN: dict[tuple[np.dtype[Any], str | None], DType] = {}  # numpy makes a dtype's name anew each time
_UFUNCS: dict[Op, np.ufunc] = {
    Op.SUM: np.add,
    Op.AVG: np.add,
    Op.PRODUCT: np.multiply,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.BAND: np.bitwise_and,
    Op.BOR: np.bitwise_or,
    Op.BXOR: np.bitwise_xor,
}


def dtype_of(array: Array, name: str | None = None) -> DType:
    """The element type of ``array``; ``name`` overrides it for types that numpy lacks.

    Raises UnsupportedError for a type that is not in the table or foreign byte order, ConfigError if ``name`` does not
    fit the array.
    """
    known = _KNOWN.get((array.dtype, name))
    if known is None:
        known = _KNOWN[array.dtype, name] = _dtype_of(array, name)
    return known


def _dtype_of(array: Array, name: str | None) -> DType:
    wanted = array.dtype.name if name is None else name
    dtype = DTYPES.get(wanted)
    if dtype is None:
        raise UnsupportedError(f"dtype {wanted}: not supported; known are {', '.join(DTYPES)}")
    if not array.dtype.isnative:
        raise UnsupportedError(
            f"dtype {array.dtype.str}: foreign byte order; convert with array.astype('{wanted}')"
        )
    if dtype.storage != array.dtype:
        raise ConfigError(
            f"dtype={wanted!r} is held in arrays of {dtype.storage.name}, not of {array.dtype.name}"
        )
    return dtype


def parse_op(op: str | Op) -> Op:
    """Read an operation by name, in any case (``"sum"``); raises ConfigError that lists the names."""
    if isinstance(op, Op):
        return op
    try:
        return Op[op.upper()]
    except (KeyError, AttributeError):
        names = ", ".join(repr(known.name.lower()) for known in Op)
        raise ConfigError(f"op={op!r}: not an operation; use one of {names}") from None


def check_op(dtype: DType, op: Op) -> None:
    """Raise UnsupportedError where the operation has no meaning for the type."""
    if op in (Op.BAND, Op.BOR, Op.BXOR) and dtype.kind in "fc":
        raise UnsupportedError(f"op {op.name} on {dtype.name}: bitwise operations need integers or bool")
    if op in (Op.MIN, Op.MAX) and dtype.kind == "c":
        raise UnsupportedError(f"op {op.name} on {dtype.name}: complex numbers have no order")
    if op is Op.AVG and dtype.kind in "ib":
        raise UnsupportedError(
            f"op AVG on {dtype.name}: an average needs a floating or complex type; use SUM and divide"
        )


def dtype_name(code: int) -> str:
    """Name of a wire code, for messages about what a peer sent."""
    return _BY_CODE[code].name if code in _BY_CODE else f"dtype {code}"


def op_name(code: int) -> str:
    """Name of a wire code, for messages about what a peer sent."""
    return Op(code).name.lower() if code in set(Op) else f"op {code}"


# bfloat16


def widen_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """float32 of bfloat16 bits (any shape); exact."""
    wide: npt.NDArray[np.uint32] = np.left_shift(bits, 16, dtype=np.uint32)
    return wide.view(np.float32)


def narrow_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """bfloat16 bits of float32 (any shape), rounded to nearest even; NaN stays NaN (quiet, sign and payload kept)."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    # Adding half of the last place, less one if the kept part is even, carries exactly when round-half-even goes up.
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16
    nan = np.isnan(values)
    if nan.any():  # a NaN's mantissa must not carry into the exponent, nor lose its last set bit
        rounded = np.where(nan, bits >> 16 | 0x40, rounded)
    return rounded.astype(np.uint16)


class Reducer:
    """An operation on one element type over ``world_size`` contributions.

    All arrays are in the storage type. ``fold`` and ``accumulate`` work in place and give the same bits for
    two contributions: IEEE 754 addition and multiplication commute.
    """

    __slots__ = ("_narrow", "_ufunc", "_widen", "divisor", "dtype", "op")

    def __init__(self, dtype: DType, op: Op, world_size: int) -> None:
        check_op(dtype, op)
        self.dtype = dtype
        self.op = op
        self.divisor = world_size if op is Op.AVG else 1
        self._ufunc = _UFUNCS[op]
        self._widen: Callable[[Array], Array] = _widen_float16
        self._narrow: Callable[[Array], Array] = _narrow_float16
        if dtype.name == "bfloat16":
            self._widen, self._narrow = widen_bfloat16, narrow_bfloat16

    def fold(self, parts: Sequence[Array], out: Array, scratch: Array) -> None:
        """Reduce ``parts`` strictly in their order, ((p0 + p1) + p2) ..., into ``out`` and divide for AVG.

        All are 1-D and equally long. ``out`` may be one of the parts, the other parts are left alone; ``scratch`` holds
        the partial result until ``out``'s own part has been added.
        """
        with np.errstate(all="ignore"):  # overflow and NaN are results here, as in torch
            if self.dtype.half:
                self._fold_half(parts, out)
                return
            total, position = parts[0], next((i for i, part in enumerate(parts) if part is out), 0)
            for index, part in enumerate(parts[1:], start=1):
                target = out if index >= position else scratch
                total = self._ufunc(total, part, out=target)
            if total is not out:
                np.copyto(out, total)
            self._divide(out)

    def accumulate(self, target: Array, rows: Array, *, final: bool) -> None:
        """``target = target op rows`` (equal shapes); ``final`` divides for AVG, before the one rounding of half types."""
        with np.errstate(all="ignore"):
            if self.dtype.half:
                total = self._ufunc(self._widen(target), self._widen(rows))
                if final:
                    self._divide(total)
                target[...] = self._narrow(total)
                return
            self._ufunc(target, rows, out=target)
            if final:
                self._divide(target)

    def finish(self, target: Array) -> None:
        """Divide for AVG what nothing more is added to."""
        if self.divisor == 1:
            return
        with np.errstate(all="ignore"):
            if self.dtype.half:
                total = self._widen(target)
                self._divide(total)
                target[...] = self._narrow(total)
            else:
                self._divide(target)

    def scale(self, target: Array, factor: float) -> None:
        """Multiply in place; half types in float32, rounded once."""
        with np.errstate(all="ignore"):
            if self.dtype.half:
                target[...] = self._narrow(self._widen(target) * np.float32(factor))
            else:
                target *= target.dtype.type(factor)

    def _fold_half(self, parts: Sequence[Array], out: Array) -> None:
        total = self._widen(parts[0])
        for part in parts[1:]:
            self._ufunc(total, self._widen(part), out=total)
        self._divide(total)
        out[...] = self._narrow(total)

    def _divide(self, values: Array) -> None:
        if self.divisor == 1:
            return
        if (
            values.dtype.kind == "c"
        ):  # a real divisor divides both parts; numpy's complex division is slower and rounds more
            values = values.view(values.real.dtype)
        if (
            self.divisor & (self.divisor - 1) == 0
        ):  # a power of two: the product has the quotient's bits and is faster
            np.multiply(values, 1 / self.divisor, out=values)
        else:
            np.divide(values, self.divisor, out=values)


def _widen_float16(values: Array) -> Array:
    return values.astype(np.float32)


def _narrow_float16(values: Array) -> Array:
    return values.astype(np.float16)


# energy


def energy(values: Array, dtype: DType) -> float:
    """Sum of squares of ``values`` (any shape, storage type), in float64 where float32 overflows; NaN if there is a NaN."""
    with np.errstate(all="ignore"):
        if dtype.half:
            values = _widen_float16(values) if dtype.name == "float16" else widen_bfloat16(values)
        elif dtype.kind == "i":  # codes; their squares would wrap
            values = values.astype(np.float32)
        total = _blocked_energy(values)
        if math.isfinite(total) or values.dtype == np.float64:
            return total
        return _blocked_energy(values.astype(np.float64))


def _blocked_energy(values: Array) -> float:
    if values.ndim > 1:
        return float(np.einsum("...j,...j->...", values, values).sum(dtype=np.float64))
    whole = len(values) // _ENERGY_BLOCK * _ENERGY_BLOCK
    blocks, rest = values[:whole].reshape(-1, _ENERGY_BLOCK), values[whole:]
    partial = np.einsum("ij,ij->i", blocks, blocks).sum(dtype=np.float64)
    return float(partial) + float(np.einsum("i,i->", rest, rest))
