"""Wire format: one big-endian header table, and the payloads of control datagrams.

Theory of operation. Every datagram starts with the 48-byte ``HEADER``. Datagrams leave in bursts: all of a burst share
everything but ``position``, ``chunk``, ``contributions`` and ``length``, so a burst is coded and checked with a few
vectorised operations. The packet number of a datagram, within its (path, class), is (burst, position): an acknowledgement
is then a 64-bit mask a burst, and a window of masks tells a sender the fate of everything that may be in flight, however
many earlier acknowledgements were lost. Everything but FEEDBACK and the handshake is acknowledged this way.

Payloads are little-endian, as every host that torch runs on is; HELLO states the byte order and a peer of another refuses.
``docs/wire.md`` is generated from the tables here (``python -m dblp.transport.wire_doc``).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dblp.transport.config import HEADER_BYTES
from dblp.transport.message import UNTAGGED, ClassCounts, MessageSpec, most_critical
from dblp.transport.policy import Stop

VERSION = 1
"""Major version, the first byte of every datagram in all versions: peers of another are refused, not misread."""


class Field(NamedTuple):
    """A field on the wire: the structs and dtypes here and docs/wire.md are made of the same tables of them."""

    name: str
    code: str
    """As in the struct module."""
    meaning: str


HEADER_FIELDS = (
    Field("version", "B", "major version of the protocol"),
    Field("type", "B", "what the datagram is, see below"),
    Field(
        "cls",
        "B",
        "class in bits 0 and 1, 0 critical .. 3 lost first; bit 6 (`LAST`): first transmissions of the message are "
        "out, as END says; bit 7 (`ASK`): feedback is wanted at once",
    ),
    Field("path", "B", "path: the index of the local port at both ends"),
    Field("count", "B", "datagrams in this burst, 1..64"),
    Field("position", "B", "this datagram's place in its burst, 0..count-1"),
    Field("rank", "H", "the sender's rank"),
    Field("session", "Q", "random 64 bits of this job and generation"),
    Field(
        "message",
        "Q",
        "message id: group (16 bits), round (32), leg and step (16); 0 where no message is meant. Of the group the highest bit "
        "marks rounds that begin in any order: transfers and, with the next bit, too, collectives that callbacks call",
    ),
    Field("chunks", "I", "chunks in the message"),
    Field(
        "burst",
        "I",
        "burst number within (path, class), modulo 2^32; FEEDBACK counts apart, by the path it speaks of",
    ),
    Field("sent_at", "I", "sender's clock in microseconds, modulo 2^32"),
    Field(
        "watermark",
        "I",
        "the sender has ended all rounds of this group below this one, and nothing of them is under way",
    ),
    Field("chunk", "I", "index of this chunk; 0 in control datagrams"),
    Field(
        "contributions",
        "H",
        "ranks whose gradients this chunk sums; in END and PING: copies that were sent, and wanted of the answer",
    ),
    Field("length", "H", "payload bytes of this datagram"),
)
"""The header of every datagram, big-endian."""

_NUMPY = {"B": "u1", "H": ">u2", "I": ">u4", "Q": ">u8"}
HEADER = np.dtype([(field.name, _NUMPY[field.code]) for field in HEADER_FIELDS])
"""Header of every datagram."""


def _struct(order: str, fields: Sequence[Field]) -> struct.Struct:
    return struct.Struct(order + "".join(field.code for field in fields))


_HEADER_STRUCT = _struct(">", HEADER_FIELDS)
assert HEADER.itemsize == _HEADER_STRUCT.size == HEADER_BYTES

HEADER_ITEM = np.dtype((np.void, HEADER_BYTES))
"""A header as one item without fields: rows of them are copied in a half or a third of the time that rows of six words take."""

CLASS_MASK = 0x03
"""Bits of ``cls`` that hold the class."""
ASK = 0x80
"""Bit of ``cls``: the sender's window is full or it has nothing more to send, so feedback is wanted at once."""
LAST = 0x40
"""Bit of ``cls``: with this burst the first transmissions of the message are out; spares END where nothing is being lost."""
FLAGS_MASK = ASK | LAST | CLASS_MASK
"""Bits of ``cls`` that have a meaning."""
BURST_DATAGRAMS = 64
"""Most datagrams in a burst: bits of an acknowledgement mask, and the kernel's UDP_MAX_SEGMENTS before 6.9."""
MASK_WINDOW = 128
"""Bursts of a (path, class) that one feedback covers; a sender keeps no more than this many unacknowledged."""


class Type(enum.IntEnum):
    """What a datagram is."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> Type:
        """A type and what docs/wire.md says of it."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    DATA = 1, "A chunk of a message."
    OPEN = 2, "What a message is; no message completes without it."
    END = (
        3,
        "First transmissions of the message on this (path, class) are out; also the probe that asks for feedback.",
    )
    FINAL = 4, "The receiver's last word on a message: a bitmap of what it counted."
    FEEDBACK = (
        5,
        "Masks of received bursts, echo of the send time, credit and grants; not acknowledged itself.",
    )
    PING = 6, "Asks for feedback: a sign of life, and all grants again."
    ABORT = 7, "The sender's endpoint failed; why, and which ranks are to blame."
    CLOSE = 8, "The sender leaves; nothing more will come from it."
    HELLO = 9, "Handshake: who I am (msgpack), with a cookie on the second try."
    RETRY = 10, "Handshake: come again with this cookie; no state was held."
    WELCOME = 11, "Handshake: the peer's answer, address proved both ways."
    REFUSE = 12, "Handshake: why not (version, session, world size)."
    LEFT = 13, "The sender gets no answer on some paths, and uses others: a hint to do the same."
    CLOSING = 14, "The sender posts no more receives, and stays only until what it sent is acknowledged."
    STATE = (
        15,
        "How the sender stands with a late round: whether it has called it, and for which ranks it waits.",
    )


class Header(NamedTuple):
    """One decoded header; fields as in ``HEADER``."""

    version: int
    type: int
    cls: int
    path: int
    count: int  # type: ignore[assignment]  # shadows tuple.count, which nobody needs here
    position: int
    rank: int
    session: int
    message: int
    chunks: int
    burst: int
    sent_at: int
    watermark: int
    chunk: int
    contributions: int
    length: int


decode_header_from = _HEADER_STRUCT.unpack_from
"""``decode_header_from(buffer, offset)``: the fields of ``Header`` as a plain tuple (hot path)."""


encode_fields = _HEADER_STRUCT.pack
"""``encode_fields(*fields)``: the fields of ``Header`` in order as 48 bytes (hot path)."""


def encode_header(header: Header) -> bytes:
    """One header as its 48 bytes."""
    return _HEADER_STRUCT.pack(*header)


def decode_header(data: bytes | bytearray | memoryview, offset: int = 0) -> Header:
    """One header from bytes; raises struct.error if there are fewer than 48."""
    return Header(*_HEADER_STRUCT.unpack_from(data, offset))


_pack_route = struct.Struct(">BBB").pack_into
_pack_varying = struct.Struct(">III").pack_into


def stamp(head: bytearray, cls: int, path: int, count: int, burst: int, now: float, watermark: int) -> None:
    """Write what changes from burst to burst into a header's bytes; ``cls`` with or without ``ASK``."""
    _pack_route(head, 2, cls, path, count)
    _pack_varying(head, 28, burst & 0xFFFFFFFF, int(now * 1e6) & 0xFFFFFFFF, watermark)


def clock_us(now: float) -> int:
    """``now`` (seconds) as the header's microseconds modulo 2^32."""
    return int(now * 1e6) & 0xFFFFFFFF


def since_us(earlier: int, later: int) -> float:
    """Seconds from one header clock reading to another of the same clock, at most 2^31 us (35 minutes) apart."""
    delta = (later - earlier) & 0xFFFFFFFF
    return (delta - (1 << 32) if delta >= 1 << 31 else delta) * 1e-6


# Chunk indices as they stand on the wire, in native words: slices of this table are copied into bursts and compared with
# received headers, so that no index is ever byte-swapped one by one.
_index_table: npt.NDArray[np.uint32] = np.arange(1 << 16, dtype=np.uint32).byteswap()


MAX_INDEX_TABLE = 1 << 22
"""Most entries of the table, 16 MB: chunks of a message of 6 GB. No datagram can make it grow further."""


def wire_indices(first: int, stop: int) -> npt.NDArray[np.uint32]:
    """The four wire bytes of the chunk indices first..stop-1, as native words; not to be written to."""
    global _index_table
    if stop > len(_index_table):
        if stop > MAX_INDEX_TABLE:
            return wire_sequence(first, stop - first)
        _index_table = np.arange(1 << (stop - 1).bit_length(), dtype=np.uint32).byteswap()
    return _index_table[first:stop]


def wire_index(value: int) -> int:
    """The four wire bytes of a number modulo 2^32, as one native word."""
    return int.from_bytes((value & 0xFFFFFFFF).to_bytes(4, "big"), "little")


def wire_sequence(first: int, count: int) -> npt.NDArray[np.uint32]:
    """``wire_index`` of ``count`` numbers from ``first`` on; not to be written to."""
    low = first & 0xFFFF
    if low + count <= 1 << 16:
        lower: npt.NDArray[np.uint32] = _index_table[low : low + count]
        return lower | np.uint32(wire_index(first - low)) if first != low else lower
    return np.arange(first, first + count, dtype=np.int64).astype(np.uint32).byteswap()


POSITIONS: npt.NDArray[np.uint8] = np.arange(BURST_DATAGRAMS, dtype=np.uint8)
"""0..63, the position column of a burst."""


# --- control payloads


class Open(NamedTuple):
    """Payload of OPEN."""

    spec: MessageSpec
    signature: bytes
    energy: float
    counts: ClassCounts = UNTAGGED
    data: bytes = b""
    """The message itself, where it has one chunk and comes with its OPEN."""


OPEN_FIELDS = (
    Field("nbytes", "Q", "bytes of the message"),
    Field("chunk_bytes", "I", "bytes of each chunk but the last"),
    Field("budget", "d", "share of the chunks that may miss, [0, 1)"),
    Field("stop", "B", "stop rule: 0 eager, 1 stall, 2 deadline, 3 abandon"),
    Field("stop_after_s", "d", "seconds, for the deadline rule"),
    Field("energy", "d", "sum of squares of the message, for bounded ones"),
    Field("critical", "I", "chunks of class 0, of which none may miss; a tenth of all at most, or one"),
    Field("class_1", "I", "chunks of class 1"),
    Field("class_2", "I", "chunks of class 2"),
    Field(
        "class_3", "I", "chunks of class 3; all four are 0 where the chunks have one class, which is not 0"
    ),
    Field(
        "signature_bytes",
        "B",
        "bytes of the round's signature, which follows: all ranks of a round must send the same",
    ),
)
"""OPEN's payload; the signature follows, and the data of a message that needs no datagram of its own."""
_OPEN = _struct("<", OPEN_FIELDS)
_STOPS = tuple(Stop)


def encode_open(message: Open) -> bytes:
    """OPEN's payload."""
    spec = message.spec
    stop = _STOPS.index(spec.stop)
    fixed = (
        spec.nbytes,
        spec.chunk_bytes,
        spec.budget,
        stop,
        spec.stop_after_s,
        message.energy,
        *message.counts,
        len(message.signature),
    )
    return _OPEN.pack(*fixed) + message.signature + message.data


def decode_open(payload: bytes) -> Open | None:
    """OPEN's payload, or None if it makes no sense."""
    if len(payload) < _OPEN.size:
        return None
    nbytes, chunk_bytes, budget, stop, stop_after, energy, *counts, length = _OPEN.unpack_from(payload)
    if (
        stop >= len(_STOPS)
        or chunk_bytes == 0
        or not 0.0 <= budget < 1.0
        or len(payload) < _OPEN.size + length
    ):
        return None
    signature, data = payload[_OPEN.size : _OPEN.size + length], payload[_OPEN.size + length :]
    if data and not len(data) == nbytes <= chunk_bytes:
        return None
    spec = MessageSpec(
        nbytes=nbytes, chunk_bytes=chunk_bytes, budget=budget, stop=_STOPS[stop], stop_after_s=stop_after
    )
    if any(counts) and (sum(counts) != spec.chunks or counts[0] > most_critical(spec.chunks)):
        return None
    return Open(spec, signature, energy, (counts[0], counts[1], counts[2], counts[3]), data)


class Space(NamedTuple):
    """Acknowledgement of one class: bit ``64 * i + p`` of ``masks`` says that datagram p of burst ``base + i`` came."""

    cls: int
    base: int
    count: int  # type: ignore[assignment]
    masks: int


class Feedback(NamedTuple):
    """Payload of FEEDBACK."""

    echo: int
    """``sent_at`` of the datagram that came last."""
    held_us: int
    """Microseconds between its arrival in the kernel and this feedback."""
    window_bytes: int
    """Credit: most bytes (truesize) that the peer may have unacknowledged on this path; absolute."""
    asked: bool
    """This answers an END or PING."""
    grants: tuple[tuple[int, int], ...]
    """(message id, chunk limit): chunks below the limit may be sent; absolute."""
    spaces: tuple[Space, ...]
    marked: int = 0
    """Datagrams that came with a congestion mark (ECN's CE) on this path so far, modulo 2^32; absolute."""
    path: int = 0
    """The path that it speaks of: the one that it is sent on, unless that does not answer."""
    behind_us: int = 0
    """How long datagrams waited lately in this host before they were read, microseconds."""


FEEDBACK_FIELDS = (
    Field("echo", "I", "`sent_at` of the datagram that came last on this path"),
    Field("held_us", "I", "microseconds between its arrival and this feedback"),
    Field(
        "window_bytes",
        "I",
        "credit: most bytes, at the kernel's charge, that may be unacknowledged on this path; absolute",
    ),
    Field("marked", "I", "datagrams that came with a congestion mark (CE) on this path so far, modulo 2^32"),
    Field("behind_us", "I", "microseconds that datagrams waited lately in this host before they were read"),
    Field("path", "B", "the path that it speaks of, also where it comes on another"),
    Field("asked", "B", "1: answers an END or PING"),
    Field("grants", "B", "number of grants that follow"),
    Field("spaces", "B", "number of spaces that follow"),
)
"""FEEDBACK's payload; grants and spaces follow."""
GRANT_FIELDS = (
    Field("message", "Q", "message id"),
    Field("limit", "I", "chunks below this index may be sent; absolute"),
)
"""A grant in FEEDBACK."""
SPACE_FIELDS = (
    Field("cls", "B", "class"),
    Field(
        "count",
        "B",
        "masks that follow, 8 bytes each: bit p of mask i says that datagram p of burst base + i came",
    ),
    Field("base", "I", "first burst, modulo 2^32"),
)
"""A report on one class in FEEDBACK; its masks follow."""
_FEEDBACK, _GRANT, _SPACE = (
    _struct("<", FEEDBACK_FIELDS),
    _struct("<", GRANT_FIELDS),
    _struct("<", SPACE_FIELDS),
)
FEEDBACK_BYTES, GRANT_BYTES, SPACE_BYTES = _FEEDBACK.size, _GRANT.size, _SPACE.size
"""Sizes of FEEDBACK's fixed part, of a grant and of a class's report less its masks (8 bytes each)."""
MAX_GRANTS = 16
"""Grants in one feedback: with a class's whole window of masks they fit a datagram for an MTU of 1500, with 20 masks the
smallest datagram (512 bytes)."""


def encode_feedback(feedback: Feedback) -> bytes:
    """FEEDBACK's payload."""
    head = _FEEDBACK.pack(
        feedback.echo,
        min(feedback.held_us, 0xFFFFFFFF),
        min(feedback.window_bytes, 0xFFFFFFFF),
        feedback.marked & 0xFFFFFFFF,
        min(feedback.behind_us, 0xFFFFFFFF),
        feedback.path,
        feedback.asked,
        len(feedback.grants),
        len(feedback.spaces),
    )
    parts = [head]
    parts += [_GRANT.pack(*grant) for grant in feedback.grants]
    for space in feedback.spaces:
        parts.append(_SPACE.pack(space.cls, space.count, space.base))
        parts.append(space.masks.to_bytes(8 * space.count, "little"))
    return b"".join(parts)


def decode_feedback(payload: bytes) -> Feedback | None:
    """FEEDBACK's payload, or None if it makes no sense."""
    try:
        echo, held, window, marked, behind, path, asked, n_grants, n_spaces = _FEEDBACK.unpack_from(payload)
        at = _FEEDBACK.size
        grants = []
        for _ in range(n_grants):
            grants.append(_GRANT.unpack_from(payload, at))
            at += _GRANT.size
        spaces = []
        for _ in range(n_spaces):
            cls, length, base = _SPACE.unpack_from(payload, at)
            at += _SPACE.size
            stop = at + 8 * length
            if stop > len(payload):
                return None
            spaces.append(Space(cls, base, length, int.from_bytes(payload[at:stop], "little")))
            at = stop
    except struct.error:
        return None
    return Feedback(echo, held, window, bool(asked), tuple(grants), tuple(spaces), marked, path, behind)


LEFT_FIELDS = (Field("paths", "Q", "bit p: the sender of this gets no answer on path p"),)
"""LEFT's payload."""
_LEFT = _struct("<", LEFT_FIELDS)


def encode_left(paths: int) -> bytes:
    """LEFT's payload: a bit a path."""
    return _LEFT.pack(paths)


def decode_left(payload: bytes) -> int | None:
    """The paths, a bit each, or None if the payload makes no sense."""
    return int(_LEFT.unpack(payload)[0]) if len(payload) == _LEFT.size else None


ABORT_KEYS = {
    "code": "kind of error: `deadline`, `mismatch`, or another",
    "text": "the error's message, at most 300 characters",
    "ranks": "ranks to blame, at most 64",
}
"""Keys of ABORT's payload, a msgpack map."""


class Final(NamedTuple):
    """Payload of FINAL: part ``part`` of ``parts`` of the bitmap of counted chunks; no bits at all means every chunk."""

    part: int
    parts: int
    bits: bytes


FINAL_FIELDS = (
    Field("part", "H", "this part of the bitmap, 384 bytes each but the last"),
    Field("parts", "H", "parts of the bitmap; no bits at all: every chunk was counted"),
)
"""FINAL's payload; the bitmap's part follows."""
_FINAL = _struct("<", FINAL_FIELDS)
FINAL_PART_BYTES = 384
"""Bitmap bytes in one FINAL datagram: fits the smallest datagram (512 bytes)."""


def encode_final(final: Final) -> bytes:
    """FINAL's payload."""
    return _FINAL.pack(final.part, final.parts) + final.bits


def decode_final(payload: bytes) -> Final | None:
    """FINAL's payload, or None if it makes no sense."""
    if len(payload) < _FINAL.size:
        return None
    part, parts = _FINAL.unpack_from(payload)
    if part >= parts:
        return None
    return Final(part, parts, payload[_FINAL.size :])


def final_parts(have: npt.NDArray[np.bool_]) -> list[Final]:
    """The FINAL datagrams that say which chunks were counted."""
    if bool(have.all()):
        return [Final(0, 1, b"")]
    bits = np.packbits(have, bitorder="little").tobytes()
    pieces = [bits[at : at + FINAL_PART_BYTES] for at in range(0, len(bits), FINAL_PART_BYTES)]
    return [Final(part, len(pieces), piece) for part, piece in enumerate(pieces)]


def missing_from_bits(bits: bytes, chunks: int) -> npt.NDArray[np.uint32]:
    """Indices of the chunks that a FINAL bitmap leaves out, ascending."""
    if not bits:
        return np.empty(0, np.uint32)
    have = np.unpackbits(np.frombuffer(bits, np.uint8), count=chunks, bitorder="little")
    return np.flatnonzero(have == 0).astype(np.uint32)
