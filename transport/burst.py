"""Building bursts: headers and payloads gathered into one reused buffer, a burst at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.transport import wire
from dblp.transport.config import HEADER_BYTES, MAX_DATAGRAM_BYTES
from dblp.transport.port import Bytes

_POSITION_OFFSET = 5
_CHUNK_OFFSET = 40
_LENGTH_OFFSET = 46


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
    """One burst's memory and the views over it, by chunk size. Reused for every burst of an endpoint."""

    def __init__(self) -> None:
        self.data: Bytes = np.zeros(MAX_DATAGRAM_BYTES + HEADER_BYTES, np.uint8)
        self.pointer: int = self.data.ctypes.data
        self._views: dict[tuple[int, int], tuple[Any, ...]] = {}

    def _layout(self, chunk_bytes: int, width: int) -> tuple[Any, ...]:
        key = (chunk_bytes, width)
        views = self._views.get(key)
        if views is None:
            stride, rows = HEADER_BYTES + chunk_bytes, burst_chunks(chunk_bytes)
            dtype = np.dtype(f"<u{width}")
            buffer: Any = self.data
            views = self._views[key] = (
                stride,
                np.ndarray((rows, 6), np.uint64, buffer, 0, (stride, 8)),
                np.ndarray((rows,), np.uint8, buffer, _POSITION_OFFSET, (stride,)),
                np.ndarray((rows,), np.uint32, buffer, _CHUNK_OFFSET, (stride,)),
                np.ndarray((rows, chunk_bytes // width), dtype, buffer, HEADER_BYTES, (stride, width)),
            )
        return views

    def fill_run(
        self, row: npt.NDArray[np.uint64], source: ChunkSource, chunk_bytes: int, first: int, count: int
    ) -> int:
        """Write chunks first..first+count-1 (the last may be the short one); returns the bytes written."""
        stride, headers, positions, indices, payload = self._layout(chunk_bytes, source.rows.itemsize)
        headers[:count] = row
        positions[:count] = wire.POSITIONS[:count]
        indices[:count] = wire.wire_indices(first + count)[first : first + count]
        full = min(count, source.full - first)
        if full > 0:
            payload[:full] = source.rows[first : first + full]
        return int(count * stride) if full == count else self._put_tail(source.tail, (count - 1) * stride)

    def fill_scattered(
        self,
        row: npt.NDArray[np.uint64],
        source: ChunkSource,
        chunk_bytes: int,
        chunks: npt.NDArray[np.uint32],
    ) -> int:
        """Write these chunks (ascending); returns the bytes written."""
        stride, headers, positions, indices, payload = self._layout(chunk_bytes, source.rows.itemsize)
        count = len(chunks)
        headers[:count] = row
        positions[:count] = wire.POSITIONS[:count]
        indices[:count] = chunks.byteswap()
        full = count if int(chunks[-1]) < source.full else count - 1
        payload[:full] = source.rows[chunks[:full]]
        return int(count * stride) if full == count else self._put_tail(source.tail, (count - 1) * stride)

    def _put_tail(self, tail: Bytes, at: int) -> int:
        start = at + HEADER_BYTES
        self.data[start : start + len(tail)] = tail
        self.data[at + _LENGTH_OFFSET] = len(tail) >> 8
        self.data[at + _LENGTH_OFFSET + 1] = len(tail) & 0xFF
        return start + len(tail)

    def fill_control(self, row: npt.NDArray[np.uint64], payload: bytes) -> int:
        """Write one control datagram; returns its bytes."""
        stop = HEADER_BYTES + len(payload)
        self.data[:HEADER_BYTES] = row.view(np.uint8)
        self.data[HEADER_BYTES:stop] = np.frombuffer(payload, np.uint8)
        return stop
