"""The Scapy layer of the wire format, made of the tables of ``wire``: to look at datagrams, and to build some.

    from dblp.transport import dissect
    dissect.Dblp(payload).show()

    from scapy.all import rdpcap
    dissect.bind(10_000)                    # UDP to or from this port is ours
    rdpcap("round.pcap")[0].show()

A record's payload is its ``body``; the next record of a bundle or super-packet is the layer above it. To build one, set ``cls``
afterwards: Scapy's constructors use that name themselves. Needs scapy (extra ``lab``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from dblp.errors import LocalError
from dblp.installed import pip_line
from dblp.transport import standing, wire
from dblp.transport.capture import decode_map
from dblp.transport.config import HEADER_BYTES
from dblp.transport.wire import Type

try:
    from scapy.fields import (
        ByteEnumField,
        Field,
        FieldListField,
        PacketLenField,
        PacketListField,
        StrField,
        StrLenField,
    )
    from scapy.layers.inet import UDP
    from scapy.packet import Packet, Raw, bind_bottom_up
except ImportError:
    raise LocalError(f"dissecting datagrams needs scapy; install with: {pip_line('lab')}") from None


_RANK_LISTS = ("waits_for", "silent")
"""Of STATE: their fields count what follows."""


def _fields(table: Sequence[wire.Field], order: str) -> list[Any]:
    """A Scapy field for each of a table: the struct code says size and type, ``order`` the byte order."""
    return [Field(field.name, 0, order + field.code) for field in table]


def _packet(name: str, fields: list[Any], **methods: Any) -> Any:
    return type(name, (Packet,), {"name": name, "fields_desc": fields, **methods})


def _keep_rest(self: Packet, payload: bytes) -> tuple[bytes, bytes]:
    """What follows a part is its container's."""
    return b"", payload


DblpGrant = _packet("DblpGrant", _fields(wire.GRANT_FIELDS, "<"), extract_padding=_keep_rest)
"""A grant of FEEDBACK."""
DblpSpace = _packet(
    "DblpSpace",
    [
        *_fields(wire.SPACE_FIELDS, "<"),
        FieldListField("masks", [], Field("mask", 0, "<Q"), count_from=lambda space: space.count),
    ],
    extract_padding=_keep_rest,
)
"""A report on one class in FEEDBACK, with its masks."""
DblpOpen = _packet(
    "DblpOpen",
    [
        *_fields(wire.OPEN_FIELDS, "<"),
        StrLenField("signature", b"", length_from=lambda message: message.signature_bytes),
        StrField("data", b""),
    ],
)
"""OPEN's payload."""
_FEEDBACK_FIELDS: list[Any] = [
    Field(
        field.name if field.name not in ("grants", "spaces") else f"{field.name}_count", 0, "<" + field.code
    )
    for field in wire.FEEDBACK_FIELDS
]
DblpFeedback = _packet(
    "DblpFeedback",
    [
        *_FEEDBACK_FIELDS,
        PacketListField("grants", [], DblpGrant, count_from=lambda feedback: feedback.grants_count),
        PacketListField("spaces", [], DblpSpace, count_from=lambda feedback: feedback.spaces_count),
    ],
)
"""FEEDBACK's payload."""
DblpFinal = _packet("DblpFinal", [*_fields(wire.FINAL_FIELDS, "<"), StrField("bits", b"")])
"""FINAL's payload."""
DblpLeft = _packet("DblpLeft", _fields(wire.LEFT_FIELDS, "<"))
"""LEFT's payload."""
_STATE_FIELDS: list[Any] = [
    Field(field.name if field.name not in _RANK_LISTS else f"{field.name}_count", 0, "<" + field.code)
    for field in standing.STATE_FIELDS
]
DblpState = _packet(
    "DblpState",
    [
        *_STATE_FIELDS,
        FieldListField(
            "waits_for", [], Field("rank", 0, "<H"), count_from=lambda state: state.waits_for_count
        ),
        FieldListField("silent", [], Field("rank", 0, "<H"), count_from=lambda state: state.silent_count),
    ],
)
"""STATE's payload, with the ranks of both lists."""


class _MapField(StrField):  # type: ignore[misc, unused-ignore]  # scapy's classes are not all typed
    """A msgpack map, shown decoded."""

    def i2repr(self, pkt: Any, x: Any) -> str:
        """What ``show`` prints."""
        body = decode_map(bytes(x))
        return repr(x) if body is None else repr({key: value for key, value in body.items() if key != "pad"})


DblpMap = _packet("DblpMap", [_MapField("map", b"")])
"""Payload of the handshake and of ABORT."""

BODIES: dict[int, Any] = {
    Type.OPEN: DblpOpen,
    Type.FEEDBACK: DblpFeedback,
    Type.FINAL: DblpFinal,
    Type.LEFT: DblpLeft,
    Type.STATE: DblpState,
    **dict.fromkeys((Type.ABORT, Type.HELLO, Type.RETRY, Type.WELCOME, Type.REFUSE), DblpMap),
}
"""The layer of each type that has a payload; DATA's is bytes."""


class _BodyField(PacketLenField):  # type: ignore[misc, type-arg, unused-ignore]
    """The payload of a record, by its type."""

    def m2i(self, pkt: Any, m: bytes) -> Any:
        """Bytes to a packet: of the type's own class where the bytes make sense as one, else as they are."""
        cls = BODIES.get(pkt.type, Raw)
        try:
            return cls(m)
        except (struct.error, IndexError):
            return Raw(m)


def _header_fields() -> list[Any]:
    types = {int(type_): type_.name for type_ in Type}
    fields = _fields(wire.HEADER_FIELDS, ">")
    return [ByteEnumField("type", 0, types) if field.name == "type" else field for field in fields]


def _next_record(self: Packet, payload: bytes) -> Any:
    """Another record of the same datagram, or padding that is none of ours."""
    return Dblp if len(payload) >= HEADER_BYTES and payload[0] == wire.VERSION else Raw


_NO_BODY: Any = None
Dblp: Any = _packet(
    "Dblp",
    [
        *_header_fields(),
        _BodyField("body", _NO_BODY, Raw, length_from=lambda record: record.length),
    ],
    guess_payload_class=_next_record,
)
"""One record: the header's fields, and ``body``."""


def bind(*ports: int) -> None:
    """Take UDP to or from these ports for ours, in this process."""
    for port in ports:
        bind_bottom_up(UDP, Dblp, sport=port)
        bind_bottom_up(UDP, Dblp, dport=port)


def records(payload: bytes) -> list[Any]:
    """The records of a UDP payload, each a ``Dblp`` without the layers above it."""
    return list(_layers(Dblp(payload)))


def _layers(packet: Any) -> Iterator[Any]:
    while isinstance(packet, Dblp):
        above = packet.payload
        packet.remove_payload()
        yield packet
        packet = above
