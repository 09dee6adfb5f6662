"""Wire format: every codec gives back what it was given, and no decoder raises on garbage."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dblp.transport import wire
from dblp.transport.message import UNTAGGED, MessageSpec, most_critical
from dblp.transport.policy import Stop

U8, U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32, 64))
FLOATS = st.floats(allow_nan=False)
HEADERS = st.builds(wire.Header, U8, U8, U8, U8, U8, U8, U16, U64, U64, U32, U32, U32, U32, U32, U16, U16)
SPECS = st.builds(
    MessageSpec,
    nbytes=U64 | st.integers(0, 100),
    chunk_bytes=st.integers(1, (1 << 32) - 1),
    budget=st.floats(0.0, 1.0, exclude_max=True),
    stop=st.sampled_from(Stop),
    stop_after_s=FLOATS,
)
SPACES = st.integers(0, 255).flatmap(
    lambda count: st.builds(
        wire.Space, U8, U32, st.just(count), st.integers(0, (1 << 64 * count) - 1 if count else 0)
    )
)
FEEDBACKS = st.builds(
    wire.Feedback,
    U32,
    U32,
    U32,
    st.booleans(),
    st.lists(st.tuples(U64, U32), max_size=wire.MAX_GRANTS).map(tuple),
    st.lists(SPACES, max_size=4).map(tuple),
    U32,
    U8,
    U32,
)
FINALS = st.integers(1, 65_535).flatmap(
    lambda parts: st.builds(wire.Final, st.integers(0, parts - 1), st.just(parts), st.binary(max_size=384))
)
DECODERS = (wire.decode_open, wire.decode_feedback, wire.decode_final, wire.decode_left)


@given(HEADERS)
def test_a_header_is_48_bytes_and_comes_back(header):
    data = wire.encode_header(header)
    assert len(data) == 48
    assert wire.decode_header(data) == header
    assert wire.Header(*wire.decode_header_from(b"xx" + data, 2)) == header
    assert wire.encode_fields(*header) == data


@given(HEADERS)
def test_the_dtype_reads_what_the_struct_wrote(header):
    row = np.frombuffer(wire.encode_header(header), wire.HEADER)[0]
    assert row.item() == tuple(header)


def test_a_header_of_known_bytes():
    header = wire.Header(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
    expected = (
        "0102030405060007000000000000000800000000000000090000000a0000000b0000000c0000000d0000000e000f0010"
    )
    assert wire.encode_header(header).hex() == expected


def test_47_bytes_are_no_header():
    with pytest.raises(struct.error):
        wire.decode_header(bytes(47))


@given(HEADERS, U8, U8, U8, st.integers(0, 1 << 40), st.floats(0, 1e9), U32)
def test_a_stamp_changes_what_varies_and_nothing_else(header, cls, path, count, burst, now, watermark):
    head = bytearray(wire.encode_header(header))
    wire.stamp(head, cls, path, count, burst, now, watermark)
    expected = header._replace(
        cls=cls,
        path=path,
        count=count,
        burst=burst & 0xFFFFFFFF,
        sent_at=wire.clock_us(now),
        watermark=watermark,
    )
    assert wire.decode_header(head) == expected


@st.composite
def opens(draw: st.DrawFn) -> wire.Open:
    spec = draw(SPECS)
    counts = UNTAGGED
    if spec.chunks < 1 << 32 and draw(st.booleans()):
        cuts = sorted(draw(st.integers(0, spec.chunks)) for _ in range(3))
        cuts[0] = min(cuts[0], most_critical(spec.chunks))
        counts = (cuts[0], cuts[1] - cuts[0], cuts[2] - cuts[1], spec.chunks - cuts[2])
    inline = b""
    if 0 < spec.nbytes <= min(spec.chunk_bytes, 1000) and draw(st.booleans()):
        inline = draw(st.binary(min_size=spec.nbytes, max_size=spec.nbytes))
    return wire.Open(spec, draw(st.binary(max_size=255)), draw(FLOATS), counts, inline)


@given(opens())
def test_open_comes_back(opened):
    assert wire.decode_open(wire.encode_open(opened)) == opened


@pytest.mark.parametrize("counts", [(11, 89, 0, 0), (0, 0, 0, 99), (10, 90, 1, 0), (100, 0, 0, 0)])
def test_an_open_whose_classes_do_not_fit_makes_no_sense(counts):
    spec = MessageSpec(nbytes=1600, chunk_bytes=16, budget=0.5)
    assert wire.decode_open(wire.encode_open(wire.Open(spec, b"", 0.0, counts))) is None
    assert wire.decode_open(wire.encode_open(wire.Open(spec, b"", 0.0, (10, 30, 60, 0)))) is not None


@given(FEEDBACKS)
def test_feedback_comes_back(feedback):
    payload = wire.encode_feedback(feedback)
    assert wire.decode_feedback(payload) == feedback
    sizes = sum(wire.SPACE_BYTES + 8 * space.count for space in feedback.spaces)
    assert len(payload) == wire.FEEDBACK_BYTES + wire.GRANT_BYTES * len(feedback.grants) + sizes


@given(FINALS)
def test_final_comes_back(final):
    assert wire.decode_final(wire.encode_final(final)) == final


@given(st.lists(st.booleans(), max_size=8000).map(lambda have: np.array(have, np.bool_)))
def test_the_parts_of_final_give_the_missing_chunks(have):
    parts = wire.final_parts(have)
    assert [part.part for part in parts] == list(range(len(parts)))
    assert all(len(wire.encode_final(part)) <= 4 + wire.FINAL_PART_BYTES for part in parts)
    bits = b"".join(part.bits for part in parts)
    assert wire.missing_from_bits(bits, len(have)).tolist() == np.flatnonzero(~have).tolist()


@pytest.mark.parametrize("decode", DECODERS)
@given(garbage=st.binary(max_size=300))
def test_no_decoder_raises_on_garbage(decode, garbage):
    decode(garbage)


@given(
    st.one_of(
        opens().map(lambda m: (wire.decode_open, wire.encode_open(m))),
        FEEDBACKS.map(lambda m: (wire.decode_feedback, wire.encode_feedback(m))),
        FINALS.map(lambda m: (wire.decode_final, wire.encode_final(m))),
    ),
    st.data(),
)
def test_no_decoder_raises_on_cut_or_flipped_payloads(coded, data):
    decode, payload = coded
    cut = data.draw(st.integers(0, len(payload)))
    decode(payload[:cut])
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    flipped = bytearray(payload)
    flipped[bit // 8] ^= 1 << bit % 8
    decode(bytes(flipped))


@pytest.mark.parametrize("budget", [float("nan"), -0.1, 1.0, float("inf")])
def test_an_open_with_an_impossible_budget_makes_no_sense(budget):
    spec = MessageSpec(nbytes=100, chunk_bytes=16)
    payload = bytearray(wire.encode_open(wire.Open(spec, b"", 0.0)))
    struct.pack_into("<d", payload, 12, budget)
    assert wire.decode_open(bytes(payload)) is None


def test_payloads_that_contradict_themselves_make_no_sense():
    opened = wire.encode_open(wire.Open(MessageSpec(nbytes=100, chunk_bytes=16), b"signature", 0.0))
    assert wire.decode_open(opened[:-1]) is None
    assert wire.decode_open(opened + b"x") is None  # neither nothing nor all of the message
    assert wire.decode_open(opened + bytes(100)) is None  # all of it, but it has several chunks
    short = wire.encode_open(wire.Open(MessageSpec(nbytes=16, chunk_bytes=16), b"signature", 0.0))
    assert wire.decode_open(short + bytes(15)) is None
    found = wire.decode_open(short + bytes(16))
    assert found is not None and found.data == bytes(16)
    assert wire.decode_final(wire.encode_final(wire.Final(3, 3, b""))) is None
    space = wire.Space(1, 0, 2, 5)
    feedback = wire.encode_feedback(wire.Feedback(0, 0, 0, False, (), (space,)))
    assert wire.decode_feedback(feedback[:-1]) is None


@given(st.integers(0, 1 << 40), st.integers(-(1 << 31), (1 << 31) - 1))
def test_times_are_told_apart_across_the_wrap(start, delta):
    later = (start + delta) & 0xFFFFFFFF
    assert wire.since_us(start & 0xFFFFFFFF, later) == pytest.approx(delta * 1e-6)


@given(st.integers(0, (1 << 20)), st.integers(0, 200))
def test_indices_are_those_of_the_wire(first, count):
    expected = np.arange(first, first + count, dtype=">u4").tobytes()
    assert wire.wire_indices(first, first + count).tobytes() == expected


def test_the_table_of_indices_does_not_grow_for_garbage():
    top = (1 << 32) - 1
    assert (
        wire.wire_indices(top - 3, top).tobytes()
        == np.arange(top - 3, top, dtype=np.int64).astype(">u4").tobytes()
    )
    assert len(wire._index_table) <= wire.MAX_INDEX_TABLE


@given(U32)
def test_one_index_is_the_same_as_in_the_table(value):
    assert wire.wire_index(value) == int(np.array([value], ">u4").view("<u4")[0])
    assert wire.wire_sequence(value, 1)[0] == wire.wire_index(value)


def test_sequences_wrap_at_32_bits():
    expected = np.array([0xFFFFFFFF, 0, 1], ">u4").tobytes()
    assert wire.wire_sequence(0xFFFFFFFF, 3).tobytes() == expected


@given(U32, st.integers(1, 64))
@example(0xFFFF, 1)
@example(0xFFFF, 2)
@example(0x1FFC0, 64)
@example(0x1FFC1, 64)
def test_sequences_are_consecutive_numbers(first, count):
    expected = (np.arange(first, first + count, dtype=np.int64) % (1 << 32)).astype(">u4").tobytes()
    assert wire.wire_sequence(first, count).tobytes() == expected
