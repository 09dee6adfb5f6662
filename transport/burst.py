"""Building bursts and trains of bursts: headers and payloads, with a fixed number of vectorised operations each."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.transport import libc, wire
from dblp.transport.config import HEADER_BYTES, MAX_DATAGRAM_BYTES
from dblp.transport.port import Address, Burst, Bytes

_POSITION_OFFSET = 5
_BURST_OFFSET = 28
_CHUNK_OFFSET = 40
_LENGTH_OFFSET = 46
TRAIN_BURSTS = 32
"""Most bursts of a train: Python's cost for each is a thirty-second, and two megabytes leave in one system call."""


def burst_chunks(chunk_bytes: int) -> int:
    """Most full chunks in a burst: 64 datagrams or 65,507 bytes (the kernel's limits for one send)."""
    return max(1, min(wire.BURST_DATAGRAMS, MAX_DATAGRAM_BYTES // (HEADER_BYTES + chunk_bytes)))


class ChunkSource:
    """The chunks of a message's memory as rows that can be copied into bursts.

    Rows are viewed in the widest unsigned type that memory and chunk size are aligned to: copying 44 strided rows of
    64-bit words takes 2 us, of bytes 12 us.
    """

    __slots__ = ("chunks", "data", "full", "pointer", "rows", "tail")

    def __init__(self, data: Bytes, chunk_bytes: int) -> None:
        self.data = data
        self.full = len(data) // chunk_bytes
        self.chunks = -(-len(data) // chunk_bytes)
        self.tail = data[self.full * chunk_bytes :]
        self.pointer: int = data.ctypes.data
        width = 8
        while self.pointer % width:
            width //= 2
        words = data[: self.full * chunk_bytes].view(f"<u{width}")
        self.rows: npt.NDArray[Any] = words.reshape(self.full, chunk_bytes // width)


class Train:
    """Consecutive full bursts of one message, path and class that leave in one system call, gathered from where they lie.

    The headers are in the core's memory, the payloads in the message's own: ``iov`` lists both alternately, as ``struct iovec``
    (address, length) pairs, so that only the kernel copies, also where the chunks are not consecutive. Valid until the core
    builds the next burst.
    """

    __slots__ = ("address", "bursts", "cls", "headers", "iov_pointer", "path", "rows", "segment", "which")

    def __init__(
        self,
        headers: npt.NDArray[np.uint64],
        rows: npt.NDArray[Any],
        which: slice | npt.NDArray[np.uint32],
        iov_pointer: int,
        segment: int,
        path: int,
        cls: int,
        address: Address,
    ) -> None:
        self.headers = headers  # (bursts, chunks a burst, 6)
        self.rows = rows  # (full chunks of the message, words a chunk)
        self.which = which  # the chunks of the train
        self.bursts = len(headers)
        self.iov_pointer = iov_pointer
        self.segment = segment
        self.path = path
        self.cls = cls
        self.address = address

    @property
    def chunks(self) -> int:
        """Chunks, that is datagrams, in each burst."""
        return int(self.headers.shape[1])

    def burst(self, index: int) -> Burst:
        """One burst as contiguous memory of its own, for ports that do not gather."""
        at, chunks = index * self.chunks, self.chunks
        if isinstance(self.which, slice):
            payload = self.rows[self.which.start + at : self.which.start + at + chunks]
        else:
            payload = self.rows[self.which[at : at + chunks]]
        data = np.empty((chunks, self.segment), np.uint8)
        data[:, :HEADER_BYTES] = self.headers[index].view(np.uint8)
        data[:, HEADER_BYTES:] = payload.view(np.uint8)
        return Burst(data.reshape(-1), self.segment, self.path, self.cls, self.address)


class _TrainLayout:
    """Headers and iovecs of trains of one chunk size."""

    def __init__(self, chunk_bytes: int) -> None:
        rows = burst_chunks(chunk_bytes)
        self.rows = rows
        self.headers = (
            libc.aligned(TRAIN_BURSTS * rows * HEADER_BYTES).view(np.uint64).reshape(TRAIN_BURSTS, rows, 6)
        )
        self._items = self.headers.view(wire.HEADER_ITEM)[..., 0]
        self.positions = self.headers.view(np.uint8)[..., _POSITION_OFFSET]
        words = self.headers.view(np.uint32)
        self.numbers, self.indices = words[..., _BURST_OFFSET // 4], words[..., _CHUNK_OFFSET // 4]
        places = np.arange(TRAIN_BURSTS * rows, dtype=np.uint64).reshape(TRAIN_BURSTS, rows)
        self.offsets = places * np.uint64(chunk_bytes)
        self.iov = libc.aligned(TRAIN_BURSTS * rows * 32).view(np.uint64).reshape(TRAIN_BURSTS, rows, 4)
        self.iov[..., 0] = np.uint64(libc.address_of(self.headers)) + places * np.uint64(HEADER_BYTES)
        self.iov[..., 1] = HEADER_BYTES
        self.iov[..., 3] = chunk_bytes
        self.iov_pointer = libc.address_of(self.iov)

    def head(self, row: npt.NDArray[np.uint64], bursts: int, seq: int) -> npt.NDArray[np.uint64]:
        """The headers of ``bursts`` bursts numbered from ``seq``, all but their chunk indices."""
        self._items[:bursts] = row.view(wire.HEADER_ITEM)
        self.positions[:bursts] = wire.POSITIONS[: self.rows]
        self.numbers[:bursts] = wire.wire_sequence(seq, bursts)[:, None]
        return self.headers[:bursts]


class BurstBuffer:
    """Memory of one burst and the views over it, by chunk size, and of the headers of a train. Reused for every burst.

    The memory starts at a page: kernels that copy by ``rep movsb`` take several times as long from unaligned memory.
    """

    def __init__(self) -> None:
        self.data: Bytes = libc.aligned(MAX_DATAGRAM_BYTES + HEADER_BYTES)
        self.control: Bytes = libc.aligned(MAX_DATAGRAM_BYTES)
        self.pointer: int = libc.address_of(self.data)
        self.control_pointer: int = libc.address_of(self.control)
        self._views: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._trains: dict[int, _TrainLayout] = {}

    def _layout(self, chunk_bytes: int, width: int) -> tuple[Any, ...]:
        key = (chunk_bytes, width)
        views = self._views.get(key)
        if views is None:
            stride, rows = HEADER_BYTES + chunk_bytes, burst_chunks(chunk_bytes)
            dtype = np.dtype(f"<u{width}")
            views = self._views[key] = (
                stride,
                np.ndarray((rows, 6), np.uint64, self.data, 0, (stride, 8)),
                np.ndarray((rows,), np.uint8, self.data, _POSITION_OFFSET, (stride,)),
                np.ndarray((rows,), np.uint32, self.data, _CHUNK_OFFSET, (stride,)),
                np.ndarray((rows, chunk_bytes // width), dtype, self.data, HEADER_BYTES, (stride, width)),
            )
        return views

    def train(
        self,
        row: npt.NDArray[np.uint64],
        source: ChunkSource,
        chunk_bytes: int,
        first: int,
        bursts: int,
        seq: int,
        route: tuple[int, int, Address],
    ) -> Train:
        """A train of ``bursts`` full bursts of whole chunks from ``first`` on, numbered from ``seq``; ``route``: path, class,
        address."""
        layout = self._train_layout(chunk_bytes)
        stop = first + bursts * layout.rows
        headers = layout.head(row, bursts, seq)
        layout.indices[:bursts] = wire.wire_indices(first, stop).reshape(bursts, layout.rows)
        np.add(
            layout.offsets[:bursts],
            np.uint64(source.pointer + first * chunk_bytes),
            out=layout.iov[:bursts, :, 2],
        )
        segment = HEADER_BYTES + chunk_bytes
        return Train(headers, source.rows, slice(first, stop), layout.iov_pointer, segment, *route)

    def train_scattered(
        self,
        row: npt.NDArray[np.uint64],
        source: ChunkSource,
        chunk_bytes: int,
        chunks: npt.NDArray[np.uint32],
        seq: int,
        route: tuple[int, int, Address],
    ) -> Train:
        """A train of these whole chunks (ascending, full bursts of them); else as ``train``."""
        layout = self._train_layout(chunk_bytes)
        bursts = len(chunks) // layout.rows
        headers = layout.head(row, bursts, seq)
        layout.indices[:bursts] = chunks.byteswap().reshape(bursts, layout.rows)
        places = np.multiply(chunks, np.uint64(chunk_bytes), dtype=np.uint64).reshape(bursts, layout.rows)
        np.add(places, np.uint64(source.pointer), out=layout.iov[:bursts, :, 2])
        return Train(headers, source.rows, chunks, layout.iov_pointer, HEADER_BYTES + chunk_bytes, *route)

    def _train_layout(self, chunk_bytes: int) -> _TrainLayout:
        layout = self._trains.get(chunk_bytes)
        if layout is None:
            layout = self._trains[chunk_bytes] = _TrainLayout(chunk_bytes)
        return layout

    def fill_run(
        self, row: npt.NDArray[np.uint64], source: ChunkSource, chunk_bytes: int, first: int, count: int
    ) -> int:
        """Write chunks first..first+count-1 (the last may be the short one); returns the bytes written."""
        stride, headers, positions, indices, payload = self._layout(chunk_bytes, source.rows.itemsize)
        headers[:count] = row
        positions[:count] = wire.POSITIONS[:count]
        indices[:count] = wire.wire_indices(first, first + count)
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

    def fill_control(self, head: bytes, payload: bytes, at: int = 0) -> int:
        """Write one control datagram, or one more record of a bundle, into ``control`` from ``at`` on; returns where it ends."""
        stop = at + HEADER_BYTES + len(payload)
        self.control.data[at:stop] = head + payload
        return stop
