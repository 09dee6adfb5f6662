"""Captures: what was sent is what is read; repairs, holes and stops are those that the ranks reported; garbage is told."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

import numpy as np
import pytest

from dblp.errors import LocalError
from dblp.transport import wire
from dblp.transport.capture import Fault, UdpDatagram, collect, read_capture
from dblp.transport.capture_summary import messages_of, rounds_of
from dblp.transport.config import HEADER_BYTES, TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.impair import ImpairedPort, Impairer, parse_impair
from dblp.transport.port import Address
from dblp.transport.udp import open_port
from dblp.transport.wire import Type
from tests.transport.recording import ELEMENTS, SESSION, RecordingPort, member, recorded_rounds, write_pcap

pytest.importorskip("scapy")
A, B = Address("10.0.0.1", 10_000), Address("10.0.0.2", 10_000)


def datagram(payload: bytes, *, kept: int | None = None) -> UdpDatagram:
    return UdpDatagram(0.0, A, B, payload[:kept], len(payload))


def record(type_=Type.PING, body=b"", **fields):
    base = wire.Header(wire.VERSION, type_, 0, 0, 1, 0, 0, SESSION, 0, 1, 0, 0, 0, 0, 1, len(body))
    return wire.encode_header(base._replace(**fields)) + body


def test_a_capture_holds_what_was_sent(tmp_path):
    """Every field of every record equals what ``wire`` decodes of the datagrams that the ports took."""
    sent, _ = recorded_rounds(world_size=3, budget=0.1, impair="loss(0.05),seed(2)")
    write_pcap(tmp_path / "a.pcap", sent)
    capture = read_capture(tmp_path / "a.pcap")
    assert capture.datagrams == len(sent) and not capture.faults and not capture.cut
    row = 0
    for number, (_, source, target, payload, _) in enumerate(sent):
        at = 0
        while at < len(payload):
            header, got = wire.decode_header(payload, at), capture.records[row]
            assert tuple(got[list(header._fields)].tolist()) == header
            assert capture.addresses[got["source"]] == source and capture.addresses[got["target"]] == target
            assert got["packet"] == number and got["whole"]
            if header.type != Type.DATA:
                assert capture.payloads[row] == payload[at + HEADER_BYTES :][: header.length]
            at, row = at + HEADER_BYTES + header.length, row + 1
    assert row == len(capture.records) > len(sent), "some datagrams were bundles"
    np.testing.assert_allclose(
        capture.records["time"], [sent[n].time for n in capture.records["packet"]], atol=2e-6
    )


def test_messages_say_what_the_reports_say():
    """Repairs, and chunks that stay missing: as each rank's own report has them."""
    sent, reports = recorded_rounds(world_size=3, budget=0.2, impair="loss(0.1),seed(3)", rounds=3)
    rounds = rounds_of(messages_of(collect(sent)))
    assert [round_.round for round_ in rounds] == [0, 1, 2]
    for round_, of_round in zip(rounds, zip(*reports, strict=True), strict=True):
        bounded = [message for message in round_.messages if message.budget]
        for rank, report in enumerate(of_round):
            missing = {
                m.sender: m.missing
                for m in bounded
                if m.receiver == rank and m.missing is not None and len(m.missing)
            }
            assert missing.keys() == report.missing.keys()
            for peer, chunks in report.missing.items():
                assert len(set((chunks - missing[peer]).tolist())) == 1, (
                    "a report counts from the array's start"
                )
            sent_chunks = sum(
                len(m.chunk) - m.repairs - m.copies for m in round_.messages if m.sender == rank
            )
            assert sent_chunks == report.chunks_sent
        assert round_.record()["missing"] == sum(report.missing_chunks for report in of_round) > 0
        repairs = sum(message.repairs for message in round_.messages)
        assert repairs >= sum(report.chunks_resent for report in of_round) > 0, "some came after a rank's end"
        assert {message.end for message in round_.messages} <= {"stall", "complete"}
        assert sum(message.nbytes or 0 for message in bounded) == 2 * 4 * ELEMENTS, (
            "each rank's part to two others"
        )


def test_no_loss_no_repair():
    sent, _ = recorded_rounds()
    messages = messages_of(collect(sent))
    assert len(messages) == 2 * 2 * 2
    assert sum(m.nbytes or 0 for m in messages) == 2 * 2 * 4 * ELEMENTS
    for message in messages:
        assert (message.repairs, message.copies, message.end) == (0, 0, "complete")
        assert sorted(message.chunk.tolist()) == list(range(message.chunks or 0))
        assert message.opened_s is not None and message.final_s is not None
        assert message.opened_s <= message.times[0] <= message.times[-1] <= message.final_s == message.last_s


def test_a_capture_of_one_side_does_not_invent_the_other():
    """Without what the receiver sent: no rank, no FINAL, no holes."""
    sent, _ = recorded_rounds(budget=0.2, impair="loss(0.1),seed(3)")
    one_way = [datagram for datagram in sent if datagram.source.host == "10.0.0.1"]
    for message in messages_of(collect(one_way)):
        assert (message.sender, message.receiver, message.missing, message.end) == (0, None, None, "no FINAL")


def test_super_packets_come_apart():
    """What a capture on a sender's own device shows: several datagrams of a burst in one packet."""
    sent, _ = recorded_rounds()
    first = next(index for index, d in enumerate(sent) if d.payload[1] == Type.DATA)
    burst = [
        d.payload
        for d in sent[first : first + 64]
        if d.payload[1] == Type.DATA and d.source == sent[first].source
    ]
    capture = collect([datagram(b"".join(burst))])
    assert capture.records["chunk"].tolist() == [wire.decode_header(payload).chunk for payload in burst]
    assert len(burst) > 10 and not capture.faults


@pytest.mark.parametrize(
    ("payload", "fault"),
    [
        (b"", Fault.SHORT),
        (b"\x01" * 47, Fault.SHORT),
        (record(version=2), Fault.FOREIGN),
        (b"\x00" * 100, Fault.FOREIGN),
        (record(type_=77), Fault.TYPE),
        (record(position=64), Fault.TYPE),
        (record(cls=0x10), Fault.TYPE),
        (record(Type.DATA, bytes(16))[:-1], Fault.LENGTH),
        (record(Type.DATA, bytes(100), length=16), Fault.LENGTH),
        (record(Type.OPEN, b"x"), Fault.PAYLOAD),
        (record(Type.FEEDBACK, bytes(3)), Fault.PAYLOAD),
        (record(Type.HELLO, b"\xc1"), Fault.PAYLOAD),
        (record(Type.ABORT, b"\x01"), Fault.PAYLOAD),
    ],
)
def test_garbage_is_told_with_its_reason(payload, fault):
    capture = collect([datagram(record()), datagram(payload)])
    assert capture.faults == ((1, fault),)
    assert capture.records["type"].tolist() == [Type.PING]


def test_noise_is_counted_and_changes_nothing():
    """Random datagrams between real ones: what is made of the real ones stays the same."""
    sent, _ = recorded_rounds(budget=0.2, impair="loss(0.1),seed(3)")
    rng = np.random.default_rng(1)
    noise = [datagram(rng.bytes(int(size))) for size in rng.integers(0, 2000, 300)]
    mixed = [item for pair in zip(sent, noise, strict=False) for item in pair] + sent[len(noise) :]
    capture = collect(mixed)
    assert sum(capture.fault_counts.values()) == len(noise)
    clean = [message.record() for message in messages_of(collect(sent))]
    assert [message.record() for message in messages_of(capture)] == clean


def test_cut_payloads_are_told_and_headers_kept(tmp_path):
    """A snapshot length of 128 bytes keeps the headers of data: repairs can still be counted."""
    sent, _ = recorded_rounds(budget=0.2, impair="loss(0.1),seed(3)")
    write_pcap(tmp_path / "cut.pcap", sent, snaplen=128)
    capture = read_capture(tmp_path / "cut.pcap")
    data = [d for d in sent if d.payload[1] == Type.DATA and len(d.payload) > 128 - 42]
    assert capture.cut >= len(data) > 100
    assert (capture.records["type"] == Type.DATA).sum() == sum(d.payload[1] == Type.DATA for d in sent)
    write_pcap(tmp_path / "short.pcap", sent, snaplen=60)
    short = read_capture(tmp_path / "short.pcap")
    assert len(short.records) == 0 and short.fault_counts == {Fault.CUT: len(sent)}


def test_what_is_no_capture_is_refused_by_name(tmp_path):
    (tmp_path / "text").write_text("no capture\n" * 10)
    for path in (tmp_path / "text", tmp_path / "absent", tmp_path):
        with pytest.raises(LocalError, match=rf"{path}: cannot be read as a capture"):
            read_capture(path)


def test_other_link_types_and_ip_version_6(tmp_path):
    """Cooked captures (tcpdump -i any), raw IP, a VLAN tag, IPv6; TCP and ARP are passed over."""
    from scapy.layers.inet import IP, TCP, UDP
    from scapy.layers.inet6 import IPv6
    from scapy.layers.l2 import ARP, CookedLinux, Dot1Q, Ether
    from scapy.packet import Packet, Raw
    from scapy.utils import wrpcap, wrpcapng

    payload = UDP(sport=5, dport=6) / Raw(record())
    frames: dict[str, list[Packet]] = {
        "ether": [
            Ether(dst="02:00:00:00:00:01") / IP(src="10.0.0.1", dst="10.0.0.2") / payload,
            Ether(dst="02:00:00:00:00:01") / Dot1Q(vlan=5) / IP(src="10.0.0.1", dst="10.0.0.2") / payload,
            Ether(dst="02:00:00:00:00:01") / IPv6(src="fd00::1", dst="fd00::2") / payload,
            Ether(dst="02:00:00:00:00:01") / IP(src="10.0.0.1", dst="10.0.0.2") / TCP(),
            Ether(dst="02:00:00:00:00:01") / ARP(),
        ],
        "cooked": [CookedLinux() / IP(src="10.0.0.1", dst="10.0.0.2") / payload],
        "raw": [IP(src="10.0.0.1", dst="10.0.0.2") / payload],
    }
    for write, suffix in ((wrpcap, "pcap"), (wrpcapng, "pcapng")):
        for name, packets in frames.items():
            path = tmp_path / f"{name}.{suffix}"
            write(str(path), packets)
            capture = read_capture(path)
            expected = ["10.0.0.1", "10.0.0.1", "fd00::1"] if name == "ether" else ["10.0.0.1"]
            assert [capture.addresses[source].host for source in capture.records["source"]] == expected, path
            assert not capture.faults


def _lossy(port, rank):
    spec = parse_impair("loss(0.05)")
    return ImpairedPort(port, Impairer(spec, np.random.default_rng(rank)), asyncio.get_running_loop())


@pytest.mark.sockets
def test_real_sockets(tmp_path):
    """What two endpoints on loopback sockets sent, with the kernel's addresses; reports and capture agree."""
    kept: list[UdpDatagram] = []

    async def main():
        config = TransportConfig()
        ports = [RecordingPort(_lossy(open_port(config, host="127.0.0.1"), rank), kept) for rank in range(2)]
        peers = [list(port.addresses) for port in ports]
        endpoints = await asyncio.gather(
            *(
                Endpoint.connect(port, rank=rank, world_size=2, config=config, session=SESSION, peers=peers)
                for rank, port in enumerate(ports)
            )
        )
        reports = await asyncio.gather(*(member(endpoint, 0.2, 2) for endpoint in endpoints))
        await asyncio.gather(*(endpoint.close(linger_s=1.0) for endpoint in endpoints))
        return reports

    reports = asyncio.run(main())
    write_pcap(tmp_path / "sockets.pcap", kept)
    rounds = rounds_of(messages_of(read_capture(tmp_path / "sockets.pcap")))
    assert [round_.record()["missing"] for round_ in rounds] == [
        sum(report.missing_chunks for report in of_round) for of_round in zip(*reports, strict=True)
    ]
    assert Counter(message.receiver for round_ in rounds for message in round_.messages) == {0: 4, 1: 4}
    assert socket.inet_aton(kept[0].source.host)[0] == 127
