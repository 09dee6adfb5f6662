"""The bounded all-gather: each rank sends its payload to all others, each of which may miss some of its blocks.

What one rank misses, none may count, or the replicas would part: when all payloads have ended, each rank tells which chunks it
misses of which payload, and all learn the union (``union``). So every rank counts the same blocks of every payload, and each
sender knows which of its own were not counted. Where no message may miss a chunk there is nothing to tell, and no union.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.algorithms.sinks import CopySink
from dblp.collectives.algorithms.union import Union
from dblp.collectives.blocks import Blocks
from dblp.collectives.round import Round
from dblp.transport.message import MessageSpec, Received
from dblp.transport.policy import Policy, Short
from dblp.transport.port import Bytes

_STEP = 0
_UNION_STEP = 1


def post_gather(
    round_: Round, payload: Bytes, outputs: Mapping[int, Bytes], layouts: Sequence[Blocks], policy: Policy
) -> None:
    """Post the all-gather of ``payload`` under ``policy``; ``outputs``: where each peer's payload goes, of which what is missing
    is left as it was; ``layouts``: of all ranks' payloads, by rank. ``round_.uncounted`` tells what no rank counts."""
    _Gather(round_, outputs, layouts, policy).post(payload)


class _Gather:
    """One rank's part."""

    def __init__(
        self, round_: Round, outputs: Mapping[int, Bytes], layouts: Sequence[Blocks], policy: Policy
    ) -> None:
        self._round = round_
        self._outputs = outputs
        self._layouts = layouts
        receivers = round_.world_size - 1
        self._specs = [layout.spec(policy, receivers) for layout in layouts]
        self._starts: npt.NDArray[np.int64] = np.cumsum([0, *(layout.chunks for layout in layouts)])
        self._holes = np.zeros(int(self._starts[-1]), np.bool_)
        self._short = False  # a message was given up below its bound
        self._left = receivers
        bounded = any(spec.budget for spec in self._specs)
        loses = any(spec.may_miss for spec in self._specs) or (bounded and policy.short is Short.SKIP)
        nbytes = 1 + -(-len(self._holes) // 8)
        self._union = Union(round_, nbytes, _UNION_STEP, self._known) if loses else None

    def post(self, payload: Bytes) -> None:
        """Post all messages."""
        round_, own = self._round, self._round.rank
        for peer in round_.peers():
            spec = self._specs[peer]
            sink = CopySink(self._outputs[peer], spec.chunk_bytes)
            round_.receive(peer, _STEP, spec, sink, on_done=self._ended(peer, spec))
        spec, layout = self._specs[own], self._layouts[own]
        for peer in round_.peers():
            if spec.budget:
                # A block weighs as much as any other here: who makes them knows better, and says so in its own report.
                classes, weight = layout.classes(), float(layout.chunks)
                round_.send(peer, _STEP, payload, spec, energy=weight, classes=classes)
            else:
                round_.send(peer, _STEP, payload, spec)

    def _ended(self, peer: int, spec: MessageSpec) -> Any:
        def on_done(received: Received) -> None:
            self._short |= len(received.missing) > spec.may_miss
            self._holes[int(self._starts[peer]) + received.missing.astype(np.int64)] = True
            if spec.budget:
                self._round.lost(peer, spec, received, float(spec.chunks - len(received.missing)))
            self._left -= 1
            if not self._left and self._union is not None:
                self._union.start(np.append(np.uint8(self._short), np.packbits(self._holes)))

        return on_done

    def _known(self, bits: Bytes) -> None:
        """The union of all ranks' holes is known, and whether a message was given up on any."""
        holes = np.unpackbits(bits[1:], count=len(self._holes)).view(np.bool_)
        if bits[0]:
            self._round.skipped = True
            holes = np.ones_like(holes)
        else:
            self._round.filled_chunks += int(holes.sum())
        for rank, (low, high) in enumerate(zip(self._starts[:-1], self._starts[1:], strict=True)):
            missing = np.flatnonzero(holes[low:high])
            if len(missing):
                self._round.uncounted[rank] = missing
