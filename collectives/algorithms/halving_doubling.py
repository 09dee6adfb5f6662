"""All-reduce by recursive halving and doubling: log2(N) steps that reduce, log2(N) that gather.

In step k of the reduction, ranks that differ in bit k of their number exchange halves of the range that they still have in
common, and each adds what comes to the half that it keeps: the longest messages go to the next rank, which is likely the
nearest. After it each rank owns an Nth; the gather leg takes the steps back, with ranges that double (Rabenseifner, 2004,
"Optimization of collective reduction operations"; Thakur, Rabenseifner and Gropp, 2005, "Optimization of collective
communication operations in MPICH", section 4.5). Each step is pipelined by runs of chunks, see ``flow``.

Where N is no power of two, N - 2**floor(log2(N)) pairs of ranks are folded first: the even one hands all of its array to the
odd one, which takes part for both, and gets the result back.

The order of the sum is a tree over the ranks in their order, ((r0 + r1) + (r2 + r3)) + ..., the same for every element, so
exact and bounded rounds have the same bits on any grid. Half types are rounded at each step.

Under a bound, a contribution crosses at most ceil(log2(N)) hops, so each may miss budget / ceil(log2(N)); a hop of step k that
is lost takes the partial sum of 2**k ranks with it. Of each result N - 1 copies are made: under ``AGREED`` each hop of
the gather leg may miss the gather budget / (N - 1), which bounds the union.

Differences from the papers: the fold is not spread over the pair (Rabenseifner's variant with halves); steps overlap.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from dblp.collectives.algorithms.flow import Flow
from dblp.collectives.algorithms.hops import Keep, Span
from dblp.collectives.algorithms.union import schedule
from dblp.collectives.reduction import Reducer
from dblp.collectives.round import Round
from dblp.transport.policy import Policy


def post(
    round_: Round, buffer: npt.NDArray[Any], reducer: Reducer, policy: Policy, *, keep: Keep | None = None
) -> None:
    """Post the all-reduce of the 1-D ``buffer``, in place; done when all receives of the round have ended. ``keep`` is told
    what no result has (see ``Keep``)."""
    size = round_.world_size
    hops = (size - 1).bit_length()
    flow = Flow(round_, buffer, reducer, policy, shards=size, reduce_hops=hops, gather_hops=hops, keep=keep)
    declare(flow, round_.rank, size)
    flow.post()


def declare(flow: Flow, rank: int, size: int) -> None:
    """This rank's hops."""
    levels = [(peer, step) for peer, step, sends, receives in schedule(rank, size) if sends and receives]
    depth = size.bit_length() - 1
    folded = size - (1 << depth)
    back = 2 * depth + 1
    if not levels:
        flow.send(rank + 1, 0, flow.all, weigh=True)
        flow.copy(rank + 1, back, flow.all)
        return
    if rank < 2 * folded:
        flow.add(rank - 1, 0, flow.all, weigh=True)
    span, sent = flow.all, []
    for peer, step in levels:
        low, high = span.cut(2)
        span, other = (high, low) if peer < rank else (low, high)
        weigh = step == 1
        flow.send(peer, step, other, ranks=1 << (step - 1), weigh=weigh and rank >= 2 * folded)
        flow.add(peer, step, span, final=step == depth, weigh=weigh and peer >= 2 * folded)
        sent.append(other)
    for (peer, step), other in zip(reversed(levels), reversed(sent), strict=True):
        flow.send(peer, back - step, span, gather=True)
        flow.copy(peer, back - step, other)
        span = Span(min(span.low, other.low), max(span.high, other.high))
    if rank < 2 * folded:
        flow.send(rank - 1, back, flow.all, gather=True)
