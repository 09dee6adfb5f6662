"""Bursts and trains are, byte for byte, the rows that a loop over their datagrams would write."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from dblp.transport import wire
from dblp.transport.burst import TRAIN_BURSTS, BurstBuffer, ChunkSource, burst_chunks
from dblp.transport.config import HEADER_BYTES
from dblp.transport.wire import Type
from tests.transport.cores import address, split

CHUNKS = [16, 256, 1024, 1408, 8896, 65_456]


def template(chunk_bytes: int, count: int, burst: int, chunks: int) -> wire.Header:
    return wire.Header(
        wire.VERSION, Type.DATA, 2, 1, count, 0, 5, 0xABCDEF, 0x1_0002, chunks, burst, 77, 3, 0, 1, chunk_bytes
    )  # fmt: skip


def row_of(header: wire.Header) -> np.ndarray:
    return np.frombuffer(bytearray(wire.encode_header(header)), np.uint64)


def reference(data: np.ndarray, chunk_bytes: int, header: wire.Header, chunks: list[int]) -> bytes:
    """One row after the other."""
    rows = []
    for position, chunk in enumerate(chunks):
        payload = data[chunk * chunk_bytes : (chunk + 1) * chunk_bytes].tobytes()
        rows.append(
            wire.encode_header(header._replace(position=position, chunk=chunk, length=len(payload))) + payload
        )
    return b"".join(rows)


def source(chunk_bytes: int, chunks: float, shift: int = 0) -> tuple[np.ndarray, ChunkSource]:
    """Random bytes, ``shift`` bytes off the alignment of the allocator."""
    size = int(chunks * chunk_bytes)
    memory = np.random.default_rng(chunk_bytes + shift).integers(0, 256, size + 64, np.uint8)
    data = memory[shift : shift + size]
    return data, ChunkSource(data, chunk_bytes)


@pytest.mark.parametrize("shift", [0, 1, 2, 4])
@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_a_run_is_its_rows(chunk_bytes, shift):
    most = burst_chunks(chunk_bytes)
    data, chunks = source(chunk_bytes, max(3 * most, 8) + 0.5, shift)
    buffer = BurstBuffer()
    for first, count in [(0, 1), (0, most), (most, most), (5, min(3, most)), (2 * most + 1, most)]:
        header = template(chunk_bytes, count, first, chunks.chunks)
        size = buffer.fill_run(row_of(header), chunks, chunk_bytes, first, count)
        assert buffer.data[:size].tobytes() == reference(
            data, chunk_bytes, header, list(range(first, first + count))
        )


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_a_run_that_ends_in_the_short_last_chunk(chunk_bytes):
    data, chunks = source(chunk_bytes, 2.25)
    header = template(chunk_bytes, 1, 9, chunks.chunks)
    buffer = BurstBuffer()
    size = buffer.fill_run(row_of(header), chunks, chunk_bytes, 2, 1)
    assert buffer.data[:size].tobytes() == reference(data, chunk_bytes, header, [2])
    if burst_chunks(chunk_bytes) >= 3:
        size = buffer.fill_run(row_of(header), chunks, chunk_bytes, 0, 3)
        assert buffer.data[:size].tobytes() == reference(data, chunk_bytes, header, [0, 1, 2])


@pytest.mark.parametrize("seed", range(20))
def test_scattered_chunks_are_their_rows(seed):
    rng = np.random.default_rng(seed)
    chunk_bytes = int(rng.choice(CHUNKS[:5]))
    data, chunks = source(chunk_bytes, float(rng.choice([100.0, 99.5])), int(rng.choice([0, 3])))
    count = int(rng.integers(1, burst_chunks(chunk_bytes) + 1))
    picked = np.sort(rng.choice(chunks.chunks, count, replace=False)).astype(np.uint32)
    if seed % 2:
        picked[-1] = chunks.chunks - 1
    header = template(chunk_bytes, count, seed, chunks.chunks)
    buffer = BurstBuffer()
    size = buffer.fill_scattered(row_of(header), chunks, chunk_bytes, picked)
    assert buffer.data[:size].tobytes() == reference(data, chunk_bytes, header, picked.tolist())


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize(("bursts", "seq"), [(2, 0), (3, 0xFFFFFFFE), (TRAIN_BURSTS, 1000)])
def test_a_train_is_its_bursts(chunk_bytes, bursts, seq):
    """Also in numbers that wrap."""
    rows = burst_chunks(chunk_bytes)
    data, chunks = source(chunk_bytes, (bursts + 1) * rows + 0.5)
    header = template(chunk_bytes, rows, seq, chunks.chunks)
    first = rows // 2
    train = BurstBuffer().train(row_of(header), chunks, chunk_bytes, first, bursts, seq, (1, 2, address(1)))
    assert (train.bursts, train.chunks, train.path, train.cls) == (bursts, rows, 1, 2)
    for index in range(bursts):
        numbered = header._replace(burst=(seq + index) & 0xFFFFFFFF)
        start = first + index * rows
        expected = reference(data, chunk_bytes, numbered, list(range(start, start + rows)))
        assert train.burst(index).data.tobytes() == expected


def test_the_iovecs_of_a_train_are_its_bytes():
    """What the kernel gathers, read through the pointers."""
    chunk_bytes, bursts = 1408, 3
    rows = burst_chunks(chunk_bytes)
    data, chunks = source(chunk_bytes, bursts * rows)
    header = template(chunk_bytes, rows, 4, chunks.chunks)
    buffer = BurstBuffer()  # holds the memory that the pointers lead to
    train = buffer.train(row_of(header), chunks, chunk_bytes, 0, bursts, 4, (0, 2, address(1)))
    pairs = (ctypes.c_uint64 * (4 * rows * bursts)).from_address(train.iov_pointer)
    gathered = b"".join(ctypes.string_at(pairs[at], pairs[at + 1]) for at in range(0, len(pairs), 2))
    assert gathered == b"".join(b"".join(split(train.burst(index))) for index in range(bursts))
    assert bytes(data) == b"".join(gathered[at + HEADER_BYTES : at + HEADER_BYTES + chunk_bytes]
                                   for at in range(0, len(gathered), HEADER_BYTES + chunk_bytes))  # fmt: skip


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_a_burst_fits_one_system_call(chunk_bytes):
    count = burst_chunks(chunk_bytes)
    assert 1 <= count <= 64
    assert count * (HEADER_BYTES + chunk_bytes) <= 65_507


def test_the_memory_of_bursts_starts_at_a_page():
    buffer = BurstBuffer()
    assert buffer.pointer % 4096 == buffer.control_pointer % 4096 == 0
