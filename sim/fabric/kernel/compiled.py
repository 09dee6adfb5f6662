"""What numba does for the packet engine. Imported late, with it: raises LocalError if numba is missing.

numba keeps the machine code of a function as long as its own file is unchanged, even if a function of another file that is part
of it has changed. So code that is older than any file of this folder is removed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from dblp.errors import LocalError
from dblp.sim.fabric.kernel.state import EVENT

try:
    import numba
    from numba import types
    from numba.extending import intrinsic
    from numba.np import arrayobj
except ImportError:
    raise LocalError("the packet engine needs numba: python -m pip install 'dblp[sim]'") from None

njit: Any = numba.njit  # its types lack what is not for everybody
arrays: Any = arrayobj
F = TypeVar("F", bound=Callable[..., object])
_TYPES: dict[str, Any] = {
    "World": types.Array(types.int64, 1, "C"),
    "Array": types.Array(numba.from_dtype(EVENT), 1, "C"),  # a heap
    "int": types.int64,
    "float": types.float64,
    "bool": types.boolean,
    "np.uint64": types.uint64,
    "None": types.void,
}
"""What annotations, as text, mean here."""
ENDLESS = 1 << 40
"""Length that views claim; nothing checks it."""


def compiled(function: F) -> F:
    """Compile a function for the types that its annotations say; the machine code is kept beside the source.

    One signature: or numba would compile each function anew for each mixture of 32 and 64 bits. Divisions by zero and indices
    are not checked, as in C, and nothing is allocated or reference-counted.
    """
    hints = dict(function.__annotations__)
    result = _TYPES[hints.pop("return")]
    signature = result(*(_TYPES[hint] for hint in hints.values()))
    return cast(F, njit(signature, cache=True, error_model="numpy", _nrt=False)(function))


def rows(index: int, dtype: np.dtype[Any]) -> Callable[[Any], Any]:
    """A function from a World to a view of its array ``index``."""
    array = types.Array(numba.from_dtype(dtype), 1, "C")

    @intrinsic
    def view(context: Any, world: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            made = arrays.make_array(array)(context, builder)
            pointer = _address(context, builder, signature, arguments, index, made.data.type)
            length, step = (context.get_constant(types.intp, n) for n in (ENDLESS, dtype.itemsize))
            arrays.populate_array(
                made, data=pointer, shape=[length], strides=[step], itemsize=step, meminfo=None
            )
            return made._getvalue()

        return array(world), generate

    return cast(Callable[[Any], Any], view)


def single(index: int, dtype: np.dtype[Any]) -> Callable[[Any], Any]:
    """A function from a World to the one row of its array ``index``."""
    record = numba.from_dtype(dtype)

    @intrinsic
    def view(context: Any, world: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return _address(context, builder, signature, arguments, index, context.get_value_type(record))

        return record(world), generate

    return cast(Callable[[Any], Any], view)


def _address(context: Any, builder: Any, signature: Any, arguments: Any, index: int, kind: Any) -> Any:
    """Code that loads the address of an array from a World, as a pointer of a kind."""
    world = arrays.make_array(signature.args[0])(context, builder, arguments[0])
    place = builder.gep(world.data, [context.get_constant(types.intp, index)])
    return builder.inttoptr(builder.load(place), kind)


def _forget_stale(folder: Path) -> None:
    """Remove code that was kept before any source file of a folder was written."""
    newest = max(file.stat().st_mtime for file in folder.glob("*.py"))
    for kept in (folder / "__pycache__").glob("*.nb[ic]"):
        with contextlib.suppress(OSError):  # another process was quicker, or we may not
            if kept.stat().st_mtime < newest:
                kept.unlink()


_forget_stale(Path(__file__).parent)
