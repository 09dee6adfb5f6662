"""The decorator of compiled functions: numba. Imported late, with the packet engine: raises LocalError if numba is missing.

numba keeps the machine code of a function as long as its own file is unchanged, even if a function of another file that is
part of it has changed. So code that is older than any file of this folder is removed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from dblp.errors import LocalError

try:
    import numba
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic
except ImportError:
    raise LocalError("the packet engine needs numba: python -m pip install 'dblp[sim]'") from None

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile a function at its first call, and keep the machine code beside the source for the next process.

    Divisions by zero and indices are not checked, as in C.
    """
    return cast(F, numba.njit(cache=True, error_model="numpy")(function))


def _forget_stale(folder: Path) -> None:
    """Remove code that was kept before any source file of a folder was written."""
    newest = max(file.stat().st_mtime for file in folder.glob("*.py"))
    for kept in (folder / "__pycache__").glob("*.nb[ic]"):
        with contextlib.suppress(OSError):  # another process was quicker, or we may not
            if kept.stat().st_mtime < newest:
                kept.unlink()


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """An integer as the address that it is."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


_forget_stale(Path(__file__).parent)


@compiled
def view(address: int, dtype: Any) -> Any:
    """An array without end at an address."""
    return numba.carray(_pointer(address), (1 << 40,), dtype)  # type: ignore[attr-defined, call-arg]  # numba's own
