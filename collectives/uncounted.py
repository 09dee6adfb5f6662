"""What a bounded all-reduce did not count, handed back to its caller as it is: for callers that keep residuals of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.carry import NOTHING, Account
from dblp.collectives.reduction import DType, Op, widen_bfloat16
from dblp.errors import ConfigError
from dblp.transport.policy import Carry

Array = npt.NDArray[Any]


class Uncounted:
    """Stands in a call where a ``Residual`` may, and carries nothing into it: the array goes out as it is."""

    __slots__ = ("_bfloat16", "busy", "dtype", "size", "values")

    def __init__(self, size: int, dtype: npt.DTypeLike = np.float32) -> None:
        """``size``: elements of the array; ``dtype``: float32, which holds half types and small integers, or float64."""
        self.size = size
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.busy = False
        self.values: Array | None = None
        """What this rank holds and no result has, (size,), in the sum before division: own contributions and partial sums that
        were lost on their way, and results that some rank missed. None: nothing, or the round is not over."""
        self._bfloat16 = False

    def check(self, size: int, kind: DType, op: Op = Op.SUM) -> None:
        """Raise ConfigError unless a round of ``size`` elements may begin."""
        if self.busy or size != self.size or op not in (Op.SUM, Op.AVG):
            raise ConfigError(
                f"uncounted: made for one sum or average of {self.size} elements at a time, not for {op.name} of {size}"
            )
        self._bfloat16 = kind.name == "bfloat16"

    def begin(
        self, array: Array, kind: DType, rule: Carry | None, *, weigh: bool = False, contributes: bool = True
    ) -> None:
        """A round begins; arguments as of ``Residual.begin``, none of which matters here."""
        self.busy, self.values = True, None

    def keep(self, first: int, values: Array, *, divisor: int = 1, ranks: int = 1) -> None:
        """``Residual.keep``."""
        if self.values is None:
            self.values = np.zeros(self.size, self.dtype)
        wide = (widen_bfloat16(values) if self._bfloat16 else values).astype(self.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            if divisor != 1:
                wide *= self.dtype.type(divisor)
            self.values[first : first + values.size] += wide

    def settle(self, energy_sent: float = 0.0) -> tuple[Account, Account]:
        """The round has ended well. What became of ``values`` is the caller's to say."""
        self.busy = False
        return NOTHING, NOTHING

    def abandon(self) -> None:
        """The round has failed."""
        self.busy, self.values = False, None
