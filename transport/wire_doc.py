"""Writes docs/wire.md from the tables of ``wire`` and ``handshake``: ``python -m dblp.transport.wire_doc > docs/wire.md``.

A test compares the file with ``page()``, so it cannot fall behind the code.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Sequence

from dblp.transport import handshake, standing, wire
from dblp.transport.config import CHUNK_ALIGN_BYTES, HEADER_BYTES
from dblp.transport.wire import Field, Type

_HEAD = f"""\
# Wire format

Protocol version {wire.VERSION}. This page is made from the code by `python -m dblp.transport.wire_doc > docs/wire.md`.

A datagram is a header of {HEADER_BYTES} bytes and a payload. The header is big-endian. Payloads of control datagrams are
little-endian, as every host is that torch runs on; HELLO states the byte order, and a peer of another one refuses. Chunks are
the bytes of the sender's array as they are in memory, a multiple of {CHUNK_ALIGN_BYTES} bytes long but for the message's last.

Datagrams leave in bursts of at most {wire.BURST_DATAGRAMS}: all of a burst are of one message, path and class, have one
length but for the last, and share every header field but `position`, `chunk`, `contributions` and `length`. The packet number
of a datagram, within its (path, class), is (`burst`, `position`). FEEDBACK acknowledges packet numbers, by one mask of 64 bits
a burst over a window of up to {wire.MASK_WINDOW} bursts, so that any feedback makes up for those that were lost before it.
Everything but FEEDBACK and the handshake is acknowledged so. Lost OPEN, FINAL, ABORT and LEFT are sent again, with a new
packet number.

A datagram of any type but DATA and the handshake may be a bundle: after the payload of its first record, as long as `length`
says, the next record follows with its own header and packet number, up to the datagram's end.

The first byte is the version in all versions, and `type`, `rank` and `session` keep their places. A datagram of another session
is dropped; one of our session and another version ends the handshake with an error on both sides.

## Header
"""

_HANDSHAKE = f"""\
The payloads are msgpack maps; unknown keys are ignored. The higher rank sends HELLO with an empty cookie, on each path, at
growing distances until it is answered. The lower one holds no state for it: it sends RETRY with a cookie, a keyed hash of the
source address and the nonce. HELLO with this cookie proves the address, and is answered by WELCOME, or by REFUSE if the two do
not fit together. A HELLO is padded to {handshake.HELLO_BYTES} bytes of payload and a shorter one is ignored, so no answer to
an unproved address is longer than what asked for it.

The lower rank is done when it sends WELCOME, which may be lost: it answers HELLOs for as long as it lives, and one that leaves
repeats WELCOME and PING until it has a sign of life of each higher rank. CLOSE or ABORT of a peer that has no proved path yet
ends the handshake with an error.
"""

_TAILS = {
    "OPEN": "The signature follows, at most 32 bytes: the collective and all of its arguments that the ranks must agree on. What "
    "is left of the payload is the message itself, `nbytes` long: a message of one chunk that fits comes so, without any DATA.",
    "FEEDBACK": "Then `grants` of these:",
    "STATE": "Then the ranks of both lists, 2 bytes each. The message id names the round.",
    "FINAL": "Then this part of the bitmap: bit i of byte j says that chunk 8 j + i of the part was counted.",
}


def page() -> str:
    """The text of docs/wire.md."""
    return "\n".join(
        [
            _HEAD,
            _field_table(wire.HEADER_FIELDS, ">"),
            "## Types\n",
            _table(("Type", "Name", "Meaning"), ((str(int(t)), f"`{t.name}`", t.meaning) for t in Type)),
            "DATA carries one chunk. END, PING, CLOSE and CLOSING have no payload.\n",
            "## OPEN\n",
            _field_table(wire.OPEN_FIELDS, "<"),
            _TAILS["OPEN"] + "\n",
            "## FEEDBACK\n",
            f"It speaks of one path, and holds at most {wire.MAX_GRANTS} grants and one space a class.\n",
            _field_table(wire.FEEDBACK_FIELDS, "<"),
            _TAILS["FEEDBACK"] + "\n",
            _field_table(wire.GRANT_FIELDS, "<"),
            "Then `spaces` of these, each followed by `count` masks of 8 bytes:\n",
            _field_table(wire.SPACE_FIELDS, "<"),
            "## FINAL\n",
            _field_table(wire.FINAL_FIELDS, "<"),
            _TAILS["FINAL"] + "\n",
            "## LEFT\n",
            _field_table(wire.LEFT_FIELDS, "<"),
            "## STATE\n",
            _field_table(standing.STATE_FIELDS, "<"),
            _TAILS["STATE"] + "\n",
            "## ABORT\n",
            _key_table(wire.ABORT_KEYS),
            "## HELLO, RETRY, WELCOME, REFUSE\n",
            _HANDSHAKE,
            _key_table(handshake.KEYS),
        ]
    )


def _field_table(fields: Sequence[Field], order: str) -> str:
    rows = []
    offset = 0
    for field in fields:
        size = struct.calcsize(order + field.code)
        kind = f"float{8 * size}" if field.code == "d" else f"uint{8 * size}"
        rows.append((str(offset), str(size), f"`{field.name}`", kind, field.meaning))
        offset += size
    return _table(("Byte", "Bytes", "Field", "Type", "Meaning"), rows)


def _key_table(keys: dict[str, str]) -> str:
    return _table(("Key", "Meaning"), ((f"`{key}`", meaning) for key, meaning in keys.items()))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    sys.stdout.write(page())
