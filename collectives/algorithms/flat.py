"""All-reduce in one hop, for small arrays: everyone sends all to everyone, and each rank reduces in rank order.

The bits are those of ``direct``. Sent is a copy: the caller's array is overwritten while some of it may be unacknowledged.
Memory: world_size arrays. Exact only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.algorithms.grid import chunk_bytes, spec
from dblp.collectives.algorithms.hops import Keep
from dblp.collectives.algorithms.sinks import CopySink
from dblp.collectives.reduction import Reducer
from dblp.collectives.round import Round
from dblp.transport.policy import Policy

_STEP = 0


def post(
    round_: Round, buffer: npt.NDArray[Any], reducer: Reducer, policy: Policy, *, keep: Keep | None = None
) -> None:
    """Post the all-reduce of the 1-D ``buffer``, in place; done when all receives of the round have ended.

    Arrays of no elements exchange empty messages, so that ranks that disagree find out. Nothing is lost: ``keep`` is not called.
    """
    chunk = chunk_bytes(buffer.nbytes, round_.endpoint.max_chunk_bytes, policy)
    message = spec(buffer.nbytes, chunk)
    parts = [buffer if rank == round_.rank else np.empty_like(buffer) for rank in range(round_.world_size)]
    left = round_.world_size - 1

    def on_done(_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0 and buffer.size:
            reducer.fold(parts, buffer, np.empty_like(buffer))

    for peer in round_.peers():
        round_.receive(peer, _STEP, message, CopySink(parts[peer], chunk), on_done=on_done)
    contribution = buffer.copy()
    for peer in round_.peers():
        round_.send(peer, _STEP, contribution, message)
