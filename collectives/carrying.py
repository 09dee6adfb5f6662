"""What an all-reduce does with the residual that its caller gave it."""

from __future__ import annotations

from dblp.collectives.algorithms import contributes, weighs
from dblp.collectives.buffers import Array
from dblp.collectives.call import Call
from dblp.collectives.carry import Account, Residual
from dblp.collectives.reduction import Op, energy
from dblp.collectives.uncounted import Uncounted

_NEGATIVE_ZERO = {"bfloat16": 0x8000}
"""What adds nothing to any number, not even to -0.0, where the storage type is not a float."""


class Carrying:
    """The carry of one round on one rank."""

    def __init__(
        self, residual: Residual | Uncounted, flat: Array, call: Call, rank: int, world_size: int
    ) -> None:
        """``flat``: the gradient, 1-D, reduced in place. Raises ConfigError if the residual does not fit the call."""
        assert call.dtype is not None and call.op is not None
        residual.check(flat.size, call.dtype, call.op)
        self._residual = residual
        self._flat = flat
        self._call = call
        self._kind = call.dtype
        self._contributes = contributes(call.algorithm, rank)
        self._ranks = 1 if call.op is Op.AVG else world_size

    @property
    def keeps(self) -> bool:
        """What is lost is kept; if not, only what was carried into the round is delivered."""
        return self._call.policy.carry is not None

    def begin(self) -> None:
        """Before the first message: the gradient becomes what is to be sent."""
        if not self._contributes:
            self._flat[...] = _NEGATIVE_ZERO.get(self._kind.name, -0.0)  # what is carried stands alone there
        self._residual.begin(
            self._flat,
            self._kind,
            self._call.policy.carry,
            weigh=not weighs(self._call.algorithm),
            contributes=self._contributes,
        )

    def settle(self, energy_sent: float) -> tuple[Account, Account]:
        """After the last: (carried, discarded). ``energy_sent``: of the contributions that the round has weighed."""
        if not self._contributes:
            energy_sent = energy(self._flat, self._kind) / self._ranks**2
        return self._residual.settle(energy_sent)

    def end(self) -> None:
        """The round is over, well or badly; idempotent."""
        if self._residual.busy:
            self._residual.abandon()
