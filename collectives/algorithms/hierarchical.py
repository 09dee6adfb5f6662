"""All-reduce on a grid of ranks: reduce-scatter in the rows, all-reduce of the shards in the columns, all-gather in the rows.

Rank r stands in row r // columns and column r % columns, so ranks that follow each other, as those of one host do, share a
row. Each leg is a direct exchange between the ranks of a row or column: (columns - 1) + (rows - 1) messages a leg instead
of the N - 1 of ``direct``, the same bytes in the rows, and only a ``columns``-th of the array crosses between rows (OptiReduce's
two-dimensional transpose all-reduce, NSDI'25, has this shape). Pipelined by runs of chunks, see ``flow``.

Sums start with the owner's own contribution and go on by ascending ranks, first in the row, then in the column.

Under a bound, a contribution crosses two hops, so each may miss half of the budget; a hop between rows that is lost takes the
partial sum of a row with it. Of each result N - 1 copies are made, see ``halving_doubling``.

Difference from OptiReduce: its groups take turns in rounds, to bound incast; here all of a leg's messages overlap, and the
transport's congestion control bounds what is in flight.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from dblp.collectives.algorithms.flow import Flow
from dblp.collectives.algorithms.hops import Keep
from dblp.collectives.reduction import Reducer
from dblp.collectives.round import Round
from dblp.errors import ConfigError
from dblp.transport.policy import Policy

_ROW, _COLUMN, _COLUMN_BACK, _ROW_BACK = range(4)


def most_square(size: int) -> int:
    """Columns of the grid if none are given: the largest divisor of ``size`` up to its root."""
    return max(columns for columns in range(1, int(size**0.5) + 1) if size % columns == 0)


def check_columns(columns: int, size: int) -> None:
    """Raise ConfigError unless ``size`` ranks fill rows of ``columns``."""
    if columns < 1 or size % columns:
        divisors = ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
        raise ConfigError(f"columns={columns}: {size} ranks fill a grid of {divisors} columns")


def post(
    round_: Round,
    buffer: npt.NDArray[Any],
    reducer: Reducer,
    policy: Policy,
    *,
    keep: Keep | None = None,
    columns: int = 0,
) -> None:
    """Post the all-reduce of the 1-D ``buffer``, in place; done when all receives of the round have ended. ``keep`` is told
    what no result has (see ``Keep``); ``columns``: ranks a row; 0: ``most_square``."""
    size = round_.world_size
    flow = Flow(round_, buffer, reducer, policy, shards=size, reduce_hops=2, gather_hops=2, keep=keep)
    declare(flow, round_.rank, size, columns or most_square(size))
    flow.post()


def declare(flow: Flow, rank: int, size: int, columns: int) -> None:
    """This rank's hops."""
    rows = size // columns
    row, column = divmod(rank, columns)
    in_row = {peer % columns: peer for peer in range(row * columns, (row + 1) * columns) if peer != rank}
    in_column = {peer // columns: peer for peer in range(column, size, columns) if peer != rank}
    shards = flow.all.cut(columns)
    parts = shards[column].cut(rows)
    for number, peer in _turns(in_row, column):
        flow.send(peer, _ROW, shards[number], weigh=True)
    for place, peer in enumerate(in_row.values(), start=1):
        flow.add(peer, _ROW, shards[column], final=not in_column and place == len(in_row), weigh=True)
    for number, peer in _turns(in_column, row):
        flow.send(peer, _COLUMN, parts[number], ranks=columns, weigh=columns == 1)
    for place, peer in enumerate(in_column.values(), start=1):
        flow.add(peer, _COLUMN, parts[row], final=place == len(in_column), weigh=columns == 1)
    for _, peer in _turns(in_column, row):
        flow.send(peer, _COLUMN_BACK, parts[row], gather=True)
    for number, peer in in_column.items():
        flow.copy(peer, _COLUMN_BACK, parts[number])
    for _, peer in _turns(in_row, column):
        flow.send(peer, _ROW_BACK, shards[column], gather=True)
    for number, peer in in_row.items():
        flow.copy(peer, _ROW_BACK, shards[number])


def _turns(peers: dict[int, int], own: int) -> list[tuple[int, int]]:
    """The peers of a row or column, starting behind this rank, so that not all turn to the same one first."""
    return sorted(peers.items(), key=lambda item: (item[0] < own, item[0]))
