"""Building bursts: headers and payloads gathered into one reused buffer, a burst at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.transport import libc, wire
from dblp.transport.config import HEADER_BYTES, MAX_DATAGRAM_BYTES
from dblp.transport.port import Bytes

_POSITION_OFFSET = 5
_BURST_OFFSET = 28
_CHUNK_OFFSET = 40
_LENGTH_OFFSET = 46
TRAIN_BURSTS = 4
"""Bursts built together: 256 KB stay in a second-level cache, and Python's cost for each is a quarter."""
TRAIN_SPACING = 65_536
"""Bytes from one burst of a train to the next in memory."""


def burst_chunks(chunk_bytes: int) -> int:
    """Most full chunks in a burst: 64 datagrams or 65,507 bytes (the kernel's limits for one send)."""
    return max(1, min(wire.BURST_DATAGRAMS, MAX_DATAGRAM_BYTES // (HEADER_BYTES + chunk_bytes)))


class ChunkSource:
    """The chunks of a message's memory as rows that can be copied into bursts.

    Rows are viewed in the widest unsigned type that memory and chunk size are aligned to: copying 44 strided rows of
    64-bit words takes 2 us, of bytes 12 us.
    """

    __slots__ = ("chunks", "data", "full", "rows", "tail")

    def __init__(self, data: Bytes, chunk_bytes: int) -> None:
        self.data = data
        self.full = len(data) // chunk_bytes
        self.chunks = -(-len(data) // chunk_bytes)
        self.tail = data[self.full * chunk_bytes :]
        width = 8
        while data.ctypes.data % width:
            width //= 2
        words = data[: self.full * chunk_bytes].view(f"<u{width}")
        self.rows: npt.NDArray[Any] = words.reshape(self.full, chunk_bytes // width)


class BurstBuffer:
    """Memory of up to ``TRAIN_BURSTS`` bursts and the views over it, by chunk size. Reused for every train.

    A train is consecutive full bursts of one message: they are built by the same few vectorised operations as one burst
    and leave by one system call each, so that Python's cost is shared by four bursts, 256 KB. Each burst starts at a page:
    kernels that copy by ``rep movsb`` take several times as long from unaligned memory.
    """

    def __init__(self) -> None:
        self.data: Bytes = libc.aligned(TRAIN_BURSTS * TRAIN_SPACING)
        self.control: Bytes = libc.aligned(libc.PAGE_BYTES)
        self.pointer: int = libc.address_of(self.data)
        self.control_pointer: int = libc.address_of(self.control)
        self._views: dict[tuple[int, int], tuple[Any, ...]] = {}

    def _layout(self, chunk_bytes: int, width: int) -> tuple[Any, ...]:
        key = (chunk_bytes, width)
        views = self._views.get(key)
        if views is None:
            stride, rows = HEADER_BYTES + chunk_bytes, burst_chunks(chunk_bytes)
            views = self._views[key] = (stride, rows, *(
                np.ndarray(
                    (TRAIN_BURSTS, rows, *shape), dtype, self.data, offset,
                    (TRAIN_SPACING, stride, *[np.dtype(dtype).itemsize] * len(shape)),
                )
                for shape, dtype, offset in (
                    ((6,), np.uint64, 0),
                    ((), np.uint8, _POSITION_OFFSET),
                    ((), np.uint32, _BURST_OFFSET),
                    ((), np.uint32, _CHUNK_OFFSET),
                    ((chunk_bytes // width,), np.dtype(f"<u{width}"), HEADER_BYTES),
                )
            ))  # fmt: skip
        return views

    def fill_train(
        self,
        row: npt.NDArray[np.uint64],
        source: ChunkSource,
        chunk_bytes: int,
        first: int,
        bursts: int,
        seq: int,
    ) -> int:
        """Write ``bursts`` full bursts of whole chunks from ``first`` on, numbered from ``seq``; returns the bytes of each."""
        stride, rows, headers, positions, numbers, indices, payload = self._layout(
            chunk_bytes, source.rows.itemsize
        )
        stop = first + bursts * rows
        headers[:bursts] = row
        positions[:bursts] = wire.POSITIONS[:rows]
        numbers[:bursts] = np.arange(seq, seq + bursts).astype(np.uint32).byteswap()[:, None]
        indices[:bursts] = wire.wire_indices(stop)[first:stop].reshape(bursts, rows)
        payload[:bursts] = source.rows[first:stop].reshape(bursts, rows, -1)
        return int(rows * stride)

    def fill_run(
        self, row: npt.NDArray[np.uint64], source: ChunkSource, chunk_bytes: int, first: int, count: int
    ) -> int:
        """Write chunks first..first+count-1 (the last may be the short one); returns the bytes written."""
        stride, _, headers, positions, _, indices, payload = self._layout(chunk_bytes, source.rows.itemsize)
        headers[0, :count] = row
        positions[0, :count] = wire.POSITIONS[:count]
        indices[0, :count] = wire.wire_indices(first + count)[first : first + count]
        full = min(count, source.full - first)
        if full > 0:
            payload[0, :full] = source.rows[first : first + full]
        return int(count * stride) if full == count else self._put_tail(source.tail, (count - 1) * stride)

    def fill_scattered(
        self,
        row: npt.NDArray[np.uint64],
        source: ChunkSource,
        chunk_bytes: int,
        chunks: npt.NDArray[np.uint32],
    ) -> int:
        """Write these chunks (ascending); returns the bytes written."""
        stride, _, headers, positions, _, indices, payload = self._layout(chunk_bytes, source.rows.itemsize)
        count = len(chunks)
        headers[0, :count] = row
        positions[0, :count] = wire.POSITIONS[:count]
        indices[0, :count] = chunks.byteswap()
        full = count if int(chunks[-1]) < source.full else count - 1
        payload[0, :full] = source.rows[chunks[:full]]
        return int(count * stride) if full == count else self._put_tail(source.tail, (count - 1) * stride)

    def _put_tail(self, tail: Bytes, at: int) -> int:
        start = at + HEADER_BYTES
        self.data[start : start + len(tail)] = tail
        self.data[at + _LENGTH_OFFSET] = len(tail) >> 8
        self.data[at + _LENGTH_OFFSET + 1] = len(tail) & 0xFF
        return start + len(tail)

    def fill_control(self, head: bytes | bytearray, payload: bytes) -> int:
        """Write one control datagram into ``control``; returns its bytes."""
        stop = HEADER_BYTES + len(payload)
        self.control.data[:stop] = bytes(head) + payload
        return stop
