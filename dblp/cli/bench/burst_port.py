"""A port that loses datagrams while somebody says so: a burst of loss as a property of a round, not of the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from dblp.transport.impair import ImpairedPort, Impairer
from dblp.transport.impair_spec import ImpairSpec, Loss
from dblp.transport.port import Burst, Port
from dblp.transport.wire import Type

_TYPE_BYTE = 1
"""Where a datagram's header has its type (docs/wire.md)."""


class BurstPort(ImpairedPort):
    """Loses a share of what is sent between ``begin`` and ``end``, each datagram by itself."""

    def __init__(
        self,
        port: Port,
        loop: asyncio.AbstractEventLoop,
        *,
        seed: int | Sequence[int],
        control_too: bool = False,
    ) -> None:
        """``control_too``: control datagrams are lost like the others; in DBLP's experiment they go over TCP and are not."""
        self._calm = Impairer(ImpairSpec(()))
        self._burst: Impairer | None = None
        self._control_too = control_too
        self._rng = np.random.default_rng(seed)
        super().__init__(port, self._calm, loop)

    def begin(self, loss: float) -> None:
        """From now on ``loss`` of the datagrams are lost."""
        self._burst = Impairer(ImpairSpec((Loss(loss),)), self._rng)

    def end(self) -> None:
        """Nothing is lost any more."""
        self._burst = None

    def send(self, burst: Burst) -> bool:
        """See ``Port.send``."""
        hit = self._burst is not None and (self._control_too or burst.data[_TYPE_BYTE] == Type.DATA)
        self.impairer = self._burst if hit and self._burst is not None else self._calm
        return super().send(burst)
