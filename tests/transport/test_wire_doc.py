"""docs/wire.md is what ``python -m dblp.transport.wire_doc`` prints, and its tables are those that the code uses."""

from pathlib import Path

import msgpack

from dblp.errors import DeadlineError
from dblp.transport import abort, handshake, wire, wire_doc
from dblp.transport.handshake import Identity

PAGE = Path(__file__).parent.parent.parent / "docs" / "wire.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == wire_doc.page(), "run: python -m dblp.transport.wire_doc > docs/wire.md"


def test_every_header_field_stands_at_its_offset():
    page = wire_doc.page()
    assert wire.HEADER.fields is not None
    for name in wire.HEADER.names or ():
        dtype, offset = wire.HEADER.fields[name][:2]
        assert f"| {offset} | {dtype.itemsize} | `{name}` |" in page


def test_every_type_has_a_meaning():
    for type_ in wire.Type:
        assert f"| {int(type_)} | `{type_.name}` | {type_.meaning} |" in wire_doc.page()
        assert type_.meaning.endswith(".")


def test_the_handshake_says_only_what_the_page_explains():
    identity = Identity(rank=1, world_size=2, generation=0, paths=1, datagram_bytes=1464, window_bytes=65_536)
    assert set(identity.to_map()) | {"nonce", "cookie", "pad", "why"} == set(handshake.KEYS)


def test_an_abort_says_only_what_the_page_explains():
    body = msgpack.unpackb(abort.encode_abort(DeadlineError("late", [3])))
    assert set(body) == set(wire.ABORT_KEYS)
