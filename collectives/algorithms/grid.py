"""The grid of a round: the chunk size of its messages, the shards of its array, the segments of its pipeline.

Shards are cut at chunk borders, so that a chunk of the reduce leg and the chunk of the gather leg that carries its result
cover the same bytes: that is what makes in-place rounds safe (see ``direct``).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.transport.config import CHUNK_ALIGN_BYTES, HEADER_BYTES, MAX_DATAGRAM_BYTES
from dblp.transport.message import MessageSpec
from dblp.transport.policy import Policy

_BURST_CHUNKS = 64
"""Most datagrams in one system call (UDP_MAX_SEGMENTS of Linux)."""
_BOUNDED_CHUNKS = 64
"""A bounded message is cut into about this many chunks at least: a budget of 10 % of 7 chunks would be none."""
_BOUNDED_MIN_BYTES = 256
"""Least chunk of a bounded message: below, headers outweigh the payload."""


def chunk_bytes(nbytes: int, max_chunk_bytes: int, policy: Policy) -> int:
    """Chunk size of a message of ``nbytes``: the group's largest, or finer for a small message that may lose chunks."""
    largest = max_chunk_bytes // CHUNK_ALIGN_BYTES * CHUNK_ALIGN_BYTES
    if not policy.lossy:
        return largest
    wanted = nbytes // _BOUNDED_CHUNKS // CHUNK_ALIGN_BYTES * CHUNK_ALIGN_BYTES
    return min(max(wanted, _BOUNDED_MIN_BYTES), largest)


def segment_chunks(chunk: int) -> int:
    """Chunks of one pipeline segment: what fits one burst."""
    return max(1, min(_BURST_CHUNKS, MAX_DATAGRAM_BYTES // (chunk + HEADER_BYTES)))


def cut(array: npt.NDArray[Any], parts: int, chunk: int) -> list[npt.NDArray[Any]]:
    """Views of the 1-D ``array``, cut at chunk borders into ``parts`` shards whose sizes differ by at most one chunk.

    The last shards are empty where there are fewer chunks than parts.
    """
    elements = chunk // array.itemsize
    chunks = -(-array.size // elements)
    each, more = divmod(chunks, parts)
    borders = [min(array.size, (index * each + min(index, more)) * elements) for index in range(parts + 1)]
    return [array[low:high] for low, high in itertools.pairwise(borders)]


def spec(nbytes: int, chunk: int, policy: Policy | None = None) -> MessageSpec:
    """The spec of a message: exact without a policy."""
    if policy is None or not policy.lossy:
        return MessageSpec(nbytes=nbytes, chunk_bytes=chunk)
    return MessageSpec(
        nbytes=nbytes,
        chunk_bytes=chunk,
        budget=policy.budget,
        stop=policy.stop,
        stop_after_s=policy.stop_after_s,
    )


def runs(indices: npt.NDArray[np.uint32]) -> list[tuple[int, int]]:
    """Ascending indices as (first, count) runs."""
    if not len(indices):
        return []
    if int(indices[-1]) - int(indices[0]) == len(indices) - 1:
        return [(int(indices[0]), len(indices))]
    starts = np.concatenate(([0], np.flatnonzero(np.diff(indices.astype(np.int64)) != 1) + 1))
    counts = np.diff(np.append(starts, len(indices)))
    return list(zip(indices[starts].tolist(), counts.tolist(), strict=True))
