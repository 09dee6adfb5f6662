"""Captures: what stood on the wire, from a pcap or pcapng file to one table of records.

Theory of operation. A captured packet is an Ethernet, "cooked" or raw IP frame. A UDP payload holds one record (a header and its
payload), or several: a bundle of control datagrams, or a super-packet that the kernel would have cut later (captures on loopback
and on senders show those). Both are the same here: after a record, the next one follows until the payload's end. Headers are
gathered and decoded in one vectorised operation; what is no datagram of ours is counted with a reason, as the protocol core does.
Offline only: it loops over packets, which the transport never does.
"""

from __future__ import annotations

import enum
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from dblp.errors import LocalError
from dblp.installed import pip_line
from dblp.transport import wire
from dblp.transport.config import HEADER_BYTES
from dblp.transport.port import Address
from dblp.transport.wire import Type

_UDP, _IPV4, _IPV6, _VLAN = 17, 0x0800, 0x86DD, 0x8100
_MIN_IPV4, _IPV6_BYTES, _UDP_BYTES = 20, 40, 8
_LINK_BYTES = {1: 14, 113: 16, 276: 20, 101: 0, 12: 0, 228: 0, 229: 0}
"""Bytes before the IP header by link type (the registry of tcpdump.org): Ethernet, Linux cooked v1 and v2, raw IP."""
_ETHERTYPE_AT = {1: 12, 113: 14, 276: 0}
"""Where a link type's header has the ethertype."""
_HANDSHAKE = (Type.HELLO, Type.RETRY, Type.WELCOME, Type.REFUSE)
_TYPES = frozenset(int(type_) for type_ in Type)


class Fault(enum.Enum):
    """Why a UDP datagram, or a part of it, is none of ours."""

    SHORT = "shorter than a header"
    CUT = "cut by the capture within a header (a larger snapshot length keeps it)"
    FOREIGN = "another protocol, or another version of this one"
    TYPE = "a type, position or flag that does not exist"
    LENGTH = "a length that does not fit the datagram"
    PAYLOAD = "a payload that makes no sense"


class UdpDatagram(NamedTuple):
    """A UDP datagram as it was captured."""

    time: float
    """Seconds, on the capture's clock."""
    source: Address
    target: Address
    payload: bytes
    """What the capture kept of it."""
    size: int
    """Bytes that the payload had on the wire."""


RECORD = np.dtype(
    [("time", "f8"), ("source", "i4"), ("target", "i4"), ("packet", "i4"), ("whole", "?")]
    + [(name, wire.HEADER[name].newbyteorder("=")) for name in wire.HEADER.names or ()]
)
"""A row of ``Capture.records``: seconds, indices into ``Capture.addresses``, number of the datagram in the capture, whether all
of the record was kept, and the header's fields in native byte order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Capture:
    """All that a capture holds of the protocol."""

    records: npt.NDArray[np.void]
    """(records,) of ``RECORD``, in the order of capture."""
    payloads: dict[int, bytes]
    """Payloads of the control records by row; of DATA none is kept."""
    addresses: tuple[Address, ...]
    datagrams: int
    """UDP datagrams in the capture, of any protocol."""
    faults: tuple[tuple[int, Fault], ...] = ()
    """Number of the datagram, and what is wrong with it."""

    @property
    def fault_counts(self) -> Counter[Fault]:
        """How many of each."""
        return Counter(fault for _, fault in self.faults)

    @property
    def cut(self) -> int:
        """Records whose header was kept, but not all of their payload."""
        return int((~self.records["whole"]).sum())


def read_capture(path: Path) -> Capture:
    """Read a pcap or pcapng file; raises LocalError if it cannot be read or is none."""
    return collect(udp_datagrams(path))


def collect(datagrams: Iterable[UdpDatagram]) -> Capture:
    """Take datagrams apart into records."""
    headers, payloads = bytearray(), dict[int, bytes]()
    addresses: dict[Address, int] = {}
    places: list[tuple[float, int, int, int, bool]] = []
    faults: list[tuple[int, Fault]] = []
    number = -1
    for number, datagram in enumerate(datagrams):
        source = addresses.setdefault(datagram.source, len(addresses))
        target = addresses.setdefault(datagram.target, len(addresses))
        found, fault = records_of(datagram.payload, datagram.size)
        if fault is not None:
            faults.append((number, fault))
        for at, length, whole in found:
            data = datagram.payload
            if data[at + 1] != Type.DATA:
                payloads[len(places)] = data[at + HEADER_BYTES : at + HEADER_BYTES + length]
            places.append((datagram.time, source, target, number, whole))
            headers += data[at : at + HEADER_BYTES]
    return Capture(
        records=_rows(places, headers),
        payloads=payloads,
        addresses=tuple(addresses),
        datagrams=number + 1,
        faults=tuple(faults),
    )


def _rows(places: list[tuple[float, int, int, int, bool]], headers: bytearray) -> npt.NDArray[np.void]:
    rows = np.zeros(len(places), RECORD)
    for index, name in enumerate(("time", "source", "target", "packet", "whole")):
        rows[name] = [place[index] for place in places]
    decoded = np.frombuffer(bytes(headers), wire.HEADER)
    for name in wire.HEADER.names or ():
        rows[name] = decoded[name]
    return rows


def records_of(payload: bytes, size: int) -> tuple[list[tuple[int, int, bool]], Fault | None]:
    """The records of a UDP payload, ``size`` bytes long on the wire: (offset, payload bytes, whole) each, and what is wrong.

    Records before a fault count, but for a datagram whose first record has the wrong length: nothing of it is true then.
    """
    found: list[tuple[int, int, bool]] = []
    at = 0
    while at < size:
        fault = _header_fault(payload, at, size)
        if fault is not None:
            bad_length = found and fault is not Fault.CUT
            return ([], Fault.LENGTH) if bad_length else (found, fault)
        length = int.from_bytes(payload[at + 46 : at + HEADER_BYTES], "big")
        stop = at + HEADER_BYTES + length
        if stop > size:
            return [], Fault.LENGTH
        whole = stop <= len(payload)
        if whole and not _payload_makes_sense(payload[at + 1], payload[at + HEADER_BYTES : stop]):
            return found, Fault.PAYLOAD
        found.append((at, length, whole))
        at = stop
    return (found, None) if found else ([], Fault.SHORT)


def _header_fault(payload: bytes, at: int, size: int) -> Fault | None:
    """What is wrong with the header at ``at``; the checks of the protocol core, less those that need its state."""
    if at + HEADER_BYTES > size:
        return Fault.SHORT
    if at + HEADER_BYTES > len(payload):
        return Fault.CUT
    version, type_, cls, _, _, position = payload[at : at + 6]
    if version != wire.VERSION:
        return Fault.FOREIGN
    if type_ not in _TYPES or position >= wire.BURST_DATAGRAMS or cls & ~wire.FLAGS_MASK:
        return Fault.TYPE
    return None


def _payload_makes_sense(type_: int, payload: bytes) -> bool:
    decode = _DECODERS.get(type_)
    return decode is None or decode(payload) is not None


def decode_map(payload: bytes) -> dict[str, object] | None:
    """The msgpack map of a handshake or of ABORT, or None if it is none."""
    try:
        body = msgpack.unpackb(payload)
    except Exception:  # msgpack raises many kinds on garbage
        return None
    return body if isinstance(body, dict) else None


_DECODERS = {
    int(Type.OPEN): wire.decode_open,
    int(Type.FINAL): wire.decode_final,
    int(Type.FEEDBACK): wire.decode_feedback,
    int(Type.LEFT): wire.decode_left,
    int(Type.ABORT): decode_map,
    **{int(type_): decode_map for type_ in _HANDSHAKE},
}


# --- frames


def udp_datagrams(path: Path) -> Iterator[UdpDatagram]:
    """The UDP datagrams of a pcap or pcapng file, in order; raises LocalError if it cannot be read or is none."""
    for time, link, frame in _frames(path):
        datagram = _udp(time, link, frame)
        if datagram is not None:
            yield datagram


def _frames(path: Path) -> Iterator[tuple[float, int, bytes]]:
    """(seconds, link type, bytes) of each packet."""
    try:
        from scapy.error import Scapy_Exception
        from scapy.utils import RawPcapReader
    except ImportError:
        raise LocalError(f"reading captures needs scapy; install with: {pip_line('lab')}") from None
    try:
        with path.open("rb") as file, RawPcapReader(file) as reader:  # type: ignore[arg-type]  # a name or a file
            nano = getattr(reader, "nano", False)
            frame: bytes
            meta: Any
            for frame, meta in reader:
                if hasattr(meta, "tshigh"):  # pcapng
                    yield ((meta.tshigh << 32) + meta.tslow) / meta.tsresol, meta.linktype, frame
                else:
                    yield meta.sec + meta.usec * (1e-9 if nano else 1e-6), reader.linktype, frame
    except (OSError, Scapy_Exception, struct.error) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise LocalError(
            f"{path}: cannot be read as a capture: {what}; pcap or pcapng is expected, as tcpdump -w and"
            " dblp lab capture write it"
        ) from None


def _udp(time: float, link: int, frame: bytes) -> UdpDatagram | None:
    """The UDP datagram of a frame; None where there is none (other protocols, fragments, frames cut before it)."""
    at = _ip_offset(link, frame)
    if at is None or len(frame) <= at:
        return None
    parse = _PARSERS.get(frame[at] >> 4)
    place = parse(frame, at) if parse is not None else None
    if place is None or len(frame) < place[0] + _UDP_BYTES:
        return None
    start, ip_payload, source, target = place
    source_port, target_port, length, _ = struct.unpack_from(">HHHH", frame, start)
    size = (length or ip_payload) - _UDP_BYTES  # 0: a super-packet that is longer than the field can say
    payload = frame[start + _UDP_BYTES : start + _UDP_BYTES + max(0, size)]
    return UdpDatagram(
        time, Address(source, source_port), Address(target, target_port), payload, max(0, size)
    )


def _ip_offset(link: int, frame: bytes) -> int | None:
    at = _LINK_BYTES.get(link)
    if at is None or link not in _ETHERTYPE_AT or len(frame) < at:
        return at
    (kind,) = struct.unpack_from(">H", frame, _ETHERTYPE_AT[link])
    if kind == _VLAN and len(frame) >= at + 4:
        (kind,) = struct.unpack_from(">H", frame, at + 2)
        at += 4
    return at if kind in (_IPV4, _IPV6) else None


def _ipv4(frame: bytes, at: int) -> tuple[int, int, str, str] | None:
    """(offset of the UDP header, bytes from there on, source, target) of a whole IPv4 packet."""
    if len(frame) < at + _MIN_IPV4:
        return None
    header = 4 * (frame[at] & 0x0F)
    total, fragment, protocol = (
        int.from_bytes(frame[at + 2 : at + 4], "big"),
        int.from_bytes(frame[at + 6 : at + 8], "big") & 0x3FFF,
        frame[at + 9],
    )
    if protocol != _UDP or fragment or header < _MIN_IPV4:
        return None
    source, target = frame[at + 12 : at + 16], frame[at + 16 : at + 20]
    return at + header, (total or len(frame) - at) - header, str(ip_address(source)), str(ip_address(target))


def _ipv6(frame: bytes, at: int) -> tuple[int, int, str, str] | None:
    """The same of IPv6 without extension headers."""
    if len(frame) < at + _IPV6_BYTES or frame[at + 6] != _UDP:
        return None
    length = int.from_bytes(frame[at + 4 : at + 6], "big")
    source, target = frame[at + 8 : at + 24], frame[at + 24 : at + 40]
    start = at + _IPV6_BYTES
    return start, length or len(frame) - start, str(ip_address(source)), str(ip_address(target))


_PARSERS = {4: _ipv4, 6: _ipv6}
"""By the version in an IP header."""
