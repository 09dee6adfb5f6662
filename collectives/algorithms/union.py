"""The union of all ranks' bitmaps, on every rank: recursive doubling, exact, log2(world_size) small messages a rank.

Where the number of ranks is no power of two, the first ranks are taken in pairs: the even one hands its bitmap to the odd
one, and gets the union back at the end (as in ``halving_doubling``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dblp.collectives.algorithms.grid import chunk_bytes, spec
from dblp.collectives.algorithms.sinks import CopySink
from dblp.collectives.round import Round
from dblp.transport.interface import Sending
from dblp.transport.policy import Exact
from dblp.transport.port import Bytes

_EXACT = Exact()


@dataclass(slots=True)
class _Hop:
    """One message of the exchange."""

    memory: Bytes
    sending: Sending | None = None
    arrived: bool = False


class Union:
    """One rank's part: posted with the round, started once the rank knows its own bitmap."""

    def __init__(self, round_: Round, nbytes: int, step: int, on_known: Callable[[Bytes], None]) -> None:
        """``nbytes``: length of the bitmaps; ``step``: first free step of the round; ``on_known`` gets the union."""
        self._round = round_
        self._nbytes = nbytes
        self._on_known = on_known
        self._bits: Bytes | None = None
        self._hops: list[_Hop] = []
        self._next = 0
        for peer, offset, sends, receives in schedule(round_.rank, round_.world_size):
            if sends:
                self._hops.append(self._send(peer, step + offset))
            if receives:
                self._hops.append(self._receive(peer, step + offset))

    def start(self, bits: Bytes) -> None:
        """This rank's own bitmap (uint8, ``nbytes`` long) is known."""
        self._bits = bits.copy()
        self._advance()

    def _send(self, peer: int, step: int) -> _Hop:
        memory = np.empty(self._nbytes, np.uint8)
        message = spec(self._nbytes, self._chunk)
        return _Hop(memory, self._round.send(peer, step, memory, message, offered=False))

    def _receive(self, peer: int, step: int) -> _Hop:
        hop = _Hop(np.empty(self._nbytes, np.uint8))

        def on_done(_: object) -> None:
            hop.arrived = True
            self._advance()

        sink = CopySink(hop.memory, self._chunk)
        self._round.receive(peer, step, spec(self._nbytes, self._chunk), sink, on_done=on_done)
        return hop

    @property
    def _chunk(self) -> int:
        return chunk_bytes(0, self._round.endpoint.max_chunk_bytes, _EXACT)

    def _advance(self) -> None:
        """Go on through the hops, up to one that has not arrived."""
        if self._bits is None:
            return
        while self._next < len(self._hops):
            hop = self._hops[self._next]
            if hop.sending is not None:
                np.copyto(hop.memory, self._bits)
                hop.sending.offer(0, -(-self._nbytes // self._chunk))
            elif hop.arrived:
                np.bitwise_or(self._bits, hop.memory, out=self._bits)
            else:
                return
            self._next += 1
        bits, self._bits = self._bits, None
        self._on_known(bits)


def schedule(rank: int, world_size: int) -> list[tuple[int, int, bool, bool]]:
    """A rank's hops, in order: (peer, step, it sends, it receives). Both sends and receives: first the send."""
    power = 1 << (world_size.bit_length() - 1)
    folded = world_size - power
    levels = power.bit_length() - 1
    if rank < 2 * folded and rank % 2 == 0:
        return [(rank + 1, 0, True, False), (rank + 1, levels + 1, False, True)]
    virtual = rank // 2 if rank < 2 * folded else rank - folded
    peers = [virtual ^ (1 << level) for level in range(levels)]
    hops = [(2 * v + 1 if v < folded else v + folded, 1 + level, True, True) for level, v in enumerate(peers)]
    if rank < 2 * folded:
        return [(rank - 1, 0, False, True), *hops, (rank - 1, levels + 1, True, False)]
    return hops
