"""The string that names a method: what it gives, and where its faults are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.collectives.compression.base import Method
from dblp.collectives.compression.registry import METHODS, parse_compression
from dblp.collectives.compression.topk import TopK
from dblp.errors import ConfigError
from tests.collectives.compression.cases import TEXTS


@pytest.mark.parametrize("text", TEXTS)
def test_str_parses_to_an_equal_method(text):
    method = parse_compression(text)
    assert isinstance(method, Method) and parse_compression(str(method)) == method


def test_names_and_defaults():
    assert parse_compression(" topk ( ratio = 0.01 ) ") == TopK(ratio=0.01)
    assert parse_compression("sign") == parse_compression("sign()")
    for name, method in METHODS.items():
        assert method.name == name and method.__doc__


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ("", 1, "expected the name of a method"),
        ("zip", 1, "'zip' is no compression method; known are none, topk"),
        ("topk", 5, r"expected '\('"),
        ("topk()", 6, "lacks ratio"),
        ("topk(ratio=2)", 12, r"a share in \(0, 1\]"),
        ("topk(0.1,0.2,0.3)", 10, "full or fp16"),
        ("topk(size=3)", 6, "topk has no 'size'"),
        ("topk(0.1) x", 11, "the end after topk"),
        ("topk(0.1) over bounded", 11, "a form of dblp train alone, attach takes policy="),
        ("topk(0.1)over bounded", 10, "'METHOD over POLICY', with spaces"),
        ("topk(0.1); sign", 10, "lists of methods are for commands"),
        ("accordion(0.1,0.9)", 1, r"critical=0.1 is below tolerant=0.9"),
        ("gloo:topk(0.1)", 1, "a form of dblp train alone, a model on gloo takes compress_ddp"),
        ("int8(block=1)", 12, r"2 to 2\^24 elements"),
        ("powersgd(0)", 10, "a rank of 1 to 4096"),
        ("sign(1)", 6, "too many values"),
    ],
)
def test_a_fault_is_named_with_its_column(text, column, words):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_compression(text)
    assert str(caught.value).startswith(f"compression, column {column}: ")


@settings(max_examples=80, deadline=None)
@given(st.text(alphabet="topkdgc(),=.0123 ratio", max_size=20))
def test_any_text_parses_or_is_refused(text):
    try:
        method = parse_compression(text)
    except ConfigError as error:
        assert str(error).startswith("compression, column ")
    else:
        assert parse_compression(str(method)) == method
