"""The Scapy layer and Wireshark's dissector: both say of every field what ``wire`` decodes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from dblp.transport import lua, wire, wire_doc
from dblp.transport.config import HEADER_BYTES
from dblp.transport.standing import Stand, Standing, encode_state
from dblp.transport.wire import Type
from tests.transport.recording import recorded_rounds, write_pcap
from tests.transport.test_capture import record

pytest.importorskip("scapy")
from scapy.packet import Raw

from dblp.transport import dissect  # after the check for scapy


@pytest.fixture(scope="module")
def sent():
    """All types but ABORT, LEFT and REFUSE, with bundles."""
    return recorded_rounds(world_size=3, budget=0.2, impair="loss(0.1),seed(3)")[0]


def test_every_field_of_every_record_equals_what_wire_decodes(sent):
    kinds = set()
    for _, _, _, payload, _ in sent:
        for packet, (header, body) in zip(dissect.records(payload), parts(payload), strict=True):
            assert {name: getattr(packet, name) for name in header._fields} == header._asdict()
            assert body == (bytes(packet.body) if packet.body is not None else b"")
            CHECKS.get(header.type, check_nothing)(packet.body, body)
            kinds.add(header.type)
    assert kinds >= {Type.DATA, Type.OPEN, Type.END, Type.FINAL, Type.FEEDBACK, Type.HELLO, Type.WELCOME}


def check_nothing(body, payload):
    assert body is None or not isinstance(body, dissect.DblpOpen)


def check_open(body, payload):
    decoded = wire.decode_open(payload)
    assert decoded is not None
    spec = decoded.spec
    assert (body.nbytes, body.chunk_bytes, body.budget) == (spec.nbytes, spec.chunk_bytes, spec.budget)
    assert (body.critical, body.class_1, body.class_2, body.class_3) == decoded.counts
    assert (body.signature, body.data, body.energy) == (decoded.signature, decoded.data, decoded.energy)


def check_feedback(body, payload):
    decoded = wire.decode_feedback(payload)
    assert decoded is not None
    assert (body.echo, body.held_us, body.window_bytes) == (
        decoded.echo,
        decoded.held_us,
        decoded.window_bytes,
    )
    assert (body.path, bool(body.asked), body.marked) == (decoded.path, decoded.asked, decoded.marked)
    assert tuple((grant.message, grant.limit) for grant in body.grants) == decoded.grants
    spaces = [
        (s.cls, s.base, s.count, sum(mask << 64 * i for i, mask in enumerate(s.masks))) for s in body.spaces
    ]
    assert spaces == [tuple(space) for space in decoded.spaces]


def check_final(body, payload):
    assert (body.part, body.parts, body.bits) == wire.decode_final(payload)


STATE = Standing(stand=Stand.WAITING, waits_for=(1, 7), silent=(7, 300, 5))


def test_a_state_is_shown_with_its_ranks():
    (packet,) = dissect.records(record(Type.STATE, encode_state(STATE, asks=True)))
    body = packet.body
    assert (body.asks, body.stand, body.waits_for_count, body.silent_count) == (1, Stand.WAITING, 2, 3)
    assert (tuple(body.waits_for), tuple(body.silent)) == (STATE.waits_for, STATE.silent)
    assert bytes(dissect.DblpState(asks=1, stand=1, waits_for_count=1, waits_for=[9])) == encode_state(
        Standing(stand=Stand.WAITING, waits_for=(9,)), asks=True
    )


def test_every_payload_of_the_documentation_is_dissected():
    """docs/wire.md, which is made of the code: a section with a table of fields is read field by field, by both."""
    sections = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", wire_doc.page(), re.MULTILINE | re.DOTALL)
    payloads = {
        Type[name]: text for heading, text in sections for name in heading.split(", ") if name.isupper()
    }
    assert {Type.OPEN, Type.STATE, Type.HELLO} <= payloads.keys()
    script = lua.script()
    for type_ in Type:
        told = type_ in payloads
        assert told == (type_ in dissect.BODIES), type_.name
        fixed = told and "| Byte |" in payloads[type_]  # else a msgpack map, which Wireshark shows as bytes
        assert fixed == (f"bodies[{int(type_)}] = function" in script), type_.name


CHECKS = {Type.OPEN: check_open, Type.FEEDBACK: check_feedback, Type.FINAL: check_final}


def test_maps_are_shown_decoded():
    hello = record(Type.HELLO, b"\x82\xa4rank\x03\xa3pad\xc4\x02..")
    assert "{'rank': 3}" in dissect.Dblp(hello).show(dump=True)
    left = dissect.Dblp(record(Type.LEFT, wire.encode_left(5)))
    assert left.body.paths == 5


def test_what_makes_no_sense_stays_bytes():
    (packet,) = dissect.records(record(Type.FEEDBACK, b"xy"))
    assert isinstance(packet.body, Raw) and bytes(packet.body) == b"xy"
    (packet,) = dissect.records(record(Type.PING) + b"\x07 padding")
    assert packet.type == Type.PING and packet.body is None


def test_a_built_record_is_what_the_wire_says():
    built = dissect.Dblp(
        version=1, type="LEFT", count=1, rank=3, session=7, length=8, body=dissect.DblpLeft(paths=6)
    )
    built.cls = 1
    header = wire.Header(1, Type.LEFT, 1, 0, 1, 0, 3, 7, 0, 0, 0, 0, 0, 0, 0, 8)
    assert bytes(built) == wire.encode_header(header) + wire.encode_left(6)


def test_bound_ports_dissect_themselves(sent, tmp_path):
    from scapy.utils import rdpcap

    write_pcap(tmp_path / "a.pcap", sent[:20])
    dissect.bind(10_000)
    packets = rdpcap(str(tmp_path / "a.pcap"))
    assert [packet[dissect.Dblp].type for packet in packets] == [
        datagram.payload[1] for datagram in sent[:20]
    ]


# --- Wireshark

TSHARK = shutil.which("tshark")
needs_tshark = pytest.mark.skipif(TSHARK is None, reason="no tshark: Debian's package of that name has it")


def tshark(script, capture, *arguments):
    done = subprocess.run(
        [str(TSHARK), "-X", f"lua_script:{script}", "-r", str(capture), *arguments],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    complaints = [line for line in done.stderr.splitlines() if "Running as user" not in line]
    assert not complaints
    return done.stdout


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("lua") / "dblp.lua"
    path.write_text(lua.script())
    return path


PAYLOAD_FIELDS = ("open.nbytes", "open.budget", "open.energy", "space.mask", "final.bits")


@needs_tshark
def test_tshark_decodes_every_header_field_and_the_payloads(sent, script, tmp_path):
    """All records of all datagrams, also in bundles. One run of tshark, which takes seconds to start."""
    write_pcap(tmp_path / "a.pcap", sent)
    names = [*(field.name for field in wire.HEADER_FIELDS), *PAYLOAD_FIELDS]
    fields = [argument for name in names for argument in ("-e", f"dblp.{name}")]
    lines = tshark(script, tmp_path / "a.pcap", "-T", "fields", *fields).splitlines()
    assert len(lines) == len(sent)
    rows = [[column.split(",") if column else [] for column in line.split("\t")] for line in lines]
    for row, datagram in zip(rows, sent, strict=True):
        columns = [[int(value, 0) for value in column] for column in row[: len(wire.HEADER_FIELDS)]]
        headers = [header for header, _ in parts(datagram.payload)]
        assert list(zip(*columns, strict=True)) == [tuple(header) for header in headers]
    nbytes, budgets, energies, masks, bits = (
        [value for row in rows for value in row[len(wire.HEADER_FIELDS) + index]]
        for index in range(len(PAYLOAD_FIELDS))
    )
    opens = list(payloads(sent, Type.OPEN, wire.decode_open))
    assert [int(value) for value in nbytes] == [message.spec.nbytes for message in opens]
    assert [float(value) for value in budgets] == pytest.approx([message.spec.budget for message in opens])
    assert [float(value) for value in energies] == pytest.approx([message.energy for message in opens])
    spaces = [
        space for feedback in payloads(sent, Type.FEEDBACK, wire.decode_feedback) for space in feedback.spaces
    ]
    assert [int(mask, 16) for mask in masks] == [
        space.masks >> 64 * index & (1 << 64) - 1 for space in spaces for index in range(space.count)
    ]
    assert bits == [final.bits.hex() for final in payloads(sent, Type.FINAL, wire.decode_final) if final.bits]


@needs_tshark
def test_tshark_shows_a_state_with_its_ranks(script, tmp_path):
    from tests.transport.test_capture import datagram

    write_pcap(tmp_path / "state.pcap", [datagram(record(Type.STATE, encode_state(STATE, asks=False)))])
    names = ("asks", "stand", "waits_for", "silent", "waits_for.rank", "silent.rank")
    fields = [argument for name in names for argument in ("-e", f"dblp.state.{name}")]
    (line,) = tshark(script, tmp_path / "state.pcap", "-T", "fields", *fields).splitlines()
    assert line.split("\t") == ["0", "1", "2", "3", "1,7", "7,300,5"]


@needs_tshark
def test_tshark_tells_garbage_and_cuts(sent, script, tmp_path):
    from tests.transport.test_capture import datagram

    odd = [
        datagram(record(Type.PING) + b"\x01" * 60),
        datagram(record(Type.OPEN, b"xy")),
        datagram(bytes(100)),
    ]
    write_pcap(tmp_path / "odd.pcap", odd)
    lines = tshark(script, tmp_path / "odd.pcap", "-T", "json")
    layers = [packet["_source"]["layers"] for packet in json.loads(lines)]
    assert ["dblp.malformed" in json.dumps(layer) for layer in layers] == [True, True, False]
    assert ["dblp" in layer for layer in layers] == [True, True, False]
    write_pcap(tmp_path / "cut.pcap", sent, snaplen=128)
    out = tshark(script, tmp_path / "cut.pcap", "-Y", "dblp.cut", "-T", "fields", "-e", "frame.number")
    cut = [n for n, d in enumerate(sent, 1) if len(d.payload) + 42 > 128]
    assert {int(line) for line in out.split()} <= set(cut) and len(out.split()) > 0.9 * len(cut)


def parts(payload):
    """The records of a datagram: headers and payloads."""
    at = 0
    while at < len(payload):
        header = wire.decode_header(payload, at)
        yield header, payload[at + HEADER_BYTES :][: header.length]
        at += HEADER_BYTES + header.length


def payloads(sent, type_, decode):
    return (
        decode(body) for datagram in sent for header, body in parts(datagram.payload) if header.type == type_
    )
