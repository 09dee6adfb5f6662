"""What numba does for the packet engine. Imported late, with it: raises LocalError if numba is missing.

numba keeps the machine code of a function as long as its own file is unchanged, even if a function of another file that is part
of it has changed. So code that is older than any file of this folder is removed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from dblp.errors import LocalError
from dblp.installed import pip_line
from dblp.sim.fabric.kernel.state import EVENT

try:
    import numba
    from llvmlite import ir
    from numba import types
    from numba.core import typing
    from numba.extending import intrinsic, lower_builtin, models, register_model
except ImportError:
    raise LocalError(f"the packet engine needs numba: {pip_line('sim')}") from None

njit: Any = numba.njit  # its types lack what is not for everybody
templates: Any = typing.templates
signature_of: Any = vars(typing)["signature"]
lower: Any = lower_builtin
_log = logging.getLogger("dblp")
F = TypeVar("F", bound=Callable[..., object])


class Rows(types.Type):
    """An array without a length: a pointer to its first row. numba's own arrays are seven words, which each call that is not
    inlined hands on, and look at each index whether it counts from the end."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = numba.from_dtype(dtype)
        self.step = dtype.itemsize
        super().__init__(name=f"Rows({self.dtype})")


@register_model(Rows)
class _RowsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Rows) -> None:
        super().__init__(manager, kind, ir.IntType(8).as_pointer())  # type: ignore[no-untyped-call]


@templates.infer_global(operator.getitem)
class _GetRow(templates.AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Any, _: Any) -> Any:
        rows, index = args
        if isinstance(rows, Rows) and isinstance(index, types.Integer):
            return signature_of(rows.dtype, rows, types.int64)
        return None


@templates.infer_global(operator.setitem)
class _SetRow(templates.AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Any, _: Any) -> Any:
        rows, index, _value = args
        if isinstance(rows, Rows) and isinstance(index, types.Integer):
            return signature_of(types.none, rows, types.int64, rows.dtype)
        return None


def _row(context: Any, builder: Any, rows: Rows, pointer: Any, index: Any) -> Any:
    """The address of a row."""
    offset = builder.mul(index, context.get_constant(types.int64, rows.step))
    return builder.gep(pointer, [offset], inbounds=True)


def _get_row(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    rows = signature.args[0]
    place = _row(context, builder, rows, *arguments)
    if isinstance(rows.dtype, types.Record):  # as a value it is its address
        return builder.bitcast(place, context.get_value_type(rows.dtype))
    return context.unpack_value(
        builder, rows.dtype, builder.bitcast(place, context.get_data_type(rows.dtype).as_pointer())
    )


def _set_row(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    rows = signature.args[0]
    *where, value = arguments
    place = builder.bitcast(
        _row(context, builder, rows, *where), context.get_data_type(rows.dtype).as_pointer()
    )
    context.pack_value(builder, rows.dtype, value, place)
    return context.get_dummy_value()


lower(operator.getitem, Rows, types.Integer)(_get_row)
lower(operator.setitem, Rows, types.Integer, types.Any)(_set_row)

_TYPES: dict[str, Any] = {
    "World": types.int64,
    "Array": Rows(EVENT),  # a heap
    "int": types.int64,
    "float": types.float64,
    "bool": types.boolean,
    "np.uint64": types.uint64,
    "None": types.void,
}
"""What annotations, as text, mean here."""


def compiled(function: F) -> F:
    """Compile a function for the types that its annotations say; the machine code is kept beside the source.

    One signature: or numba would compile each function anew for each mixture of 32 and 64 bits. Divisions by zero and indices
    are not checked, as in C, and nothing is allocated or reference-counted.
    """
    return _compile(function)


def inlined(function: F) -> F:
    """As ``compiled``, and made part of each function that calls it: for what is small, or has one caller. LLVM would leave most
    as calls."""
    return _compile(function, forceinline=True)


def _compile(function: F, **options: bool) -> F:
    hints = dict(function.__annotations__)
    result = _TYPES[hints.pop("return")]
    signature = result(*(_TYPES[hint] for hint in hints.values()))
    made = njit(signature, cache=True, error_model="numpy", _nrt=False, **options)(function)
    if made.stats.cache_misses:
        _say_once(made.stats.cache_path)
    return cast(F, made)


@functools.cache
def _say_once(place: str) -> None:
    """At the first function of many: what follows takes long, and nothing moves meanwhile."""
    _log.warning(
        "numba compiles the packet engine, which takes about a minute; the next run finds it in %s", place
    )


def rows(index: int, dtype: np.dtype[Any]) -> Callable[[Any], Any]:
    """A function from a World to its array ``index``."""
    return _view(index, Rows(dtype))


def single(index: int, dtype: np.dtype[Any]) -> Callable[[Any], Any]:
    """A function from a World to the one row of its array ``index``."""
    return _view(index, numba.from_dtype(dtype))


def _view(index: int, kind: Any) -> Callable[[Any], Any]:
    @intrinsic
    def view(context: Any, world: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word = ir.IntType(64)
            table = builder.inttoptr(arguments[0], word.as_pointer())
            address = builder.load(builder.gep(table, [ir.Constant(word, index)]))
            # No address changes while compiled code runs, so that it is loaded once a function, not after each store.
            address.set_metadata("invariant.load", builder.module.add_metadata([]))
            return builder.inttoptr(address, context.get_value_type(kind))

        return kind(world), generate

    return cast(Callable[[Any], Any], view)


def _forget_stale(folder: Path) -> None:
    """Remove code that was kept before any source file of a folder was written."""
    newest = max(file.stat().st_mtime for file in folder.glob("*.py"))
    for kept in (folder / "__pycache__").glob("*.nb[ic]"):
        with contextlib.suppress(OSError):  # another process was quicker, or we may not
            if kept.stat().st_mtime < newest:
                kept.unlink()


_forget_stale(Path(__file__).parent)
