"""Receiving on UDP sockets: recvmmsg into one arena, coalesced and single datagrams on the same path.

Theory of operation. All paths of a port share one arena of slots, because a batch is handed over before
the next call reuses it. With UDP_GRO on, a message of recvmmsg is either a *super-packet* (a UDP_GRO control
message gives the size of its datagrams) or a single datagram. Neighbours of one shape become one slab, whoever
sent them: super-packets a stack, single datagrams a run with the slot's stride. Slabs, their ``source``
callables and every structure of the call exist once, one a slot.

A control buffer holds, in the kernel's order: the receive timestamp (SO_TIMESTAMPNS, always), then UDP_GRO
(super-packets only), then the type of service or traffic class where the congestion control heeds marks.
Each slab's timestamp is read from its first message: 0.1 us, as the same row is read for UDP_GRO anyway; those
of the other messages of a run only where they are asked for. All of a slab are marked, or none.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable
from itertools import groupby

import numpy as np

from dblp.transport import libc
from dblp.transport.port import Address, Ecn, Slab

SLOTS = 256
"""Messages a recvmmsg at most. Where single datagrams come, as through a bridge, each batch costs its feedback and its turn of
the loop: with 64 they took twice the processor time."""
SLOT_BYTES = 65_536
"""A slot takes the longest UDP payload, and so the longest super-packet. Slots are touched only when used, single datagrams touch
a page."""
SUPER_VLEN = 32
"""Messages a call while super-packets come: 2 MiB, which stays in the L3 cache until it is added up."""
SUPER_MIN_BYTES = 8_192
"""Messages of this mean length or longer are taken for super-packets."""
MAX_SOURCES = 4096
"""Decoded addresses kept (about 200 bytes each); a flood from forged ports only empties the table."""

_NAME_STRIDE = 32
_CONTROL_STRIDE = 96
_STAMP_BYTES = 32
"""A timestamp's control message: header and struct timespec."""
_MORE_BYTES = 24
"""Any other control message: header and at most eight bytes."""
_RESULT = struct.Struct("=Qixxxxixxxx").unpack_from
_RESULT_AT = libc.WORD_CONTROLLEN * 8
_CONTROLLEN = struct.Struct("=Q").pack_into
_GRO_AT = _STAMP_BYTES + libc.CMSG_HEADER_BYTES
"""Where UDP_GRO's control message holds the size of the datagrams; without one an old size stands there."""
_STAMP = struct.Struct("=16xqq").unpack_from
_STAMP_GRO = struct.Struct("=16xqq16xi").unpack_from


class Receiver:
    """The arena and the recvmmsg structures of one port. ``limit``: longest datagram that is handed over; ``marks``: the sockets
    report ECN bits."""

    def __init__(self, family: int, calls: libc.Calls, limit: int, *, marks: bool = False) -> None:
        self._marks = marks
        self._plain = _STAMP_BYTES + marks * _MORE_BYTES  # control bytes of a single datagram
        self._recvmmsg = calls.recvmmsg
        self._limit = limit
        self.arena = libc.aligned(SLOTS * SLOT_BYTES)
        self._names = libc.aligned(SLOTS * _NAME_STRIDE)
        self._controls = libc.aligned(SLOTS * _CONTROL_STRIDE)
        self._words = libc.aligned(SLOTS * libc.MMSGHDR_BYTES).view(np.uint64).reshape(SLOTS, 8)
        self._iovecs = libc.aligned(SLOTS * 16).view(np.uint64).reshape(SLOTS, 2)
        self._lay_out(libc.SOCKADDR_BYTES[socket.AddressFamily(family)])
        self._headers = self._words.reshape(-1).view(np.uint8).data
        self._control_bytes = self._controls.data
        self._gro_sizes = self._controls.view(np.int32).reshape(SLOTS, -1)[:, _GRO_AT // 4]
        # The type of service of each message: behind the timestamp, or behind UDP_GRO.
        first = _STAMP_BYTES + libc.CMSG_HEADER_BYTES
        self._services = self._controls.reshape(SLOTS, -1)[:, first : first + _MORE_BYTES + 1 : _MORE_BYTES].T
        self._pointer = libc.address_of(self._words)
        self._lengths = self._words[:, libc.WORD_LEN]
        self._controllens = self._words[:, libc.WORD_CONTROLLEN]
        self._vlen = SUPER_VLEN
        self._known: dict[bytes, Address] = {}
        self._slabs = [self._slab(slot) for slot in range(SLOTS)]
        self._shared = [self._source_in_super(slot) for slot in range(SLOTS)]
        self._apart = [self._source_in_run(slot) for slot in range(SLOTS)]
        self._arrivals = [self._arrival_in_run(slot) for slot in range(SLOTS)]
        self._clock_offset = 0.0
        self.datagrams = 0
        self.bytes = 0
        self.syscalls = 0
        self.dropped_length = 0

    def _lay_out(self, name_bytes: int) -> None:
        rows = np.arange(SLOTS, dtype=np.uint64)
        self._iovecs[:, 0] = libc.address_of(self.arena) + rows * np.uint64(SLOT_BYTES)
        self._iovecs[:, 1] = SLOT_BYTES
        words = self._words
        words[:, libc.WORD_NAME] = libc.address_of(self._names) + rows * np.uint64(_NAME_STRIDE)
        words[:, libc.WORD_NAMELEN] = name_bytes
        words[:, libc.WORD_IOV] = libc.address_of(self._iovecs) + rows * np.uint64(16)
        words[:, libc.WORD_IOVLEN] = 1
        words[:, libc.WORD_CONTROL] = libc.address_of(self._controls) + rows * np.uint64(_CONTROL_STRIDE)
        words[:, libc.WORD_CONTROLLEN] = _CONTROL_STRIDE

    def receive(self, fd: int, path: int, clock_offset: float) -> tuple[list[Slab], bool] | None:
        """One recvmmsg: its slabs, and whether the queue may hold more. None on an error
        (``ctypes.get_errno()``).

        ``clock_offset``: CLOCK_REALTIME less the loop's clock, seconds.
        """
        vlen = self._vlen
        self._clock_offset = clock_offset
        self.syscalls += 1
        count = self._recvmmsg(fd, self._pointer, vlen, libc.MSG_DONTWAIT, None)
        if count == 1:
            slabs = self._one(path, clock_offset)
        elif count > 0:
            slabs = self._several(count, path, clock_offset)
        else:
            return None
        return slabs, count == vlen

    def _one(self, path: int, clock_offset: float) -> list[Slab]:
        control, _, length = _RESULT(self._headers, _RESULT_AT)
        _CONTROLLEN(self._headers, _RESULT_AT, _CONTROL_STRIDE)
        return self._fill(((0, 1, length, control > self._plain),), path, clock_offset)

    def _several(self, count: int, path: int, clock_offset: float) -> list[Slab]:
        lengths, controls = self._lengths[:count].tolist(), self._controllens[:count].tolist()
        self._controllens[:count] = _CONTROL_STRIDE
        alike = lengths.count(lengths[0]) == count and controls.count(controls[0]) == count
        total = lengths[0] * count if alike else sum(lengths)
        self._vlen = SUPER_VLEN if total >= SUPER_MIN_BYTES * count else SLOTS
        sizes = [0] * count
        coalesced = [control > self._plain for control in controls]
        if True in coalesced:
            sizes = self._gro_sizes[:count].tolist()
            if False in coalesced:
                sizes = [size if together else 0 for size, together in zip(sizes, coalesced, strict=True)]
        marked = self._marked(count, coalesced) if self._marks else coalesced
        if alike and sizes.count(sizes[0]) == count and marked.count(marked[0]) == count:
            return self._fill(((0, count, lengths[0], coalesced[0]),), path, clock_offset)
        runs: list[tuple[int, int, int, bool]] = []
        slot = 0
        for (length, size, _), run in groupby(zip(lengths, sizes, marked, strict=True)):
            messages = len(list(run))
            runs.append((slot, messages, length, size > 0))
            slot += messages
        return self._fill(runs, path, clock_offset)

    def _fill(self, runs: Iterable[tuple[int, int, int, bool]], path: int, clock_offset: float) -> list[Slab]:
        """The slabs of (first slot, messages, length, coalesced) runs; what has a wrong length is dropped and
        counted."""
        slabs: list[Slab] = []
        control, limit, datagrams, nbytes = self._control_bytes, self._limit, 0, 0
        for slot, messages, length, coalesced in runs:
            slab = self._slabs[slot]
            slab.arrived = self._arrivals[slot] if messages > 1 else None
            if coalesced:
                seconds, nanoseconds, size = _STAMP_GRO(control, slot * _CONTROL_STRIDE)
                count = -(-length // size)
                slab.stride, slab.last, slab.supers = size, length - (count - 1) * size, messages
                slab.source = self._shared[slot] if messages == 1 else self._source_in_stack(slot, count)
                total = count * messages
            else:
                seconds, nanoseconds = _STAMP(control, slot * _CONTROL_STRIDE)
                size, slab.stride, slab.last, slab.supers = length, SLOT_BYTES, length, 1
                slab.source = self._apart[slot]
                count = total = messages
            if not 0 < size <= limit:
                self.dropped_length += total
                continue
            slab.size, slab.count, slab.path = size, count, path
            if self._marks:
                slab.marked = bool(self._services[int(coalesced), slot] & Ecn.CE == Ecn.CE)
            slab.received_at = seconds - clock_offset + nanoseconds * 1e-9
            datagrams += total
            nbytes += length * messages
            slabs.append(slab)
        self.datagrams += datagrams
        self.bytes += nbytes
        return slabs

    def _marked(self, count: int, coalesced: list[bool]) -> list[bool]:
        """Which of the first messages' datagrams carry a congestion mark."""
        bits = np.where(coalesced, self._services[1, :count], self._services[0, :count])
        marked: list[bool] = (bits & Ecn.CE == Ecn.CE).tolist()
        return marked

    def _slab(self, slot: int) -> Slab:
        slab = Slab(self.arena, slot * SLOT_BYTES, SLOT_BYTES, 0, 0, 0, 0, 0.0, self._source_in_run(slot))
        slab.spacing = SLOT_BYTES
        return slab

    def _source_in_super(self, slot: int) -> Callable[[int], Address]:
        return lambda index: self._address(slot)

    def _source_in_run(self, slot: int) -> Callable[[int], Address]:
        return lambda index: self._address(slot + index)

    def _source_in_stack(self, slot: int, count: int) -> Callable[[int], Address]:
        return lambda index: self._address(slot + index // count)

    def _arrival_in_run(self, slot: int) -> Callable[[int], float]:
        def arrival(index: int) -> float:
            seconds, nanoseconds = _STAMP(self._control_bytes, (slot + index) * _CONTROL_STRIDE)
            return float(seconds - self._clock_offset + nanoseconds * 1e-9)

        return arrival

    def _address(self, slot: int) -> Address:
        raw = self._names[slot * _NAME_STRIDE : (slot + 1) * _NAME_STRIDE].tobytes()
        address = self._known.get(raw)
        if address is None:
            if len(self._known) >= MAX_SOURCES:
                self._known.clear()
            address = self._known[raw] = libc.decode_sockaddr(raw)
        return address
