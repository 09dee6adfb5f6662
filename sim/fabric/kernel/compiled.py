"""The decorator of compiled functions: numba. Raises LocalError on import if that is missing; the packet engine imports it
late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from dblp.errors import LocalError

try:
    import numba
    from numba import extending, types
    from numba.core import cgutils
except ImportError:
    raise LocalError("the packet engine needs numba: python -m pip install 'dblp[sim]'") from None

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile a function at its first call, and keep the machine code beside the source for the next process.

    Divisions by zero and indices are not checked, as in C.
    """
    return cast(F, numba.njit(cache=True, error_model="numpy")(function))


@extending.intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """An integer as the address that it is."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@compiled
def view(address: int, dtype: Any) -> Any:
    """An array without end at an address."""
    return numba.carray(_pointer(address), (1 << 40,), dtype)
